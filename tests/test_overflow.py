"""Non-finite gradients in every dtype and stage, and the fp16 loss scale."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harness import run
from models import Regression, Shape, TinyLM, token_batch, vector_batch
from oracle import Job, check, full_weights, warmup
from scenario import STAGES, engine_for, settings

stages = pytest.mark.parametrize("stage", STAGES)
MODES: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {"fp16": {"enabled": True, "loss_scale": 64}},
}
modes = pytest.mark.parametrize("mode", MODES)


class PoisonedLinear(nn.Linear):
    """Adds ``poison`` (0, inf or nan) to the gradient of its bias, and touches nothing else."""

    poison = 0.0

    def forward(self, x: Tensor) -> Tensor:
        bias = self.bias * 1.0
        if bias.requires_grad:
            poison = self.poison
            bias.register_hook(lambda gradient: gradient + poison)
        return nn.functional.linear(x, self.weight, bias)


class Poisoned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8), PoisonedLinear(8, 8), nn.Linear(8, 8)])

    def forward(self, x: Tensor, poison: float) -> Tensor:
        self.layers[1].poison = poison
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.float().square().mean()


def gate(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)


class Listener(logging.Handler):
    """Collects log lines of every logger."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@pytest.mark.parametrize("poison", [float("inf"), float("nan")], ids=["inf", "nan"])
@modes
@stages
def test_skipped_on_all_ranks_alike(stage: int, mode: str, poison: float) -> None:
    """One rank's bad gradient in one micro batch skips the step everywhere; the run goes on as if it had not been."""
    import zerotrain

    def body(rank: int, poisoned: bool) -> dict[str, Any]:
        torch.manual_seed(4)
        model = Poisoned()
        optimizer = gate(model)

        config = settings(stage, accumulation=2, gradient_clipping=0.1, **MODES[mode])
        scheduler = warmup(optimizer)
        engine = zerotrain.initialize(model=model, optimizer=optimizer, lr_scheduler=scheduler, config=config)[0]
        updated, lrs, norms = [], [], []
        for step in (0, 1, 2):
            if step == 1 and not poisoned:
                continue
            for micro in range(2):
                x, _ = vector_batch(10 * step + 2 * micro + rank, 2)
                bad = poison if (step, micro, rank) == (1, 0, 1) else 0.0
                engine.backward(engine(x, bad))
                done = engine.step()
            updated.append(done)
            norms.append(engine.get_global_grad_norm())
            lrs.append(engine.get_lr()[0])
        return {
            "updated": updated,
            "lrs": lrs,
            "norms": norms,
            "skipped": engine.skipped_steps,
            "steps": engine.global_steps,
            "weights": full_weights(model),
        }

    clean = run(2, lambda rank: body(rank, False))
    for got, want in zip(run(2, lambda rank: body(rank, True)), clean, strict=True):
        assert got["updated"] == [True, False, True]
        assert (got["skipped"], got["steps"]) == (1, 3)
        assert got["lrs"] == [want["lrs"][0], want["lrs"][0], want["lrs"][1]], "the scheduler moved on a skipped step"
        assert [got["norms"][0], got["norms"][2]] == want["norms"]
        assert not torch.isfinite(torch.tensor(got["norms"][1]))
        for name, value in want["weights"].items():
            assert torch.isfinite(value).all()
            assert torch.equal(got["weights"][name], value), f"{name}: the bad gradient left a trace"


@pytest.mark.parametrize(
    ("stage", "zero"),
    [*((stage, {}) for stage in STAGES), *((stage, {"shard_group_size": 2}) for stage in STAGES[1:])],
)
def test_the_first_bad_parameter_is_named(stage: int, zero: dict[str, Any]) -> None:
    """Told in the log of rank 0, whichever rank's gradient was bad and whichever rank holds the fragment."""

    def body(rank: int) -> str:
        listener = Listener()
        for name in ("", "zerotrain"):
            logger = logging.getLogger(name)
            logger.addHandler(listener)
            logger.setLevel(logging.INFO)
        engine = engine_for(Poisoned(), stage, zero=zero)
        x, _ = vector_batch(rank, 2)
        engine.backward(engine(x, float("nan") if rank == 3 else 0.0))
        assert engine.step() is False
        return "\n".join(listener.lines)

    lines = run(4, body)[0]
    assert "layers.1.bias" in lines, lines


@stages
def test_skip_without_clipping_and_in_incomplete_windows(stage: int) -> None:
    def body(rank: int) -> tuple[bool, int, bool]:
        engine = engine_for(Poisoned(), stage, accumulation=3)
        before = full_weights(engine.module)
        x, _ = vector_batch(rank, 2)
        engine.backward(engine(x, float("inf") if rank == 0 else 0.0))
        done = engine.step(boundary=True)
        after = full_weights(engine.module)
        return done, engine.skipped_steps, all(torch.equal(before[name], after[name]) for name in before)

    assert run(2, body) == [(False, 1, True)] * 2


@modes
def test_huge_but_finite_gradients_are_not_skipped(mode: str) -> None:
    """The squares of these gradients overflow fp32; the norm must not."""

    def body(rank: int) -> tuple[bool, float]:
        engine = engine_for(nn.Linear(4, 4, bias=False), 2, gradient_clipping=1.0, **MODES[mode])
        out = engine(torch.ones(1, 4))
        size = 1e3 if mode == "fp16" else 1e25
        engine.backward((out.float() * size).sum())
        return engine.step(), engine.get_global_grad_norm() / (4 * size)

    for updated, ratio in run(2, body):
        assert updated is True
        assert ratio == pytest.approx(1.0, rel=1e-2)


# ------------------------------------------------------------------------------------------------------------ fp16


def half_job(stage: int, **changes: Any) -> Job:
    fp16 = {"enabled": True, "loss_scale": changes.pop("loss_scale", 128)}
    return Job(
        partial(TinyLM, Shape(tied=True, frozen=True)),
        token_batch,
        stage=stage,
        dtype=torch.float16,
        config={"fp16": fp16},
        **changes,
    )


@pytest.mark.parametrize("accumulation", [1, 3])
@stages
def test_fp16_with_a_fixed_scale(stage: int, accumulation: int) -> None:
    check(half_job(stage, accumulation=accumulation, clip=0.2))


@pytest.mark.parametrize("world", [1, 4])
def test_fp16_at_other_world_sizes(world: int) -> None:
    check(half_job(3, world=world, clip=0.2))


def overflow_history(stage: int, **fp16: Any) -> list[tuple[list[float], list[bool], int]]:
    """Loss scales and updates over eight steps; steps 2 and 3 overflow on rank 1."""

    def body(rank: int) -> tuple[list[float], list[bool], int]:
        engine = engine_for(Poisoned(), stage, fp16={"enabled": True, "initial_scale_power": 8, **fp16})
        scales, updates = [engine.loss_scale], []
        for step in range(8):
            x, _ = vector_batch(10 * step + rank, 2)
            engine.backward(engine(x, float("inf") if step in (2, 3) and rank == 1 else 0.0))
            updates.append(engine.step())
            scales.append(engine.loss_scale)
        return scales, updates, engine.skipped_steps

    return run(2, body)


@stages
def test_dynamic_loss_scale(stage: int) -> None:
    """Halved at each overflow, doubled after ``loss_scale_window`` good steps, the same on all ranks."""
    for scales, updates, skipped in overflow_history(stage, hysteresis=1, loss_scale_window=3):
        assert updates == [True, True, False, False, True, True, True, True]
        assert skipped == 2
        assert scales[:5] == [256, 256, 256, 128, 64]
        assert scales[-1] == 128


def test_hysteresis_and_smallest_scale() -> None:
    for scales, _, _ in overflow_history(2, hysteresis=2, loss_scale_window=1000):
        assert scales[:5] == [256, 256, 256, 256, 128]
    for scales, _, _ in overflow_history(2, hysteresis=1, min_loss_scale=128, loss_scale_window=1000):
        assert scales[3:] == [128] * 6


def test_loss_scale_is_one_outside_fp16() -> None:
    def body(rank: int) -> float:
        engine = engine_for(Regression(), 2)
        return float(engine.loss_scale)

    assert run(2, body) == [1.0, 1.0]
