"""One training story told twice: to zerotrain on forked ranks, and to plain torch in one process.

A ``Scenario`` holds ``turn(engine, rank, step, micro)``: what a user does in one micro batch, forwards and backwards.
``play(scenario)`` lets every rank take its turns with a real engine, and one process take all ranks' turns, one after
another, with a ``Plain`` stand-in of the same face; the gradients must then be each other's mean, so that weights,
gradient norms and whatever the turns returned agree. Tests of features differ in their model and their turn only.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from harness import run
from oracle import ATOL, RTOL, adamw, full_weights, grad_norm, weights_of

STAGES = (0, 1, 2, 3)


def settings(stage: int, accumulation: int = 1, **extra: Any) -> dict[str, Any]:
    """A job file with many small units; ``zero`` adds to ``zero_optimization``."""
    zero = extra.pop("zero", {})
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": accumulation,
        "zero_optimization": {"stage": stage, "unit_min_elements": 1, **zero},
        "steps_per_print": None,
        **extra,
    }


def engine_for(model: nn.Module, stage: int, optimizer: Any = None, **extra: Any) -> Any:
    """An engine with AdamW unless told; ``extra`` are keys of the job file, and ``accumulation``, ``zero``."""
    import zerotrain

    optimizer = adamw(model.parameters()) if optimizer is None else optimizer
    return zerotrain.initialize(model=model, optimizer=optimizer, config=settings(stage, **extra))[0]


class Plain:
    """The engine's face over a plain module; sums gradients in the fp32 ``master`` it stands for."""

    def __init__(self, module: nn.Module, dtype: torch.dtype = torch.float32) -> None:
        self.module = module
        self.dtype = dtype
        self.tokens = 0
        self.training = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        def cast(leaf: Any) -> Any:
            return leaf.to(self.dtype) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf

        return self.module(*pytree.tree_map(cast, args), **pytree.tree_map(cast, kwargs))

    def backward(self, loss: Tensor, tokens: int | None = None) -> None:
        loss.backward()
        self.tokens += tokens or 0

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def train(self) -> None:
        self.module.train()

    def eval(self) -> None:
        self.module.eval()


@dataclass(frozen=True)
class Scenario:
    """``windows``: micro batches per optimizer step; one shorter than ``accumulation`` is closed by boundary=True."""

    build: Callable[[], nn.Module]
    turn: Callable[[Any, int, int, int], Any]
    stage: int
    world: int = 2
    accumulation: int = 1
    windows: tuple[int, ...] = (1, 1, 1)
    dtype: torch.dtype = torch.float32
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = lambda model: adamw(model.parameters())
    clip: float = 0.0
    zero: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)

    def model(self) -> nn.Module:
        torch.manual_seed(11)
        return self.build()


@dataclass
class Told:
    """``returned[step][micro][rank]``, norms by step, weights by name."""

    returned: list[list[list[Any]]]
    norms: list[float]
    weights: dict[str, Tensor]
    buffers: dict[str, Tensor]


def told_by_torch(scenario: Scenario) -> Told:
    """The scenario in one process without zerotrain, all ranks' turns one after another."""
    told: Told = run(1, lambda rank: _told_by_torch(scenario), group=False)[0]
    return told


def _told_by_torch(scenario: Scenario) -> Told:
    model = scenario.model()
    optimizer = scenario.optimizer(model)
    told = Told([], [], {}, {})
    for step, window in enumerate(scenario.windows):
        low = scenario.dtype is not torch.float32
        plain = Plain(copy.deepcopy(model).to(scenario.dtype) if low else model, scenario.dtype)
        optimizer.zero_grad()
        turns: list[list[Any]] = []
        for micro in range(window):
            turns.append([])
            for rank in range(scenario.world):
                turns[-1].append(_bare(scenario.turn(plain, rank, step, micro)))
                if low:
                    _move_gradients(plain.module, model)
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        for gradient in gradients:
            gradient /= plain.tokens or window * scenario.world
        told.returned.append(turns)
        told.norms.append(grad_norm(gradients, 2.0))
        if scenario.clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), scenario.clip)
        optimizer.step()
    told.weights = weights_of(model, scenario.dtype)
    told.buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    return told


def _move_gradients(low: nn.Module, master: nn.Module) -> None:
    for source, target in zip(low.parameters(), master.parameters(), strict=True):
        if source.grad is not None:
            gradient = source.grad.float()
            target.grad = gradient if target.grad is None else target.grad + gradient
            source.grad = None


def told_on_rank(scenario: Scenario, rank: int, prepare: Callable[[Any], None] | None = None) -> Told:
    """The scenario on one rank of an initialised group; ``returned`` holds this rank's own results."""
    model = scenario.model()
    engine = engine_for(
        model,
        scenario.stage,
        scenario.optimizer(model),
        accumulation=scenario.accumulation,
        zero=scenario.zero,
        gradient_clipping=scenario.clip,
        **({"bf16": {"enabled": True}} if scenario.dtype is torch.bfloat16 else {}),
        **scenario.config,
    )
    if prepare is not None:
        prepare(engine)
    told = Told([], [], {}, {})
    for step, window in enumerate(scenario.windows):
        turns: list[list[Any]] = []
        for micro in range(window):
            turns.append([_bare(scenario.turn(engine, rank, step, micro))])
            last = micro == window - 1
            updated = engine.step(boundary=True) if last and window < scenario.accumulation else engine.step()
            assert updated == last, f"step() said {updated} in micro batch {micro} of {window}"
        told.returned.append(turns)
        told.norms.append(engine.get_global_grad_norm())
    told.weights = full_weights(engine.module)
    told.buffers = {name: buffer.clone() for name, buffer in engine.module.named_buffers()}
    return told


def told_by_zerotrain(scenario: Scenario) -> Told:
    """The scenario on forked ranks; weights and norms must be the very same on all of them."""
    ranks = run(scenario.world, lambda rank: told_on_rank(scenario, rank))
    first = ranks[0]
    for rank, other in enumerate(ranks[1:], start=1):
        assert other.norms == first.norms, f"rank {rank}: {other.norms}, rank 0: {first.norms}"
        for name, value in first.weights.items():
            assert torch.equal(other.weights[name], value), f"{name} differs between rank 0 and rank {rank}"
        for step, turns in enumerate(other.returned):
            for micro, results in enumerate(turns):
                first.returned[step][micro].extend(results)
    return first


def play(scenario: Scenario, rtol: float = RTOL, atol: float = ATOL) -> Told:
    """Tells the scenario both ways, compares, and returns zerotrain's."""
    want, got = told_by_torch(scenario), told_by_zerotrain(scenario)
    assert list(got.weights) == list(want.weights)
    for name, value in want.weights.items():
        _close(got.weights[name], value, name, rtol, atol)
    _close(got.norms, want.norms, "gradient norms", rtol, atol)
    _close(got.returned, want.returned, "what the turns returned", rtol, atol)
    return got


def _close(got: Any, want: Any, what: str, rtol: float, atol: float) -> None:
    # Compared in fp64: a norm is a Python float on both sides, but was computed in fp32 on one.
    def wide(value: Any) -> Any:
        tensor = torch.as_tensor(value)
        return tensor.double() if tensor.is_floating_point() else tensor

    torch.testing.assert_close(
        pytree.tree_map(wide, got),
        pytree.tree_map(wide, want),
        rtol=rtol,
        atol=atol,
        msg=lambda text: f"{what}: {text}",
    )


def _bare(value: Any) -> Any:
    """Without graph, in fp32, copied: what a worker may send home."""
    return pytree.tree_map(
        lambda leaf: leaf.detach().clone() if isinstance(leaf, Tensor) else leaf, value if value is not None else []
    )
