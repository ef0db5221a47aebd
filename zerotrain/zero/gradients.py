"""The gradients of one flat buffer: from where autograd leaves them to this rank's reduced share.

    autograd ──accept──▶ held (this rank's sums) ──reduce_scatter──▶ partial (this rank's share, summed over the shard
    group) ──all_reduce over the replicas, at the boundary──▶ settled (what the optimizer steps with)

Large gradients stay in the memory that autograd gave them and are sent from there, so no pass over memory copies them
into a buffer first; small ones are packed. They are taken out of `p.grad` as they arrive, which is None between backward
and step: the sums held here are neither averaged nor unscaled, and a script that read them as gradients would silently
be wrong by a factor.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from zerotrain.comm import Channel, Pending
from zerotrain.comm.channel import Term, sum_terms
from zerotrain.zero.layout import FlatLayout
from zerotrain.zero.stages import Policy

LARGE = 1 << 15  # elements; from this size on, a message of its own costs less than a copy


@dataclass(frozen=True)
class Partition:
    """How the states of a model are spread: the row of the table, and the ranks and wires it runs over.

    Gathers and reductions have channels of their own over the same ranks, because their orders are independent.
    """

    policy: Policy
    gather: Channel
    reduce: Channel
    replicate: Channel
    wire: torch.dtype | None = None
    """dtype gradients are sent in when it is given (`communication_data_type`); None: as narrow as loses nothing."""

    @property
    def shards(self) -> int:
        """Ranks that share one copy of the states."""
        return self.reduce.size

    @property
    def alone(self) -> bool:
        """One rank: nothing is gathered or reduced."""
        return self.reduce.size * self.replicate.size == 1


class Gradients:
    """Gradients of parameters of `dtype` laid out as in `layout`. Sums are kept in fp32, or in fp64 for fp64.

    `layout` has the large parameters first: `held[i]` is the 1-d gradient of slot i, `tail` packs all others.
    """

    def __init__(
        self, layout: FlatLayout, dtype: torch.dtype, device: torch.device, plan: Partition, name: str
    ) -> None:
        self.layout = layout
        self.plan = plan
        self.name = name
        self.device = device
        self.dtype = dtype
        self.sum_dtype = accumulation_dtype(dtype)
        large = [slot for slot in layout.slots if slot.numel >= LARGE]
        assert list(layout.slots[: len(large)]) == large
        self._tail_start = large[-1].stop if large else 0
        self.held: list[torch.Tensor | None] = [None] * len(large)
        self.tail: torch.Tensor | None = None
        self.partial: torch.Tensor | None = None
        self.settled: torch.Tensor | None = None
        self.filled = [False] * len(layout.slots)
        """Which slots hold contributions that no reduction has taken yet."""
        self.touched = [False] * len(layout.slots)
        """Which slots got a gradient since the last step: here, and once the ranks have agreed, on any rank."""
        self._whole: list[tuple[int, torch.Tensor | None]] = []  # of a rank that is alone: its parts are the result

    # -- arrival ------------------------------------------------------------------------------------------------------

    def accept(self, index: int, grad: torch.Tensor) -> None:
        """Add `grad`, of the shape of slot `index`. Its memory may be kept and added to."""
        values = (grad.to_dense() if grad.is_sparse else grad).detach().reshape(-1)
        if index >= len(self.held):
            view = self._tail_view(index)
            view.add_(values) if self.filled[index] else view.copy_(values)
        else:
            held = self.held[index]
            if held is None:
                self.held[index] = values
            else:
                held = self.held[index] = held.to(self.sum_dtype)
                held.add_(values)
        self.filled[index] = self.touched[index] = True

    def unreduced(self, index: int) -> torch.Tensor | None:
        """This rank's contributions to slot `index` that no reduction has taken yet, 1-d."""
        if not self.filled[index]:
            return None
        return self.held[index] if index < len(self.held) else self._tail_view(index)

    def put(self, index: int, values: torch.Tensor) -> None:
        """Replace this rank's unreduced contributions to slot `index` by the 1-d `values`."""
        self.filled[index] = False
        if index < len(self.held):
            self.held[index] = None
        self.accept(index, values.clone())

    def _tail_view(self, index: int) -> torch.Tensor:
        if self.tail is None:
            numel = self.layout.numel - self._tail_start
            self.tail = torch.empty(numel, dtype=self.sum_dtype, device=self.device)
        slot = self.layout.slots[index]
        return self.tail[slot.start - self._tail_start : slot.stop - self._tail_start]

    # -- reduction ----------------------------------------------------------------------------------------------------

    def reduce(self, final: bool, narrow: bool) -> Pending | None:
        """Start summing what has arrived over the shard group, and if `final` over the replicas as well.

        Every rank must call this alike, also where nothing arrived (it counts as zeros). `narrow`: every slot got at most
        one contribution, which is in the parameters' own dtype and loses nothing on a wire of that dtype.
        """
        if self.plan.alone:
            self._whole = [(start, None if part is None else part.to(self.sum_dtype)) for start, part in self._take()]
            return None
        parts = [self._zeros(start) if part is None else part for start, part in self._take()]
        if self.plan.shards == 1:
            out = self._share()
            pending = self.plan.replicate.all_reduce(parts, out, self._wire(narrow), self.name)
            return pending.then(lambda: self._finish(out))
        pending = self.plan.reduce.reduce_scatter(parts, self._wire(narrow), self._merge, self.name)
        return pending.then(self.settle) if final else pending

    def settle(self) -> Pending | None:
        """Sum the partial share over the replicas (started here, finished by the Pending) and call it settled."""
        partial, self.partial = self.partial, None
        if partial is None:
            return None
        if self.plan.replicate.size == 1:
            self._finish(partial)
            return None
        pending = self.plan.replicate.all_reduce([partial], partial, self._wire(narrow=False), self.name)
        return pending.then(lambda: self._finish(partial))

    def reduced(self, start: int, stop: int) -> torch.Tensor | None:
        """Elements `[start, stop)` of this rank's settled share; None where no gradient arrived at all.

        A rank that is alone has the parts as they arrived: the range must lie within one of `part_starts`.
        """
        if self.settled is not None:
            return self.settled[start:stop]
        for low, part in self._whole:
            if part is not None and low <= start and stop <= low + part.numel():
                return part[start - low : stop - low]
        return None

    @property
    def part_starts(self) -> list[int]:
        """Where in the flat buffer each large slot begins, and the packed small ones behind them."""
        return [slot.start for slot in self.layout.slots[: len(self.held)]] + [self._tail_start]

    def _take(self) -> list[tuple[int, torch.Tensor | None]]:
        """The contributions, as parts that cover the flat buffer in order, with their starts; this forgets them."""
        if not any(self.filled[len(self.held) :]) and self.tail is not None:
            self.tail.zero_()
        elif self.tail is not None:
            for index in range(len(self.held), len(self.filled)):
                if not self.filled[index]:
                    self._tail_view(index).zero_()
            self.tail[self.layout.used - self._tail_start :].zero_()
        parts = list(zip(self.part_starts, [*self.held, self.tail], strict=True))
        if self._tail_start == self.layout.numel:
            parts.pop()
        self.held = [None] * len(self.held)
        self.tail = None
        self.filled = [False] * len(self.filled)
        return parts

    def _zeros(self, start: int) -> torch.Tensor:
        starts = [*self.part_starts, self.layout.numel]
        stop = next(s for s in starts if s > start)
        return torch.zeros(stop - start, dtype=self.sum_dtype, device=self.device)

    def _wire(self, narrow: bool) -> torch.dtype:
        if self.plan.wire is not None and self.dtype.itemsize <= 4:
            return self.plan.wire
        return self.dtype if narrow else self.sum_dtype

    def _merge(self, terms: list[Term]) -> None:
        """Add the ranks' terms of this rank's share to `partial`."""
        fresh = self.partial is None
        if self.partial is None:
            self.partial = self._share()
        for term in terms:
            sum_terms(term.values, self.partial[term.offset : term.offset + term.values[0].numel()], fresh)

    def _share(self) -> torch.Tensor:
        return torch.empty(self.layout.shard_numel, dtype=self.sum_dtype, device=self.device)

    def _finish(self, share: torch.Tensor) -> None:
        self.settled = share if self.settled is None else self.settled.add_(share)

    # -- the end of a window ------------------------------------------------------------------------------------------

    def clear(self) -> None:
        """Forget everything that arrived since the last step."""
        self.partial = self.settled = self.tail = None
        self.held = [None] * len(self.held)
        self._whole = []
        self.filled = [False] * len(self.filled)
        self.touched = [False] * len(self.touched)

    def tensors(self) -> Iterator[torch.Tensor]:
        """Every tensor held here, for accounting."""
        whole = (part for _, part in self._whole)
        for tensor in (*self.held, self.tail, *whole, self.partial, self.settled):
            if tensor is not None:
                yield tensor


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """fp32 for 16-bit parameters, their own dtype for wider ones."""
    return torch.float32 if dtype.itemsize < 4 else dtype
