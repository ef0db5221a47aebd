"""The end of the last step, as far as a resumed run must find its way back to it: place in the data, random numbers."""

from __future__ import annotations

from typing import Any

import torch

from zerotrain import runtime
from zerotrain.checkpoint.plain import encode
from zerotrain.errors import CheckpointError


class Boundary:
    """Remembers the last step's end, so that batches taken from `loader` since then can be trained on again.

    `loader` is the one that `initialize` returned (see `data.Loader`), or None.
    """

    def __init__(self, loader: Any, device: torch.device) -> None:
        self._loader = loader if hasattr(loader, "mark") else None
        self._device = device
        self._random: Any = None
        self.mark()

    def mark(self) -> None:
        """Here a step ends."""
        if self._loader is not None:
            self._loader.mark()
            self._random = runtime.random_state(self._device)

    def recall(self, micro_batches: int, changed_buffers: int) -> tuple[Any, Any]:
        """RNG states and place in the data for a checkpoint now, `micro_batches` into a window; both encoded.

        CheckpointError where the open window could not be replayed: its batches came from elsewhere, or it has changed
        buffers of the model (running statistics).
        """
        taken = self._loader.batches_since_mark if self._loader is not None else 0
        if micro_batches and (taken < micro_batches or changed_buffers):
            reason = (
                "has changed buffers of the model" if changed_buffers else "was not read from initialize()'s loader"
            )
            raise CheckpointError(
                f"save_checkpoint was called {micro_batches} micro batches into an accumulation window that {reason}, so a "
                "resumed run could not repeat it; save right after a step (when engine.step() has returned True)"
            )
        random = self._random if taken else runtime.random_state(self._device)
        data = self._loader.state_dict(marked=True) if self._loader is not None else None
        return encode(random, "the random state"), encode(data, "the place in the data")
