"""Reading a job file: from JSON text, or from a mapping, to plain values and the problems met on the way."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zerotrain.config.errors import ConfigError, found, nearest

_INFINITE_ORDER = "gradient_clipping_norm_type"
_NOT_JSON = object()


@dataclass
class Raw:
    """What a source holds, before any meaning is given to it."""

    values: dict[str, Any]
    """Plain dicts, lists, strings, numbers, booleans and None."""

    source: str = ""
    """The file's name; empty for a mapping."""

    problems: list[str] = field(default_factory=list)
    """Duplicate keys and values that JSON cannot hold, each with its path."""


class _Object(dict[str, Any]):
    """A JSON object that remembers which of its keys were written more than once."""

    twice: tuple[str, ...] = ()


def read(source: str | Path | Mapping[str, Any]) -> Raw:
    """Read a path to a JSON file, or a mapping; ConfigError where there is nothing to check, such as broken JSON."""
    if isinstance(source, Mapping):
        raw = Raw({})
        raw.values = _plain(source, "", raw.problems)
        return raw
    if not isinstance(source, (str, Path)):
        raise ConfigError(f"config: {found(source)} is neither the path of a JSON file nor a mapping")
    if isinstance(source, str) and source.lstrip().startswith("{"):
        raise ConfigError("config: this string is JSON text, where a path is expected; pass json.loads(text) instead")
    raw = Raw({}, source=str(source))
    parsed = _parse(_text(Path(source)), raw.source)
    if not isinstance(parsed, dict):
        raise ConfigError(f"the file holds {found(parsed)}, and a job is an object ({{...}})", raw.source)
    raw.values = _plain(parsed, "", raw.problems)
    return raw


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        siblings = sorted(other.name for other in path.parent.glob("*.json")) if path.parent.is_dir() else []
        close = nearest(path.name, siblings)
        hint = f"; did you mean {path.parent / close}?" if close else f" (looked from {Path.cwd()})"
        raise ConfigError(f"there is no such file{hint}", str(path)) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the file cannot be read as UTF-8 text: {error}", str(path)) from None


def _parse(text: str, source: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=_object)
    except json.JSONDecodeError as error:
        line = text.splitlines()[error.lineno - 1].strip() if error.lineno <= len(text.splitlines()) else ""
        hint = "; JSON has no comments, remove them" if line.startswith(("//", "#", "/*")) else ""
        where = f"{source}:{error.lineno}:{error.colno}"
        problem = f"line {error.lineno}, column {error.colno}: not JSON: {error.msg}, at {found(line)}{hint}"
        raise ConfigError(problem, where) from None


def _object(pairs: list[tuple[str, Any]]) -> _Object:
    result = _Object(pairs)
    names = [name for name, _ in pairs]
    result.twice = tuple(name for name in result if names.count(name) > 1)
    return result


def _plain(value: Any, path: str, problems: list[str]) -> Any:
    """``value`` with only JSON's own types in it; what is none of them is reported, and left out of what holds it."""
    if isinstance(value, Mapping):
        if isinstance(value, _Object):
            problems += [
                f"{_below(path, name)}: written more than once in the same object; keep one" for name in value.twice
            ]
        problems += [
            f"{_below(path, str(name))}: the key {name!r} is no string" for name in value if not isinstance(name, str)
        ]
        plain = {str(name): _plain(item, _below(path, str(name)), problems) for name, item in value.items()}
        return {name: item for name, item in plain.items() if item is not _NOT_JSON}
    if isinstance(value, (list, tuple)):
        items = [_plain(item, f"{path}[{index}]", problems) for index, item in enumerate(value)]
        return _NOT_JSON if any(item is _NOT_JSON for item in items) else items
    if isinstance(value, float) and not math.isfinite(value):
        if path == _INFINITE_ORDER and value > 0:
            return "inf"
        problems.append(f"{path}: {value} is not a JSON number; write a finite one")
        return _NOT_JSON
    if value is None or isinstance(value, (str, int, float)):
        return value
    problems.append(f"{path}: {found(value)} is no JSON value; a job holds strings, numbers, booleans, lists, objects")
    return _NOT_JSON


def _below(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
