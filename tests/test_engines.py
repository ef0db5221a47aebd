"""Released parameters, several engines in one process, and engines that end."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harness import run
from memory import live_bytes
from models import Regression, Shape, TinyLM, token_batch, vector_batch
from oracle import adamw, full_weights, weights_of
from scenario import engine_for
from test_access import language_model, modes, stages, train


def test_reading_a_released_parameter_is_an_error() -> None:
    """It names the parameter and the way to read it; metadata stays free to read."""
    import zerotrain

    def body(rank: int) -> None:
        engine = engine_for(model := language_model(), 3)
        train(engine)
        weight = model.blocks[2].up.weight
        for read in (
            lambda: weight + 1,
            lambda: weight.sum(),
            lambda: weight[0, 0].item(),
            lambda: torch.nn.functional.linear(torch.ones(7), weight),
            lambda: weight.tolist(),
            lambda: weight.clone(),
            lambda: weight.data.sum().item(),
            lambda: weight.detach().sum().item(),
            lambda: copy.deepcopy(model),
        ):
            with pytest.raises(zerotrain.ReleasedParameterError, match=r"blocks\.2\.up\.weight|blocks|embed") as caught:
                read()
            assert "gathered" in str(caught.value)
        assert weight.shape == (11, 7)
        assert (weight.dtype, weight.requires_grad, weight.device.type) == (torch.float32, True, "cpu")
        assert weight.numel() == 77
        assert isinstance(weight, nn.Parameter)
        assert "11" in repr(model)
        assert sum(p.numel() for p in model.parameters()) == sum(p.numel() for p in language_model().parameters())
        train(engine, first=2)

    run(2, body)


@stages
def test_moving_the_model_to_its_own_device_is_harmless(stage: int) -> None:
    def body(rank: int) -> None:
        engine = engine_for(model := language_model(), stage)
        train(engine, steps=1)
        before = full_weights(model)
        assert model.to("cpu") is model
        model.cpu()
        model.to(engine.device)
        model.to(torch.float32)
        after = full_weights(model)
        assert all(torch.equal(before[name], after[name]) for name in before)
        train(engine, first=1)

    run(2, body)


@pytest.mark.parametrize("stages_of_two", [(3, 3), (2, 3), (0, 1)])
def test_teacher_and_student(stages_of_two: tuple[int, int]) -> None:
    """Two engines in one process, calls interleaved, give what each gives alone with the same numbers."""

    def body(rank: int, together: bool) -> list[dict[str, Tensor]]:
        torch.manual_seed(0)
        models = [Regression(), Regression()]
        engines = [engine_for(model, stage) for model, stage in zip(models, stages_of_two, strict=True)]
        for step in range(3):
            x, y = vector_batch(10 * step + rank, 2)
            if together:
                losses = [engine(x, y) for engine in engines]
                for engine, loss in zip(engines, losses, strict=True):
                    engine.backward(loss)
                for engine in reversed(engines):
                    engine.step()
            else:
                for engine in engines:
                    engine.backward(engine(x, y))
                    engine.step()
        return [full_weights(model) for model in models]

    for got, want in zip(run(2, lambda r: body(r, True)), run(2, lambda r: body(r, False)), strict=True):
        for one, other in zip(got, want, strict=True):
            assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("stage", [1, 3])
def test_generator_and_critic(stage: int) -> None:
    """One engine's output through another engine: the loss trains the first, not the second."""

    class Plus(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))

        def forward(self, x: Tensor) -> Tensor:
            return self.layers(x)

    def ours(rank: int) -> list[dict[str, Tensor]]:
        torch.manual_seed(0)
        models = [Plus(), Plus()]
        maker, critic = (engine_for(model, stage) for model in models)
        for step in range(3):
            x, y = vector_batch(2 * step + rank, 2)
            maker.backward(critic(maker(x)).square().mean())
            maker.step()
            critic.zero_grad()
            critic.backward((critic(maker(x).detach()) - y).square().mean())
            critic.step()
        return [full_weights(model) for model in models]

    def plain(rank: int) -> list[dict[str, Tensor]]:
        torch.manual_seed(0)
        maker, critic = Plus(), Plus()
        optimizers = adamw(maker.parameters()), adamw(critic.parameters())
        for step in range(3):
            batches = [vector_batch(2 * step + other, 2) for other in range(2)]
            x, y = (torch.cat(parts) for parts in zip(*batches, strict=True))
            maker.zero_grad()
            critic(maker(x)).square().mean().backward()
            optimizers[0].step()
            critic.zero_grad()
            (critic(maker(x).detach()) - y).square().mean().backward()
            optimizers[1].step()
        return [weights_of(maker), weights_of(critic)]

    want = run(1, plain, group=False)[0]
    for got in run(2, ours):
        for one, other in zip(got, want, strict=True):
            for name, value in other.items():
                torch.testing.assert_close(one[name], value, rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize("how", ["deleted", "closed"])
@modes
@stages
def test_engine_gives_back_its_memory(stage: int, mode: dict[str, Any], how: str) -> None:
    """Without a garbage collection for the engine itself: nothing of it stays alive, nor of the model's tensors."""

    def body(rank: int) -> None:
        engine_for(nn.Linear(2, 2), stage)  # what stays loaded for every engine
        gc.collect()
        before = live_bytes()
        model = TinyLM(Shape(width=32, hidden=128))
        engine = engine_for(model, stage, **mode)
        for step in range(2):
            engine.backward(engine(*token_batch(step, 2)))
            engine.step()
        seen = weakref.ref(engine)
        if how == "closed":
            engine.close()
            engine.close()  # twice is harmless
        del engine, model
        gc.collect()
        assert seen() is None
        assert live_bytes() - before < 256, live_bytes() - before

    run(2, body)


@stages
def test_closed_engine_leaves_a_plain_model(stage: int) -> None:
    """Its weights are whole and it trains without zerotrain; a parameter still released keeps refusing to be read."""
    import zerotrain

    def body(rank: int) -> None:
        model = language_model()
        engine = engine_for(model, stage)
        train(engine)
        want = full_weights(model)
        engine.close()
        if stage == 3:
            try:
                model.norm.weight.sum()
            except zerotrain.ReleasedParameterError:
                return
        for name, p in model.named_parameters(remove_duplicate=False):
            assert torch.equal(p, want[name]), name
        model(*token_batch(0, 2, vocab=13)).backward()
        assert model.blocks[2].up.weight.grad is not None
        model.zero_grad()
        train(engine_for(model, stage), first=2)

    run(2, body)
