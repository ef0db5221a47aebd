"""Pure arithmetic from the parameters of a unit to one flat, padded buffer and to each rank's shard of it.

No tensors and no process groups: everything here is integers, and property-tested as such.

    parameters   a (6 elements)        b (1)   c (5)
    flat         a a a a a a           b       c c c c c   . .      numel 14 = 2 shards of 7, 2 of padding
    shard 0      a a a a a a           b
    shard 1                                    c c c c c   . .
    fragments    0: a[0:6] b[0:1]      1: c[0:5]

Padding stands only at the end. Aligning parameters to rows or shards would waste up to 228 % on odd shapes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Slot:
    """Where one parameter lies in the flat buffer: elements `[start, stop)`, row-major."""

    name: str
    shape: tuple[int, ...]
    start: int

    @property
    def numel(self) -> int:
        """Elements of the parameter."""
        return math.prod(self.shape)

    @property
    def stop(self) -> int:
        """The element behind its last."""
        return self.start + self.numel


@dataclass(frozen=True)
class Fragment:
    """The part `[start, stop)` of one flattened parameter that a shard holds, from element `offset` of the shard on."""

    name: str
    start: int
    stop: int
    offset: int

    @property
    def numel(self) -> int:
        """Elements of the fragment."""
        return self.stop - self.start


@dataclass(frozen=True)
class FlatLayout:
    """Slots in order, without gaps, padded at the end to a multiple of `shards`."""

    slots: tuple[Slot, ...]
    shards: int

    @classmethod
    def of(cls, parameters: Sequence[tuple[str, tuple[int, ...]]], shards: int) -> FlatLayout:
        """Lay out `(name, shape)` pairs in the given order over `shards` equal shards. ValueError for shards < 1."""
        if shards < 1:
            raise ValueError(f"a layout needs at least one shard, not {shards}")
        slots, start = [], 0
        for name, shape in parameters:
            slots.append(Slot(name, tuple(shape), start))
            start = slots[-1].stop
        return cls(tuple(slots), shards)

    @cached_property
    def index(self) -> dict[str, int]:
        """The place among the slots of each parameter, by name."""
        return {slot.name: place for place, slot in enumerate(self.slots)}

    @cached_property
    def used(self) -> int:
        """Elements of the parameters, padding not counted."""
        return self.slots[-1].stop if self.slots else 0

    @cached_property
    def numel(self) -> int:
        """Elements of the flat buffer, padding included: `shards * shard_numel`."""
        return self.shard_numel * self.shards

    @cached_property
    def shard_numel(self) -> int:
        """Elements of each shard, padding included."""
        return -(-self.used // self.shards)

    def shard_range(self, shard: int) -> tuple[int, int]:
        """The elements `[start, stop)` of the flat buffer that `shard` holds, padding included."""
        if not 0 <= shard < self.shards:
            raise ValueError(f"shard {shard} is not one of {self.shards}")
        return shard * self.shard_numel, (shard + 1) * self.shard_numel

    def fragments(self, shard: int) -> tuple[Fragment, ...]:
        """What `shard` holds, in flat order; parameters without elements have no fragment."""
        low, high = self.shard_range(shard)
        found = []
        for slot in self.slots:
            start, stop = max(low, slot.start), min(high, slot.stop)
            if start < stop:
                found.append(Fragment(slot.name, start - slot.start, stop - slot.start, start - low))
        return tuple(found)
