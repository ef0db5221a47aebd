"""A small covering array: few cells in which every combination of any ``strength`` factors' levels occurs."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

Cell = dict[str, Any]


def product(factors: Mapping[str, Sequence[Any]]) -> list[Cell]:
    """Every cell of the full product, in the order of the factors."""
    return [dict(zip(factors, levels, strict=True)) for levels in itertools.product(*factors.values())]


def covering(factors: Mapping[str, Sequence[Any]], strength: int = 2) -> list[Cell]:
    """A deterministic greedy cover of all ``strength``-wise combinations; at least one per cell is new."""
    cells = product(factors)
    groups = list(itertools.combinations(factors, strength))
    missing = {_key(group, cell) for cell in cells for group in groups}
    chosen: list[Cell] = []
    while missing:
        best = max(cells, key=lambda cell: sum(_key(group, cell) in missing for group in groups))
        missing -= {_key(group, best) for group in groups}
        chosen.append(best)
    return chosen


def name(cell: Cell) -> str:
    """A test id such as ``stage2-world4-clip``: booleans by name when true, other levels after their factor."""
    parts = []
    for factor, level in cell.items():
        if isinstance(level, bool):
            parts.append(factor if level else f"no_{factor}")
        elif isinstance(level, str):
            parts.append(level)
        else:
            parts.append(f"{factor}{level}")
    return "-".join(parts)


def _key(group: tuple[str, ...], cell: Cell) -> tuple[tuple[str, Any], ...]:
    return tuple((factor, cell[factor]) for factor in group)
