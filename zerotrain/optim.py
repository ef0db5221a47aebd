"""Optimizers and learning rate schedulers from the job file.

The arithmetic of an optimizer is torch's. The five schedules that DeepSpeed's files name are here, as torch schedulers.
They give the learning rate that DeepSpeed gives at each optimizer step: its engine runs the first step before its
scheduler has advanced at all, so our step number ``last_epoch`` is DeepSpeed's ``last_batch_iteration`` + 1.
"""

from __future__ import annotations

import inspect
import logging
import math
from abc import abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any, Generic, TypeVar, cast

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from zerotrain.config import ConfigError, OptimizerConfig, SchedulerConfig
from zerotrain.config.catalogue import plan_optimizer, plan_scheduler
from zerotrain.config.errors import found
from zerotrain.config.schedules import (
    LRRangeTestParams,
    OneCycleParams,
    WarmupCosineLRParams,
    WarmupDecayLRParams,
    WarmupLRParams,
)
from zerotrain.config.values import Section

logger = logging.getLogger("zerotrain")

Params = TypeVar("Params", bound=Section)

_FUSED_DEVICES = frozenset({"cpu", "cuda"})
_OTHER_WAYS_TO_STEP = frozenset({"fused", "foreach", "differentiable"})
_SECOND_BETA = 0.99  # what DeepSpeed's OneCycle sets, whatever the optimizer had


def build_optimizer(
    spec: OptimizerConfig | Mapping[str, Any], params: Iterable[Tensor] | Iterable[dict[str, Any]]
) -> Optimizer:
    """The torch optimizer that ``spec`` (``{"type", "params"}``) names, over parameters or parameter groups.

    It is fused where its class can be on the device of the parameters, unless ``spec`` chooses another way to step.
    Raises ConfigError naming ``optimizer.type`` or ``optimizer.params.*`` for what cannot be used.
    """
    spec = spec if isinstance(spec, OptimizerConfig) else _spec(OptimizerConfig, spec, "optimizer")
    plan = plan_optimizer(spec.type, spec.params)
    groups = [_held(group) for group in params]
    kwargs = dict(plan.kwargs)
    if not _OTHER_WAYS_TO_STEP & kwargs.keys() and _can_fuse(plan.cls, groups):
        kwargs["fused"] = True
    return plan.cls(groups, **kwargs)


def build_scheduler(spec: SchedulerConfig | Mapping[str, Any], optimizer: Optimizer) -> LRScheduler:
    """The scheduler that ``spec`` (``{"type", "params"}``) names, over ``optimizer``; it advances once per step.

    Raises ConfigError naming ``scheduler.type`` or ``scheduler.params.*`` for what cannot be used.
    """
    spec = spec if isinstance(spec, SchedulerConfig) else _spec(SchedulerConfig, spec, "scheduler")
    plan = plan_scheduler(spec.type, spec.params)
    if plan.params is not None:
        return cast(LRScheduler, _SCHEDULES[plan.name](optimizer, plan.params))
    try:
        return plan.torch_class()(optimizer, **plan.kwargs)
    except Exception as error:
        raise ConfigError(f"scheduler.params: {plan.name} refuses {found(plan.kwargs)}: {error}") from error


def _spec(model: type[Any], spec: Mapping[str, Any], path: str) -> Any:
    unknown = spec.keys() - {"type", "params"}
    params = spec.get("params", {})
    if unknown or not isinstance(spec.get("type"), str) or not isinstance(params, Mapping):
        raise ConfigError(f'{path}: {found(dict(spec))} is not of the form {{"type": name, "params": {{...}}}}')
    return model(type=spec["type"], params=dict(params))


def _held(group: Any) -> Any:
    """A parameter as it is; a copy of a group, since torch writes into it, with parameters that can be read twice."""
    if not isinstance(group, dict):
        return group
    params = group["params"]
    return {**group, "params": params if isinstance(params, Tensor) else list(params)}


def _can_fuse(cls: type[Optimizer], groups: list[Any]) -> bool:
    members: list[Any] = []
    for group in groups:
        params = group["params"] if isinstance(group, dict) else [group]
        members += [params] if isinstance(params, Tensor) else params
    tensors = [member[1] if isinstance(member, tuple) else member for member in members]
    return "fused" in inspect.signature(cls).parameters and all(
        isinstance(tensor, Tensor) and tensor.device.type in _FUSED_DEVICES and torch.is_floating_point(tensor)
        for tensor in tensors
    )


class Schedule(LRScheduler, Generic[Params]):
    """A learning rate as a formula of the step number, for each parameter group, groups added later included.

    Its state is the step number alone; the rest comes from the job file, so that a resumed run follows the file.
    """

    params: Params
    """The arguments of the job file."""

    def __init__(self, optimizer: Optimizer, params: Params) -> None:
        """Set the learning rate of the first step; ConfigError if a list has not one value for each group."""
        self.params = params
        for name in type(params).model_fields:
            values, groups = getattr(params, name), len(optimizer.param_groups)
            if isinstance(values, tuple) and len(values) != groups:
                text = f"{len(values)} values for the {groups} parameter groups of the optimizer; write one for each"
                raise ConfigError(f"scheduler.params.{name}: {text}, or a single number")
        super().__init__(optimizer)

    @abstractmethod
    def rate(self, step: int, index: int, own: float) -> float:
        """The learning rate at DeepSpeed's ``last_batch_iteration`` of ``step`` (-1: before its first) for a group.

        ``index`` is the group's place, ``own`` the learning rate that the optimizer was built with.
        """

    def get_lr(self) -> list[float | Tensor]:
        """The learning rate of every group at the current step."""
        step, rates = self.last_epoch - 1, list[float | Tensor]()
        for index, group in enumerate(self.optimizer.param_groups):
            # A group that was added since has no initial_lr yet; what it came with is its own.
            rates.append(self.rate(step, index, float(group.setdefault("initial_lr", float(group["lr"])))))
        return rates

    def get_last_lr(self) -> list[float | Tensor]:
        """The learning rate that every group has now."""
        return [group["lr"] for group in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        """The step number."""
        return {"last_epoch": self.last_epoch}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue at the step of ``state_dict``, and set the learning rates of that step."""
        self.last_epoch = int(state_dict["last_epoch"])
        for group, rate in zip(self.optimizer.param_groups, self.get_lr(), strict=True):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate

    def _of_group(self, name: str, values: float | tuple[float, ...], index: int) -> float:
        if not isinstance(values, tuple):
            return values
        if index >= len(values):
            text = f"{len(values)} values, and a parameter group was added; write a single number for such a run"
            raise ConfigError(f"scheduler.params.{name}: {text}")
        return values[index]


class LRRangeTest(Schedule[LRRangeTestParams]):
    """Raises the learning rate in proportion to the step (Smith 2018, arXiv 1803.09820)."""

    def rate(self, step: int, index: int, own: float) -> float:
        """``min_lr * (1 + step_rate * intervals)``."""
        intervals: float = (step + 1) / self.params.lr_range_test_step_size
        if self.params.lr_range_test_staircase:
            intervals = math.floor(intervals)
        start = self._of_group("lr_range_test_min_lr", self.params.lr_range_test_min_lr, index)
        return start * (1 + self.params.lr_range_test_step_rate * intervals)


class OneCycle(Schedule[OneCycleParams]):
    """One triangle up and down, then a decay; the first beta moves against it (Smith 2018, arXiv 1803.09820)."""

    def __init__(self, optimizer: Optimizer, params: OneCycleParams) -> None:
        """Set the learning rate, and the betas where the optimizer has them, of the first step."""
        self.moves_betas = params.cycle_momentum and "betas" in optimizer.defaults
        if params.cycle_momentum and not self.moves_betas:
            logger.warning("scheduler.params.cycle_momentum has no effect: %s has no betas", type(optimizer).__name__)
        super().__init__(optimizer, params)

    def rate(self, step: int, index: int, own: float) -> float:
        """Between ``cycle_min_lr`` and ``cycle_max_lr`` in the cycle; ``cycle_min_lr`` over a growing divisor after."""
        params = self.params
        if step < self._total:
            return params.cycle_min_lr + (params.cycle_max_lr - params.cycle_min_lr) * self._height(step + 1)
        return params.cycle_min_lr / (1 + params.decay_lr_rate * self._decay_intervals(step))

    def first_beta(self, step: int) -> float:
        """The first beta at DeepSpeed's ``last_batch_iteration`` of ``step``."""
        params = self.params
        if step < 0:  # DeepSpeed starts at the lower end here, and continues from the upper one
            return params.cycle_min_mom
        if step < self._total:
            return params.cycle_max_mom - (params.cycle_max_mom - params.cycle_min_mom) * self._height(step + 1)
        return params.cycle_max_mom * (1 + params.decay_mom_rate * self._decay_intervals(step))

    def step(self, epoch: int | None = None) -> None:
        """Advance the learning rate and the betas by one step."""
        super().step(epoch)
        self._set_betas()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue at the step of ``state_dict``, and set the learning rates and betas of that step."""
        super().load_state_dict(state_dict)
        self._set_betas()

    def _set_betas(self) -> None:
        if self.moves_betas:
            for group in self.optimizer.param_groups:
                group["betas"] = (self.first_beta(self.last_epoch - 1), _SECOND_BETA)

    @property
    def _up(self) -> int:
        return self.params.cycle_first_step_size

    @property
    def _down(self) -> int:
        return self.params.cycle_second_step_size or self._up

    @property
    def _total(self) -> int:
        return self._up + self._down

    def _height(self, position: int) -> float:
        """How far up the triangle, from 0 to 1, ``position`` steps into a cycle are."""
        position %= self._total
        rising = position <= self._up
        done, length = (position, self._up) if rising else (self._total - position, self._down)
        stairs = self.params.cycle_first_stair_count
        if not rising and self.params.cycle_second_stair_count is not None:
            stairs = self.params.cycle_second_stair_count
        return done * stairs // length / stairs if stairs else done / length

    def _decay_intervals(self, step: int) -> float:
        size = self.params.decay_step_size
        return (step - self._total + 1) / size if size else 0.0


def _risen(step: int, steps: int, shape: str) -> float:
    """How far a warm-up of ``steps`` steps has come at ``step``, from 0 to 1."""
    return math.log(step + 1) / math.log(steps) if shape == "log" else step / steps


class WarmupLR(Schedule[WarmupLRParams]):
    """Rises from one learning rate to another and stays there."""

    def rate(self, step: int, index: int, own: float) -> float:
        """The lower rate before the first step, then a log or a straight line up to the upper one."""
        low = self._of_group("warmup_min_lr", self.params.warmup_min_lr, index)
        target = self.params.warmup_max_lr
        high = own if target is None else self._of_group("warmup_max_lr", target, index)
        steps = max(2, self.params.warmup_num_steps)
        part = _risen(max(step, 0), steps, self.params.warmup_type) if step < steps else 1.0
        return low + (high - low) * part


class WarmupDecayLR(Schedule[WarmupDecayLRParams]):
    """Rises from one learning rate to another, then falls to 0 in a straight line."""

    def __init__(self, optimizer: Optimizer, params: WarmupDecayLRParams) -> None:
        """Set the learning rate of the first step."""
        _warn_if_short(params)
        super().__init__(optimizer, params)

    def rate(self, step: int, index: int, own: float) -> float:
        """As WarmupLR in the rise; then in proportion to the steps that are left."""
        params, steps = self.params, max(2, self.params.warmup_num_steps)
        low = self._of_group("warmup_min_lr", params.warmup_min_lr, index)
        high = self._of_group("warmup_max_lr", params.warmup_max_lr, index)
        if step < steps:
            part = _risen(max(step, 0), steps, params.warmup_type)
        else:
            part = max(0.0, (params.total_num_steps - step) / max(1, params.total_num_steps - steps))
        return low + (high - low) * part


class WarmupCosineLR(Schedule[WarmupCosineLRParams]):
    """Rises to each group's own learning rate, then falls along half a cosine (Loshchilov 2016, arXiv 1608.03983)."""

    def __init__(self, optimizer: Optimizer, params: WarmupCosineLRParams) -> None:
        """Set the learning rate of the first step, which is 0."""
        _warn_if_short(params)
        super().__init__(optimizer, params)

    def rate(self, step: int, index: int, own: float) -> float:
        """A part of the group's own learning rate, from 0 through ``warmup_min_ratio`` and 1 to ``cos_min_ratio``."""
        params, steps = self.params, max(2, self.params.warmup_num_steps)
        if step < 0:
            return 0.0
        if step < steps:
            rise = _risen(step, steps, params.warmup_type)
            return own * (params.warmup_min_ratio + (1 - params.warmup_min_ratio) * rise)
        progress = min(1.0, (step - steps + 1) / max(1, params.total_num_steps - steps))
        return own * (params.cos_min_ratio + (1 - params.cos_min_ratio) * (1 + math.cos(math.pi * progress)) / 2)


def _warn_if_short(params: WarmupDecayLRParams | WarmupCosineLRParams) -> None:
    if params.total_num_steps < params.warmup_num_steps:
        logger.warning(
            "scheduler.params: total_num_steps %d is less than warmup_num_steps %d: the run ends within the warm-up",
            params.total_num_steps,
            params.warmup_num_steps,
        )


_SCHEDULES: dict[str, Any] = {
    cls.__name__: cls for cls in (LRRangeTest, OneCycle, WarmupLR, WarmupDecayLR, WarmupCosineLR)
}
