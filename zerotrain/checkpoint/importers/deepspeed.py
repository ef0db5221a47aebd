"""Checkpoints of DeepSpeed, ZeRO stages 1 to 3, read without DeepSpeed.

Such a folder has a file of the model's states, or with stage 3 one for each rank, and one of the optimizer's for each
rank. Stages 1 and 2 keep the weights whole, in the dtype of training, and the fp32 masters and moments in flat pieces;
stage 3 keeps everything in flat pieces, and the weights as masters alone. See `flat` for the pieces.

Tensor or pipeline parallel checkpoints, and those of mixtures of experts, are refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from zerotrain.checkpoint.format import file_name
from zerotrain.checkpoint.importers import pickles
from zerotrain.checkpoint.importers.deepspeed_files import Folder, need, open_folder, shapes_of
from zerotrain.checkpoint.importers.flat import Span, Stream, copy_spans, group_spans, rank_spans
from zerotrain.checkpoint.source import MASTER, Source, TensorInfo, state_key
from zerotrain.errors import CheckpointError

LATEST = "latest"
_STATES = re.compile(r"(?:bf16_|fp16_)?(?:zero_pp_rank_\d+_)?mp_rank_\d+_(?:model|optim)_states\.pt")


@dataclass(frozen=True)
class Place:
    """Where a tensor is."""

    spans: list[Span]
    streams: list[Stream]


@dataclass
class DeepSpeedSource(Source):
    """Tensors in pieces, mapped from the ranks' files."""

    weights: dict[str, TensorInfo] = field(default_factory=dict)
    states: dict[str, TensorInfo] = field(default_factory=dict)
    scalars: dict[str, dict[str, Any]] = field(default_factory=dict)
    places: dict[str, Place] = field(default_factory=dict)

    def read(self, key: str, start: int, stop: int, out: torch.Tensor) -> None:
        """See `Source.read`."""
        try:
            copy_spans(self.places[key].spans, self.places[key].streams, start, stop, out)
        except (KeyError, IndexError, RuntimeError) as error:
            raise CheckpointError(f"tensor '{key}' cannot be read from {self.path}: {error}") from error

    def close(self) -> None:
        """Let go of the mapped files."""
        self.places = {}


def opens(path: Path) -> bool:
    """Whether `path` is a folder of one DeepSpeed checkpoint, or one whose file `latest` names such a folder."""
    return path.is_dir() and (_has_states(path) or _has_states(path / _latest(path)))


def open_source(path: Path) -> Source:
    """Weights, fp32 masters and optimizer state; CheckpointError where a file is missing, damaged or of a kind refused."""
    if not _has_states(path):
        path = path / file_name(_latest(path), str(path / LATEST))
        if not path.is_dir():
            raise CheckpointError(f"{path.parent / LATEST} names {path.name}, which is not there")
    folder = open_folder(path)
    source = DeepSpeedSource(path)
    try:
        _add_weights(source, folder)
        if folder.optimizers:
            _add_flat(source, folder)
    except (AttributeError, TypeError, ValueError, KeyError, IndexError, RuntimeError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{path} is damaged, or of an unknown kind: {error!r}") from error
    source.tied = {
        str(alias): str(name)
        for alias, name in (folder.models[0].get("shared_params") or {}).items()
        if name in source.weights and alias not in source.weights
    }
    if not source.weights:
        raise CheckpointError(f"{path} holds no weights")
    return source


def _has_states(path: Path) -> bool:
    return path.is_dir() and any(_STATES.fullmatch(file.name) for file in path.iterdir())


def _latest(path: Path) -> str:
    latest = path / LATEST
    name = latest.read_text(encoding="utf-8", errors="replace").strip() if latest.is_file() else ""
    return name if "\0" not in name and len(name) < 256 else ""


# -- what is kept as it is --------------------------------------------------------------------------------------------


def _add_weights(source: DeepSpeedSource, folder: Folder) -> None:
    """Weights and buffers of `module`, and frozen parameters that stage 3 has cut."""
    first = folder.models[0]
    module, where = pickles.tensors_of(first["module"]), str(folder.model_files[0])
    aliases = first.get("shared_params") or {}
    whole = module
    if folder.stage == 3:
        whole = {name: module[name] for name in need(first, "buffer_names", where)}
    for name, tensor in whole.items():
        stored = module.get(aliases.get(name, ""))
        if stored is None or stored.shape != tensor.shape:  # of another shape: empty ones share an address by chance
            info = pickles.tensor_info(tensor, name, where)
            source.weights[name], source.places[name] = info, Place([Span(0, 0, 0, info.numel)], [Stream([tensor])])
    for name, shape in shapes_of(first.get("frozen_param_shapes") or {}).items():
        parts = [need(model, "frozen_param_fragments", where) or {} for model in folder.models]
        if name not in source.weights and all(name in part for part in parts):
            stream = Stream([part[name] for part in parts])
            info = TensorInfo(stream.tensors[0].dtype, shape)
            if stream.numel < info.numel:
                raise CheckpointError(
                    f"{folder.path}: frozen parameter '{name}' has {stream.numel} elements of {info.numel}"
                )
            source.weights[name], source.places[name] = info, Place([Span(0, 0, 0, info.numel)], [stream])


# -- what is in flat pieces -------------------------------------------------------------------------------------------


@dataclass
class _Flat:
    """Parameters that share streams: for each state their names and streams, and what they hold once for all."""

    shapes: Mapping[str, tuple[int, ...]]
    spans: Mapping[str, list[Span]]
    streams: dict[str, list[Stream]]
    scalars: dict[str, dict[str, Any]]


def _add_flat(source: DeepSpeedSource, folder: Folder) -> None:
    for flat in [_stage_3(folder)] if folder.stage == 3 else _stage_2(folder):
        for name, shape in flat.shapes.items():
            for state, streams in flat.streams.items():
                info = TensorInfo(streams[0].tensors[0].dtype, shape)
                place = Place(flat.spans[name], streams)
                key = state_key(name, state)
                source.states[key], source.places[key] = info, place
                if state == MASTER and folder.stage == 3:
                    source.weights[name], source.places[name] = info, place
        source.scalars.update({name: values for name, values in flat.scalars.items() if values})


def _stage_2(folder: Folder) -> list[_Flat]:
    """One for each parameter group; its streams run over the ranks."""
    shapes = [shapes_of(group) for group in folder.models[0]["param_shapes"]]
    masters = [need(o, "single_partition_of_fp32_groups", str(folder.path)) for o in folder.optimizers]
    gaps = folder.optimizers[0].get("param_alignment_paddings") or [[0] * len(group) for group in shapes]
    found = []
    for index, group in enumerate(shapes):
        spans, end = group_spans(0, group, gaps[index])
        states = [folder.state(rank, index) for rank in range(folder.world)]
        master = Stream([parts[index] for parts in masters])
        _check_end(folder, f"group {index}", end, master.numel)
        streams = {MASTER: [master]}
        for state in _per_element(states[0], master.tensors[0].numel()):
            streams[state] = [Stream([part[state] for part in states])]
            _check_end(folder, f"{state} of group {index}", end, streams[state][0].numel)
        scalars = _scalars(states[0], streams)
        found.append(_Flat(group, spans, streams, dict.fromkeys(group, scalars)))
    return found


def _stage_3(folder: Folder) -> _Flat:
    """All parameters at once; there is one stream for each rank, and it runs over the groups."""
    shapes = {name: shape for group in folder.models[0]["param_shapes"] for name, shape in shapes_of(group).items()}
    spans, end = rank_spans(folder.world, shapes)
    groups = [need(o, "fp32_flat_groups", str(folder.path)) for o in folder.optimizers]
    streams = {MASTER: [Stream(parts) for parts in groups]}
    states = [[folder.state(rank, i) for i in range(len(parts))] for rank, parts in enumerate(groups)]
    sizes = [part.numel() for part in groups[0]]
    kinds = [_per_element(state, size) for state, size in zip(states[0], sizes, strict=True) if size]
    for state in kinds[0] if kinds else ():
        if all(state in others for others in kinds):
            streams[state] = [Stream([part[state] for part in parts if state in part]) for parts in states]
    for state, ranks in streams.items():
        for rank, stream in enumerate(ranks):
            if stream.numel != end:
                raise CheckpointError(
                    f"{folder.optimizer_files[rank]}: its {state} has {stream.numel} elements, and the model's parameters "
                    f"need {end}. The files are not of one checkpoint"
                )
    bounds = Stream(groups[0]).starts
    scalars = {}
    for name, parts in spans.items():
        if parts:
            index = next(i for i in range(len(sizes)) if bounds[i] <= parts[0].offset < bounds[i + 1])
            scalars[name] = _scalars(states[0][index], streams)
    return _Flat(shapes, spans, streams, scalars)


def _per_element(state: Mapping[Any, Any], count: int) -> list[str]:
    """The states that have a value for each of (at least) `count` elements."""
    tensors = pickles.tensors_of(state)
    return [name for name, t in tensors.items() if t.dim() == 1 and t.numel() >= count and name != "step"]


def _scalars(state: Mapping[Any, Any], streams: Mapping[str, Any]) -> dict[str, Any]:
    kept = {str(name): value for name, value in state.items() if name not in streams}
    return {name: value for name, value in kept.items() if isinstance(value, (int, float)) or _is_scalar(value)}


def _is_scalar(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.numel() == 1


def _check_end(folder: Folder, what: str, end: int, there: int) -> None:
    """The parts end where the parameters do, up to padding: a multiple of twice the number of ranks."""
    step = 2 * folder.world
    if -(-end // step) != -(-there // step) or there < end:
        raise CheckpointError(
            f"{folder.path}: the ranks' files hold {there} elements of {what}, and its parameters need {end}. A file is of "
            "another checkpoint, or the layout is not known"
        )
