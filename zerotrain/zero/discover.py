"""Which parameters travel together: units found from the module tree.

Repeated blocks come first (the layers of a transformer, the stages of a convolutional network), then what is left,
by the modules that own it. Small neighbours are merged, since every unit costs a collective's latency.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from torch import nn

_LISTS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)  # containers that are never called
LARGE = 0.25  # a block with more than this part of the model, and blocks inside, is looked into


@dataclass
class UnitSpec:
    """The parameters of one unit-to-be by name, and the modules where a forward pass enters it."""

    name: str
    modules: list[nn.Module]
    parameters: list[tuple[str, nn.Parameter]] = field(default_factory=list)
    tied: bool = False
    """Some parameter is reached through more than one module."""

    @property
    def numel(self) -> int:
        """Elements of all its parameters."""
        return sum(p.numel() for _, p in self.parameters)

    def merge(self, other: UnitSpec) -> None:
        """Take in the parameters and entries of a neighbour."""
        self.modules += [m for m in other.modules if m not in self.modules]
        self.parameters += other.parameters
        self.tied = self.tied or other.tied


def find_units(
    model: nn.Module, patterns: Sequence[str] = (), min_elements: int = 0, max_elements: int | None = None
) -> list[UnitSpec]:
    """The units of `model` in the order of its modules. Every parameter is in exactly one, however often it is tied.

    `patterns` (fnmatch, over module paths) replace the search for repeated blocks. Neighbours of less than
    `min_elements` are merged, up to `max_elements`. ValueError where a pattern matches no module.
    """
    blocks = _matching(model, patterns) if patterns else repeated_blocks(model)
    block_of = {id(m): path for path, block in blocks.items() for m in block.modules()}
    specs: dict[object, UnitSpec] = {}
    for name, parameter, owners in _owned(model):
        homes = {block_of.get(id(module)) for _, module in owners}
        home = next(iter(homes))
        if len(homes) == 1 and home is not None:  # every use of the parameter is inside one block
            spec = specs.setdefault(home, UnitSpec(home, [blocks[home]]))
        else:
            key = tuple(id(module) for _, module in owners)
            spec = specs.setdefault(key, UnitSpec(owners[0][0] or "root", [module for _, module in owners]))
        spec.parameters.append((name, parameter))
        spec.tied = spec.tied or len(owners) > 1
    return _merged(specs.values(), min_elements, max_elements)


def aliases(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """For each parameter, by its first name, all names it has in the model, in order: more than one where it is tied."""
    found: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        found.setdefault(id(parameter), []).append(name)
    return {names[0]: tuple(names) for names in found.values()}


def _owned(model: nn.Module) -> list[tuple[str, nn.Parameter, list[tuple[str, nn.Module]]]]:
    """Each parameter once: first name, itself, and the callable modules (with path) through which it is reached."""
    found: dict[int, tuple[str, nn.Parameter, list[tuple[str, nn.Module]]]] = {}

    def visit(path: str, module: nn.Module, caller: tuple[str, nn.Module]) -> None:
        caller = caller if isinstance(module, _LISTS) else (path, module)
        for name, parameter in module._parameters.items():
            if parameter is not None:
                entry = found.setdefault(id(parameter), (f"{path}.{name}" if path else name, parameter, []))
                if all(known is not caller[1] for _, known in entry[2]):
                    entry[2].append(caller)
        for name, child in module._modules.items():
            if child is not None:
                visit(f"{path}.{name}" if path else name, child, caller)

    visit("", model, ("", model))
    return list(found.values())


def repeated_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """The outermost children of lists and sequences that have siblings of their own class, by path."""
    total = max(1, sum(p.numel() for p in model.parameters()))
    blocks: dict[str, nn.Module] = {}

    def visit(path: str, module: nn.Module) -> None:
        is_list = isinstance(module, (nn.ModuleList, nn.ModuleDict, nn.Sequential))
        kinds = Counter(type(child) for child in module.children() if _size(child))
        for name, child in module.named_children():
            size, where = _size(child), f"{path}.{name}" if path else name
            block = is_list and size and kinds[type(child)] > 1 and not isinstance(child, _LISTS)
            if block and not (size > LARGE * total and _holds_blocks(child)):
                blocks[where] = child
            else:
                visit(where, child)

    visit("", model)
    return blocks


def _holds_blocks(module: nn.Module) -> bool:
    """Whether there is a list of compound modules of one class inside."""
    for inner in module.modules():
        if isinstance(inner, (nn.ModuleList, nn.Sequential)):
            kinds = Counter(type(c) for c in inner.children() if _size(c) and any(c.children()))
            if any(count > 1 for count in kinds.values()):
                return True
    return False


def _matching(model: nn.Module, patterns: Sequence[str]) -> dict[str, nn.Module]:
    found: dict[str, nn.Module] = {}
    for pattern in patterns:
        hits = {path: m for path, m in model.named_modules() if path and fnmatchcase(path, pattern) and _size(m)}
        if not hits:
            raise ValueError(f"zero_optimization.units: {pattern!r} matches no module with parameters")
        uncalled = [path for path, m in hits.items() if isinstance(m, _LISTS)]
        if uncalled:
            raise ValueError(
                f"zero_optimization.units: {pattern!r} matches {uncalled[0]!r}, a list that is never called itself; "
                f"match its items ('{uncalled[0]}.*')"
            )
        found.update(hits)
    return {p: m for p, m in found.items() if not any(p.startswith(outer + ".") for outer in found)}


def _size(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def _merged(specs: Iterable[UnitSpec], smallest: int, largest: int | None) -> list[UnitSpec]:
    merged: list[UnitSpec] = []
    for spec in specs:
        last = merged[-1] if merged else None
        small = last is not None and min(last.numel, spec.numel) < smallest
        if last is not None and small and (largest is None or last.numel + spec.numel <= largest):
            last.merge(spec)
        else:
            merged.append(spec)
    return merged
