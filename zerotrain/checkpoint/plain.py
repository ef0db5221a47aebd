"""Values as JSON: what a checkpoint keeps besides tensors, without pickle.

JSON's own types stand for themselves. What JSON lacks is an object with one key that starts with `$`: tuples, bytes,
tensors and numpy arrays (small ones: RNG states, step counters), dicts whose keys are not strings, floats that are not
finite. Floats survive exactly.
"""

from __future__ import annotations

import base64
import math
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from zerotrain.errors import CheckpointError

LARGEST = 1 << 24  # bytes of one tensor or bytes object kept in JSON; larger ones do not belong there


def encode(value: Any, where: str) -> Any:
    """`value` as JSON types. `where` names it in errors: CheckpointError for a value that has no place in JSON."""
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, (int, np.integer)):
        return int(value)
    if isinstance(value, (float, np.floating)):
        return float(value) if math.isfinite(value) else {"$float": str(float(value))}
    if isinstance(value, Mapping):
        return _encode_dict(value, where)
    if isinstance(value, tuple):
        return {"$tuple": [encode(item, f"{where}[{i}]") for i, item in enumerate(value)]}
    if isinstance(value, (list, set, frozenset)) and not isinstance(value, (set, frozenset)):
        return [encode(item, f"{where}[{i}]") for i, item in enumerate(value)]
    if isinstance(value, torch.dtype):
        return {"$dtype": str(value).removeprefix("torch.")}
    if isinstance(value, torch.Tensor):
        return {"$tensor": _pack(value.detach().cpu(), where)}
    if isinstance(value, np.ndarray) and value.dtype != object:
        return {"$array": _pack(torch.from_numpy(np.ascontiguousarray(value)), where)}
    if isinstance(value, (bytes, bytearray)):
        return {"$bytes": _base64(bytes(value), where)}
    raise CheckpointError(
        f"{where} is a {type(value).__module__}.{type(value).__qualname__}, which a checkpoint cannot keep: it holds JSON "
        "types, tuples, bytes, and tensors or numpy arrays. Turn it into those first"
    )


def decode(value: Any) -> Any:
    """What was encoded. CheckpointError for an object that `encode` does not write."""
    if isinstance(value, list):
        return [decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        ((tag, content),) = value.items()
        if tag.startswith("$"):
            if tag not in _DECODERS:
                raise CheckpointError(f"{tag!r} is not a kind of value that this release knows")
            try:
                return _DECODERS[tag](content)
            except (ValueError, TypeError, KeyError, AttributeError, RuntimeError, OverflowError) as error:
                raise CheckpointError(f"a value of kind {tag!r} is damaged: {error}") from error
    return {key: decode(item) for key, item in value.items()}


def _encode_dict(value: Mapping[Any, Any], where: str) -> Any:
    if isinstance(value, Counter):  # torch's MultiStepLR has one
        return {"$counter": [[encode(key, f"a key of {where}"), int(count)] for key, count in value.items()]}
    plain = all(isinstance(key, str) for key in value) and not (len(value) == 1 and next(iter(value)).startswith("$"))
    if plain:
        return {key: encode(item, f"{where}.{key}") for key, item in value.items()}
    pairs = [[encode(key, f"a key of {where}"), encode(item, f"{where}[{key!r}]")] for key, item in value.items()]
    return {"$dict": pairs}


def _pack(tensor: torch.Tensor, where: str) -> dict[str, Any]:
    raw = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return {
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "shape": list(tensor.shape),
        "data": _base64(raw, where),
    }


def _unpack(packed: dict[str, Any]) -> torch.Tensor:
    dtype = dtype_named(packed["dtype"])
    raw = bytearray(base64.b64decode(packed["data"], validate=True))
    flat = torch.frombuffer(raw, dtype=dtype) if raw else torch.empty(0, dtype=dtype)
    return flat.reshape(packed["shape"])


def dtype_named(name: str) -> torch.dtype:
    """The torch dtype of that name (`float32`); ValueError where there is none."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is not a torch dtype")
    return dtype


def _base64(raw: bytes, where: str) -> str:
    if len(raw) > LARGEST:
        raise CheckpointError(f"{where} has {len(raw)} bytes, too many for JSON; keep large tensors in the model")
    return base64.b64encode(raw).decode("ascii")


_DECODERS: dict[str, Callable[[Any], Any]] = {
    "$float": float,
    "$tuple": lambda items: tuple(decode(item) for item in items),
    "$dict": lambda pairs: {decode(key): decode(item) for key, item in pairs},
    "$counter": lambda pairs: Counter({decode(key): int(count) for key, count in pairs}),
    "$dtype": dtype_named,
    "$tensor": _unpack,
    "$array": lambda packed: _unpack(packed).numpy(),
    "$bytes": lambda text: base64.b64decode(text, validate=True),
}
