"""The manifest: everything about a checkpoint that is not the bytes of its tensors, as JSON with its own checksum."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import xxhash
from pydantic import BaseModel, ConfigDict, Field

from zerotrain.checkpoint.format import DTYPES, MANIFEST, VERSION, StoredTensor, file_name
from zerotrain.checkpoint.plain import decode
from zerotrain.checkpoint.source import TensorInfo
from zerotrain.errors import CheckpointError

LARGEST = 1 << 30  # bytes
_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Manifest:
    """What `manifest.json` says. Values that may be other than JSON's types are kept encoded (see `plain`)."""

    model: Mapping[str, StoredTensor]
    optimizer: Mapping[str, StoredTensor]
    files: Mapping[str, Mapping[str, Any]]
    """For each file its `bytes`, and for those that are not tensors their `checksum`."""
    state: Mapping[str, Any]
    """The sections named in `SECTIONS`, encoded."""
    part: int = 0
    parts: int = 1
    """More than one: the folder holds what one node wrote, until `zerotrain merge` puts the nodes' together."""
    path: Path = field(default=Path(MANIFEST), compare=False)

    def section(self, name: str) -> Any:
        """A section of the state, decoded; None where the checkpoint has none."""
        try:
            return decode(self.state.get(name))
        except (CheckpointError, RecursionError) as error:
            raise CheckpointError(f"{self.path}: {name}: {error}") from error

    @property
    def step(self) -> int:
        """Optimizer steps that had been taken."""
        return int(self.state["progress"]["step"])

    def tensors(self) -> dict[str, StoredTensor]:
        """Weights and optimizer state together."""
        return {**self.model, **self.optimizer}


SECTIONS = (
    "progress", "topology", "config", "host", "tied", "extra", "class", "groups", "scalars", "scheduler", "loss_scale",
    "random", "data", "client_state",
)  # fmt: skip
"""progress: step, skipped steps, samples and tokens seen. topology: ranks and stage at the save. host: identity of the
machine that wrote it. tied: further names of weights. extra: extra state of modules. class, groups, scalars: the
optimizer's class, param groups by parameter name, and values per parameter. random, data: RNG states and place in the
data of every rank."""


def dump(manifest: Manifest) -> bytes:
    """The bytes of `manifest.json`. ValueError for sections that could not be loaded again."""
    body = {
        "format": "zerotrain",
        "version": VERSION,
        "part": manifest.part,
        "parts": manifest.parts,
        **{name: manifest.state.get(name) for name in SECTIONS},
        "files": manifest.files,
        "model": {key: _dump_tensor(tensor) for key, tensor in manifest.model.items()},
        "optimizer": {key: _dump_tensor(tensor) for key, tensor in manifest.optimizer.items()},
    }
    _Sections.model_validate({name: body[name] for name in (*SECTIONS, "files", "part", "parts")})
    text = _canonical(body)
    return b'{"checksum":"' + checksum(text).encode() + b'","manifest":' + text + b"}\n"


def load(folder: Path) -> Manifest:
    """The manifest of a checkpoint. CheckpointError where it is missing, damaged, or of a newer version."""
    path = folder / MANIFEST
    try:
        if path.stat().st_size > LARGEST:
            raise CheckpointError(f"{path} has more than {LARGEST} bytes, so it is not a manifest")
        outer = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise CheckpointError(f"{folder} has no {MANIFEST}, so it is not a checkpoint of zerotrain") from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    try:
        body = outer["manifest"]
        version = body["version"]
        if isinstance(version, int) and version > VERSION:
            raise CheckpointError(
                f"{path} has format version {version}, and this release reads up to {VERSION}; use a newer zerotrain"
            )
        if checksum(_canonical(body)) != outer["checksum"]:
            raise CheckpointError(
                f"{path} does not have the checksum that it was written with: it was changed or damaged"
            )
        checked = _Sections.model_validate({name: body[name] for name in (*SECTIONS, "files", "part", "parts")})
        return Manifest(
            model={key: _load_tensor(key, entry, path) for key, entry in body["model"].items()},
            optimizer={key: _load_tensor(key, entry, path) for key, entry in body["optimizer"].items()},
            files={file_name(name, str(path)): about for name, about in body["files"].items()},
            state={name: body[name] for name in SECTIONS},
            part=checked.part,
            parts=checked.parts,
            path=path,
        )
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path} is not a manifest of zerotrain: {type(error).__name__}: {error}") from error


class _Section(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True, frozen=True)


class _Progress(_Section):
    step: Annotated[int, Field(ge=0)]
    skipped_steps: int
    samples: int
    tokens: float | int


class _LossScale(_Section):
    scale: float
    dynamic: bool
    good_steps: int
    tolerance: int


class _Group(_Section):
    settings: dict[str, Any]
    params: list[str]


class _Scheduler(_Section):
    class_: Annotated[str, Field(alias="class")]
    state: dict[str, Any]


class _File(_Section):
    bytes: Annotated[int, Field(ge=0)]
    checksum: str | None = None


class _Sections(_Section):
    """What the sections must look like, as far as a load relies on it."""

    progress: _Progress
    topology: dict[str, int]
    config: dict[str, Any]
    host: str
    tied: dict[str, str]
    extra: dict[str, Any]
    class_: Annotated[str | None, Field(alias="class")]
    groups: list[_Group]
    scalars: dict[str, dict[str, Any]]
    scheduler: _Scheduler | None
    loss_scale: _LossScale
    random: list[Any]
    data: list[Any]
    files: dict[str, _File]
    part: Annotated[int, Field(ge=0)]
    parts: Annotated[int, Field(ge=1)]


def checksum(data: bytes) -> str:
    """xxh3-64 (https://xxhash.com) in hex: it finds accidents, not forgeries."""
    return xxhash.xxh3_64_hexdigest(data)


def _canonical(body: Any) -> bytes:
    return json.dumps(body, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def _dump_tensor(tensor: StoredTensor) -> dict[str, Any]:
    return {
        "file": tensor.file,
        "dtype": _DTYPE_NAMES[tensor.info.dtype],
        "shape": list(tensor.info.shape),
        "fragments": [list(fragment) for fragment in tensor.fragments],
    }


def _load_tensor(key: str, entry: Any, path: Path) -> StoredTensor:
    info = TensorInfo(DTYPES[entry["dtype"]], tuple(int(n) for n in entry["shape"]))
    fragments = tuple(sorted((int(start), int(stop), str(digest)) for start, stop, digest in entry["fragments"]))
    end = 0
    for start, stop, _ in fragments:
        if not end <= start < stop <= info.numel:
            raise CheckpointError(f"{path}: the fragments of tensor '{key}' overlap or reach beyond its end")
        end = stop
    return StoredTensor(file_name(entry["file"], str(path)), info, fragments)
