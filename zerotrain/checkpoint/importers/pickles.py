"""Reading files that torch pickled without running anything that is in them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import torch

from zerotrain.checkpoint.source import TensorInfo
from zerotrain.errors import CheckpointError

LARGEST_LEGACY = 1 << 30
"""Bytes of a file in torch's old format, which has to be read whole."""

_ZIP = b"PK\x03\x04"
_REFUSED = re.compile(r"(?:GLOBAL|unrecognized function|but got) (?:<class ')?([\w.]+)")


def load(file: Path | IO[bytes], where: str, stubs: Sequence[tuple[Any, str]] = ()) -> Any:
    """What torch.save wrote, its tensors mapped from the file where `file` is a path.

    Only tensors, Python's own types and `stubs` (what stands for a class, and the class's full name) are let in.
    CheckpointError, with `where` in front, for anything else and for damage.
    """
    mapped = isinstance(file, Path) and _is_zip(file, where)
    if isinstance(file, Path) and not mapped and file.stat().st_size > LARGEST_LEGACY:
        raise CheckpointError(
            f"{where} is in torch's old format, which must be read whole, and has {file.stat().st_size >> 20} MiB. Load it "
            "once with torch.load and save it again with torch.save"
        )
    try:
        with torch.serialization.safe_globals(list(stubs)):
            return torch.load(file, map_location="cpu", weights_only=True, mmap=mapped)
    except Exception as error:  # whatever a damaged or hostile pickle may cause
        raise CheckpointError(f"{where} {explain(error)}") from error


def explain(error: Exception) -> str:
    """Why a file could not be loaded, in one line."""
    refused = _REFUSED.search(str(error))
    if refused:
        return (
            f"holds an object of class or function {refused[1]}, which is not loaded from checkpoints because it could "
            "run code. Save the file without it"
        )
    lines = str(error).splitlines() or [type(error).__name__]
    return f"is damaged, or no file of torch.save: {lines[0]}"


def _is_zip(path: Path, where: str) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(len(_ZIP)) == _ZIP
    except OSError as error:
        raise CheckpointError(f"{where} cannot be read: {error}") from error


def tensor_info(tensor: torch.Tensor, name: str, where: str) -> TensorInfo:
    """Its dtype and shape; CheckpointError for a tensor that has no plain values (sparse, quantized, meta)."""
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.device.type != "cpu":
        kind = "quantized" if tensor.is_quantized else f"{tensor.layout} on {tensor.device}"
        raise CheckpointError(f"{where}: tensor '{name}' is {kind}; only plain tensors can be loaded")
    return TensorInfo(tensor.dtype, tuple(tensor.shape))


def copy_run(tensor: torch.Tensor, start: int, stop: int, out: torch.Tensor) -> None:
    """Fill `out` with elements `[start, stop)` of the flattened tensor."""
    out.copy_(tensor.detach().reshape(-1)[start:stop])


def tensors_of(value: Any) -> dict[str, torch.Tensor]:
    """The tensors that a dict holds under strings; empty where `value` is no dict or holds none."""
    if not isinstance(value, Mapping):
        return {}
    return {key: item for key, item in value.items() if isinstance(key, str) and isinstance(item, torch.Tensor)}
