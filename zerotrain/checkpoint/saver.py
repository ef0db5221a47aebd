"""Saving a job: what is agreed before, the copy that lets training go on, and the thread that writes meanwhile."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from zerotrain import runtime
from zerotrain.checkpoint import states, writer
from zerotrain.checkpoint.companions import companion_files
from zerotrain.checkpoint.folders import PROBE, check_tag, node_folder
from zerotrain.checkpoint.plain import encode
from zerotrain.checkpoint.restore import optimizer_class
from zerotrain.checkpoint.states import Recorded, Run
from zerotrain.checkpoint.writer import Content, Exchange, Plan, Team
from zerotrain.errors import CheckpointError, RankMismatchError
from zerotrain.job import Job

logger = logging.getLogger("zerotrain")
_ALIGN = 64  # bytes; where runs begin in the copy


@dataclass(frozen=True)
class Moment:
    """What the engine knows about the moment of a save, beyond the tensors."""

    progress: dict[str, Any]
    """Step, skipped steps, samples and tokens seen."""
    loss_scale: dict[str, Any]
    recall: Callable[[], tuple[Any, Any]]
    """This rank's RNG states and place in the data, encoded; raises where there is no way back to them."""
    client_state: Any


class Saver:
    """Saves one job's checkpoints, one at a time."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._leaders: dict[Path, tuple[int, ...]] = {}
        self._group: Any = None
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._host = torch.empty(0, dtype=torch.uint8)

    # -- one save -----------------------------------------------------------------------------------------------------

    def save(self, root: Path, tag: str, moment: Moment) -> Path:
        """Write `root/tag`, on all ranks together; in the background where the config says so. The checkpoint's folder.

        CheckpointError, on every rank, where it cannot be written; the background's errors come from `raise_failure`.
        """
        config, job = self._job.config.checkpoint, self._job
        self._take_turn(config.if_busy)
        everyone, small_files = self._agree(tag, moment)
        job.buffers.synchronise()  # each rank writes a part of them: they must be alike
        team = Team(self._exchange(config.async_), job.mesh.rank, self._who_leads(root))
        plan, content = self._plan(root, tag, everyone), self._content(small_files, everyone)
        if not config.async_:
            return writer.write(plan, content, team)
        front = Team(job.world.exchange_object, job.mesh.rank, team.leader_of)

        def copy() -> None:
            content.runs = self._copied(content.runs)

        front.agree(copy, "copying the states for a checkpoint")
        self._thread = threading.Thread(target=self._write, args=(plan, content, team), name="zerotrain-checkpoint")
        self._thread.start()
        return root / node_folder(tag, *team.part)

    def _take_turn(self, if_busy: str) -> None:
        """Wait for the save before this one, or refuse, all ranks alike."""
        busy = any(self._job.world.exchange_object(self.busy, "turn of a checkpoint"))
        if busy and if_busy == "refuse":
            raise CheckpointError(
                'the checkpoint before this one is still being written (checkpoint.if_busy is "refuse"; "wait" waits)'
            )
        self.wait()

    def _agree(self, tag: str, moment: Moment) -> tuple[list[dict[str, Any]], dict[str, bytes]]:
        """What every rank brings along, and this one's small files; RankMismatchError where they do not save the same.

        Whatever can fail on one rank alone is done here, so that it fails on all.
        """
        optimizer = self._job.sharded_optimizer
        small_files: dict[str, bytes] = {}

        def mine() -> dict[str, Any]:
            self.raise_failure()
            small_files.update(companion_files(self._job.module))
            random, data = moment.recall()
            return {
                "tag": check_tag(tag),
                "step": moment.progress["step"],
                "records": {} if optimizer is None else states.recorded_here(optimizer),
                "random": random,
                "data": data,
                "state": self._state(moment) if self._job.mesh.rank == 0 else None,
            }

        team = Team(self._job.world.exchange_object, self._job.mesh.rank, (0,) * self._job.mesh.world_size)
        everyone: list[dict[str, Any]] = team.agree(mine, "saving a checkpoint")
        for rank, other in enumerate(everyone):
            for what in ("tag", "step"):
                if other[what] != everyone[0][what]:
                    raise RankMismatchError(
                        f"the ranks save different checkpoints: {what} is {everyone[0][what]!r} on rank 0 and "
                        f"{other[what]!r} on rank {rank}"
                    )
        return everyone, small_files

    def _state(self, moment: Moment) -> dict[str, Any]:
        """The sections of the manifest that rank 0 speaks for."""
        job, optimizer = self._job, self._job.sharded_optimizer
        names = {place.parameter: states.canonical(place.name) for place in job.model.places()}
        return {
            "progress": moment.progress,
            "loss_scale": moment.loss_scale,
            "topology": {
                "world_size": job.mesh.world_size,
                "dp_replicate": job.mesh.dp_replicate,
                "dp_shard": job.mesh.dp_shard,
                "stage": job.config.zero_optimization.stage,
            },
            "config": encode(job.config.dump(), "the config"),
            "host": runtime.machine(),
            "tied": states.tied_names(job.module),
            "extra": states.extra_state(job.module),
            "class": None if optimizer is None else optimizer_class(optimizer),
            "groups": [] if optimizer is None else states.groups(optimizer, names),
            "scheduler": _described(job.lr_scheduler),
            "client_state": encode(moment.client_state, "client_state"),
        }

    def _plan(self, root: Path, tag: str, everyone: Sequence[dict[str, Any]]) -> Plan:
        job, config = self._job, self._job.config.checkpoint
        weights = states.weight_infos(job.model, job.module)
        held = states.master_infos(job.model) | states.state_infos(_records(everyone), weights)
        return Plan(root, tag, weights, held, config.max_shard_size, (config.keep_last, config.keep_every))

    def _content(self, small_files: dict[str, bytes], everyone: Sequence[dict[str, Any]]) -> Content:
        job = self._job
        runs = list(states.weight_runs(job.model, job.module, job.mesh))
        if job.sharded_optimizer is not None:
            runs += states.optimizer_runs(job.sharded_optimizer, job.mesh)
        state = dict(everyone[0]["state"])
        state["scalars"] = {
            name: json.loads(record.scalars) for name, record in _records(everyone).items() if record.scalars != "{}"
        }
        state["random"] = [other["random"] for other in everyone]
        state["data"] = [other["data"] for other in everyone]
        return Content(runs, small_files, state)

    # -- in the background --------------------------------------------------------------------------------------------

    def _copied(self, runs: Sequence[Run]) -> list[Run]:
        """The runs with their values of this moment, in host memory that is kept from save to save."""
        sizes = [-(-run.tensor.nbytes // _ALIGN) * _ALIGN for run in runs]
        if sum(sizes) > self._host.numel():
            pinned = self._job.device.type != "cpu"
            self._host = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=pinned)
        copies, start = [], 0
        for run, size in zip(runs, sizes, strict=True):
            place = self._host[start : start + run.tensor.nbytes].view(run.tensor.dtype)
            place.copy_(run.tensor, non_blocking=True)
            copies.append(Run(run.key, run.start, place))
            start += size
        if self._job.device.type != "cpu":
            torch.accelerator.current_stream(self._job.device).synchronize()
        return copies

    def _write(self, plan: Plan, content: Content, team: Team) -> None:
        try:
            writer.write(plan, content, team)
        except BaseException as error:
            self._failure = error
            logger.error("the checkpoint '%s' could not be written: %s", plan.tag, error)

    @property
    def busy(self) -> bool:
        """Whether a checkpoint is being written in the background."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def failed(self) -> bool:
        """Whether a save in the background has failed, and nobody has been told yet."""
        return self._failure is not None

    def wait(self) -> None:
        """Return when nothing is being written any more."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def raise_failure(self, elsewhere: bool = False) -> None:
        """Raise the error of a save in the background, once, after waiting for its end.

        `elsewhere`: some rank has reported one, so that all raise, also where the own part went well.
        """
        self.wait()
        failure, self._failure = self._failure, None
        if failure is not None or elsewhere:
            raise CheckpointError(
                f"the last checkpoint could not be written: {failure or 'another rank failed'}"
            ) from failure

    def close(self) -> None:
        """Finish the save under way; its error, if any, comes out here."""
        self.wait()
        group, self._group = self._group, None
        if group is not None and dist.is_initialized():
            dist.destroy_process_group(group)
        self._host = torch.empty(0, dtype=torch.uint8)
        self.raise_failure()

    # -- who writes where ---------------------------------------------------------------------------------------------

    def _exchange(self, in_background: bool) -> Exchange:
        """How the writers talk. A thread has a group of its own, so that it does not get between training's collectives."""
        world = self._job.world
        if not in_background or world.size == 1:
            return world.exchange_object
        if self._group is None:
            self._group = dist.new_group(list(world.ranks), backend="gloo")

        def exchange(value: Any, label: str) -> list[Any]:
            rows: list[Any] = [None] * world.size
            dist.all_gather_object(rows, value, group=self._group)
            return rows

        return exchange

    def _who_leads(self, root: Path) -> tuple[int, ...]:
        """For every rank, the first of those that see the same folder `root`."""
        size = self._job.mesh.world_size
        shared = self._job.config.checkpoint.shared_filesystem
        if shared or size == 1:
            return (0,) * size
        if root not in self._leaders:
            exchange = self._job.world.exchange_object
            if shared is None:
                self._leaders[root] = probe(root, self._job.mesh.rank, exchange)
            else:
                nodes = exchange(runtime.machine(), "nodes of a checkpoint")
                self._leaders[root] = tuple(nodes.index(node) for node in nodes)
        return self._leaders[root]


def probe(root: Path, rank: int, exchange: Callable[[Any, str], list[Any]]) -> tuple[int, ...]:
    """For every rank, the first whose file it sees in its folder `root`. Every rank must call this."""
    nonce = exchange(secrets.token_hex(6), "probe for a shared file system")[0]
    mine = root / f"{PROBE}{nonce}-{rank}"
    error = None
    try:
        root.mkdir(parents=True, exist_ok=True)
        mine.touch()
    except OSError as raised:
        error = str(raised)
    errors = exchange(error, "probe written")
    seen = [other for other in range(len(errors)) if os.path.exists(root / f"{PROBE}{nonce}-{other}")]
    leaders = exchange(min(seen, default=rank), "probe read")
    with contextlib.suppress(OSError):
        mine.unlink()
    for other, text in enumerate(errors):
        if text is not None:
            raise CheckpointError(f"rank {other} cannot write checkpoints into {root}: {text}")
    return tuple(leaders)


def _records(everyone: Sequence[dict[str, Any]]) -> dict[str, Recorded]:
    return states.agree([other["records"] for other in everyone])


def _described(scheduler: Any) -> Any:
    if not hasattr(scheduler, "state_dict"):
        return None
    return {"class": type(scheduler).__name__, "state": encode(scheduler.state_dict(), "the scheduler's state")}
