"""The checkpoints of one engine: saving at the right moment, loading all or nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from zerotrain.checkpoint import loader
from zerotrain.checkpoint.boundary import Boundary
from zerotrain.checkpoint.folders import tag_of
from zerotrain.checkpoint.loader import Loaded, Options
from zerotrain.checkpoint.saver import Moment, Saver
from zerotrain.errors import CheckpointError
from zerotrain.job import Job
from zerotrain.zero.loss_scale import LossScale

_COUNTS = ("step", "skipped_steps", "samples", "tokens")


@dataclass(frozen=True)
class Progress:
    """How far training has come, besides the tensors."""

    step: int
    skipped_steps: int
    samples: int
    tokens: float
    loss_scale: LossScale


class Keeper:
    """Saves and loads for one engine, and knows whether its job is fit to train."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self.saver = Saver(job)
        self.boundary = Boundary(job.loader, job.device)
        self._half_loaded = False
        self._closed = False

    def check(self) -> None:
        """CheckpointError after a load that failed half-way."""
        if self._half_loaded:
            raise CheckpointError(
                "the last load_checkpoint failed half-way, so the model holds a mixture; load a checkpoint before going on"
            )

    def save(self, root: str | Path | None, tag: str | None, progress: Progress, micro_steps: int, client: Any) -> Path:
        """Write a checkpoint, `micro_steps` micro batches into a window."""
        self._settle()
        self.check()

        def recall() -> tuple[Any, Any]:
            return self.boundary.recall(micro_steps, self._job.buffers.changed() if micro_steps else 0)

        counts = {key: getattr(progress, key) for key in _COUNTS}
        moment = Moment(counts, asdict(progress.loss_scale), recall, client)
        return self.saver.save(self.folder(root), tag_of(progress.step) if tag is None else tag, moment)

    def load(
        self, root: str | Path | None, tag: str | None, options: Options, forget: Callable[[], None], now: Progress
    ) -> tuple[Loaded, Progress]:
        """Load a checkpoint; `forget()` lets go of an open window, once it is certain that the checkpoint fits.

        Returns how far training has come then: `now`, where only weights are loaded.
        """
        self._settle()
        self.saver.wait()
        if options.verify is None:
            options = replace(options, verify=self._job.config.checkpoint.verify)
        prepared = loader.prepare(self._job, self.folder(root), tag, options)
        manifest, client_state = prepared.manifest, None
        if manifest is not None:
            client_state = manifest.section("client_state")
            if not options.weights_only:
                counts = {key: manifest.section("progress")[key] for key in _COUNTS}
                now = Progress(**counts, loss_scale=now.loss_scale.resumed(manifest.section("loss_scale")))
        forget()
        self._half_loaded = True
        loader.fill(self._job, prepared)
        self._half_loaded = False
        self.boundary.mark()
        return Loaded(prepared.source.path, client_state), now

    def close(self) -> None:
        """Finish the save under way; its error, if any, comes out here. Nothing can be saved or loaded any more."""
        self._closed = True
        self.saver.close()

    def _settle(self) -> None:
        """Take over what was done to the model and the optimizer since the last step: edits, thawed parameters, groups."""
        if self._closed:
            raise CheckpointError("this engine is closed: it has no states to save, and takes none")
        held = next((unit.name for unit in self._job.model.units if unit.running), None)
        if held is not None:
            raise CheckpointError(
                f"unit '{held}' is in use: save and load outside of gathered(...) and of the forward pass"
            )
        self._job.model.check_parameters()
        if self._job.sharded_optimizer is not None:
            self._job.sharded_optimizer.adopt_groups()

    def folder(self, root: str | Path | None) -> Path:
        """`root`, or the config's; CheckpointError where neither says."""
        chosen = self._job.config.checkpoint.directory if root is None else root
        if chosen is None:
            raise CheckpointError("where? Give a directory, or set checkpoint.directory in the config")
        return Path(chosen).absolute()  # a thread may write there when the program has changed its folder
