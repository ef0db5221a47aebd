"""Keys of DeepSpeed's job files that mean something there and nothing, or nothing yet, here.

A key that only tunes how DeepSpeed works inside is accepted and named once as having no effect. A key that would change
the result or the memory of a run is refused where it asks for that, and accepted where it is switched off.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Foreign:
    """One key of DeepSpeed that zerotrain does not act on."""

    asks_for: str = ""
    """What the key asks for when it is on; empty: nothing that could change a result, any value is accepted."""

    neutral: tuple[Any, ...] = ()
    """Values that ask for nothing, besides those that `is_off` recognises."""

    instead: str = ""
    """What to write or do in its place, if anything serves."""

    def refusal(self, value: Any) -> str | None:
        """Why ``value`` cannot be accepted, or None where it can."""
        if not self.asks_for or is_off(value) or any(_same(value, neutral) for neutral in self.neutral):
            return None
        move = self.instead or "remove the key or switch it off"
        return f"asks for {self.asks_for}, which zerotrain does not have; {move}"


def is_off(value: Any) -> bool:
    """Whether ``value`` switches its feature off.

    True for null, false, ``{"enabled": false}``, ``{"device": "none"}``, and an object whose values are all off or 0.
    """
    if not isinstance(value, dict):
        return value is None or value is False
    if "enabled" in value:
        return value["enabled"] is False
    if "device" in value:
        return value["device"] in (None, "none")
    return all(is_off(item) or _same(item, 0) for item in value.values())


def _same(value: Any, neutral: Any) -> bool:
    return isinstance(value, bool) == isinstance(neutral, bool) and bool(value == neutral)


_TUNING = (
    "aio",
    "activation_checkpointing.contiguous_memory_optimization",
    "activation_checkpointing.profile",
    "activation_checkpointing.synchronize_checkpoint_boundary",
    "checkpoint.load_universal",
    "checkpoint.parallel_write",
    "checkpoint.tag_validation",
    "checkpoint.use_node_local_storage",
    "comms_logger",
    "csv_monitor",
    "comet",
    "disable_allgather",
    "disable_python_gc",
    "dump_state",
    "flops_profiler",
    "graph_harvesting",
    "log_level",
    "memory_breakdown",
    "monitor_config",
    "seq_parallel_comm_data_type",
    "seq_parallel_communication_data_type",
    "tensorboard",
    "timers",
    "use_data_before_expert_parallelism",
    "vocabulary_size",
    "wall_clock_breakdown",
    "wandb",
    "zero_force_ds_cpu_optimizer",
    "bf16.check_grad_overflow",
    "bf16.check_overflow",
    "bf16.immediate_grad_update",
    "fp16.auto_cast",
    "fp16.fused_mode",
    "optimizer.legacy_fusion",
)

_ZERO_TUNING = (
    "allgather_bucket_size",
    "allgather_partitions",
    "compute_grad_norm",
    "contiguous_gradients",
    "cpu_offload_use_pin_memory",
    "elastic_checkpoint",
    "enable_sanity_checks",
    "ignore_unused_parameters",
    "leaf_module",
    "legacy_stage1",
    "load_from_fp32_weights",
    "log_trace_cache_warnings",
    "memory_efficient_linear",
    "override_module_apply",
    "parameter_alignment",
    "pipeline_loading_checkpoint",
    "reduce_scatter",
    "round_robin_gradients",
    "save_muon_momentum_buffer_in_memory",
    "sub_group_size",
    "use_multi_rank_bucket_allreduce",
    "stage3_allgather_sequential",
    "stage3_gather_16bit_weights_on_model_save",
    "stage3_gather_fp16_weights_on_model_save",
    "stage3_max_live_parameters",
    "stage3_max_reuse_distance",
    "stage3_model_persistence_threshold",
    "stage3_module_granularity_threshold",
    "stage3_param_persistence_threshold",
    "stage3_partition_stream_chunk_size",
    "stage3_use_all_reduce_for_fetch_params",
)

_OFFLOAD = Foreign("states held in CPU memory or on disk")
_QUANTIZED = Foreign("quantized communication or storage")

_CHANGES_RESULT = {
    "activation_checkpointing.partition_activations": Foreign("activations cut over tensor-parallel ranks"),
    "activation_checkpointing.cpu_checkpointing": Foreign(
        "activations in host memory", instead='write activation_checkpointing.offload: "cpu"'
    ),
    "activation_checkpointing.number_checkpoints": Foreign(
        "a number of recomputed blocks", instead="write activation_checkpointing.every"
    ),
    "amp": Foreign("Apex AMP", instead="use bf16 or fp16, or torch.autocast around the forward"),
    "autotuning": Foreign("tuning of the job by trial runs"),
    "compile": Foreign("compiling the model", instead="call torch.compile on the model and remove the key"),
    "compression_training": Foreign("compression of the model"),
    "curriculum_learning": Foreign("curriculum learning"),
    "data_efficiency": Foreign("data sampling and routing by difficulty"),
    "data_types": Foreign("another type for gradient accumulation than fp32", ({"grad_accum_dtype": "fp32"},)),
    "eigenvalue": Foreign("eigenvalues of the loss"),
    "elasticity": Foreign("batch sizes chosen by an elastic schedule"),
    "expert_parallel": Foreign("expert parallelism"),
    "gradient_allreduce_op": Foreign(
        "the sum of gradients over ranks", ("mean",), "multiply the loss by the number of ranks and remove the key"
    ),
    "gradient_predivide_factor": Foreign("division of gradients before their reduction", (1,)),
    "hybrid_engine": Foreign("an engine that trains and generates"),
    "managed_gradient_accumulation": Foreign(
        "boundaries set by the caller", (True,), "remove the key and call engine.step(boundary=True) at each boundary"
    ),
    "nebula": Foreign("checkpoints through Nebula"),
    "pipeline": Foreign("pipeline parallelism"),
    "prescale_gradients": Foreign("division of gradients before their reduction"),
    "progressive_layer_drop": Foreign("dropping of layers"),
    "quantize_training": Foreign("quantized training"),
    "sequence_parallel_size": Foreign("sequence parallelism", (1,)),
    "sparse_attention": Foreign("sparse attention"),
    "sparse_gradients": Foreign("sparse gradients"),
    "tensor_parallel": Foreign("tensor parallelism", ({"autotp_size": 1}, {"tp_size": 1})),
    "torch_autocast": Foreign("autocast inside the engine", instead="put torch.autocast around the forward"),
    "weight_quantization_config": _QUANTIZED,
    "bf16.bf16_master_weights_and_grads": Foreign("master weights in bf16"),
    "bf16.bf16_optimizer_states": Foreign("optimizer states in bf16"),
    "fp16.fp16_master_weights_and_grads": Foreign("master weights in fp16"),
    "zero_optimization.cpu_offload": _OFFLOAD,
    "zero_optimization.cpu_offload_param": _OFFLOAD,
    "zero_optimization.cpu_offload_params": _OFFLOAD,
    "zero_optimization.mics_hierarchical_params_gather": Foreign("gathering in two levels"),
    "zero_optimization.mics_shard_size": Foreign(
        "MiCS", (-1, 0), "write zero_optimization.shard_group_size, which shards within groups of that many ranks"
    ),
    "zero_optimization.offload_optimizer": _OFFLOAD,
    "zero_optimization.offload_param": _OFFLOAD,
    "zero_optimization.super_offload": _OFFLOAD,
    "zero_optimization.zenflow": Foreign("ZenFlow's delayed updates"),
    "zero_optimization.zero_hpz_partition_size": Foreign("a second copy of the shards inside each node", (0, 1)),
    "zero_optimization.zero_quantized_gradients": _QUANTIZED,
    "zero_optimization.zero_quantized_nontrainable_weights": _QUANTIZED,
    "zero_optimization.zero_quantized_weights": _QUANTIZED,
    "zero_optimization.zeropp_loco_param": _QUANTIZED,
}

FOREIGN: dict[str, Foreign] = {
    **{path: Foreign() for path in _TUNING},
    **{f"zero_optimization.{name}": Foreign() for name in _ZERO_TUNING},
    **_CHANGES_RESULT,
}
"""Every such key by its path in the file."""
