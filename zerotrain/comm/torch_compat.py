"""What differs between torch releases, or is not public in torch. Nothing else in the package touches these names."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

# torch 2.13 renamed the single-tensor collectives and warns on the old names.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def default_store() -> Any:
    """A connection of its own to the store that the default process group was made with, or None."""
    store: Any = dist.distributed_c10d._get_default_store()
    try:
        return store.clone()
    except (AttributeError, NotImplementedError, RuntimeError):
        return store


def abort_native(group: dist.ProcessGroup) -> None:
    """Abort the collectives in flight of a backend that can (NCCL); gloo is broken up in `Channel.abort`."""
    dist.distributed_c10d._abort_process_group(group)


def queue_backward_callback(callback: Any) -> None:
    """Run `callback` when the backward pass that is executing has ended. Only valid inside a backward pass."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def inside_backward() -> bool:
    """Whether the calling code runs inside a backward pass (a hook, or recomputation)."""
    return bool(torch._C._current_graph_task_id() != -1)
