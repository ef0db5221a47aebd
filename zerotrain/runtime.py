"""The process: its group, its device, its seeds. Launching is torchrun's and accelerate's; this reads what they set."""

from __future__ import annotations

import logging
import os
import platform
import random
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


def start_process_group() -> tuple[int, int]:
    """Join the job that the launcher describes in the environment, if there is one; `(rank, world_size)`.

    A process group that exists already is used as it is. Without a launcher the job has one rank and needs no group. Where
    a node has fewer accelerators than ranks, the job runs on the CPU, over gloo.
    """
    if not dist.is_initialized() and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        if _an_accelerator_each():
            torch.accelerator.set_device_index(_local_rank())
            dist.init_process_group()
        else:
            dist.init_process_group("gloo")
    if not dist.is_initialized():
        return 0, 1
    return dist.get_rank(), dist.get_world_size()


def choose_device() -> torch.device:
    """The accelerator of this rank where the process group can use it (or there is no group), else the CPU."""
    grouped = dist.is_initialized() and dist.get_world_size() > 1
    if not _an_accelerator_each() or (grouped and dist.get_backend() in ("gloo", "fake")):
        return torch.device("cpu")
    accelerator = torch.accelerator.current_accelerator()
    assert accelerator is not None
    torch.accelerator.set_device_index(_local_rank())
    return torch.device(accelerator.type, _local_rank())


def _local_rank() -> int:
    return int(os.environ.get("LOCAL_RANK", "0"))


def _an_accelerator_each() -> bool:
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", _local_rank() + 1))
    return torch.accelerator.is_available() and torch.accelerator.device_count() >= ranks


def show_log() -> None:
    """Have zerotrain's log lines (`steps_per_print`, skipped steps) shown where the program has set up no logging."""
    logger = logging.getLogger("zerotrain")
    if not logger.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("zerotrain: %(message)s"))
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)


def seed_everything(seed: int, rank: int) -> None:
    """Seed Python, numpy (if it is loaded) and torch with `seed + rank`: dropout differs from rank to rank."""
    random.seed(seed + rank)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed((seed + rank) % 2**32)
    torch.manual_seed(seed + rank)


def random_state(device: torch.device) -> dict[str, Any]:
    """The states of this rank's random number generators: Python's, numpy's (if it is loaded), torch's, the device's."""
    numpy = sys.modules.get("numpy")
    return {
        "python": random.getstate(),
        "numpy": None if numpy is None else numpy.random.get_state(),
        "torch": torch.get_rng_state(),
        "device": None if device.type == "cpu" else torch.get_device_module(device).get_rng_state(device),
    }


def check_random_state(state: dict[str, Any]) -> None:
    """Raise what `set_random_state` would raise for a state that is damaged, without setting anything."""
    random.Random().setstate(state["python"])
    torch.Generator().set_state(state["torch"])
    numpy = sys.modules.get("numpy")
    if numpy is not None and state["numpy"] is not None:
        numpy.random.RandomState().set_state(state["numpy"])
    if not isinstance(state["device"], (torch.Tensor, type(None))):
        raise TypeError("the state of the device's generator is not a tensor")


def set_random_state(state: dict[str, Any], device: torch.device) -> None:
    """Put the generators back to where `random_state` found them."""
    random.setstate(state["python"])
    numpy = sys.modules.get("numpy")
    if numpy is not None and state["numpy"] is not None:
        numpy.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if device.type != "cpu" and state["device"] is not None:
        torch.get_device_module(device).set_rng_state(state["device"], device)


def machine() -> str:
    """An identity of this machine: two that write the same are the same."""
    try:
        identity = Path("/etc/machine-id").read_text().strip()
    except OSError:
        identity = ""
    return f"{platform.node()}/{identity}"
