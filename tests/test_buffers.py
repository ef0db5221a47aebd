"""Buffers and BatchNorm, initial weights and seeds, parameters of several dtypes, models that are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from harness import run
from models import Regression, Shape, TinyLM, vector_batch
from oracle import adamw, full_weights
from scenario import STAGES, Scenario, engine_for, play

stages = pytest.mark.parametrize("stage", STAGES)


def turn(engine: Any, rank: int, step: int, micro: int) -> Tensor:
    """Gives the model a (2, 8) input; its mean square is the loss."""
    x, _ = vector_batch(100 * step + 10 * micro + rank, 2)
    loss = engine(x).float().square().mean()
    engine.backward(loss)
    return loss


# --------------------------------------------------------------------------------------------------------- buffers


class Buffers(nn.Module):
    """Counts its calls in integers, keeps constants that need all of their bits, and normalises by batch statistics."""

    def __init__(self, normed: bool = True) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8, bias=not normed)
        self.norm = nn.BatchNorm1d(8) if normed else nn.Identity()
        self.register_buffer("calls", torch.tensor(2**60 + 1))
        self.register_buffer("exact", torch.tensor([1 / 3, 1e-300], dtype=torch.float64))
        self.register_buffer("mask", torch.tensor([True, False]))
        self.register_buffer("hidden", torch.tensor(2.5), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.norm(self.layer(x)) * self.hidden


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@stages
def test_buffers_stay_exact(stage: int, dtype: torch.dtype) -> None:
    """Integer and float64 buffers keep every bit, also in a bf16 model, and no rank's drift apart."""

    def body(rank: int) -> dict[str, Tensor]:
        engine = engine_for(Buffers(dtype is torch.float32), stage, bf16={"enabled": dtype is torch.bfloat16})
        for step in range(3):
            turn(engine, rank, step, 0)
            engine.step()
        state: dict[str, Tensor] = engine.module.state_dict()
        return {name: value for name, value in state.items() if name not in dict(engine.module.named_parameters())}

    ranks = run(2, body)
    for state in ranks:
        assert state["calls"].item() == 2**60 + 4
        assert state["exact"].dtype is torch.float64
        assert torch.equal(state["exact"], torch.tensor([1 / 3, 1e-300], dtype=torch.float64))
        assert torch.equal(state["mask"], torch.tensor([True, False]))
        assert state.get("norm.num_batches_tracked", 3) == 3
        assert "hidden" not in state
        for name, value in ranks[0].items():
            assert torch.equal(state[name], value), f"{name} differs between the ranks"


@stages
def test_batch_norm_trains(stage: int) -> None:
    """Statistics of each rank's own micro batch, as in DDP; the weights follow exactly."""

    def wide_turn(engine: Any, rank: int, step: int, micro: int) -> Tensor:
        x, y = vector_batch(100 * step + 10 * micro + rank, 6)
        loss = (engine(x) - y).float().square().mean()
        engine.backward(loss)
        return loss

    play(Scenario(Buffers, wide_turn, stage, accumulation=2, windows=(2, 2)))


@pytest.mark.parametrize("stage", [0, 3])
def test_batch_norm_in_bf16(stage: int) -> None:
    """It runs, and its statistics are finite and the same on both ranks."""

    def body(rank: int) -> tuple[Tensor, Tensor]:
        engine = engine_for(Buffers(), stage, bf16={"enabled": True})
        for step in range(2):
            turn(engine, rank, step, 0)
            engine.step()
        return engine.module.norm.running_mean.float(), engine.module.norm.running_var.float()

    first, second = run(2, body)
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])
    assert first[0].isfinite().all()
    assert first[0].abs().max() > 0


@stages
def test_buffers_start_from_rank_0(stage: int) -> None:
    def body(rank: int) -> tuple[int, float]:
        model = Buffers()
        if rank == 1:
            model.calls += 5
            model.exact *= 2
        engine = engine_for(model, stage)
        return int(engine.module.calls), float(engine.module.exact[0])

    assert run(2, body) == [(2**60 + 1, 1 / 3)] * 2


# --------------------------------------------------------------------------------- initial weights, seeds, refusals


@pytest.mark.parametrize(
    ("stage", "zero"),
    [*((stage, {}) for stage in STAGES), *((stage, {"shard_group_size": 2}) for stage in STAGES[1:])],
)
def test_initial_weights_are_rank_zeros(stage: int, zero: dict[str, Any]) -> None:
    def body(rank: int) -> dict[str, Tensor]:
        torch.manual_seed(rank)
        engine = engine_for(TinyLM(Shape(tied=True, frozen=True)), stage, zero=zero)
        return full_weights(engine.module)

    torch.manual_seed(0)
    want = TinyLM(Shape(tied=True, frozen=True)).state_dict()
    for weights in run(4, body):
        for name, value in want.items():
            assert torch.equal(weights[name], value), name


@pytest.mark.parametrize("stage", [0, 3])
def test_seed_is_set_per_rank(stage: int) -> None:
    """Dropout masks differ between ranks, and a second run repeats them."""

    def body(rank: int) -> Tensor:
        engine = engine_for(Regression(), stage, seed=5)
        assert engine.rank == rank
        return F.dropout(torch.ones(64))

    first, second = run(2, body), run(2, body)
    assert not torch.equal(first[0], first[1])
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])


@stages
def test_parameters_of_several_dtypes(stage: int) -> None:
    """fp32 and float64 parameters side by side, each trained in its own precision."""

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.single = nn.Linear(8, 8)
            self.wide = nn.Linear(8, 8).double()

        def forward(self, x: Tensor) -> Tensor:
            return self.wide(torch.tanh(self.single(x)).double())

    got = play(Scenario(Mixed, turn, stage, accumulation=2, windows=(2, 2), clip=0.5))
    assert got.weights["single.weight"].dtype is torch.float32
    assert got.weights["wide.weight"].dtype is torch.float64


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_pinned_fp32_parameters(stage: int) -> None:
    """A bf16 model whose norms stay fp32 by name."""

    class Routed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)
            self.router = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            y = self.layer(x)
            assert y.dtype is torch.bfloat16, y.dtype
            assert self.router.weight.dtype is torch.float32
            return y * self.router(x.float()).softmax(-1).to(y.dtype)

    def body(rank: int) -> dict[str, Tensor]:
        torch.manual_seed(3)
        engine = engine_for(Routed(), stage, bf16={"enabled": True, "fp32_parameters": ["router.*"]})
        for step in range(3):
            turn(engine, rank, step, 0)
            engine.step()
        return full_weights(engine.module)

    def plain(rank: int) -> dict[str, Tensor]:
        torch.manual_seed(3)
        master = Routed()
        optimizer = adamw(master.parameters())
        for step in range(3):
            optimizer.zero_grad()
            for other in range(2):
                low = Routed()
                low.load_state_dict(master.state_dict())
                low.layer.bfloat16()
                x, _ = vector_batch(100 * step + other, 2)
                low(x.bfloat16()).float().square().mean().backward()
                for p, q in zip(master.parameters(), low.parameters(), strict=True):
                    assert q.grad is not None
                    p.grad = q.grad.float() / 2 + (0 if p.grad is None else p.grad)
            optimizer.step()
        return {name: p.detach() for name, p in master.named_parameters()}

    want = run(1, plain, group=False)[0]
    for weights in run(2, body):
        for name, value in want.items():
            torch.testing.assert_close(weights[name], value, rtol=1e-4, atol=5e-5)


def test_model_without_trainable_parameters_is_refused() -> None:
    def body(rank: int) -> None:
        for model in (nn.Identity(), Regression().requires_grad_(False)):
            with pytest.raises((ValueError, RuntimeError), match=r"trainable|requires_grad"):
                engine_for(model, 2, torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1))

    run(2, body)


def test_parameters_on_several_devices_are_refused() -> None:
    def body(rank: int) -> None:
        model = Regression()
        model.layers[1].to("meta")
        with pytest.raises(
            (ValueError, RuntimeError), match=r"layers\.1\.(weight|bias)[\s\S]*meta|meta[\s\S]*layers\.1"
        ):
            engine_for(model, 2)

    run(2, body)
