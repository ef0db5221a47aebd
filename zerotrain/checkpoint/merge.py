"""One ordinary checkpoint from the folders that the nodes of a job wrote without a file system in common."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

from zerotrain.checkpoint import folders
from zerotrain.checkpoint import manifest as manifests
from zerotrain.checkpoint.export import write_header
from zerotrain.checkpoint.format import MANIFEST, FilePlan, StoredTensor
from zerotrain.checkpoint.inspection import checked_runs
from zerotrain.checkpoint.manifest import Manifest
from zerotrain.checkpoint.reader import Checkpoint, open_checkpoint
from zerotrain.checkpoint.states import Run
from zerotrain.checkpoint.writer import write_runs
from zerotrain.errors import CheckpointError


def merge(directories: Sequence[str | Path], output: str | Path, tag: str | None = None) -> Path:
    """Put the folders `<tag>.node-0000x-of-0000y` found in `directories` together into the checkpoint `output/<tag>`.

    A directory is such a folder, or one that holds them; without `tag`, the one is taken that its `latest` names. Every
    checksum is checked on the way, and `output/latest` names the result. CheckpointError where a node's folder is missing
    or damaged, where they are not of one save, and where `output/<tag>` exists.
    """
    found = [folder for directory in directories for folder in _node_folders(Path(directory), tag)]
    tags = list(dict.fromkeys(folder.name.rpartition(".node-")[0] for folder in found))
    if len(tags) > 1:
        raise CheckpointError(f"these are folders of different checkpoints: {', '.join(tags)}; say which with --tag")
    root, name = Path(output), folders.check_tag(tags[0])
    if (root / name).exists():
        raise CheckpointError(f"{root / name} exists; remove it, or choose another --output")
    with closing(_opened(found, name)) as checkpoint:
        merged = _merged(checkpoint)
        part = folders.begin(root, name)
        try:
            _copy(checkpoint, part.path)
            folders.write_file(part.path / MANIFEST, manifests.dump(merged))
            folders.check(part.path)
            return part.publish(name)
        except BaseException:
            part.discard()
            raise


def _node_folders(directory: Path, tag: str | None) -> list[Path]:
    if not directory.is_dir():
        raise CheckpointError(f"{directory} is not a folder")
    if (directory / MANIFEST).is_file():
        found = [directory.resolve()]
    else:
        wanted = folders.latest(directory) if tag is None else tag
        if wanted is None:
            known = ", ".join(folders.tags(directory)) or "none"
            raise CheckpointError(
                f"{directory} has no file '{folders.LATEST}'; choose a checkpoint with --tag: {known}"
            )
        # not folders_of: a merged checkpoint may lie beside the parts of it
        found = sorted(path for path in directory.glob(f"{folders.check_tag(wanted)}.node-*") if path.is_dir())
        found = found or folders.folders_of(directory, wanted)
    for folder in found:
        if ".node-" not in folder.name:
            raise CheckpointError(f"{folder} is not what one of several nodes wrote, so there is nothing to merge")
        if tag is not None and folder.name.rpartition(".node-")[0] != tag:
            raise CheckpointError(f"{folder} is not of checkpoint '{tag}'")
    return found


def _opened(found: Sequence[Path], tag: str) -> Checkpoint:
    """The parts, each once and all there."""
    checkpoint = open_checkpoint(found, Path(tag))
    parts = {part.manifest.part: part for part in checkpoint.parts}
    for part in checkpoint.parts:
        if part.manifest != parts[part.manifest.part].manifest:
            twin = parts[part.manifest.part]
            raise CheckpointError(f"{part.files.folder} and {twin.files.folder} are of the same node and differ")
    count = checkpoint.manifest.parts
    absent = [folders.node_folder(tag, number, count) for number in range(count) if number not in parts]
    if absent:
        raise CheckpointError(
            f"checkpoint '{tag}' was written by {count} nodes, and these are missing: {', '.join(absent)}"
        )
    checkpoint.parts = [parts[number] for number in range(count)]
    return checkpoint


def _merged(checkpoint: Checkpoint) -> Manifest:
    """The manifest of the whole. CheckpointError where the parts leave something out, or have something twice."""
    first = checkpoint.parts[0]
    whole: dict[str, StoredTensor] = {}
    for key, tensor in first.tensors.items():
        for part in checkpoint.parts:
            other = part.tensors.get(key)
            if other is None or (other.file, other.info, part.offsets[key]) != (
                tensor.file, tensor.info, first.offsets[key],
            ):  # fmt: skip
                raise CheckpointError(f"{part.files.folder} and {first.files.folder} disagree about tensor '{key}'")
        fragments = tuple(sorted(run for part in checkpoint.parts for run in part.tensors[key].fragments))
        for (_, stop, _), (start, _, _) in pairwise(fragments):
            if start < stop:
                raise CheckpointError(f"two nodes wrote elements {start} to {stop} of tensor '{key}'")
        whole[key] = replace(tensor, fragments=fragments)
        if missing := whole[key].missing():
            raise CheckpointError(f"no node wrote elements {missing[0][0]} to {missing[0][1]} of tensor '{key}'")
    manifest = first.manifest
    return replace(
        manifest,
        model={key: whole[key] for key in manifest.model},
        optimizer={key: whole[key] for key in manifest.optimizer},
        part=0,
        parts=1,
    )


def _copy(checkpoint: Checkpoint, target: Path) -> None:
    """Write all files but the manifest into `target`."""
    first = checkpoint.parts[0]
    plans = []
    for name, about in first.manifest.files.items():
        if "checksum" in about:
            data = (first.files.folder / name).read_bytes()
            if manifests.checksum(data) != about["checksum"]:
                raise CheckpointError(f"{first.files.folder / name} is damaged: its checksum is not the one written")
            folders.write_file(target / name, data)
        else:
            plans.append(_plan(checkpoint, name, about["bytes"]))
            write_header(target, plans[-1])
    write_runs(target, plans, _runs(checkpoint))


def _plan(checkpoint: Checkpoint, name: str, size: int) -> FilePlan:
    first = checkpoint.parts[0]
    tensors = {key: tensor.info for key, tensor in first.tensors.items() if tensor.file == name}
    with (first.files.folder / name).open("rb") as file:
        length = file.read(8)
        header = length + file.read(int.from_bytes(length, "little"))
    return FilePlan(name, tensors, {key: first.offsets[key] for key in tensors}, header, size)


def _runs(checkpoint: Checkpoint) -> Iterator[Run]:
    for part in checkpoint.parts:
        for key, tensor in part.tensors.items():
            for fragment in tensor.fragments:
                yield from checked_runs(part, key, fragment)
