"""Loading into a job, on all ranks together: prepare (which changes nothing), then fill."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from zerotrain import runtime
from zerotrain.checkpoint import folders, restore
from zerotrain.checkpoint.manifest import Manifest
from zerotrain.checkpoint.reader import Checkpoint, manifest_of, open_source
from zerotrain.checkpoint.source import Source
from zerotrain.checkpoint.writer import Team
from zerotrain.errors import CheckpointError, RankMismatchError
from zerotrain.job import Job

logger = logging.getLogger("zerotrain")


class HalfLoadedError(CheckpointError):
    """Reading failed after the first value was written."""


class Loaded(NamedTuple):
    """What `load_checkpoint` returns."""

    path: Path
    client_state: Any
    """As it was given to `save_checkpoint`; None for a checkpoint of another origin."""


@dataclass(frozen=True)
class Options:
    """How to load; see `Engine.load_checkpoint`."""

    strict: bool = True
    weights_only: bool = False
    verify: bool | None = None


@dataclass
class Prepared:
    """A load that fits: all ranks have found everything that they will read."""

    source: Source
    manifest: Manifest | None
    plan: restore.Plan
    options: Options


def prepare(job: Job, path: Path, tag: str | None, options: Options) -> Prepared:
    """Open, compare and, where asked for, verify. CheckpointError, on every rank, where anything is wrong on any."""
    team = _team(job)

    def look() -> Prepared:
        source = open_source(path, tag)
        manifest = manifest_of(source)
        plan = restore.plan_load(job, source, manifest, options.strict, options.weights_only)
        if manifest is not None and not options.weights_only:
            restore.check_run(job, manifest)
        if isinstance(source, Checkpoint) and len(source.parts) < source.manifest.parts:
            restore.check_held(plan, job, source)
        return Prepared(source, manifest, plan, options)

    team.agree(lambda: _recover(path) if job.mesh.rank == 0 else None, f"looking at {path}")
    prepared: Prepared | None = None

    def open_and_tell() -> tuple[str, bool]:
        nonlocal prepared
        prepared = look()
        manifest = prepared.manifest
        what = str(manifest.state["progress"] if manifest is not None else prepared.source.path.name)
        return what, manifest is not None and manifest.state["host"] != runtime.machine()

    told = team.agree(open_and_tell, f"opening {path}")
    assert prepared is not None
    seen = dict.fromkeys(what for what, _ in told)
    if len(seen) > 1:
        raise CheckpointError(f"the ranks see different checkpoints in {path}: {', '.join(seen)}")
    source, manifest = prepared.source, prepared.manifest
    if isinstance(source, Checkpoint) and manifest is not None:
        foreign = told[0][1]  # a save names rank 0's machine, so rank 0 compares, for all
        if foreign if options.verify is None else options.verify:
            whole = manifest.parts == 1
            share = (job.mesh.rank, job.mesh.world_size) if whole else (0, 1)
            team.agree(lambda: source.verify(*share), f"verifying {source.path}")
    return prepared


def fill(job: Job, prepared: Prepared) -> None:
    """Read everything in. An error on any rank is raised on all, and leaves the job half loaded."""
    source, manifest, plan = prepared.source, prepared.manifest, prepared.plan

    def read() -> None:
        restore.carry_out(plan, job, source)
        if manifest is not None:
            restore.restore_extra(job, manifest, plan)
        if manifest is not None and not prepared.options.weights_only:
            restore.restore_run(job, manifest, plan)

    try:
        _team(job).agree(read, f"loading {source.path}")
    except RankMismatchError:
        raise
    except Exception as error:
        raise HalfLoadedError(f"{error}. The model holds a mixture now: load a checkpoint before going on") from error
    source.close()
    if job.mesh.rank == 0:
        for remark in plan.remarks:
            logger.warning("loading %s: %s", source.path, remark)


def load_newest(job: Job, root: Path, load: Callable[[str], Loaded]) -> Loaded | None:
    """Load the newest checkpoint under `root` that is whole and fits, as rank 0 sees them; None where there is none yet.

    CheckpointError where there are checkpoints and none can be loaded.
    """
    look = partial(_candidates, root) if job.mesh.rank == 0 else lambda: None
    tags, reasons = _team(job).agree(look, f"looking for checkpoints in {root}")[0]
    loaded = None
    for tag in tags:
        try:
            loaded = load(tag)
            break
        except CheckpointError as error:  # one that was read half-way, too: the next replaces the mixture
            reasons.append(str(error))
    if loaded is None and reasons:
        raise CheckpointError(
            f"no checkpoint in {root} can be resumed from: {'; '.join(reasons)}. Remove the folder to start afresh"
        )
    if job.mesh.rank == 0:
        for reason in reasons:
            logger.warning("not resuming from a damaged checkpoint: %s", reason)
        if loaded is None:
            logger.info("there is no checkpoint in %s yet: starting from the beginning", root)
        else:
            logger.info("resumed from %s", loaded.path)
    return loaded


def _candidates(root: Path) -> tuple[list[str], list[str]]:
    _recover(root)
    return folders.good_tags(root)


def _recover(root: Path) -> None:
    with contextlib.suppress(OSError):  # a folder that may only be read
        folders.recover(root)


def _team(job: Job) -> Team:
    return Team(job.world.exchange_object, job.mesh.rank, (0,) * job.mesh.world_size)
