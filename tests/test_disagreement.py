"""Ranks that disagree get an error that names the difference, soon; an exception leaves the engine usable."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harness import Outcome, outcomes, run
from models import Regression, vector_batch
from oracle import adamw, full_weights
from scenario import STAGES, engine_for, settings

stages = pytest.mark.parametrize("stage", STAGES)
SOON = 12.0  # seconds; mismatch_timeout is 5 unless set
QUICK = {"mismatch_timeout": 0.6}


def ordinary(engine: Any, rank: int, step: int) -> None:
    engine.backward(engine(*vector_batch(10 * step + rank, 2)))
    engine.step()


def all_refuse(world: int, body: Callable[[int], Any], *words: str, kind: str = "RankMismatchError") -> list[Outcome]:
    """Every rank fails with an error of ``kind``, soon, that holds every word."""
    results = outcomes(world, body, timeout=SOON)
    for outcome in results:
        assert not outcome.hung, outcome.describe()
        assert outcome.error is not None, f"rank {outcome.rank} went on as if nothing were wrong"
        assert kind in outcome.error_bases, outcome.trace
        for word in words:
            assert word in outcome.error, f"{word!r} is missing in: {outcome.error}"
    return results


# --------------------------------------------------------------------------------------------- told at initialization


@pytest.mark.parametrize("world", [2, 4])
@stages
def test_other_shape_on_one_rank(stage: int, world: int) -> None:
    def body(rank: int) -> None:
        model = Regression()
        if rank == 1:
            model.layers[1] = nn.Linear(8, 9)
        engine_for(model, stage)

    all_refuse(world, body, "layers.1.weight")


@stages
def test_one_layer_more_on_one_rank(stage: int) -> None:
    def body(rank: int) -> None:
        engine_for(Regression(depth=3 + rank), stage)

    all_refuse(2, body, "layers.3")


@pytest.mark.parametrize("change", ["dtype", "frozen", "tied", "name"])
@pytest.mark.parametrize("stage", [1, 3])
def test_other_parameters_on_one_rank(stage: int, change: str) -> None:
    def body(rank: int) -> None:
        model = Regression()
        if rank == 1:
            if change == "dtype":
                model.layers[2].double()
            elif change == "frozen":
                model.layers[2].requires_grad_(False)
            elif change == "tied":
                model.layers[2].weight = model.layers[0].weight
            else:
                model.other = model.layers
                del model.layers
        engine_for(model, stage)

    all_refuse(2, body, "layers.2" if change != "name" else "layers")


CONFIGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "zero_optimization.stage": ({}, {"zero": {"stage": 1}}),
    "gradient_clipping": ({}, {"gradient_clipping": 0.5}),
    "gradient_accumulation_steps": ({}, {"accumulation": 3}),
    "bf16.enabled": ({}, {"bf16": {"enabled": True}}),
    "zero_optimization.unit_min_elements": ({}, {"zero": {"unit_min_elements": 500}}),
}


@pytest.mark.parametrize("path", CONFIGS)
def test_other_config_on_one_rank(path: str) -> None:
    """Names the key, as the job file spells it."""

    def body(rank: int) -> None:
        engine_for(Regression(), 2, **CONFIGS[path][1 if rank == 1 else 0])

    all_refuse(2, body, path)


@pytest.mark.parametrize("change", ["lr", "split", "class", "order"])
@stages
def test_other_optimizer_on_one_rank(stage: int, change: str) -> None:
    def body(rank: int) -> None:
        model = Regression()
        parameters = list(model.parameters())
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(parameters, lr=1e-2)
        if rank == 1 and change == "lr":
            optimizer = torch.optim.AdamW(parameters, lr=1e-3)
        elif rank == 1 and change == "split":
            optimizer = torch.optim.AdamW([{"params": parameters[:2]}, {"params": parameters[2:]}], lr=1e-2)
        elif rank == 1 and change == "class":
            optimizer = torch.optim.SGD(parameters, lr=1e-2)
        elif rank == 1:
            optimizer = torch.optim.AdamW(parameters[1:], lr=1e-2)
        engine_for(model, stage, optimizer)

    all_refuse(2, body)


def test_a_bad_config_on_all_ranks_is_refused_before_any_collective() -> None:
    """Also where only one rank can see it: no rank waits for it."""
    import zerotrain

    def body(rank: int) -> None:
        model = Regression()
        zerotrain.initialize(model=model, optimizer=adamw(model.parameters()), config=settings(7))

    all_refuse(2, body, "zero_optimization.stage", "7", kind="ConfigError")


# ------------------------------------------------------------------------------------------------- told in the middle


@pytest.mark.parametrize("then", ["leaves", "evaluates"])
@stages
def test_other_number_of_micro_batches(stage: int, then: str) -> None:
    """One rank ends its loop a step early: its process ends, or goes on to something that the ranks do together."""

    def body(rank: int) -> None:
        engine = engine_for(Regression(), stage, **QUICK)
        for step in range(3 if rank == 0 else 2):
            ordinary(engine, rank, step)
        if then == "evaluates":
            full_gather(engine)

    if then == "evaluates":
        all_refuse(2, body)
    else:
        first = outcomes(2, body, timeout=SOON)[0]
        assert first.error is not None, first.describe()


def full_gather(engine: Any) -> None:
    """Something that every stage does together: the next step's worth of scalars, and weights."""
    engine.module.state_dict()
    engine.step(boundary=True)


def test_a_slow_rank_is_waited_for() -> None:
    """mismatch_timeout is when ranks compare notes, not how long one may take."""

    def body(rank: int) -> int:
        engine = engine_for(Regression(), 2, mismatch_timeout=0.3)
        for step in range(2):
            if rank == 1 and step == 1:
                time.sleep(1.5)
            ordinary(engine, rank, step)
        return int(engine.global_steps)

    assert run(2, body) == [2, 2]


@stages
def test_one_rank_steps_early(stage: int) -> None:
    """One rank closes its window with boundary=True, the other does not."""

    def body(rank: int) -> None:
        engine = engine_for(Regression(), stage, accumulation=2, **QUICK)
        for step in range(4):
            engine.backward(engine(*vector_batch(step, 2)))
            engine.step(boundary=True if rank == 1 and step == 0 else None)

    all_refuse(2, body)


@stages
def test_one_rank_reads_while_the_other_trains(stage: int) -> None:
    """A full_parameter on rank 0 only; where it needs no exchange it may simply work."""
    import zerotrain

    def body(rank: int) -> None:
        engine = engine_for(model := Regression(), stage, **QUICK)
        ordinary(engine, rank, 0)
        if rank == 0:
            zerotrain.full_optimizer_state(model.layers[1].weight, "exp_avg")
        for step in range(1, 4):
            ordinary(engine, rank, step)

    if stage == 0 and all(outcome.ok for outcome in outcomes(2, body, timeout=SOON)):
        return  # everything is whole there: nothing had to be exchanged
    all_refuse(2, body)


def test_other_order_of_engines() -> None:
    """Rank 0 steps the first engine first, rank 1 the second."""

    def body(rank: int) -> None:
        engines = [engine_for(Regression(), 2, **QUICK), engine_for(Regression(depth=4), 2, **QUICK)]
        for step in range(3):
            for engine in engines if rank == 0 else reversed(engines):
                ordinary(engine, rank, step)

    all_refuse(2, body)


def test_other_order_of_parameter_reads() -> None:
    import zerotrain

    def body(rank: int) -> None:
        engine = engine_for(model := Regression(), 3, **QUICK)
        for index in (0, 1) if rank == 0 else (1, 0):
            zerotrain.full_parameter(model.layers[index].weight)
        engine.close()

    all_refuse(2, body)


@pytest.mark.parametrize("victim", [0, 1])
@stages
def test_killed_rank(stage: int, victim: int) -> None:
    """The survivors get an error within seconds."""

    def body(rank: int) -> None:
        engine = engine_for(Regression(), stage)
        for step in range(50):
            if step == 2 and rank == victim:
                os.kill(os.getpid(), signal.SIGKILL)
            ordinary(engine, rank, step)

    results = outcomes(3, body, timeout=SOON)
    assert results[victim].exitcode == -signal.SIGKILL
    for outcome in results:
        if outcome.rank != victim:
            assert not outcome.hung, outcome.describe()
            assert outcome.error is not None, "a survivor trained on alone"


@stages
def test_exception_on_one_rank_reaches_the_others(stage: int) -> None:
    """One rank raises in its forward and leaves; the others do not hang."""

    def body(rank: int) -> None:
        engine = engine_for(Regression(), stage, **QUICK)
        for step in range(4):
            if step == 1 and rank == 1:
                raise KeyError("a bad sample")
            ordinary(engine, rank, step)

    results = outcomes(2, body, timeout=SOON)
    assert results[1].error_type == "KeyError"
    assert results[0].error is not None, results[0].describe()


# ---------------------------------------------------------------------------------------------- usable after an error


class Fragile(Regression):
    """Raises where ``trouble`` says, once."""

    trouble = ""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            x = torch.tanh(layer(x))
            if index == 1 and self.trouble == "forward":
                raise KeyError("forward")
            if index == 1 and self.trouble == "backward":
                x.register_hook(self.burst)
        return (x - y).square().mean()

    def burst(self, gradient: Tensor) -> None:
        raise KeyError("backward")


@pytest.mark.parametrize("recovery", ["zero_grad", "nothing"])
@pytest.mark.parametrize("where", ["forward", "backward", "step"])
@stages
def test_usable_after_an_exception(stage: int, where: str, recovery: str) -> None:
    """All ranks raise alike and catch it; the steps that follow are those of a run without the accident."""

    def body(rank: int, accident: bool) -> dict[str, Tensor]:
        torch.manual_seed(6)
        model = Fragile()
        optimizer = adamw(model.parameters())
        engine = engine_for(model, stage, optimizer)
        for step in range(4):
            if step == 2 and accident:
                stumble(engine, optimizer)
            ordinary(engine, rank, step)
        return full_weights(model)

    def stumble(engine: Any, optimizer: torch.optim.Optimizer) -> None:
        engine.module.trouble = where
        hook = optimizer.register_step_pre_hook(burst) if where == "step" else None
        with pytest.raises(KeyError):
            ordinary(engine, engine.rank, 7)
        engine.module.trouble = ""
        if hook:
            hook.remove()
        if recovery == "zero_grad" or where != "forward":
            engine.zero_grad()

    def burst(*_: Any) -> None:
        raise KeyError("step")

    want = run(2, lambda rank: body(rank, False))
    for got in run(2, lambda rank: body(rank, True)):
        for name, value in want[0].items():
            assert torch.equal(got[name], value), name


@stages
def test_backward_twice_is_torchs_own_error(stage: int) -> None:
    def body(rank: int) -> None:
        engine = engine_for(Regression(), stage)
        loss = engine(*vector_batch(rank, 2))
        engine.backward(loss)
        with pytest.raises(RuntimeError, match=r"second time|freed"):
            engine.backward(loss)
        engine.zero_grad()
        ordinary(engine, rank, 1)
        assert engine.global_steps == 1

    run(2, body)
