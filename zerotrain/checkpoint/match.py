"""Which tensor of a checkpoint belongs to which of a model: pure arithmetic on names and shapes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

Shape = tuple[int, ...]
SHOWN = 8


@dataclass(frozen=True)
class Match:
    """`names`: the model's name -> the checkpoint's. The rest is what does not fit, one text each."""

    names: Mapping[str, str]
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    misshapen: tuple[str, ...] = ()
    prefix: str = field(default="")
    """What was taken off, or put before, all names for them to fit; for the log."""

    def problems(self) -> str:
        """What does not fit, in words; empty where everything does."""
        kinds = (("missing", self.missing), ("not in the model", self.unexpected), ("misshapen", self.misshapen))
        return "; ".join(f"{len(items)} {what}: {_shown(items)}" for what, items in kinds if items)


def _shown(items: tuple[str, ...]) -> str:
    more = f" and {len(items) - SHOWN} more" if len(items) > SHOWN else ""
    return ", ".join(items[:SHOWN]) + more


def match_names(
    wanted: Mapping[str, Shape], offered: Mapping[str, Shape], aliases: Mapping[str, str], tied: Mapping[str, str]
) -> Match:
    """Find each wanted tensor among the offered ones.

    A name fits as it is, or by another name that its tensor has: in the model (`aliases`: alias -> first name) or in the
    checkpoint (`tied`: alias -> stored name). Where most names do not fit, one prefix that all of the model, or all of the
    checkpoint, has more than the other is taken off (`module.`, `model.`): a model is often wrapped between two jobs.
    """
    best = _match(wanted, offered, aliases, tied, "", "")
    for mine, theirs in _prefixes(wanted, offered) if len(best.names) * 2 < len(wanted) else ():
        other = _match(wanted, offered, aliases, tied, mine, theirs)
        if len(other.names) > len(best.names):
            best = other
    return best


def _match(
    wanted: Mapping[str, Shape],
    offered: Mapping[str, Shape],
    aliases: Mapping[str, str],
    tied: Mapping[str, str],
    mine: str,
    theirs: str,
) -> Match:
    def found(name: str) -> str | None:
        if not name.startswith(mine):
            return None
        there = theirs + name[len(mine) :]
        return there if there in offered else tied.get(there)

    others: dict[str, list[str]] = {}
    for alias, first in aliases.items():
        others.setdefault(first, []).append(alias)
    names: dict[str, str] = {}
    missing, misshapen = [], []
    for name, shape in wanted.items():
        there = next((f for f in map(found, [name, *others.get(name, ())]) if f is not None), None)
        if there is None:
            missing.append(name)
        elif offered[there] != shape:
            misshapen.append(f"{name} ({_spell(offered[there])} in the checkpoint, {_spell(shape)} in the model)")
        else:
            names[name] = there
    used = {*names.values(), *(f for n in [*wanted, *aliases] if (f := found(n)) is not None)}
    unexpected = tuple(name for name in offered if name not in used)
    prefix = f"'{theirs}' for '{mine}'" if mine or theirs else ""
    return Match(names, tuple(missing), unexpected, tuple(misshapen), prefix)


def _spell(shape: Shape) -> str:
    return "x".join(map(str, shape)) or "scalar"


def _prefixes(wanted: Mapping[str, Shape], offered: Mapping[str, Shape]) -> Iterator[tuple[str, str]]:
    """Pairs (prefix of the model's names, prefix of the checkpoint's) under which some name fits."""
    for name in list(wanted)[:1]:
        yield from (("", there[: -len(name)]) for there in offered if there.endswith(f".{name}"))
    for there in list(offered)[:1]:
        yield from ((name[: -len(there)], "") for name in wanted if name.endswith(f".{there}"))
