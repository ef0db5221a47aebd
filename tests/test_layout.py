"""FlatLayout, as arithmetic: every element is in exactly one fragment, and padding stands only at the end."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zerotrain.zero.layout import FlatLayout

SHAPES = st.lists(st.lists(st.integers(0, 7), max_size=3).map(tuple), max_size=12)
SHARDS = st.integers(1, 17)


def layout_of(shapes: list[tuple[int, ...]], shards: int) -> FlatLayout:
    return FlatLayout.of([(f"p{i}", shape) for i, shape in enumerate(shapes)], shards)


@given(SHAPES, SHARDS)
def test_slots_follow_each_other_without_gaps(shapes: list[tuple[int, ...]], shards: int) -> None:
    layout = layout_of(shapes, shards)
    assert [slot.shape for slot in layout.slots] == shapes
    start = 0
    for slot in layout.slots:
        assert (slot.start, slot.numel) == (start, math.prod(slot.shape))
        start = slot.stop
    assert layout.used == start


@given(SHAPES, SHARDS)
def test_padding_is_less_than_an_element_per_shard_and_at_the_end(shapes: list[tuple[int, ...]], shards: int) -> None:
    layout = layout_of(shapes, shards)
    assert layout.numel == layout.shard_numel * shards
    assert 0 <= layout.numel - layout.used < shards


@given(SHAPES, SHARDS)
def test_every_element_is_in_exactly_one_fragment(shapes: list[tuple[int, ...]], shards: int) -> None:
    layout = layout_of(shapes, shards)
    seen: dict[str, list[int]] = {slot.name: [] for slot in layout.slots}
    for shard in range(shards):
        low, high = layout.shard_range(shard)
        for fragment in layout.fragments(shard):
            slot = layout.slots[layout.index[fragment.name]]
            assert 0 <= fragment.start < fragment.stop <= slot.numel
            assert low + fragment.offset == slot.start + fragment.start
            assert low + fragment.offset + fragment.numel <= high
            seen[fragment.name] += range(fragment.start, fragment.stop)
    for slot in layout.slots:
        assert seen[slot.name] == list(range(slot.numel))


@given(SHAPES, SHARDS)
def test_fragments_come_in_flat_order(shapes: list[tuple[int, ...]], shards: int) -> None:
    layout = layout_of(shapes, shards)
    for shard in range(shards):
        offset = 0
        for fragment in layout.fragments(shard):
            assert fragment.offset == offset
            offset += fragment.numel


def test_bad_shards_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one shard"):
        layout_of([(2,)], 0)
    with pytest.raises(ValueError, match="not one of 2"):
        layout_of([(2,)], 2).shard_range(2)
