"""The gradients of one flat buffer: from where autograd leaves them to this rank's reduced share.

    autograd ──accept──▶ full (whole, this rank's sum) ──reduce_scatter──▶ partial (this rank's share, summed over the
    shard group) ──all_reduce over the replicas, at the boundary──▶ settled (what the optimizer steps with)

Gradients are moved out of `p.grad` as they arrive, so `p.grad` is None between backward and step: the sums kept here
are neither averaged nor unscaled, and a script that read them as gradients would silently be wrong by a factor.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from zerotrain.comm import Channel, Pending
from zerotrain.comm.channel import sum_pieces
from zerotrain.zero.layout import FlatLayout
from zerotrain.zero.stages import Policy

POOLED = 2  # whole gradient buffers of one size kept for reuse: the number that is in flight at a time


class GradientPool:
    """Whole gradient buffers that outlive a unit's reduction, so that a backward does not fault in fresh memory."""

    def __init__(self) -> None:
        self._free: defaultdict[tuple[torch.dtype, int], list[torch.Tensor]] = defaultdict(list)

    def take(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        free = self._free[dtype, numel]
        return free.pop() if free else torch.empty(numel, dtype=dtype, device=device)

    def give(self, buffer: torch.Tensor) -> None:
        free = self._free[buffer.dtype, buffer.numel()]
        if len(free) < POOLED:
            free.append(buffer)

    def clear(self) -> None:
        self._free.clear()

    def tensors(self) -> Iterator[torch.Tensor]:
        for free in self._free.values():
            yield from free


@dataclass(frozen=True)
class Partition:
    """How the states of a model are spread: the row of the table, and the ranks and wires it runs over.

    Gathers and reductions have channels of their own over the same ranks, because their orders are independent.
    """

    policy: Policy
    gather: Channel
    reduce: Channel
    replicate: Channel
    pool: GradientPool
    wire: torch.dtype | None = None
    """dtype gradients are sent in when it is given (`communication_data_type`); None: as narrow as loses nothing."""

    @property
    def shards(self) -> int:
        return self.reduce.size


class Gradients:
    """`index` is this rank's shard; `dtype` that of the parameters. Sums are kept in fp32, or in fp64 for fp64."""

    def __init__(
        self, layout: FlatLayout, dtype: torch.dtype, device: torch.device, plan: Partition, name: str
    ) -> None:
        self.layout = layout
        self.plan = plan
        self.name = name
        self.device = device
        self.dtype = dtype
        self.sum_dtype = accumulation_dtype(dtype)
        self.full: torch.Tensor | None = None
        self.partial: torch.Tensor | None = None
        self.settled: torch.Tensor | None = None
        self.filled = [False] * len(layout.slots)
        self.touched = [False] * len(layout.slots)
        self._spare: torch.Tensor | None = None  # the shard-sized sums of the last window, for reuse

    # -- arrival ------------------------------------------------------------------------------------------------------

    def accept(self, index: int, grad: torch.Tensor, narrow: bool) -> None:
        """Add `grad` to slot `index`. `narrow`: this is the only contribution before a reduction, 16 bits suffice."""
        if self.full is None:
            self.full = self._allocate(narrow)
        slot = self.layout.slots[index]
        view = self.full[slot.start : slot.stop]
        values = (grad.to_dense() if grad.is_sparse else grad).reshape(-1)
        if self.filled[index]:
            view.add_(values)
        else:
            if self.settled is not None:
                self._detach()
            view.copy_(values)
            self.filled[index] = self.touched[index] = True

    def _detach(self) -> None:
        """Keep what is settled out of the whole buffer, which a further backward in the window is about to fill."""
        full, settled = self.full, self.settled
        if full is not None and settled is not None and full.untyped_storage()._cdata == settled.untyped_storage()._cdata:
            self.settled = settled.clone()

    def _allocate(self, narrow: bool) -> torch.Tensor:
        if not self.plan.policy.shard_gradients:
            return torch.empty(self.layout.numel, dtype=self.sum_dtype, device=self.device)
        return self.plan.pool.take(self.layout.numel, self.dtype if narrow else self.sum_dtype, self.device)

    @property
    def waiting(self) -> bool:
        """Contributions of this rank that no reduction has taken yet."""
        return any(self.filled)

    # -- reduction ----------------------------------------------------------------------------------------------------

    def reduce(self, final: bool, narrow: bool) -> Pending | None:
        """Start summing what has arrived over the shard group, and if `final` over the replicas as well.

        Every rank must call this alike, also where nothing arrived (it counts as zeros).
        """
        if self.full is None:
            self.full = self._allocate(narrow)
        self._detach()
        for slot, filled in zip(self.layout.slots, self.filled, strict=True):
            if not filled:
                self.full[slot.start : slot.stop].zero_()
        self.full[self.layout.used :].zero_()
        self.filled = [False] * len(self.filled)
        if self.plan.shards == 1:
            self._merge([self.full])
            return self.settle(narrow) if final else None
        pending = self.plan.reduce.reduce_scatter(self.full, self._wire(narrow), self._merge, self.name)
        return pending.then(self.settle) if final else pending

    def settle(self, narrow: bool = False) -> Pending | None:
        """Sum the partial share over the replicas (started here, finished by the Pending) and call it settled."""
        if self.partial is None:
            return None
        if self.plan.replicate.size == 1:
            self._finish()
            return None
        return self.plan.replicate.all_reduce(self.partial, self._wire(narrow), self.name).then(self._finish)

    def _wire(self, narrow: bool) -> torch.dtype:
        if self.plan.wire is not None and self.dtype != torch.float64:
            return self.plan.wire
        return self.dtype if narrow else self.sum_dtype

    def _merge(self, pieces: list[torch.Tensor]) -> None:
        """Take the pieces of this rank's share into `partial`, and let the whole buffer go where the stage says so."""
        assert self.full is not None
        own = self.plan.reduce.index if len(pieces) > 1 or self.plan.shards == 1 else None
        if not self.plan.policy.shard_gradients:
            share = self.full[slice(*self.layout.shard_range(self.plan.reduce.index))]
            sum_pieces(pieces, share, into_is=own)
            if self.partial is not None:
                share.add_(self.partial)
            self.partial = share
            return
        if self.partial is None:
            self.partial = self._share()
            sum_pieces(pieces, self.partial)
        else:
            for piece in pieces:
                self.partial.add_(piece)
        self.plan.pool.give(self.full)
        self.full = None

    def _share(self) -> torch.Tensor:
        share, self._spare = self._spare, None
        if share is None:
            share = torch.empty(self.layout.shard_numel, dtype=self.sum_dtype, device=self.device)
        return share

    def _finish(self) -> None:
        if self.partial is None:
            return
        self.settled = self.partial if self.settled is None else self.settled.add_(self.partial)
        self.partial = None

    # -- the end of a window ------------------------------------------------------------------------------------------

    def clear(self) -> None:
        """Forget everything that arrived since the last step."""
        if self.plan.policy.shard_gradients:
            for kept in (self.settled, self.partial):
                if kept is not None:
                    self._spare = kept
            if self.full is not None:
                self.plan.pool.give(self.full)
                self.full = None
        self.settled = self.partial = None
        self.filled = [False] * len(self.filled)
        self.touched = [False] * len(self.touched)

    def tensors(self) -> Iterator[torch.Tensor]:
        """Every tensor held here, for accounting."""
        for tensor in (self.full, self.partial, self.settled, self._spare):
            if tensor is not None:
                yield tensor


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """fp32 for 16-bit parameters, their own dtype for wider ones."""
    return torch.float32 if dtype.itemsize < 4 else dtype
