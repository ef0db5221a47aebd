"""Batch arithmetic: samples per step = micro batch x accumulation steps x data-parallel ranks."""

from __future__ import annotations

from dataclasses import dataclass

from zerotrain.config.errors import ConfigError

TRAIN, MICRO, ACCUMULATION = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"


@dataclass(frozen=True)
class BatchSizes:
    """The batch of one optimizer step; ``train == micro * accumulation * ranks``."""

    train: int
    """Samples per optimizer step, over all ranks."""

    micro: int
    """Samples per rank and forward."""

    accumulation: int
    """Micro batches per optimizer step."""


def resolve_batch(train: int | None, micro: int | None, accumulation: int | None, world_size: int) -> BatchSizes:
    """Fill in what is None for ``world_size`` data-parallel ranks; ConfigError, with the arithmetic, on a misfit."""
    if world_size < 1:
        raise ValueError(f"world_size {world_size} is not a number of ranks (at least 1)")
    if train is None:
        micro, accumulation = micro or 1, accumulation or 1
        return BatchSizes(micro * accumulation * world_size, micro, accumulation)
    if micro is not None and accumulation is not None:
        product = micro * accumulation * world_size
        if train != product:
            raise ConfigError(
                f"{TRAIN} {train} != {MICRO} {micro} x {ACCUMULATION} {accumulation} x world_size {world_size}"
                f" = {product}; change one of them, or leave one out and it follows from the others"
            )
        return BatchSizes(train, micro, accumulation)
    if micro is not None:
        return BatchSizes(train, micro, _divide(train, {MICRO: micro, "world_size": world_size}, ACCUMULATION))
    accumulation = accumulation or 1
    return BatchSizes(
        train, _divide(train, {ACCUMULATION: accumulation, "world_size": world_size}, MICRO), accumulation
    )


def unfit_for_any_world(train: int | None, micro: int | None, accumulation: int | None) -> str | None:
    """The problem, if the keys contradict each other however many ranks there are."""
    given = {MICRO: micro, ACCUMULATION: accumulation}
    factors = {name: value for name, value in given.items() if value is not None}
    if train is None or not factors:
        return None
    text, product = _product(factors)
    if train % product == 0:
        return None
    return f"{TRAIN}: {train} is not a multiple of {text}, so no number of ranks fits; {_neighbours(train, product)}"


def _divide(train: int, factors: dict[str, int], wanted: str) -> int:
    text, product = _product(factors)
    if train % product:
        raise ConfigError(
            f"{TRAIN} {train} is not a multiple of {text}, so no {wanted} fits; {_neighbours(train, product)}"
        )
    return train // product


def _product(factors: dict[str, int]) -> tuple[str, int]:
    product = 1
    for value in factors.values():
        product *= value
    text = " x ".join(f"{name} {value}" for name, value in factors.items())
    return (f"{text} = {product}" if len(factors) > 1 else text), product


def _neighbours(train: int, product: int) -> str:
    below = train // product * product
    fits = [str(value) for value in (below, below + product) if value > 0]
    return f"the nearest that fits is {TRAIN} {' or '.join(fits)}"
