"""Setting a job up: from what the user passes to `initialize` to everything that an engine drives.

Errors that only one rank meets are exchanged first, so that every rank raises and none waits for the others.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from zerotrain import runtime
from zerotrain.comm import Channel, Traffic, Watch
from zerotrain.config import BatchSizes, Config, ConfigError, differences, load_config
from zerotrain.data import build_loader
from zerotrain.errors import RankMismatchError, ZerotrainError
from zerotrain.mesh import ProcessMesh
from zerotrain.optim import build_optimizer, build_scheduler
from zerotrain.zero.buffers import ModuleBuffers
from zerotrain.zero.build import BuildOptions, build_units, check_model
from zerotrain.zero.discover import aliases
from zerotrain.zero.elementwise import refusal
from zerotrain.zero.gradients import Partition
from zerotrain.zero.loss_scale import LossScale
from zerotrain.zero.optimizer import ShardedOptimizer
from zerotrain.zero.recompute import Recomputed, RecomputeOptions, install
from zerotrain.zero.schedule import GatherSchedule, Sync
from zerotrain.zero.sharded import ShardedModel
from zerotrain.zero.stages import STAGES

logger = logging.getLogger("zerotrain")
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_engines = itertools.count()


@dataclass(frozen=True)
class Request:
    """The arguments of `initialize`, as the user gave them."""

    model: nn.Module
    optimizer: torch.optim.Optimizer | Callable[[Any], torch.optim.Optimizer] | None
    model_parameters: Iterable[Any] | None
    training_data: Any
    lr_scheduler: Any
    collate_fn: Callable[[list[Any]], Any] | None
    config: Any


@dataclass
class Job:
    """Everything that one engine drives."""

    config: Config
    batch: BatchSizes
    mesh: ProcessMesh
    device: torch.device
    module: nn.Module
    traffic: Traffic
    watch: Watch
    channels: Channels
    model: ShardedModel
    sharded_optimizer: ShardedOptimizer | None
    optimizer: torch.optim.Optimizer | None
    lr_scheduler: Any
    loader: Any
    buffers: ModuleBuffers
    compute_dtype: torch.dtype | None
    loss_scale: LossScale
    options: BuildOptions
    names: list[str] = field(default_factory=list)
    """Every parameter's name, in the order of the model."""
    recomputed: list[Recomputed] = field(default_factory=list)
    """The blocks that compute their activations again."""

    @property
    def world(self) -> Channel:
        """The channel among all ranks."""
        return self.channels.world

    def signature(self) -> int:
        """Hash of the collectives entered so far on all channels; equal on ranks that made the same calls."""
        return self.channels.world.signature ^ self.channels.gather.signature ^ self.channels.reduce.signature

    def held_bytes(self) -> dict[str, int]:
        """Bytes of live storages on this rank, by kind of state; memory shared between kinds counts for the first."""
        kinds = dict.fromkeys(("parameters", "master", "gradients", "optimizer"), 0)
        seen: set[int] = set()

        def count(kind: str, tensor: torch.Tensor) -> None:
            storage = tensor.untyped_storage()
            if storage._cdata not in seen:
                seen.add(storage._cdata)
                kinds[kind] += storage.nbytes()

        for unit in self.model.units:
            for buffer in unit.buffers:
                for kind, tensor in buffer.tensors():
                    count(kind, tensor)
        for tensor in self.sharded_optimizer.tensors() if self.sharded_optimizer is not None else ():
            count("optimizer", tensor)
        return kinds

    def close(self) -> None:
        """Detach from the model, release what is held, and end the groups. Idempotent."""
        self.model.close()
        for block in self.recomputed:
            block.remove()
        if self.sharded_optimizer is not None:
            self.sharded_optimizer.close()
            self.sharded_optimizer = None
        self.watch.stop()
        self.channels.close()


@dataclass
class Channels:
    """The process groups of one engine: gathers, reductions, replicas, and control messages among all ranks."""

    world: Channel
    gather: Channel
    reduce: Channel
    replicate: Channel

    @classmethod
    def open(cls, mesh: ProcessMesh, traffic: Traffic, watch: Watch) -> Channels:
        """Every rank of the job must call this."""

        def channel(name: str, groups: list[list[int]]) -> Channel:
            ranks, group = mesh.new_group(groups)
            return Channel(name, ranks, traffic, watch, group)

        # Control messages use the job's own group: no set-up is needed before ranks can be told of each other's errors,
        # and a rank that has ended is noticed at once.
        world = Channel("control", range(mesh.world_size), traffic, watch)
        world.exchange_object(mesh, "start of an engine")
        return cls(
            world=world,
            gather=channel("gather", mesh.shard_groups()),
            reduce=channel("reduce", mesh.shard_groups()),
            replicate=channel("replicate", mesh.replicate_groups()),
        )

    def close(self) -> None:
        """End the groups that were made for this engine."""
        for channel in (self.gather, self.reduce, self.replicate):
            group, channel.group = channel.group, None
            if group is not None and dist.is_initialized():
                dist.destroy_process_group(group)


def set_up(request: Request) -> Job:
    """Build a job. The config is checked before any process group exists; see `zerotrain.initialize` for the errors."""
    config = load_config(request.config)
    runtime.show_log()
    rank, world_size = runtime.start_process_group()
    batch = config.batch(world_size)
    policy = STAGES[config.zero_optimization.stage]
    group_size = (config.zero_optimization.shard_group_size or world_size) if policy.shard_optimizer else 1
    try:
        mesh = ProcessMesh.build(world_size, rank, group_size)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    traffic, watch = Traffic(), Watch(f"zerotrain/{next(_engines)}", config.mismatch_timeout)
    watch.start()
    channels = None
    try:
        channels = Channels.open(mesh, traffic, watch)
        return _Builder(request, config, batch, mesh, traffic, watch, channels).build()
    except BaseException:
        watch.stop()
        if channels is not None:
            channels.close()
        raise


@dataclass
class _Builder:
    request: Request
    config: Config
    batch: BatchSizes
    mesh: ProcessMesh
    traffic: Traffic
    watch: Watch
    channels: Channels

    def build(self) -> Job:
        config, model = self.config, self.request.model
        device = runtime.choose_device()
        optimizer = self._agree()
        compute = torch.bfloat16 if config.bf16.enabled else torch.float16 if config.fp16.enabled else None
        names = [name for name, _ in model.named_parameters()]
        options = self._options(device, compute, optimizer)
        recomputed = self._recompute()
        sharded = self._shard(options)
        for buffer in model.buffers():
            buffer.data = buffer.data.to(device)
        buffers = ModuleBuffers(model, self.channels.world)
        sharded_optimizer = ShardedOptimizer(optimizer, sharded) if optimizer is not None else None
        scheduler = self._scheduler(optimizer)
        if config.seed is not None:
            runtime.seed_everything(config.seed, self.mesh.rank)
        if self.mesh.rank == 0 and config.ignored_keys:
            logger.info("these config keys have no effect here: %s", ", ".join(config.ignored_keys))
        return Job(
            config=config, batch=self.batch, mesh=self.mesh, device=device, module=model, traffic=self.traffic,
            watch=self.watch, channels=self.channels, model=sharded, sharded_optimizer=sharded_optimizer,
            optimizer=optimizer, lr_scheduler=scheduler, loader=self._loader(device), buffers=buffers,
            compute_dtype=compute, loss_scale=self._loss_scale(), options=options, names=names, recomputed=recomputed,
        )  # fmt: skip

    # -- agreement ----------------------------------------------------------------------------------------------------

    def _agree(self) -> torch.optim.Optimizer | None:
        """This rank's optimizer, once all ranks have passed their checks and found that they describe the same job."""
        optimizer, error = None, None
        try:
            optimizer = self._optimizer()
            description = self._describe(optimizer)
        except Exception as raised:
            error, description = raised, {"error": f"{type(raised).__name__}: {raised}"}
        everyone = self.channels.world.exchange_object(description, "job description")
        if error is not None:
            raise error
        for rank, other in enumerate(everyone):
            if "error" in other:
                raise RankMismatchError(f"rank {rank} cannot start: {other['error']}")
        for rank, other in enumerate(everyone):
            if other != everyone[0]:
                found = differences(everyone[0], other)
                shown = "; ".join(found[:3]) + (f"; and {len(found) - 3} more" if len(found) > 3 else "")
                raise RankMismatchError(
                    f"rank 0 and rank {rank} were given different jobs (rank 0 != rank {rank}): {shown}"
                )
        return optimizer

    def _describe(self, optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
        model = self.request.model
        parameters = {
            name: f"{tuple(p.shape)} {p.dtype} {'trainable' if p.requires_grad else 'frozen'}"
            for name, p in model.named_parameters(remove_duplicate=False)
        }
        groups = []
        names = {id(p): name for name, p in model.named_parameters()}
        for group in optimizer.param_groups if optimizer is not None else ():
            settings = {k: repr(v) for k, v in group.items() if k != "params"}
            groups.append({**settings, "params": ", ".join(names.get(id(p), "?") for p in group["params"])})
        return {
            "config": self.config.meaning(),
            "model": {"class": type(model).__name__, "parameters": parameters, "tied": _tied(model)},
            "buffers": {name: f"{tuple(b.shape)} {b.dtype}" for name, b in model.named_buffers()},
            "optimizer": {"class": type(optimizer).__name__, "groups": {str(i): g for i, g in enumerate(groups)}},
        }

    # -- parts --------------------------------------------------------------------------------------------------------

    def _optimizer(self) -> torch.optim.Optimizer | None:
        """The user's optimizer, or the one that its factory or the config makes, fit for fragments."""
        request, config = self.request, self.config
        check_model(request.model)
        parameters = (
            list(request.model_parameters) if request.model_parameters is not None else list(request.model.parameters())
        )
        optimizer = request.optimizer
        if optimizer is None and config.optimizer is not None:
            optimizer = build_optimizer(config.optimizer, parameters)
        elif optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
            optimizer = optimizer(parameters)
        if not isinstance(optimizer, torch.optim.Optimizer):
            if optimizer is not None:
                raise ValueError(
                    f"optimizer= must be a torch optimizer or a callable that makes one, not {type(optimizer).__name__}"
                )
            return None
        if not any(p.requires_grad for p in request.model.parameters()):
            raise ValueError(
                "the model has no trainable parameter (requires_grad is False on all of them), so there is nothing to optimize"
            )
        reason = None if config.zero_allow_untested_optimizer else refusal(optimizer)
        if reason is not None:
            raise ValueError(
                f"{reason}. Sharded training steps an optimizer on flat pieces of parameters, so it must be element-wise: "
                "Adam, AdamW, SGD, RMSprop, ... (zero_allow_untested_optimizer: true skips this check)"
            )
        return optimizer

    def _options(
        self, device: torch.device, compute: torch.dtype | None, optimizer: torch.optim.Optimizer | None
    ) -> BuildOptions:
        zero = self.config.zero_optimization
        group_of = {p: i for i, g in enumerate(optimizer.param_groups if optimizer else ()) for p in g["params"]}
        return BuildOptions(
            device=device,
            compute_dtype=compute,
            keep_wide=tuple(self.config.bf16.fp32_parameters) + tuple(self.config.fp16.fp32_parameters),
            units=tuple(zero.units),
            min_elements=zero.unit_min_elements,
            max_elements=zero.reduce_bucket_size,
            group_of=lambda parameter: group_of.get(parameter, len(group_of)),
        )

    def _recompute(self) -> list[Recomputed]:
        config = self.config.activation_checkpointing
        if not config.enabled:
            return []
        options = RecomputeOptions(
            config.every, tuple(config.modules), config.policy, config.offload == "cpu", config.offload_bytes
        )
        return install(self.request.model, options)

    def _shard(self, options: BuildOptions) -> ShardedModel:
        zero, channels = self.config.zero_optimization, self.channels
        wire = self.config.communication_data_type
        plan = Partition(
            policy=STAGES[zero.stage] if self.mesh.dp_shard > 1 else STAGES[0],
            gather=channels.gather,
            reduce=channels.reduce,
            replicate=channels.replicate,
            wire=None if wire is None else _DTYPES[wire],
        )
        units = build_units(self.request.model, plan, channels.world, options)
        ahead = zero.stage3_prefetch_bucket_size if zero.overlap_comm else 0
        gathers = GatherSchedule(units, ahead, zero.reshard_after_forward)
        return ShardedModel(self.request.model, units, plan, gathers, lambda: Sync(reduce=True, final=True))

    def _scheduler(self, optimizer: torch.optim.Optimizer | None) -> Any:
        given = self.request.lr_scheduler
        if optimizer is None:
            return given
        if given is None:
            return build_scheduler(self.config.scheduler, optimizer) if self.config.scheduler is not None else None
        return given if hasattr(given, "step") else given(optimizer)

    def _loader(self, device: torch.device) -> Any:
        request, config = self.request, self.config
        if request.training_data is None:
            return None
        ranks = (self.mesh.rank, self.mesh.world_size)
        return build_loader(
            request.training_data,
            request.collate_fn,
            self.batch.micro,
            device,
            ranks,
            config.dataloader_drop_last,
            config.seed,
        )

    def _loss_scale(self) -> LossScale:
        fp16 = self.config.fp16
        if not fp16.enabled:
            return LossScale()
        dynamic = fp16.loss_scale == 0
        return LossScale(
            scale=2.0**fp16.initial_scale_power if dynamic else fp16.loss_scale,
            dynamic=dynamic,
            window=fp16.loss_scale_window,
            hysteresis=fp16.hysteresis,
            minimum=fp16.min_loss_scale,
            consecutive_hysteresis=fp16.consecutive_hysteresis,
            tolerance=fp16.hysteresis,
        )


def _tied(model: nn.Module) -> Sequence[str]:
    return [" = ".join(names) for names in aliases(model).values() if len(names) > 1]


__all__ = ["Channels", "Job", "Request", "ZerotrainError", "set_up"]
