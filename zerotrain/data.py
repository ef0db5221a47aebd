"""Data parallel loading: each rank its own part of every global batch, resumable at any of them.

The global order of an epoch is the order in which one rank alone would see the samples; global batch after global batch
is cut from it, and each rank's micro batches from those. It depends on nothing but the seed and the epoch, so a place in
it (an epoch and a number of samples) means the same at any number of ranks::

    order   5 2 7 0 | 6 1 3 4 | 8 . . .      micro batch 2, two ranks
    rank 0  5 2       6 1       8 5
    rank 1      7 0       3 4       2 7      filled up from the order's beginning
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, cast

import torch
from accelerate.data_loader import BatchSamplerShard, IterableDatasetShard, SeedableRandomSampler, prepare_data_loader
from accelerate.utils import send_to_device
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler

from zerotrain.order import Cursor, Elements, Order, Stream, Whole, own_numbers

_KEPT = (  # of a loader that is built anew around another sampler or dataset
    "num_workers",
    "collate_fn",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "prefetch_factor",
    "persistent_workers",
    "pin_memory_device",
    "in_order",
)


def build_loader(
    data: Any,
    collate_fn: Callable[[list[Any]], Any] | None,
    micro_batch: int,
    device: torch.device,
    ranks: tuple[int, int],
    drop_last: bool = False,
    seed: int | None = None,
) -> Loader:
    """A loader of micro batches of `micro_batch` samples, moved to `device`; `ranks` is `(rank, world_size)`.

    Map-style datasets (with `__getitem__` and `__len__`) are shuffled anew in each epoch, alike on all ranks. Of iterables
    each rank takes its part of every global batch, in order. The last global batch is filled up from the first samples
    unless `drop_last`. A DataLoader is taken as it is, and split over the ranks; its own `drop_last` and collate function
    hold then.
    """
    if isinstance(data, DataLoader):
        given = data
    else:
        map_style = hasattr(data, "__getitem__") and hasattr(data, "__len__")
        given = DataLoader(
            data if isinstance(data, Dataset) or map_style else Stream(data),
            batch_size=micro_batch,
            shuffle=map_style and not isinstance(data, IterableDataset),
            collate_fn=collate_fn,
            drop_last=drop_last,
        )
    cursor = Cursor(seed or 0, given.num_workers)
    part, kind = _part(given, cursor, ranks)
    stateful = kind.name == "stateful"
    with own_numbers(cursor.seed):  # torchdata's loader starts an iterator as it is made
        prepared: Any = prepare_data_loader(  # for one process, since `part` is this rank's already
            part, device, 1, 0, put_on_device=True, dispatch_batches=False, use_stateful_dataloader=stateful
        )
    if stateful:
        prepared.base_dataloader.load_state_dict({})  # forgets that iterator
        prepared.base_dataloader.snapshot_every_n_steps = getattr(given, "snapshot_every_n_steps", 1)
    return Loader(prepared, given, device, cursor, kind, ranks[0])


# -- the loader -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Kind:
    """What a place in the data is made of."""

    name: str
    """"samples": of the global order. "batches": this rank's. "stateful": torchdata's own state."""
    unit: int = 1
    """By how much a batch advances the place: samples of a global batch; 1 where batches are counted."""
    layout: dict[str, int] = field(default_factory=dict)
    """What must be the same when the place is loaded."""
    by_cursor: bool = True
    """What lies before the place is skipped beneath the loader. Otherwise torchdata does it, or batches are thrown away."""

    @property
    def counted(self) -> str:
        """The name of the number in the state."""
        return "samples" if self.name == "samples" else "batches"


class Loader:
    """This rank's micro batches, epoch after epoch, with a place in the data that can be saved and returned to.

    Each completed iteration advances `epoch`; one left early begins anew. The place counts what was handed out: nothing is
    fetched ahead in this process, and beginning an iteration leaves the global random generators alone, so a run resumed
    with their states draws the same numbers, too. Numbers drawn in worker processes begin anew where a run is resumed.

    Of map-style datasets and iterables, place and order do not depend on the number of ranks and the micro batch; skipped
    samples are not loaded, but iterables have to be read up to the place, and to yield the same again. With a custom
    batch sampler, or an iterable read by several workers, batches are counted, and with torchdata's StatefulDataLoader its
    own state is kept: such places are good at the same layout only. Everything else is reached as on the DataLoader that
    accelerate prepared.
    """

    def __init__(
        self, prepared: Any, given: DataLoader[Any], device: torch.device, cursor: Cursor, kind: _Kind, rank: int
    ) -> None:
        self.dataset = given.dataset
        self.batch_size = given.batch_size
        self._prepared = prepared
        self._base = prepared.base_dataloader
        self._device = device
        self._cursor = cursor
        self._kind = kind
        # What workers draw for samples differs from rank to rank; what they draw for the order of an iterable must not.
        self._apart = 0 if isinstance(given.dataset, IterableDataset) else rank * 1_000_003
        self._epoch = 0
        self._place = 0  # in units of the kind, within the epoch
        self._start = 0  # where the next iteration begins
        self._moved = 0  # how often a place was loaded: iterations under way end then
        self._turn: object | None = None  # the iteration that moves the place
        self._begun = False  # whether torchdata's loader knows the place
        self._stateful: Any = None  # its state otherwise; None: a whole epoch
        self.mark()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # also keeps copies, which have no attributes yet, from asking forever
            raise AttributeError(f"{type(self).__name__} has no attribute {name}")
        return getattr(self._prepared, name)

    def __len__(self) -> int:
        """Micro batches in a whole epoch."""
        return len(self._base)

    def __iter__(self) -> Iterator[Any]:
        self._place, self._start = self._start, 0
        self._cursor.move(self._epoch, self._place if self._kind.by_cursor else 0)
        if hasattr(self._base.dataset, "set_epoch"):
            self._base.dataset.set_epoch(self._epoch)
        with own_numbers(self._cursor.number):
            self._base.generator.manual_seed(self._cursor.number + self._apart)  # the workers' base seed
            if self._stateful is not None:
                self._base.load_state_dict(copy.deepcopy(self._stateful))
            batches = iter(self._base)
            if not self._kind.by_cursor and self._kind.name != "stateful":
                next(islice(batches, self._place, self._place), None)
        self._stateful, self._begun = None, True
        self._turn = object()
        return self._hand_out(batches, self._turn)

    def _hand_out(self, batches: Iterator[Any], turn: object) -> Iterator[Any]:
        moved = self._moved
        for batch in batches:
            self._since_mark += 1
            if turn is self._turn:
                self._place += self._kind.unit
            yield send_to_device(batch, self._device)
            if moved != self._moved:  # to another place, which a new iteration begins at
                return
        if turn is self._turn:
            self._turn = None
            self._epoch, self._place = self._epoch + 1, 0

    # -- the place in the data ----------------------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """The epoch of the next iteration, or of the one under way."""
        return self._epoch

    def set_epoch(self, epoch: int) -> None:
        """The next iteration is the whole of `epoch`. For the present epoch this does nothing: its place is kept."""
        if epoch != self._epoch:
            self._move(epoch, 0, None)

    def state_dict(self, marked: bool = False) -> dict[str, Any]:
        """The place after the last batch handed out, or that of the last `mark`. JSON types, except for "stateful"."""
        if marked:
            return dict(self._marked)
        kind = self._kind
        state = {"kind": kind.name, "epoch": self._epoch, kind.counted: self._place, **kind.layout}
        if kind.name == "stateful":
            state["stateful"] = copy.deepcopy(self._base.state_dict() if self._begun else self._stateful)
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The next iteration, and only that, continues at a place from `state_dict`.

        At the end of an epoch it is empty. ValueError as from `check_state_dict`.
        """
        self.check_state_dict(state)
        self._move(int(state["epoch"]), int(state[self._kind.counted]), state.get("stateful"))
        self._moved += 1
        self.mark()

    def check_state_dict(self, state: dict[str, Any]) -> None:
        """ValueError for the place of another kind of data, or one that is only good at another number of ranks, workers
        or samples in a batch."""
        kind, saved = self._kind, state.get("kind", "samples")
        if saved != kind.name:
            raise ValueError(
                f"the place in the data was saved by a loader that keeps {saved!r}, and this one keeps {kind.name!r}: "
                "resume with the same kind of training_data, or without its place in the data"
            )
        for name, here in kind.layout.items():
            if state.get(name) != here:
                raise ValueError(
                    f"the place in the data was saved with {name} {state.get(name)} and cannot be resumed with {name} {here}: "
                    "custom batch samplers, iterables with several workers and StatefulDataLoader need the same layout; "
                    "a dataset, or a DataLoader with a plain sampler, can be resumed with any"
                )

    def mark(self) -> None:
        """Remember the present place."""
        self._marked = self.state_dict()
        self._since_mark = 0

    @property
    def batches_since_mark(self) -> int:
        """Batches handed out since the last `mark`."""
        return self._since_mark

    def _move(self, epoch: int, place: int, stateful: Any) -> None:
        self._epoch, self._place, self._start = epoch, place, place
        self._turn, self._begun, self._stateful = None, False, stateful


# -- a rank's part of a given DataLoader ------------------------------------------------------------------------------


def _part(given: DataLoader[Any], cursor: Cursor, ranks: tuple[int, int]) -> tuple[DataLoader[Any], _Kind]:
    """The DataLoader of one rank's batches of what `given` loads, from the cursor on, and how its place is counted."""
    kept = {name: getattr(given, name) for name in _KEPT}
    kept["generator"] = torch.Generator() if given.generator is None else given.generator
    stateful = isinstance(given, _torchdata("stateful_dataloader", "StatefulDataLoader"))
    layout = {"world_size": ranks[1], "micro_batch": given.batch_size or 1, "num_workers": given.num_workers}
    if not isinstance(given.dataset, IterableDataset):
        part, kind = _map_part(given, kept, cursor, ranks)
    else:
        part = _iterable_part(given, kept, cursor, ranks, stateful)
        kind = _Kind("samples", layout["micro_batch"] * ranks[1])
        if given.num_workers > 1:  # the order is whatever they make of it, each with its own share of the dataset
            kind = _Kind("batches", layout=layout, by_cursor=False)
    return part, _Kind("stateful", layout=layout, by_cursor=False) if stateful else kind


def _iterable_part(
    given: DataLoader[Any], kept: dict[str, Any], cursor: Cursor, ranks: tuple[int, int], stateful: bool
) -> DataLoader[Any]:
    (rank, world), micro = ranks, given.batch_size or 1
    dataset: Any = given.dataset
    if not stateful:  # whose datasets may keep their own place
        dataset = Elements(dataset, cursor, 1 if given.drop_last else micro * world)
    if world > 1:
        dataset = IterableDatasetShard(dataset, micro, given.drop_last, world, rank)
    return DataLoader(dataset, batch_size=given.batch_size, drop_last=given.drop_last, **kept)


def _map_part(
    given: DataLoader[Any], kept: dict[str, Any], cursor: Cursor, ranks: tuple[int, int]
) -> tuple[DataLoader[Any], _Kind]:
    (rank, world), dataset, batches = ranks, given.dataset, cast(Any, given.batch_sampler)
    if batches is None:  # what the sampler yields, an index or a list, is the key of a whole batch
        lists = isinstance(given.sampler, BatchSampler)
        dataset, batches = Whole(dataset, lists), given.sampler if lists else BatchSampler(given.sampler, 1, False)
    if type(batches) in (BatchSampler, _torchdata("stateful_dataloader.sampler", "BatchSampler")):
        micro, drop_last = batches.batch_size, batches.drop_last
        order = Order(_seedable(batches.sampler, cursor.seed), cursor, 1 if drop_last else micro * world)
        ours: Any = BatchSampler(order, micro, drop_last)
        kind = _Kind("samples", micro * world)
    else:
        ours, kind = batches, _Kind("batches", layout={"world_size": world})
    if world > 1:
        ours = BatchSamplerShard(ours, world, rank)
    if kind.name == "batches":  # behind the split, which fills up from the first batches that it sees
        ours = Order(ours, cursor, 1)
    return DataLoader(dataset, batch_sampler=ours, **kept), kind


def _seedable(sampler: Any, seed: int) -> Any:
    """`sampler`, or accelerate's in place of a RandomSampler: its order follows from the seed and the epoch."""
    if not isinstance(sampler, (RandomSampler, _torchdata("stateful_dataloader.sampler", "RandomSampler"))):
        return sampler
    given: Any = sampler
    return SeedableRandomSampler(
        given.data_source, given.replacement, given._num_samples, given.generator, data_seed=seed
    )


def _torchdata(module: str, name: str) -> type:
    """A class of torchdata's, or one without instances where torchdata is not in use."""
    return getattr(sys.modules.get(f"torchdata.{module}"), name, _Never)


class _Never:
    """Nothing is one."""
