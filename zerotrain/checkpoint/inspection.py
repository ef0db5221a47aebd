"""What a checkpoint holds, and whether it is intact, in words."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
import xxhash

from zerotrain.checkpoint import folders
from zerotrain.checkpoint import manifest as manifests
from zerotrain.checkpoint.format import MANIFEST, OPTIMIZER, StoredTensor, raw, read_header
from zerotrain.checkpoint.manifest import Manifest
from zerotrain.checkpoint.reader import Checkpoint, Files, manifest_of
from zerotrain.checkpoint.source import MASTER, Source, TensorInfo
from zerotrain.checkpoint.states import Run
from zerotrain.config import ConfigError, load_config
from zerotrain.errors import CheckpointError

BLOCK = 8 << 20
"""Bytes read at a time."""
_SHOWN = 3
"""Files or tensors named where there are many."""
_STEP = re.compile(r"step-\d+")
_OPTIMIZER_FILES = f"{OPTIMIZER}-*-of-*.safetensors"


# -- a folder of checkpoints ------------------------------------------------------------------------------------------


def checkpoint_folders(path: Path, tag: str | None = None) -> list[Path]:
    """The folders of the checkpoint `tag`, or of the one that `path` itself is; empty where it is no checkpoint of ours."""
    if tag is not None:
        try:
            return [folder for folder in folders.folders_of(path, tag) if (folder / MANIFEST).exists()]
        except CheckpointError:
            return []  # whatever else has that name
    return [path] if (path / MANIFEST).is_file() else []


def tags_of(path: Path) -> list[str]:
    """The checkpoints in `path`, also those that lost their manifest; empty for anything else."""
    if not path.is_dir() or (path / MANIFEST).is_file():
        return []
    named = folders.tags(path)
    lost = [e.name for e in path.iterdir() if _STEP.fullmatch(e.name) and next(e.glob(_OPTIMIZER_FILES), None)]
    return sorted({*named, *lost})


def listing(root: Path, verify: bool = False) -> Iterator[tuple[str, list[str]]]:
    """One line for each checkpoint in `root`, and what is wrong with it; `verify` reads all of it to know."""
    try:
        latest, problem = folders.latest(root), None
    except CheckpointError as error:
        latest, problem = None, str(error)
    tags = tags_of(root)
    width = max(map(len, tags), default=0)
    for tag in tags:
        facts, problems = _glance(root, tag)
        if verify and not problems:
            problems = list(damage(folders.folders_of(root, tag)))
        marks = ["latest"] * (tag == latest) + ["damaged"] * bool(problems)
        yield f"{tag:<{width}}  {'  '.join([*facts, *marks])}", problems
    if problem is None and latest is not None and latest not in tags:
        problem = f"the file '{folders.LATEST}' names {latest}, which is not there"
    if problem is not None:
        yield folders.LATEST, [problem]


def _glance(root: Path, tag: str) -> tuple[list[str], list[str]]:
    checked: list[Manifest] = []
    problems = []
    for folder in folders.folders_of(root, tag):
        try:
            checked.append(folders.check(folder))
        except CheckpointError as error:
            problems.append(str(error))
    if not checked:
        return [], problems
    size = sum(int(about["bytes"]) for manifest in checked for about in manifest.files.values())
    parts = checked[0].parts
    nodes = [f"{len(checked)} of {parts} nodes' folders"] if parts > 1 else []
    return [f"step {checked[0].step}", spell_bytes(size), *nodes], problems


# -- one checkpoint ---------------------------------------------------------------------------------------------------


def describe(source: Source) -> Iterator[str]:
    """What the source holds."""
    manifest = manifest_of(source)
    yield f"{_kind(source)} {source.path}"
    if manifest is not None:
        yield from _facts(manifest)
    yield from _sizes(source)
    if manifest is not None:
        yield from _optimizer(manifest)
        yield from _config(manifest)
    if isinstance(source, Checkpoint):
        yield from _nodes(source)


def tensor_lines(source: Source) -> Iterator[str]:
    """One line for each tensor: dtype, shape, name, and the file where that is known."""
    where = source.parts[0].tensors if isinstance(source, Checkpoint) else {}
    for key, info in [*source.weights.items(), *source.states.items()]:
        file = f"  {where[key].file}" if key in where else ""
        yield f"  {_dtype(info):<9} {_shape(info):<16} {key}{file}"
    for alias, first in source.tied.items():
        yield f"  {'tied':<9} {'':<16} {alias} is {first}"


def _kind(source: Source) -> str:
    if isinstance(source, Checkpoint):
        return "checkpoint"
    return {"SafetensorsSource": "safetensors", "DcpSource": "torch.distributed.checkpoint", "TorchSource": "torch.save",
            "DeepSpeedSource": "DeepSpeed"}.get(type(source).__name__, type(source).__name__)  # fmt: skip


def _facts(manifest: Manifest) -> Iterator[str]:
    progress, topology = manifest.section("progress") or {}, manifest.section("topology") or {}
    counts = ", ".join(f"{n:,.0f} {key.replace('_', ' ')}" for key, n in progress.items() if key != "step" and n)
    yield _row("step", f"{progress.get('step')}" + (f" ({counts})" if counts else ""))
    yield _row(
        "written by",
        f"{topology.get('world_size')} ranks, ZeRO stage {topology.get('stage')}, dp_replicate "
        f"{topology.get('dp_replicate')} x dp_shard {topology.get('dp_shard')}",
    )


def _sizes(source: Source) -> Iterator[str]:
    kinds: dict[str, list[TensorInfo]] = {"weights": list(source.weights.values())}
    for key, info in source.states.items():
        state = key.rpartition("/")[2]
        kinds.setdefault("master weights" if state == MASTER else f"state {state}", []).append(info)
    for kind, infos in kinds.items():
        yield _row(kind, _sum(infos))
    if len(kinds) > 1:
        yield _row("together", _sum([info for infos in kinds.values() for info in infos]))
    if source.tied:
        yield _row("tied", _few([f"{alias} is {first}" for alias, first in source.tied.items()]))


def _sum(infos: Sequence[TensorInfo]) -> str:
    elements, size = sum(info.numel for info in infos), sum(info.nbytes for info in infos)
    dtypes = ", ".join(dict.fromkeys(map(_dtype, infos)))
    return f"{len(infos)} tensors, {elements:,} elements, {spell_bytes(size)}" + (f" ({dtypes})" if dtypes else "")


def _optimizer(manifest: Manifest) -> Iterator[str]:
    yield _row("optimizer", manifest.section("class") or "none")
    for index, group in enumerate(manifest.section("groups") or ()):
        settings = ", ".join(f"{key} {value}" for key, value in group["settings"].items() if value is not None)
        yield _row(f"  group {index}", f"{len(group['params'])} parameters: {settings}")
    scheduler = manifest.section("scheduler")
    if scheduler:
        yield _row("scheduler", str(scheduler["class"]))


def _config(manifest: Manifest) -> Iterator[str]:
    try:
        defaults = _flat(load_config({}).dump())
    except ConfigError:
        defaults = {}
    here = _flat(manifest.section("config") or {})
    changed = [
        f"{key} = {json.dumps(value)}" for key, value in here.items() if key not in defaults or defaults[key] != value
    ]
    yield _row("config", "other than the defaults:" if changed else "the defaults")
    yield from (f"  {line}" for line in changed)


def _flat(value: Any, path: str = "") -> dict[str, Any]:
    if not isinstance(value, Mapping) or not value:
        return {path: value}
    return {
        key: leaf
        for name, item in value.items()
        for key, leaf in _flat(item, f"{path}.{name}" if path else str(name)).items()
    }


def _nodes(source: Checkpoint) -> Iterator[str]:
    parts = source.manifest.parts
    if parts > 1:
        here = ", ".join(part.files.folder.name for part in source.parts)
        yield _row("nodes", f"{len(source.parts)} of {parts} folders are here: {here}")


def _row(name: str, text: str) -> str:
    return f"{name:<20} {text}"


def _dtype(info: TensorInfo) -> str:
    return str(info.dtype).removeprefix("torch.")


def _shape(info: TensorInfo) -> str:
    return "x".join(map(str, info.shape)) or "scalar"


def _few(items: Sequence[str]) -> str:
    more = f" and {len(items) - _SHOWN} more" if len(items) > _SHOWN else ""
    return ", ".join(items[:_SHOWN]) + more


def spell_bytes(count: float) -> str:
    """A number of bytes for people: `1.5 GB`."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:,.1f} TB"


# -- intact? ----------------------------------------------------------------------------------------------------------


class Stored(Protocol):
    """Tensors in the files of one folder."""

    @property
    def files(self) -> Files:
        """The files."""

    @property
    def tensors(self) -> dict[str, StoredTensor]:
        """The tensors by key."""

    @property
    def offsets(self) -> dict[str, int]:
        """Byte offset in its file of each."""


def checked_runs(part: Stored, key: str, fragment: tuple[int, int, str]) -> Iterator[Run]:
    """The values of a fragment, a block at a time; a block's memory is used again for the next.

    CheckpointError, at the end, where they do not have the checksum that was written, and where they cannot be read.
    """
    start, stop, digest = fragment
    tensor = part.tensors[key]
    dtype = tensor.info.dtype
    step = max(1, BLOCK // dtype.itemsize)
    memory = torch.empty(min(step, stop - start), dtype=dtype)
    hasher = xxhash.xxh3_64()
    for low in range(start, stop, step):
        block = memory[: min(step, stop - low)]
        part.files.read(tensor.file, part.offsets[key] + low * dtype.itemsize, dtype, block)
        hasher.update(raw(block))
        yield Run(key, low, block)
    if hasher.hexdigest() != digest:
        raise CheckpointError(
            f"tensor '{key}' is damaged in {part.files.folder / tensor.file}: elements {start} to {stop} do not have the "
            "checksum that was written"
        )


class _Readable:
    """What can be read of a folder whose files may be damaged."""

    def __init__(self, folder: Path, tensors: dict[str, StoredTensor]) -> None:
        self.files = Files(folder)
        self.tensors = tensors
        self.offsets: dict[str, int] = {}


def damage(paths: Iterable[Path]) -> Iterator[str]:
    """Everything that is wrong with the folders of a checkpoint, a line for each tensor and file."""
    for folder in paths:
        try:
            manifest = manifests.load(folder)
        except CheckpointError as error:
            yield str(error)
            continue
        part = _Readable(folder, manifest.tensors())
        try:
            for name, about in manifest.files.items():
                yield from _file_damage(part, name, about)
            yield from _tensor_damage(part, manifest)
        finally:
            part.files.close()


def _file_damage(part: _Readable, name: str, about: Mapping[str, Any]) -> Iterator[str]:
    """What is wrong with a file. The tensors that its header describes get their offsets."""
    path = part.files.folder / name
    try:
        size = path.stat().st_size
        if size != about["bytes"]:
            yield f"{path} is damaged: it has {size} bytes and should have {about['bytes']}"
        elif "checksum" in about and manifests.checksum(path.read_bytes()) != about["checksum"]:
            yield f"{path} is damaged: its checksum is not the one written"
        elif "checksum" not in about:
            header = read_header(path)
            for key, tensor in part.tensors.items():
                if tensor.file == name and key in header and header[key][0] == tensor.info:
                    part.offsets[key] = header[key][1]
    except OSError as error:
        yield f"{path} cannot be read: {error}"
    except CheckpointError as error:
        yield str(error)


def _tensor_damage(part: _Readable, manifest: Manifest) -> Iterator[str]:
    for key, tensor in part.tensors.items():
        if key not in part.offsets:
            yield f"tensor '{key}' cannot be checked: {part.files.folder / tensor.file} is damaged"
            continue
        if manifest.parts == 1 and tensor.missing():
            yield f"tensor '{key}' was not written whole"
        for fragment in tensor.fragments:
            try:
                for _ in checked_runs(part, key, fragment):
                    pass
            except CheckpointError as error:
                yield str(error)


def unreadable(source: Source) -> Iterator[str]:
    """What cannot be read of a source without checksums, a line for each tensor."""
    for key, info in [*source.weights.items(), *source.states.items()]:
        step = max(1, BLOCK // info.dtype.itemsize)
        try:
            for start in range(0, info.numel, step):
                stop = min(start + step, info.numel)
                source.read(key, start, stop, torch.empty(stop - start, dtype=info.dtype))
        except CheckpointError as error:
            yield str(error)
