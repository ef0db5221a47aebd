"""What a forward may do: reuse modules, recompute, write in place, carry hooks, return anything, skip parameters."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from harness import WorkersFailed, run
from models import Block, Regression, Shape, TinyLM, token_batch, vector_batch
from scenario import STAGES, Plain, Scenario, engine_for, play

stages = pytest.mark.parametrize("stage", STAGES)
modes = pytest.mark.parametrize("reentrant", [False, True], ids=["nonreentrant", "reentrant"])


def turn_with(engine: Any, rank: int, step: int, micro: int) -> Tensor:
    """Gives the model a (2, 8) input; its mean square is the loss."""
    x, _ = vector_batch(100 * step + 10 * micro + rank, 2)
    loss = engine(x).float().square().mean()
    engine.backward(loss)
    return loss


def token_turn(engine: Any, rank: int, step: int, micro: int) -> Tensor:
    loss = engine(*token_batch(100 * step + 10 * micro + rank, 2))
    engine.backward(loss)
    return loss


class Bench(nn.Module):
    """Three blocks; a subclass says how they are used."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(8, 12) for _ in range(3))


# ---------------------------------------------------------------------------------------------- reuse, recomputation


class Reused(Bench):
    def forward(self, x: Tensor) -> Tensor:
        for block in (*self.blocks, *self.blocks, self.blocks[0], self.blocks[0]):
            x = block(x)
        return x


@stages
def test_module_used_several_times(stage: int) -> None:
    play(Scenario(Reused, turn_with, stage, accumulation=2, windows=(2, 2)))


@modes
@stages
def test_recomputed_blocks(stage: int, reentrant: bool) -> None:
    shape = Shape(recompute="reentrant" if reentrant else "nonreentrant", tied=True)
    play(Scenario(partial(TinyLM, shape), token_turn, stage, accumulation=2, windows=(2, 2)))


class RecomputedReuse(Bench):
    """The same block inside two checkpointed segments: its parameters get their gradient in two goes."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x)
        x = checkpoint(lambda y: self.blocks[2](self.blocks[1](y)), x, use_reentrant=self.reentrant)
        return checkpoint(lambda y: self.blocks[1](self.blocks[0](y)), x, use_reentrant=self.reentrant)


@modes
@stages
def test_block_in_two_recomputed_segments(stage: int, reentrant: bool) -> None:
    play(Scenario(partial(RecomputedReuse, reentrant), turn_with, stage, accumulation=2, windows=(2, 2)))


class Nested(Bench):
    def forward(self, x: Tensor) -> Tensor:
        def inner(y: Tensor) -> Tensor:
            return checkpoint(self.blocks[1], self.blocks[0](y), use_reentrant=False)

        return self.blocks[2](checkpoint(inner, x, use_reentrant=False))


@stages
def test_nested_recomputation(stage: int) -> None:
    play(Scenario(Nested, turn_with, stage))


class WholeRecomputed(Bench):
    def forward(self, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        return checkpoint_sequential(list(self.blocks), 2, x, use_reentrant=False)


@stages
def test_checkpoint_sequential(stage: int) -> None:
    play(Scenario(WholeRecomputed, turn_with, stage))


@modes
def test_whole_model_recomputed_from_outside(reentrant: bool) -> None:
    """The user wraps the call of the engine itself."""

    def turn(engine: Any, rank: int, step: int, micro: int) -> Tensor:
        x, _ = vector_batch(10 * step + rank, 2)
        loss = checkpoint(engine, x.requires_grad_(), use_reentrant=reentrant).square().mean()
        engine.backward(loss)
        return loss

    play(Scenario(Reused, turn, 3))


# --------------------------------------------------------------------------------------------- partly used parameters


class Branches(nn.Module):
    """Takes the branches that it is told to; ``unused`` is never taken."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(8, 8)
        self.branches = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.unused = nn.Linear(8, 8)

    def forward(self, x: Tensor, taken: tuple[int, ...]) -> Tensor:
        x = self.stem(x)
        for index in taken:
            x = torch.tanh(self.branches[index](x))
        return x


def branch_turn(choose: Any) -> Any:
    def turn(engine: Any, rank: int, step: int, micro: int) -> Tensor:
        x, _ = vector_batch(100 * step + 10 * micro + rank, 2)
        loss = engine(x, choose(rank, step, micro)).float().square().mean()
        engine.backward(loss)
        return loss

    return turn


CHOICES = {
    "some_micro_batches": lambda rank, step, micro: (micro,),
    "some_ranks": lambda rank, step, micro: (rank,),
    "ranks_and_micro_batches": lambda rank, step, micro: ((rank + micro) % 3,),
    "none_on_rank_1": lambda rank, step, micro: () if rank == 1 else (0, 2),
    "some_steps": lambda rank, step, micro: (0, 1, 2) if step != 1 else (2,),
}


@pytest.mark.parametrize("choose", CHOICES.values(), ids=CHOICES)
@stages
def test_partly_used_parameters(stage: int, choose: Any) -> None:
    """Weight decay must not touch a parameter that got no gradient on any rank: torch's optimizers skip it."""
    play(Scenario(Branches, branch_turn(choose), stage, accumulation=2, windows=(2, 2, 2)))


@stages
def test_branches_in_another_order_on_each_rank(stage: int) -> None:
    """No matter to whole parameters; where units are gathered one by one, right or refused, but no hang."""
    order = branch_turn(lambda rank, step, micro: (0, 1, 2) if rank == 0 else (2, 0, 1))
    scenario = Scenario(Branches, order, stage, windows=(1, 1), config={"mismatch_timeout": 0.6})
    try:
        play(scenario)
    except WorkersFailed as failure:
        if stage < 3 or str(failure).count("RankMismatchError") < 2:
            raise


@stages
def test_partly_used_parameters_in_one_unit(stage: int) -> None:
    choose = CHOICES["some_steps"]
    play(Scenario(Branches, branch_turn(choose), stage, zero={"unit_min_elements": 1_000_000}, windows=(1, 1, 1)))


@stages
def test_partly_used_parameters_on_three_ranks(stage: int) -> None:
    play(Scenario(Branches, branch_turn(CHOICES["some_ranks"]), stage, world=3, clip=0.1))


# ------------------------------------------------------------------------------------------------- writing in place


class InPlace(Bench):
    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
            x.mul_(1.5)
            x += 0.25
            F.relu(x, inplace=True)
        return self.last(x)


@stages
def test_writing_to_outputs_in_place(stage: int) -> None:
    def turn(engine: Any, rank: int, step: int, micro: int) -> Tensor:
        x, _ = vector_batch(100 * step + 10 * micro + rank, 2)
        out = engine(x)
        out.mul_(2.0)
        out[:, 0].zero_()
        loss = out.square().mean()
        engine.backward(loss)
        return loss

    play(Scenario(InPlace, turn, stage, accumulation=2, windows=(2, 2)))


# ------------------------------------------------------------------------------------------------------------ hooks


def add_hooks(model: nn.Module) -> nn.Module:
    """Hooks that change numbers, so that one left out shows: outputs, inputs, gradients of modules and parameters."""

    def scaled(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return 1.25 * output

    def shifted(module: nn.Module, args: Any) -> Any:
        return (args[0] + 0.125,)

    def reads_weight(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return output + module.norm.weight.detach().sum()  # type: ignore[union-attr]

    model.blocks[0].register_forward_hook(scaled)  # type: ignore[index]
    model.blocks[1].register_forward_pre_hook(shifted)  # type: ignore[index]
    model.blocks[1].up.register_forward_hook(scaled)  # type: ignore[index]
    model.blocks[2].register_forward_hook(reads_weight)  # type: ignore[index]
    model.blocks[2].register_full_backward_hook(lambda module, grads, outs: (2 * grads[0],))  # type: ignore[index]
    return model


class Chain(Bench):
    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@stages
def test_hooks_registered_before(stage: int) -> None:
    play(Scenario(lambda: add_hooks(Chain()), turn_with, stage, accumulation=2, windows=(2, 2)))


@stages
def test_hooks_registered_after(stage: int) -> None:
    def turn(engine: Any, rank: int, step: int, micro: int) -> Tensor:
        if step == 1 and not getattr(engine, "hooked", False):
            add_hooks(engine.module)
            engine.hooked = True
        if isinstance(engine, Plain) and step > 1:
            engine.hooked = True  # every step has its own stand-in; the module keeps its hooks
        return turn_with(engine, rank, step, micro)

    play(Scenario(Chain, turn, stage, windows=(1, 1, 1)))


@stages
def test_hooks_on_parameters(stage: int) -> None:
    """A tensor hook of a parameter sees and changes its gradient, as in torch."""

    def build() -> nn.Module:
        model = Chain()
        model.blocks[1].up.weight.register_hook(lambda gradient: 3 * gradient)
        return model

    play(Scenario(build, turn_with, stage, accumulation=2, windows=(2, 2)))


# --------------------------------------------------------------------------------------------------- kinds of outputs


@dataclass
class Out:
    hidden: Tensor
    note: str
    extra: Any = None


@dataclass(frozen=True)
class FrozenOut:
    hidden: Tensor


Pair = namedtuple("Pair", ["hidden", "count"])


class Wrapping(nn.Module):
    """A linear layer that returns its output in a container."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.kind = kind

    def forward(self, x: Tensor, scale: float = 1.0) -> Any:
        y = scale * torch.tanh(self.layer(x))
        return {
            "dict": lambda: {"hidden": y, "count": 3, "none": None},
            "nested": lambda: {"deep": [{"hidden": y}, (1, None)]},
            "tuple": lambda: (None, y, "text"),
            "list": lambda: [y],
            "namedtuple": lambda: Pair(y, 3),
            "dataclass": lambda: Out(y, "text", {"again": y}),
            "frozen_dataclass": lambda: FrozenOut(y),
            "tensor": lambda: y,
        }[self.kind]()


def unwrap(kind: str, out: Any) -> Tensor:
    result: Tensor = {
        "dict": lambda: out["hidden"],
        "nested": lambda: out["deep"][0]["hidden"],
        "tuple": lambda: out[1],
        "list": lambda: out[0],
        "namedtuple": lambda: out.hidden,
        "dataclass": lambda: out.hidden,
        "frozen_dataclass": lambda: out.hidden,
        "tensor": lambda: out,
    }[kind]()
    return result


class Containers(nn.Module):
    """Units whose outputs are containers, called with keyword arguments; so is the model's own output."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.parts = nn.ModuleList(Wrapping(kind) for _ in range(3))

    def forward(self, x: Tensor) -> Any:
        for part in self.parts[:-1]:
            x = unwrap(self.kind, part(x=x, scale=1.5))
        return self.parts[-1](x)


KINDS = ["dict", "nested", "tuple", "list", "namedtuple", "dataclass", "frozen_dataclass"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stage", [0, 3])
def test_outputs_in_containers(stage: int, kind: str) -> None:
    def turn(engine: Any, rank: int, step: int, micro: int) -> Tensor:
        x, _ = vector_batch(100 * step + 10 * micro + rank, 2)
        out = engine(x)
        assert type(out) is type(Wrapping(kind)(x)), type(out)
        loss = unwrap(kind, out).square().mean()
        engine.backward(loss)
        return loss

    play(Scenario(partial(Containers, kind), turn, stage))


class Recorder(nn.Module):
    """Units that return None and pass their result on by a side door."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(SideDoor() for _ in range(3))

    def forward(self, x: Tensor) -> None:
        box = [x]
        for layer in self.layers:
            assert layer(box) is None
        self.result = box[-1]


class SideDoor(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, box: list[Tensor]) -> None:
        box.append(torch.tanh(self.layer(box[-1])))


@pytest.mark.parametrize("zero", [{}, {"units": ["layers.*"]}], ids=["found_units", "named_units"])
@stages
def test_outputs_that_are_none(stage: int, zero: dict[str, Any]) -> None:
    def turn(engine: Any, rank: int, step: int, micro: int) -> Tensor:
        x, _ = vector_batch(100 * step + 10 * micro + rank, 2)
        assert engine(x) is None
        loss = engine.module.result.square().mean()
        engine.backward(loss)
        return loss

    play(Scenario(Recorder, turn, stage, zero=zero))


def test_inputs_keep_their_identity() -> None:
    """In fp32 the engine hands the user's own tensors to forward, and containers that it does not know untouched."""

    class Looks(Regression):
        def forward(self, x: Tensor, *, box: Any = None) -> Tensor:  # type: ignore[override]
            self.seen = (x, box)
            return self.predict(x).sum()

    def body(rank: int) -> bool:
        engine = engine_for(Looks(), 2)
        x, box = torch.randn(2, 8), object()
        engine.backward(engine(x, box=box))
        engine.step()
        return engine.module.seen[0] is x and engine.module.seen[1] is box

    assert run(2, body) == [True, True]
