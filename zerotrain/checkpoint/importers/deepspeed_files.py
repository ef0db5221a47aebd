"""The files of a DeepSpeed checkpoint: which there must be, and what classes may be in them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zerotrain.checkpoint.importers import pickles
from zerotrain.errors import CheckpointError

_NAME = re.compile(r"(?:bf16_|fp16_)?(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_(model|optim)_states\.pt")


class Attributes:
    """Stands for an object of DeepSpeed: its attributes and nothing of its behaviour."""


class LossScaler(Attributes):
    """Stands for DeepSpeed's constant loss scaler."""


class DynamicLossScaler(Attributes):
    """Stands for DeepSpeed's adaptive loss scaler."""


class Slice(Attributes):
    """Stands for DeepSpeed's fragment_address: `start` and `numel` of a rank's slice of a parameter."""


STUBS: tuple[tuple[Any, str], ...] = (
    (int, "deepspeed.runtime.zero.config.ZeroStageEnum"),
    (LossScaler, "deepspeed.runtime.fp16.loss_scaler.LossScaler"),
    (DynamicLossScaler, "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler"),
    (Slice, "deepspeed.utils.tensor_fragment.fragment_address"),
)


@dataclass
class Folder:
    """The loaded files of one checkpoint, in the order of ranks; their tensors are mapped, not read."""

    path: Path
    stage: int
    model_files: list[Path]
    models: list[dict[str, Any]]
    optimizer_files: list[Path]
    optimizers: list[dict[str, Any]]

    @property
    def world(self) -> int:
        """How many ranks share the optimizer."""
        return len(self.optimizers)

    def state(self, rank: int, index: int) -> dict[Any, Any]:
        """What the rank's optimizer holds for its `index`-th flat tensor, with the step of its group."""
        base = self.optimizers[rank].get("optimizer_state_dict" if self.stage == 3 else "base_optimizer_state") or {}
        listed = isinstance(base, list)  # so with stages 1 and 2 and `elastic_checkpoint`
        found: dict[Any, Any] = dict(base[index] if listed else base.get("state", {}).get(index, {}))
        group = {} if listed else _group_of(base, index)
        step = group.get("step", self.optimizers[rank].get("base_optimizer_state_step"))
        return found if "step" in found or step is None else {**found, "step": step}


def _group_of(base: Mapping[str, Any], index: int) -> Mapping[str, Any]:
    return next((group for group in base.get("param_groups", ()) if index in group.get("params", ())), {})


def open_folder(path: Path) -> Folder:
    """Load what is in the folder of one checkpoint; CheckpointError where a file is missing or damaged."""
    models, optimizers = _files(path)
    if not models:
        raise CheckpointError(f"{path} has no file of model states (*_model_states.pt)")
    loaded = [_load(file) for file in models]
    states = [_load(file) for file in optimizers]
    inner = [need(state, "optimizer_state_dict", str(file)) for state, file in zip(states, optimizers, strict=True)]
    per_rank = "zero_pp_rank_" in models[0].name
    stage = int(inner[0].get("zero_stage", 1)) if inner else 3 if per_rank else 0
    folder = Folder(path, stage, models, loaded, optimizers, inner)
    _check(folder, per_rank)
    return folder


def _load(file: Path) -> dict[str, Any]:
    loaded = pickles.load(file, str(file), STUBS)
    if not isinstance(loaded, dict):
        raise CheckpointError(f"{file} holds a {type(loaded).__name__}, and no states of DeepSpeed")
    return loaded


def _files(path: Path) -> tuple[list[Path], list[Path]]:
    found: dict[str, dict[int, Path]] = {"model": {}, "optim": {}}
    for file in sorted(path.iterdir()):
        if re.fullmatch(r"layer_\d+.*_states\.pt", file.name):
            raise CheckpointError(f"{file}: checkpoints of pipelines or of experts (files layer_*) cannot be loaded")
        name = _NAME.fullmatch(file.name)
        if name is None:
            continue
        rank, part, kind = int(name[1] or 0), int(name[2]), name[3]
        if part > 0:
            raise CheckpointError(f"{file}: tensor or pipeline parallel checkpoints (mp_rank above 0) cannot be loaded")
        if rank in found[kind]:
            raise CheckpointError(f"{file} and {found[kind][rank].name} are of two checkpoints in one folder")
        found[kind][rank] = file
    for kind, files in found.items():
        for rank in range(max(files, default=-1) + 1):
            if rank not in files:
                raise CheckpointError(f"{path}: the file of {kind} states of rank {rank} is missing")
    return tuple([files[rank] for rank in sorted(files)] for files in found.values())  # type: ignore[return-value]


def _check(folder: Folder, per_rank: bool) -> None:
    first, where = folder.models[0], str(folder.model_files[0])
    if first.get("module") is None:
        raise CheckpointError(f"{where} holds no 'module': checkpoints of pipelines cannot be loaded")
    if not 0 <= folder.stage <= 3 or per_rank != (folder.stage == 3):
        raise CheckpointError(f"{folder.path}: its files are not those of ZeRO stage {folder.stage}")
    if folder.stage == 3 and len(folder.models) != folder.world:
        raise CheckpointError(
            f"{folder.path} has model states of {len(folder.models)} ranks and optimizer states of {folder.world}; files of "
            "some ranks are missing"
        )
    for file, optimizer in zip(folder.optimizer_files, folder.optimizers, strict=True):
        counts = need(optimizer, "partition_count", str(file))
        counts = counts if isinstance(counts, list) else [counts]
        if any(count != folder.world for count in counts):
            raise CheckpointError(
                f"{folder.path} has optimizer states of {folder.world} ranks, and {file.name} was written by "
                f"{max(counts)}. Files are missing, left over from another job, or of a mixture of experts"
            )
        if int(optimizer.get("zero_stage", 1)) != folder.stage or "ds_zero_partition_groups" in optimizer:
            raise CheckpointError(f"{file}: its partitions are not those of plain ZeRO stage {folder.stage}")
    if folder.optimizers:
        need(first, "param_shapes", where)


def need(found: Mapping[str, Any], key: str, where: str) -> Any:
    """The entry `key`; CheckpointError where there is none."""
    if not isinstance(found, Mapping) or key not in found:
        raise CheckpointError(f"{where} has no entry '{key}', as files of DeepSpeed's ZeRO have")
    return found[key]


def shapes_of(shapes: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Names and shapes as DeepSpeed keeps them."""
    return {str(name): tuple(int(n) for n in shape) for name, shape in shapes.items()}
