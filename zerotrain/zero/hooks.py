"""How modules and autograd drive the units. Public hooks only, but for one callback at the end of a backward.

    module forward pre-hook        the unit is made whole
    module forward hook            a pre-hook on the graph node of each output announces the unit's backward
    post-accumulate-grad hook      a parameter's gradient is moved into the unit's buffer
    tensor hook on a unit's input  the backward has left the unit (needed where it has frozen parameters)

Hooks hold the model's driver weakly, so that a deleted engine frees its memory, and turn into nothing when the module is
copied or pickled.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from zerotrain.zero.unit import FlatBuffer, Unit

if TYPE_CHECKING:
    from zerotrain.zero.sharded import ShardedModel


def _nothing(*args: Any, **kwargs: Any) -> None:
    """What a hook becomes in a copy of the module."""


def _make_nothing() -> Callable[..., None]:
    return _nothing


class Hook:
    """A call of `method(driver, *bound, *args)` for as long as the driver lives, which is held weakly."""

    def __init__(self, driver: Any, method: Callable[..., Any], *bound: Any) -> None:
        self._driver = ref(driver)
        self._method = method
        self._bound = bound

    def __call__(self, *args: Any) -> Any:
        """Call the method, if the driver still lives."""
        driver = self._driver()
        return None if driver is None else self._method(driver, *self._bound, *args)

    def __deepcopy__(self, memo: Any) -> Callable[..., None]:
        return _nothing

    def __reduce__(self) -> Any:
        return _make_nothing, ()


def install(driver: ShardedModel, model: nn.Module) -> list[RemovableHandle]:
    """Attach the hooks; the handles remove them."""
    handles: list[RemovableHandle] = []
    for unit in driver.units:
        handles += watch_gradients(driver, unit)
        if driver.alone:
            continue
        for module in unit.modules:
            handles.append(module.register_forward_pre_hook(Hook(driver, _enter, ref(unit)), prepend=True))
            handles.append(module.register_forward_hook(Hook(driver, _exit, ref(unit)), always_call=True))
    if any(unit.sharded for unit in driver.units):  # state_dict() must find whole values
        for module in model.modules():
            if module._parameters:
                handles.append(module.register_state_dict_pre_hook(Hook(driver, _before_state_dict)))
                handles.append(module.register_state_dict_post_hook(Hook(driver, _after_state_dict)))
    # The root's hooks enclose those of a unit whose module is the root: first before, last after.
    handles.append(model.register_forward_pre_hook(Hook(driver, _begin_forward), prepend=True))
    handles.append(model.register_forward_hook(Hook(driver, _end_forward), always_call=True))
    return handles


def watch_gradients(driver: ShardedModel, unit: Unit) -> list[RemovableHandle]:
    """Have the gradients of `unit` moved into its buffers as they arrive."""
    return [
        parameter.register_post_accumulate_grad_hook(Hook(driver, _gradient_arrived, ref(unit), ref(buffer), index))
        for buffer in unit.trainable
        for index, parameter in enumerate(buffer.parameters)
    ]


# -- forward ----------------------------------------------------------------------------------------------------------


def _begin_forward(driver: ShardedModel, module: nn.Module, args: Any) -> None:
    driver.begin_forward()


def _end_forward(driver: ShardedModel, module: nn.Module, args: Any, output: Any) -> Any:
    driver.end_forward()
    if not torch.is_grad_enabled() or driver.in_backward:
        return None
    for tensor in tensors_in(output):
        if tensor.grad_fn is not None:
            tensor.grad_fn.register_prehook(Hook(driver, _begin_backward))
    return driver.on_output(output) if driver.on_output is not None else None


def _enter(driver: ShardedModel, unit_ref: ref[Unit], module: nn.Module, args: Any) -> None:
    unit = unit_ref()
    if unit is None:
        return
    driver.enter(unit, module)
    if unit.sharded and torch.is_grad_enabled() and driver.watches_inputs(unit):
        hook = Hook(driver, _left_backward, unit_ref, driver.generation)
        for tensor in tensors_in(args):
            if tensor.requires_grad:
                tensor.register_hook(hook)
                driver.open_input(unit)


def _exit(driver: ShardedModel, unit_ref: ref[Unit], module: nn.Module, args: Any, output: Any) -> None:
    unit = unit_ref()
    if unit is None:
        return
    if unit.sharded and torch.is_grad_enabled() and not driver.in_backward:
        _announce_backward(driver, unit, unit_ref, module, output)
    driver.exit(unit)


def _announce_backward(driver: ShardedModel, unit: Unit, unit_ref: ref[Unit], module: nn.Module, output: Any) -> None:
    """Have the backward say when it comes to the unit, or keep the unit whole where nothing could say so."""
    storages = {b.flat.untyped_storage()._cdata for b in unit.buffers}
    hook = Hook(driver, _enter_backward, unit_ref)
    found = False
    for tensor in (*tensors_in(output), *_kept_outputs(module)):
        found = True
        if tensor.untyped_storage()._cdata in storages:
            unit.pinned = True  # the output shares memory with the parameters themselves
        elif tensor.grad_fn is not None:
            tensor.grad_fn.register_prehook(hook)
    if not found:
        unit.pinned = True


def _kept_outputs(module: nn.Module) -> Iterator[torch.Tensor]:
    """Results that a module keeps on itself (an auxiliary loss, say), by which a backward may enter it too."""
    for inner in module.modules():
        for value in vars(inner).values():
            if isinstance(value, torch.Tensor) and value.grad_fn is not None:
                yield value


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors of an output or argument: in tuples, lists, dicts, dataclasses and plain objects, at any depth."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple, set)):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for item in dataclasses.fields(value):
            yield from tensors_in(getattr(value, item.name, None))
    elif hasattr(value, "__dict__") and not isinstance(value, (type, nn.Module)) and not callable(value):
        for item in vars(value).values():
            if isinstance(item, (torch.Tensor, list, tuple, dict)):
                yield from tensors_in(item)


def map_tensors(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """`value` with `change` applied to the tensors that `tensors_in` finds; containers are copied, not altered."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(item, change) for item in value))
    if isinstance(value, (list, tuple, set)):
        return type(value)(map_tensors(item, change) for item in value)
    if isinstance(value, dict):
        copied = copy.copy(value)
        for key, item in value.items():
            copied[key] = map_tensors(item, change)
        return copied
    if any(True for _ in tensors_in(value)):
        copied = copy.copy(value)
        for name, item in vars(value).items():
            object.__setattr__(copied, name, map_tensors(item, change))
        return copied
    return value


# -- backward ---------------------------------------------------------------------------------------------------------


def _begin_backward(driver: ShardedModel, grads: Any) -> None:
    driver.begin_backward()


def _enter_backward(driver: ShardedModel, unit_ref: ref[Unit], grads: Any) -> None:
    unit = unit_ref()
    if unit is not None:
        driver.enter_backward(unit)


def _left_backward(driver: ShardedModel, unit_ref: ref[Unit], generation: int, grad: torch.Tensor) -> None:
    unit = unit_ref()
    if unit is not None and generation == driver.generation:
        driver.close_input(unit)


def _gradient_arrived(
    driver: ShardedModel, unit_ref: ref[Unit], buffer_ref: ref[FlatBuffer], index: int, parameter: nn.Parameter
) -> None:
    unit, buffer = unit_ref(), buffer_ref()
    grad = parameter.grad
    if unit is not None and buffer is not None and grad is not None:
        parameter.grad = None
        driver.gradient_arrived(unit, buffer, index, grad)


# -- state_dict -------------------------------------------------------------------------------------------------------


def _before_state_dict(driver: ShardedModel, module: nn.Module, prefix: str, keep_vars: bool) -> None:
    for unit in driver.units_of(module):
        unit.running += 1
        unit.wait()


def _after_state_dict(
    driver: ShardedModel, module: nn.Module, state: dict[str, Any], prefix: str, local_metadata: Any
) -> None:
    for name, parameter in module._parameters.items():
        key = f"{prefix}{name}"
        if parameter is not None and key in state:
            state[key] = state[key].detach().clone()  # the unit's own memory is about to be given back
    for unit in driver.units_of(module):
        unit.running -= 1
        if unit.running == 0 and not driver.in_backward:
            unit.release()
