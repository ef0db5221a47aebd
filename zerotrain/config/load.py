"""Loading a job: read, sift, validate, look for contradictions; every problem found on the way in one error."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zerotrain.config.batch import ACCUMULATION, MICRO, TRAIN, unfit_for_any_world
from zerotrain.config.catalogue import OptimizerPlan, plan_optimizer, plan_scheduler
from zerotrain.config.errors import ConfigError
from zerotrain.config.read import read
from zerotrain.config.schema import Config
from zerotrain.config.validate import Findings, sift, validated

_FROM_STAGE = {"reshard_after_forward": 3, "stage3_prefetch_bucket_size": 3}


def load_config(source: str | Path | Mapping[str, Any] | Config) -> Config:
    """The job in a JSON file or in a mapping; a Config is returned as it is.

    Raises ConfigError listing every problem with its path in the file. Needs no process group.
    """
    if isinstance(source, Config):
        return source
    raw = read(source)
    findings = Findings(problems=raw.problems)
    config = validated(sift(raw.values, Config, findings), Config, findings)
    if config is not None:
        _look_for_contradictions(config, raw.values, findings)
    if findings.problems or config is None:
        raise ConfigError(findings.problems, raw.source)
    config._ignored_keys = tuple(findings.ignored)
    return config


def _look_for_contradictions(config: Config, values: Mapping[str, Any], findings: Findings) -> None:
    if config.bf16.enabled and config.fp16.enabled:
        findings.fault(
            "bf16.enabled", "true, while fp16.enabled is true as well; a model computes in one of them, so drop one"
        )
    misfit = unfit_for_any_world(
        config.train_batch_size, config.train_micro_batch_size_per_gpu, config.gradient_accumulation_steps
    )
    if misfit and not findings.faulty & {TRAIN, MICRO, ACCUMULATION}:
        findings.problems.append(misfit)
    _check_loss_scale(config, findings)
    _check_checkpoint(config, findings)
    _check_zero(config, values, findings)
    _check_optimizer_and_scheduler(config, findings)


def _check_loss_scale(config: Config, findings: Findings) -> None:
    fp16, path = config.fp16, "fp16.min_loss_scale"
    start = 2.0**fp16.initial_scale_power
    if fp16.loss_scale == 0 and fp16.min_loss_scale > start and "fp16.initial_scale_power" not in findings.faulty:
        power = f"2^{fp16.initial_scale_power} = {start:g} (initial_scale_power)"
        findings.fault(path, f"{fp16.min_loss_scale:g} is above the scale to start from, {power}; lower it")


def _check_checkpoint(config: Config, findings: Findings) -> None:
    checkpoint = config.checkpoint
    if checkpoint.resume is not None and checkpoint.directory is None:
        findings.fault(
            "checkpoint.resume", f'"{checkpoint.resume}", while checkpoint.directory does not say where from; add it'
        )
    if checkpoint.keep_every is not None and checkpoint.keep_last is None:
        findings.fault(
            "checkpoint.keep_every",
            f"{checkpoint.keep_every}, while all checkpoints are kept; add checkpoint.keep_last, or remove the key",
        )


def _check_zero(config: Config, values: Mapping[str, Any], findings: Findings) -> None:
    zero, written = config.zero_optimization, values.get("zero_optimization")
    if not isinstance(written, Mapping) or "zero_optimization.stage" in findings.faulty:
        return
    if zero.stage == 0 and zero.shard_group_size is not None:
        findings.fault(
            "zero_optimization.shard_group_size",
            f"{zero.shard_group_size}, while stage 0 shards nothing; choose stage 1, 2 or 3, or remove the key",
        )
    findings.ignored += [f"zero_optimization.{key}" for key in written if _FROM_STAGE.get(key, 0) > zero.stage]


def _check_optimizer_and_scheduler(config: Config, findings: Findings) -> None:
    optimizer: OptimizerPlan | None = None
    try:
        if config.optimizer is not None:
            optimizer = plan_optimizer(config.optimizer.type, config.optimizer.params)
            findings.ignored += optimizer.ignored
    except ConfigError as error:
        findings.problems += error.problems
    try:
        if config.scheduler is not None:
            plan = plan_scheduler(config.scheduler.type, config.scheduler.params, optimizer)
            findings.ignored += plan.ignored
    except ConfigError as error:
        findings.problems += error.problems
