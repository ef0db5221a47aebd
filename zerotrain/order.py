"""Orders of samples that can be entered anywhere: what a sampler or an iterable yields from a place on.

A `Cursor` says where; it is shared by the loader, which moves it, and by samplers and datasets, also in worker processes.
"""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterable, Iterator
from itertools import chain, cycle, islice
from typing import Any

import torch
from torch.utils.data import Dataset, IterableDataset, Sampler


class Cursor:
    """Where the iteration begins. Shared with workers: persistent ones keep their copy of a dataset over epochs."""

    def __init__(self, seed: int, workers: int) -> None:
        self.seed = seed
        numbers = torch.zeros(2, dtype=torch.int64)
        self._numbers = numbers.share_memory_() if workers else numbers

    def move(self, epoch: int, start: int) -> None:
        """To `start` in `epoch`."""
        self._numbers.copy_(torch.tensor([epoch, start]))

    @property
    def epoch(self) -> int:
        """The epoch."""
        return int(self._numbers[0])

    @property
    def start(self) -> int:
        """How much of the epoch is left out."""
        return int(self._numbers[1])

    @property
    def number(self) -> int:
        """What the epoch's random numbers are seeded with: as in accelerate's sampler."""
        return self.seed + self.epoch


class Rest:
    """What `source` yields from the cursor on, filled up to a multiple; its length is that of a whole epoch."""

    def __init__(self, source: Any, cursor: Cursor, multiple: int) -> None:
        self._source = source
        self._cursor = cursor
        self._multiple = multiple

    def __iter__(self) -> Iterator[Any]:
        return _rest(self._source, self._cursor, self._multiple)

    def __len__(self) -> int:
        return -(-len(self._source) // self._multiple) * self._multiple


class Order(Rest, Sampler[Any]):
    """Of a sampler."""


class Elements(Rest, IterableDataset[Any]):
    """Of an iterable dataset."""


def _rest(source: Any, cursor: Cursor, multiple: int) -> Iterator[Any]:
    """What `source` yields from the cursor on, filled up from its beginning to a whole multiple.

    What is read here already (the first `multiple`, and what is skipped) finds random generators of its own epoch. Orders
    drawn as an iteration begins are therefore alike on all ranks and in resumed runs.
    """
    with own_numbers(cursor.number):
        _tell_epoch(source, cursor)
        items = iter(source)
        opening = list(islice(items, multiple))
        skipped = max(cursor.start - len(opening), 0)
        next(islice(items, skipped, skipped), None)
    return _filled(chain(opening[cursor.start :], items), opening, multiple)


def _filled(items: Iterable[Any], opening: list[Any], multiple: int) -> Iterator[Any]:
    count = 0
    for item in items:
        count += 1
        yield item
    yield from islice(cycle(opening), -count % multiple)


def _tell_epoch(source: Any, cursor: Cursor) -> None:
    """Set the epoch, or seed the generator, of `source` and of the samplers that it is made of."""
    while source is not None:
        generator = getattr(source, "generator", None)
        if hasattr(source, "set_epoch"):
            source.set_epoch(cursor.epoch)
        elif isinstance(generator, torch.Generator):
            generator.manual_seed(cursor.number)
        source = getattr(source, "batch_sampler", getattr(source, "sampler", None))


@contextlib.contextmanager
def own_numbers(seed: int) -> Iterator[None]:
    """Within, the global generators of this process are seeded with `seed`; then they are put back."""
    numpy, python, cpu = sys.modules.get("numpy"), random.getstate(), torch.get_rng_state()
    arrays = None if numpy is None else numpy.random.get_state()
    try:
        random.seed(seed)
        torch.default_generator.manual_seed(seed)
        if numpy is not None:
            numpy.random.seed(seed % 2**32)
        yield
    finally:
        random.setstate(python)
        torch.set_rng_state(cpu)
        if numpy is not None:
            numpy.random.set_state(arrays)


class Stream(IterableDataset[Any]):
    """Any iterable as a dataset; it is iterated anew in each epoch."""

    def __init__(self, iterable: Iterable[Any]) -> None:
        self._iterable = iterable

    def __iter__(self) -> Iterator[Any]:
        return iter(self._iterable)


class Whole(Dataset[Any]):
    """A dataset without automatic batching: its items are batches already, by one key or a list of them."""

    def __init__(self, dataset: Any, of_list: bool) -> None:
        self._dataset = dataset
        self._of_list = of_list

    def __getitems__(self, keys: list[Any]) -> Any:
        return self._dataset[keys if self._of_list else keys[0]]

    def set_epoch(self, epoch: int) -> None:
        """Pass it on."""
        if hasattr(self._dataset, "set_epoch"):
            self._dataset.set_epoch(epoch)
