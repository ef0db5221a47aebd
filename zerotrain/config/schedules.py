"""Arguments of DeepSpeed's five learning rate schedules, by DeepSpeed's names.

A step below is an optimizer step. All lr values are learning rates; one number serves every parameter group, a list has
one for each.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from zerotrain.config.values import Finite, Natural, PerGroup, Positive, Section

WarmupType = Literal["log", "linear"]


class LRRangeTestParams(Section):
    """`LRRangeTest`: raises the learning rate without end, to find the largest that trains."""

    lr_range_test_min_lr: PerGroup = 1e-3
    """Learning rate to start from."""

    lr_range_test_step_size: Positive = 2000
    """Steps per increase."""

    lr_range_test_step_rate: Finite = 1.0
    """Increase per `lr_range_test_step_size` steps, as a multiple of the start."""

    lr_range_test_staircase: bool = False
    """Whether the rate jumps once per `lr_range_test_step_size` steps instead of rising with each."""


class OneCycleParams(Section):
    """`OneCycle`: up to a peak, down again, then a decay; momentum (the first beta) goes the other way."""

    cycle_min_lr: Finite
    """Learning rate at both ends of the cycle."""

    cycle_max_lr: Finite
    """Learning rate at the peak."""

    decay_lr_rate: Finite = 0.0
    """After the cycle the rate is `cycle_min_lr` / (1 + `decay_lr_rate` x steps / `decay_step_size`)."""

    cycle_first_step_size: Positive = 2000
    """Steps up."""

    cycle_second_step_size: Positive | None = None
    """Steps down; null takes as many as up."""

    cycle_first_stair_count: Natural = 0
    """Stairs on the way up; 0 is a straight line."""

    cycle_second_stair_count: Natural | None = None
    """Stairs on the way down; null takes as many as up."""

    decay_step_size: Natural = 0
    """Steps per unit of decay after the cycle; 0 does not decay."""

    cycle_momentum: bool = True
    """Whether to move the first beta too; the second is then held at 0.99, as in DeepSpeed. Has no effect on an
    optimizer without betas."""

    cycle_min_mom: Finite = 0.8
    """First beta at the peak of the learning rate."""

    cycle_max_mom: Finite = 0.9
    """First beta at both ends of the cycle."""

    decay_mom_rate: Finite = 0.0
    """After the cycle the first beta is `cycle_max_mom` x (1 + `decay_mom_rate` x steps / `decay_step_size`)."""


class WarmupLRParams(Section):
    """`WarmupLR`: rises to a learning rate and stays there."""

    warmup_min_lr: PerGroup = 0.0
    """Learning rate to start from."""

    warmup_max_lr: PerGroup | None = None
    """Learning rate to reach; null takes the one that each group was built with."""

    warmup_num_steps: Positive = 1000
    """Steps of the rise (at least 2 are taken)."""

    warmup_type: WarmupType = "log"
    """Shape of the rise: `log` or `linear`."""


class WarmupDecayLRParams(Section):
    """`WarmupDecayLR`: rises to a learning rate, then falls to 0 in a straight line."""

    total_num_steps: Positive
    """Step at which 0 is reached."""

    warmup_min_lr: PerGroup = 0.0
    """Learning rate to start from."""

    warmup_max_lr: PerGroup = 0.001
    """Learning rate to reach."""

    warmup_num_steps: Positive = 1000
    """Steps of the rise (at least 2 are taken)."""

    warmup_type: WarmupType = "log"
    """Shape of the rise: `log` or `linear`."""


class WarmupCosineLRParams(Section):
    """`WarmupCosineLR`: rises to each group's own learning rate, then falls along half a cosine."""

    total_num_steps: Positive
    """Step at which the fall ends."""

    warmup_min_ratio: Annotated[Finite, Field(ge=0)] = 0.0
    """Where the rise starts, as a part of the group's learning rate."""

    warmup_num_steps: Positive = 1000
    """Steps of the rise (at least 2 are taken)."""

    cos_min_ratio: Annotated[Finite, Field(ge=0)] = 0.0001
    """Where the fall ends, as a part of the group's learning rate."""

    warmup_type: WarmupType = "log"
    """Shape of the rise: `log` or `linear`."""


ScheduleParams = LRRangeTestParams | OneCycleParams | WarmupLRParams | WarmupDecayLRParams | WarmupCosineLRParams

DEEPSPEED_SCHEDULES: dict[str, type[ScheduleParams]] = {
    "LRRangeTest": LRRangeTestParams,
    "OneCycle": OneCycleParams,
    "WarmupLR": WarmupLRParams,
    "WarmupDecayLR": WarmupDecayLRParams,
    "WarmupCosineLR": WarmupCosineLRParams,
}
"""The arguments of each schedule by its name in the file."""
