"""The end of a window: what all ranks must know, and agree on, before the optimizer may step."""

from __future__ import annotations

import math

import torch

from zerotrain.job import Job
from zerotrain.window import Window
from zerotrain.zero import report


def agree(job: Job, window: Window, norm_order: float, failures: int) -> report.Report:
    """Attach the window's gradients to the optimizer, and put together what all ranks must know about them.

    `failures`: checkpoints that could not be written in the background here. Raises RankMismatchError where the ranks have
    not made the same calls.
    """
    optimizer, model, replicas = job.sharded_optimizer, job.model, job.mesh.dp_replicate
    assert optimizer is not None
    trainable = [b.gradients for unit in model.units for b in unit.trainable if b.gradients is not None]
    flags = [touched for gradients in trainable for touched in gradients.touched]
    local = report.Local(
        power_sum=report.power_sum(optimizer.segments, norm_order),
        tokens=float(window.tokens),
        counted=window.counted,
        micro_batches=window.micro_batches,
        losses=float(window.losses),
        losses_counted=window.backwards,
        backwards=model.backwards_since_step,
        untouched=flags.count(False),
        changed_buffers=job.buffers.changed(),
        failures=failures,
        signature=job.signature(),
    )
    seen = report.exchange(job.world, local, norm_order, replicas)
    if seen.untouched:
        mine = torch.tensor(flags, dtype=torch.uint8, device=job.world.device)
        shared = report.union(job.world, mine, "gradients").tolist()
        for gradients in trainable:
            gradients.touched = [bool(flag) for flag in shared[: len(gradients.touched)]]
            shared = shared[len(gradients.touched) :]
    optimizer.attach_gradients()
    if not math.isfinite(seen.norm) and report.first_not_finite(job.world, optimizer.segments, job.names) is None:
        # the squares overflowed, not the gradients
        exact = report.power_sum(optimizer.segments, norm_order, exact=True)
        seen = report.exchange(job.world, local.with_power_sum(exact), norm_order, replicas)
    return seen


def reason_to_skip(job: Job, divisor: float) -> str:
    """Why a step whose norm is not finite is skipped: what to tell the user. Every rank must call this."""
    assert job.sharded_optimizer is not None
    if not divisor:
        return "the window holds no tokens on any rank"
    name = report.first_not_finite(job.world, job.sharded_optimizer.segments, job.names)
    return f"the gradient of parameter '{name}' is not finite (the first of those that are not)"
