"""The numerical contract: zerotrain in any configuration gives what plain torch gives on the whole global batch."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

import pairwise
from harness import run
from models import Shape, TinyLM, token_batch
from oracle import Job, Record, adamw, assert_equal_to_oracle, check, grad_norm, merge, oracle, trained, weights_of

STAGES = (0, 1, 2, 3)
FACTORS: dict[str, tuple[Any, ...]] = {
    "stage": STAGES,
    "world": (1, 2, 4),
    "accumulation": (1, 3),
    "clip": (False, True),
    "dtype": ("fp32", "bf16"),
    "recompute": (False, True),
    "tied": (False, True),
    "frozen": (False, True),
    "divisible": (True, False),
}
# Every combination of any three factors; the full product is `-m full`.
COVER = pairwise.covering(FACTORS, strength=3)
REST = [cell for cell in pairwise.product(FACTORS) if cell not in COVER]


def job_of(cell: dict[str, Any], **changes: Any) -> Job:
    shape = Shape(
        vocab=16 if cell["divisible"] else 13,
        width=8 if cell["divisible"] else 7,
        hidden=16 if cell["divisible"] else 11,
        tied=cell["tied"],
        frozen=cell["frozen"],
        recompute="nonreentrant" if cell["recompute"] else "",
    )
    settings: dict[str, Any] = {
        "stage": cell["stage"],
        "world": cell["world"],
        "accumulation": cell["accumulation"],
        "clip": 0.25 if cell["clip"] else 0.0,
        "dtype": torch.bfloat16 if cell["dtype"] == "bf16" else torch.float32,
    }
    settings.update(changes)
    return Job(build=partial(TinyLM, shape), batch=partial(token_batch, vocab=shape.vocab), **settings)


BASE = {
    "stage": 2,
    "world": 2,
    "accumulation": 2,
    "clip": True,
    "dtype": "fp32",
    "recompute": False,
    "tied": True,
    "frozen": True,
    "divisible": False,
}


@pytest.mark.parametrize("cell", COVER, ids=pairwise.name)
def test_matrix(cell: dict[str, Any]) -> None:
    check(job_of(cell))


@pytest.mark.full
@pytest.mark.parametrize("cell", REST, ids=pairwise.name)
def test_matrix_full(cell: dict[str, Any]) -> None:
    check(job_of(cell))


def test_cover_has_every_triple() -> None:
    """The default run must not lose a combination unnoticed."""
    assert len(COVER) + len(REST) == 1536
    for first, second, third in (("stage", "world", "dtype"), ("stage", "accumulation", "tied")):
        seen = {(cell[first], cell[second], cell[third]) for cell in COVER}
        assert len(seen) == len(FACTORS[first]) * len(FACTORS[second]) * len(FACTORS[third])


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(("world", "dtype"), [(3, "fp32"), (3, "bf16"), (5, "fp32"), (8, "bf16")])
def test_other_world_sizes(stage: int, world: int, dtype: str) -> None:
    check(job_of({**BASE, "stage": stage, "world": world, "dtype": dtype}, micro=1, steps=2))


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", STAGES[1:])  # stage 0 shards nothing
def test_hybrid_sharding(stage: int, dtype: str, accumulation: int) -> None:
    """Shards inside a group of two ranks, replicas across two groups."""
    cell = {**BASE, "stage": stage, "world": 4, "dtype": dtype, "accumulation": accumulation}
    check(job_of(cell, zero={"shard_group_size": 2}))


@pytest.mark.parametrize(("world", "group"), [(2, 1), (2, 2), (6, 3), (8, 2)])
@pytest.mark.parametrize("stage", [1, 3])
def test_hybrid_group_sizes(stage: int, world: int, group: int) -> None:
    check(job_of({**BASE, "stage": stage, "world": world}, zero={"shard_group_size": group}, micro=1, steps=2))


UNITS: dict[str, dict[str, Any]] = {
    "default_units": {"unit_min_elements": 1_000_000},
    "middling_units": {"unit_min_elements": 300},
    "named_units": {"unit_min_elements": 1, "units": ["blocks.0", "blocks.2"]},
    "no_overlap": {"overlap_comm": False},
    "small_buckets": {"reduce_bucket_size": 64, "stage3_prefetch_bucket_size": 64},
    "no_prefetch": {"stage3_prefetch_bucket_size": 0},
    "large_prefetch": {"stage3_prefetch_bucket_size": 1_000_000_000},
}


@pytest.mark.parametrize("zero", UNITS.values(), ids=UNITS)
@pytest.mark.parametrize("stage", STAGES)
def test_units_and_buckets(stage: int, zero: dict[str, Any]) -> None:
    """What the tuning keys choose changes no number."""
    check(job_of({**BASE, "stage": stage, "recompute": True}, zero=zero))


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_kept_gathered(dtype: str, recompute: bool) -> None:
    """Stage 3 that keeps its units between forward and backward."""
    cell = {**BASE, "stage": 3, "dtype": dtype, "recompute": recompute}
    check(job_of(cell, zero={"reshard_after_forward": False}))


@pytest.mark.parametrize("stage", STAGES)
def test_every_configuration_agrees_bit_by_bit(stage: int) -> None:
    """At one rank there is nothing to sum over: equal to the plain loop to the last bit, in every stage."""
    job = job_of({**BASE, "world": 1, "accumulation": 1, "clip": False, "stage": stage}, steps=4)
    got, want = check(job), oracle(job)
    for name, value in want.weights.items():
        assert torch.equal(got.weights[name], value), name


def test_stages_agree_with_each_other() -> None:
    """The sum over two ranks has one order only, so two ranks give the same bits in every stage."""
    records = [trained(job_of({**BASE, "accumulation": 1, "clip": False, "stage": stage})) for stage in STAGES]
    for stage, record in zip(STAGES, records, strict=True):
        for name, value in records[0].weights.items():
            assert torch.equal(record.weights[name], value), f"stage {stage}, {name}"
        assert record.losses == records[0].losses


def test_oracle_is_not_blind() -> None:
    """The comparison must fail when the job differs in what it should notice: here the clipping and one weight."""
    base = oracle(job_of({**BASE, "world": 2}))
    other = oracle(job_of({**BASE, "world": 2, "clip": False}))
    with pytest.raises(AssertionError):
        assert_equal_to_oracle(other, base)
    changed = oracle(job_of({**BASE, "world": 2}))
    changed.weights["blocks.0.up.weight"][0, 0] += 1e-4
    with pytest.raises(AssertionError, match=r"blocks\.0\.up\.weight"):
        assert_equal_to_oracle(changed, base)


@pytest.mark.parametrize("accumulation", [1, 3])
def test_oracle_agrees_with_ddp(accumulation: int) -> None:
    """The oracle itself, checked against torch's own DistributedDataParallel on two ranks."""
    job = job_of({**BASE, "frozen": False, "accumulation": accumulation})

    def body(rank: int) -> Record:
        model = job.model()
        ddp = torch.nn.parallel.DistributedDataParallel(model)
        optimizer = adamw(model.parameters())
        assert job.scheduler is not None
        scheduler = job.scheduler(optimizer)
        record = Record()
        for step in range(job.steps):
            mean = 0.0
            for micro in range(accumulation):
                loss = ddp(*job.piece(step, micro, rank))
                (loss / accumulation).backward()
                mean += float(loss.detach()) / accumulation
            record.losses.append(mean)
            record.norms.append(grad_norm([p.grad for p in model.parameters() if p.grad is not None], 2.0))
            torch.nn.utils.clip_grad_norm_(model.parameters(), job.clip)
            record.lrs.append([group["lr"] for group in optimizer.param_groups])
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        record.weights = weights_of(model)
        return record

    assert_equal_to_oracle(merge(run(2, body)), oracle(job))
