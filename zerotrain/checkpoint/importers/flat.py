"""Parameters inside flat buffers that are split over ranks, as DeepSpeed lays them out: arithmetic and copying.

Stages 1 and 2 put the parameters of a group one behind the other, pad the end, and cut the whole into equal parts:

    rank 0                 rank 1
    | a a a a a b b b b b | b b c c c c . . . . |

Stage 3 cuts every parameter, padding each, and puts a rank's cuts one behind the other, group after group:

    rank 0                 rank 1
    | a a a b b b b c c   | a a . b b b . c c   |
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

import torch


class Span(NamedTuple):
    """Elements `[first, first + length)` of a flattened parameter lie in stream `stream` from `offset` on."""

    stream: int
    offset: int
    first: int
    length: int


@dataclass(frozen=True)
class Stream:
    """Tensors read as if they were one, one behind the other."""

    tensors: Sequence[torch.Tensor]
    starts: Sequence[int] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "starts", [0, *accumulate(tensor.numel() for tensor in self.tensors)])

    @property
    def numel(self) -> int:
        """The elements of all its tensors."""
        return self.starts[-1]

    def pieces(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Elements `[start, stop)` as (tensor, first element of it, how many); IndexError beyond the end."""
        if not 0 <= start <= stop <= self.numel:
            raise IndexError(f"elements {start} to {stop} of {self.numel}")
        while start < stop:
            at = bisect_right(self.starts, start) - 1
            count = min(stop, self.starts[at + 1]) - start
            yield at, start - self.starts[at], count
            start += count

    def copy(self, start: int, stop: int, out: torch.Tensor) -> None:
        """Fill the 1-d `out` with elements `[start, stop)`."""
        done = 0
        for at, first, count in self.pieces(start, stop):
            out[done : done + count].copy_(self.tensors[at].detach().reshape(-1)[first : first + count])
            done += count


def copy_spans(spans: Sequence[Span], streams: Sequence[Stream], start: int, stop: int, out: torch.Tensor) -> None:
    """Fill `out` with elements `[start, stop)` of the parameter that lies in `spans`."""
    for span in spans:
        low, high = max(start, span.first), min(stop, span.first + span.length)
        if low < high:
            at = span.offset + low - span.first
            streams[span.stream].copy(at, at + high - low, out[low - start : high - start])


def group_spans(
    stream: int, shapes: Mapping[str, tuple[int, ...]], gaps: Sequence[int]
) -> tuple[dict[str, list[Span]], int]:
    """Where stages 1 and 2 keep the parameters of one group, `gaps[i]` elements behind the i-th, and where they end."""
    spans, offset = {}, 0
    for (name, shape), gap in zip(shapes.items(), gaps, strict=True):
        count = math.prod(shape)
        spans[name] = [Span(stream, offset, 0, count)]
        offset += count + gap
    return spans, offset


def rank_spans(world: int, shapes: Mapping[str, tuple[int, ...]]) -> tuple[dict[str, list[Span]], int]:
    """Where stage 3 keeps the parameters, with one stream for each rank, and where they end in each."""
    spans, offset = {}, 0
    for name, shape in shapes.items():
        count = math.prod(shape)
        share = -(-count // world)
        cuts = ((rank, rank * share) for rank in range(world))
        spans[name] = [Span(rank, offset, first, min(share, count - first)) for rank, first in cuts if first < count]
        offset += share
    return spans, offset
