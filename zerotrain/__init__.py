"""zerotrain: training models that do not fit on one device, by sharding their states over the ranks."""

from __future__ import annotations

from zerotrain.config import ConfigError, json_schema
from zerotrain.engine import Engine, initialize
from zerotrain.errors import CheckpointError, RankMismatchError, ReleasedParameterError, ZerotrainError
from zerotrain.zero.access import (
    full_gradient,
    full_optimizer_state,
    full_parameter,
    gathered,
    set_full_gradient,
    set_full_optimizer_state,
    set_full_parameter,
)

__version__ = "0.1.0"

__all__ = [
    "CheckpointError",
    "ConfigError",
    "Engine",
    "RankMismatchError",
    "ReleasedParameterError",
    "ZerotrainError",
    "full_gradient",
    "full_optimizer_state",
    "full_parameter",
    "gathered",
    "initialize",
    "json_schema",
    "set_full_gradient",
    "set_full_optimizer_state",
    "set_full_parameter",
]
