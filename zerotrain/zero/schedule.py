"""When units are gathered, reduced and released: orders that every rank follows alike.

Collectives of one channel must come in the same order on every rank, while each rank reaches units in its own order, or
not at all: a branch taken on one rank only, a loss that ignores a part of the model. So both channels follow a list, not
the events: a unit that is needed pulls along all that stand before it, and the end of a pass pulls along the rest. A unit
that this rank does not use is gathered with the others and given back at once.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from zerotrain.comm import Pending
from zerotrain.zero.unit import Unit

IN_FLIGHT = 2  # reductions under way at a time; each holds a whole gradient buffer of its unit


@dataclass(frozen=True)
class Sync:
    """What the end of a micro batch asks of the gradients."""

    reduce: bool
    """Sum over the shard group as units complete."""
    final: bool
    """Sum over the replicas too: the optimizer steps next."""


class Pass(enum.Enum):
    """What is under way, and what the list of units means for it."""

    NONE = "nothing; units are gathered as they are used"
    EVALUATION = "a forward without gradients; the list is that of the last one, a guess at what to gather ahead"
    FORWARD = "a training forward; every unit of the list is gathered once"
    BACKWARD = "a backward; every unit of the list is gathered once"


class GatherSchedule:
    """Training forwards gather every unit once in `order`, backwards once in the reverse, one unit ahead of its use.

    `order` starts as the order of the modules and becomes, once, the order in which the ranks were seen to use them.
    Passes without gradients gather what they use; there the ranks must use the same.
    """

    def __init__(self, units: Sequence[Unit], prefetch_elements: int, reshard_after_forward: bool) -> None:
        self.order = [unit for unit in units if unit.sharded]
        self.seen: list[Unit] = []
        """Units in the order of the last training forward on this rank."""
        self._reshard_after_forward = reshard_after_forward
        self._prefetch_elements = prefetch_elements
        self._pass = Pass.NONE
        self._program: list[Unit] = []
        self._cursor = 0
        self._ahead: Unit | None = None
        self._idle: list[Unit] = []
        self._used: set[Unit] = set()
        self._visited: list[Unit] = []
        self._last_evaluation: list[Unit] = []

    # -- forward ------------------------------------------------------------------------------------------------------

    def begin_forward(self, training: bool) -> None:
        """A forward of the whole model begins; `training`: with gradients."""
        self._pass = Pass.FORWARD if training else Pass.EVALUATION
        self._program, self._cursor = list(self.order if training else self._last_evaluation), 0
        self._visited = []

    def enter(self, unit: Unit) -> None:
        """A module of `unit` is about to compute in the forward pass."""
        if not unit.sharded:
            unit.wait()
            return
        if unit in self._idle:
            self._idle.remove(unit)
        self._leave_idle()
        if not self._visited or self._visited[-1] is not unit:
            self._visited.append(unit)
        if self._pass is Pass.FORWARD:
            self._used.add(unit)
        self._reach(unit)

    def exit(self, unit: Unit) -> None:
        """No module of `unit` is computing any more; it is released when another unit begins, unless it goes on."""
        if unit.sharded:
            unit.guard()
            if unit not in self._idle:
                self._idle.append(unit)

    def demand(self, unit: Unit) -> None:
        """The pass under way uses `unit` without a module of it: keep the unit whole, as nothing will say when it may go."""
        unit.pinned = True
        if self._pass is Pass.FORWARD:
            self._used.add(unit)
        self._reach(unit)

    def end_forward(self) -> None:
        """After a training forward the unit that a backward will begin with stays whole, the same one on every rank."""
        if self._pass is Pass.FORWARD:
            for unit in self._program[self._cursor :]:
                unit.wait()
                self._idle.append(unit)
            self.seen = list(dict.fromkeys(self._visited))
            self._leave_idle(but=self.order[-1] if self.order else None)
        else:
            self._last_evaluation = self._visited
            self._leave_ahead(None)
            self._leave_idle()
        self._end()

    def _leave_idle(self, but: Unit | None = None) -> None:
        idle, self._idle = self._idle, []
        for unit in idle:
            if unit is not but and (self._reshard_after_forward or self._pass is not Pass.FORWARD):
                self._leave(unit)

    def _leave(self, unit: Unit) -> None:
        if unit.running == 0 and not unit.pinned:
            unit.release()

    # -- backward -----------------------------------------------------------------------------------------------------

    def begin_backward(self) -> None:
        """A backward begins."""
        self._pass = Pass.BACKWARD
        self._program, self._cursor = list(reversed(self.order)), 0

    def need(self, unit: Unit) -> None:
        """The backward, or a recomputation inside it, is about to use `unit`."""
        if unit.sharded:
            self._reach(unit)

    def end_backward(self) -> None:
        """Take part in the gathers that this rank's graph did not reach and another's may have."""
        for unit in self._program[self._cursor :]:
            unit.gather()
        self._end()

    def forget_graphs(self) -> None:
        """The forwards so far need no backward any more."""
        self._used.clear()

    def reset(self) -> None:
        """After an exception: nothing is under way."""
        self._idle = []
        self._used.clear()
        self._end()

    # -- both ---------------------------------------------------------------------------------------------------------

    def _reach(self, unit: Unit) -> None:
        """Make `unit` whole, after the units before it in the list, and start on the one behind it."""
        try:
            place = self._program.index(unit, self._cursor)
        except ValueError:  # used again, or in another order: alike on every rank, or the watch will say so
            unit.wait()
            return
        passed, self._cursor = self._program[self._cursor : place], place + 1
        if self._pass is Pass.EVALUATION:
            self._leave_ahead(unit)
        else:
            for skipped in passed:
                skipped.gather()
                if self._pass is Pass.FORWARD or skipped not in self._used:
                    skipped.wait()
                    self._leave(skipped)
        unit.wait()
        following = self._program[self._cursor] if self._cursor < len(self._program) else None
        if following is not None and following.numel <= self._prefetch_elements:
            following.gather()
            self._ahead = following

    def _leave_ahead(self, unit: Unit | None) -> None:
        """An evaluation that gathered ahead what it then did not use gives it back."""
        if self._ahead is not None and self._ahead is not unit:
            self._leave(self._ahead)
        self._ahead = None

    def _end(self) -> None:
        self._pass, self._program, self._cursor, self._ahead = Pass.NONE, [], 0, None


def merge_orders(orders: Sequence[Sequence[Unit]]) -> list[Unit]:
    """One order with every unit of `orders`: the first as it is, of the others what is new, behind what precedes it there."""
    merged: list[Unit] = []
    for order in orders:
        for place, unit in enumerate(order):
            if unit not in merged:
                merged.insert(merged.index(order[place - 1]) + 1 if place else 0, unit)
    return merged


class ReduceSchedule:
    """Reductions in an order that all ranks agreed on, started as units complete, `IN_FLIGHT` under way at a time."""

    def __init__(self, units: Sequence[Unit]) -> None:
        self.order = [unit for unit in reversed(units) if unit.trainable]
        self.seen: list[Unit] = []
        """Units in the order in which the last backward completed them on this rank."""
        self._missing: dict[Unit, int] = {}
        self._deferred: frozenset[Unit] = frozenset()
        self._cursor = 0
        self._flying: list[Pending] = []
        self._sync = Sync(reduce=False, final=False)
        self._backlog = 0
        self._unsettled = False

    def include(self, units: Sequence[Unit]) -> None:
        """Units may have become trainable."""
        self.order = merge_orders([self.order, [unit for unit in reversed(units) if unit.trainable]])

    def begin_backward(self, sync: Sync, deferred: frozenset[Unit]) -> None:
        """`deferred` units may get gradients in several rounds (reentrant recomputation) and are reduced at the end."""
        self._missing = {unit: sum(len(b.parameters) for b in unit.trainable) for unit in self.order}
        self._cursor = 0
        self.seen = []
        self._sync = sync
        self._deferred = deferred

    def narrow(self, unit: Unit) -> bool:
        """Whether this backward's gradients of `unit` are all that its next reduction sums."""
        return self._sync.reduce and self._backlog == 0 and unit not in self._deferred

    def arrived(self, unit: Unit) -> bool:
        """One more gradient of `unit` is in place. True when that completes the unit."""
        self._missing[unit] -= 1
        complete = self._missing[unit] == 0
        if complete:
            self.seen.append(unit)
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
