"""A unit: the parameters that are gathered, reduced and released together, as views into flat buffers.

What `param.data` is, at each moment:

    WHOLE     a view of the flat buffer; guarded while no module of a sharded unit computes, since it may be released
    PENDING   the same view, guarded: a gather is filling the buffer, and the first use waits for it
    SHARDED   the same view, guarded, of a storage resized to nothing; this rank keeps only its shard

The storage is emptied and refilled in place, never replaced, because autograd saves views of it (`weight.t()`).
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from weakref import ref

import torch
from torch import nn

from zerotrain.comm import Pending
from zerotrain.errors import ZerotrainError
from zerotrain.zero.gradients import Gradients, Partition, accumulation_dtype
from zerotrain.zero.guard import guard, unguard
from zerotrain.zero.layout import FlatLayout


class Residence(enum.Enum):
    """Where a unit's values are."""

    WHOLE = "whole on this rank"
    PENDING = "a gather is under way"
    SHARDED = "every rank holds its shard only"


class FlatBuffer:
    """The parameters of a unit that share a dtype and are all trainable or all frozen.

    `flat` holds them whole (numel = layout.numel) while the unit is WHOLE. `shard` is this rank's part in the same dtype:
    a slice of `flat`, or a tensor of its own where parameters are sharded. `master` is the fp32 part that the optimizer
    updates: `shard` itself unless the parameters have 16 bits; None for frozen parameters.
    """

    def __init__(self, name: str, parameters: Sequence[tuple[str, nn.Parameter]], plan: Partition) -> None:
        self.name = name
        self.names = [n for n, _ in parameters]
        self.parameters = [p for _, p in parameters]
        first = self.parameters[0]
        self.trainable = first.requires_grad
        self.dtype = first.dtype
        self.sharded = plan.policy.shard_parameters and plan.shards > 1
        split = self.sharded or (self.trainable and plan.policy.shard_optimizer)
        shapes = [(n, tuple(p.shape)) for n, p in parameters]
        self.layout = FlatLayout.of(shapes, plan.shards if split else 1)
        self.index = plan.reduce.index if split else 0
        self.plan = plan
        self.flat: torch.Tensor
        self.shard: torch.Tensor
        self.master: torch.Tensor | None = None
        self.gradients: Gradients | None = None
        self.versions: list[int] = []

    def fill(self, whole: torch.Tensor, dtype: torch.dtype) -> None:
        """Take the values from `whole` (numel = layout.numel), keep them in `dtype`, and point the parameters here."""
        self.dtype = dtype
        low, high = self.layout.shard_range(self.index)
        self.flat = whole.to(dtype)
        self.shard = self.flat[low:high].clone() if self.sharded else self.flat[low:high]
        if self.trainable:
            wide = accumulation_dtype(dtype)
            self.master = self.shard if wide == dtype else whole[low:high].to(wide, copy=True)
            self.gradients = Gradients(self.layout, dtype, self.flat.device, self.plan, self.name)
        for slot, parameter in zip(self.layout.slots, self.parameters, strict=True):
            parameter.grad = None
            parameter.data = self.flat[slot.start : slot.stop].view(slot.shape)
        self.versions = [p._version for p in self.parameters]

    @property
    def gathers(self) -> bool:
        """Whether there is anything to gather: more than one shard, of values that change or are not kept whole."""
        return self.layout.shards > 1

    def gather(self) -> Pending:
        """Start filling `flat` from every rank's shard."""
        if self.sharded:
            self.flat.untyped_storage().resize_(self.flat.numel() * self.flat.itemsize)
            low, high = self.layout.shard_range(self.index)
            self.flat.data[low:high].copy_(self.shard)
        return self.plan.gather.all_gather(self.flat.data, self.shard, self.name)

    def whole(self, share: torch.Tensor) -> torch.Tensor:
        """The flat tensor of which every rank holds its `share` (numel = layout.shard_numel), in new memory."""
        flat = share.new_empty(self.layout.numel)
        low, high = self.layout.shard_range(self.index)
        flat[low:high].copy_(share)
        if self.layout.shards > 1:
            self.plan.gather.all_gather(flat, flat[low:high], f"states of {self.name}").wait()
        return flat

    def empty(self) -> None:
        """Give the memory of `flat` back, where the parameters are sharded."""
        if self.sharded:
            self.flat.untyped_storage().resize_(0)

    def refresh_shard(self) -> None:
        """Round the master values into the shard, after they were updated."""
        if self.master is not None and self.master is not self.shard:
            self.shard.copy_(self.master)

    def bump_versions(self) -> None:
        """Tell autograd that the values changed, so that a backward through older ones is an error, as in torch."""
        torch.autograd.graph.increment_version(self.parameters)
        self.versions = [p._version for p in self.parameters]

    def check(self) -> None:
        """Raise ZerotrainError where a parameter no longer is the view that `fill` made of it."""
        start, size = self.flat.data_ptr(), self.flat.itemsize
        for name, slot, p in zip(self.names, self.layout.slots, self.parameters, strict=True):
            if slot.numel and (p.data_ptr() != start + slot.start * size or p.dtype != self.dtype):
                raise ZerotrainError(
                    f"parameter '{name}' has other storage ({p.dtype} on {p.device}) than initialize() gave it "
                    f"({self.dtype} on {self.flat.device}), so the optimizer would train the old one. Convert and move "
                    "the model before initialize(), choose the compute dtype in the config (bf16, fp16), and change "
                    "values in place, inside `with zerotrain.gathered(model, modify=True):`"
                )

    def edited(self) -> bool:
        """Whether the parameters were written in place by somebody else since the last look."""
        versions = [p._version for p in self.parameters]
        changed, self.versions = versions != self.versions, versions
        return changed

    def adopt_edits(self) -> None:
        """Take values written into the whole parameters over into the master, where they differ from it."""
        if self.master is None or self.master is self.shard:
            if self.sharded:
                self.shard.copy_(self.flat[slice(*self.layout.shard_range(self.index))])
            return
        now = self.flat[slice(*self.layout.shard_range(self.index))]
        kept = now == self.master.to(self.dtype)
        self.master.copy_(torch.where(kept, self.master, now.to(self.master.dtype)))
        self.shard.copy_(now)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every tensor held, with the kind of state it is, for accounting."""
        yield "parameters", self.flat
        yield "parameters", self.shard
        if self.master is not None and self.master is not self.shard:
            yield "master", self.master
        if self.gradients is not None:
            for tensor in self.gradients.tensors():
                yield "gradients", tensor


class Unit:
    """`modules` are where the forward pass enters the unit; `name` is the path of the first."""

    def __init__(
        self, name: str, modules: Sequence[nn.Module], buffers: Sequence[FlatBuffer], tied: bool = False
    ) -> None:
        self.name = name
        self.tied = tied
        """Some parameter of it is reached through more than one module."""
        self.modules = tuple(modules)
        self.buffers: tuple[FlatBuffer, ...]
        self.trainable: tuple[FlatBuffer, ...]
        self.frozen: tuple[FlatBuffer, ...]
        self.numel: int
        self.lay_out(buffers)
        self.residence = Residence.WHOLE
        self.pinned = False
        """Kept whole until the end of the backward: something may use its values that no hook announces."""
        self.guarded = False
        self.running = 0
        """Calls of its modules under way."""
        self.on_demand: Callable[[Unit, nn.Parameter, Any], None] | None = None
        self._pending: list[Pending] = []

    def lay_out(self, buffers: Sequence[FlatBuffer]) -> None:
        """Take `buffers` in the place of those it had."""
        self.buffers = tuple(buffers)
        self.trainable = tuple(b for b in buffers if b.trainable)
        self.frozen = tuple(b for b in buffers if not b.trainable)
        self.numel = sum(b.layout.used for b in buffers)

    @property
    def sharded(self) -> bool:
        """Whether its parameters are whole only while it computes."""
        return any(b.sharded for b in self.buffers)

    @property
    def gathers(self) -> bool:
        """Whether it is ever put together from the ranks' shards."""
        return any(b.gathers for b in self.buffers)

    @property
    def parameters(self) -> Iterator[nn.Parameter]:
        """Its parameters, buffer by buffer."""
        for buffer in self.buffers:
            yield from buffer.parameters

    def gather(self) -> None:
        """Start making the unit whole, if it is not, and if nothing has started it yet."""
        if self.residence is Residence.SHARDED:
            self._pending = [b.gather() for b in self.buffers if b.gathers]
            self.residence = Residence.PENDING

    def rebuild(self) -> None:
        """Start replacing whole but outdated values by those of the shards, after the optimizer has updated them."""
        self.wait()
        self._pending = [b.gather() for b in self.buffers if b.gathers and b.trainable]
        if self._pending:
            self.residence = Residence.PENDING
            self.guard()

    def wait(self) -> None:
        """Return when the unit is whole and may be used. Starts the gather, if nothing has."""
        if self.residence is not Residence.WHOLE:
            self.gather()
            pending, self._pending = self._pending, []
            for collective in pending:
                collective.wait()
            self.residence = Residence.WHOLE
        if self.guarded:
            self.guarded = False
            for parameter in self.parameters:
                unguard(parameter)

    def wait_pending(self) -> None:
        """Return when no gather writes into the unit any more."""
        if self.residence is Residence.PENDING:
            self.wait()

    def guard(self) -> None:
        """Have every use of the parameters that no hook announces ask first (see `require`)."""
        if not self.guarded:
            self.guarded = True
            owner = ref(self)
            for parameter in self.parameters:
                guard(parameter, owner)

    def release(self) -> None:
        """Give the memory of the whole values back. Only what is sharded is released."""
        if not self.sharded or self.residence is Residence.SHARDED:
            return
        if self.residence is Residence.PENDING:
            self.wait()
        for buffer in self.buffers:
            buffer.empty()
        self.residence = Residence.SHARDED
        self.guard()

    def require(self, parameter: nn.Parameter, function: Callable[..., Any]) -> None:
        """Make the unit whole for a use that no hook announced, or raise ReleasedParameterError (see `guard`)."""
        if self.sharded and self.on_demand is not None:
            self.on_demand(self, parameter, function)
        self.wait()

    def name_of(self, parameter: nn.Parameter) -> str:
        """The parameter's name in the model."""
        for buffer in self.buffers:
            for name, candidate in zip(buffer.names, buffer.parameters, strict=True):
                if candidate is parameter:
                    return name
        raise KeyError(f"not a parameter of unit {self.name}")
