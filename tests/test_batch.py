"""Batch arithmetic: two of the three sizes give the third, or an error that shows why they cannot."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zerotrain.config import BatchSizes, ConfigError, load_config

BATCHES = [
    ((32, 4, 2), 4, (32, 4, 2)),
    ((32, 4, None), 2, (32, 4, 4)),
    ((32, None, 2), 2, (32, 8, 2)),
    ((None, 4, 3), 2, (24, 4, 3)),
    ((32, None, None), 4, (32, 8, 1)),
    ((None, 4, None), 2, (8, 4, 1)),
    ((None, None, 4), 2, (8, 1, 4)),
    ((None, None, None), 3, (3, 1, 1)),
]
BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def batch_job(train: int | None, micro: int | None, accumulation: int | None) -> dict[str, int]:
    """A job with those of the three keys that are not None."""
    pairs = zip(BATCH_KEYS, (train, micro, accumulation), strict=True)
    return {key: value for key, value in pairs if value is not None}


@pytest.mark.parametrize(("given_keys", "world", "expected"), BATCHES)
def test_two_batch_keys_give_the_third(given_keys: Any, world: int, expected: Any) -> None:
    assert load_config(batch_job(*given_keys)).batch(world) == BatchSizes(*expected)


MISFITS = [
    (
        (24, 4, 3),
        4,
        "train_batch_size 24 != train_micro_batch_size_per_gpu 4 x gradient_accumulation_steps 3 x world_size 4 = 48; ",
    ),
    (
        (40, 4, None),
        4,
        "train_batch_size 40 is not a multiple of train_micro_batch_size_per_gpu 4 x world_size 4 = 16, so no "
        "gradient_accumulation_steps fits; the nearest that fits is train_batch_size 32 or 48",
    ),
    (
        (10, None, 2),
        4,
        "train_batch_size 10 is not a multiple of gradient_accumulation_steps 2 x world_size 4 = 8, so no "
        "train_micro_batch_size_per_gpu fits; the nearest that fits is train_batch_size 8 or 16",
    ),
    ((3, None, None), 4, "train_batch_size 3 is not a multiple of gradient_accumulation_steps 1 x world_size 4 = 4"),
]  # fmt: skip


@pytest.mark.parametrize(("given_keys", "world", "text"), MISFITS)
def test_batches_that_do_not_fit_show_the_arithmetic(given_keys: Any, world: int, text: str) -> None:
    config = load_config(batch_job(*given_keys))
    with pytest.raises(ConfigError) as caught:
        config.batch(world)
    assert str(caught.value).startswith(text)


def test_a_batch_needs_a_rank() -> None:
    with pytest.raises(ValueError, match="world_size 0"):
        load_config({}).batch(0)


SIZES = st.integers(1, 64)
MAYBE = st.none() | SIZES


@given(micro=SIZES, accumulation=SIZES, world=SIZES, dropped=st.sampled_from([*BATCH_KEYS, None]))
def test_any_two_keys_of_a_true_batch_give_it_back(micro: int, accumulation: int, world: int, dropped: str) -> None:
    job = batch_job(micro * accumulation * world, micro, accumulation)
    job.pop(dropped, None)
    assert load_config(job).batch(world) == BatchSizes(micro * accumulation * world, micro, accumulation)


@given(train=st.none() | st.integers(1, 4096), micro=MAYBE, accumulation=MAYBE, world=SIZES)
def test_a_batch_is_true_to_what_was_given_or_refused(
    train: int | None, micro: int | None, accumulation: int | None, world: int
) -> None:
    try:
        sizes = load_config(batch_job(train, micro, accumulation)).batch(world)
    except ConfigError:
        assert train is not None  # without it there is always an answer
        assert train % ((micro or 1) * (accumulation or 1) * world) or (micro and accumulation)
        return
    assert sizes.train == sizes.micro * sizes.accumulation * world
    assert train in (None, sizes.train)
    assert micro in (None, sizes.micro)
    assert accumulation in (None, sizes.accumulation)
