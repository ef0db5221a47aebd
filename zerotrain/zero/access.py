"""Whole values of sharded states: reading, editing, and the rules that keep edits from being lost.

All of these are collective: every rank calls them, in the same order, for the same parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import ref

import torch
from torch import nn

from zerotrain.comm import Channel
from zerotrain.errors import ZerotrainError
from zerotrain.zero.optimizer import Segment, ShardedOptimizer, is_per_element
from zerotrain.zero.report import union
from zerotrain.zero.sharded import Place, ShardedModel
from zerotrain.zero.unit import FlatBuffer, Residence, Unit


class Access:
    """The states behind a model's parameters. `divisor()` turns sums of gradients of the open window into their mean."""

    def __init__(
        self,
        model: ShardedModel,
        optimizer: ShardedOptimizer | None,
        world: Channel,
        divisor: Callable[[], float],
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.world = world
        self.divisor = divisor
        for place in model.places():
            place.parameter._zerotrain_access = ref(self)  # type: ignore[attr-defined]

    # -- parameters ---------------------------------------------------------------------------------------------------

    def parameter(self, place: Place) -> torch.Tensor:
        """The whole values of a parameter, from the masters where there are any."""
        buffer = place.buffer
        self.model.adopt_edits()
        flat = buffer.whole(buffer.shard if buffer.master is None else buffer.master)
        return _cut(flat, place).clone()

    def set_parameter(self, place: Place, value: torch.Tensor) -> None:
        """Write whole values, into the masters too."""
        buffer = place.buffer
        wide = buffer.shard if buffer.master is None else buffer.master
        _write_share(wide, place, value)
        if buffer.master is not None:
            buffer.refresh_shard()
        if place.unit.residence is not Residence.SHARDED:
            place.unit.wait()  # a rebuild under way would overwrite the new values
            _cut(buffer.flat.data, place).copy_(value)
        buffer.bump_versions()

    # -- gradients ----------------------------------------------------------------------------------------------------

    def gradient(self, place: Place) -> torch.Tensor | None:
        """The mean gradient of the open window so far, or None where no rank has one."""
        gradients = place.buffer.gradients
        touched = gradients is not None and gradients.touched[place.index]
        flag = torch.tensor([touched], dtype=torch.uint8, device=self.world.device)
        if gradients is None or not bool(union(self.world, flag, f"gradient of {place.name}")):
            return None
        slot = gradients.layout.slots[place.index]
        total = torch.zeros(slot.numel, dtype=gradients.sum_dtype, device=gradients.device)
        mine = gradients.unreduced(place.index)
        if mine is not None:
            total += mine
        for share, copies in ((gradients.partial, 1), (gradients.settled, gradients.plan.replicate.size)):
            for low, high, offset in _own_range(place) if share is not None else ():
                total[low:high] += share[offset : offset + high - low] / copies  # type: ignore[index]
        if self.world.size > 1:
            self.world.all_reduce([total], total, total.dtype, f"gradient of {place.name}").wait()
        return total.div_(self.divisor()).view(slot.shape)

    def set_gradient(self, place: Place, value: torch.Tensor) -> None:
        """Put `value` in the place of the open window's mean gradient."""
        gradients = place.buffer.gradients
        if gradients is None:
            raise ZerotrainError(f"parameter '{place.name}' is frozen and has no gradient")
        total = (value.to(gradients.device, gradients.sum_dtype) * self.divisor()).reshape(-1)
        if gradients.settled is None and gradients.partial is None:  # nothing reduced: rank 0 speaks for all
            gradients.put(place.index, total if self.world.index == 0 else torch.zeros_like(total))
            return
        gradients.touched[place.index] = True
        if gradients.unreduced(place.index) is not None:
            gradients.put(place.index, torch.zeros_like(total))
        shares = [share for share in (gradients.settled, gradients.partial) if share is not None]
        speaks = gradients.settled is not None or gradients.plan.replicate.index == 0
        for low, high, offset in _own_range(place):
            for share in shares:
                share[offset : offset + high - low].zero_()
            if speaks:
                shares[0][offset : offset + high - low].copy_(total[low:high])

    # -- optimizer state ----------------------------------------------------------------------------------------------

    def optimizer_state(self, place: Place, key: str) -> torch.Tensor:
        """The whole state `key`; KeyError where no rank holds any."""
        mine = self._segments(place)
        states = [(s, f, self._optimizer().optimizer.state.get(s.tensor, {}).get(key)) for s, f in mine]
        kind = _Kind.of(states)
        kinds = [k for k in self.world.exchange_object(kind, f"state {key} of {place.name}") if k is not None]
        if not kinds:
            raise KeyError(f"the optimizer holds no state {key!r} for parameter '{place.name}'")
        dtype, scalar = kinds[0]
        if scalar is not None:
            return torch.tensor(scalar, dtype=dtype)
        share = torch.zeros(place.buffer.layout.shard_numel, dtype=dtype, device=place.buffer.flat.device)
        for segment, fragment, value in states:
            low = fragment.offset - segment.start
            share[fragment.offset : fragment.offset + fragment.numel] = value[low : low + fragment.numel]
        return _cut(place.buffer.whole(share), place).clone()

    def optimizer_states(self, place: Place) -> dict[str, torch.Tensor]:
        """Everything that the optimizer holds for the parameter, by key."""
        state = self._optimizer().optimizer.state
        mine = {key for segment, _ in self._segments(place) for key in state.get(segment.tensor, {})}
        everyone = self.world.exchange_object(sorted(mine), f"states of {place.name}")
        return {key: self.optimizer_state(place, key) for key in dict.fromkeys(k for keys in everyone for k in keys)}

    def set_optimizer_state(self, place: Place, key: str, value: torch.Tensor) -> None:
        """Write the whole state `key`, or a scalar one where the parameter is stepped by itself."""
        for segment, fragment in self._segments(place):
            state = self._optimizer().optimizer.state[segment.tensor]
            held = state.get(key)
            if held is not None and not is_per_element(key, held, segment):
                if len(segment.fragments) > 1:
                    raise ZerotrainError(
                        f"state {key!r} of '{place.name}' is one scalar for {len(segment.fragments)} parameters that are "
                        "stepped together; it cannot be set for one of them"
                    )
                state[key] = torch.as_tensor(value).to(held) if isinstance(held, torch.Tensor) else value
                continue
            if held is None:
                state[key] = held = torch.zeros_like(segment.tensor.detach())
            low = fragment.offset - segment.start
            part = value.reshape(-1)[fragment.start : fragment.stop]
            held[low : low + fragment.numel].copy_(part)

    def _segments(self, place: Place) -> list[Any]:
        return self._optimizer().segments_of(place)

    def _optimizer(self) -> ShardedOptimizer:
        if self.optimizer is None:
            raise ZerotrainError("this engine has no optimizer, so there is no optimizer state")
        return self.optimizer


class _Kind:
    @staticmethod
    def of(states: list[tuple[Segment, Any, Any]]) -> tuple[torch.dtype, float | None] | None:
        """dtype of a state entry and, where it is one per tensor, its value; None where this rank holds none."""
        for segment, _, value in states:
            if value is None:
                continue
            if not isinstance(value, torch.Tensor):
                return torch.float32, float(value)
            per_element = value.shape == segment.tensor.shape and value.ndim == 1
            return value.dtype, None if per_element else float(value)
        return None


# -- the public functions ---------------------------------------------------------------------------------------------


@contextmanager
def gathered(
    params_or_modules: nn.Parameter | nn.Module | Iterable[nn.Parameter | nn.Module], modify: bool = False
) -> Iterator[None]:
    """Hold parameters whole for reading, and with `modify=True` for editing in place.

    Args:
        params_or_modules: a parameter, a module (all its parameters), or several of them, of any engines.
        modify: at the end, rank 0's values are given to every rank, and those that changed reach the fp32 master weights.

    Works in every stage; parameters that no engine shards pass through. A result computed from the parameters inside
    may be used in a later backward. Raises ZerotrainError when values were changed without `modify=True`.
    """
    held = _units(params_or_modules)
    for access, unit in held:
        access.model.adopt_edits()
        unit.running += 1
        unit.wait()
        unit.pinned = unit.pinned or (unit.sharded and torch.is_grad_enabled())
        for buffer in unit.buffers:
            buffer.edited()
    lost = None
    try:
        yield
    finally:
        for access, unit in held:
            for buffer in unit.buffers:
                edited = buffer.edited()
                if modify:
                    _share_edits(access, buffer)
                elif edited and unit.sharded:
                    lost = lost or unit.name
                elif edited:
                    buffer.adopt_edits()
            unit.running -= 1
            if unit.running == 0 and unit.sharded:
                unit.guard()
                if not unit.pinned:
                    unit.release()
    if lost is not None:
        raise ZerotrainError(
            f"parameters of unit '{lost}' were changed inside gathered(...), and the changes were not kept; use "
            "`gathered(..., modify=True)` to change values"
        )


def _share_edits(access: Access, buffer: FlatBuffer) -> None:
    access.world.broadcast(buffer.flat.data, f"edits of {buffer.name}")
    buffer.adopt_edits()


def full_parameter(parameter: nn.Parameter) -> torch.Tensor:
    """A copy of the whole values, from the fp32 master weights where there are any. Shape of the parameter."""
    access, place = _locate(parameter)
    return access.parameter(place)


def set_full_parameter(parameter: nn.Parameter, value: torch.Tensor) -> None:
    """Set the whole values (shape of the parameter), master weights included. Every rank passes the same `value`."""
    access, place = _locate(parameter)
    access.set_parameter(place, _checked(place, value))


def full_gradient(parameter: nn.Parameter) -> torch.Tensor | None:
    """The mean gradient of the open window so far, over ranks and micro batches, unscaled and unclipped, in fp32.

    Shape of the parameter; None where it got no gradient since the last step.
    """
    access, place = _locate(parameter)
    return access.gradient(place)


def set_full_gradient(parameter: nn.Parameter, value: torch.Tensor) -> None:
    """Set the mean gradient of the open window. Every rank passes the same `value`, of the shape of the parameter."""
    access, place = _locate(parameter)
    access.set_gradient(place, _checked(place, value))


def full_optimizer_state(parameter: nn.Parameter, key: str) -> torch.Tensor:
    """A copy of the optimizer's whole state `key` ("exp_avg", ...): shape of the parameter, or 0-d for "step" and such.

    Raises KeyError where no rank holds such state.
    """
    access, place = _locate(parameter)
    return access.optimizer_state(place, key)


def set_full_optimizer_state(parameter: nn.Parameter, key: str, value: torch.Tensor) -> None:
    """Set the optimizer's state `key` of `parameter`. Every rank passes the same `value`."""
    access, place = _locate(parameter)
    access.set_optimizer_state(place, key, value)


def _access(parameter: Any) -> Access | None:
    found = parameter.__dict__.get("_zerotrain_access")
    return found() if found is not None else None


def _locate(parameter: nn.Parameter) -> tuple[Access, Place]:
    access = _access(parameter)
    place = access.model.place(parameter) if access is not None else None
    if access is None or place is None:
        raise ZerotrainError("this tensor is not a parameter of a model that was passed to zerotrain.initialize()")
    return access, place


def _units(chosen: Any) -> list[tuple[Access, Unit]]:
    items = [chosen] if isinstance(chosen, (torch.Tensor, nn.Module)) else list(chosen)
    found: dict[Unit, Access] = {}
    for item in items:
        members: Iterable[Any] = item.parameters() if isinstance(item, nn.Module) else [item]
        for parameter in members:
            access = _access(parameter)
            place = access.model.place(parameter) if access is not None else None
            if access is not None and place is not None:
                found[place.unit] = access
    return [(access, unit) for unit, access in found.items()]


def _checked(place: Place, value: torch.Tensor) -> torch.Tensor:
    shape = place.buffer.layout.slots[place.index].shape
    if tuple(value.shape) != shape:
        raise ValueError(f"'{place.name}' has shape {shape}, the value given has {tuple(value.shape)}")
    return value.detach()


def _cut(flat: torch.Tensor, place: Place) -> torch.Tensor:
    slot = place.buffer.layout.slots[place.index]
    return flat[slot.start : slot.stop].view(slot.shape)


def _own_range(place: Place) -> Iterator[tuple[int, int, int]]:
    """`(start, stop, offset)`: the part of the flattened parameter in this rank's shard, and where the shard has it."""
    for fragment in place.buffer.layout.fragments(place.buffer.index):
        if fragment.name == place.name:
            yield fragment.start, fragment.stop, fragment.offset


def _write_share(share: torch.Tensor, place: Place, value: torch.Tensor) -> None:
    for low, high, offset in _own_range(place):
        share[offset : offset + high - low].copy_(value.reshape(-1)[low:high])
