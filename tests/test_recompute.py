"""Activation checkpointing by config: the same numbers, fewer activations."""

from __future__ import annotations

import copy
from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import zerotrain
from harness import run
from models import Shape, TinyLM, token_batch
from oracle import Job, check
from scenario import engine_for
from zerotrain.zero.recompute import Budget, Recomputed

OPTIONS: dict[str, dict[str, Any]] = {
    "all": {},
    "every second": {"every": 2},
    "named": {"modules": ["blocks.1", "blocks.2", "head"]},
    "matmuls saved": {"policy": "save_matmuls"},
    "offloaded": {"offload": "cpu"},
    "offloaded in part": {"offload": "cpu", "offload_bytes": 400},
}


def job_of(options: dict[str, Any], stage: int, world: int, **changes: Any) -> Job:
    shape = Shape(vocab=13, width=7, hidden=11, tied=True, frozen=True)
    config = {"activation_checkpointing": {"enabled": True, **options}}
    batch = partial(token_batch, vocab=13)
    return Job(
        partial(TinyLM, shape), batch, stage=stage, world=world, accumulation=2, clip=0.25, config=config, **changes
    )


CELLS = [(stage, torch.float32) for stage in (0, 1, 2, 3)] + [(3, torch.bfloat16)]


@pytest.mark.parametrize(("stage", "dtype"), CELLS)
@pytest.mark.parametrize("name", OPTIONS)
def test_equal_to_the_oracle(monkeypatch: pytest.MonkeyPatch, name: str, stage: int, dtype: torch.dtype) -> None:
    monkeypatch.setattr(Budget, "_leaves", lambda self, tensor: tensor.numel() > 0)  # as if the CPU were a device
    check(job_of(OPTIONS[name], stage, 2, dtype=dtype))


@pytest.mark.parametrize("world", [1, 3])
def test_other_numbers_of_ranks(world: int) -> None:
    check(job_of({}, 3, world))


def test_every_configuration_gives_the_bits_of_training_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Budget, "_leaves", lambda self, tensor: tensor.numel() > 0)

    def body(rank: int, **options: Any) -> float:
        torch.manual_seed(1)
        engine = engine_for(TinyLM(Shape()), 3, activation_checkpointing=options)
        for step in range(3):
            engine.backward(engine(*token_batch(step, 2)))
            engine.step()
        return float(engine.metrics["loss"])

    plain = run(2, body)
    for options in OPTIONS.values():
        assert run(2, lambda rank, o=options: body(rank, enabled=True, **o)) == plain


class Counted(nn.Module):
    """Blocks that count how often they compute, and draw random numbers."""

    def __init__(self, depth: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), Tally()) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.nn.functional.dropout(block(x), 0.3, self.training)
        return x.square().mean()


class Tally(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return torch.nn.functional.dropout(torch.tanh(x), 0.3, self.training)


@pytest.mark.parametrize(
    ("options", "counts"), [({}, [2, 2, 2, 2]), ({"every": 2}, [2, 1, 2, 1]), ({"modules": ["blocks.3"]}, [1, 1, 1, 2])]
)
def test_the_chosen_blocks_compute_twice(options: dict[str, Any], counts: list[int]) -> None:
    def body(rank: int) -> None:
        engine = engine_for(Counted(), 3, activation_checkpointing={"enabled": True, **options})
        tallies = [block[1] for block in engine.module.blocks]
        engine.backward(engine(torch.ones(2, 8)))
        assert [tally.count for tally in tallies] == counts
        engine.step()
        engine.eval()
        engine(torch.ones(2, 8))
        assert [tally.count for tally in tallies] == [count + 1 for count in counts], "evaluation computes once"

    run(2, body)


def test_dropout_draws_the_same_numbers_again() -> None:
    def body(rank: int, enabled: bool) -> Tensor:
        torch.manual_seed(3)
        model = Counted()
        engine = engine_for(model, 2, activation_checkpointing={"enabled": enabled})
        torch.manual_seed(4 + rank)
        engine.backward(engine(torch.ones(2, 8)))
        gradient = zerotrain.full_gradient(model.blocks[0][0].weight)
        assert gradient is not None
        return gradient

    assert torch.equal(run(2, lambda r: body(r, True))[0], run(2, lambda r: body(r, False))[0])


def saved_bytes(options: dict[str, Any]) -> int:
    """Bytes of activations that autograd keeps after a forward, parameters not counted."""

    def body(rank: int) -> int:
        torch.manual_seed(1)
        engine = engine_for(TinyLM(Shape(width=32, hidden=128, blocks=6)), 0, activation_checkpointing=options)
        kept: dict[int, int] = {}
        own = {p.untyped_storage()._cdata for p in engine.module.parameters()}

        def pack(tensor: Tensor) -> Tensor:
            if tensor.untyped_storage()._cdata not in own:
                kept[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = engine(*token_batch(0, 8, length=16))
        engine.backward(loss)
        return sum(kept.values())

    return int(run(1, body)[0])


def test_activations_shrink_with_what_is_recomputed() -> None:
    plain, full = saved_bytes({"enabled": False}), saved_bytes({"enabled": True})
    half, matmuls = saved_bytes({"enabled": True, "every": 2}), saved_bytes({"enabled": True, "policy": "save_matmuls"})
    assert full < plain / 3
    assert full < half < plain
    assert full <= matmuls < plain


def test_offloading_holds_no_more_than_its_bound() -> None:
    budget = Budget(1000)
    budget._leaves = lambda tensor: True  # type: ignore[method-assign]
    x = torch.randn(10, 10, requires_grad=True)  # 400 bytes
    with budget.saved_tensors():
        y = (x.sin().exp() * x.cos()).tanh().sum()
    assert 0 < budget.held <= 1000
    y.backward()
    expected = torch.autograd.grad((x.sin().exp() * x.cos()).tanh().sum(), x)[0]
    assert torch.equal(x.grad, expected)
    del y
    assert budget.held == 0


@pytest.mark.parametrize("stage", [0, 3])
def test_transformers_models_recompute_without_their_caches(stage: int) -> None:
    def body(rank: int, enabled: bool) -> list[float]:
        torch.manual_seed(0)
        model = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(
                vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2
            )
        )
        engine = engine_for(model, stage, activation_checkpointing={"enabled": enabled})
        losses = []
        for step in range(2):
            tokens, _ = token_batch(step, 2)
            loss = engine(input_ids=tokens, labels=tokens).loss
            engine.backward(loss)
            engine.step()
            losses.append(engine.metrics["loss"])
        return losses

    assert run(2, lambda r: body(r, True)) == run(2, lambda r: body(r, False))


def test_the_model_is_its_own_again_after_the_engine() -> None:
    def body(rank: int) -> None:
        model = TinyLM(Shape())
        engine = engine_for(model, 0, activation_checkpointing={"enabled": True})
        assert all(isinstance(block.forward, Recomputed) for block in model.blocks)
        names = [name for name, _ in model.named_parameters()]
        assert names == [name for name, _ in TinyLM(Shape()).named_parameters()]
        copied = copy.deepcopy(model)
        assert not any(isinstance(block.forward, Recomputed) for block in copied.blocks)
        assert torch.equal(copied(*token_batch(0, 2)), model(*token_batch(0, 2)))
        engine.close()
        assert not any("forward" in block.__dict__ for block in model.blocks)

    run(1, body)


def test_what_cannot_be_recomputed_is_refused_on_every_rank() -> None:
    def body(rank: int, match: str, **options: Any) -> None:
        with pytest.raises(ValueError, match=match):
            engine_for(nn.Linear(4, 4), 2, activation_checkpointing={"enabled": True, **options})

    run(2, lambda rank: body(rank, "no repeated blocks"))
    run(2, lambda rank: body(rank, "'layers.*' matches no module", modules=["layers.*"]))


def test_counts_stay_sane() -> None:
    """Stage 3 gathers each unit twice in a step, recomputed or not."""

    def body(rank: int, enabled: bool) -> Counter[str]:
        engine = engine_for(TinyLM(Shape()), 3, activation_checkpointing={"enabled": enabled})
        for step in range(3):
            if step == 2:
                engine.traffic.reset()
            engine.backward(engine(*token_batch(step, 2)))
            engine.step()
        return Counter(engine.traffic.calls)

    assert run(2, lambda r: body(r, True)) == run(2, lambda r: body(r, False))
