"""From a model as the user made it to units: rank 0's values, laid out flat, in the dtypes of the job."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from zerotrain.comm import Channel
from zerotrain.zero.discover import UnitSpec, find_units
from zerotrain.zero.gradients import LARGE, Partition, accumulation_dtype
from zerotrain.zero.layout import FlatLayout
from zerotrain.zero.unit import FlatBuffer, Unit

ALIGN = 32  # elements; parameters of such sizes go first, so that the odd ones do not shift them off vector boundaries


@dataclass(frozen=True)
class BuildOptions:
    """How units are cut and kept. `compute_dtype` None keeps every parameter in the dtype it came in."""

    device: torch.device
    compute_dtype: torch.dtype | None = None
    keep_wide: tuple[str, ...] = ()
    """fnmatch patterns of parameter names that stay in fp32 under a 16-bit compute dtype."""
    units: tuple[str, ...] = ()
    min_elements: int = 0
    max_elements: int | None = None
    group_of: Callable[[nn.Parameter], int] = field(default=lambda parameter: 0)
    """Optimizer group of a parameter: those of one group lie side by side, to be stepped as one tensor."""


def build_units(model: nn.Module, plan: Partition, world: Channel, options: BuildOptions) -> list[Unit]:
    """Lay the model's parameters out in units. Every rank ends with rank 0's values; sharded units end released."""
    dtypes = target_dtypes(model, options)
    units = []
    for spec in find_units(model, options.units, options.min_elements, options.max_elements):
        unit = Unit(spec.name, spec.modules, make_buffers(spec, plan, world, options, dtypes), spec.tied)
        unit.release()
        units.append(unit)
    return units


def make_buffers(
    spec: UnitSpec,
    plan: Partition,
    world: Channel,
    options: BuildOptions,
    dtypes: dict[nn.Parameter, torch.dtype],
    values: dict[nn.Parameter, torch.Tensor] | None = None,
) -> list[FlatBuffer]:
    """One flat buffer for each dtype, trainable and frozen apart, in the order of the parameters.

    `values` are whole values to take instead of those that the parameters hold.
    """
    source: dict[nn.Parameter, torch.Tensor] = {p: p.detach() for _, p in spec.parameters} if values is None else values
    sorts: dict[tuple[torch.dtype, torch.dtype, bool], list[tuple[str, nn.Parameter]]] = {}
    for name, parameter in spec.parameters:
        key = (source[parameter].dtype, dtypes.get(parameter, parameter.dtype), parameter.requires_grad)
        sorts.setdefault(key, []).append((name, parameter))
    buffers = []
    for (given, kept, trainable), members in sorts.items():
        members.sort(key=lambda member: _order(member[1], options))
        sort = f" ({kept}, {'trainable' if trainable else 'frozen'})" if len(sorts) > 1 else ""
        buffer = FlatBuffer(f"unit '{spec.name}'{sort}", members, plan)
        wide = accumulation_dtype(given) if trainable else given
        whole = flattened(buffer.layout, [source[p] for _, p in members], wide, options.device)
        world.broadcast(whole, buffer.name)
        buffer.fill(whole, kept)
        buffers.append(buffer)
    return buffers


def _order(parameter: nn.Parameter, options: BuildOptions) -> tuple[bool, int, bool]:
    """Large parameters first (see `Gradients`), those of one optimizer group side by side, odd sizes last."""
    return parameter.numel() < LARGE, options.group_of(parameter), parameter.numel() % ALIGN != 0


def flattened(
    layout: FlatLayout, values: Sequence[torch.Tensor], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Whole `values` in one flat tensor of numel `layout.numel`, zeros in the padding."""
    whole = torch.zeros(layout.numel, dtype=dtype, device=device)
    for slot, value in zip(layout.slots, values, strict=True):
        whole[slot.start : slot.stop].copy_(value.reshape(-1))
    return whole


def target_dtypes(model: nn.Module, options: BuildOptions) -> dict[nn.Parameter, torch.dtype]:
    """The dtype each parameter computes in.

    Under a 16-bit compute dtype fp32 stays for parameters that match `keep_wide`, for batch normalisation (its running
    statistics are fp32), and for what a transformers model declares (`_keep_in_fp32_modules`).
    """
    found = {p: p.dtype for p in model.parameters()}
    if options.compute_dtype is None:
        return found
    declared = {part for m in model.modules() for key in _DECLARATIONS for part in (getattr(m, key, None) or ())}
    for path, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is None or not parameter.is_floating_point() or parameter.dtype == torch.float64:
                continue
            full = f"{path}.{name}" if path else name
            wide = (
                isinstance(module, _BatchNorm)
                or any(fnmatchcase(full, pattern) for pattern in options.keep_wide)
                or not declared.isdisjoint(full.split("."))
            )
            found[parameter] = torch.float32 if wide else options.compute_dtype
    return found


_DECLARATIONS = ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict")


def check_model(model: nn.Module) -> None:
    """ValueError for a model that cannot be laid out: parameters on several devices, or on meta."""
    devices: dict[torch.device, str] = {}
    for name, parameter in model.named_parameters():
        devices.setdefault(parameter.device, name)
    if len(devices) > 1:
        where = ", ".join(f"'{name}' on {device}" for device, name in devices.items())
        raise ValueError(f"the model's parameters are on several devices ({where}); move it to one before initialize()")
    if any(device.type == "meta" for device in devices):
        raise ValueError(
            "the model is on the meta device and has no values; materialise it (model.to_empty, then its initialisation)"
        )
    if not devices:
        raise ValueError("the model has no parameters, so nothing in it is trainable")
