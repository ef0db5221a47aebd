"""Collectives and bytes per step, by the engine's own counters and once by the loopback interface's."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from harness import run
from models import Block
from scenario import STAGES, engine_for

stages = pytest.mark.parametrize("stage", STAGES)
GRADIENTS = ("reduce_scatter", "all_reduce")


class Stack(nn.Module):
    """Enough units (48 of 8,384 parameters) that neither scalars nor the last unit show in a figure per parameter."""

    def __init__(self, depth: int = 48, width: int = 64) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width, width) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.float().square().mean()


def window(engine: Any, accumulation: int) -> None:
    for micro in range(accumulation):
        engine.backward(engine(torch.full((1, 64), 0.1 * (micro + 1))))
        engine.step()


def traffic_of_a_step(world: int, stage: int, accumulation: int = 1, **extra: Any) -> list[tuple[Any, Any, int]]:
    """Calls and bytes per optimizer step of each rank, in a settled run of two, and the number of parameters."""

    def body(rank: int) -> tuple[dict[str, float], dict[str, float], int]:
        engine = engine_for(Stack(), stage, accumulation=accumulation, gradient_clipping=1.0, **extra)
        window(engine, accumulation)
        window(engine, accumulation)
        engine.traffic.reset()
        window(engine, accumulation)
        window(engine, accumulation)
        calls = {kind: count / 2 for kind, count in engine.traffic.calls.items() if count}
        sent = {kind: count / 2 for kind, count in engine.traffic.sent_bytes.items() if count}
        return calls, sent, sum(p.numel() for p in engine.module.parameters())

    return run(world, body)


def bytes_per_parameter(ranks: list[tuple[Any, Any, int]]) -> float:
    """Summed over all ranks and kinds."""
    return sum(sum(sent.values()) for _, sent, _ in ranks) / ranks[0][2]


@stages
def test_bytes_per_parameter_at_two_ranks(stage: int) -> None:
    """8.0 for an exchange of gradients and one of weights; stage 3 gathers its weights twice."""
    measured = bytes_per_parameter(traffic_of_a_step(2, stage))
    assert measured == pytest.approx(12.0 if stage == 3 else 8.0, rel=0.02)


def test_bytes_of_kept_units_at_two_ranks() -> None:
    ranks = traffic_of_a_step(2, 3, zero={"reshard_after_forward": False})
    assert bytes_per_parameter(ranks) == pytest.approx(8.0, rel=0.02)


@pytest.mark.parametrize("world", [1, 3, 4])
@stages
def test_bytes_at_other_world_sizes(stage: int, world: int) -> None:
    """(N - 1) * 4 bytes per parameter and collective, summed over all ranks."""
    measured = bytes_per_parameter(traffic_of_a_step(world, stage))
    assert measured == pytest.approx((world - 1) * 4 * (3 if stage == 3 else 2), rel=0.02)


@stages
def test_bytes_with_accumulation(stage: int) -> None:
    """Stages 0 and 1 exchange gradients once per window; stage 2 in each micro batch; stage 3 weights as well."""
    measured = bytes_per_parameter(traffic_of_a_step(2, stage, accumulation=3))
    assert measured == pytest.approx({0: 8.0, 1: 8.0, 2: 3 * 4.0 + 4.0, 3: 3 * 12.0}[stage], rel=0.02)


@stages
def test_bytes_in_bf16(stage: int) -> None:
    """Weights travel in bf16 (2 bytes); gradients in what communication_data_type says."""
    weights = 2 * (2 * 2.0 if stage == 3 else 2.0) / 2
    for kind, size in (("bf16", 2.0), ("fp32", 4.0)):
        measured = bytes_per_parameter(
            traffic_of_a_step(2, stage, bf16={"enabled": True}, communication_data_type=kind)
        )
        if stage == 0:  # no weights travel; the summed gradients go back in fp32 or as they came
            assert 2 * size * 0.98 <= measured <= (size + 4.0) * 1.02, kind
            continue
        assert measured == pytest.approx(weights + size, rel=0.02), kind


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_collectives_per_step(stage: int, accumulation: int) -> None:
    """One exchange per unit and moment; a handful of scalars for the norm, found infs and the loss."""

    def body(rank: int) -> tuple[dict[str, int], int]:
        engine = engine_for(Stack(depth=6), stage, accumulation=accumulation, gradient_clipping=1.0)
        window(engine, accumulation)
        engine.traffic.reset()
        window(engine, accumulation)
        return dict(engine.traffic.calls), len(engine.units)

    for calls, units in run(2, body):
        assert units >= 6
        # At stage 3 the last unit of the forward is the first of the backward, and stays.
        gathers = {1: units, 2: units, 3: (2 * units - 1) * accumulation}[stage]
        reductions = {1: 1, 2: accumulation, 3: accumulation}[stage]
        assert calls["all_gather"] == gathers
        assert sum(calls.get(kind, 0) for kind in GRADIENTS) == reductions * units
        assert calls.get("broadcast", 0) == 0
        assert calls.get("scalars", 0) <= 2 + accumulation


def test_ranks_send_alike() -> None:
    """No rank carries more than its share."""
    for stage in STAGES:
        ranks = traffic_of_a_step(4, stage)
        sent = [sum(bytes_by_kind.values()) for _, bytes_by_kind, _ in ranks]
        assert max(sent) <= 1.05 * min(sent), f"stage {stage}: {sent}"


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_hybrid_bytes(stage: int) -> None:
    """Two groups of two: gathers inside a group; gradients inside, then each shard across."""
    measured = bytes_per_parameter(traffic_of_a_step(4, stage, zero={"shard_group_size": 2}))
    # Inside: each of four ranks sends half of the unit. Across: the halves of two ranks are summed, 2 * (1/2) per rank.
    inside, across = 4 * 0.5 * 4, 4 * 0.5 * 4
    assert measured == pytest.approx(inside * (3 if stage == 3 else 2) + across, rel=0.02)


LOOPBACK = Path("/proc/net/dev")


def loopback_bytes() -> int:
    """Bytes sent over the loopback interface since the machine started, by every process on it."""
    for line in LOOPBACK.read_text().splitlines():
        name, _, figures = line.partition(":")
        if name.strip() == "lo":
            return int(figures.split()[8])
    raise AssertionError("no loopback interface")


@pytest.mark.skipif(not LOOPBACK.exists(), reason="needs /proc/net/dev")
@pytest.mark.parametrize("stage", [2, 3])
def test_counters_agree_with_the_interface(stage: int) -> None:
    """What the counters say is what the kernel saw, give or take the headers of its packets (65 KiB each)."""

    def body(rank: int) -> tuple[float, int]:
        engine = engine_for(Stack(depth=8, width=256), stage)
        for _ in range(2):
            engine.backward(engine(torch.ones(1, 256)))
            engine.step()
        ratios = []
        for _ in range(3):  # other processes use the interface too: the quietest of three windows counts
            engine.traffic.reset()
            dist.barrier()
            time.sleep(0.05)
            before = loopback_bytes()
            for _ in range(4):
                engine.backward(engine(torch.ones(1, 256)))
                engine.step()
            dist.barrier()
            time.sleep(0.05)
            sent = torch.tensor(float(sum(engine.traffic.sent_bytes.values())))
            seen = loopback_bytes() - before
            dist.all_reduce(sent)
            ratios.append(seen / float(sent))
        return min(ratios), int(sent)

    for ratio, sent in run(2, body):
        assert sent > 10e6
        assert 0.99 <= ratio <= 1.03, f"the interface carried {ratio:.3f} of what the counters say"
