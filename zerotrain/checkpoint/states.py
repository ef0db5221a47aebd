"""What this rank holds of a job's states, as runs of whole tensors with global names.

Saving and loading walk the same runs. On the way out each run that several ranks hold alike (replicas, unsharded
states) is cut among them, so that every byte is written once.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from zerotrain.checkpoint.plain import decode, encode
from zerotrain.checkpoint.source import MASTER, TensorInfo, state_key
from zerotrain.errors import CheckpointError
from zerotrain.mesh import ProcessMesh
from zerotrain.zero.optimizer import Segment, ShardedOptimizer, is_per_element
from zerotrain.zero.sharded import ShardedModel
from zerotrain.zero.unit import FlatBuffer

_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")


def canonical(name: str) -> str:
    """A parameter's name without the marks that torch's wrappers (compile, activation checkpointing) leave in it."""
    for mark in _WRAPPERS:
        name = name.replace(mark, "")
    return name


def canonical_path(path: str) -> str:
    """A module's path without those marks."""
    return canonical(f"{path}.").rstrip(".")


@dataclass(frozen=True)
class Run:
    """Elements `[start, start + tensor.numel())` of the flattened whole tensor `key`, held in the 1-d `tensor`."""

    key: str
    start: int
    tensor: torch.Tensor

    @property
    def stop(self) -> int:
        """The element behind its last."""
        return self.start + self.tensor.numel()

    def share(self, of: int, index: int) -> Run:
        """The part of it that holder `index` of `of` writes."""
        numel = self.tensor.numel()
        low, high = numel * index // of, numel * (index + 1) // of
        return Run(self.key, self.start + low, self.tensor[low:high])


def holders(buffer: FlatBuffer, mesh: ProcessMesh) -> tuple[int, int]:
    """How many ranks hold the same runs of `buffer`, and which of them this one is."""
    if buffer.layout.shards == 1:
        return mesh.world_size, mesh.rank
    return mesh.dp_replicate, mesh.rank // mesh.dp_shard


# -- the model --------------------------------------------------------------------------------------------------------


def weight_infos(model: ShardedModel, module: nn.Module) -> dict[str, TensorInfo]:
    """Every parameter, in the order in which units lay them out, and every persistent buffer."""
    infos: dict[str, TensorInfo] = {}
    for buffer in _buffers(model):
        for slot in buffer.layout.slots:
            infos[canonical(slot.name)] = TensorInfo(buffer.dtype, slot.shape)
    for name, tensor in module_buffers(module).items():
        infos[name] = TensorInfo(tensor.dtype, tuple(tensor.shape))
    return infos


def master_infos(model: ShardedModel) -> dict[str, TensorInfo]:
    """The fp32 masters of the parameters that compute in another dtype."""
    return {
        state_key(canonical(slot.name), MASTER): TensorInfo(buffer.master.dtype, slot.shape)
        for buffer in _buffers(model)
        if buffer.master is not None and buffer.master is not buffer.shard
        for slot in buffer.layout.slots
    }


def weight_runs(model: ShardedModel, module: nn.Module, mesh: ProcessMesh) -> Iterator[Run]:
    """What this rank writes of weights, masters and module buffers."""
    for buffer in _buffers(model):
        of, index = holders(buffer, mesh)
        for fragment in buffer.layout.fragments(buffer.index):
            name, part = canonical(fragment.name), slice(fragment.offset, fragment.offset + fragment.numel)
            yield Run(name, fragment.start, buffer.shard[part]).share(of, index)
            if buffer.master is not None and buffer.master is not buffer.shard:
                yield Run(state_key(name, MASTER), fragment.start, buffer.master[part]).share(of, index)
    for name, tensor in module_buffers(module).items():
        yield Run(name, 0, tensor.detach().reshape(-1)).share(mesh.world_size, mesh.rank)


def module_buffers(module: nn.Module) -> dict[str, torch.Tensor]:
    """The persistent buffers, each once, under its first name."""
    found: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for path, owner in module.named_modules():
        for name, buffer in owner._buffers.items():
            if buffer is None or name in owner._non_persistent_buffers_set or id(buffer) in seen:
                continue
            seen.add(id(buffer))
            found[canonical(f"{path}.{name}" if path else name)] = buffer
    return found


def tied_names(module: nn.Module) -> dict[str, str]:
    """Further names of parameters and persistent buffers that go by more than one: alias -> first name."""
    first: dict[int, str] = {}
    aliases: dict[str, str] = {}
    persistent = {id(b) for b in module_buffers(module).values()}
    named = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    for name, tensor in named:
        if isinstance(tensor, nn.Parameter) or id(tensor) in persistent:
            known = first.setdefault(id(tensor), canonical(name))
            if known != canonical(name):
                aliases[canonical(name)] = known
    return aliases


def extra_state(module: nn.Module) -> dict[str, Any]:
    """What modules keep through `get_extra_state`, by module path, encoded."""
    return {
        canonical_path(path): encode(owner.get_extra_state(), f"the extra state of module '{path}'")
        for path, owner in module.named_modules()
        if type(owner).get_extra_state is not nn.Module.get_extra_state
    }


def _buffers(model: ShardedModel) -> Iterator[FlatBuffer]:
    for unit in model.units:
        yield from unit.buffers


# -- the optimizer ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Recorded:
    """What the optimizer holds for one parameter: dtypes of the states with a value per element, and the other values."""

    tensors: tuple[tuple[str, torch.dtype], ...]
    scalars: str
    """A JSON object, encoded; text, so that equal ones are told quickly."""

    def values(self) -> dict[str, Any]:
        """The scalars by name."""
        found: dict[str, Any] = decode(json.loads(self.scalars))
        return found


def recorded_here(optimizer: ShardedOptimizer) -> dict[Recorded, list[str]]:
    """The parameters of which this rank has fragments with optimizer state, by what is held for them."""
    found: dict[Recorded, list[str]] = {}
    for segment in optimizer.segments:
        state = optimizer.optimizer.state.get(segment.tensor)
        if not state:
            continue
        tensors = tuple((key, value.dtype) for key, value in state.items() if is_per_element(key, value, segment))
        others = {key: value for key, value in state.items() if not is_per_element(key, value, segment)}
        for key in state:
            if "/" in str(key) or key == MASTER:
                raise CheckpointError(f"the optimizer's state {key!r} has a name that checkpoints use otherwise")
        record = Recorded(tensors, json.dumps(encode(others, "optimizer state")))
        found.setdefault(record, []).extend(canonical(f.name) for f in segment.fragments)
    return found


def agree(everyone: Sequence[Mapping[Recorded, list[str]]]) -> dict[str, Recorded]:
    """What the ranks together hold for each parameter. CheckpointError where two hold different things for one."""
    found: dict[str, Recorded] = {}
    for rank, records in enumerate(everyone):
        for record, names in records.items():
            for name in names:
                if found.setdefault(name, record) != record:
                    raise CheckpointError(
                        f"the ranks hold different optimizer state for parameter '{name}' (rank {rank} differs from one "
                        "before it), so a checkpoint would mix them"
                    )
    return found


def state_infos(records: Mapping[str, Recorded], weights: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
    """The whole tensors of optimizer state, in the order of the weights."""
    return {
        state_key(name, key): TensorInfo(dtype, weights[name].shape)
        for name in weights
        if name in records
        for key, dtype in records[name].tensors
    }


def optimizer_runs(optimizer: ShardedOptimizer, mesh: ProcessMesh) -> Iterator[Run]:
    """What this rank writes of the optimizer's state."""
    for segment in optimizer.segments:
        of, index = holders(segment.buffer, mesh)
        for key, value in optimizer.optimizer.state.get(segment.tensor, {}).items():
            if is_per_element(key, value, segment):
                for run in segment_runs(segment, key, value):
                    yield run.share(of, index)


def segment_runs(segment: Segment, key: str, value: torch.Tensor) -> Iterator[Run]:
    """The fragments of a segment's state `key`."""
    for fragment in segment.fragments:
        low = fragment.offset - segment.start
        yield Run(state_key(canonical(fragment.name), key), fragment.start, value[low : low + fragment.numel])


def groups(optimizer: ShardedOptimizer, names: Mapping[nn.Parameter, str]) -> list[dict[str, Any]]:
    """The param groups: their settings, encoded, and the names of their parameters."""
    return [
        {
            "settings": {
                key: encode(value, f"param group {index}, {key}") for key, value in group.items() if key != "params"
            },
            "params": [names[p] for p in members],
        }
        for index, (group, members) in enumerate(zip(optimizer.optimizer.param_groups, optimizer.members, strict=True))
    ]
