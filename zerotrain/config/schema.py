"""The job file as frozen, typed values. Every key, its meaning, its unit and its default are written here, once."""

from __future__ import annotations

import hashlib
import json
from typing import Annotated, Any, Literal

from pydantic import Field, PrivateAttr

from zerotrain.config.batch import BatchSizes, resolve_batch
from zerotrain.config.values import Finite, Names, Natural, NormOrder, Positive, ScalePower, Section, Seed, Size, Stage

_WITHOUT_MEANING = frozenset({"steps_per_print", "mismatch_timeout"})


class OptimizerConfig(Section):
    """Which optimizer to build, where the caller brings none."""

    type: str
    """Name of the optimizer, in any case: `AdamW`, `Adam` (decoupled weight decay unless `adam_w_mode` is false, as in
    DeepSpeed), `SGD`, or another element-wise class of `torch.optim`."""

    params: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the optimizer by the names of its torch class (`lr`, `betas`, `eps`, `weight_decay`, ...); what is
    left out has torch's default. `fused` is on wherever the class has it."""


class SchedulerConfig(Section):
    """Which learning rate scheduler to build, where the caller brings none; it advances once per optimizer step."""

    type: str
    """Name of the scheduler, in any case: `WarmupLR`, `WarmupDecayLR`, `WarmupCosineLR`, `OneCycle`, `LRRangeTest`, or
    a class of `torch.optim.lr_scheduler`."""

    params: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the scheduler by name; the five DeepSpeed types have a table each below."""


class BF16Config(Section):
    """Computing in bfloat16, with fp32 master weights and fp32 gradient accumulation."""

    enabled: bool = False
    """Whether forward and backward compute in bfloat16."""

    fp32_parameters: Names = ()
    """Patterns (`*` and `?`) of names of parameters that stay fp32 in the model; for example `["*norm*"]`."""


class FP16Config(Section):
    """Computing in float16, with fp32 master weights and a loss scale."""

    enabled: bool = False
    """Whether forward and backward compute in float16."""

    loss_scale: Annotated[Finite, Field(ge=0)] = 0.0
    """Factor on the loss before backward; 0 finds it while training (dynamic loss scale)."""

    initial_scale_power: ScalePower = 16
    """The dynamic loss scale starts at 2 to this power."""

    loss_scale_window: Positive = 1000
    """Optimizer steps without overflow after which the dynamic loss scale doubles."""

    hysteresis: Positive = 2
    """Overflows that are tolerated before the dynamic loss scale is halved."""

    consecutive_hysteresis: bool = False
    """Whether every step without overflow refills the tolerance of `hysteresis`."""

    min_loss_scale: Annotated[Finite, Field(gt=0)] = 1.0
    """The dynamic loss scale does not fall below this."""

    fp32_parameters: Names = ()
    """Patterns (`*` and `?`) of names of parameters that stay fp32 in the model; for example `["*norm*"]`."""


class ZeroConfig(Section):
    """What is sharded, and how units of parameters are cut and moved."""

    stage: Stage = 0
    """What each rank holds only its share of: 0 nothing, 1 optimizer states, 2 also gradients, 3 also parameters."""

    shard_group_size: Positive | None = None
    """Ranks that share one set of shards; replicas of it run across these groups (hybrid sharding). Must divide the
    number of ranks; null shards over all of them."""

    reduce_bucket_size: Positive = 500_000_000
    """Elements; upper bound of a unit that is merged from smaller modules, hence of one gradient reduction."""

    unit_min_elements: Natural = 1_000_000
    """Elements; neighbouring modules smaller than this are merged into one unit, up to `reduce_bucket_size`."""

    units: Names = ()
    """Patterns (`*` and `?`) of module paths that form one unit each, for example `["blocks.*"]`; empty finds the
    units from the module tree."""

    overlap_comm: bool = True
    """Whether communication runs beside computation; false does one after the other."""

    reshard_after_forward: bool = True
    """Stage 3: whether a unit is released after its forward and gathered again for backward; false keeps it, trading
    memory for a third of the communication."""

    stage3_prefetch_bucket_size: Natural = 50_000_000
    """Stage 3: elements gathered ahead of use; 0 gathers each unit when it is reached."""


class ActivationCheckpointingConfig(Section):
    """Computing activations of blocks again in the backward pass, in place of keeping them (torch's non-reentrant
    checkpoint)."""

    enabled: bool = False
    """Whether blocks are recomputed."""

    every: Positive = 1
    """Recompute every so many-th of the chosen blocks, beginning with the first; the others keep their activations."""

    modules: Names = ()
    """Patterns (`*` and `?`) of module paths to recompute, for example `["blocks.*"]`; empty takes the model's repeated
    blocks."""

    policy: Literal["full", "save_matmuls"] = "full"
    """What is computed again: everything, or (`save_matmuls`) all but matrix products, convolutions and attention, whose
    results are kept."""

    offload: Literal["none", "cpu"] = "none"
    """Where the inputs of recomputed blocks wait for the backward pass: on the device, or in host memory. Without effect
    where the device is the CPU."""

    offload_bytes: Size | None = None
    """Most bytes of host memory that they may take, per rank; what does not fit stays on the device. null: no bound."""


class CheckpointConfig(Section):
    """Where checkpoints go, how they are written, and which of them are kept."""

    directory: str | None = None
    """Folder of the job's checkpoints, for `save_checkpoint` and `load_checkpoint` calls that name none."""

    resume: Literal["auto"] | None = None
    """`"auto"`: `initialize` continues from the newest good checkpoint in `directory`, if there is one."""

    async_: bool = Field(default=False, alias="async")
    """Whether checkpoints are written in the background, from a copy of the states in host memory; training stands still
    only while that is made."""

    if_busy: Literal["wait", "refuse"] = "wait"
    """What a save does while the one before is still being written in the background: `wait`, or `refuse` with an error."""

    keep_last: Positive | None = None
    """Checkpoints kept: the newest so many with default tags; null keeps all. Those with tags of your own always stay."""

    keep_every: Positive | None = None
    """Checkpoints after a multiple of so many optimizer steps are kept as well; needs `keep_last`."""

    max_shard_size: Size = 5_000_000_000
    """Most bytes of tensors in one file: a number, or text such as `"5GB"` (10^9) or `"512MiB"` (2^20)."""

    shared_filesystem: bool | None = None
    """Whether all ranks see the same folder; false has each node write a folder of its own (see `zerotrain merge`). null
    tries it out at the first save."""

    verify: bool | None = None
    """Whether a load checks every checksum first. null does so where another machine wrote the checkpoint."""


class Config(Section):
    """A whole training job. Made by `load_config`, which checks what one field alone cannot show."""

    train_batch_size: Positive | None = None
    """Samples per optimizer step, over all ranks: `train_micro_batch_size_per_gpu` x `gradient_accumulation_steps` x
    number of data-parallel ranks. Any two of the three give the third."""

    train_micro_batch_size_per_gpu: Positive | None = None
    """Samples per rank and forward. Follows from the other two; 1 where nothing decides it."""

    gradient_accumulation_steps: Positive | None = None
    """Micro batches per optimizer step. Follows from the other two; 1 where nothing decides it."""

    optimizer: OptimizerConfig | None = None
    """The optimizer to build; null where the caller passes one."""

    scheduler: SchedulerConfig | None = None
    """The learning rate scheduler to build; null keeps the learning rate, unless the caller passes one."""

    gradient_clipping: Annotated[Finite, Field(ge=0)] = 0.0
    """Largest norm of the whole gradient; larger ones are scaled down to it. 0 does not clip."""

    gradient_clipping_norm_type: NormOrder = 2.0
    """Order of that norm: a number above 0, or `"inf"` for the largest absolute entry."""

    bf16: BF16Config = BF16Config()
    """Computing in bfloat16."""

    fp16: FP16Config = FP16Config()
    """Computing in float16."""

    zero_optimization: ZeroConfig = ZeroConfig()
    """Sharding of the model's states."""

    activation_checkpointing: ActivationCheckpointingConfig = ActivationCheckpointingConfig()
    """Recomputation of activations."""

    checkpoint: CheckpointConfig = CheckpointConfig()
    """Saving and resuming."""

    communication_data_type: Literal["fp32", "bf16", "fp16"] | None = None
    """Type of gradients on the wire: `fp32`, `bf16` or `fp16`; null sends them in the type they are computed in."""

    zero_allow_untested_optimizer: bool = False
    """Skip the check that an optimizer passed by the caller is element-wise, so that it may be given shards."""

    steps_per_print: Positive | None = 10
    """Optimizer steps between log lines on rank 0; null logs none."""

    seed: Seed | None = None
    """Seed of the random numbers; each rank adds its rank, so that dropout differs. null leaves them alone."""

    dataloader_drop_last: bool = False
    """Whether the loader drops a last batch that is not full."""

    mismatch_timeout: Annotated[Finite, Field(gt=0)] = 5.0
    """Seconds that a collective may wait before the ranks compare what they are doing."""

    _ignored_keys: tuple[str, ...] = PrivateAttr(default=())

    @property
    def ignored_keys(self) -> tuple[str, ...]:
        """Paths of keys in the file that were accepted and have no effect here, in the order of the file."""
        return self._ignored_keys

    def batch(self, world_size: int) -> BatchSizes:
        """The three batch sizes for ``world_size`` data-parallel ranks.

        Any two keys give the third. One alone: accumulation defaults to 1, the rest follows from the one given; the
        micro batch is 1 where nothing decides it. Raises ConfigError, with the arithmetic, where they do not fit.
        """
        return resolve_batch(
            self.train_batch_size, self.train_micro_batch_size_per_gpu, self.gradient_accumulation_steps, world_size
        )

    def dump(self) -> dict[str, Any]:
        """Every key with its value, as JSON types; `load_config` of it gives an equal config."""
        return self.model_dump(mode="json", by_alias=True)

    def meaning(self) -> dict[str, Any]:
        """`dump()` without the keys that do not bear on what is computed; ranks must agree on this."""
        values = {key: value for key, value in self.dump().items() if key not in _WITHOUT_MEANING}
        del values["checkpoint"]["directory"]  # nodes may keep them in different places
        return values

    def fingerprint(self) -> str:
        """Hash (64 hex digits) of `meaning()`: equal on two ranks exactly if they train the same job."""
        return hashlib.sha256(_canonical(self.meaning()).encode()).hexdigest()


def differences(a: Any, b: Any, path: str = "") -> list[str]:
    """Where two configs, or two dumps of them, differ: ``zero_optimization.stage: 2 != 3``; empty when they agree.

    A key that only one side has is reported as ``absent`` on the other.
    """
    left, right = (value.meaning() if isinstance(value, Config) else value for value in (a, b))
    if not (isinstance(left, dict) and isinstance(right, dict)):
        return [] if _canonical(left) == _canonical(right) else [f"{path}: {json.dumps(left)} != {json.dumps(right)}"]
    lines: list[str] = []
    for key in [*left, *(key for key in right if key not in left)]:
        below = f"{path}.{key}" if path else str(key)
        if key in left and key in right:
            lines += differences(left[key], right[key], below)
        else:
            sides = (json.dumps(side[key]) if key in side else "absent" for side in (left, right))
            lines.append(f"{below}: {' != '.join(sides)}")
    return lines


def _canonical(value: Any) -> str:
    return json.dumps(_merge_numbers(value), sort_keys=True)


def _merge_numbers(value: Any) -> Any:
    # 1 and 1.0 train alike, while true is another thing than 1: compare JSON text in which whole floats are ints.
    if isinstance(value, dict):
        return {key: _merge_numbers(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_merge_numbers(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value
