"""When units are gathered, reduced and released: orders that every rank follows alike.

Collectives of one channel must come in the same order on every rank, while autograd on each rank reaches units in its
own order, or not at all (a loss that ignores a branch on one rank). So both channels follow a list, not the events:
a unit that is needed pulls along all that stand before it, and the end of a backward pulls along the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from zerotrain.comm import Pending
from zerotrain.zero.unit import Residence, Unit

IN_FLIGHT = 2  # reductions under way at a time; each holds a whole gradient buffer of its unit


@dataclass(frozen=True)
class Sync:
    """What the end of a micro batch asks of the gradients."""

    reduce: bool
    """Sum over the shard group as units complete."""
    final: bool
    """Sum over the replicas too: the optimizer steps next."""


class GatherSchedule:
    """Forward: the units in the order of the last forward, one gathered ahead. Backward: the reverse of this forward."""

    def __init__(self, prefetch_elements: int, reshard_after_forward: bool) -> None:
        self.reshard_after_forward = reshard_after_forward
        self._prefetch_elements = prefetch_elements
        self._expected: list[Unit] = []
        self._order: list[Unit] = []
        self._position = 0
        self._idle: list[Unit] = []
        self._used: list[Unit] = []
        self._program: list[Unit] = []
        self._cursor = 0

    # -- forward ------------------------------------------------------------------------------------------------------

    def begin_forward(self, forget: bool) -> None:
        """`forget`: the graphs of earlier forwards have been consumed, only this one's uses count for the backward."""
        self._order, self._position = [], 0
        if forget:
            self._used = []

    def enter(self, unit: Unit, differentiable: bool) -> None:
        """A module of `unit` is about to compute in the forward pass."""
        if unit in self._idle:
            self._idle.remove(unit)
        for idle in self._idle:
            self._leave(idle)
        self._idle = []
        if not self._order or self._order[-1] is not unit:
            self._order.append(unit)
            if differentiable:
                self._used.append(unit)
        unit.wait()
        following = self._following(unit)
        if following is not None:
            self._prefetch(following)

    def exit(self, unit: Unit) -> None:
        """No module of `unit` is computing any more; it is released when another unit begins, unless it goes on."""
        if unit not in self._idle:
            self._idle.append(unit)

    def end_forward(self, keep_last: bool) -> None:
        """`keep_last`: a backward will begin with the unit that was used last."""
        last = self._order[-1] if keep_last and self._order else None
        for unit in self._idle:
            if unit is not last:
                self._leave(unit)
        self._idle = []
        self._expected = self._order

    def _leave(self, unit: Unit) -> None:
        if unit.running == 0 and not unit.pinned and (self.reshard_after_forward or not self._used):
            unit.release()

    def _following(self, unit: Unit) -> Unit | None:
        try:
            place = self._expected.index(unit, self._position)
        except ValueError:
            return None
        self._position = place + 1
        return self._expected[place + 1] if place + 1 < len(self._expected) else None

    # -- backward -----------------------------------------------------------------------------------------------------

    def begin_backward(self) -> None:
        """Each unit once, in the reverse order of its last use."""
        self._program = list(dict.fromkeys(reversed(self._used)))
        self._cursor = 0

    def need(self, unit: Unit) -> None:
        """The backward is about to use `unit`."""
        if unit in self._program[self._cursor :]:
            stop = self._program.index(unit, self._cursor) + 1
            for earlier in self._program[self._cursor : stop]:
                earlier.gather()
            self._cursor = stop
        unit.wait()
        if self._cursor < len(self._program) and self._prefetch(self._program[self._cursor]):
            self._cursor += 1

    def end_backward(self) -> None:
        """Take part in the gathers that this rank's graph did not reach and another's may have."""
        for unit in self._program[self._cursor :]:
            unit.gather()
        self._program, self._cursor = [], 0

    def _prefetch(self, unit: Unit) -> bool:
        if unit.residence is Residence.SHARDED and unit.numel > self._prefetch_elements:
            return False
        unit.gather()
        return True

    def reset(self) -> None:
        """After an exception: no forward or backward is under way."""
        self._idle, self._used, self._program, self._cursor = [], [], [], 0


class ReduceSchedule:
    """Reductions in an order that all ranks agreed on, started as units complete, `IN_FLIGHT` under way at a time."""

    def __init__(self, units: Sequence[Unit]) -> None:
        self.order = [unit for unit in units if unit.trainable]
        self._missing: dict[Unit, int] = {}
        self._deferred: frozenset[Unit] = frozenset()
        self._cursor = 0
        self._flying: list[Pending] = []
        self._sync = Sync(reduce=False, final=False)
        self._backlog = 0
        self._unsettled = False

    def begin_backward(self, sync: Sync, deferred: frozenset[Unit]) -> None:
        """`deferred` units may get gradients in several rounds (reentrant recomputation) and are reduced at the end."""
        self._missing = {unit: sum(len(b.parameters) for b in unit.trainable) for unit in self.order}
        self._cursor = 0
        self._sync = sync
        self._deferred = deferred

    def narrow(self, unit: Unit) -> bool:
        """Whether this backward's gradients of `unit` are all that its next reduction sums."""
        return self._sync.reduce and self._backlog == 0 and unit not in self._deferred

    def arrived(self, unit: Unit) -> bool:
        """One more gradient of `unit` is in place. True when that completes the unit."""
        self._missing[unit] -= 1
        complete = self._missing[unit] == 0
        if complete and self._sync.reduce:
            while self._cursor < len(self.order) and self._ready(self.order[self._cursor]):
                self._launch(self.order[self._cursor])
                self._cursor += 1
        return complete

    def incomplete(self, unit: Unit) -> bool:
        """Whether this backward still owes gradients of `unit`."""
        return self._missing.get(unit, 0) > 0

    def taken(self, unit: Unit) -> bool:
        """Whether this backward has reduced `unit` already."""
        return self._sync.reduce and unit in self.order[: self._cursor]

    def _ready(self, unit: Unit) -> bool:
        return self._missing[unit] <= 0 and unit not in self._deferred

    def end_backward(self) -> None:
        """Reduce what did not complete, on every rank alike."""
        if not self._sync.reduce:
            self._backlog += 1
            return
        for unit in self.order[self._cursor :]:
            self._launch(unit)
        self._drain()
        self._backlog = 0
        self._unsettled = not self._sync.final

    def settle(self) -> None:
        """Finish what a step needs: backwards that were not reduced, sums that the replicas have not shared."""
        if self._backlog:
            self._sync = Sync(reduce=True, final=True)
            for unit in self.order:
                self._launch(unit)
        elif self._unsettled:
            for unit in self.order:
                self._fly([b.gradients.settle() for b in unit.trainable if b.gradients is not None])
        self._drain()
        self._backlog, self._unsettled = 0, False

    def clear(self) -> None:
        """Forget the gradients of the open window."""
        self._drain()
        self._backlog, self._unsettled = 0, False
        for unit in self.order:
            for buffer in unit.trainable:
                if buffer.gradients is not None:
                    buffer.gradients.clear()

    def _launch(self, unit: Unit) -> None:
        narrow = self.narrow(unit)
        self._fly([b.gradients.reduce(self._sync.final, narrow) for b in unit.trainable if b.gradients is not None])

    def _fly(self, started: list[Pending | None]) -> None:
        self._flying += [pending for pending in started if pending is not None]
        while len(self._flying) > IN_FLIGHT:
            self._flying.pop(0).wait()
        for pending in self._flying[:-1]:
            pending.advance()

    def _drain(self) -> None:
        flying, self._flying = self._flying, []
        for pending in flying:
            pending.wait()
