"""Optimizers and schedulers: every element-wise one of torch, groups of all kinds, refusals, clipping norms."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harness import run
from models import Regression, Shape, TinyLM, token_batch, vector_batch
from oracle import Job, assert_equal_to_oracle, check, merge, oracle, train_on_rank
from scenario import STAGES, engine_for, settings

stages = pytest.mark.parametrize("stage", STAGES)

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": partial(torch.optim.SGD, lr=0.1),
    "sgd_nesterov": partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "sgd_maximize": partial(torch.optim.SGD, lr=0.01, momentum=0.5, dampening=0.1, maximize=True),
    "adam": partial(torch.optim.Adam, lr=1e-2, weight_decay=0.1),
    "adam_amsgrad": partial(torch.optim.Adam, lr=1e-2, amsgrad=True),
    "adam_foreach": partial(torch.optim.Adam, lr=1e-2, foreach=True),
    "adamw": partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1),
    "adamw_fused": partial(torch.optim.AdamW, lr=1e-2, fused=True),
    "adamw_tensor_lr": lambda groups: torch.optim.AdamW(groups, lr=torch.tensor(1e-2)),
    "adamax": partial(torch.optim.Adamax, lr=1e-2),
    "nadam": partial(torch.optim.NAdam, lr=1e-2, decoupled_weight_decay=True, weight_decay=0.1),
    "radam": partial(torch.optim.RAdam, lr=1e-2),
    "adagrad": partial(torch.optim.Adagrad, lr=1e-2, initial_accumulator_value=0.1, lr_decay=0.1),
    "adagrad_fused": partial(torch.optim.Adagrad, lr=1e-2, fused=True),
    "adadelta": partial(torch.optim.Adadelta, lr=0.5),
    "asgd": partial(torch.optim.ASGD, lr=1e-2, t0=1),
    "rmsprop": partial(torch.optim.RMSprop, lr=1e-3, centered=True, momentum=0.9),
    "rprop": partial(torch.optim.Rprop, lr=1e-2),
}


def regression_job(**changes: Any) -> Job:
    return Job(**{"build": Regression, "batch": vector_batch, "accumulation": 2, "steps": 4, **changes})


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
@stages
def test_element_wise_optimizers(stage: int, make: Callable[[Any], torch.optim.Optimizer]) -> None:
    check(regression_job(stage=stage, optimizer=lambda model: make(model.parameters()), clip=0.2))


class SignDescent(torch.optim.Optimizer):
    """An optimizer of the user's own, element-wise."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                    momentum.mul_(0.9).add_(p.grad)
                    p.sub_(torch.tanh(10 * momentum), alpha=group["lr"])


class Normalised(SignDescent):
    """One that is not: the step depends on the norm of the whole gradient of a parameter."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad / (p.grad.norm() + 1e-6), alpha=group["lr"])


@stages
def test_optimizer_of_the_users_own(stage: int) -> None:
    check(regression_job(stage=stage, optimizer=lambda model: SignDescent(model.parameters())))


@stages
def test_optimizer_by_name_tuples(stage: int) -> None:
    """torch also takes (name, parameter) pairs."""
    check(regression_job(stage=stage, optimizer=lambda model: torch.optim.AdamW(model.named_parameters(), lr=1e-2)))


def whole_matrix_optimizers() -> dict[str, Callable[[nn.Module], torch.optim.Optimizer]]:
    transformers = pytest.importorskip("transformers")
    return {
        "Adafactor": lambda model: torch.optim.Adafactor(model.parameters()),
        "LBFGS": lambda model: torch.optim.LBFGS(model.parameters()),
        "Muon": lambda model: torch.optim.Muon(model.parameters()),
        "SparseAdam": lambda model: torch.optim.SparseAdam(list(model.parameters())),
        "Normalised": lambda model: Normalised(model.parameters()),
        "transformers.Adafactor": lambda model: transformers.Adafactor(model.parameters()),
    }


@pytest.mark.parametrize("name", ["Adafactor", "LBFGS", "Muon", "SparseAdam", "Normalised", "transformers.Adafactor"])
@pytest.mark.parametrize("stage", [1, 3])
def test_optimizers_that_need_whole_matrices_are_refused(stage: int, name: str) -> None:
    make = whole_matrix_optimizers()[name]

    def body(rank: int) -> str:
        model = Regression(bias=False)
        with pytest.raises((ValueError, TypeError, RuntimeError)) as caught:
            engine_for(model, stage, make(model))
        return str(caught.value)

    for text in run(2, body):
        assert name.rpartition(".")[2] in text, text
        assert any(word in text for word in ("element", "whole", "closure", "sparse", "piece", "fragment")), text


@stages
def test_closures_are_refused(stage: int) -> None:
    def body(rank: int) -> None:
        engine = engine_for(Regression(), stage)
        engine.backward(engine(*vector_batch(0, 2)))
        with pytest.raises((ValueError, TypeError, RuntimeError, NotImplementedError), match="closure"):
            engine.optimizer.step(lambda: 1.0)

    run(2, body)


@stages
def test_the_users_optimizer_is_the_one_that_steps(stage: int) -> None:
    """No wrapper: the same object comes back, with its hyper-parameters, and its step hooks run."""
    import zerotrain

    def body(rank: int) -> tuple[bool, int, float]:
        model, calls = Regression(), []
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        optimizer.register_step_post_hook(lambda *_: calls.append(1))
        engine, returned, loader, scheduler = zerotrain.initialize(
            model=model, optimizer=optimizer, config=settings(stage)
        )
        assert loader is None
        assert scheduler is None
        for step in range(3):
            optimizer.param_groups[0]["lr"] = 0.5 - 0.1 * step
            engine.backward(engine(*vector_batch(step, 2)))
            engine.step()
        return returned is optimizer and engine.optimizer is optimizer, len(calls), engine.get_lr()[0]

    assert run(2, body) == [(True, 3, pytest.approx(0.3))] * 2


@pytest.mark.parametrize("how", ["callable", "config", "config_with_parameters"])
@stages
def test_ways_to_give_an_optimizer(stage: int, how: str) -> None:
    """A callable from parameters, or the job file, trains as the object does."""
    import zerotrain

    params = {"lr": 1e-2, "betas": (0.9, 0.95), "weight_decay": 0.1}
    job = regression_job(stage=stage, optimizer=lambda model: torch.optim.AdamW(model.parameters(), **params))

    def body(rank: int) -> Any:
        model, config = job.model(), job.json()
        extra: dict[str, Any] = {}
        if how == "callable":
            extra["optimizer"] = lambda parameters: torch.optim.AdamW(parameters, **params)
            extra["lr_scheduler"] = job.scheduler
        else:
            config["optimizer"] = {"type": "AdamW", "params": {**params, "betas": [0.9, 0.95]}}
            extra["lr_scheduler"] = job.scheduler
            if how == "config_with_parameters":
                layers = list(model.layers)
                extra["model_parameters"] = [{"params": list(layer.parameters())} for layer in layers]
        engine = zerotrain.initialize(model=model, config=config, **extra)[0]
        assert len(engine.optimizer.param_groups) == (3 if how == "config_with_parameters" else 1)
        record = train_on_rank(job, rank, engine)
        record.lrs = [lrs[:1] for lrs in record.lrs]
        return record

    assert_equal_to_oracle(merge(run(2, body)), oracle(job))


# ---------------------------------------------------------------------------------------------------------- groups


def grouped(model: nn.Module) -> torch.optim.Optimizer:
    """Groups with other lr, decay and betas; one of a single bias, so that most ranks own nothing of it; one empty."""
    norms = [p for name, p in model.named_parameters() if "norm" in name]
    single = [model.blocks[0].up.bias]  # type: ignore[index,union-attr]
    rest = [p for name, p in model.named_parameters() if "norm" not in name and p is not single[0]]
    return torch.optim.AdamW(
        [
            {"params": norms, "weight_decay": 0.0, "lr": 3e-2},
            {"params": single, "betas": (0.5, 0.6), "lr": 1e-3},
            {"params": rest},
        ],
        lr=1e-2,
        weight_decay=0.2,
    )


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("tied", [False, True])
@stages
def test_parameter_groups(stage: int, tied: bool, world: int) -> None:
    job = Job(
        partial(TinyLM, Shape(tied=tied)), token_batch, stage=stage, world=world, optimizer=grouped, clip=0.2, steps=4
    )
    assert len(check(job).lrs[0]) == 3


@stages
def test_group_wholly_frozen(stage: int) -> None:
    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        frozen = [p for p in model.parameters() if not p.requires_grad]
        free = [p for p in model.parameters() if p.requires_grad]
        return torch.optim.AdamW([{"params": frozen, "lr": 1.0}, {"params": free}], lr=1e-2, weight_decay=0.3)

    build = partial(TinyLM, Shape(frozen=True))
    assert len(check(Job(build, token_batch, stage=stage, optimizer=optimizer)).lrs[0]) == 2


@stages
def test_parameters_outside_every_group(stage: int) -> None:
    """A trainable parameter that the optimizer was not given stays as it is, and the norm is that of the others."""

    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW([*model.layers[0].parameters(), model.layers[2].bias], lr=1e-2)

    check(regression_job(stage=stage, optimizer=optimizer))


@pytest.mark.parametrize("unfrozen", [False, True], ids=["outside", "frozen"])
@stages
def test_group_added_later(stage: int, unfrozen: bool) -> None:
    """add_param_group after two steps, of parameters that were outside every group or frozen until then."""

    def prepared() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(2)
        model = Regression()
        if unfrozen:
            model.layers[0].requires_grad_(False)
        rest = [p for name, p in model.named_parameters() if not name.startswith("layers.0")]
        return model, torch.optim.AdamW(rest, lr=1e-2)

    def thaw(model: Any, optimizer: torch.optim.Optimizer) -> None:
        model.layers[0].requires_grad_(True)
        optimizer.add_param_group({"params": list(model.layers[0].parameters()), "lr": 5e-2, "betas": (0.8, 0.9)})

    def ours(rank: int) -> dict[str, Tensor]:
        from oracle import full_weights

        model, optimizer = prepared()
        engine = engine_for(model, stage, optimizer)
        for step in range(4):
            if step == 2:
                thaw(engine.module, engine.optimizer)
            x, y = vector_batch(step, 4)
            engine.backward(engine(x[2 * rank :][:2], y[2 * rank :][:2]))
            engine.step()
        assert len(engine.get_lr()) == 2
        return full_weights(model)

    def plain(rank: int) -> dict[str, Tensor]:
        model, optimizer = prepared()
        for step in range(4):
            if step == 2:
                thaw(model, optimizer)
            optimizer.zero_grad()
            model(*vector_batch(step, 4)).backward()
            optimizer.step()
        return {name: p.detach() for name, p in model.named_parameters()}

    want = run(1, plain, group=False)[0]
    for weights in run(2, ours):
        for name, value in want.items():
            torch.testing.assert_close(weights[name], value, rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


# ------------------------------------------------------------------------------------------------------ schedulers

Scheduler = torch.optim.lr_scheduler


def of_transformers(name: str, **settings: Any) -> Callable[[torch.optim.Optimizer], Any]:
    def make(optimizer: torch.optim.Optimizer) -> Any:
        transformers = pytest.importorskip("transformers")
        return getattr(transformers, name)(optimizer, **settings)

    return make


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any] | None] = {
    "none": None,
    "step": lambda o: Scheduler.StepLR(o, 2, 0.5),
    "cosine": lambda o: Scheduler.CosineAnnealingLR(o, 6),
    "one_cycle": lambda o: Scheduler.OneCycleLR(o, max_lr=[0.02, 0.01, 0.03], total_steps=10),
    "cyclic": lambda o: Scheduler.CyclicLR(o, 1e-3, 1e-2, step_size_up=2, cycle_momentum=False),
    "sequential": lambda o: Scheduler.SequentialLR(
        o, [Scheduler.LinearLR(o, 0.1, total_iters=2), Scheduler.ExponentialLR(o, 0.5)], [2]
    ),
    "chained": lambda o: Scheduler.ChainedScheduler([Scheduler.ConstantLR(o, 0.5, 2), Scheduler.ExponentialLR(o, 0.9)]),
    "lambda_per_group": lambda o: Scheduler.LambdaLR(o, [lambda s: 1.0, lambda s: 1 / (s + 1), lambda s: 0.5**s]),
    "linear_of_transformers": of_transformers(
        "get_linear_schedule_with_warmup", num_warmup_steps=2, num_training_steps=6
    ),
    "cosine_of_transformers": of_transformers(
        "get_cosine_schedule_with_warmup", num_warmup_steps=2, num_training_steps=6
    ),
}


@pytest.mark.parametrize("make", SCHEDULERS.values(), ids=SCHEDULERS)
@pytest.mark.parametrize("stage", [0, 3])
def test_schedulers(stage: int, make: Any) -> None:
    """OneCycleLR also moves the betas, which shows in the weights."""
    job = Job(partial(TinyLM, Shape()), token_batch, stage=stage, optimizer=grouped, scheduler=make, steps=5)
    check(job)


@stages
def test_scheduler_of_the_job_file(stage: int) -> None:
    def body(rank: int) -> list[float]:
        warmup = {"warmup_min_lr": 0.0, "warmup_max_lr": 0.1, "warmup_num_steps": 4, "warmup_type": "linear"}
        import zerotrain

        model = Regression()
        engine, _, _, scheduler = zerotrain.initialize(
            model=model,
            config=settings(
                stage,
                optimizer={"type": "SGD", "params": {"lr": 0.1}},
                scheduler={"type": "WarmupLR", "params": warmup},
            ),
        )
        assert scheduler is engine.lr_scheduler
        seen = []
        for step in range(6):
            engine.backward(engine(*vector_batch(step, 2)))
            engine.step()
            seen.append(engine.get_lr()[0])
        return seen

    for seen in run(2, body):
        assert seen == sorted(seen)
        assert seen[-1] == pytest.approx(0.1)
        assert seen[0] < 0.1


# -------------------------------------------------------------------------------------------------------- clipping


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, math.inf])
@stages
def test_clipping_norms(stage: int, norm_type: float, dtype: torch.dtype) -> None:
    build = partial(TinyLM, Shape(tied=True, frozen=True))
    check(Job(build, token_batch, stage=stage, norm_type=norm_type, clip=0.05, accumulation=2, dtype=dtype))


@pytest.mark.parametrize("norm_type", [2.0, math.inf])
@pytest.mark.parametrize("stage", [1, 3])
def test_clipping_norms_with_replicas(stage: int, norm_type: float) -> None:
    """Replicas must not be counted twice."""
    build = partial(TinyLM, Shape(tied=True, frozen=True))
    check(Job(build, token_batch, stage=stage, world=4, norm_type=norm_type, clip=0.05, zero={"shard_group_size": 2}))


@stages
def test_norm_before_clipping_is_told(stage: int) -> None:
    """The same number on every rank and in the metrics, None before the first step."""

    def body(rank: int) -> tuple[Any, float, float]:
        engine = engine_for(Regression(), stage, gradient_clipping=1e-3)
        before = engine.get_global_grad_norm()
        engine.backward(engine(*vector_batch(rank, 2)))
        engine.step()
        return before, engine.get_global_grad_norm(), engine.metrics["grad_norm"]

    results = run(3, body)
    assert len(set(results)) == 1, results
    before, norm, in_metrics = results[0]
    assert before is None
    assert norm == in_metrics > 1e-3
