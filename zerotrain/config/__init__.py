"""The JSON job file: loading it, checking it, and its frozen, typed form."""

from __future__ import annotations

from zerotrain.config.batch import BatchSizes
from zerotrain.config.errors import ConfigError
from zerotrain.config.load import load_config
from zerotrain.config.reference import json_schema, reference_tables
from zerotrain.config.schema import (
    BF16Config,
    Config,
    FP16Config,
    OptimizerConfig,
    SchedulerConfig,
    ZeroConfig,
    differences,
)

__all__ = [
    "BF16Config",
    "BatchSizes",
    "Config",
    "ConfigError",
    "FP16Config",
    "OptimizerConfig",
    "SchedulerConfig",
    "ZeroConfig",
    "differences",
    "json_schema",
    "load_config",
    "reference_tables",
]
