"""A channel: one process group that carries one ordered sequence of collectives.

Gathers, reductions and control messages travel on channels of their own, so that the order *between* them may differ
from rank to rank (autograd decides it) while the order *within* each is fixed and checked.

gloo's own reduce-scatter is an all-reduce plus copies, and its all-gather stages through copies; sending pieces point
to point is two to four times faster, and lets 16-bit pieces be summed in fp32. NCCL keeps its native collectives.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist

from zerotrain.comm import torch_compat
from zerotrain.comm.traffic import Traffic
from zerotrain.comm.watch import Watch

HISTORY = 256  # collectives remembered per channel, to name the first one that differs between ranks


class Pending:
    """A collective in flight, and what follows when it is done (which may put further collectives in flight)."""

    def __init__(self, channel: Channel, entry: tuple[int, str], works: list[Any]) -> None:
        self._channel = channel
        self._entry = entry
        self._works = works
        self._steps: deque[Callable[[], Pending | None]] = deque()

    def then(self, step: Callable[[], Pending | None]) -> Pending:
        """Run `step` when all before it is done; a Pending that it returns is waited for before the next step."""
        self._steps.append(step)
        return self

    def advance(self) -> bool:
        """Wait for the works under way and run the next step, if any. True when nothing is left."""
        self._channel.join(self._works, self._entry)
        self._works = []
        if self._steps:
            following = self._steps.popleft()()
            if following is not None:
                self._channel, self._entry, self._works = following._channel, following._entry, following._works
                self._steps.extendleft(reversed(following._steps))
        return not self._works and not self._steps

    def wait(self) -> None:
        """Return when everything is done. Raises RankMismatchError where that will never be."""
        while not self.advance():
            pass


class Channel:
    """Collectives among `ranks`, each labelled, counted in `traffic` and watched by `watch`.

    `index` is this rank's place among `ranks`; a channel of one rank moves nothing.
    """

    def __init__(self, name: str, ranks: Sequence[int], traffic: Traffic, watch: Watch, group: Any = None) -> None:
        self.name = name
        self.ranks = tuple(ranks)
        self.size = len(self.ranks)
        self.group = group
        self.index = self.ranks.index(dist.get_rank()) if self.size > 1 else 0
        self.traffic = traffic
        self.watch = watch
        self.sequence = 0
        self.signature = 0
        self.history: deque[tuple[int, str]] = deque(maxlen=HISTORY)
        self.backend = dist.get_backend(group) if self.size > 1 else "none"
        self.point_to_point = self.backend == "gloo"
        self.device = _device_of(self.backend)
        """Where tensors must lie to travel on this channel."""
        watch.register(self)

    # -- collectives on equal pieces of one flat buffer ---------------------------------------------------------------

    def all_gather(self, flat: torch.Tensor, own: torch.Tensor, label: str) -> Pending:
        """Fill `flat` (numel = size * own.numel(), this rank's piece already in place) with every rank's piece.

        `own` holds this rank's values; it may be the slice of `flat` itself. Any dtype: bytes are moved as they are.
        """
        flat, own = flat.view(torch.uint8), own.view(torch.uint8)
        entry = self._begin("all_gather", label, (self.size - 1) * own.numel())
        if self.point_to_point:
            return Pending(
                self, entry, self._exchange(entry, [[own]] * self.size, [[p] for p in flat.chunk(self.size)])
            )
        work = torch_compat.all_gather_single(flat, own, group=self.group, async_op=True)
        return Pending(self, entry, [work])

    def reduce_scatter(
        self,
        parts: Sequence[torch.Tensor],
        wire: torch.dtype,
        accept: Callable[[list[Term]], None],
        label: str,
    ) -> Pending:
        """Sum a flat buffer over the ranks, each of which keeps an equal piece of the sum.

        `parts` are 1-d tensors that make up the buffer in order (numel divisible by size); they are sent from where they
        lie, in dtype `wire`, and must not change until the Pending is done. Then `accept` gets the terms of this rank's
        piece to add up in a dtype of its choice. A native backend that has summed already hands over a single value.
        """
        numel = sum(part.numel() for part in parts)
        piece = numel // self.size
        entry = self._begin("reduce_scatter", label, (numel - piece) * wire.itemsize)
        if self.point_to_point:
            terms, works = self._scatter(entry, parts, [piece * i for i in range(self.size + 1)], wire)
            return Pending(self, entry, works).then(lambda: accept(terms))
        flat = torch.cat([part.to(wire) for part in parts])
        if wire.itemsize >= 4:
            received = flat.new_empty(piece)
            values = [received]
            works = [torch_compat.reduce_scatter_single(received, flat, group=self.group, async_op=True)]
        else:  # native sums of 16-bit terms would round at every hop: exchange them, and sum in fp32 here
            received = torch.empty_like(flat)
            values = list(received.chunk(self.size))
            works = [dist.all_to_all_single(received, flat, group=self.group, async_op=True)]
        return Pending(self, entry, works).then(lambda: accept([Term(0, values)]))

    def all_reduce(self, parts: Sequence[torch.Tensor], out: torch.Tensor, wire: torch.dtype, label: str) -> Pending:
        """Sum the flat buffer that `parts` make up into the 1-d `out`, which may be the only part itself.

        Every rank ends with the same bits. Terms travel in dtype `wire`, sums in that of `out`.
        """
        numel, itemsize = out.numel(), out.itemsize
        if not self.point_to_point or numel < 16 * self.size:
            if parts[0] is not out:
                torch.cat([part.to(out.dtype) for part in parts], out=out)
            entry = self._begin("all_reduce", label, 2 * (self.size - 1) * out.nbytes // self.size)
            return Pending(self, entry, [dist.all_reduce(out, group=self.group, async_op=True)])
        bounds = [numel * i // self.size for i in range(self.size + 1)]
        low, high = bounds[self.index], bounds[self.index + 1]
        sent = (numel - (high - low)) * wire.itemsize + (self.size - 1) * (high - low) * itemsize
        entry = self._begin("all_reduce", label, sent)
        terms, works = self._scatter(entry, parts, bounds, wire)

        def gather() -> Pending:
            own = out[low:high]
            for term in terms:
                sum_terms(term.values, own[term.offset : term.offset + term.values[0].numel()])
            terms.clear()
            pieces = [[out[a:b]] for a, b in pairwise(bounds)]
            return Pending(self, entry, self._exchange(entry, [[own]] * self.size, pieces))

        return Pending(self, entry, works).then(gather)

    def broadcast(self, tensor: torch.Tensor, label: str) -> None:
        """Give every rank the bytes that the first rank of the channel holds in `tensor` (contiguous, any dtype)."""
        if self.size == 1 or tensor.numel() == 0:
            return
        entry = self._begin("broadcast", label, tensor.nbytes if self.index == 0 else 0)
        data = tensor.view(-1).view(torch.uint8)
        work = dist.broadcast(data, src=self.ranks[0], group=self.group, async_op=True)
        Pending(self, entry, [work]).wait()

    # -- small things that every rank needs from every rank -----------------------------------------------------------

    def exchange(self, values: torch.Tensor, label: str) -> torch.Tensor:
        """One row per rank of the 1-d `values` (same length and dtype on every rank): shape `(size, len(values))`."""
        if self.size == 1:
            return values[None]
        entry = self._begin("scalars", label, (self.size - 1) * values.nbytes)
        rows = values.new_empty(self.size, values.numel())
        if self.backend == "fake":  # a dry run of one rank: the others would say the same
            return rows.copy_(values)
        rows[self.index] = values
        if self.point_to_point:
            Pending(self, entry, self._exchange(entry, [[values]] * self.size, [[row] for row in rows])).wait()
        else:
            work = torch_compat.all_gather_single(rows.view(-1), values, group=self.group, async_op=True)
            Pending(self, entry, [work]).wait()
        return rows

    def exchange_object(self, value: Any, label: str) -> list[Any]:
        """Every rank's small picklable `value`, in rank order. For agreement at set-up, not for a training step."""
        if self.size == 1 or self.backend == "fake":
            return [value] * self.size
        entry = self._begin("scalars", label, 0)
        rows: list[Any] = [None] * self.size
        with self.watch.waiting(self, entry):
            dist.all_gather_object(rows, value, group=self.group)
        return rows

    # -- transport ----------------------------------------------------------------------------------------------------

    def _begin(self, kind: str, label: str, sent_bytes: int) -> tuple[int, str]:
        text = f"{kind} of {label}"
        self.sequence += 1
        self.signature = zlib.crc32(text.encode(), self.signature)
        entry = (self.sequence, text)
        self.history.append(entry)
        self.traffic.add(kind, sent_bytes)
        return entry

    def _scatter(
        self, entry: tuple[int, str], parts: Sequence[torch.Tensor], bounds: Sequence[int], wire: torch.dtype
    ) -> tuple[list[Term], list[Any]]:
        """Send every rank its range `bounds[i]:bounds[i + 1]` of the buffer that `parts` make up; the terms of one's own.

        Ranges are cut where parts meet, which is alike on every rank, so each cut is a message of its own.
        """
        ranges = [cut(parts, a, b) for a, b in pairwise(bounds)]
        mine = ranges[self.index]
        numel = bounds[self.index + 1] - bounds[self.index]
        arriving = [None if i == self.index else parts[0].new_empty(numel, dtype=wire) for i in range(self.size)]
        terms: list[Term] = []
        received: list[list[torch.Tensor]] = [[] for _ in arriving]
        for offset, own in mine:
            landing = [None if buffer is None else buffer[offset : offset + own.numel()] for buffer in arriving]
            terms.append(Term(offset, [own] + [value for value in landing if value is not None]))
            for slot, value in zip(received, landing, strict=True):
                if value is not None:
                    slot.append(value)
        outgoing = [[] if i == self.index else [t.to(wire) for _, t in r] for i, r in enumerate(ranges)]
        return terms, self._exchange(entry, outgoing, received)

    def _exchange(
        self,
        entry: tuple[int, str],
        outgoing: Sequence[Sequence[torch.Tensor]],
        received: Sequence[Sequence[torch.Tensor]],
    ) -> list[Any]:
        """Send the tensors `outgoing[i]` to rank i and receive `received[i]` from it, for every other rank.

        The tag carries the collective's place, label and engine: ranks that are not in the same one cannot take each
        other's bytes for their own; they wait, and the watch says who is where.
        """
        place = zlib.crc32(f"{self.watch.job} {entry[1]}".encode())
        tag = (entry[0] & 0x7FFF) << 15 | place & 0x7FFF
        works: list[Any] = []
        with self.watch.waiting(self, entry):
            for offset in range(1, self.size):
                to, source = (self.index + offset) % self.size, (self.index - offset) % self.size
                for tensor in received[source]:
                    if tensor.numel():
                        works.append(dist.irecv(tensor, self.ranks[source], group=self.group, tag=tag))
                for tensor in outgoing[to]:
                    if tensor.numel():
                        works.append(dist.isend(tensor, self.ranks[to], group=self.group, tag=tag))
        return works

    def join(self, works: list[Any], entry: tuple[int, str]) -> None:
        """Wait for `works`. Raises RankMismatchError when the other ranks will never complete them."""
        if not works:
            return
        with self.watch.waiting(self, entry):
            for work in works:
                work.wait()

    def abort(self) -> None:
        """Break the group so that whoever waits in it gets an error. Safe to call from another thread."""
        if self.size == 1:
            return
        try:
            if self.point_to_point:  # gloo closes every pair of a group in which a receive has timed out
                peer = self.ranks[(self.index + 1) % self.size]
                work = dist.irecv(torch.empty(1), peer, group=self.group, tag=0x7FFFFFF0)
                if work is not None:
                    work.wait(timedelta(milliseconds=1))
            else:
                torch_compat.abort_native(self.group)
        except RuntimeError:
            pass


@dataclass(frozen=True)
class Term:
    """What the ranks contribute to a stretch of a piece, from element `offset` on: one value each, the own first."""

    offset: int
    values: list[torch.Tensor]


def _device_of(backend: str) -> torch.device:
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is None or backend in ("none", "gloo", "fake"):
        return torch.device("cpu")
    return torch.device(accelerator.type, torch.accelerator.current_device_index())


def cut(parts: Sequence[torch.Tensor], low: int, high: int) -> list[tuple[int, torch.Tensor]]:
    """Elements `[low, high)` of the buffer that `parts` make up: slices of the parts, with their offsets from `low`."""
    slices, start = [], 0
    for part in parts:
        stop = start + part.numel()
        first, last = max(low, start), min(high, stop)
        if first < last:
            slices.append((first - low, part[first - start : last - start]))
        start = stop
    return slices


def sum_terms(values: Sequence[torch.Tensor], out: torch.Tensor, fresh: bool = True) -> None:
    """`out = sum(values)`, or `out += sum(values)` unless `fresh`, in `out`'s dtype. `out` may be `values[0]` itself."""
    same = all(value.dtype == out.dtype for value in values)
    if fresh and same and len(values) > 1:
        torch.add(values[0], values[1], out=out)
        rest = values[2:]
    elif fresh:
        total = values[0].to(out.dtype)
        out.copy_(total)
        rest = values[1:]
    else:
        rest = values
    for value in rest:
        out.add_(value)
