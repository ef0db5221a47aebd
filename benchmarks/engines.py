"""The engines that are compared, each as a function from a model to `step(micro_batches) -> loss`.

Every one uses fused AdamW and the settings that its documentation recommends: gradient buckets as views for DDP, one
unit per block for FSDP2, no communication in all micro batches but the last for those that can.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

Batch = tuple[Tensor, Tensor]
Step = Callable[[Sequence[Batch]], float]
LR = 1e-4


@dataclass(frozen=True)
class Options:
    bf16: bool = False
    accumulation: int = 1


def fused_adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=LR, fused=True)


def plain_loop(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    options: Options,
    local: Callable[[], Any] = contextlib.nullcontext,
    autocast: bool = True,
) -> Step:
    """The usual loop; `local` is the context for micro batches whose gradients need not be reduced yet."""

    def step(micro_batches: Sequence[Batch]) -> float:
        total = 0.0
        for index, (tokens, targets) in enumerate(micro_batches):
            last = index == len(micro_batches) - 1
            with contextlib.nullcontext() if last else local():
                with torch.autocast("cpu", torch.bfloat16, enabled=options.bf16 and autocast):
                    loss = model(tokens, targets) / len(micro_batches)
                loss.backward()
            total += float(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        return total

    return step


def floor(model: nn.Module, options: Options) -> Step:
    """The same computation on every rank, without any communication."""
    return plain_loop(model, fused_adamw(model), options)


def ddp(model: nn.Module, options: Options) -> Step:
    wrapped = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    return plain_loop(wrapped, fused_adamw(model), options, wrapped.no_sync)


def ddp_zero1(model: nn.Module, options: Options) -> Step:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    wrapped = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), optimizer_class=torch.optim.AdamW, lr=LR, fused=True, parameters_as_bucket_view=True
    )
    return plain_loop(wrapped, optimizer, options, wrapped.no_sync)


def fsdp2(reshard: bool) -> Callable[[nn.Module, Options], Step]:
    def make(model: nn.Module, options: Options) -> Step:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        settings: dict[str, Any] = {"mesh": mesh, "reshard_after_forward": reshard}
        if options.bf16:
            settings["mp_policy"] = half
        for block in getattr(model, "blocks", []):
            fully_shard(block, **settings)
        fully_shard(model, **settings)

        @contextlib.contextmanager
        def local() -> Any:
            model.set_requires_gradient_sync(False)  # type: ignore[operator]
            yield
            model.set_requires_gradient_sync(True)  # type: ignore[operator]

        return plain_loop(model, fused_adamw(model), options, local, autocast=False)

    return make


def deepspeed(stage: int) -> Callable[[nn.Module, Options], Step]:
    def make(model: nn.Module, options: Options) -> Step:
        import deepspeed as ds  # type: ignore[import-not-found]

        ds.init_distributed(dist_backend="gloo")
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": options.accumulation,
            "bf16": {"enabled": options.bf16},
            "zero_optimization": {"stage": stage},
            "zero_allow_untested_optimizer": True,
        }
        engine, *_ = ds.initialize(model=model, optimizer=fused_adamw(model), config=config)
        return _engine_loop(engine)

    return make


def zerotrain(stage: int, **zero: Any) -> Callable[[nn.Module, Options], Step]:
    def make(model: nn.Module, options: Options) -> Step:
        import zerotrain as zt

        config = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": options.accumulation,
            "bf16": {"enabled": options.bf16},
            "zero_optimization": {"stage": stage, **zero},
            "steps_per_print": None,
        }
        engine, *_ = zt.initialize(model=model, optimizer=fused_adamw(model), config=config)
        return _engine_loop(engine)

    return make


def _engine_loop(engine: Any) -> Step:
    def step(micro_batches: Sequence[Batch]) -> float:
        total = 0.0
        for tokens, targets in micro_batches:
            loss = engine(tokens, targets)
            engine.backward(loss)
            engine.step()
            total += float(loss.detach()) / len(micro_batches)
        return total

    return step


ENGINES: dict[str, Callable[[nn.Module, Options], Step]] = {
    "floor": floor,
    "ddp": ddp,
    "ddp_zero1": ddp_zero1,
    "fsdp2_keep": fsdp2(reshard=False),
    "fsdp2_reshard": fsdp2(reshard=True),
    "deepspeed1": deepspeed(1),
    "deepspeed2": deepspeed(2),
    "deepspeed3": deepspeed(3),
    "zero0": zerotrain(0),
    "zero1": zerotrain(1),
    "zero2": zerotrain(2),
    "zero3": zerotrain(3),
    "zero3_keep": zerotrain(3, reshard_after_forward=False),
}
