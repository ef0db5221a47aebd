"""Reaching the whole from outside: gathered, full values and setters, state_dict, copies, evaluation, generate."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harness import run
from models import Shape, TinyLM, token_batch
from oracle import full_weights
from scenario import STAGES, engine_for

stages = pytest.mark.parametrize("stage", STAGES)
BF16 = {"bf16": {"enabled": True}}
modes = pytest.mark.parametrize("mode", [{}, BF16], ids=["fp32", "bf16"])
SHAPE = Shape(tied=True, frozen=True, vocab=13, width=7, hidden=11)


def language_model() -> TinyLM:
    torch.manual_seed(5)
    return TinyLM(SHAPE)


def train(engine: Any, steps: int = 2, first: int = 0) -> None:
    for step in range(first, first + steps):
        for _ in range(engine.gradient_accumulation_steps):
            engine.backward(engine(*token_batch(10 * step + engine.rank, 2, vocab=13)))
            engine.step()


def sgd(model: nn.Module, momentum: float = 0.0) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.5, momentum=momentum)


# ---------------------------------------------------------------------------------------------------------- gathered


@pytest.mark.parametrize("what", ["parameter", "list", "module", "modules"])
@stages
def test_gathered_reads(stage: int, what: str) -> None:
    import zerotrain

    def body(rank: int) -> None:
        engine = engine_for(model := language_model(), stage)
        train(engine)
        want = full_weights(model)
        target: Any = {
            "parameter": model.blocks[2].up.weight,
            "list": [model.blocks[2].up.weight, model.embed.weight],
            "module": model.blocks[2],
            "modules": [model.blocks[2], model.blocks[0]],
        }[what]
        with zerotrain.gathered(target):
            assert torch.equal(model.blocks[2].up.weight, want["blocks.2.up.weight"])
            assert model.blocks[2].up.weight.sum().item() == pytest.approx(
                want["blocks.2.up.weight"].sum().item(), rel=1e-5
            )
        train(engine, first=2)

    run(2, body)


@pytest.mark.parametrize("rank_that_writes", [None, 0])
@modes
@stages
def test_gathered_modifies_the_master_too(stage: int, mode: dict[str, Any], rank_that_writes: int | None) -> None:
    """An edit survives the next steps (in bf16 it reached the fp32 master), also when only rank 0 makes it."""
    import zerotrain

    def body(rank: int) -> Tensor:
        model = language_model()
        engine = engine_for(model, stage, sgd(model), **mode)
        train(engine)
        weight = model.blocks[2].down.weight
        with zerotrain.gathered(weight, modify=True), torch.no_grad():
            if rank_that_writes in (None, rank):
                weight.fill_(0.75)
        assert torch.equal(zerotrain.full_parameter(weight), torch.full((7, 11), 0.75))
        train(engine, first=2, steps=1)
        moved: Tensor = zerotrain.full_parameter(weight)
        assert not torch.equal(moved, torch.full((7, 11), 0.75)), "the next step did not move it"
        return moved

    first, second = run(2, body)
    assert torch.equal(first, second)
    assert (first - 0.75).abs().max() < 0.4, "more than one step of lr 0.5 can move it"


@stages
def test_gathered_undoes_nothing_when_the_body_raises(stage: int) -> None:
    import zerotrain

    def body(rank: int) -> None:
        engine = engine_for(model := language_model(), stage)
        with pytest.raises(KeyError), zerotrain.gathered(model):
            raise KeyError("user")
        train(engine)

    run(2, body)


# ------------------------------------------------------------------------------------------------------- full values


@pytest.mark.parametrize("accumulation", [1, 2])
@stages
def test_full_gradient_is_the_mean_of_the_window(stage: int, accumulation: int) -> None:
    import zerotrain

    def ours(rank: int) -> dict[str, Any]:
        model = language_model()
        engine = engine_for(model, stage, accumulation=accumulation)
        for micro in range(accumulation):
            engine.backward(engine(*token_batch(2 * micro + rank, 2, vocab=13)))
            if micro < accumulation - 1:
                engine.step()
        found = {name: zerotrain.full_gradient(p) for name, p in model.named_parameters()}
        assert all(p.grad is None for p in model.parameters())
        engine.step()
        return found

    def plain(rank: int) -> dict[str, Any]:
        model = language_model()
        pieces = 2 * accumulation
        for piece in range(pieces):
            (model(*token_batch(piece, 2, vocab=13)) / pieces).backward()
        return {name: p.grad for name, p in model.named_parameters()}

    want = run(1, plain, group=False)[0]
    for found in run(2, ours):
        for name, gradient in want.items():
            if gradient is None:
                assert found[name] is None, f"{name} is frozen"
            else:
                torch.testing.assert_close(found[name], gradient, rtol=1e-5, atol=1e-6, msg=name)


@modes
@stages
def test_full_optimizer_state(stage: int, mode: dict[str, Any]) -> None:
    """Momentum of SGD is the sum of the gradients: known in full, settable in full."""
    import zerotrain

    def body(rank: int) -> None:
        model = language_model()
        engine = engine_for(model, stage, sgd(model, momentum=1.0), **mode)
        weight = model.blocks[2].up.weight
        start = zerotrain.full_parameter(weight).clone()
        train(engine, steps=1)
        after = zerotrain.full_parameter(weight).clone()
        momentum = zerotrain.full_optimizer_state(weight, "momentum_buffer")
        assert momentum.shape == weight.shape
        torch.testing.assert_close(after, start - 0.5 * momentum, rtol=1e-5, atol=1e-6)
        chosen = torch.arange(77.0).view(11, 7)
        zerotrain.set_full_optimizer_state(weight, "momentum_buffer", chosen)
        assert torch.equal(zerotrain.full_optimizer_state(weight, "momentum_buffer"), chosen)
        train(engine, steps=1, first=1)
        torch.testing.assert_close(
            zerotrain.full_parameter(weight),
            after - 0.5 * zerotrain.full_optimizer_state(weight, "momentum_buffer"),
            rtol=1e-5,
            atol=1e-6,
        )

    run(2, body)


@modes
@pytest.mark.parametrize("world", [2, 3])
@stages
def test_set_full_parameter(stage: int, world: int, mode: dict[str, Any]) -> None:
    """Exact in the fp32 master, and what the next forward computes with."""
    import zerotrain

    def body(rank: int) -> None:
        model = language_model()
        engine = engine_for(model, stage, **mode)
        train(engine)
        for p in (model.embed.weight, model.blocks[2].norm.bias, model.norm.weight):
            value = torch.randn(p.shape, generator=torch.Generator().manual_seed(3))
            zerotrain.set_full_parameter(p, value)
            assert torch.equal(zerotrain.full_parameter(p), value)
        assert torch.equal(zerotrain.full_parameter(model.head.weight), zerotrain.full_parameter(model.embed.weight))
        batch = token_batch(0, 2, vocab=13)
        with torch.no_grad():
            loss = engine(*batch)
        twin = language_model()
        twin.load_state_dict(full_weights(model), strict=False)
        if mode:
            twin.bfloat16()
        torch.testing.assert_close(loss, twin(*batch).detach(), rtol=1e-5, atol=1e-6)

    run(world, body)


@stages
def test_set_full_gradient(stage: int) -> None:
    """What is set is what the optimizer gets, as a mean, not to be divided again."""
    import zerotrain

    def body(rank: int) -> None:
        model = language_model()
        engine = engine_for(model, stage, sgd(model))
        weight = model.blocks[2].up.weight
        before = zerotrain.full_parameter(weight).clone()
        engine.backward(engine(*token_batch(rank, 2, vocab=13)))
        chosen = torch.randn(11, 7, generator=torch.Generator().manual_seed(8))
        zerotrain.set_full_gradient(weight, chosen)
        torch.testing.assert_close(zerotrain.full_gradient(weight), chosen)
        engine.step()
        torch.testing.assert_close(zerotrain.full_parameter(weight), before - 0.5 * chosen)

    run(3, body)


@stages
def test_setters_refuse_other_shapes(stage: int) -> None:
    import zerotrain

    def body(rank: int) -> None:
        engine = engine_for(model := language_model(), stage)
        with pytest.raises((ValueError, RuntimeError), match=r"blocks\.2\.up\.weight"):
            zerotrain.set_full_parameter(model.blocks[2].up.weight, torch.zeros(3, 3))
        train(engine)
        with pytest.raises((ValueError, RuntimeError, KeyError), match="nonsense"):
            zerotrain.full_optimizer_state(model.blocks[2].up.weight, "nonsense")
        with pytest.raises((ValueError, RuntimeError, KeyError)):
            zerotrain.full_parameter(nn.Parameter(torch.ones(2)))

    run(2, body)


# ------------------------------------------------------------------------------------- state_dict, copies, evaluation


@modes
@stages
def test_state_dict(stage: int, mode: dict[str, Any]) -> None:
    """Whole, in the plain model's order, with buffers, on every rank, and loadable by a plain model."""

    class Model(TinyLM):
        def __init__(self) -> None:
            super().__init__(SHAPE)
            self.register_buffer("counts", torch.arange(3))
            self.register_buffer("scratch", torch.ones(2), persistent=False)

    def body(rank: int) -> None:
        torch.manual_seed(rank)
        engine = engine_for(model := Model(), stage, **mode)
        train(engine)
        state, want = engine.module.state_dict(), full_weights(model)
        plain = Model()
        assert list(state) == list(plain.state_dict())
        for name, value in state.items():
            assert value.shape == plain.state_dict()[name].shape
            if name != "counts":
                assert torch.equal(value, want[name].to(value.dtype)), name
        plain.load_state_dict(state)
        kept = {name: value.clone() for name, value in state.items()}
        train(engine, first=2)
        assert all(torch.equal(state[name], kept[name]) for name in kept if name != "counts") or stage < 3
        part = engine.module.blocks[2].state_dict()
        assert torch.equal(part["up.weight"].float(), engine.module.state_dict()["blocks.2.up.weight"].float())

    run(2, body)


@modes
@stages
def test_load_state_dict_of_a_plain_model(stage: int, mode: dict[str, Any]) -> None:
    """Under gathered(modify=True) a plain checkpoint may be loaded in mid-training."""
    import zerotrain

    def body(rank: int) -> None:
        engine = engine_for(model := language_model(), stage, **mode)
        train(engine)
        torch.manual_seed(77)
        other = TinyLM(SHAPE)
        with zerotrain.gathered(model, modify=True):
            model.load_state_dict(other.state_dict())
        for name, value in full_weights(model).items():
            # In bf16 the copy that the user sees is rounded; where it did not change, the master kept its own bits.
            dtype = torch.bfloat16 if mode else torch.float32
            assert torch.equal(value.to(dtype), other.state_dict()[name].to(dtype)), name
        train(engine, first=2)

    run(2, body)


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_modify_without_a_change_keeps_the_master(stage: int) -> None:
    """Opening a bf16 model for editing must not round the fp32 weights of what was not edited."""
    import zerotrain

    def body(rank: int) -> None:
        engine = engine_for(model := language_model(), stage, **BF16)
        train(engine)
        before = full_weights(model)
        with zerotrain.gathered(model, modify=True), torch.no_grad():
            model.norm.weight.fill_(2.0)
        for name, value in full_weights(model).items():
            assert torch.equal(value, before[name]) != (name == "norm.weight"), name

    run(2, body)


@stages
def test_deepcopy_and_moving_average(stage: int) -> None:
    """A copy of the gathered model is an ordinary model; so is torch's AveragedModel."""
    import zerotrain

    def body(rank: int) -> None:
        engine = engine_for(model := language_model(), stage)
        train(engine)
        with zerotrain.gathered(model):
            twin = copy.deepcopy(model)
            average = torch.optim.swa_utils.AveragedModel(model, avg_fn=lambda old, new, count: 0.5 * old + 0.5 * new)
            average.update_parameters(model)
        old = {name: value.clone() for name, value in full_weights(model).items()}
        train(engine, first=2)
        new = full_weights(model)
        with zerotrain.gathered(model):
            average.update_parameters(model)
        for name, p in twin.named_parameters(remove_duplicate=False):
            assert torch.equal(p, old[name]), name
            assert type(p) is nn.Parameter
        assert twin.head.weight is twin.embed.weight
        for name, p in average.module.named_parameters():
            torch.testing.assert_close(p.detach(), 0.5 * (old[name] + new[name]))
        batch = token_batch(0, 2, vocab=13)
        loss = twin(*batch)
        loss.backward()
        torch.optim.SGD(twin.parameters(), lr=0.1).step()
        assert twin(*batch) < loss
        train(engine, first=4)

    run(2, body)


@modes
@stages
def test_evaluation(stage: int, mode: dict[str, Any]) -> None:
    """eval() and no_grad give the plain model's output, also on one rank more often than the parameters need."""

    def body(rank: int) -> None:
        engine = engine_for(model := language_model(), stage, **mode)
        train(engine)
        batch = token_batch(50, 3, vocab=13)
        engine.eval()
        assert not model.training
        with torch.no_grad():
            got = [engine(*batch), engine.module(*batch), model(*batch)]
        with torch.inference_mode():
            got.append(engine(*batch))
        engine.train()
        assert model.training
        twin = language_model()
        twin.load_state_dict(engine.module.state_dict())
        want = twin.to(torch.bfloat16 if mode else torch.float32).eval()(*batch).detach()
        for loss in got:
            assert not loss.requires_grad
            torch.testing.assert_close(loss.clone(), want)
        train(engine, first=2)

    run(2, body)


@modes
@stages
def test_generate_of_transformers(stage: int, mode: dict[str, Any]) -> None:
    """model.generate() of a Llama, greedy, with a cache; every rank gets what the plain model says."""
    transformers = pytest.importorskip("transformers")
    from transformers import LlamaForCausalLM  # noqa: F401  (loaded before the workers fork)

    def build() -> Any:
        torch.manual_seed(1)
        return transformers.LlamaForCausalLM(
            transformers.LlamaConfig(
                vocab_size=32,
                hidden_size=16,
                intermediate_size=24,
                num_hidden_layers=2,
                num_attention_heads=2,
                num_key_value_heads=1,
                max_position_embeddings=64,
                tie_word_embeddings=True,
                bos_token_id=0,
                eos_token_id=None,
                pad_token_id=0,
            )
        )

    def body(rank: int) -> None:
        model = build()
        engine = engine_for(model, stage, **mode)
        for step in range(2):
            tokens, _ = token_batch(10 * step + rank, 2)
            engine.backward(engine(input_ids=tokens, labels=tokens).loss)
            engine.step()
        engine.eval()
        prompt, _ = token_batch(9, 2)
        got = model.generate(prompt, max_new_tokens=6, do_sample=False)
        twin = build()
        twin.load_state_dict(model.state_dict())
        want = twin.to(model.dtype).eval().generate(prompt, max_new_tokens=6, do_sample=False)
        assert torch.equal(got, want)
        engine.train()
        tokens, _ = token_batch(20 + rank, 2)
        engine.backward(engine(input_ids=tokens, labels=tokens).loss)
        assert engine.step() is True

    run(2, body)
