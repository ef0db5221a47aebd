"""Folders of torch.distributed.checkpoint: `.metadata` beside `*.distcp` files, as FSDP and others write them.

`.metadata` is a pickle. It is read with an unpickler that knows the few classes such files are made of and makes
inert records of them; any other class is refused. Each tensor is a set of n-dimensional chunks, each of them a small
file of torch.save inside a `.distcp` file.
"""

from __future__ import annotations

import io
import math
import pickle
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

import torch

from zerotrain.checkpoint.format import file_name
from zerotrain.checkpoint.importers import pickles
from zerotrain.checkpoint.importers.dcp_names import Entry, sort_entries
from zerotrain.checkpoint.source import Source, TensorInfo
from zerotrain.errors import CheckpointError

if TYPE_CHECKING:
    from typing_extensions import Buffer

METADATA = ".metadata"
LARGEST_SCALAR = 1 << 20
"""Elements of optimizer state that is kept once per parameter rather than once per element."""

Shape = tuple[int, ...]


# -- the index --------------------------------------------------------------------------------------------------------


class Record:
    """An object of the pickle: what it was made from and its attributes, and nothing of its behaviour."""

    def __init__(self, *args: Any) -> None:
        self.args = args
        self.state: Any = {}

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __getattr__(self, name: str) -> Any:
        state = self.__dict__.get("state")
        if isinstance(state, dict) and name in state:
            return state[name]
        raise AttributeError(f"it lacks '{name}'")


class Index(Record):
    """Stands for MetadataIndex."""


class Bytes(Record):
    """Stands for BytesStorageMetadata: a pickled object that is no tensor."""


class Tensor(Record):
    """Stands for TensorStorageMetadata."""


_METADATA = "torch.distributed.checkpoint.metadata"
_ALLOWED: dict[tuple[str, str], Any] = {
    (_METADATA, "Metadata"): Record,
    (_METADATA, "MetadataIndex"): Index,
    (_METADATA, "TensorStorageMetadata"): Tensor,
    (_METADATA, "BytesStorageMetadata"): Bytes,
    (_METADATA, "ChunkStorageMetadata"): Record,
    (_METADATA, "TensorProperties"): Record,
    (_METADATA, "_MEM_FORMAT_ENCODING"): Record,
    (_METADATA, "StorageMeta"): Record,
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): Record,
    ("torch.serialization", "_get_layout"): Record,
    ("torch", "Size"): tuple,
    ("collections", "OrderedDict"): OrderedDict,
    **{(module, name): Record for module in ("pathlib", "pathlib._local") for name in ("PosixPath", "WindowsPath")},
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _ALLOWED:
            return _ALLOWED[module, name]
        if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        raise CheckpointError(
            f"it holds an object of class or function {module}.{name}, which has no place in it and is not loaded because "
            "it could run code"
        )


def _metadata(path: Path) -> Any:
    try:
        return _Unpickler(io.BytesIO(path.read_bytes())).load()
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error
    except Exception as error:  # whatever a damaged pickle may cause
        raise CheckpointError(f"{path} is damaged, or no index of torch.distributed.checkpoint: {error!r}") from error


class Chunk(NamedTuple):
    """A box of a tensor, and where its values lie."""

    offsets: Shape
    sizes: Shape
    file: str
    start: int
    length: int


@dataclass
class Stored:
    """A tensor as the index describes it; one that is no tensor has no `info` and one chunk."""

    info: TensorInfo | None
    chunks: list[Chunk]


def _stored(metadata: Any) -> dict[str, Stored]:
    places: dict[tuple[str, Shape | None], Any] = {}
    for index, place in metadata.storage_data.items():
        offset = index.offset if "offset" in index.state else None
        places[index.fqn, None if offset is None else tuple(offset)] = place
    found = {}
    for name, about in metadata.state_dict_metadata.items():
        if isinstance(about, Bytes):
            found[name] = Stored(None, [_chunk(name, (), (), places[name, None])])
            continue
        shape = _shape(about.size)
        dtype = about.properties.state[0] if isinstance(about.properties.state, tuple) else about.properties.dtype
        if not isinstance(dtype, torch.dtype):
            raise TypeError(f"tensor '{name}' has no dtype")
        boxes = [(_shape(chunk.offsets), _shape(chunk.sizes)) for chunk in about.chunks]
        for offsets, sizes in boxes:
            inside = all(o + s <= n for o, s, n in zip(offsets, sizes, shape, strict=True))
            if not inside:
                raise ValueError(f"tensor '{name}' has a chunk beyond its shape")
        chunks = [_chunk(name, offsets, sizes, places[name, offsets]) for offsets, sizes in boxes if 0 not in sizes]
        found[name] = Stored(TensorInfo(dtype, shape), chunks)
    return found


def _shape(value: Any) -> Shape:
    shape = tuple(int(n) for n in value)
    if any(n < 0 for n in shape):
        raise ValueError(f"{shape} is no shape")
    return shape


def _chunk(name: str, offsets: Shape, sizes: Shape, place: Any) -> Chunk:
    if place.state.get("transform_descriptors"):
        raise ValueError(f"'{name}' was written with {place.transform_descriptors}, which cannot be read")
    start, length = int(place.offset), int(place.length)
    if start < 0 or length < 0:
        raise ValueError(f"'{name}' lies at byte {start}")
    return Chunk(offsets, sizes, file_name(place.relative_path, METADATA), start, length)


# -- reading ----------------------------------------------------------------------------------------------------------


@dataclass
class DcpSource(Source):
    """Tensors made of chunks, of which one at a time is in memory."""

    stored: Mapping[str, Stored] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    """Keys of `weights` and `states` -> names in the folder."""
    _held: tuple[Chunk, Any] | None = None

    def read(self, key: str, start: int, stop: int, out: torch.Tensor) -> None:
        """See `Source.read`."""
        stored, shape, filled = self.stored[self.names[key]], self.info(key).shape, 0
        for chunk in stored.chunks:
            for box in boxes(shape, start, stop):
                lows = tuple(map(max, box.lows, chunk.offsets))
                highs = tuple(map(min, box.highs, (o + s for o, s in zip(chunk.offsets, chunk.sizes, strict=True))))
                if any(low >= high for low, high in zip(lows, highs, strict=True)):
                    continue
                sizes = tuple(high - low for low, high in zip(box.lows, box.highs, strict=True))
                target = out[box.start : box.start + math.prod(sizes)].view(sizes)
                target[_slices(lows, highs, box.lows)] = self._tensor(key, chunk)[_slices(lows, highs, chunk.offsets)]
                filled += math.prod(high - low for low, high in zip(lows, highs, strict=True))
        if filled != stop - start:
            raise CheckpointError(
                f"{self.path / METADATA}: tensor '{key}' was not written whole, elements {start} to {stop} are incomplete"
            )

    def _tensor(self, key: str, chunk: Chunk) -> torch.Tensor:
        tensor = self.load(key, chunk)
        dtype = self.info(key).dtype
        if not isinstance(tensor, torch.Tensor) or tuple(tensor.shape) != chunk.sizes or tensor.dtype != dtype:
            raise CheckpointError(
                f"tensor '{key}': what lies at byte {chunk.start} of {self.path / chunk.file} is not its chunk of {dtype} and "
                f"shape {chunk.sizes}"
            )
        return tensor

    def load(self, key: str, chunk: Chunk) -> Any:
        """What `chunk` holds: a tensor, or another object. The last one is kept, as runs often share chunks."""
        if self._held is None or self._held[0] != chunk:
            self._held = None
            where = f"tensor '{key}' at byte {chunk.start} of {self.path / chunk.file}"
            try:
                with (self.path / chunk.file).open("rb") as file:
                    self._held = chunk, pickles.load(io.BufferedReader(Range(file, chunk.start, chunk.length)), where)
            except OSError as error:
                raise CheckpointError(f"{where} cannot be read: {error}") from error
        return self._held[1]

    def close(self) -> None:
        """Let go of the chunk in memory."""
        self._held = None


class Range(io.RawIOBase):
    """Bytes `[start, start + length)` of an open file, as a file: what is in it is read once, to where it belongs."""

    def __init__(self, file: BinaryIO, start: int, length: int) -> None:
        self._file, self._start, self._length, self._at = file, start, length, 0

    def readable(self) -> bool:
        """It is."""
        return True

    def seekable(self) -> bool:
        """It is."""
        return True

    def tell(self) -> int:
        """The position, from the start of the range."""
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """As with any file, within the range."""
        origin = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        self._at = max(0, origin + offset)
        return self._at

    def readinto(self, buffer: Buffer) -> int:
        """Fill `buffer` as far as the range goes; how many bytes that were."""
        target = memoryview(buffer).cast("B")[: max(0, self._length - self._at)]
        self._file.seek(self._start + self._at)
        count = self._file.readinto(target) if target else 0  # type: ignore[attr-defined]
        self._at += count
        return int(count)


class Box(NamedTuple):
    """Elements `lows` to `highs` of a tensor, contiguous when it is flattened; `start`: their place in the run."""

    start: int
    lows: Shape
    highs: Shape


def boxes(shape: Shape, start: int, stop: int) -> Iterator[Box]:
    """The elements `[start, stop)` of a flattened tensor as boxes, in order: at most two for each dimension.

    shape 3 x 4, elements 2 to 9:   . . a a      a = (0, 2) to (1, 4)
                                    b b b b      b = (1, 0) to (2, 4)
                                    c . . .      c = (2, 0) to (3, 1)
    """
    if start >= stop:
        return
    if not shape:
        yield Box(0, (), ())
        return
    inner = math.prod(shape[1:])
    row, at = start // inner, start
    if at % inner or stop < (row + 1) * inner:
        end = min(stop, (row + 1) * inner)
        yield from (_in_row(box, row, 0) for box in boxes(shape[1:], at - row * inner, end - row * inner))
        row, at = row + 1, end
    last = stop // inner
    if row < last and at < stop:
        yield Box(at - start, (row, *(0 for _ in shape[1:])), (last, *shape[1:]))
        at = last * inner
    yield from (_in_row(box, last, at - start) for box in boxes(shape[1:], 0, stop - at))


def _in_row(box: Box, row: int, start: int) -> Box:
    return Box(start + box.start, (row, *box.lows), (row + 1, *box.highs))


def _slices(lows: Shape, highs: Shape, origin: Shape) -> tuple[slice, ...]:
    return tuple(slice(low - zero, high - zero) for low, high, zero in zip(lows, highs, origin, strict=True))


# -- opening ----------------------------------------------------------------------------------------------------------


def opens(path: Path) -> bool:
    """Whether `path` is a folder with a `.metadata` file."""
    return path.is_dir() and (path / METADATA).is_file()


def open_source(path: Path) -> Source:
    """The folder's weights and optimizer state; CheckpointError where its index or a file of it is damaged."""
    metadata = _metadata(path / METADATA)
    try:
        stored = _stored(metadata)
        planner = metadata.planner_data if isinstance(metadata.planner_data, dict) else {}
        entries = sort_entries({name: about.info for name, about in stored.items()}, planner)
    except CheckpointError as error:
        raise CheckpointError(f"{path / METADATA}: {error}") from error
    except (AttributeError, TypeError, ValueError, KeyError, IndexError) as error:
        raise CheckpointError(f"{path / METADATA} is damaged, or of an unknown kind: {error}") from error
    _check_files(path, stored)
    source = DcpSource(path, stored=stored)
    source.weights = _named(source, entries.weights)
    source.states = _named(source, entries.states)
    scalars: dict[str, dict[str, Any]] = {}
    for entry in entries.scalars:
        about = stored[entry.stored]
        if about.info is None or about.info.numel <= LARGEST_SCALAR:
            scalars.setdefault(entry.name, {})[entry.state] = _whole(source, entry, about)
    source.scalars = scalars
    return source


def _named(source: DcpSource, entries: list[Entry]) -> dict[str, TensorInfo]:
    infos = {}
    for entry in entries:
        info = source.stored[entry.stored].info
        if info is not None:
            infos[entry.key], source.names[entry.key] = info, entry.stored
    return infos


def _whole(source: DcpSource, entry: Entry, about: Stored) -> Any:
    if about.info is None:
        return source.load(entry.stored, about.chunks[0])
    reader = DcpSource(
        source.path, {entry.stored: about.info}, stored=source.stored, names={entry.stored: entry.stored}
    )
    out = torch.empty(about.info.numel, dtype=about.info.dtype)
    reader.read(entry.stored, 0, out.numel(), out)
    return out.view(about.info.shape)


def _check_files(path: Path, stored: Mapping[str, Stored]) -> None:
    needed: dict[str, int] = {}
    for about in stored.values():
        for chunk in about.chunks:
            needed[chunk.file] = max(needed.get(chunk.file, 0), chunk.start + chunk.length)
    for name, size in needed.items():
        file = path / name
        if not file.is_file():
            raise CheckpointError(f"{path / METADATA} names the file {name}, which is not there")
        if file.stat().st_size < size:
            raise CheckpointError(f"{file} has {file.stat().st_size} bytes of at least {size}: it is truncated")
