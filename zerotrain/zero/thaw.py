"""Parameters that were frozen when the units were laid out and require gradients now.

A frozen parameter has no place for a gradient, no master and no optimizer state. When it is thawed its unit is laid out
anew: the whole values and states are put together, cut along the new layout, and let go again, one unit at a time.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from zerotrain.errors import ZerotrainError
from zerotrain.zero.access import Access
from zerotrain.zero.build import BuildOptions, make_buffers
from zerotrain.zero.discover import UnitSpec
from zerotrain.zero.unit import Unit


def thaw(access: Access, options: BuildOptions) -> None:
    """Lay out again every unit with a parameter that has come to require gradients. Every rank must call this.

    Raises ZerotrainError inside an accumulation window, whose gradients lie in the old layout.
    """
    thawed = {place.unit for place in access.model.places() if _is_thawed(place.parameter, place.buffer.trainable)}
    for unit in [unit for unit in access.model.units if unit in thawed]:
        _lay_out_again(unit, access, options)


def _is_thawed(parameter: nn.Parameter, trainable: bool) -> bool:
    return parameter.requires_grad and not trainable


def _lay_out_again(unit: Unit, access: Access, options: BuildOptions) -> None:
    model, optimizer = access.model, access.optimizer
    for buffer in unit.trainable:
        if buffer.gradients is not None and any(buffer.gradients.touched):
            raise ZerotrainError(
                f"parameters of unit '{unit.name}' were unfrozen inside an accumulation window; do it between steps"
            )
    places = [place for place in model.places() if place.unit is unit]
    values = {place.parameter: access.parameter(place) for place in places}
    states: dict[nn.Parameter, dict[str, Any]] = {}
    if optimizer is not None:
        states = {place.parameter: access.optimizer_states(place) for place in places if place.buffer.trainable}
        optimizer.forget(unit.trainable)
    unit.wait()
    dtypes = {parameter: parameter.dtype for parameter in values}
    spec = UnitSpec(unit.name, list(unit.modules), [(p.name, p.parameter) for p in places], unit.tied)
    unit.lay_out(make_buffers(spec, model.plan, access.world, options, dtypes, values))
    model.index(unit)
    if optimizer is not None:
        for parameter, state in states.items():
            if state:
                optimizer.optimizer.state[parameter] = state
        optimizer.adopt_groups(laid_out_again=True)
    unit.pinned = False
    if unit.running == 0:
        unit.release()
