"""State dicts that torch.save wrote: one file, or the shards of a Hugging Face folder."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from zerotrain.checkpoint.format import file_name
from zerotrain.checkpoint.importers import pickles
from zerotrain.checkpoint.source import Source, TensorInfo
from zerotrain.errors import CheckpointError

WHOLE = "pytorch_model.bin"
INDEX = "pytorch_model.bin.index.json"
SUFFIXES = (".bin", ".pt", ".pth")
WRAPPERS = ("state_dict", "model_state_dict", "model", "module")
"""Keys under which training scripts put the model's state dict."""


@dataclass
class TorchSource(Source):
    """Tensors mapped from the files: only the pages that are read are touched."""

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    files: dict[str, Path] = field(default_factory=dict)

    def read(self, key: str, start: int, stop: int, out: torch.Tensor) -> None:
        """See `Source.read`."""
        try:
            pickles.copy_run(self.tensors[key], start, stop, out)
        except (KeyError, RuntimeError) as error:
            raise CheckpointError(
                f"tensor '{key}' cannot be read from {self.files.get(key, self.path)}: {error}"
            ) from error

    def close(self) -> None:
        """Let go of the mapped files."""
        self.tensors = {}


def opens(path: Path) -> bool:
    """Whether `path` is a file of torch.save by its name, or a folder with `pytorch_model.bin` or its index."""
    if path.is_dir():
        return (path / WHOLE).is_file() or (path / INDEX).is_file()
    return path.suffix in SUFFIXES and path.is_file()


def open_source(path: Path) -> Source:
    """The weights of the file or folder; CheckpointError where they cannot be read."""
    source = TorchSource(path)
    if path.is_dir() and (path / INDEX).is_file():
        for name, keys in _shards(path / INDEX).items():
            tensors = _state_dict(path / name)
            if absent := [key for key in keys if key not in tensors]:
                raise CheckpointError(f"{path / INDEX} says that tensor '{absent[0]}' is in {name}, and it is not")
            _add(source, path / name, {key: tensors[key] for key in keys})
    else:
        file = path / WHOLE if path.is_dir() else path
        _add(source, file, _state_dict(file))
    return source


def _add(source: TorchSource, file: Path, tensors: dict[str, torch.Tensor]) -> None:
    infos: dict[str, TensorInfo] = {key: pickles.tensor_info(t, key, str(file)) for key, t in tensors.items()}
    source.weights = {**source.weights, **infos}
    source.tensors |= tensors
    source.files |= dict.fromkeys(tensors, file)


def _state_dict(file: Path) -> dict[str, torch.Tensor]:
    loaded: Any = pickles.load(file, str(file))
    while True:
        inner = next((loaded[key] for key in WRAPPERS if isinstance(loaded, dict) and _holds(loaded.get(key))), None)
        if inner is None:
            break
        loaded = inner
    tensors = pickles.tensors_of(loaded)
    if not tensors:
        raise CheckpointError(
            f"{file} holds no state dict: a dict of tensors, by itself or under one of {', '.join(WRAPPERS)}"
        )
    return tensors


def _holds(value: Any) -> bool:
    """Whether `value` is a state dict or wraps one."""
    if pickles.tensors_of(value):
        return True
    return isinstance(value, dict) and any(pickles.tensors_of(value.get(key)) for key in WRAPPERS)


def _shards(index: Path) -> dict[str, list[str]]:
    """The names of the shards, each with the keys it holds; all are there."""
    found: dict[str, list[str]] = {}
    try:
        weight_map = json.loads(index.read_bytes())["weight_map"]
        for key, name in weight_map.items():
            found.setdefault(file_name(name, str(index)), []).append(key)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{index} is not an index of shards: {error!r}") from error
    for name in found:
        if not (index.parent / name).is_file():
            raise CheckpointError(f"{index} names the file {name}, which is not there")
    return found
