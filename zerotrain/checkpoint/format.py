"""What is on disk: the bytes of a safetensors file, and the manifest that ties a checkpoint's files together.

    step-00001200/
      model-00001-of-00002.safetensors       weights and buffers: an ordinary Hugging Face checkpoint
      model.safetensors.index.json           with its index,
      config.json, tokenizer.json, ...       and what the model has of such files
      optimizer-00001-of-00004.safetensors   fp32 master weights where they differ, and optimizer state: <parameter>/<state>
      manifest.json                          everything else, and a checksum of every fragment

A safetensors file is the length of its header (8 bytes), a JSON header, and the raw row-major bytes of whole tensors
(https://huggingface.co/docs/safetensors). So the place of any run of elements follows from the header alone, and
every rank can write, or read, its own runs.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from zerotrain.checkpoint.source import TensorInfo
from zerotrain.errors import CheckpointError

VERSION = 1
MANIFEST = "manifest.json"
INDEX = "model.safetensors.index.json"
MODEL, OPTIMIZER = "model", "optimizer"
ALIGNMENT = 64  # bytes; where the data of a file begins
LARGEST_HEADER = 100 * 1024 * 1024  # bytes; safetensors refuses longer ones as well

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "C64": torch.complex64,
}  # fmt: skip
"""torch's dtype of each name in a safetensors header."""
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class FilePlan:
    """One safetensors file before a byte of it is written."""

    name: str
    tensors: Mapping[str, TensorInfo]
    offsets: Mapping[str, int]
    """Byte offset in the file of each tensor's first element."""
    header: bytes
    """The file's beginning: length, JSON, and spaces up to where the data begins."""
    size: int
    """Bytes of the whole file."""


def plan_files(kind: str, tensors: Mapping[str, TensorInfo], limit: int) -> list[FilePlan]:
    """Spread `tensors`, in their order, over files `<kind>-0000x-of-0000y.safetensors` of at most `limit` bytes of data.

    A tensor larger than `limit` gets a file of its own. Within a file wider dtypes come first, so that every tensor is
    aligned to its own. CheckpointError for a dtype that safetensors does not have.
    """
    groups: list[dict[str, TensorInfo]] = [{}]
    filled = 0
    for key, info in tensors.items():
        if info.dtype not in _NAMES:
            raise CheckpointError(f"'{key}' is {info.dtype}, which safetensors files cannot hold")
        if groups[-1] and filled + info.nbytes > limit:
            groups.append({})
            filled = 0
        groups[-1][key] = info
        filled += info.nbytes
    if not groups[0]:
        return []
    return [
        _plan(f"{kind}-{number:05d}-of-{len(groups):05d}.safetensors", group)
        for number, group in enumerate(groups, start=1)
    ]


def _plan(name: str, tensors: dict[str, TensorInfo]) -> FilePlan:
    ordered = dict(sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    starts, end = {}, 0
    for key, info in ordered.items():
        starts[key], end = end, end + info.nbytes
        header[key] = {"dtype": _NAMES[info.dtype], "shape": list(info.shape), "data_offsets": [starts[key], end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    begin = 8 + len(text)
    return FilePlan(
        name, ordered, {key: begin + start for key, start in starts.items()}, len(text).to_bytes(8, "little") + text,
        begin + end,
    )  # fmt: skip


def index_json(files: list[FilePlan]) -> dict[str, Any]:
    """The index of a Hugging Face sharded checkpoint."""
    size = sum(info.nbytes for file in files for info in file.tensors.values())
    return {"metadata": {"total_size": size}, "weight_map": {key: f.name for f in files for key in f.tensors}}


# -- reading ----------------------------------------------------------------------------------------------------------


def read_header(path: Path) -> dict[str, tuple[TensorInfo, int]]:
    """Every tensor of a safetensors file with the byte offset of its data.

    CheckpointError, naming the file, where the header does not describe exactly the bytes that are there: too long, not
    JSON, ranges that overlap, leave gaps, or do not fit the shape. Nothing is allocated from what the header claims.
    """
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, LARGEST_HEADER):
                raise CheckpointError(
                    f"{path} is not a whole safetensors file: its header claims {length} bytes, and the file has {size}"
                )
            header = json.loads(file.read(length))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read as a safetensors file: {error}") from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{path}: the header of a safetensors file is a JSON object, this is not")
    header.pop("__metadata__", None)
    found = {key: _entry(path, key, entry) for key, entry in header.items()}
    end = 0
    for key, (info, start) in sorted(found.items(), key=lambda item: (item[1][1], item[1][0].nbytes)):
        if start != end:
            what = "overlaps the one before it" if start < end else "leaves a gap before it"
            raise CheckpointError(f"{path}: the data of tensor '{key}' {what}, so the header is damaged")
        end = start + info.nbytes
    if 8 + length + end != size:
        raise CheckpointError(
            f"{path} has {size} bytes, but its header describes {8 + length + end}: truncated or damaged"
        )
    return {key: (info, 8 + length + start) for key, (info, start) in found.items()}


def _entry(path: Path, key: str, entry: Any) -> tuple[TensorInfo, int]:
    """The tensor of a header entry, and the start of its data behind the header."""
    try:
        dtype, shape, (start, stop) = DTYPES[entry["dtype"]], entry["shape"], entry["data_offsets"]
    except (KeyError, TypeError, ValueError):
        raise CheckpointError(f"{path}: the header's entry of tensor '{key}' is damaged: {str(entry)[:200]}") from None
    if not isinstance(shape, list):
        raise CheckpointError(f"{path}: the header gives tensor '{key}' the shape {str(shape)[:80]}")
    whole = all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in [*shape, start, stop])
    if not whole or stop - start != math.prod(shape) * dtype.itemsize:
        raise CheckpointError(
            f"{path}: tensor '{key}' of shape {shape} and dtype {entry['dtype']} does not fit its bytes {start} to {stop}"
        )
    return TensorInfo(dtype, tuple(shape)), start


@dataclass(frozen=True)
class StoredTensor:
    """Where a whole tensor lies, and the checksums of the fragments in which it was written."""

    file: str
    info: TensorInfo
    fragments: tuple[tuple[int, int, str], ...]
    """`(start, stop, xxh3-64 in hex)` of each run of elements, in order."""

    def missing(self) -> list[tuple[int, int]]:
        """The runs of elements that no fragment covers; empty in a whole checkpoint."""
        return list(gaps(((start, stop) for start, stop, _ in self.fragments), self.info.numel))


def gaps(runs: Iterator[tuple[int, int]], numel: int) -> Iterator[tuple[int, int]]:
    """What sorted `runs` leave out of `[0, numel)`."""
    end = 0
    for start, stop in runs:
        if start > end:
            yield end, start
        end = max(end, stop)
    if end < numel:
        yield end, numel


def raw(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous tensor in host memory, without a copy."""
    return memoryview(tensor.detach().view(torch.uint8).numpy())  # type: ignore[arg-type]


def file_name(name: Any, where: str) -> str:
    """`name`, if it is the plain name of a file; CheckpointError for anything with a path in it."""
    if not isinstance(name, str) or not name or name in (".", "..") or "/" in name or "\\" in name or "\0" in name:
        raise CheckpointError(f"{where} names the file {name!r}, which is not a plain file name")
    return name
