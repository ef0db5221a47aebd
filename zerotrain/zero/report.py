"""What all ranks must know before a step, exchanged as one short row per rank: norm, overflow, counts, agreement."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from zerotrain.comm import Channel
from zerotrain.errors import RankMismatchError
from zerotrain.zero.optimizer import Segment


@dataclass(frozen=True)
class Local:
    """One rank's row. Sums and counts are over the open window."""

    power_sum: float
    """Sum of |g|^p over this rank's gradients, or their largest for p = inf; of sums, before averaging."""
    tokens: float
    counted: bool
    """Whether the window's losses came with token counts."""
    micro_batches: int
    losses: float
    losses_counted: int
    backwards: int
    untouched: int
    """Parameters without a gradient here."""
    changed_buffers: int
    failures: int
    """Checkpoints that could not be written in the background, and have not been reported."""
    signature: int
    """Hash of every collective entered so far."""

    def with_power_sum(self, power_sum: float) -> Local:
        """The same row with another sum of powers."""
        return replace(self, power_sum=power_sum)


@dataclass(frozen=True)
class Report:
    """The ranks' rows, put together: the same values on every rank."""

    norm: float
    """Global p-norm of the summed gradients; not finite where some gradient is not."""
    tokens: float
    counted: bool
    micro_batches: int
    mean_loss: float
    untouched: bool
    changed_buffers: bool
    failures: bool


def power_sum(segments: Sequence[Segment], p: float, exact: bool = False) -> float:
    """Sum of |g|^p over the segments' gradients, or their largest |g| for p = inf.

    `exact` works in fp64 throughout: large but finite fp32 gradients overflow when they are squared.
    """
    grads = [grad for grad in (s.gradient() for s in segments) if grad is not None]
    if not grads:
        return 0.0
    found = torch._foreach_norm(grads, p, dtype=torch.float64 if exact else None)
    norms = torch.stack([norm.double() for norm in found])
    return float(norms.max() if math.isinf(p) else (norms**p).sum())


def exchange(channel: Channel, local: Local, p: float, replicas: int) -> Report:
    """Put the rows of all ranks of `channel` together. Every shard is counted once, though `replicas` ranks hold it.

    Raises RankMismatchError, on every rank, where the ranks have not made the same calls.
    """
    row = torch.tensor(
        [
            local.power_sum,
            local.tokens,
            local.counted,
            local.micro_batches,
            local.losses,
            local.losses_counted,
            local.backwards,
            local.untouched,
            local.changed_buffers,
            local.failures,
            local.signature,
        ],
        dtype=torch.float64,
        device=channel.device,
    )
    rows = channel.exchange(row, "step report").cpu()
    powers, tokens, counted, micro, losses, passes, backwards, untouched, changed, failures, signatures = rows.T
    _agree("token counts given to backward", counted)
    _agree("micro batches in the accumulation window", micro)
    _agree("backward passes in the accumulation window", backwards)
    _agree("the sequence of collectives (forward, backward and access calls)", signatures)
    total = float(powers.max() if math.isinf(p) else powers.sum() / replicas)
    norm = total if math.isinf(p) or not math.isfinite(total) else total ** (1 / p)
    if bool(powers.isnan().any()):
        norm = math.nan
    terms = float(tokens.sum() if local.counted else passes.sum())
    return Report(
        norm=norm,
        tokens=float(tokens.sum()),
        counted=local.counted,
        micro_batches=local.micro_batches,
        mean_loss=float(losses.sum()) / terms if terms else math.nan,
        untouched=bool(untouched.any()),
        changed_buffers=bool(changed.any()),
        failures=bool(failures.any()),
    )


def _agree(what: str, values: torch.Tensor) -> None:
    if bool((values != values[0]).any()):
        listed = ", ".join(f"rank {rank}: {int(value)}" for rank, value in enumerate(values.tolist()))
        raise RankMismatchError(
            f"the ranks disagree about {what} ({listed}). Every rank must make the same calls in the same order"
        )


def union(channel: Channel, flags: torch.Tensor, label: str) -> torch.Tensor:
    """For each of the uint8 `flags` (1-d), whether any rank has it set."""
    return channel.exchange(flags, label).amax(dim=0)


def first_not_finite(channel: Channel, segments: Sequence[Segment], places: Sequence[str]) -> str | None:
    """The first parameter, in the order of the names `places`, with a gradient that is not finite on some rank."""
    order = {name: place for place, name in enumerate(places)}
    first = len(places)
    for segment in segments:
        grad = segment.gradient()
        if grad is None or bool(torch.isfinite(grad).all()):
            continue
        for fragment in segment.fragments:
            low = fragment.offset - segment.start
            if not bool(torch.isfinite(grad[low : low + fragment.numel]).all()):
                first = min(first, order[fragment.name])
    found = int(channel.exchange(torch.tensor([first], dtype=torch.int64, device=channel.device), "overflow").min())
    return places[found] if found < len(places) else None
