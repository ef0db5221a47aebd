"""The one error of the job file, and how its texts spell what was found."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Sequence
from typing import Any

_LONGEST = 60


class ConfigError(ValueError):
    """A job file (or what was built from it) that cannot be run, with every problem found in it.

    ``problems`` holds one text per problem, each beginning with its path in the file
    (``zero_optimization.stage: 4 is not a stage (0, 1, 2 or 3)``); ``source`` names the file, or is empty when the
    config came as a mapping.
    """

    problems: tuple[str, ...]
    source: str

    def __init__(self, problems: str | Sequence[str], source: str = "") -> None:
        """Take one problem or several; none at all is a mistake of the caller."""
        self.problems = (problems,) if isinstance(problems, str) else tuple(problems)
        self.source = source
        super().__init__(self.problems, source)

    def __str__(self) -> str:
        """One problem on one line; several as a numbered list under a headline."""
        if len(self.problems) == 1:
            return f"{self.source}: {self.problems[0]}" if self.source else self.problems[0]
        lines = [f"{self.source or 'the config'} has {len(self.problems)} problems:"]
        return "\n".join(lines + [f"  {number}. {text}" for number, text in enumerate(self.problems, 1)])


def found(value: Any) -> str:
    """``value`` as the job file would spell it, cut to a readable length."""
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):
        text = f"{value!r} (a Python {type(value).__name__})"
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."


def nearest(name: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The member of ``known`` that ``name`` was most likely meant to be, whatever its case, or None."""
    by_lower = {candidate.lower(): candidate for candidate in known}
    close = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=cutoff)
    return by_lower[close[0]] if close else None


def one_of(names: Sequence[str]) -> str:
    """``a, b or c``."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} or {names[-1]}"
