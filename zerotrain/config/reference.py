"""The job file described from its models: a JSON Schema for editors, and the tables of ``configs/README.md``.

``python -m zerotrain.config configs/README.md`` writes the tables into the file, between its two markers.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from zerotrain.config.errors import found
from zerotrain.config.foreign import FOREIGN
from zerotrain.config.schedules import DEEPSPEED_SCHEDULES
from zerotrain.config.schema import Config
from zerotrain.config.validate import default_of, describe, keys_of, section_of

BEGIN = "<!-- written by `python -m zerotrain.config configs/README.md`; do not edit by hand -->"
END = "<!-- end of the written part -->"


def json_schema() -> dict[str, Any]:
    """A JSON Schema (draft 2020-12) of the job file, for editors: types, defaults, descriptions, unknown keys refused.

    DeepSpeed's keys that are accepted without effect are in it, marked as deprecated.
    """
    schema = Config.model_json_schema()
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    schema["title"] = "zerotrain job"
    schema["properties"]["$schema"] = {"type": "string", "description": "Where this schema is; for editors."}
    for path, foreign in FOREIGN.items():
        section, _, name = path.rpartition(".")
        holder = schema["$defs"][_definition(section)] if section else schema
        text = f"DeepSpeed's. Accepted only switched off: {foreign.asks_for} is not there." if foreign.asks_for else ""
        holder["properties"][name] = {"description": text or "DeepSpeed's. Has no effect here.", "deprecated": True}
    _one_line(schema)
    return schema


def reference_tables() -> str:
    """Markdown tables of every key with its default and meaning, of the five schedules, and of DeepSpeed's keys."""
    parts = ["### The top of the file", _table(Config)]
    for name, info in keys_of(Config).items():
        section = section_of(info)
        if section is not None:
            parts += [f"### `{name}`", " ".join((section.__doc__ or "").split()), _table(section)]
    parts.append("## Schedules")
    for schedule, params in DEEPSPEED_SCHEDULES.items():
        parts += [f"### `{schedule}`", " ".join((params.__doc__ or "").split()), _table(params)]
    parts += ["## Keys of DeepSpeed", _foreign_lists()]
    return "\n\n".join(parts)


def with_tables(text: str) -> str:
    """``text`` with `reference_tables()` between its two markers; ValueError where it lacks them."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"the text lacks one of the markers {BEGIN!r} and {END!r}")
    return f"{before}{BEGIN}\n\n{reference_tables()}\n\n{END}{after}"


def _table(model: type[BaseModel]) -> str:
    rows = ["| key | default | meaning |", "|---|---|---|"]
    for name, info in keys_of(model).items():
        section = section_of(info)
        default = "required" if info.is_required() else f"`{default_of(info)}`"
        if section is not None and info.default is not None:
            default = "all defaults"
        meaning = describe(info) + (" See its table below." if section is not None else "")
        rows.append(f"| `{name}` | {default} | {meaning} |")
    return "\n".join(rows)


def _foreign_lists() -> str:
    silent = ", ".join(f"`{path}`" for path, foreign in FOREIGN.items() if not foreign.asks_for)
    rows = ["| key | asks for | instead |", "|---|---|---|"]
    rows += [
        f"| `{path}` | {foreign.asks_for} | {foreign.instead or 'remove it or switch it off'} |"
        for path, foreign in FOREIGN.items()
        if foreign.asks_for
    ]
    off = " ".join(f"`{found(value)}`," for value in (None, False, {"enabled": False}))
    return (
        f"Accepted, and named once in the log as having no effect here: {silent}.\n\n"
        "Refused where they ask for something that zerotrain does not have, since leaving it out would change the "
        f"result or the memory of a run; accepted, without effect, where they are switched off ({off} "
        f"`{found({'device': 'none'})}`, or DeepSpeed's default):\n\n" + "\n".join(rows)
    )


def _definition(section: str) -> str:
    model = section_of(Config.model_fields[section])
    if model is None:
        raise LookupError(f"{section} is not an object of the job file")
    return model.__name__


def _one_line(schema: Any) -> None:
    """Undo the line breaks that descriptions have from the source."""
    if isinstance(schema, dict):
        if isinstance(schema.get("description"), str):
            schema["description"] = " ".join(schema["description"].split())
        for value in schema.values():
            _one_line(value)
    elif isinstance(schema, list):
        for value in schema:
            _one_line(value)
