"""Reading checkpoints by ranges of bytes: zerotrain's own, and safetensors files of Hugging Face."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
import xxhash

from zerotrain.checkpoint import folders
from zerotrain.checkpoint.format import INDEX, MANIFEST, StoredTensor, file_name, raw, read_header
from zerotrain.checkpoint.importers import IMPORTERS
from zerotrain.checkpoint.manifest import Manifest
from zerotrain.checkpoint.manifest import checksum as checksum_of
from zerotrain.checkpoint.source import Source, TensorInfo
from zerotrain.errors import CheckpointError

BLOCK = 8 << 20
"""Bytes read at a time where they cannot be read in place."""


class Files:
    """Open files of one folder, read at offsets."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._handles: dict[str, int] = {}

    def read_bytes(self, name: str, offset: int, out: memoryview) -> None:
        """Fill `out` from byte `offset` on; CheckpointError where the file cannot be read or is too short."""
        try:
            if name not in self._handles:
                self._handles[name] = os.open(self.folder / name, os.O_RDONLY | os.O_CLOEXEC)
            while out:
                count = os.preadv(self._handles[name], [out], offset)
                if count == 0:
                    raise CheckpointError(f"{self.folder / name} ends at byte {offset}: it is truncated")
                out, offset = out[count:], offset + count
        except OSError as error:
            raise CheckpointError(f"{self.folder / name} cannot be read: {error}") from error

    def read(self, name: str, offset: int, dtype: torch.dtype, out: torch.Tensor) -> None:
        """Fill the 1-d `out` with values of `dtype` that lie from byte `offset` on, in place where that can be."""
        if out.dtype == dtype and out.device.type == "cpu" and out.is_contiguous():
            if out.numel():
                self.read_bytes(name, offset, raw(out))
            return
        for piece in out.split(BLOCK // dtype.itemsize):
            block = torch.empty(piece.numel(), dtype=dtype)
            self.read_bytes(name, offset, raw(block))
            piece.copy_(block)
            offset += block.nbytes

    def close(self) -> None:
        """Close what was opened."""
        for handle in self._handles.values():
            os.close(handle)
        self._handles.clear()

    def __del__(self) -> None:
        self.close()


# -- safetensors ------------------------------------------------------------------------------------------------------


@dataclass
class SafetensorsSource(Source):
    """A single safetensors file, or a folder of them with an index."""

    places: dict[str, tuple[str, int]] = field(default_factory=dict)
    files: Files | None = None

    def read(self, key: str, start: int, stop: int, out: torch.Tensor) -> None:
        """See `Source.read`."""
        name, offset = self.places[key]
        info = self.weights[key]
        assert self.files is not None
        self.files.read(name, offset + start * info.dtype.itemsize, info.dtype, out[: stop - start])

    def close(self) -> None:
        """Close the files."""
        if self.files is not None:
            self.files.close()


def opens_safetensors(path: Path) -> bool:
    """Whether `path` is a safetensors file, or a folder with such weights under the names of Hugging Face."""
    if path.is_dir():
        return any((path / name).is_file() for name in (INDEX, "model.safetensors"))
    return path.suffix == ".safetensors"


def open_safetensors(path: Path) -> SafetensorsSource:
    """The tensors of a safetensors file, or of those that an index names."""
    folder, wanted = (path, None) if path.is_dir() else (path.parent, path.name)
    if wanted is None and not (folder / INDEX).is_file():
        wanted = "model.safetensors"
    weights: dict[str, TensorInfo] = {}
    places: dict[str, tuple[str, int]] = {}
    if wanted is not None:
        for key, (info, offset) in read_header(folder / wanted).items():
            weights[key], places[key] = info, (wanted, offset)
        return SafetensorsSource(path, weights, places=places, files=Files(folder))
    for name, keys in _by_file(folder / INDEX).items():
        if not (folder / name).is_file():
            raise CheckpointError(f"{folder / INDEX} names the file {name}, which is not there")
        header = read_header(folder / name)
        for key in keys:
            if key not in header:
                raise CheckpointError(f"{folder / INDEX} says that tensor '{key}' is in {name}, and it is not")
            weights[key], places[key] = header[key][0], (name, header[key][1])
    return SafetensorsSource(path, weights, places=places, files=Files(folder))


def _by_file(index: Path) -> dict[str, list[str]]:
    try:
        weight_map = json.loads(index.read_bytes())["weight_map"]
        found: dict[str, list[str]] = {}
        for key, name in weight_map.items():
            found.setdefault(file_name(name, str(index)), []).append(key)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{index} is not an index of safetensors files: {error!r}") from error
    return found


# -- zerotrain's own --------------------------------------------------------------------------------------------------


@dataclass
class _Part:
    """What one folder holds: a whole checkpoint, or what one node wrote of it."""

    manifest: Manifest
    files: Files
    tensors: dict[str, StoredTensor]
    offsets: dict[str, int]


@dataclass
class Checkpoint(Source):
    """A checkpoint of zerotrain, in one folder, or in those of its nodes' folders that are here."""

    parts: list[_Part] = field(default_factory=list)

    @property
    def manifest(self) -> Manifest:
        """What it says about itself; alike in all its folders but for the fragments."""
        return self.parts[0].manifest

    def read(self, key: str, start: int, stop: int, out: torch.Tensor) -> None:
        """See `Source.read`. Raises where the folders that are here lack a part of the run."""
        for part in self.parts:
            for low, high in _covered(part.tensors[key], start, stop):
                self._read(part, key, low, high, out[low - start : high - start])
        if len(self.parts) < self.manifest.parts:
            self.check_held(key, start, stop)

    def _read(self, part: _Part, key: str, start: int, stop: int, out: torch.Tensor) -> None:
        tensor = part.tensors[key]
        dtype = tensor.info.dtype
        try:
            part.files.read(tensor.file, part.offsets[key] + start * dtype.itemsize, dtype, out)
        except CheckpointError as error:
            raise CheckpointError(f"tensor '{key}': {error}") from error

    def check_held(self, key: str, start: int, stop: int) -> None:
        """CheckpointError where the folders that are here lack a part of the run."""
        runs = sorted(run for part in self.parts for run in _covered(part.tensors[key], start, stop))
        if sum(high - low for low, high in runs) < stop - start:
            here = ", ".join(part.files.folder.name for part in self.parts)
            raise CheckpointError(
                f"{self.path} holds only what some of the {self.manifest.parts} nodes wrote ({here}), and not all of "
                f"tensor '{key}'. Put the nodes' folders side by side, or together with `zerotrain merge`"
            )

    def verify(self, index: int = 0, of: int = 1) -> None:
        """Check the checksums of every `of`-th fragment, from number `index` on, and of the small files.

        CheckpointError names the damaged tensor and its file.
        """
        for part in self.parts:
            for name, about in part.manifest.files.items() if index == 0 else ():
                if "checksum" in about and checksum_of((part.files.folder / name).read_bytes()) != about["checksum"]:
                    raise CheckpointError(f"{part.files.folder / name} is damaged: its checksum is not the one written")
            fragments = ((key, f) for key, tensor in part.tensors.items() for f in tensor.fragments)
            for number, (key, (start, stop, digest)) in enumerate(fragments):
                if number % of == index and self._digest(part, key, start, stop) != digest:
                    raise CheckpointError(
                        f"tensor '{key}' is damaged in {part.files.folder / part.tensors[key].file}: elements {start} to "
                        f"{stop} do not have the checksum that was written. Use another checkpoint"
                    )

    def _digest(self, part: _Part, key: str, start: int, stop: int) -> str:
        tensor = part.tensors[key]
        size = tensor.info.dtype.itemsize
        offset, end = part.offsets[key] + start * size, part.offsets[key] + stop * size
        hasher, block = xxhash.xxh3_64(), memoryview(bytearray(min(BLOCK, end - offset)))
        while offset < end:
            piece = block[: min(BLOCK, end - offset)]
            part.files.read_bytes(tensor.file, offset, piece)
            hasher.update(piece)
            offset += len(piece)
        return hasher.hexdigest()

    def close(self) -> None:
        """Close the files."""
        for part in self.parts:
            part.files.close()


def _covered(tensor: StoredTensor, start: int, stop: int) -> Iterator[tuple[int, int]]:
    """The parts of `[start, stop)` that its fragments hold, neighbours put together."""
    low = high = start
    for first, last, _ in tensor.fragments:
        first, last = max(first, start), min(last, stop)
        if first >= last:
            continue
        if first != high:
            if low < high:
                yield low, high
            low = first
        high = last
    if low < high:
        yield low, high


def open_checkpoint(paths: Sequence[Path], name: Path) -> Checkpoint:
    """The checkpoint in `paths`: one whole folder, or folders of several nodes. `name` is used in messages."""
    parts = [_open_part(path) for path in paths]
    first = parts[0].manifest
    for part in parts[1:]:
        if part.manifest.state != first.state or part.manifest.parts != first.parts:
            raise CheckpointError(
                f"{part.files.folder} and {parts[0].files.folder} are not parts of the same checkpoint"
            )
    weights = {key: tensor.info for key, tensor in first.model.items()}
    states = {key: tensor.info for key, tensor in first.optimizer.items()}
    scalars = first.section("scalars") or {}
    return Checkpoint(name, weights, states, scalars, first.section("tied") or {}, parts=parts)


def _open_part(folder: Path) -> _Part:
    manifest = folders.check(folder)
    tensors = manifest.tensors()
    headers = {name: read_header(folder / name) for name in manifest.files if name.endswith(".safetensors")}
    offsets = {}
    for key, tensor in tensors.items():
        info, offsets[key] = headers.get(tensor.file, {}).get(key, (None, 0))
        if info != tensor.info:
            raise CheckpointError(f"{folder / tensor.file} and {folder / MANIFEST} disagree about tensor '{key}'")
        if manifest.parts == 1 and tensor.missing():
            raise CheckpointError(f"{folder / MANIFEST}: tensor '{key}' was not written whole")
    return _Part(manifest, Files(folder), tensors, offsets)


# -- whatever it is ---------------------------------------------------------------------------------------------------


def open_source(path: Path, tag: str | None = None) -> Source:
    """What there is to load at `path`: a folder of checkpoints (`tag` names one; None takes the latest), a checkpoint's
    own folder, or a foreign file or folder (see `importers`). CheckpointError where it is none of these, or damaged."""
    try:
        if tag is not None:
            return _open_tag(path, tag)
        if (path / MANIFEST).is_file():
            return open_checkpoint([path], path)
        newest = folders.latest(path) if path.is_dir() else None
        if newest is not None and newest in folders.tags(path):
            return _open_tag(path, newest)
        if opens_safetensors(path):
            return open_safetensors(path)
        for importer in IMPORTERS:
            if importer.opens(path):
                return importer.open_source(path)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    raise CheckpointError(_nothing_at(path))


def _open_tag(root: Path, tag: str) -> Source:
    try:
        paths = folders.folders_of(root, tag)
    except CheckpointError:
        foreign = root / folders.check_tag(tag)
        for importer in IMPORTERS:
            if importer.opens(foreign):
                return importer.open_source(foreign)
        raise
    if not (paths[0] / MANIFEST).is_file():
        return open_source(paths[0])
    return open_checkpoint(paths, root / tag)


def _nothing_at(path: Path) -> str:
    if not path.exists():
        return f"{path} does not exist, so nothing can be loaded from it"
    known = ", ".join(folders.tags(path)) if path.is_dir() else ""
    if known:
        return f"{path} has checkpoints ({known}), but no file `{folders.LATEST}` names one of them; give a tag"
    return (
        f"{path} is nothing that can be loaded: a folder of checkpoints, a checkpoint, a Hugging Face folder or file "
        "(safetensors or .bin), a DeepSpeed or a torch.distributed.checkpoint folder"
    )


def manifest_of(source: Source) -> Manifest | None:
    """The manifest, where the source is a checkpoint of zerotrain."""
    return source.manifest if isinstance(source, Checkpoint) else None
