"""Activation checkpointing by config: blocks keep their inputs only, and compute the rest again in the backward pass.

torch does the recomputing (`torch.utils.checkpoint`, non-reentrant); this chooses the modules, what is saved all the same,
and where the inputs of blocks wait for the backward pass. (Training Deep Nets with Sublinear Memory Cost, Chen et al.,
2016.)
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any
from weakref import ref

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from zerotrain.zero.discover import repeated_blocks

logger = logging.getLogger("zerotrain")
_CACHES = ("past_key_value", "past_key_values", "layer_past")
aten = torch.ops.aten
POLICIES: dict[str, tuple[Any, ...]] = {
    "full": (),
    "save_matmuls": (
        aten.mm.default,
        aten.addmm.default,
        aten.bmm.default,
        aten.baddbmm.default,
        aten.convolution.default,
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_cudnn_attention.default,
    ),
}
"""By name, the operations whose results are saved in place of being computed again."""


@dataclass(frozen=True)
class RecomputeOptions:
    """Which blocks are recomputed, and how; see `activation_checkpointing` in the config."""

    every: int = 1
    modules: tuple[str, ...] = ()
    policy: str = "full"
    offload: bool = False
    offload_bytes: int | None = None


def install(model: nn.Module, options: RecomputeOptions) -> list[Recomputed]:
    """Have the chosen blocks of `model` recompute; each can be undone with `remove()`.

    ValueError where a pattern matches no module, or none is chosen and the model has no repeated blocks.
    """
    chosen = list(_chosen(model, options.modules).values())[:: options.every]
    budget = Budget(options.offload_bytes) if options.offload else None
    return [Recomputed(module, POLICIES[options.policy], budget) for module in chosen]


def _chosen(model: nn.Module, patterns: tuple[str, ...]) -> Mapping[str, nn.Module]:
    if not patterns:
        found: Mapping[str, nn.Module] = repeated_blocks(model)
        if not found:
            raise ValueError(
                "activation_checkpointing: the model has no repeated blocks to recompute; name modules in "
                "activation_checkpointing.modules"
            )
        return found
    named = {path: module for path, module in model.named_modules() if path}
    for pattern in patterns:
        if not any(fnmatchcase(path, pattern) for path in named):
            raise ValueError(f"activation_checkpointing.modules: {pattern!r} matches no module")
    found = {path: m for path, m in named.items() if any(fnmatchcase(path, pattern) for pattern in patterns)}
    return {p: m for p, m in found.items() if not any(p.startswith(outer + ".") for outer in found)}


class Recomputed:
    """Stands in the place of a module's `forward` while it trains."""

    def __init__(self, module: nn.Module, saved: tuple[Any, ...], budget: Budget | None) -> None:
        self._module = ref(module)
        self._given: Callable[..., Any] | None = module.__dict__.get("forward")
        self._saved = saved
        self._budget = budget
        module.forward = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward, which keeps only its inputs where it will be differentiated."""
        module = self._module()
        assert module is not None
        forward = functools.partial(type(module).forward, module) if self._given is None else self._given
        if not (torch.is_grad_enabled() and module.training):
            return forward(*args, **kwargs)
        options: dict[str, Any] = {}
        if self._saved:
            options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, list(self._saved))
        away = self._budget.saved_tensors() if self._budget is not None else contextlib.nullcontext()
        with away:
            return checkpoint(forward, *args, use_reentrant=False, **options, **_without_caches(kwargs))

    def remove(self) -> None:
        """Put the module's own `forward` back."""
        module = self._module()
        if module is not None and module.__dict__.get("forward") is self:
            del module.__dict__["forward"]
            if self._given is not None:
                module.forward = self._given

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A copied module computes as its class does."""
        module = memo.get(id(self._module()))
        return functools.partial(type(module).forward, module) if module is not None else None

    def __reduce__(self) -> Any:
        raise TypeError("a model whose blocks recompute cannot be pickled; save its state_dict, or a checkpoint")


def _without_caches(kwargs: dict[str, Any]) -> dict[str, Any]:
    """A cache of keys and values would be filled again by the recomputation: training goes without."""
    return {key: None if key in _CACHES else value for key, value in kwargs.items()}


class Budget:
    """Moves tensors that autograd saves to host memory, up to `limit` bytes at a time (None: all)."""

    def __init__(self, limit: int | None, host: torch.device | None = None) -> None:
        self.limit = limit
        self.held = 0
        """Bytes in host memory now."""
        self._host = host or torch.device("cpu")

    def saved_tensors(self) -> contextlib.AbstractContextManager[Any]:
        """Within, tensors that are saved for the backward pass wait for it in host memory."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    def _pack(self, tensor: torch.Tensor) -> Any:
        fits = self.limit is None or self.held + tensor.nbytes <= self.limit
        if not self._leaves(tensor) or not fits:
            return tensor
        return _Away(tensor, self)

    def _leaves(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type != self._host.type and tensor.numel() > 0

    def _unpack(self, packed: Any) -> torch.Tensor:
        return packed.back() if isinstance(packed, _Away) else packed


class _Away:
    """A tensor that waits in host memory. The copy down overlaps what follows on the device's stream."""

    def __init__(self, tensor: torch.Tensor, budget: Budget) -> None:
        self._budget = budget
        self._device = tensor.device
        self._nbytes = tensor.nbytes
        pinned = tensor.device.type != "cpu"
        self._copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned)
        self._copy.copy_(tensor, non_blocking=True)
        budget.held += self._nbytes

    def back(self) -> torch.Tensor:
        return self._copy.to(self._device, non_blocking=True)

    def __del__(self) -> None:
        self._budget.held -= self._nbytes
