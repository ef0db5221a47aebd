"""The oracle: one process, plain torch, the whole global batch; and the same job trained by zerotrain's workers.

A ``Job`` says what to train. ``oracle(job)`` trains it without zerotrain, ``trained(job)`` with it on ``job.world``
forked ranks, and ``check(job)`` compares the two: losses, gradient norms before clipping, learning rates and the
final weights of every parameter, and that every rank ended with the very same values.

In bf16 (and fp16) the oracle keeps fp32 master weights: each micro batch of each rank runs forward and backward through
a bf16 copy, and the bf16 gradients are summed in fp32. In fp16 the loss is scaled, by a constant.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from harness import run

RTOL, ATOL = 1e-5, 1e-6
# bf16 rounding of a master weight that differs in its last fp32 bit may fall the other way, which moves single
# gradients by up to one bf16 step (2**-8); Adam turns that into at most lr * 2**-8 per step and weight.
BF16_RTOL, BF16_ATOL = 1e-4, 5e-5

Optimize = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """With an eps that keeps Adam from turning the rounding noise of a gradient near zero into a step."""
    return torch.optim.AdamW(parameters, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1, eps=1e-5)


def warmup(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, 0.25 * (step + 1)))


@dataclass(frozen=True)
class Job:
    """``build`` makes the model (under a fixed seed), ``batch(step, rows)`` the global batch of an optimizer step."""

    build: Callable[[], nn.Module]
    batch: Callable[[int, int], tuple[Tensor, ...]]
    stage: int = 0
    world: int = 2
    accumulation: int = 1
    micro: int = 2
    steps: int = 3
    clip: float = 0.0
    norm_type: float = 2.0
    dtype: torch.dtype = torch.float32
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = lambda model: adamw(model.parameters())
    scheduler: Callable[[torch.optim.Optimizer], Any] | None = warmup
    zero: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)

    @property
    def rows(self) -> int:
        return self.micro * self.accumulation * self.world

    def model(self) -> nn.Module:
        torch.manual_seed(7)
        return self.build()

    def piece(self, step: int, micro: int, rank: int) -> tuple[Tensor, ...]:
        """The rows of the global batch that ``rank`` takes in its micro batch number ``micro``."""
        start = (micro * self.world + rank) * self.micro
        return tuple(part[start : start + self.micro] for part in self.batch(step, self.rows))

    def json(self) -> dict[str, Any]:
        """The job file."""
        made: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": self.micro,
            "gradient_accumulation_steps": self.accumulation,
            "gradient_clipping": self.clip,
            "zero_optimization": {"stage": self.stage, "unit_min_elements": 1, **self.zero},
            "steps_per_print": None,
        }
        if self.norm_type != 2.0:
            made["gradient_clipping_norm_type"] = "inf" if math.isinf(self.norm_type) else self.norm_type
        if self.dtype is torch.bfloat16:
            made["bf16"] = {"enabled": True}
        return {**made, **self.config}


@dataclass
class Record:
    """What a training run did: one entry a step, and the weights by name at the end."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    lrs: list[list[float]] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)


def grad_norm(gradients: Iterable[Tensor], norm_type: float) -> float:
    """The norm over all gradients together, in fp64."""
    flat = torch.cat([gradient.detach().double().flatten() for gradient in gradients])
    return float(torch.linalg.vector_norm(flat, norm_type))


def oracle(job: Job) -> Record:
    """Trains in one process of its own, so that autograd never wakes up in the process that forks."""
    record: Record = run(1, lambda rank: _oracle(job), group=False)[0]
    return record


def _oracle(job: Job) -> Record:
    model = job.model()
    optimizer = job.optimizer(model)
    scheduler = job.scheduler(optimizer) if job.scheduler else None
    record = Record()
    for step in range(job.steps):
        optimizer.zero_grad()
        if job.dtype is torch.float32:
            loss = model(*job.batch(step, job.rows))
            loss.backward()
            record.losses.append(float(loss.detach()))
        else:
            record.losses.append(_low_precision_gradients(job, model, step))
        trained = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        record.norms.append(grad_norm((p.grad for p in trained), job.norm_type))
        if job.clip:
            torch.nn.utils.clip_grad_norm_(trained, job.clip, job.norm_type)
        record.lrs.append([float(group["lr"]) for group in optimizer.param_groups])
        optimizer.step()
        if scheduler:
            scheduler.step()
    record.weights = weights_of(model, job.dtype)
    return record


def weights_of(model: nn.Module, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Copies by every name, so that tied parameters appear twice.

    A frozen parameter has no master weight: in a low precision ``dtype`` it is what rounding to that left of it.
    """

    def copied(p: nn.Parameter) -> Tensor:
        frozen = not p.requires_grad and dtype is not torch.float32
        return p.detach().to(dtype).to(p.dtype) if frozen else p.detach().clone()

    return {name: copied(p) for name, p in model.named_parameters(remove_duplicate=False)}


def _low_precision_gradients(job: Job, model: nn.Module, step: int) -> float:
    """Leaves the mean gradient of the window in the fp32 model's ``grad``, and returns the mean loss."""
    low = copy.deepcopy(model).to(job.dtype)
    pieces = job.accumulation * job.world
    scale = job.config.get("fp16", {}).get("loss_scale", 1)
    total = 0.0
    for micro in range(job.accumulation):
        for rank in range(job.world):
            low.zero_grad()
            inputs = (x.to(job.dtype) if x.is_floating_point() else x for x in job.piece(step, micro, rank))
            loss = low(*inputs)
            (loss * scale).backward()
            total += float(loss.detach()) / pieces
            for master, copied in zip(model.parameters(), low.parameters(), strict=True):
                if copied.grad is not None:
                    gradient = copied.grad.float() / scale
                    master.grad = gradient if master.grad is None else master.grad + gradient
    for master in model.parameters():
        if master.grad is not None:
            master.grad /= pieces
    return total


# ------------------------------------------------------------------------------------------------- with zerotrain


def start(job: Job, model: nn.Module | None = None, **extra: Any) -> Any:
    """The engine for ``job`` on this rank: the user's optimizer and scheduler, the job's config."""
    import zerotrain

    model = job.model() if model is None else model
    optimizer = job.optimizer(model)
    engine, _, _, _ = zerotrain.initialize(
        model=model,
        optimizer=optimizer,
        lr_scheduler=job.scheduler(optimizer) if job.scheduler else None,
        config=job.json(),
        **extra,
    )
    return engine


def train_on_rank(job: Job, rank: int, engine: Any = None) -> Record:
    """The job's training loop on one rank; losses are this rank's own means."""
    engine = start(job) if engine is None else engine
    record = Record()
    for step in range(job.steps):
        mean = 0.0
        for micro in range(job.accumulation):
            loss = engine(*job.piece(step, micro, rank))
            engine.backward(loss)
            lrs = engine.get_lr()
            updated = engine.step()
            assert updated == (micro == job.accumulation - 1), f"step() said {updated} in micro batch {micro}"
            mean += float(loss.detach()) / job.accumulation
        record.losses.append(mean)
        record.norms.append(engine.get_global_grad_norm())
        record.lrs.append(lrs)
    assert engine.global_steps == job.steps
    assert engine.skipped_steps == 0
    record.weights = full_weights(engine.module)
    return record


def full_weights(model: nn.Module) -> dict[str, Tensor]:
    """The true (master) value of every parameter, by every name."""
    import zerotrain

    return {
        name: zerotrain.full_parameter(p).detach().clone() for name, p in model.named_parameters(remove_duplicate=False)
    }


def merge(records: list[Record]) -> Record:
    """One record of all ranks: mean losses; the rest must be the very same on every rank."""
    first = records[0]
    for rank, other in enumerate(records[1:], start=1):
        assert other.norms == first.norms, f"rank {rank} has other gradient norms: {other.norms} and {first.norms}"
        assert other.lrs == first.lrs, f"rank {rank} has other learning rates: {other.lrs} and {first.lrs}"
        assert list(other.weights) == list(first.weights)
        for name, value in first.weights.items():
            assert torch.equal(other.weights[name], value), f"{name} differs between rank 0 and rank {rank}"
    losses = [math.fsum(step) / len(records) for step in zip(*(record.losses for record in records), strict=True)]
    return Record(losses, first.norms, first.lrs, first.weights)


def trained(job: Job) -> Record:
    """The job trained by zerotrain on forked ranks."""
    return merge(run(job.world, lambda rank: train_on_rank(job, rank)))


def assert_equal_to_oracle(got: Record, want: Record, rtol: float = RTOL, atol: float = ATOL) -> None:
    """Weights first: a wrong weight says where to look."""
    assert list(got.weights) == list(want.weights)
    for name, value in want.weights.items():
        assert got.weights[name].shape == value.shape, f"{name} is {tuple(got.weights[name].shape)}"
        torch.testing.assert_close(
            got.weights[name].float(), value, rtol=rtol, atol=atol, msg=lambda text, name=name: f"{name}: {text}"
        )
    for what in ("losses", "norms", "lrs"):
        torch.testing.assert_close(
            torch.tensor(getattr(got, what), dtype=torch.float64),
            torch.tensor(getattr(want, what), dtype=torch.float64),
            rtol=rtol,
            atol=atol,
            msg=lambda text, what=what: f"{what}: {text}\ngot {getattr(got, what)}\nwant {getattr(want, what)}",
        )


def check(job: Job) -> Record:
    """Trains ``job`` both ways and compares; returns zerotrain's record."""
    got = trained(job)
    tolerance = (RTOL, ATOL) if job.dtype is torch.float32 else (BF16_RTOL, BF16_ATOL)
    assert_equal_to_oracle(got, oracle(job), *tolerance)
    return got
