"""A model whose states are sharded: its units, and what the hooks ask of them in a training step."""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from zerotrain.comm import torch_compat
from zerotrain.errors import ReleasedParameterError, ZerotrainError
from zerotrain.zero import hooks
from zerotrain.zero.gradients import Partition
from zerotrain.zero.schedule import GatherSchedule, ReduceSchedule, Sync, merge_orders
from zerotrain.zero.unit import FlatBuffer, Residence, Unit


@dataclass(frozen=True)
class Place:
    """Where a parameter lives: slot `index` of `buffer` of `unit`."""

    unit: Unit
    buffer: FlatBuffer
    index: int

    @property
    def name(self) -> str:
        """The parameter's first name in the model."""
        return self.buffer.names[self.index]

    @property
    def parameter(self) -> nn.Parameter:
        """The parameter itself."""
        return self.buffer.parameters[self.index]


class ShardedModel:
    """Owns the units of `model` and drives them. `sync()` says what a backward that begins now does with gradients."""

    def __init__(
        self,
        model: nn.Module,
        units: list[Unit],
        plan: Partition,
        gathers: GatherSchedule,
        sync: Callable[[], Sync],
    ) -> None:
        self.units = units
        self.plan = plan
        self.gathers = gathers
        self.reductions = ReduceSchedule(units)
        self.sync = sync
        self.generation = 0
        self.in_backward = False
        self.on_output: Callable[[Any], Any] | None = None
        """Applied to what the model returns while gradients are recorded."""
        self.on_thaw: Callable[[], None] | None = None
        """Called when a parameter that was laid out as frozen requires gradients."""
        self.backwards_since_step = 0
        self._depth = 0
        self._consumed = False
        self._open_inputs: dict[Unit, int] = {}
        self._unrecorded: dict[Unit, Counter[nn.Module]] = {}
        self._training_forward = False
        self._exception: BaseException | None = None
        self._agreed = False
        self._places: dict[nn.Parameter, Place] = {}
        self._units_of: dict[nn.Module, list[Unit]] = {}
        self._owners: list[tuple[dict[str, Any], str, nn.Parameter, str]] = []
        self.attach(model)

    def attach(self, model: nn.Module) -> None:
        """Index the parameters and install the hooks."""
        for unit in self.units:
            unit.on_demand = hooks.Hook(self, ShardedModel._on_demand)
            self._locate(unit)
        for module in model.modules():
            mine = {self._places[p].unit for p in module._parameters.values() if p is not None}
            if mine:
                self._units_of[module] = [unit for unit in self.units if unit in mine]
        for path, module in model.named_modules():
            for name, p in module._parameters.items():
                if p is not None:
                    where = f"{path}.{name}" if path else name
                    self._owners.append((module._parameters, name, p, where))
        self.handles = hooks.install(self, model)

    def _locate(self, unit: Unit) -> None:
        for buffer in unit.buffers:
            for index, parameter in enumerate(buffer.parameters):
                self._places[parameter] = Place(unit, buffer, index)

    def index(self, unit: Unit) -> None:
        """Take note of the new buffers of a unit that was laid out again."""
        self._locate(unit)
        self.handles += hooks.watch_gradients(self, unit)
        self.reductions.include(self.units)

    def place(self, parameter: nn.Parameter) -> Place | None:
        """Where `parameter` lives; None for one of another model."""
        return self._places.get(parameter)

    def places(self) -> Iterator[Place]:
        """Every parameter's place."""
        yield from self._places.values()

    @property
    def alone(self) -> bool:
        """One rank: nothing is gathered or reduced."""
        return self.plan.alone

    def units_of(self, module: nn.Module) -> list[Unit]:
        """The units of the parameters that `module` itself owns."""
        return self._units_of.get(module, [])

    # -- forward ------------------------------------------------------------------------------------------------------

    def begin_forward(self) -> None:
        """The model's own forward begins."""
        if self.in_backward and not torch_compat.inside_backward():
            self.reset()  # an exception ended the last backward
        if self._depth == 0 and not self.in_backward:
            self.check_parameters()
            if self._consumed:
                self._forget_graphs()
            self._training_forward = torch.is_grad_enabled()
            self._exception = sys.exception()
            self.gathers.begin_forward(self._training_forward)
        self._depth += 1

    def end_forward(self) -> None:
        """It has ended, perhaps by an exception; then the window's earlier micro batches are kept."""
        self._depth = max(0, self._depth - 1)
        if self._depth or self.in_backward:
            return
        if sys.exception() is self._exception:
            self.gathers.end_forward()
        else:
            self._release_all()
        self._exception = None

    def _forget_graphs(self) -> None:
        """The graphs of the forwards before the last backward are done with."""
        self._consumed = False
        self.generation += 1
        self._open_inputs.clear()
        self._unrecorded.clear()
        self.gathers.forget_graphs()

    def enter(self, unit: Unit, module: nn.Module) -> None:
        """A module of `unit` is about to compute."""
        unit.running += 1
        if self.in_backward:  # recomputation
            self.gathers.need(unit)
            return
        if self._training_forward and not torch.is_grad_enabled():
            self._unrecorded.setdefault(unit, Counter())[module] += 1
        self.gathers.enter(unit)

    def exit(self, unit: Unit) -> None:
        """A module of `unit` has computed."""
        unit.running = max(0, unit.running - 1)
        if unit.running == 0 and not self.in_backward:
            self.gathers.exit(unit)

    def _on_demand(self, unit: Unit, parameter: nn.Parameter, function: Any) -> None:
        """A use that no hook announced: in the forward pass every rank makes it, elsewhere it is refused."""
        if self._depth == 0 and not self.in_backward:
            name = getattr(function, "__name__", str(function))
            raise ReleasedParameterError(
                f"parameter '{unit.name_of(parameter)}' is sharded: this rank holds only its part of the values, so it "
                f"cannot be used in '{name}' here. Use it inside `with zerotrain.gathered(parameter):` (add "
                "`modify=True` to change it), or read it with `zerotrain.full_parameter(parameter)`, on every rank"
            )
        self.gathers.demand(unit)

    # -- backward -----------------------------------------------------------------------------------------------------

    def begin_backward(self, driven: bool = False) -> None:
        """A backward begins. `driven`: the caller ends it; otherwise autograd is asked to, when the graph is done."""
        if self.in_backward:
            return
        self.in_backward = True
        self._consumed = True
        self.backwards_since_step += 1
        self.gathers.begin_backward()
        self.reductions.begin_backward(self.sync(), self._reentered())
        if not driven:
            torch_compat.queue_backward_callback(hooks.Hook(self, ShardedModel.end_backward))

    def _reentered(self) -> frozenset[Unit]:
        """Units that reentrant recomputation will visit several times, with a gradient of one parameter each time."""
        return frozenset(
            unit
            for unit, uses in self._unrecorded.items()
            if max(uses.values()) > 1 or (unit.tied and uses.total() > 1)
        )

    def enter_backward(self, unit: Unit) -> None:
        """The backward is about to go through `unit`. One that itself is recorded needs the values again later."""
        self.begin_backward()
        unit.pinned = unit.pinned or torch.is_grad_enabled()
        self.gathers.need(unit)

    def gradient_arrived(self, unit: Unit, buffer: FlatBuffer, index: int, grad: torch.Tensor) -> None:
        """Take a parameter's gradient over; ZerotrainError where its unit has been reduced already."""
        self.begin_backward()
        if self.reductions.taken(unit):
            raise ZerotrainError(
                f"parameter '{buffer.names[index]}' got a gradient after its unit '{unit.name}' had been reduced in the "
                "same backward. Run this backward inside `engine.no_sync()`; the step then reduces everything at once"
            )
        assert buffer.gradients is not None
        buffer.gradients.accept(index, grad)
        if self.reductions.arrived(unit) and (not self.watches_inputs(unit) or self._open_inputs.get(unit) == 0):
            self._left(unit)

    def watches_inputs(self, unit: Unit) -> bool:
        """Complete gradients do not prove that the backward has left a unit with frozen parameters."""
        return len(unit.trainable) < len(unit.buffers)

    def open_input(self, unit: Unit) -> None:
        """An input of `unit` will tell when the backward has passed it."""
        self._open_inputs[unit] = self._open_inputs.get(unit, 0) + 1

    def close_input(self, unit: Unit) -> None:
        """The backward has passed an input of `unit`."""
        self._open_inputs[unit] -= 1
        if self._open_inputs[unit] == 0 and self.in_backward and not self.reductions.incomplete(unit):
            self._left(unit)

    def _left(self, unit: Unit) -> None:
        if unit.sharded and unit.running == 0 and not unit.pinned:
            unit.release()

    def end_backward(self) -> None:
        """The graph is done: reduce what did not complete, release what is still whole."""
        if not self.in_backward:
            return
        self.gathers.end_backward()
        self.reductions.end_backward()
        for unit in self.units:
            if unit.residence is not Residence.SHARDED:
                self._left(unit)
        self.in_backward = False

    def clear_window(self) -> None:
        """Forget the gradients since the last step."""
        self.reductions.clear()
        self.backwards_since_step = 0
        for unit in self.units:
            unit.pinned = False

    def reset(self) -> None:
        """After an exception: nothing is under way, the open window's gradients are forgotten."""
        self.in_backward, self._depth = False, 0
        self._forget_graphs()
        self.clear_window()
        self._release_all()

    def _release_all(self) -> None:
        self.gathers.reset()
        for unit in self.units:
            unit.running = 0
            unit.release()

    def agree_on_order(self, exchange: Callable[[Any], list[Any]]) -> None:
        """Once, after the first step: units follow each other as the ranks were seen to use them."""
        if self._agreed:
            return
        self._agreed = True
        place = {unit: index for index, unit in enumerate(self.units)}
        everyone = exchange(([place[u] for u in self.gathers.seen], [place[u] for u in self.reductions.seen]))
        forwards = [[self.units[i] for i in forward] for forward, _ in everyone]
        backwards = [[self.units[i] for i in backward] for _, backward in everyone]
        self.gathers.order = merge_orders([*forwards, self.gathers.order])
        self.reductions.order = merge_orders([*backwards, self.reductions.order])

    # -- around a step ------------------------------------------------------------------------------------------------

    def check_parameters(self) -> None:
        """Refuse a model whose parameters were replaced or moved, and take in-place edits over into the masters."""
        for owner, name, parameter, where in self._owners:
            if owner.get(name) is not parameter:
                raise ZerotrainError(
                    f"parameter '{where}' was replaced by another object after initialize(), so the optimizer would "
                    "train the old one. Copy values into it instead (load_state_dict without assign=True, inside "
                    "`with zerotrain.gathered(model, modify=True):`)"
                )
        for unit in self.units:
            if unit.residence is Residence.WHOLE and not unit.guarded:
                for buffer in unit.buffers:
                    buffer.check()
        self.adopt_edits()
        if self.on_thaw is not None and any(
            p.requires_grad for u in self.units for b in u.frozen for p in b.parameters
        ):
            self.on_thaw()

    def adopt_edits(self) -> None:
        """In-place writes to parameters that are whole (`p.copy_`, `load_state_dict`) reach the master values."""
        for unit in self.units:
            if unit.residence is Residence.WHOLE:
                for buffer in unit.trainable:
                    if buffer.edited():
                        buffer.adopt_edits()

    def updated(self) -> None:
        """The optimizer has changed the masters: what is whole is outdated."""
        for unit in self.units:
            for buffer in unit.trainable:
                buffer.refresh_shard()
                buffer.bump_versions()
        for unit in self.units:
            if unit.sharded:
                unit.release()
            elif unit.gathers:
                unit.rebuild()

    def reloaded(self) -> None:
        """All masters and shards have new values, frozen ones too: whatever was gathered from them is outdated."""
        for unit in self.units:
            for buffer in unit.frozen:
                buffer.bump_versions()
        self.updated()

    def close(self) -> None:
        """Remove the hooks and give the memory back. Parameters that are not whole stay guarded, without values."""
        for handle in self.handles:
            handle.remove()
        self.handles = []
        with contextlib.suppress(RuntimeError):  # where the groups are gone already
            for unit in self.units:
                if unit.residence is Residence.PENDING:
                    unit.wait()
                unit.release()
