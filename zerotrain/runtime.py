"""The process: its group, its device, its seeds. Launching is torchrun's and accelerate's; this reads what they set."""

from __future__ import annotations

import os
import random
import sys

import torch
import torch.distributed as dist


def start_process_group() -> tuple[int, int]:
    """Join the job that the launcher describes in the environment, if there is one; `(rank, world_size)`.

    A process group that exists already is used as it is. Without a launcher the job has one rank and needs no group.
    """
    if not dist.is_initialized() and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        backend = None
        if not torch.accelerator.is_available():
            backend = "gloo"
        else:
            torch.accelerator.set_device_index(int(os.environ.get("LOCAL_RANK", "0")))
        dist.init_process_group(backend)
    if not dist.is_initialized():
        return 0, 1
    return dist.get_rank(), dist.get_world_size()


def choose_device() -> torch.device:
    """The accelerator of this rank where the process group can use it (or there is no group), else the CPU."""
    if not torch.accelerator.is_available():
        return torch.device("cpu")
    if dist.is_initialized() and dist.get_world_size() > 1 and dist.get_backend() in ("gloo", "fake"):
        return torch.device("cpu")
    accelerator = torch.accelerator.current_accelerator()
    assert accelerator is not None
    index = int(os.environ.get("LOCAL_RANK", "0")) % max(1, torch.accelerator.device_count())
    torch.accelerator.set_device_index(index)
    return torch.device(accelerator.type, index)


def seed_everything(seed: int, rank: int) -> None:
    """Seed Python, numpy (if it is loaded) and torch with `seed + rank`: dropout differs from rank to rank."""
    random.seed(seed + rank)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed((seed + rank) % 2**32)
    torch.manual_seed(seed + rank)
