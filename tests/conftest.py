"""What every test needs before torch wakes up: one thread a process, no accelerator, no network."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch

# Imported here once, or every forked worker imports them anew: the optimizers' first step wants dynamo.
import torch._dynamo
import torch.utils.checkpoint

import zerotrain  # noqa: F401

torch.set_num_threads(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="also run the whole products marked `full`")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "full: the whole product of the oracle matrix (minutes); run by `-m full`")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Cells marked `full` run only when asked for: by `-m full` (or any -m that names it) or by `--full`."""
    if config.getoption("--full") or "full" in str(config.getoption("-m")):
        return
    skipped = [item for item in items if item.get_closest_marker("full")]
    if skipped:
        items[:] = [item for item in items if not item.get_closest_marker("full")]
        config.hook.pytest_deselected(items=skipped)
