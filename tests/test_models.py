"""Odd models: tied, frozen, oddly shaped and oddly placed parameters, buffers, BatchNorm, models that are refused."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from harness import run
from models import Block, Shape, TinyLM, token_batch, vector_batch
from oracle import adamw
from scenario import STAGES, Scenario, engine_for, play

stages = pytest.mark.parametrize("stage", STAGES)


def turn(engine: Any, rank: int, step: int, micro: int) -> Tensor:
    """Gives the model a (2, 8) input; its mean square is the loss."""
    x, _ = vector_batch(100 * step + 10 * micro + rank, 2)
    loss = engine(x).float().square().mean()
    engine.backward(loss)
    return loss


def token_turn(engine: Any, rank: int, step: int, micro: int) -> Tensor:
    loss = engine(*token_batch(100 * step + 10 * micro + rank, 2))
    engine.backward(loss)
    return loss


def told(build: Callable[[], nn.Module], stage: int, world: int = 2, **extra: Any) -> Any:
    return play(Scenario(build, turn, stage, world=world, **extra))


# ----------------------------------------------------------------------------------------------------- tied, frozen


class TiedFarAndNear(nn.Module):
    """One weight at three places (first, middle, last unit), and one tied inside a single block."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(Block(8, 8) for _ in range(3))
        self.last = nn.Linear(8, 8)
        self.blocks[1].up.weight = self.first.weight
        self.last.weight = self.first.weight
        self.blocks[2].down.weight = self.blocks[2].up.weight

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        for block in self.blocks:
            x = block(x)
        return self.last(x)


@pytest.mark.parametrize("world", [2, 3])
@stages
def test_tied_at_any_distance(stage: int, world: int) -> None:
    told(TiedFarAndNear, stage, world, accumulation=2, windows=(2, 2, 2), clip=0.5)


@stages
def test_tied_weights_have_one_state_and_stay_tied(stage: int) -> None:
    import zerotrain

    def body(rank: int) -> dict[str, Any]:
        engine = engine_for(model := TiedFarAndNear(), stage)
        for step in range(2):
            turn(engine, rank, step, 0)
            engine.step()
        state = engine.module.state_dict()
        tied = ("first.weight", "blocks.1.up.weight", "last.weight")
        zerotrain.full_optimizer_state(model.first.weight, "exp_avg")
        return {
            "same object": model.first.weight is model.blocks[1].up.weight is model.last.weight,
            "same values": all(torch.equal(state[tied[0]], state[name]) for name in tied),
            "names": list(state) == list(TiedFarAndNear().state_dict()),
            "count": len(list(model.parameters())) == len(list(TiedFarAndNear().parameters())),
            "elements": sum(unit.numel for unit in engine.units)
            >= sum(p.numel() for p in TiedFarAndNear().parameters()),
        }

    for facts in run(2, body):
        assert all(facts.values()), facts


class Adapted(nn.Module):
    """Frozen linear layers with low-rank adapters, as LoRA adds them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(LowRank() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class LowRank(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(8, 8).requires_grad_(False)
        self.a = nn.Linear(8, 2, bias=False)
        self.b = nn.Linear(2, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.b(self.a(x))


@pytest.mark.parametrize("only_trainable", [False, True])
@stages
def test_low_rank_adapters(stage: int, only_trainable: bool) -> None:
    """Also where the optimizer was given the trainable parameters only."""

    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        return adamw([p for p in model.parameters() if p.requires_grad or not only_trainable])

    got = told(Adapted, stage, accumulation=2, windows=(2, 2), clip=0.05, optimizer=optimizer)
    torch.manual_seed(11)
    for name, value in Adapted().state_dict().items():
        if "base" in name:
            assert torch.equal(got.weights[name], value), f"{name} is frozen and changed"


@stages
def test_frozen_first_and_last(stage: int) -> None:
    """No gradient flows into the first unit at all, and the last one needs its weights for the others' gradients."""

    def build() -> nn.Module:
        model = TinyLM(Shape())
        for part in (model.embed, model.blocks[0], model.head):
            part.requires_grad_(False)
        return model

    play(Scenario(build, token_turn, stage))


# ------------------------------------------------------------------------------------------------------- odd shapes


class OddShapes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.empty(0, 8))
        self.one = nn.Parameter(torch.ones(1))
        self.transposed = nn.Parameter(torch.randn(5, 8).t())
        self.strided = nn.Parameter(torch.randn(8, 10)[:, ::2])
        self.expanded_back = nn.Linear(5, 8)
        self.long = nn.Parameter(torch.randn(1, 1, 1, 8))
        self.conv = nn.Conv2d(2, 2, 3, padding=1).to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        y = self.scale * torch.tanh(x @ self.transposed) + (x @ self.strided)
        y = self.expanded_back(y) + self.empty.sum() * self.one + self.long[0, 0] * self.one
        return self.conv(y.view(-1, 2, 2, 2)).flatten(1)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@stages
def test_odd_shapes(stage: int, world: int) -> None:
    told(OddShapes, stage, world, accumulation=2, windows=(2, 2), clip=0.5)


@pytest.mark.parametrize("stage", [2, 3])
def test_odd_shapes_in_bf16(stage: int) -> None:
    play(Scenario(OddShapes, turn, stage, dtype=torch.bfloat16), rtol=1e-4, atol=5e-5)


@stages
def test_parameters_keep_identity_and_shape(stage: int) -> None:
    def body(rank: int) -> None:
        model = OddShapes()
        before = {name: (id(p), p.shape) for name, p in model.named_parameters()}
        engine = engine_for(model, stage)
        turn(engine, rank, 0, 0)
        engine.step()
        for name, p in model.named_parameters():
            assert (id(p), p.shape) == before[name], name
            assert isinstance(p, nn.Parameter), name

    run(2, body)


class Few(nn.Module):
    """Fewer elements in the whole model than there are ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor([1.0, 2.0]))
        self.shift = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return x[:, :2] * self.gain + self.shift


@pytest.mark.parametrize("world", [4, 5])
@stages
def test_fewer_elements_than_ranks(stage: int, world: int) -> None:
    told(Few, stage, world, clip=0.1)


@stages
def test_primes(stage: int) -> None:
    """No size is divisible by the number of ranks."""
    shape = Shape(vocab=17, width=7, hidden=13)
    play(
        Scenario(
            partial(TinyLM, shape), lambda *a: token_turn(*a), stage, world=3, zero={"unit_min_elements": 50}, clip=0.2
        )
    )


# ------------------------------------------------------------------------------------------------- odd module trees


class Tree(nn.Module):
    """Root parameters, ModuleDict, ParameterList, ParameterDict, a shared module, a child's weight read by others."""

    def __init__(self) -> None:
        super().__init__()
        self.root = nn.Parameter(torch.randn(8))
        self.named = nn.ModuleDict({"b": Block(8, 8), "a": Block(8, 8), "never called": nn.Identity()})
        self.many = nn.ParameterList([nn.Parameter(torch.randn(8)) for _ in range(3)])
        self.by_name = nn.ParameterDict({"x": nn.Parameter(torch.randn(8, 8)), "y": nn.Parameter(torch.randn(8))})
        self.read = nn.Linear(8, 8)  # never called: its weight is used by this module
        self.deep = nn.Sequential(nn.Sequential(nn.Sequential(nn.Linear(8, 8))))
        self.shared = self.deep[0][0]

    def forward(self, x: Tensor) -> Tensor:
        x = self.named["b"](x * self.root) + self.named["a"](x)
        for vector in self.many:
            x = torch.tanh(x + vector)
        x = F.linear(x, self.by_name["x"], self.by_name["y"])
        x = F.linear(x, self.read.weight) + self.read.bias
        x = self.shared(self.deep(x))
        return x * self.named["a"].norm.weight


@pytest.mark.parametrize("unit_min_elements", [1, 100, 1_000_000])
@stages
def test_module_trees(stage: int, unit_min_elements: int) -> None:
    told(Tree, stage, zero={"unit_min_elements": unit_min_elements}, accumulation=2, windows=(2, 2))


class GrandchildRead(nn.Module):
    """The head's parent reads the embedding of a sibling, as many language models do to tie by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.lower = TinyLM(Shape())
        self.upper = nn.Linear(8, 8)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.upper(self.lower.hidden_states(tokens))
        logits = F.linear(x, self.lower.embed.weight) + self.lower.blocks[1].up.bias
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


@stages
def test_weights_read_across_units(stage: int) -> None:
    play(Scenario(GrandchildRead, token_turn, stage, windows=(1, 1, 1)))


@stages
def test_sequence_model_of_torch(stage: int) -> None:
    """nn.MultiheadAttention reads its child's weight; nn.LSTM holds flat weights of its own."""

    class Sequence(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
            self.lstm = nn.LSTM(8, 8, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            out, _ = self.lstm(self.encoder(x.unsqueeze(1) * torch.ones(1, 3, 1)))
            return out

    def sgd(model: nn.Module) -> torch.optim.Optimizer:
        # The key bias of attention has no gradient but rounding noise, which Adam would blow up.
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    told(Sequence, stage, optimizer=sgd)
