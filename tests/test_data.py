"""The loader that initialize() returns: each rank its own part of every global batch, every sample once an epoch.

It can be cut after any batch: `play` builds the loaders of all ranks in this process, iterates them in step, and takes the
place of each after every batch.
"""

from __future__ import annotations

import copy
import itertools
import json
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from accelerate.data_loader import prepare_data_loader
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, TensorDataset, WeightedRandomSampler

from harness import run
from oracle import adamw
from scenario import settings
from zerotrain.data import Loader, build_loader

CPU = torch.device("cpu")
SEED = 3


class Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(16))


def loaded(
    data: Any, world: int = 2, epochs: int = 1, collate: Any = None, **config: Any
) -> list[list[list[list[int]]]]:
    """The batches that every rank got, by rank and epoch."""

    def body(rank: int) -> list[list[list[int]]]:
        import zerotrain

        model = nn.Linear(1, 1)
        made = {**settings(2), "train_micro_batch_size_per_gpu": 2, **config}
        _, _, loader, _ = zerotrain.initialize(
            model=model, optimizer=adamw(model.parameters()), training_data=data, collate_fn=collate, config=made
        )
        return [[_numbers(batch) for batch in loader] for _ in range(epochs)]

    return run(world, body)


def _numbers(batch: Any) -> list[int]:
    value = batch[0] if isinstance(batch, (list, tuple)) else batch
    return [int(x) for x in value]


@pytest.mark.parametrize("world", [1, 2, 3])
def test_every_sample_once_and_no_rank_sees_anothers(world: int) -> None:
    ranks = loaded(TensorDataset(torch.arange(12)), world)
    seen = [x for epochs in ranks for batch in epochs[0] for x in batch]
    assert sorted(seen) == list(range(12))
    assert {len(batch) for epochs in ranks for batch in epochs[0]} == {2}


def test_epochs_are_shuffled_alike_on_all_ranks_and_anew_each_time() -> None:
    ranks = loaded(TensorDataset(torch.arange(64)), epochs=2, seed=3)
    first, second = ([x for r in ranks for batch in r[epoch] for x in batch] for epoch in (0, 1))
    assert sorted(first) == sorted(second) == list(range(64))
    assert first != second
    assert first != list(range(64))


def test_the_last_batch_is_filled_up_or_dropped() -> None:
    data = TensorDataset(torch.arange(7))
    filled = [x for r in loaded(data) for batch in r[0] for x in batch]
    assert set(filled) == set(range(7))
    assert len(filled) == 8
    dropped = [x for r in loaded(data, dataloader_drop_last=True) for batch in r[0] for x in batch]
    assert len(dropped) == len(set(dropped)) == 4


@pytest.mark.parametrize(
    "data", [Stream(), (x for x in range(16)), iter(range(16))], ids=["dataset", "generator", "iterator"]
)
def test_iterables_are_parted(data: Any) -> None:
    ranks = loaded(data)
    assert sorted(x for r in ranks for batch in r[0] for x in batch) == list(range(16))


def test_lists_collate_fn_and_ready_loaders() -> None:
    doubled = loaded(list(range(8)), collate=lambda items: torch.tensor(items) * 2)
    assert sorted(x for r in doubled for batch in r[0] for x in batch) == list(range(0, 16, 2))
    ready = loaded(DataLoader(TensorDataset(torch.arange(8)), batch_size=4))
    assert sorted(x for r in ready for batch in r[0] for x in batch) == list(range(8))


def test_training_from_the_loader_and_a_plateau_scheduler_is_left_to_the_script() -> None:
    def body(rank: int) -> tuple[float, float]:
        import zerotrain

        torch.manual_seed(0)
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
        data = [(torch.tensor([x / 8]), torch.tensor([2 * x / 8])) for x in range(8)]
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
        engine, _, loader, scheduler = zerotrain.initialize(
            model=model, optimizer=optimizer, training_data=data, lr_scheduler=plateau, config=settings(2)
        )
        losses: list[float] = []
        for _ in range(20):
            for x, y in loader:
                loss: Tensor = (engine(x) - y).square().mean()
                engine.backward(loss)
                engine.step()
            losses.append(engine.metrics["loss"])
        assert engine.get_lr() == [0.2]
        scheduler.step(1.0)
        scheduler.step(2.0)
        assert engine.get_lr() == [0.1]
        return losses[0], losses[-1]

    for first, last in run(2, body):
        assert last < first / 2


# -- places in the data -----------------------------------------------------------------------------------------------


class Numbers(Dataset[int]):
    """Remembers which samples were loaded, and the epochs that it was told of."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.loaded: list[int] = []
        self.epochs: list[int] = []

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        self.loaded.append(index)
        return index

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)


class Count(IterableDataset[int]):
    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.length))

    def __len__(self) -> int:
        return self.length


class Play:
    """`batches[epoch][i][rank]`; `places[epoch][i][rank]` after `i` batches, one more than there are batches."""

    def __init__(self, loaders: list[Loader], epochs: int = 2) -> None:
        self.batches: list[list[list[list[int]]]] = []
        self.places: list[list[list[dict[str, Any]]]] = []
        for _ in range(epochs):
            iterators = [iter(loader) for loader in loaders]
            self.batches.append([])
            self.places.append([[loader.state_dict() for loader in loaders]])
            for step in zip(*iterators, strict=True):
                self.batches[-1].append([_numbers(batch) for batch in step])
                self.places[-1].append([loader.state_dict() for loader in loaders])

    def order(self, epoch: int) -> list[int]:
        return [x for step in self.batches[epoch] for batch in step for x in batch]


def build(data: Callable[[], Any], world: int, micro: int, drop_last: bool = False, seed: int = SEED) -> list[Loader]:
    return [build_loader(data(), None, micro, CPU, (rank, world), drop_last, seed) for rank in range(world)]


def resumed(loaders: list[Loader], places: list[dict[str, Any]], plain: bool = True, epochs: int = 2) -> Play:
    for loader, place in zip(loaders, places, strict=True):
        loader.load_state_dict(json.loads(json.dumps(place)) if plain else copy.deepcopy(place))
    return Play(loaders, epochs)


def check_every_cut(make: Callable[[], list[Loader]], plain: bool = True) -> Play:
    """A run cut after any batch, in the first epoch or a later one, goes on as the uncut one does."""
    uncut = Play(make(), epochs=3)
    for epoch in range(2):
        for step, places in enumerate(uncut.places[epoch]):
            rest = resumed(make(), places, plain)
            assert rest.batches == [uncut.batches[epoch][step:], uncut.batches[epoch + 1]], (epoch, step)
            assert rest.places[0] == uncut.places[epoch][step:] or not plain
    return uncut


@pytest.mark.parametrize("kind", [Numbers, Count])
@pytest.mark.parametrize("drop_last", [False, True], ids=["filled", "dropped"])
@pytest.mark.parametrize("micro", [1, 2, 3])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_run_cut_anywhere_sees_what_the_uncut_one_sees(world: int, micro: int, drop_last: bool, kind: Any) -> None:
    for length in (0, 1, 2, 6, 12, 13, 17):
        if length == 0 and kind is Numbers:
            continue  # torch refuses to shuffle nothing
        uncut = check_every_cut(lambda length=length: build(lambda: kind(length), world, micro, drop_last))
        total = world * micro
        batches = length // total if drop_last else -(-length // total)
        assert [len(epoch) for epoch in uncut.batches] == [batches] * 3
        assert len(build(lambda length=length: kind(length), world, micro, drop_last)[0]) == batches
        order = uncut.order(0)
        if not drop_last:
            assert sorted(order[:length]) == list(range(length))
            assert order[length:] == list(itertools.islice(itertools.cycle(order[:length]), len(order) - length))


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize(("world", "micro", "length"), [(1, 2, 12), (2, 2, 13), (3, 1, 17), (3, 2, 4), (2, 3, 12)])
def test_the_order_is_accelerates(world: int, micro: int, length: int, drop_last: bool, shuffle: bool) -> None:
    def given() -> DataLoader[Any]:
        return DataLoader(Numbers(length), batch_size=micro, shuffle=shuffle, drop_last=drop_last)

    ours = Play(build(given, world, 7))
    for rank in range(world):
        theirs = prepare_data_loader(given(), CPU, world, rank, use_seedable_sampler=True, data_seed=SEED)
        for epoch in range(2):
            assert [_numbers(batch) for batch in theirs] == [step[rank] for step in ours.batches[epoch]]


@pytest.mark.parametrize("kind", [Numbers, Count])
@pytest.mark.parametrize("drop_last", [False, True], ids=["filled", "dropped"])
@pytest.mark.parametrize(("before", "after"), [((2, 2), (1, 3)), ((1, 3), (2, 1)), ((2, 1), (3, 3)), ((3, 2), (2, 2))])
def test_another_world_goes_on_in_the_same_order(before: Any, after: Any, drop_last: bool, kind: Any) -> None:
    length = 17
    uncut = Play(build(lambda: kind(length), *before, drop_last))
    order = uncut.order(0)[:length] if not drop_last else Play(build(lambda: kind(length), 1, 1)).order(0)
    for step, places in enumerate(uncut.places[0]):
        rest = resumed(build(lambda: kind(length), *after, drop_last), [places[0]] * after[0])
        left = order[step * before[0] * before[1] :]
        seen, total = rest.order(0), after[0] * after[1]
        assert len(seen) % total == 0
        if drop_last:
            assert seen == left[: len(left) // total * total]
        else:
            assert seen == left + order[: -len(left) % total]
        again = Play(build(lambda: kind(length), *after, drop_last))
        assert rest.batches[1] == again.batches[1]


def test_what_lies_before_the_place_is_not_loaded() -> None:
    data = Numbers(64)
    loader = build(lambda: data, 1, 2)[0]
    loader.load_state_dict({"kind": "samples", "epoch": 5, "samples": 60})
    seen = [_numbers(batch) for batch in loader]
    assert len(seen) == 2
    assert data.loaded == [x for batch in seen for x in batch]
    assert data.epochs == [5]
    assert len(loader) == 32


def test_epochs_advance_when_they_are_complete() -> None:
    loader = build(lambda: Numbers(8), 1, 2)[0]
    whole = Play(build(lambda: Numbers(8), 1, 2), 4)
    assert loader.epoch == 0
    next(iter(loader))
    assert loader.state_dict() == {"kind": "samples", "epoch": 0, "samples": 2}
    first = []
    for batch in loader:  # the epoch begins anew
        assert loader.epoch == 0
        first.append([_numbers(batch)])
    assert first == whole.batches[0]
    assert loader.state_dict() == {"kind": "samples", "epoch": 1, "samples": 0}
    loader.set_epoch(3)
    assert [[_numbers(batch)] for batch in loader] == whole.batches[3]
    assert loader.epoch == 4


def test_set_epoch_keeps_the_place_in_the_same_epoch_only() -> None:
    whole = Play(build(lambda: Numbers(8), 1, 2), 3)
    for asked, expected in ((1, whole.batches[1][3:]), (2, whole.batches[2])):
        loader = build(lambda: Numbers(8), 1, 2)[0]
        loader.load_state_dict({"kind": "samples", "epoch": 1, "samples": 6})
        loader.set_epoch(asked)
        assert [[_numbers(batch)] for batch in loader] == expected
        assert loader.epoch == asked + 1


def test_an_iteration_left_behind_moves_nothing() -> None:
    loader = build(lambda: Numbers(8), 1, 2)[0]
    old = iter(loader)
    next(old)
    new = iter(loader)
    next(new)
    next(new)
    assert len(list(old)) == 3
    assert loader.state_dict() == {"kind": "samples", "epoch": 0, "samples": 4}


def test_marks() -> None:
    loader = build(lambda: Numbers(8), 1, 2)[0]
    assert loader.batches_since_mark == 0
    batches = iter(loader)
    next(batches)
    loader.mark()
    next(batches)
    next(batches)
    assert loader.batches_since_mark == 2
    assert loader.state_dict(marked=True)["samples"] == 2
    assert loader.state_dict()["samples"] == 6
    loader.mark()
    assert loader.batches_since_mark == 0
    assert loader.state_dict(marked=True) == loader.state_dict()
    loader.load_state_dict({"kind": "samples", "epoch": 2, "samples": 4})
    assert loader.state_dict(marked=True) == loader.state_dict() == {"kind": "samples", "epoch": 2, "samples": 4}


# -- random numbers ---------------------------------------------------------------------------------------------------


class Noisy(Numbers):
    """Every sample draws from all global generators."""

    def __getitem__(self, index: int) -> Any:
        return torch.tensor([index, torch.rand(()).item(), random.random(), np.random.rand()], dtype=torch.float64)


class NoisyStream(IterableDataset[Any]):
    """Shuffled as it begins; every sample draws from a global generator."""

    def __iter__(self) -> Iterator[Any]:
        for index in torch.randperm(13).tolist():
            yield torch.tensor([index, torch.rand(()).item()])


def _generators() -> Any:
    return torch.get_rng_state(), random.getstate(), np.random.get_state()


def _put_back(states: Any) -> None:
    torch.set_rng_state(states[0])
    random.setstate(states[1])
    np.random.set_state(states[2])


@pytest.mark.parametrize("data", [lambda: Noisy(13), NoisyStream], ids=["map", "stream"])
@pytest.mark.parametrize("world", [1, 2])
def test_augmentation_draws_the_same_numbers_in_a_resumed_run(data: Any, world: int) -> None:
    def start() -> Loader:
        return build_loader(data(), None, 2, CPU, (world - 1, world), seed=SEED)

    loader, batches, cuts = start(), [], []
    for batch in itertools.chain(loader, loader):
        batches.append(batch)
        cuts.append((loader.state_dict(), _generators()))
    assert loader.epoch == 2
    for done, (place, states) in enumerate(cuts, 1):
        loader = start()
        loader.load_state_dict(place)
        _put_back(states)
        rest = list(itertools.chain(loader, loader))[: len(batches) - done]
        assert len(rest) == len(batches) - done
        assert all(torch.equal(a, b) for a, b in zip(rest, batches[done:], strict=True))


@pytest.mark.parametrize(
    "data",
    [
        lambda: Numbers(8),
        lambda: Count(8),
        lambda: DataLoader(Numbers(8), sampler=WeightedRandomSampler([1.0] * 8, 8)),
        lambda: DataLoader(Numbers(8), batch_sampler=Buckets(8)),
    ],
)
@pytest.mark.parametrize("world", [1, 2])
def test_iterating_leaves_the_global_generators_alone(data: Any, world: int) -> None:
    before = _generators()
    loader = build_loader(data(), None, 2, CPU, (0, world), seed=SEED)
    list(loader)
    list(loader)
    after = _generators()
    assert torch.equal(before[0], after[0])
    assert before[1] == after[1]
    assert all(np.array_equal(a, b) for a, b in zip(before[2], after[2], strict=True))


def test_samplers_that_draw_are_alike_on_all_ranks_and_anew_in_each_epoch() -> None:
    for generator in (None, torch.Generator()):
        torch.seed()

        def data(generator: Any = generator) -> DataLoader[Any]:
            sampler = WeightedRandomSampler([1.0] * 16, 16, replacement=False, generator=generator)
            return DataLoader(Numbers(16), batch_size=2, sampler=sampler)

        uncut = check_every_cut(lambda: build(data, 2, 7))
        assert sorted(uncut.order(0)) == sorted(uncut.order(1)) == list(range(16))
        assert uncut.order(0) != uncut.order(1)


# -- ready loaders ----------------------------------------------------------------------------------------------------


class Buckets(BatchSampler):
    """Batches of one, two, three, one, ... samples."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[list[int]]:
        indices = iter(range(self.length))
        for size in itertools.cycle((1, 2, 3)):
            batch = list(itertools.islice(indices, size))
            if not batch:
                return
            yield batch

    def __len__(self) -> int:
        return len(list(iter(self)))


class Lists(Numbers):
    """By lists of indices only."""

    def __getitem__(self, index: Any) -> Any:
        assert isinstance(index, list)
        return torch.tensor(index)


class Batches(IterableDataset[Any]):
    """Yields batches itself."""

    def __iter__(self) -> Iterator[Any]:
        return iter(torch.arange(13).split(2))


class Drawing(Dataset[tuple[int, float]]):
    """Draws in the workers."""

    def __len__(self) -> int:
        return 13

    def __getitem__(self, index: int) -> tuple[int, float]:
        return index, torch.rand(()).item()


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize(
    "data",
    [
        lambda: DataLoader(Numbers(13), batch_size=2, shuffle=True, generator=torch.Generator()),
        lambda: DataLoader(Numbers(13), batch_size=2, drop_last=True),
        lambda: DataLoader(Count(13), batch_size=2),
        lambda: DataLoader(Numbers(13), batch_sampler=Buckets(13)),
        lambda: DataLoader(Lists(13), sampler=BatchSampler(range(13), 2, False), batch_size=None),
        lambda: DataLoader(Lists(13), sampler=Buckets(13), batch_size=None),
        lambda: DataLoader([torch.tensor([x]) for x in range(13)], batch_size=None, shuffle=True),
        lambda: DataLoader(Batches(), batch_size=None),
    ],
    ids=["shuffled", "dropped", "stream", "buckets", "lists", "list buckets", "unbatched", "unbatched stream"],
)
def test_ready_loaders_can_be_cut(data: Any, world: int) -> None:
    uncut = check_every_cut(lambda: build(data, world, 7))
    assert set(uncut.order(0)) <= set(range(13))
    assert len(set(uncut.order(0))) >= 12


def test_a_custom_batch_sampler_is_counted_in_batches() -> None:
    data = Numbers(12)
    loader = build(lambda: DataLoader(data, batch_sampler=Buckets(12)), 1, 7)[0]
    place = {"kind": "batches", "epoch": 0, "batches": 4, "world_size": 1}
    loader.load_state_dict(place)
    assert loader.state_dict() == place
    assert [_numbers(batch) for batch in loader] == [[7, 8], [9, 10, 11]]
    assert data.loaded == [7, 8, 9, 10, 11]
    with pytest.raises(ValueError, match=r"world_size 1 .*world_size 2"):
        build(lambda: DataLoader(Numbers(12), batch_sampler=Buckets(12)), 2, 7)[0].load_state_dict(place)


def test_places_of_another_kind_are_refused() -> None:
    plain = build(lambda: Numbers(8), 1, 2)[0]
    custom = build(lambda: DataLoader(Numbers(8), batch_sampler=Buckets(8)), 1, 2)[0]
    with pytest.raises(ValueError, match=r"'batches'.*'samples'"):
        plain.load_state_dict(custom.state_dict())
    with pytest.raises(ValueError, match=r"'samples'.*'batches'"):
        custom.load_state_dict(plain.state_dict())


def test_attributes_are_those_of_the_loader_beneath() -> None:
    data = Numbers(8)
    loader = build_loader(data, None, 2, CPU, (0, 2))
    assert loader.dataset is data
    assert loader.batch_size == 2
    assert loader.total_batch_size == 4
    assert loader.num_workers == 0
    with pytest.raises(AttributeError, match="nonsense"):
        _ = loader.nonsense
    assert len(copy.copy(loader)) == 2


# -- workers ----------------------------------------------------------------------------------------------------------


class Shared(IterableDataset[int]):
    """Each worker reads its own part."""

    def __iter__(self) -> Iterator[int]:
        info = torch.utils.data.get_worker_info()
        return iter(range(13)) if info is None else iter(range(info.id, 13, info.num_workers))


def test_workers_do_not_read_ahead_of_the_place_and_their_numbers_follow_from_the_epoch() -> None:
    def start() -> Loader:
        return build(lambda: DataLoader(Drawing(), batch_size=2, shuffle=True, num_workers=2), 2, 7)[0]

    torch.seed()
    loader, epochs = start(), []
    before = torch.get_rng_state()
    for _ in range(2):
        epochs.append([])
        for indices, numbers in loader:
            epochs[-1].append((indices.tolist(), numbers.tolist()))
            if len(epochs) == 2 and len(epochs[-1]) == 2:
                place = loader.state_dict()
    assert torch.equal(torch.get_rng_state(), before)
    assert place == {"kind": "samples", "epoch": 1, "samples": 8}
    torch.seed()
    loader = start()
    loader.load_state_dict(place)
    assert [indices.tolist() for indices, _ in loader] == [indices for indices, _ in epochs[1][2:]]
    loader.set_epoch(1)
    assert [(indices.tolist(), numbers.tolist()) for indices, numbers in loader] == epochs[1]


@pytest.mark.parametrize("persistent", [False, True])
def test_iterables_with_workers(persistent: bool) -> None:
    def start(workers: int, micro: int = 2) -> list[Loader]:
        options = {"num_workers": workers, "persistent_workers": persistent}
        return build(lambda: DataLoader(Shared(), batch_size=micro, **options), 1, 7)

    uncut = Play(start(1), 1)
    assert uncut.order(0) == [*range(13), 0]
    rest = resumed(start(1), uncut.places[0][3])
    assert rest.batches == [uncut.batches[0][3:], uncut.batches[0]]
    uncut = Play(start(2), 1)
    assert set(uncut.order(0)) == set(range(13))
    rest = resumed(start(2), uncut.places[0][3])
    assert rest.batches == [uncut.batches[0][3:], uncut.batches[0]]
    with pytest.raises(ValueError, match=r"micro_batch 2 .*micro_batch 3"):
        resumed(start(2, 3), uncut.places[0][3])


# -- torchdata's loader -----------------------------------------------------------------------------------------------


class Kept(IterableDataset[int]):
    """Keeps its own place."""

    def __init__(self) -> None:
        self.place = 0

    def __iter__(self) -> Iterator[int]:
        while self.place < 13:
            self.place += 1
            yield self.place - 1
        self.place = 0

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize(
    ("data", "options"),
    [(lambda: Numbers(13), {"shuffle": True}), (Kept, {}), (lambda: Numbers(13), {"batch_sampler": Buckets(13)})],
    ids=["shuffled", "stream", "buckets"],
)
def test_torchdatas_loader_keeps_its_own_state(data: Any, options: Any, world: int, workers: int) -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader
    if workers and (world, options) != (2, {"shuffle": True}):
        return  # one case with processes is enough
    size = {} if "batch_sampler" in options else {"batch_size": 2}

    def start() -> list[Loader]:
        return build(lambda: stateful(data(), num_workers=workers, **size, **options), world, 7)

    torch.seed()
    loaders, before = start(), torch.get_rng_state()
    if workers:
        uncut = Play(loaders)
        rest = resumed(start(), uncut.places[0][2], plain=False)
        assert rest.batches == [uncut.batches[0][2:], uncut.batches[1]]
        torch.set_rng_state(before)  # torchdata's sampler draws as it is made
        list(loaders[0])
    else:
        check_every_cut(start, plain=False)
        torch.set_rng_state(before)
        uncut = Play(loaders)
    assert set(uncut.order(0)) == set(range(13))
    assert torch.equal(torch.get_rng_state(), before)


def test_torchdatas_state_is_good_at_the_same_layout_only() -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader

    def start(world: int, micro: int = 2) -> Loader:
        return build(lambda: stateful(Numbers(13), batch_size=micro), world, 7)[0]

    loader = start(1)
    next(iter(loader))
    loader.mark()
    next(iter(loader))
    place = loader.state_dict(marked=True)
    assert place["kind"] == "stateful"
    assert place["batches"] == 1
    with pytest.raises(ValueError, match=r"world_size 1 .*world_size 2"):
        start(2).load_state_dict(place)
    with pytest.raises(ValueError, match=r"micro_batch 2 .*micro_batch 1"):
        start(1, 1).load_state_dict(place)
    with pytest.raises(ValueError, match=r"'stateful'.*'samples'"):
        build(lambda: Numbers(13), 1, 2)[0].load_state_dict(place)
    other = start(1)
    other.load_state_dict(place)
    assert other.state_dict() == place
    assert next(_numbers(batch) for batch in other) == [2, 3]
