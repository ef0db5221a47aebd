"""Counters of what this rank put on the wire."""

from __future__ import annotations

from collections import Counter

KINDS = ("all_gather", "reduce_scatter", "all_reduce", "broadcast", "scalars")


class Traffic:
    """Calls and payload bytes sent by this rank, per kind of collective.

    Bytes are what the algorithm in use sends: `(n - 1) / n` of the buffer for an all-gather or reduce-scatter among
    `n` ranks, twice that for an all-reduce. Headers of the transport are not in it.
    """

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.sent_bytes: Counter[str] = Counter()

    def add(self, kind: str, sent_bytes: int) -> None:
        """Count one collective of `kind` that sends `sent_bytes` bytes."""
        self.calls[kind] += 1
        self.sent_bytes[kind] += sent_bytes

    @property
    def total_bytes(self) -> int:
        """Bytes sent by this rank, over all kinds."""
        return sum(self.sent_bytes.values())

    def reset(self) -> None:
        """Start counting anew."""
        self.calls.clear()
        self.sent_bytes.clear()
