"""Weights for other tools: a Hugging Face folder, a file of torch.save, or a torch.distributed.checkpoint folder.

Values pass through one block of memory, whatever the size of the model, and go into safetensors files first. Those are
what Hugging Face wants; torch's own formats are then written from tensors mapped from such a file.
"""

from __future__ import annotations

import json
import mmap
import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from zerotrain.checkpoint import folders
from zerotrain.checkpoint.companions import TOKENIZER_FILES
from zerotrain.checkpoint.format import INDEX, MODEL, FilePlan, index_json, plan_files
from zerotrain.checkpoint.manifest import checksum
from zerotrain.checkpoint.reader import Checkpoint, manifest_of, open_source
from zerotrain.checkpoint.source import MASTER, Source, TensorInfo, state_key
from zerotrain.checkpoint.states import Run
from zerotrain.checkpoint.writer import write_runs
from zerotrain.errors import CheckpointError

Format = Literal["hf", "torch", "dcp"]
FORMATS: tuple[str, ...] = get_args(Format)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""What `--dtype` takes."""
BLOCK = 8 << 20
"""Bytes of values in memory at a time."""
TORCH_FILE = "pytorch_model.bin"
_STAGED = "staged"

_Values = Mapping[str, tuple[str, TensorInfo]]
"""By name in the export: the key to read from the source, and the tensor as it is written."""


def export(
    source: Source | str | Path,
    output: str | Path,
    to: Format = "hf",
    *,
    dtype: torch.dtype | None = None,
    tag: str | None = None,
    max_shard_size: int = 5_000_000_000,
) -> Path:
    """Write the weights of `source` (anything that `open_source` opens, `tag` of it) into the new folder `output`.

    hf     `model-*.safetensors` of at most `max_shard_size` bytes each, their index, and the config and tokenizer that
           the source has, the config's dtype made that of the weights
    torch  `pytorch_model.bin`, a state dict of torch.save in which tied weights share their memory, and those files
    dcp    a folder of torch.distributed.checkpoint whose keys are those of the model's state dict

    `dtype` is what floating point values become, rounded from the fp32 master weights where there are any; None leaves
    them as they are stored. `output` is there whole or not at all. CheckpointError where it exists and is not empty,
    where values cannot be read or written, and where one would be infinite in fp16.
    """
    if isinstance(source, (str, Path)):
        with closing(open_source(Path(source), tag)) as opened:
            return export(opened, output, to, dtype=dtype, max_shard_size=max_shard_size)
    values = _values(source, dtype)
    with _new_folder(Path(output)) as (final, folder):
        if to == "hf":
            _write_hf(folder, source, values, max_shard_size)
        elif to == "torch":
            _write_torch(folder, source, values)
        else:
            _write_dcp(folder, source, values)
        if to != "dcp":
            for name, data in _companions(source, dtype).items():
                folders.write_file(folder / name, data)
    return final


@contextmanager
def _new_folder(output: Path) -> Iterator[tuple[Path, Path]]:
    """`output`, made absolute, and the folder that gets this name when the block ends well."""
    output = output.resolve()
    _check_free(output)
    part = folders.begin(output.parent, output.name)
    try:
        yield output, part.path
        _check_free(output)
        part.publish()
    except BaseException:
        part.discard()
        raise


def _check_free(output: Path) -> None:
    if output.exists() and not (output.is_dir() and next(output.iterdir(), None) is None):
        raise CheckpointError(f"{output} exists and is not an empty folder; remove it, or choose another --output")


# -- values -----------------------------------------------------------------------------------------------------------


def _values(source: Source, dtype: torch.dtype | None) -> _Values:
    if not source.weights:
        raise CheckpointError(f"{source.path} holds no weights to export")
    values = {}
    for name, info in source.weights.items():
        # fp8 values mean nothing without their scales, so these stay what they are
        converted = dtype is not None and info.dtype.is_floating_point and info.dtype.itemsize > 1
        wanted = TensorInfo(dtype, info.shape) if converted and dtype is not None else info
        master = state_key(name, MASTER)
        exact = wanted.dtype != info.dtype and master in source.states and source.states[master].shape == info.shape
        values[name] = (master if exact else name, wanted)
    return values


def _runs(source: Source, values: _Values) -> Iterator[Run]:
    """All values, a block at a time. A block's memory is used again for the next."""
    memory = torch.empty(BLOCK, dtype=torch.uint8)
    for name, (key, info) in values.items():
        step = BLOCK // info.dtype.itemsize
        for start in range(0, info.numel, step):
            stop = min(start + step, info.numel)
            block = memory[: (stop - start) * info.dtype.itemsize].view(info.dtype)
            source.read(key, start, stop, block)
            if info.dtype is torch.float16 and source.info(key).dtype is not torch.float16:
                _check_finite(source, key, start, block)
            yield Run(name, start, block)


def _check_finite(source: Source, key: str, start: int, block: torch.Tensor) -> None:
    infinite = block.isinf()
    if infinite.any():
        original = torch.empty(block.numel(), dtype=source.info(key).dtype)
        source.read(key, start, start + block.numel(), original)
        if not original[infinite].isinf().all():
            largest = torch.finfo(torch.float16).max
            raise CheckpointError(
                f"tensor '{key}' has values beyond {largest:g}, fp16's largest; export it as bf16 or fp32"
            )


def _write_safetensors(folder: Path, files: list[FilePlan], source: Source, values: _Values) -> None:
    for file in files:
        write_header(folder, file)
    write_runs(folder, files, _runs(source, values))


def write_header(folder: Path, file: FilePlan) -> None:
    """Make a safetensors file that is whole but for the values."""
    with (folder / file.name).open("xb") as handle:
        handle.write(file.header)
        handle.truncate(file.size)
        handle.flush()
        os.fsync(handle.fileno())


# -- formats ----------------------------------------------------------------------------------------------------------


def _write_hf(folder: Path, source: Source, values: _Values, limit: int) -> None:
    files = plan_files(MODEL, {name: info for name, (_, info) in values.items()}, limit)
    _write_safetensors(folder, files, source, values)
    folders.write_file(folder / INDEX, _json(index_json(files)))


def _write_torch(folder: Path, source: Source, values: _Values) -> None:
    path = folder / TORCH_FILE
    with _mapped(folder, source, values) as tensors:
        try:
            with path.open("xb") as file:
                torch.save({**tensors, **_extra(source)}, file)
                file.flush()
                os.fsync(file.fileno())
        except (OSError, RuntimeError) as error:
            raise CheckpointError(f"{path} could not be written: {error}") from error


def _write_dcp(folder: Path, source: Source, values: _Values) -> None:
    from torch.distributed.checkpoint.api import CheckpointException  # here, because it takes a while
    from torch.distributed.checkpoint.state_dict_saver import save

    with _mapped(folder, source, values) as tensors, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that nothing is distributed
        try:
            save(dict(tensors), checkpoint_id=folder, no_dist=True)
        except CheckpointException as error:
            reason = next((failure for failure, _ in error.failures.values()), error)
            raise CheckpointError(f"{folder} could not be written: {reason}") from error


@contextmanager
def _mapped(folder: Path, source: Source, values: _Values) -> Iterator[dict[str, torch.Tensor]]:
    """The model's state dict, by every name of a tensor, mapped from a file in `folder` that goes away afterwards."""
    (file,) = plan_files(_STAGED, {name: info for name, (_, info) in values.items()}, limit=1 << 62)
    _write_safetensors(folder, [file], source, values)
    path = folder / file.name
    with path.open("rb") as handle:
        content = mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ)
    path.unlink()  # the mapping keeps it, and nothing is left of it whatever happens
    tensors = {name: _view(content, info, file.offsets[name]) for name, (_, info) in values.items()}
    yield {**tensors, **{alias: tensors[first] for alias, first in source.tied.items() if first in tensors}}


def _view(content: mmap.mmap, info: TensorInfo, offset: int) -> torch.Tensor:
    if info.numel == 0:
        return torch.empty(info.shape, dtype=info.dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that it cannot be written to
        flat = torch.frombuffer(content, dtype=info.dtype, count=info.numel, offset=offset)
    return flat.view(info.shape)


def _extra(source: Source) -> dict[str, Any]:
    """What modules keep through `get_extra_state`, as a state dict has it."""
    manifest = manifest_of(source)
    extra: dict[str, Any] = (manifest.section("extra") if manifest is not None else None) or {}
    return {f"{path}._extra_state" if path else "_extra_state": value for path, value in extra.items()}


# -- files beside the weights -----------------------------------------------------------------------------------------


def _companions(source: Source, dtype: torch.dtype | None) -> dict[str, bytes]:
    """Contents of the config and the tokenizer's files that the source has, by name."""
    files = _recorded(source) if isinstance(source, Checkpoint) else _beside(source.path)
    if dtype is not None and "config.json" in files:
        files["config.json"] = _with_dtype(files["config.json"], dtype, source.path)
    return files


def _recorded(source: Checkpoint) -> dict[str, bytes]:
    folder, files = source.parts[0].files.folder, {}
    for name, about in source.manifest.files.items():
        if "checksum" in about and name != INDEX:
            files[name] = (folder / name).read_bytes()
            if checksum(files[name]) != about["checksum"]:
                raise CheckpointError(f"{folder / name} is damaged: its checksum is not the one written")
    return files


def _beside(path: Path) -> dict[str, bytes]:
    names = ("config.json", "generation_config.json", *TOKENIZER_FILES)
    return {name: (path / name).read_bytes() for name in names if (path / name).is_file()}


def _with_dtype(config: bytes, dtype: torch.dtype, where: Path) -> bytes:
    try:
        values = json.loads(config)
        values["dtype"] = str(dtype).removeprefix("torch.")
    except (ValueError, TypeError, RecursionError) as error:
        raise CheckpointError(f"the config.json of {where} is not a JSON object: {error}") from error
    for name, section in values.items():  # of a model made of several (text_config, vision_config)
        if name.endswith("_config") and isinstance(section, dict) and section.get("dtype") is not None:
            section["dtype"] = values["dtype"]
    values.pop("torch_dtype", None)  # its older name
    return _json(values)


def _json(values: Any) -> bytes:
    return (json.dumps(values, indent=2) + "\n").encode()
