"""What every test needs before torch wakes up: one thread a process, no accelerator, no network."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch

# Imported here once, or every forked worker imports them anew: the optimizers' first step wants dynamo.
import torch._dynamo
import torch.utils.checkpoint

import zerotrain  # noqa: F401

torch.set_num_threads(1)
