"""The loader that initialize() returns: each rank its own part of every global batch, every sample once an epoch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from harness import run
from oracle import adamw
from scenario import settings


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
