"""Which entries of a torch.distributed.checkpoint folder are weights, and which optimizer state: arithmetic on names.

A job saves nested dicts, and the folder flattens them into dotted names. Its index mostly tells the path of each
entry: `("model", "layer.weight")`, `("optim", "state", "layer.weight", "exp_avg")` for what `get_optimizer_state_dict`
returns, and `("optim", "state.layer.weight.exp_avg")` where that was asked to flatten.
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
    parts = {name: _parts(name, planner) for name in infos}
    paths = {name: tuple(".".join(known).split(".")) for name, known in parts.items()}
    roots = _optimizer_roots(paths.values())
    optimizer = {name: path[len(root) :] for name, path in paths.items() if (root := _root(path, roots)) is not None}
    tensors = {name: known for name, known in parts.items() if name not in optimizer and infos[name] is not None}
    found = Entries(weights=_weights(tensors))
    weights = {entry.name: infos[entry.stored] for entry in found.weights}
    for stored, rest in optimizer.items():
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


def _parts(name: str, planner: Mapping[Any, Any]) -> Path:
    """The keys of the nested dicts that led to the entry, as far as that is known."""
    known = planner.get(name)
    return tuple(map(str, known)) if isinstance(known, tuple) and known else (name,)


def _optimizer_roots(paths: Iterable[Path]) -> set[Path]:
    """The paths under which optimizers lie; () for an optimizer's state saved by itself."""
    roots: set[Path] = set()
    for path in paths:
        for depth in range(min(3, len(path))):
            named = depth > 0 and path[depth - 1] in OPTIMIZERS
            if (path[depth] == "param_groups" and depth < 2) or (named and path[depth] == "state"):
                roots.add(path[:depth])
    return roots


def _root(path: Path, roots: set[Path]) -> Path | None:
    for root in roots:
        if path[: len(root)] == root and path[len(root) : len(root) + 1] in (("state",), ("param_groups",)):
            return root
    return None


def _weights(parts: Mapping[str, Path]) -> list[Entry]:
    """The tensors of the model's dict; of all the folder where none is known to be that."""
    for root in [(name,) for name in MODELS] + [(APP, name) for name in MODELS]:
        under = {name: known[len(root) :] for name, known in parts.items() if known[: len(root)] == root}
        if any(under.values()):
            return [Entry(name, ".".join(rest)) for name, rest in under.items() if rest]
    names = {name: ".".join(known) for name, known in parts.items()}
    prefix = next((f"{top}." for top in (*MODELS, APP) if all(n.startswith(f"{top}.") for n in names.values())), "")
    return [Entry(stored, name.removeprefix(prefix)) for stored, name in names.items()]


def _split(path: Path, weights: Mapping[str, Any]) -> tuple[str, str]:
    """The weight's name and the state's: the longest weight that the path starts with, else all but the last part."""
    for end in range(len(path) - 1, 0, -1):
        if (name := ".".join(path[:end])) in weights:
            return name, ".".join(path[end:])
    return ".".join(path[:-1]), path[-1]
