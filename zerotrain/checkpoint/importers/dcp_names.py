"""Which entries of a torch.distributed.checkpoint folder are weights, and which optimizer state: arithmetic on names.

A job saves nested dicts, and the folder flattens them into dotted names. Its index mostly tells the path of each
entry: `("optim", "state", "layer.weight", "exp_avg")` for what `get_optimizer_state_dict` returns, and
`("optim", "state.layer.weight.exp_avg")` where that was asked to flatten. Without paths the dots have to do.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from zerotrain.checkpoint.source import TensorInfo, state_key

OPTIMIZERS = ("optim", "optimizer", "optimizers", "optimizer_state_dict")
MODELS = ("model", "module", "state_dict", "model_state_dict")
APP = "app"
"""The name under which PyTorch's tutorials keep the object that holds model and optimizer."""


class Entry(NamedTuple):
    """`stored`: its name in the folder; `name`: the weight's; `state`: which state of it, if it is one."""

    stored: str
    name: str
    state: str = ""

    @property
    def key(self) -> str:
        """Its key in a `Source`."""
        return state_key(self.name, self.state) if self.state else self.name


@dataclass
class Entries:
    """What the folder holds, sorted."""

    weights: list[Entry] = field(default_factory=list)
    states: list[Entry] = field(default_factory=list)
    scalars: list[Entry] = field(default_factory=list)


def sort_entries(infos: Mapping[str, TensorInfo | None], planner: Mapping[Any, Any]) -> Entries:
    """Sort the entries (`infos`: None for one that is no tensor). `planner`: their paths, as far as they are known."""
    paths = {name: _path(name, planner) for name in infos}
    roots = _optimizer_roots(paths.values())
    optimizer = {name: (root, path[len(root) :]) for name, path in paths.items() if (root := _root(path, roots)) is not None}
    found = Entries(weights=_weights({n: p for n, p in paths.items() if n not in optimizer and infos[n] is not None}))
    weights = {entry.name: infos[entry.stored] for entry in found.weights}
    for stored, (_, rest) in optimizer.items():
        if rest[0] != "state" or len(rest) < 3:
            continue
        name, state = _split(rest[1:], weights)
        if name.isdecimal() and name not in weights:
            continue  # a plain optimizer numbers its parameters, and nothing tells their names
        entry, info, weight = Entry(stored, name, state), infos[stored], weights.get(name)
        one_each = info is not None and (info.shape == weight.shape if weight else bool(info.shape))
        (found.states if one_each and state != "step" else found.scalars).append(entry)
    return found


Path = tuple[str, ...]
"""Names split at every dot: what stays together is put together by comparing with the weights' names."""


def _path(name: str, planner: Mapping[Any, Any]) -> Path:
    known = planner.get(name)
    parts = known if isinstance(known, tuple) else (name,)
    return tuple(piece for part in parts for piece in str(part).split("."))


def _optimizer_roots(paths: Iterable[Path]) -> set[Path]:
    """The paths under which optimizers lie; () for an optimizer's state saved by itself."""
    roots: set[Path] = set()
    for path in paths:
        for depth in range(min(3, len(path))):
            named = depth > 0 and path[depth - 1] in OPTIMIZERS
            if path[depth] == "param_groups" and depth < 2 or named and path[depth] == "state":
                roots.add(path[:depth])
    return roots


def _root(path: Path, roots: set[Path]) -> Path | None:
    for root in roots:
        if path[: len(root)] == root and path[len(root) : len(root) + 1] in (("state",), ("param_groups",)):
            return root
    return None


def _weights(paths: Mapping[str, Path]) -> list[Entry]:
    """Those under a key that is a model's name where there are such, else all."""
    for depth in (0, 1):
        for root in MODELS:
            under = [n for n, path in paths.items() if path[depth : depth + 1] == (root,) and path[:depth] in ((), (APP,))]
            if under and len(under) >= len(paths) / 2:
                return [Entry(name, ".".join(paths[name][depth + 1 :])) for name in under if len(paths[name]) > depth + 1]
    drop = 1 if paths and all(path[0] == APP and len(path) > 1 for path in paths.values()) else 0
    return [Entry(name, ".".join(path[drop:])) for name, path in paths.items()]


def _split(path: Path, weights: Mapping[str, Any]) -> tuple[str, str]:
    """The weight's name and the state's: the longest weight that the path starts with, else all but the last part."""
    for end in range(len(path) - 1, 0, -1):
        if (name := ".".join(path[:end])) in weights:
            return name, ".".join(path[end:])
    return ".".join(path[:-1]), path[-1]
