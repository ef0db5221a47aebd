"""A source of tensors: what a checkpoint of any origin looks like to whoever loads it.

Tensors are whole ("global") ones with names; they are read in runs of elements, so that each rank touches only the
bytes of what it holds.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

MASTER = "master"
"""Name of the fp32 master weights among a parameter's states."""


def state_key(parameter: str, state: str) -> str:
    """The key of a tensor of optimizer state (or of the master weights): `<parameter>/<state>`."""
    return f"{parameter}/{state}"


@dataclass(frozen=True)
class TensorInfo:
    """A whole tensor, as a source describes it."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Its number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""
        return self.numel * self.dtype.itemsize


@dataclass
class Source(ABC):
    """Tensors to load from. `read` may be called from any number of processes, each with its own Source."""

    path: Path
    """The file or folder, for messages."""
    weights: Mapping[str, TensorInfo] = field(default_factory=dict)
    """Parameters and buffers of the model, by name."""
    states: Mapping[str, TensorInfo] = field(default_factory=dict)
    """Tensors of optimizer state with one value per element, and fp32 master weights, by `state_key`."""
    scalars: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """What the optimizer holds once per parameter (`step`, ...), by the parameter's name."""
    tied: Mapping[str, str] = field(default_factory=dict)
    """Further names of weights that are stored once: alias -> the name among `weights`."""

    @abstractmethod
    def read(self, key: str, start: int, stop: int, out: torch.Tensor) -> None:
        """Fill the 1-d `out`, of any dtype and device, with elements `[start, stop)` of the flattened tensor `key`.

        `key` is one of `weights` or of `states`. Raises CheckpointError naming the tensor and the file where they
        cannot be read.
        """

    def info(self, key: str) -> TensorInfo:
        """The tensor `key`, among weights and states."""
        return self.weights[key] if key in self.weights else self.states[key]

    def close(self) -> None:
        """Let go of open files, where there are any."""
        return
