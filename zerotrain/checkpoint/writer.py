"""Writing one checkpoint: every rank puts its runs into their byte ranges of files that one rank has laid out.

The writers of one folder follow four steps, and tell each other after each how it went, so that all of them raise what
one of them met, and none waits for another that has given up:

    begin    the leader makes the folder and its files, at their full size and with their headers
    write    every rank writes its runs and flushes them
    seal     the leader checks the sizes, writes the small files and the manifest
    publish  the leader renames the folder and moves `latest`; then it removes what need not be kept
"""

from __future__ import annotations

import errno
import json
import logging
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import xxhash

from zerotrain.checkpoint import folders, manifest
from zerotrain.checkpoint.folders import Partial
from zerotrain.checkpoint.format import (
    INDEX,
    MANIFEST,
    MODEL,
    OPTIMIZER,
    FilePlan,
    StoredTensor,
    index_json,
    plan_files,
    raw,
)
from zerotrain.checkpoint.manifest import Manifest
from zerotrain.checkpoint.source import TensorInfo
from zerotrain.checkpoint.states import Run
from zerotrain.errors import CheckpointError, ZerotrainError

logger = logging.getLogger("zerotrain")
BLOCK = 8 << 20
"""Bytes hashed and written at a time: a block is still in the cache when it is copied to the page cache."""

Exchange = Callable[[Any, str], list[Any]]
"""Every rank's value, in rank order, given this rank's and a label."""


@dataclass(frozen=True)
class Plan:
    """A checkpoint before it is written, equal on all ranks."""

    root: Path
    tag: str
    weights: dict[str, TensorInfo]
    states: dict[str, TensorInfo]
    limit: int
    """Most bytes of data in one file."""
    keep: tuple[int | None, int | None] = (None, None)
    """`keep_last` and `keep_every`, see `folders.prune`."""

    def files(self) -> list[FilePlan]:
        """The files of the weights, then those of the optimizer's states."""
        return plan_files(MODEL, self.weights, self.limit) + plan_files(OPTIMIZER, self.states, self.limit)


@dataclass(frozen=True)
class Team:
    """Who writes into one folder: ranks that see the same file system, led by the first of them."""

    exchange: Exchange
    rank: int
    leader_of: tuple[int, ...]
    """For every rank, the first of those that see the same file system."""

    @property
    def leader(self) -> int:
        """The rank that this one follows."""
        return self.leader_of[self.rank]

    @property
    def leads(self) -> bool:
        """Whether this rank is it."""
        return self.rank == self.leader

    @property
    def part(self) -> tuple[int, int]:
        """Which of the file systems is this rank's, and how many there are."""
        leaders = sorted(set(self.leader_of))
        return leaders.index(self.leader), len(leaders)

    def agree(self, step: Callable[[], Any], label: str) -> list[Any]:
        """Run this rank's part of a step, and return what every rank's part returned.

        Where any rank has an error, all raise a ZerotrainError: this rank's own, or one that tells of the first.
        """
        error: Exception | None = None
        value: Any = None
        try:
            value = step()
        except Exception as raised:
            error = raised
        told = None if error is None else f"{type(error).__name__}: {error}"
        outcomes: list[tuple[str | None, Any]] = self.exchange((told, value), label)
        if isinstance(error, ZerotrainError):
            raise error
        if error is not None:
            raise CheckpointError(f"{label} failed: {told}") from error
        for rank, (text, _) in enumerate(outcomes):
            if text is not None:
                raise CheckpointError(f"rank {rank} failed in {label}: {text}")
        return [value for _, value in outcomes]


@dataclass
class Content:
    """What one rank contributes to a checkpoint."""

    runs: Sequence[Run]
    small_files: dict[str, bytes]
    """Contents of the files beside the weights (`config.json`, ...); of the leader's."""
    state: dict[str, Any]
    """The sections of the manifest; of the leader's."""


def write(plan: Plan, content: Content, team: Team) -> Path:
    """Write a checkpoint together with the other ranks; the folder it is in afterwards.

    Raises CheckpointError on every rank where any of them fails (a full disk, say). Then what was written is removed, and
    the last checkpoint is still the latest.
    """
    files = plan.files()
    begun: Partial | None = None
    try:
        name = folders.node_folder(plan.tag, *team.part)

        def begin() -> str | None:
            nonlocal begun
            begun = _begin(plan, name, files) if team.leads else None
            return None if begun is None else begun.path.name

        folder = plan.root / team.agree(begin, f"beginning checkpoint '{plan.tag}'")[team.leader]
        written = team.agree(lambda: write_runs(folder, files, content.runs), f"writing checkpoint '{plan.tag}'")
        mine = [fragments for rank, fragments in enumerate(written) if team.leader_of[rank] == team.leader]
        team.agree(partial(_seal, plan, files, content, team, begun, mine), f"sealing checkpoint '{plan.tag}'")
        team.agree(partial(_publish, plan, begun), f"publishing checkpoint '{plan.tag}'")
        if begun is not None:
            _prune(plan)
        return plan.root / name
    except BaseException:
        if begun is not None:
            begun.discard()
        raise


def _begin(plan: Plan, name: str, files: Sequence[FilePlan]) -> Partial:
    """Make the folder and its files. Space is reserved, so that a full disk is met here."""
    try:
        plan.root.mkdir(parents=True, exist_ok=True)
        folders.clean(plan.root)
        part = folders.begin(plan.root, name)
    except OSError as error:
        raise CheckpointError(f"cannot write checkpoints into {plan.root}: {error}") from error
    try:
        for file in files:
            _lay_out(part.path / file.name, file)
    except OSError as error:
        part.discard()
        raise CheckpointError(f"cannot reserve {sum(f.size for f in files)} bytes in {plan.root}: {error}") from error
    return part


def _lay_out(path: Path, file: FilePlan) -> None:
    handle = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o644)
    try:
        try:
            os.posix_fallocate(handle, 0, file.size)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
                raise
            os.ftruncate(handle, file.size)
        _write_all(handle, memoryview(file.header), 0)
        os.fsync(handle)
    finally:
        os.close(handle)


def write_runs(folder: Path, files: Sequence[FilePlan], runs: Iterable[Run]) -> dict[str, list[tuple[int, int, str]]]:
    """Write runs into their places and flush them; the fragments written, with their checksums, by key."""
    place = {key: (file.name, offset, file.tensors[key]) for file in files for key, offset in file.offsets.items()}
    handles: dict[str, int] = {}
    fragments: dict[str, list[tuple[int, int, str]]] = {}
    try:
        for run in runs:
            if run.tensor.numel() == 0:
                continue
            name, offset, info = place[run.key]
            if name not in handles:
                handles[name] = os.open(folder / name, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            digest = _write_run(handles[name], run, offset + run.start * info.dtype.itemsize)
            fragments.setdefault(run.key, []).append((run.start, run.stop, digest))
        for handle in handles.values():
            os.fsync(handle)
    except OSError as error:
        raise CheckpointError(f"writing into {folder} failed: {error}") from error
    finally:
        for handle in handles.values():
            os.close(handle)
    return fragments


def _write_run(handle: int, run: Run, offset: int) -> str:
    hasher = xxhash.xxh3_64()
    on_host = run.tensor.device.type == "cpu"
    staging = run.tensor if on_host else torch.empty(min(BLOCK, run.tensor.nbytes), dtype=torch.uint8, pin_memory=True)
    for block in run.tensor.view(torch.uint8).split(BLOCK):
        data = raw(block if on_host else staging[: block.numel()].copy_(block))
        hasher.update(data)
        _write_all(handle, data, offset)
        offset += len(data)
    return hasher.hexdigest()


def _write_all(handle: int, data: memoryview, offset: int) -> None:
    while data:
        count = os.pwrite(handle, data, offset)
        if count == 0:
            raise OSError(errno.EIO, "the file system wrote nothing")
        data, offset = data[count:], offset + count


def _seal(
    plan: Plan, files: Sequence[FilePlan], content: Content, team: Team, part: Partial | None, written: list[Any]
) -> None:
    """The leader writes the small files and the manifest, and checks that everything is there."""
    if part is None:
        return
    number, parts = team.part
    made = replace(_manifest(files, content, written), part=number, parts=parts)
    for key, tensor in made.tensors().items():
        if made.parts == 1 and tensor.missing():
            raise CheckpointError(f"no rank wrote elements {tensor.missing()[0]} of '{key}'")
    try:
        for name, data in {**content.small_files, **_index(files)}.items():
            folders.write_file(part.path / name, data)
        for name, about in made.files.items():
            size = (part.path / name).stat().st_size
            if size != about["bytes"]:
                raise CheckpointError(f"{part.path / name} has {size} bytes after it was written, not {about['bytes']}")
        folders.write_file(part.path / MANIFEST, manifest.dump(made))
    except OSError as error:
        raise CheckpointError(f"finishing checkpoint '{plan.tag}' in {plan.root} failed: {error}") from error


def _publish(plan: Plan, part: Partial | None) -> None:
    """The leader gives the checkpoint its name: after this it is the latest."""
    try:
        if part is not None:
            part.publish(plan.tag)
    except OSError as error:
        raise CheckpointError(f"finishing checkpoint '{plan.tag}' in {plan.root} failed: {error}") from error


def _prune(plan: Plan) -> None:
    try:
        folders.prune(plan.root, *plan.keep, newest=plan.tag)
    except (OSError, CheckpointError) as error:  # the checkpoint stands
        logger.warning("old checkpoints in %s could not be removed: %s", plan.root, error)


def _index(files: Sequence[FilePlan]) -> dict[str, bytes]:
    weights = [file for file in files if file.name.startswith(MODEL)]
    return {INDEX: (json.dumps(index_json(weights), indent=2) + "\n").encode()} if weights else {}


def _manifest(files: Sequence[FilePlan], content: Content, written: list[Any]) -> Manifest:
    tables: dict[str, dict[str, StoredTensor]] = {MODEL: {}, OPTIMIZER: {}}
    fragments: dict[str, list[tuple[int, int, str]]] = {}
    for part in written:
        for key, runs in part.items():
            fragments.setdefault(key, []).extend(runs)
    for file in files:
        table = tables[MODEL if file.name.startswith(MODEL) else OPTIMIZER]
        for key, info in file.tensors.items():
            table[key] = StoredTensor(file.name, info, tuple(sorted(fragments.get(key, ()))))
    sizes: dict[str, dict[str, Any]] = {file.name: {"bytes": file.size} for file in files}
    for name, data in {**content.small_files, **_index(files)}.items():
        sizes[name] = {"bytes": len(data), "checksum": manifest.checksum(data)}
    return Manifest(tables[MODEL], tables[OPTIMIZER], sizes, content.state)
