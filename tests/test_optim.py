"""Optimizers and schedulers from the job file, against torch's own and against DeepSpeed's numbers."""

from __future__ import annotations

import logging
import math
from typing import Any

import pytest
import torch
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from zerotrain.config import ConfigError, OptimizerConfig, load_config
from zerotrain.optim import build_optimizer, build_scheduler


def parameters(*lrs: float) -> list[dict[str, Any]]:
    """One group of one parameter for each learning rate."""
    return [{"params": [Parameter(torch.ones(3))], "lr": lr} for lr in lrs]


def adamw(*lrs: float) -> Optimizer:
    """An optimizer with betas and a group for each learning rate."""
    return torch.optim.AdamW(parameters(*lrs))


def rates(scheduler: LRScheduler, steps: int) -> list[list[float]]:
    """The learning rate of each group in each of the next ``steps`` optimizer steps."""
    seen = []
    for _ in range(steps):
        seen.append([float(group["lr"]) for group in scheduler.optimizer.param_groups])
        scheduler.optimizer.step()
        scheduler.step()
    return seen


# Each row: what the job says, the class that comes of it, whether it is fused, and the same in torch's words.
OPTIMIZERS = [
    ("AdamW", {"lr": 0.1}, torch.optim.AdamW, True, {"lr": 0.1}),
    ("adamw", {"lr": 0.1, "betas": [0.8, 0.9]}, torch.optim.AdamW, True, {"lr": 0.1, "betas": (0.8, 0.9)}),
    ("Adam", {"lr": 0.1}, torch.optim.AdamW, True, {"lr": 0.1, "weight_decay": 0}),
    ("Adam", {"weight_decay": 0.3}, torch.optim.AdamW, True, {"weight_decay": 0.3}),
    ("ADAM", {"weight_decay": 0.3, "adam_w_mode": True}, torch.optim.AdamW, True, {"weight_decay": 0.3}),
    ("Adam", {"weight_decay": 0.3, "adam_w_mode": False}, torch.optim.Adam, True, {"weight_decay": 0.3}),
    (
        "Adam",
        {"weight_decay": 0.3, "decoupled_weight_decay": False},
        torch.optim.Adam,
        True,
        {"weight_decay": 0.3},
    ),
    ("AdamW", {"adam_w_mode": False, "weight_decay": 0.3}, torch.optim.AdamW, True, {"weight_decay": 0.3}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True}, torch.optim.SGD, True, None),
    ("adagrad", {"lr": 0.1}, torch.optim.Adagrad, True, None),
    ("RMSprop", {"lr": 0.1, "centered": True}, torch.optim.RMSprop, False, None),
    ("NAdam", {"lr": 0.1}, torch.optim.NAdam, False, None),
    ("radam", {"lr": 0.1}, torch.optim.RAdam, False, None),
    ("Adamax", {"lr": 0.1}, torch.optim.Adamax, False, None),
    ("Adadelta", {"rho": 0.8}, torch.optim.Adadelta, False, None),
    ("ASGD", {"lr": 0.1}, torch.optim.ASGD, False, None),
    ("RProp", {"etas": [0.4, 1.3]}, torch.optim.Rprop, False, {"etas": (0.4, 1.3)}),
]


@pytest.mark.parametrize(("name", "params", "cls", "fused", "same"), OPTIMIZERS)
def test_an_optimizer_steps_as_torch_does(name: str, params: Any, cls: Any, fused: bool, same: Any) -> None:
    ours, theirs = Parameter(torch.linspace(-1, 1, 7)), Parameter(torch.linspace(-1, 1, 7))
    optimizer = build_optimizer({"type": name, "params": params}, [ours])
    oracle = cls([theirs], **(params if same is None else same))
    assert type(optimizer) is cls
    assert bool(optimizer.defaults.get("fused")) is fused
    for step in range(4):
        ours.grad = torch.full((7,), 0.3 + step)
        theirs.grad = torch.full((7,), 0.3 + step)
        optimizer.step()
        oracle.step()
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("way", [{"fused": False}, {"foreach": True}, {"foreach": False}])
def test_the_user_may_choose_another_way_to_step(way: dict[str, bool]) -> None:
    optimizer = build_optimizer({"type": "AdamW", "params": way}, [Parameter(torch.ones(2))])
    assert not optimizer.defaults["fused"]
    assert optimizer.defaults["foreach"] == way.get("foreach")


def test_where_a_device_cannot_fuse_nothing_is_fused() -> None:
    assert not build_optimizer({"type": "AdamW"}, [Parameter(torch.ones(2, device="meta"))]).defaults["fused"]


def test_groups_keep_what_they_say_and_are_not_touched() -> None:
    first, second, third = (Parameter(torch.ones(2)) for _ in range(3))
    groups = [{"params": (p for p in (first, second)), "lr": 0.5}, {"params": third, "weight_decay": 0.0}]
    optimizer = build_optimizer(OptimizerConfig(type="AdamW", params={"lr": 0.1, "weight_decay": 0.2}), groups)
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.1]
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.2, 0.0]
    assert [len(group["params"]) for group in optimizer.param_groups] == [2, 1]
    assert all(group["fused"] for group in optimizer.param_groups)
    assert groups[1].keys() == {"params", "weight_decay"}
    assert groups[1]["params"] is third
    named: Any = torch.nn.Linear(2, 2).named_parameters()
    assert build_optimizer({"type": "SGD"}, named).param_groups[0]["param_names"] == ["weight", "bias"]


# Each row: name, arguments, and what is said.
REFUSED_OPTIMIZERS = [
    ("Muon", {}, 'optimizer.type: "Muon" needs whole matrices'),
    ("adafactor", {}, 'optimizer.type: "adafactor" needs whole matrices'),
    ("LBFGS", {}, 'optimizer.type: "LBFGS" needs a closure'),
    ("SparseAdam", {}, 'optimizer.type: "SparseAdam" needs sparse gradients'),
    ("Lamb", {}, 'optimizer.type: "Lamb" scales by the norm of each whole parameter'),
    ("OneBitAdam", {}, 'optimizer.type: "OneBitAdam" compresses communication'),
    ("Lion", {}, 'optimizer.type: "Lion" is not in torch.optim; build it yourself'),
    ("Adan", {}, 'optimizer.type: "Adan" is not the name of a known optimizer; did you mean Adam?'),
    ("xyz", {}, 'optimizer.type: "xyz" is not the name of a known optimizer; known are AdamW, Adam,'),
    ("AdamW", {"lr": -1}, "optimizer.params.lr: -1 is refused by AdamW: Invalid learning rate: -1"),
    ("AdamW", {"lr": "1e-3"}, 'optimizer.params.lr: "1e-3" is not a number; write it without quotes'),
    ("AdamW", {"lr": None}, "optimizer.params.lr: null is not a number"),
    ("AdamW", {"learning_rate": 1}, "optimizer.params.learning_rate: AdamW has no such argument"),
    ("AdamW", {"eps_": 1}, "optimizer.params.eps_: AdamW has no such argument; did you mean eps?"),
    ("AdamW", {"params": []}, "optimizer.params.params: AdamW has no such argument"),
    ("AdamW", {"betas": [0.9]}, "optimizer.params.betas: [0.9] is not a list of 2 numbers"),
    ("AdamW", {"betas": [0.9, 0.9, 0.9]}, "optimizer.params.betas: [0.9, 0.9, 0.9] is not a list of 2 numbers"),
    ("AdamW", {"betas": [0.9, 1.5]}, "optimizer.params.betas: [0.9, 1.5] is refused by AdamW: Invalid beta"),
    ("AdamW", {"amsgrad": "yes"}, 'optimizer.params.amsgrad: "yes" is not true or false'),
    ("AdamW", {"freeze_step": 3}, "optimizer.params.freeze_step: 3 cannot be followed: it belongs to 1-bit Adam"),
    ("Adam", {"bias_correction": False}, "optimizer.params.bias_correction: false cannot be followed"),
    ("Adam", {"adam_w_mode": 1}, "optimizer.params.adam_w_mode: 1 is not true or false"),
    ("Adam", {"max_grad_norm": 1.0}, "optimizer.params.max_grad_norm: write gradient_clipping"),
    ("SGD", {"torch_adam": True}, "optimizer.params.torch_adam: SGD has no such argument"),
    ("SGD", {"nesterov": True}, "optimizer.params.nesterov: true is refused by SGD: Nesterov momentum requires"),
    ("SGD", {"fused": True, "foreach": True}, "optimizer.params.fused: true is refused by SGD"),
    ("SGD", {"differentiable": True}, "optimizer.params.differentiable: true is refused by SGD"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "params", "text"), REFUSED_OPTIMIZERS)
def test_an_optimizer_that_cannot_be_is_refused_by_name(name: str, params: Any, text: str) -> None:
    with pytest.raises(ConfigError) as built:
        build_optimizer({"type": name, "params": params}, [Parameter(torch.ones(2))])
    with pytest.raises(ConfigError) as loaded:
        load_config({"optimizer": {"type": name, "params": params}})
    assert built.value.problems == loaded.value.problems
    assert built.value.problems[0].startswith(text)


def test_every_faulty_argument_is_reported() -> None:
    with pytest.raises(ConfigError) as caught:
        build_optimizer({"type": "Adam", "params": {"lr": "x", "bets": 1, "freeze_step": 1}}, [])
    assert [problem.split(":")[0] for problem in caught.value.problems] == [
        "optimizer.params.freeze_step",
        "optimizer.params.lr",
        "optimizer.params.bets",
    ]


@pytest.mark.parametrize("spec", [{}, {"type": 3}, {"type": "SGD", "lr": 1}, {"type": "SGD", "params": 3}])
def test_a_spec_of_another_form_is_refused(spec: Any) -> None:
    with pytest.raises(ConfigError, match=r"^optimizer: .* is not of the form"):
        build_optimizer(spec, [Parameter(torch.ones(2))])


LOG = [math.log(n) / math.log(4) for n in range(1, 5)]
COSINE = [1.0, *((1 + math.cos(math.pi * n / 4)) / 2 for n in range(1, 5))]

# Each row: arguments, and DeepSpeed's learning rate in each optimizer step from the first, for own rates 0.1.
SCHEDULES: list[tuple[str, dict[str, Any], list[float]]] = [
    ("WarmupLR", {"warmup_num_steps": 4}, [0, *(0.1 * x for x in LOG), 0.1, 0.1]),
    (
        "WarmupLR",
        {"warmup_num_steps": 4, "warmup_type": "linear", "warmup_min_lr": 0.2, "warmup_max_lr": 0.6},
        [0.2, 0.2, 0.3, 0.4, 0.5, 0.6, 0.6],
    ),
    ("WarmupLR", {"warmup_num_steps": 1, "warmup_type": "linear"}, [0, 0, 0.05, 0.1, 0.1]),
    (
        "warmupdecaylr",
        {"warmup_num_steps": 2, "warmup_type": "linear", "warmup_max_lr": 0.8, "total_num_steps": 6},
        [0, 0, 0.4, 0.8, 0.6, 0.4, 0.2, 0, 0],
    ),
    ("WarmupDecayLR", {"warmup_num_steps": 4, "total_num_steps": 5}, [0, *(0.001 * x for x in LOG), 0.001, 0, 0]),
    (
        "WarmupCosineLR",
        {"warmup_num_steps": 2, "warmup_type": "linear", "total_num_steps": 6, "cos_min_ratio": 0},
        [0, 0, 0.05, *(0.1 * x for x in COSINE[1:]), 0, 0],
    ),
    (
        "WarmupCosineLR",
        {"warmup_num_steps": 2, "warmup_type": "linear", "total_num_steps": 4, "warmup_min_ratio": 0.5,
         "cos_min_ratio": 0.2},
        [0, 0.05, 0.075, 0.06, 0.02, 0.02],
    ),
    ("LRRangeTest", {"lr_range_test_min_lr": 0.2, "lr_range_test_step_size": 2}, [0.2, 0.3, 0.4, 0.5, 0.6]),
    (
        "LRRangeTest",
        {"lr_range_test_min_lr": 0.2, "lr_range_test_step_size": 2, "lr_range_test_step_rate": 2,
         "lr_range_test_staircase": True},
        [0.2, 0.2, 0.6, 0.6, 1.0],
    ),
    (
        "OneCycle",
        {"cycle_min_lr": 0.1, "cycle_max_lr": 1.0, "cycle_first_step_size": 3, "cycle_second_step_size": 2,
         "decay_step_size": 2, "decay_lr_rate": 1.0},
        [0.1, 0.4, 0.7, 1.0, 0.55, 0.1, 0.1 / 1.5, 0.05, 0.04],
    ),
    (
        "OneCycle",
        {"cycle_min_lr": 0.0, "cycle_max_lr": 1.0, "cycle_first_step_size": 4, "cycle_first_stair_count": 2},
        [0, 0, 0.5, 0.5, 1, 0.5, 0.5, 0, 0, 0, 0],
    ),
]  # fmt: skip


@pytest.mark.parametrize(("name", "params", "expected"), SCHEDULES)
def test_a_schedule_gives_deepspeeds_rate_in_every_step(name: str, params: Any, expected: list[float]) -> None:
    scheduler = build_scheduler({"type": name, "params": params}, adamw(0.1))
    assert isinstance(scheduler, LRScheduler)
    assert [rate for (rate,) in rates(scheduler, len(expected))] == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(("name", "params", "expected"), SCHEDULES)
def test_a_schedule_resumes_from_its_state(name: str, params: Any, expected: list[float]) -> None:
    scheduler = build_scheduler({"type": name, "params": params}, adamw(0.1))
    rates(scheduler, 3)
    resumed = build_scheduler({"type": name, "params": params}, adamw(0.1))
    resumed.load_state_dict(scheduler.state_dict())
    assert resumed.get_last_lr() == scheduler.get_last_lr()
    assert resumed.optimizer.param_groups[0]["betas"] == scheduler.optimizer.param_groups[0]["betas"]
    assert [rate for (rate,) in rates(resumed, len(expected) - 3)] == pytest.approx(expected[3:], abs=1e-12)


def test_groups_have_rates_of_their_own() -> None:
    params = {"warmup_num_steps": 2, "warmup_type": "linear", "warmup_min_lr": [0, 0.1], "warmup_max_lr": [0.2, 0.5]}
    listed = build_scheduler({"type": "WarmupLR", "params": params}, adamw(1, 1))
    assert rates(listed, 4)[2:] == [pytest.approx([0.1, 0.3]), pytest.approx([0.2, 0.5])]
    own = build_scheduler({"type": "WarmupLR", "params": {"warmup_num_steps": 1, "warmup_type": "linear"}}, adamw(1, 3))
    assert rates(own, 4)[2:] == [[0.5, 1.5], [1, 3]]
    with pytest.raises(ConfigError, match=r"^scheduler.params.warmup_min_lr: 2 values for the 3 parameter groups"):
        build_scheduler({"type": "WarmupLR", "params": params}, adamw(1, 1, 1))


def test_a_group_that_is_added_later_joins_the_schedule() -> None:
    spec = {"type": "WarmupLR", "params": {"warmup_num_steps": 4, "warmup_type": "linear"}}
    scheduler = build_scheduler(spec, adamw(1.0))
    rates(scheduler, 2)
    scheduler.optimizer.add_param_group(parameters(2.0)[0])
    assert rates(scheduler, 3)[1:] == [[0.5, 1.0], [0.75, 1.5]]
    spec["params"] = {"warmup_num_steps": 4, "warmup_max_lr": [1.0]}
    listed = build_scheduler(spec, adamw(1.0))
    listed.optimizer.add_param_group(parameters(2.0)[0])
    listed.optimizer.step()
    with pytest.raises(ConfigError, match="1 values, and a parameter group was added"):
        listed.step()


def test_a_tensor_rate_is_filled_in_place() -> None:
    optimizer = torch.optim.AdamW([Parameter(torch.ones(2))], lr=torch.tensor(0.5))
    rate = optimizer.param_groups[0]["lr"]
    scheduler = build_scheduler(
        {"type": "WarmupLR", "params": {"warmup_num_steps": 2, "warmup_type": "linear"}}, optimizer
    )
    seen = [float(value) for (value,) in rates(scheduler, 4)]
    assert seen == [0, 0, 0.25, 0.5]
    scheduler.load_state_dict({"last_epoch": 2})
    assert optimizer.param_groups[0]["lr"] is rate
    assert float(rate) == 0.25


def test_one_cycle_moves_the_betas_as_deepspeed_does() -> None:
    params = {
        "cycle_min_lr": 0.1,
        "cycle_max_lr": 1.0,
        "cycle_first_step_size": 2,
        "decay_step_size": 1,
        "decay_mom_rate": 0.1,
    }
    scheduler = build_scheduler({"type": "OneCycle", "params": params}, adamw(0.1))
    seen = []
    for _ in range(7):
        seen.append(scheduler.optimizer.param_groups[0]["betas"])
        scheduler.optimizer.step()
        scheduler.step()
    assert [beta for beta, _ in seen] == pytest.approx([0.8, 0.85, 0.8, 0.85, 0.9, 0.99, 1.08])
    assert {second for _, second in seen} == {0.99}
    still = build_scheduler({"type": "OneCycle", "params": {**params, "cycle_momentum": False}}, adamw(0.1))
    assert still.optimizer.param_groups[0]["betas"] == (0.9, 0.999)


def test_what_has_no_effect_or_looks_wrong_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    sgd = torch.optim.SGD([Parameter(torch.ones(2))], lr=0.1)
    with caplog.at_level(logging.WARNING, logger="zerotrain"):
        build_scheduler({"type": "OneCycle", "params": {"cycle_min_lr": 0.1, "cycle_max_lr": 1.0}}, sgd)
        build_scheduler({"type": "WarmupDecayLR", "params": {"total_num_steps": 9}}, sgd)
    first, second = (record.getMessage() for record in caplog.records)
    assert first == "scheduler.params.cycle_momentum has no effect: SGD has no betas"
    assert "total_num_steps 9 is less than warmup_num_steps 1000" in second


def test_torch_schedulers_work_by_name() -> None:
    scheduler = build_scheduler({"type": "steplr", "params": {"step_size": 2, "gamma": 0.5}}, adamw(1.0))
    assert type(scheduler) is torch.optim.lr_scheduler.StepLR
    assert rates(scheduler, 4) == [[1.0], [1.0], [0.5], [0.5]]
    listed = build_scheduler({"type": "OneCycleLR", "params": {"max_lr": [0.1, 0.2], "total_steps": 9}}, adamw(1, 1))
    assert [group["max_lr"] for group in listed.optimizer.param_groups] == [0.1, 0.2]


REFUSED_SCHEDULERS = [
    ("LambdaLR", {}, 'scheduler.type: "LambdaLR" takes functions, which must be made in Python'),
    ("SequentialLR", {}, 'scheduler.type: "SequentialLR" takes schedulers'),
    ("ReduceLROnPlateau", {}, 'scheduler.type: "ReduceLROnPlateau" needs a metric'),
    ("LRScheduler", {}, 'scheduler.type: "LRScheduler" is only the base'),
    ("WarmupLRR", {}, 'scheduler.type: "WarmupLRR" is not the name of a known scheduler; did you mean WarmupLR?'),
    ("WarmupCosineLR", {}, "scheduler.params.total_num_steps: missing, and it has no default. Step at which"),
    ("WarmupLR", {"warmup_num_steps": 0}, "scheduler.params.warmup_num_steps: 0 is too small (at least 1); left out"),
    ("WarmupLR", {"warmup_typ": 1}, "scheduler.params.warmup_typ: unknown key; did you mean scheduler.params.warmup_"),
    ("WarmupLR", {"warmup_type": "lin"}, "scheduler.params.warmup_type: \"lin\" is not one of 'log' or 'linear'; did"),
    ("WarmupLR", {"warmup_max_lr": "0.1"}, 'scheduler.params.warmup_max_lr: "0.1" is not a number, nor a list'),
    ("WarmupLR", {"warmup_max_lr": []}, "scheduler.params.warmup_max_lr: [] is not a number, nor a list"),
    ("WarmupLR", {"last_batch_iteration": 5}, "scheduler.params.last_batch_iteration: 5 resumes a run"),
    ("OneCycle", {"cycle_min_lr": 0.1}, "scheduler.params.cycle_max_lr: missing"),
    ("StepLR", {}, "scheduler.params.step_size: missing; StepLR has no default for it"),
    ("StepLR", {"step_size": 1, "gama": 1}, "scheduler.params.gama: StepLR has no such argument; did you mean gamma?"),
    ("StepLR", {"step_size": 1, "gamma": "1"}, 'scheduler.params.gamma: "1" is not a number; write it without quotes'),
    ("StepLR", {"step_size": 1, "last_epoch": 3}, "scheduler.params.last_epoch: 3 resumes a run"),
    ("OneCycleLR", {"max_lr": [1.0, 1.0], "total_steps": 9}, "scheduler.params: OneCycleLR refuses"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "params", "text"), REFUSED_SCHEDULERS)
def test_a_scheduler_that_cannot_be_is_refused_by_name(name: str, params: Any, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build_scheduler({"type": name, "params": params}, adamw(0.1))
    assert caught.value.problems[0].startswith(text)


def test_arguments_of_a_torch_scheduler_are_tried_when_the_job_is_loaded() -> None:
    scheduler = {"type": "LinearLR", "params": {"start_factor": 7.0}}
    with pytest.raises(ConfigError, match=r"^scheduler.params.start_factor: 7.0 is refused by LinearLR: "):
        load_config({"optimizer": {"type": "SGD"}, "scheduler": scheduler})
