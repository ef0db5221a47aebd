"""The errors that zerotrain raises on purpose. Each text says what was found, what was expected, where, and the next move."""

from __future__ import annotations


class ZerotrainError(RuntimeError):
    """Base of the errors that are raised while training."""


class RankMismatchError(ZerotrainError):
    """The ranks of a job no longer do the same thing: another model, config, order or number of calls, or a rank is gone.

    Raised on every rank that is still alive. After it the process group is unusable: restart the job.
    """


class ReleasedParameterError(ZerotrainError):
    """A parameter whose values are sharded right now was read or written outside `zerotrain.gathered(...)`."""


class CheckpointError(ZerotrainError):
    """A checkpoint could not be written, or cannot be read: what is wrong with it, in which file, and the way out."""
