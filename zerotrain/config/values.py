"""Field types of the job file: how a JSON value becomes a Python one, and what the refusal says."""

from __future__ import annotations

import math
import re
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer, WithJsonSchema
from pydantic_core import PydanticCustomError

from zerotrain.config.errors import found


class Section(BaseModel):
    """An object of the job file: frozen, without unknown keys, without conversions between types."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True)


def refuse(text: str) -> PydanticCustomError:
    """A refusal whose text is ``text``: it follows the path, so it starts with what was found."""
    return PydanticCustomError("refused", "{text}", {"text": text})


def is_number(value: Any) -> bool:
    """Whether ``value`` is a finite JSON number; true and false are not."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def unquote_hint(value: Any) -> str:
    """The advice for a number that was written as a string, else nothing."""
    try:
        float(value if isinstance(value, str) else "")
    except ValueError:
        return ""
    return "; write it without quotes"


def _whole(value: Any) -> int:
    if not is_number(value) or value != int(value):
        raise refuse(f"{found(value)} is not a whole number (like 8 or 5e8){unquote_hint(value)}")
    return int(value)


def _norm_order(value: Any) -> float:
    if value in ("inf", math.inf):
        return math.inf
    if not is_number(value) or value <= 0:
        raise refuse(f'{found(value)} is not the order of a norm (a number above 0, or "inf" for the largest entry)')
    return float(value)


def _stage(value: Any) -> int:
    if isinstance(value, bool) or value not in (0, 1, 2, 3):
        raise refuse(f"{found(value)} is not a stage (0, 1, 2 or 3)")
    return int(value)


def _size(value: Any) -> int:
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B\s*", value) if isinstance(value, str) else None
    if match is None:
        if isinstance(value, str):
            raise refuse(f'{found(value)} is not a size: a number of bytes, or text such as "5GB" or "512MiB"')
        return _whole(value)
    power = " KMGT".index(match[2] or " ")
    return int(float(match[1]) * (1024 if match[3] else 1000) ** power)


def _per_group(value: Any) -> float | tuple[float, ...]:
    if is_number(value):
        return float(value)
    if not isinstance(value, (list, tuple)) or not value or not all(map(is_number, value)):
        text = f"{found(value)} is not a number, nor a list with one number for each parameter group"
        raise refuse(text + unquote_hint(value))
    return tuple(float(item) for item in value)


def _tupled(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _spell_order(value: float) -> float | str:
    return "inf" if value == math.inf else value


Positive = Annotated[int, Field(ge=1), BeforeValidator(_whole)]
"""A whole number of at least 1; ``5e8`` counts as one, since DeepSpeed's files write sizes so."""

Natural = Annotated[int, Field(ge=0), BeforeValidator(_whole)]
"""A whole number of at least 0."""

ScalePower = Annotated[int, Field(ge=0, le=127), BeforeValidator(_whole)]
"""An exponent of 2 whose power fits fp32."""

Seed = Annotated[int, Field(ge=0, lt=2**63), BeforeValidator(_whole)]
"""A seed that torch takes."""

Size = Annotated[int, Field(ge=1), BeforeValidator(_size), WithJsonSchema({"type": ["integer", "string"]})]
"""Bytes: a whole number, or text such as ``"5GB"``."""

Finite = Annotated[float, Field(allow_inf_nan=False)]
"""A number; neither infinite nor NaN."""

Stage = Annotated[int, BeforeValidator(_stage), WithJsonSchema({"type": "integer", "enum": [0, 1, 2, 3]})]
"""A ZeRO stage."""

NormOrder = Annotated[
    float,
    BeforeValidator(_norm_order),
    PlainSerializer(_spell_order),
    WithJsonSchema({"anyOf": [{"type": "number", "exclusiveMinimum": 0}, {"const": "inf"}]}),
]
"""The order p of a norm: a number above 0; ``"inf"`` in the file is ``math.inf`` here."""

Names = Annotated[tuple[str, ...], BeforeValidator(_tupled)]
"""A list of strings, held as a tuple."""

PerGroup = Annotated[float | tuple[float, ...], BeforeValidator(_per_group)]
"""One number for all parameter groups, or a list with one number for each."""
