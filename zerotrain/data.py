"""Data parallel loading: each rank its own part of every global batch, through accelerate's data loader."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from accelerate.data_loader import prepare_data_loader
from torch.utils.data import DataLoader, Dataset, IterableDataset


class _Stream(IterableDataset[Any]):
    """Any iterable as a dataset; it is iterated anew in each epoch."""

    def __init__(self, iterable: Iterable[Any]) -> None:
        self._iterable = iterable

    def __iter__(self) -> Any:
        return iter(self._iterable)


def build_loader(
    data: Any,
    collate_fn: Callable[[list[Any]], Any] | None,
    micro_batch: int,
    device: torch.device,
    ranks: tuple[int, int],
    drop_last: bool = False,
    seed: int | None = None,
) -> DataLoader[Any]:
    """A loader of micro batches of `micro_batch` samples, moved to `device`; `ranks` is `(rank, world_size)`.

    Map-style datasets (with `__getitem__` and `__len__`) are shuffled anew in each epoch, alike on all ranks. Of iterables
    each rank takes its part of every global batch, in order. The last global batch is filled up from the first samples
    unless `drop_last`. A DataLoader is taken as it is, and split over the ranks.
    """
    rank, world = ranks
    if isinstance(data, DataLoader):
        loader = data
    else:
        map_style = hasattr(data, "__getitem__") and hasattr(data, "__len__")
        dataset = data if isinstance(data, Dataset) or map_style else _Stream(data)
        generator = torch.Generator()
        generator.manual_seed(0 if seed is None else seed)
        loader = DataLoader(
            dataset,
            batch_size=micro_batch,
            shuffle=map_style and not isinstance(data, IterableDataset),
            collate_fn=collate_fn,
            drop_last=drop_last,
            generator=generator,
        )
    prepared: DataLoader[Any] = prepare_data_loader(
        loader,
        device=device,
        num_processes=world,
        process_index=rank,
        put_on_device=True,
        dispatch_batches=False,
        use_seedable_sampler=True,
        data_seed=seed or 0,
    )
    return prepared
