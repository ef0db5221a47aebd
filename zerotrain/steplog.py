"""The log lines of training, on rank 0."""

from __future__ import annotations

import logging
import time

logger = logging.getLogger("zerotrain")


class StepLog:
    """Writes a line every `every` steps (None: never), and one for every step that is skipped."""

    def __init__(self, rank: int, every: int | None) -> None:
        self._every = every if rank == 0 else None
        self._speaks = rank == 0
        self._clock = time.monotonic()

    def step(self, number: int, metrics: dict[str, float]) -> None:
        """A step has ended, with these `engine.metrics`."""
        if self._every is None or number % self._every:
            return
        elapsed, self._clock = time.monotonic() - self._clock, time.monotonic()
        logger.info(
            "step %d: loss %.4f, grad norm %.4g, lr %.3g, %.1f ms per step, %d skipped",
            number, metrics["loss"], metrics["grad_norm"], metrics["lr"], 1e3 * elapsed / self._every,
            metrics["skipped_steps"],
        )  # fmt: skip

    def skipped(self, number: int, reason: str, scale: float, total: int) -> None:
        """A step was skipped; `total` have been, so far."""
        if self._speaks:
            logger.warning("step %d skipped: %s; loss scale %g, %d skipped so far", number, reason, scale, total)
