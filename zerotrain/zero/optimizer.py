"""Any element-wise torch optimizer over this rank's fragments.

The optimizer that the user made is the one that steps: its groups keep their order and hyper-parameters (so schedulers
built on it keep working), only their `params` are re-pointed, from whole parameters to segments: flat fp32 runs of the
master shards. Neighbouring fragments of one group form one segment, since few large tensors step faster than many small
ones; a segment is cut into its fragments the first time that some of its parameters got gradients and others did not,
because torch leaves parameters without a gradient alone (no weight decay, no moment decay, no step count).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from zerotrain.errors import ZerotrainError
from zerotrain.zero.hooks import Hook
from zerotrain.zero.layout import Fragment
from zerotrain.zero.sharded import Place, ShardedModel
from zerotrain.zero.unit import FlatBuffer

_PER_TENSOR = frozenset({"step", "eta", "mu", "mu_product"})  # scalars that torch's optimizers keep per parameter


@dataclass(eq=False)
class Segment:
    """Neighbouring fragments of one optimizer group, stepped as one flat tensor.

    `tensor` is a 1-d leaf that shares memory with `buffer.master[start:stop]`.
    """

    buffer: FlatBuffer
    group: int
    fragments: tuple[Fragment, ...]
    slots: tuple[int, ...]
    tensor: nn.Parameter

    @classmethod
    def over(cls, buffer: FlatBuffer, group: int, fragments: tuple[Fragment, ...]) -> Segment:
        """The segment that `fragments`, which lie side by side, make up."""
        assert buffer.master is not None
        run = buffer.master[fragments[0].offset : fragments[-1].offset + fragments[-1].numel]
        slots = tuple(buffer.layout.index[f.name] for f in fragments)
        return cls(buffer, group, fragments, slots, nn.Parameter(run))

    def touched(self) -> list[bool]:
        """For each fragment, whether its parameter got a gradient in this window, on any rank."""
        gradients = self.buffer.gradients
        assert gradients is not None
        return [gradients.touched[slot] for slot in self.slots]

    def gradient(self) -> torch.Tensor | None:
        """The segment's part of the reduced sums; None before anything was reduced."""
        gradients = self.buffer.gradients
        assert gradients is not None
        return gradients.reduced(self.start, self.stop)

    @property
    def start(self) -> int:
        """Its first element in the shard."""
        return self.fragments[0].offset

    @property
    def stop(self) -> int:
        """The element behind its last in the shard."""
        return self.fragments[-1].offset + self.fragments[-1].numel


class ShardedOptimizer:
    """Drives `optimizer` over the segments of `model`'s trainable buffers."""

    def __init__(self, optimizer: torch.optim.Optimizer, model: ShardedModel) -> None:
        self.optimizer = optimizer
        self.model = model
        self.segments: list[Segment] = []
        self._stepping = False
        self._group_of: dict[nn.Parameter, int] = {}
        self.members: list[list[nn.Parameter]] = []
        self._own: set[int] = set()
        self.adopt_groups()
        self._handle = optimizer.register_step_pre_hook(_StepGuard(self))

    # -- groups and segments ------------------------------------------------------------------------------------------

    def adopt_groups(self, laid_out_again: bool = False) -> None:
        """Re-point groups that hold parameters of the model: all at first, later those that were added since."""
        fresh = laid_out_again
        for index, group in enumerate(self.optimizer.param_groups):
            new = [p for p in group["params"] if id(p) not in self._own]
            if index == len(self.members):
                self.members.append([])
            for parameter in new:
                if self.model.place(parameter) is None:
                    raise ZerotrainError(
                        f"the optimizer's param group {index} holds a tensor of shape {tuple(parameter.shape)} that is "
                        "not a parameter of the model; build the optimizer from the parameters of the model that is "
                        "passed to initialize()"
                    )
                self._group_of[parameter] = index
                self.members[index].append(parameter)
            fresh = fresh or bool(new)
        if fresh:
            self._rebuild()

    def _rebuild(self) -> None:
        """Cut the segments anew from the model's buffers, taking over the state that the optimizer holds so far."""
        states = {p: self.optimizer.state.pop(p) for p in self._group_of if p in self.optimizer.state}
        kept = {(s.buffer, s.fragments): s for s in self.segments}
        segments: list[Segment] = []
        for unit in self.model.units:
            for buffer in unit.trainable:
                for group, run in self._runs(buffer, states):
                    old = kept.pop((buffer, run), None)
                    segment = old if old is not None and old.group == group else Segment.over(buffer, group, run)
                    segments.append(segment)
                    if old is None:
                        self._load(segment, states)
        for leftover in kept.values():  # runs that are cut differently now hand their state to their successors
            self._hand_over(leftover, segments)
        self.segments = segments
        self._point_groups()

    def forget(self, buffers: Sequence[FlatBuffer]) -> None:
        """Let go of the segments over `buffers`, which are about to be laid out anew, and of their state."""
        for segment in self.segments:
            if segment.buffer in buffers:
                self.optimizer.state.pop(segment.tensor, None)
        self.segments = [segment for segment in self.segments if segment.buffer not in buffers]

    def _runs(
        self, buffer: FlatBuffer, states: dict[nn.Parameter, dict[str, Any]]
    ) -> Iterator[tuple[int, tuple[Fragment, ...]]]:
        """Neighbouring fragments of one group for which the optimizer holds the same: kinds of state, and scalars."""
        by_name = dict(zip(buffer.names, buffer.parameters, strict=True))
        run: list[Fragment] = []
        previous: tuple[int, Any] | None = None
        gradients = buffer.gradients
        assert gradients is not None
        breaks = set(gradients.part_starts) if gradients.plan.alone else set()
        for fragment in buffer.layout.fragments(buffer.index):
            parameter = by_name[fragment.name]
            group = self._group_of.get(parameter)
            key = None if group is None else (group, _signature(states.get(parameter, {}), parameter.shape))
            if run and (key != previous or fragment.offset in breaks):
                yield previous[0] if previous else 0, tuple(run)
                run = []
            previous = key
            if key is not None:
                run.append(fragment)
        if run and previous is not None:
            yield previous[0], tuple(run)

    def _load(self, segment: Segment, states: dict[nn.Parameter, dict[str, Any]]) -> None:
        """State that the optimizer had for whole parameters (built and stepped before, or loaded) becomes the segment's."""
        by_name = dict(zip(segment.buffer.names, segment.buffer.parameters, strict=True))
        for fragment in segment.fragments:
            whole = states.get(by_name[fragment.name], {})
            low = fragment.offset - segment.start
            for key, value in whole.items():
                mine = self.optimizer.state[segment.tensor]
                shape = by_name[fragment.name].shape
                if not isinstance(value, torch.Tensor) or key in _PER_TENSOR or value.shape != shape:
                    mine.setdefault(key, value)
                    continue
                if key not in mine:
                    mine[key] = torch.zeros_like(segment.tensor.detach(), dtype=value.dtype)
                if not value.is_meta:  # a place that `restore` will fill
                    part = value.detach().reshape(-1)[fragment.start : fragment.stop]
                    mine[key][low : low + fragment.numel].copy_(part)

    def _hand_over(self, old: Segment, segments: list[Segment]) -> None:
        state = self.optimizer.state.pop(old.tensor, None)
        for segment in segments if state else ():
            if segment.buffer is old.buffer and old.start <= segment.start and segment.stop <= old.stop:
                self._take_slice(segment, old, state)

    def _take_slice(self, segment: Segment, old: Segment, state: dict[str, Any]) -> None:
        low, high = segment.start - old.start, segment.stop - old.start
        mine = self.optimizer.state[segment.tensor]
        for key, value in state.items():
            if is_per_element(key, value, old):
                mine[key] = value[low:high].clone()
            else:
                mine[key] = value.clone() if isinstance(value, torch.Tensor) else value

    def _split(self, segment: Segment) -> list[Segment]:
        """One segment for each fragment, with its part of the state."""
        parts = [Segment.over(segment.buffer, segment.group, (fragment,)) for fragment in segment.fragments]
        self._hand_over(segment, parts)
        return parts

    def _point_groups(self) -> None:
        for index, group in enumerate(self.optimizer.param_groups):
            group["params"] = [s.tensor for s in self.segments if s.group == index]
        self._own = {id(s.tensor) for s in self.segments}

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The model's parameters that the optimizer was given, group by group."""
        return [p for members in self.members for p in members]

    def restore(self, states: dict[nn.Parameter, dict[str, Any]]) -> None:
        """Start over from `states` in the place of all state held: scalars, and for states with a value per element a
        meta tensor of the parameter's shape; those are zero until the caller fills them."""
        self.forget([buffer for unit in self.model.units for buffer in unit.trainable])
        for parameter, state in states.items():
            if state:
                self.optimizer.state[parameter] = dict(state)
        self.adopt_groups(laid_out_again=True)

    # -- stepping -----------------------------------------------------------------------------------------------------

    def attach_gradients(self) -> None:
        """Give every segment the gradients of its fragments; those whose parameters got none stay without."""
        segments: list[Segment] = []
        for segment in self.segments:
            touched = segment.touched()
            segments += self._split(segment) if any(touched) and not all(touched) else [segment]
        if len(segments) > len(self.segments):
            self.segments = segments
            self._point_groups()
        for segment in self.segments:
            if segment.touched()[0]:
                segment.tensor.grad = segment.gradient()

    def step(self, factor: float) -> None:
        """Step with the attached gradients times `factor`.

        Fused optimizers take the factor along in their one pass; for the others the gradients are scaled first.
        """
        grads = [s.tensor.grad for s in self.segments if s.tensor.grad is not None]
        fused = getattr(self.optimizer, "_step_supports_amp_scaling", False)
        device = grads[0].device if grads else torch.device("cpu")
        if factor != 1.0 and grads:
            if fused:
                self.optimizer.grad_scale = torch.tensor(1.0 / factor, device=device)  # type: ignore[attr-defined]
                self.optimizer.found_inf = torch.tensor(0.0, device=device)  # type: ignore[attr-defined]
            else:
                torch._foreach_mul_(grads, factor)
        self._stepping = True
        try:
            self.optimizer.step()
        finally:
            self._stepping = False
            for name in ("grad_scale", "found_inf"):
                self.optimizer.__dict__.pop(name, None)
            self.detach_gradients()

    def detach_gradients(self) -> None:
        """Let go of the gradients that were attached."""
        for segment in self.segments:
            segment.tensor.grad = None

    # -- state, by buffer ---------------------------------------------------------------------------------------------

    def segments_of(self, place: Place) -> list[tuple[Segment, Fragment]]:
        """This rank's fragments of a parameter, with their segments."""
        return [
            (segment, fragment)
            for segment in self.segments
            if segment.buffer is place.buffer
            for fragment in segment.fragments
            if fragment.name == place.name
        ]

    def tensors(self) -> Iterator[torch.Tensor]:
        """Every tensor of optimizer state, for accounting."""
        for state in self.optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, torch.Tensor))

    def close(self) -> None:
        """Give the groups their parameters back, and let the state go."""
        self._handle.remove()
        self.optimizer.state.clear()
        for group, members in zip(self.optimizer.param_groups, self.members, strict=False):
            group["params"] = list(members)
        self.segments = []


class _StepGuard(Hook):
    """Refuses `optimizer.step()` from outside the engine: the gradients would be neither reduced nor whole."""

    def __init__(self, owner: ShardedOptimizer) -> None:
        super().__init__(owner, _check_step)


def _check_step(owner: ShardedOptimizer, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if args[1:] or any(value is not None for value in kwargs.values()):
        raise ZerotrainError("optimizers with a closure evaluate the model several times within a step, which sharded "
                             "training does not support; use one that steps from gradients (SGD, Adam, ...)")  # fmt: skip
    if not owner._stepping:
        raise ZerotrainError(
            "call engine.step() instead of optimizer.step(): it reduces the gradients over the ranks first"
        )


def is_per_element(key: str, value: Any, segment: Segment) -> bool:
    """Whether a state entry has one value for each element of its segment."""
    return isinstance(value, torch.Tensor) and key not in _PER_TENSOR and value.shape == segment.tensor.shape


def _signature(state: dict[str, Any], shape: torch.Size) -> tuple[Any, ...]:
    """What neighbours must have in common to be stepped as one: the kinds of state, and the values of all others."""

    def described(key: str, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return repr(value)
        per_element = key not in _PER_TENSOR and value.shape == shape
        return value.dtype, None if per_element else tuple(value.reshape(-1).tolist())

    return tuple((key, described(key, value)) for key, value in sorted(state.items()))
