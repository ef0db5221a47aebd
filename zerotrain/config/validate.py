"""Checking plain values against the models: unknown keys, keys of DeepSpeed's own, wrong types and bad values."""

from __future__ import annotations

import functools
import itertools
import re
import types
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from zerotrain.config.errors import found, nearest, one_of
from zerotrain.config.foreign import FOREIGN
from zerotrain.config.schema import Config
from zerotrain.config.values import unquote_hint

Model = TypeVar("Model", bound=BaseModel)
Loc = tuple[int | str, ...]


@dataclass
class Findings:
    """What checking a job has found so far."""

    problems: list[str] = field(default_factory=list)
    """One text per problem, beginning with its path."""

    ignored: list[str] = field(default_factory=list)
    """Paths of accepted keys that have no effect."""

    faulty: set[str] = field(default_factory=set)
    """Paths whose values are among the problems; what is checked later must not build on them."""

    def fault(self, path: str, text: str) -> None:
        """Record that the value at ``path`` is a problem."""
        self.problems.append(f"{path}: {text}")
        self.faulty.add(path)


def spell(loc: Loc) -> str:
    """A path in the file: ``zero_optimization.units[0]``."""
    text = ""
    for step in loc:
        text += f"[{step}]" if isinstance(step, int) else f".{step}" if text else step
    return text


def section_of(info: FieldInfo) -> type[BaseModel] | None:
    """The model of a field that holds an object with keys of its own, else None."""
    annotation = info.annotation
    options = get_args(annotation) if isinstance(annotation, types.UnionType) else (annotation,)
    return next((option for option in options if isinstance(option, type) and issubclass(option, BaseModel)), None)


def keys_of(model: type[BaseModel]) -> dict[str, FieldInfo]:
    """The fields of ``model`` by the keys that they have in the file."""
    return {info.alias or name: info for name, info in model.model_fields.items()}


def known_paths(model: type[BaseModel], prefix: str = "") -> list[str]:
    """The path of every key of ``model`` and of the objects in it, in the order of their declaration."""
    paths: list[str] = []
    for name, info in keys_of(model).items():
        paths.append(prefix + name)
        below = section_of(info)
        if below is not None:
            paths += known_paths(below, f"{prefix}{name}.")
    return paths


def sift(values: dict[str, Any], model: type[BaseModel], findings: Findings, prefix: str = "") -> dict[str, Any]:
    """The part of ``values`` that ``model`` has keys for; everything else goes to ``findings``."""
    root = prefix == ""
    kept: dict[str, Any] = {}
    for name, value in values.items():
        path = prefix + name
        info = keys_of(model).get(name)
        below = section_of(info) if info else None
        if root and name == "$schema":
            continue
        if path in FOREIGN:
            refusal = FOREIGN[path].refusal(value)
            if refusal:
                findings.fault(path, f"{found(value)} {refusal}")
            else:
                findings.ignored.append(path)
        elif info is None:
            findings.fault(path, f"unknown key{_suggestion(name, model, prefix)}")
        elif value == "auto" and "auto" not in _literals(info):
            findings.fault(path, auto_text(info))
        elif below is not None and isinstance(value, dict):
            kept[name] = sift(value, below, findings, f"{path}.")
        else:
            kept[name] = value
    return kept


def _literals(info: FieldInfo) -> tuple[Any, ...]:
    """The texts that a field takes, where it takes only some."""
    options = get_args(info.annotation)
    return tuple(
        text for option in (info.annotation, *options) if get_origin(option) is Literal for text in get_args(option)
    )


def describe(info: FieldInfo) -> str:
    """The docstring of a field, on one line."""
    return " ".join((info.description or "").split())


def auto_text(info: FieldInfo | None) -> str:
    """Why ``"auto"`` cannot be used for a key, and what to write there."""
    text = '"auto" is for a trainer that fills it in, and none does here; write the value'
    optional = info is not None and not info.is_required()
    return f"{text}, or leave the key out for its default {default_of(info)}" if optional and info else text


def validated(values: dict[str, Any], model: type[Model], findings: Findings, prefix: str = "") -> Model | None:
    """``values`` as a ``model``, without those that are refused, which go to ``findings``.

    None where a value that has no default is missing or refused, so that nothing can be built.
    """
    while True:
        try:
            return model.model_validate(values)
        except ValidationError as error:
            for detail in error.errors(include_url=False):
                path = prefix + spell(detail["loc"])
                if path not in findings.faulty:
                    findings.fault(path, _explain(detail, model, prefix))
            dropped = [_drop(values, detail) for detail in error.errors(include_url=False)]
            if not all(dropped):
                return None


def _drop(values: dict[str, Any], detail: ErrorDetails) -> bool:
    """Remove a refused value, or the object that lacks a key; False where the root itself lacks it."""
    names = list(itertools.takewhile(lambda step: isinstance(step, str), detail["loc"]))
    if detail["type"] == "missing":
        names.pop()
    if not names:
        return False
    here: Any = values
    for name in names[:-1]:
        here = here.get(name, {})
    here.pop(names[-1], None)
    return True


def _explain(detail: ErrorDetails, model: type[BaseModel], prefix: str) -> str:
    kind, value, context = detail["type"], detail["input"], detail.get("ctx", {})
    info = _field(model, detail["loc"])
    if kind == "refused":
        return str(detail["msg"])
    if kind == "missing":
        return f"missing, and it has no default. {describe(info) if info else ''}".rstrip()
    if kind == "extra_forbidden":
        return f"unknown key{_suggestion(str(detail['loc'][-1]), model, prefix)}"
    expected = _EXPECTED.get(kind, str(detail["msg"])).format_map(context)
    text = f"{found(value)} {expected}"
    if kind == "literal_error":
        close = nearest(value, re.findall(r"'([^']*)'", context["expected"])) if isinstance(value, str) else None
        text += f'; did you mean "{close}"?' if close else ""
    if kind == "float_type":
        text += unquote_hint(value)
    if info is None or info.is_required():
        return text
    return f"{text}; left out, it is {default_of(info)}"


_EXPECTED = {
    "bool_type": "is not true or false",
    "float_type": "is not a number",
    "string_type": "is not a string",
    "tuple_type": "is not a list of strings",
    "dict_type": "is not an object ({{...}})",
    "model_type": "is not an object ({{...}})",
    "greater_than_equal": "is too small (at least {ge})",
    "greater_than": "is too small (more than {gt})",
    "less_than_equal": "is too large (at most {le})",
    "less_than": "is too large (less than {lt})",
    "literal_error": "is not one of {expected}",
    "finite_number": "is not a finite number",
}


def _field(model: type[BaseModel], loc: Loc) -> FieldInfo | None:
    info: FieldInfo | None = None
    here: type[BaseModel] | None = model
    for step in loc:
        if here is None or step not in keys_of(here):
            break
        info = keys_of(here)[str(step)]
        here = section_of(info)
    return info


def default_of(info: FieldInfo) -> str:
    """The default of a field that has one, as the file would spell it."""
    value = info.get_default(call_default_factory=True, validated_data={})
    return "the object's own default" if isinstance(value, BaseModel) else found(value)


def _suggestion(name: str, model: type[BaseModel], prefix: str) -> str:
    """What the unknown key ``name`` was most likely meant to be: the same word elsewhere, or a like one here."""
    here = [*keys_of(model), *(path.removeprefix(prefix) for path in FOREIGN if path.startswith(prefix))]
    elsewhere = [path for path in _every_path() if path.rpartition(".")[2] == name.lower()]
    close = nearest(name, here, cutoff=0.85 if elsewhere else 0.6)
    if close:
        return f"; did you mean {prefix}{close}?"
    if elsewhere:
        return f" here; did you mean {one_of(elsewhere)}?"
    return "; zerotrain.json_schema() lists the keys there are"


@functools.cache
def _every_path() -> tuple[str, ...]:
    return (*known_paths(Config), *FOREIGN)
