"""From a source of tensors back into a job: any stage, any number of ranks, any dtype.

Everything is looked up and compared first, by all ranks; only when all agree is the first value written. So a checkpoint
that does not fit changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from zerotrain import runtime
from zerotrain.checkpoint.manifest import SECTIONS, Manifest
from zerotrain.checkpoint.match import Match, match_names
from zerotrain.checkpoint.reader import Checkpoint
from zerotrain.checkpoint.source import MASTER, Source, TensorInfo, state_key
from zerotrain.checkpoint.states import canonical, canonical_path, module_buffers, tied_names
from zerotrain.errors import CheckpointError
from zerotrain.job import Job
from zerotrain.zero.optimizer import ShardedOptimizer
from zerotrain.zero.unit import FlatBuffer

_OF_THE_RUN = frozenset({"params", "fused", "foreach", "capturable", "differentiable"})
"""Settings of a param group that say how a step is computed here, not what it computes."""


@dataclass
class Plan:
    """What a load will do, worked out before anything is written."""

    match: Match
    states: dict[nn.Parameter, dict[str, TensorInfo]] = field(default_factory=dict)
    """For each parameter, its states with a value per element, as they are in the source."""
    scalars: dict[nn.Parameter, dict[str, Any]] = field(default_factory=dict)
    groups: list[dict[str, Any] | None] = field(default_factory=list)
    """New settings of each param group; None where it keeps its own."""
    remarks: list[str] = field(default_factory=list)
    """What the user should know, for the log."""


def plan_load(job: Job, source: Source, manifest: Manifest | None, strict: bool, weights_only: bool) -> Plan:
    """Find everything that will be loaded. CheckpointError lists what does not fit, unless `strict` is False."""
    match = match_names(
        wanted_shapes(job),
        {key: info.shape for key, info in source.weights.items()},
        tied_names(job.module),
        source.tied,
    )
    plan = Plan(match)
    if match.prefix:
        plan.remarks.append(f"names in the checkpoint have {match.prefix}")
    if match.problems():
        if strict or not match.names:
            way_out = "; strict=False loads what fits" if match.names else ""
            raise CheckpointError(f"{source.path} does not fit the model: {match.problems()}{way_out}")
        plan.remarks.append(match.problems())
    if weights_only or job.sharded_optimizer is None:
        return plan
    saved_class = manifest.section("class") if manifest is not None else None
    own_class = optimizer_class(job.sharded_optimizer)
    if saved_class is not None and saved_class != own_class:
        plan.remarks.append(f"the optimizer was {saved_class} and is {own_class}: its state starts fresh")
        return plan
    if source.states or source.scalars:
        _plan_states(plan, job.sharded_optimizer, source)
    elif saved_class is None:
        plan.remarks.append("there is no optimizer state in it: the optimizer starts fresh")
    if manifest is not None:
        _plan_groups(plan, job.sharded_optimizer, source, manifest, strict)
    return plan


def wanted_shapes(job: Job) -> dict[str, tuple[int, ...]]:
    """Every parameter and persistent buffer of the model."""
    shapes = {canonical(slot.name): slot.shape for u in job.model.units for b in u.buffers for slot in b.layout.slots}
    shapes.update({name: tuple(buffer.shape) for name, buffer in module_buffers(job.module).items()})
    return shapes


def optimizer_class(optimizer: ShardedOptimizer) -> str:
    """The optimizer's class, as a manifest names it."""
    kind = type(optimizer.optimizer)
    return f"{kind.__module__}.{kind.__qualname__}"


def _plan_states(plan: Plan, optimizer: ShardedOptimizer, source: Source) -> None:
    by_parameter: dict[str, list[tuple[str, str]]] = {}
    for key in source.states:
        owner, _, state = key.rpartition("/")
        by_parameter.setdefault(owner, []).append((state, key))
    fresh = []
    for parameter in optimizer.parameters:
        name = canonical(_name(optimizer, parameter))
        there = plan.match.names.get(name)
        if there is None or not parameter.requires_grad:
            continue
        states = {s: source.states[key] for s, key in by_parameter.get(there, ()) if s != MASTER}
        wrong = [s for s, info in states.items() if info.shape != tuple(parameter.shape)]
        if wrong:
            raise CheckpointError(f"{source.path}: state '{wrong[0]}' of '{there}' does not have the parameter's shape")
        plan.states[parameter] = states
        plan.scalars[parameter] = dict(source.scalars.get(there, {}))
        if not states and not plan.scalars[parameter] and parameter.numel():
            fresh.append(name)
    if fresh:
        plan.remarks.append(
            f"no optimizer state for {', '.join(fresh[:8])}{' ...' if len(fresh) > 8 else ''}: it starts fresh"
        )


def _plan_groups(plan: Plan, optimizer: ShardedOptimizer, source: Source, manifest: Manifest, strict: bool) -> None:
    """Each param group takes the settings of the saved group that its parameters were in."""
    saved = manifest.section("groups") or []
    group_of = {name: index for index, group in enumerate(saved) for name in group["params"]}
    trained: set[str] = set()
    for index, members in enumerate(optimizer.members):
        names = [plan.match.names.get(canonical(_name(optimizer, p)), "") for p in members]
        trained.update(name for name, p in zip(names, members, strict=True) if p.requires_grad)
        origins = sorted({group_of[name] for name in names if name in group_of})
        settings = [{k: v for k, v in saved[o]["settings"].items() if k not in _OF_THE_RUN} for o in origins]
        if settings and any(other != settings[0] for other in settings):
            text = f"param group {index} holds parameters of {len(origins)} saved groups with different settings"
            if strict:
                raise CheckpointError(
                    f"{text}; group them as they were, or load with strict=False to keep the present ones"
                )
            plan.remarks.append(f"{text}: it keeps its own")
            settings = []
        plan.groups.append(settings[0] if settings else None)
    held = {*source.scalars, *(key.rpartition("/")[0] for key in source.states)}
    dropped = [name for name in group_of if name in held and name not in trained]
    if dropped:
        plan.remarks.append(
            f"{len(dropped)} parameters are not trained any more ({dropped[0]}, ...): their state is dropped"
        )


def _name(optimizer: ShardedOptimizer, parameter: nn.Parameter) -> str:
    place = optimizer.model.place(parameter)
    assert place is not None
    return place.name


def check_held(plan: Plan, job: Job, source: Checkpoint) -> None:
    """CheckpointError where the nodes' folders that are here lack a run that this rank needs."""
    for unit in job.model.units:
        for buffer in unit.buffers:
            parameters = dict(zip(buffer.names, buffer.parameters, strict=True))
            for fragment in buffer.layout.fragments(buffer.index):
                there = plan.match.names.get(canonical(fragment.name))
                states = plan.states.get(parameters[fragment.name], {})
                keys = [] if there is None else [there, *(state_key(there, state) for state in states)]
                for key in keys:
                    source.check_held(key, fragment.start, fragment.stop)
    for name, tensor in module_buffers(job.module).items():
        if name in plan.match.names:
            source.check_held(plan.match.names[name], 0, tensor.numel())


# -- writing into the job ---------------------------------------------------------------------------------------------


def carry_out(plan: Plan, job: Job, source: Source) -> None:
    """Fill this rank's states. An error on the way leaves them half loaded; the caller must see to that."""
    if job.sharded_optimizer is not None:
        _restore_optimizer(plan, job.sharded_optimizer, source)
    for unit in job.model.units:
        unit.wait_pending()
        for buffer in unit.buffers:
            _fill(buffer, plan.match, source)
    for name, tensor in module_buffers(job.module).items():
        if name in plan.match.names:
            flat = torch.empty(tensor.numel(), dtype=tensor.dtype, device=tensor.device)
            source.read(plan.match.names[name], 0, tensor.numel(), flat)
            tensor.copy_(flat.view(tensor.shape))
    job.buffers.accept()
    job.model.reloaded()


def _fill(buffer: FlatBuffer, match: Match, source: Source) -> None:
    """Read this rank's part of a buffer: of the master weights where there are any, rounded into what computes."""
    wide = buffer.shard if buffer.master is None else buffer.master
    for fragment in buffer.layout.fragments(buffer.index):
        there = match.names.get(canonical(fragment.name))
        if there is None:
            continue
        master = state_key(there, MASTER)
        finer = master in source.states and source.states[master].dtype.itemsize <= wide.dtype.itemsize
        out = wide[fragment.offset : fragment.offset + fragment.numel]
        source.read(master if finer else there, fragment.start, fragment.stop, out)


def _restore_optimizer(plan: Plan, optimizer: ShardedOptimizer, source: Source) -> None:
    states: dict[nn.Parameter, dict[str, Any]] = {}
    for parameter, infos in plan.states.items():
        state = {key: _placed(key, value, parameter, optimizer) for key, value in plan.scalars[parameter].items()}
        for key, info in infos.items():
            state[key] = torch.empty(info.shape, dtype=_state_dtype(info.dtype, parameter, optimizer), device="meta")
        states[parameter] = state
    optimizer.restore(states)
    for segment in optimizer.segments:
        for key, value in optimizer.optimizer.state.get(segment.tensor, {}).items():
            for fragment in segment.fragments:
                there = state_key(plan.match.names.get(canonical(fragment.name), ""), key)
                if there in source.states:
                    low = fragment.offset - segment.start
                    source.read(there, fragment.start, fragment.stop, value[low : low + fragment.numel])


def _placed(key: str, value: Any, parameter: nn.Parameter, optimizer: ShardedOptimizer) -> Any:
    """A scalar of the state, on the device where this optimizer wants it (`step` of fused ones: with the parameter)."""
    if not isinstance(value, torch.Tensor):
        return value
    defaults = optimizer.optimizer.defaults
    on_device = key != "step" or defaults.get("fused") or defaults.get("capturable")
    return value.to(parameter.device, copy=True) if on_device else value.clone()


def _state_dtype(saved: torch.dtype, parameter: nn.Parameter, optimizer: ShardedOptimizer) -> torch.dtype:
    """The master weights' dtype for floating states that have another of the usual ones (fp64 training turned fp32)."""
    place = optimizer.model.place(parameter)
    assert place is not None
    master = place.buffer.master
    wide = (torch.float32, torch.float64)
    return master.dtype if master is not None and saved in wide and master.dtype in wide else saved


def _restore_groups(plan: Plan, job: Job) -> None:
    for group, settings in zip(job.optimizer.param_groups if job.optimizer else (), plan.groups, strict=False):
        for key, value in (settings or {}).items():
            if isinstance(group.get(key), torch.Tensor):
                group[key].copy_(torch.as_tensor(value))
            else:
                group[key] = value


def restore_run(job: Job, manifest: Manifest, plan: Plan) -> None:
    """Scheduler, place in the data, and, last of all, the RNG states of this rank."""
    _restore_groups(plan, job)
    scheduler, saved = job.lr_scheduler, manifest.section("scheduler")
    if saved is not None and hasattr(scheduler, "load_state_dict") and type(scheduler).__name__ == saved["class"]:
        scheduler.load_state_dict(saved["state"])
        _follow(scheduler, job, plan)
    elif saved is not None or hasattr(scheduler, "load_state_dict"):
        plan.remarks.append(
            f"the scheduler was {saved['class'] if saved else None} and is {type(scheduler).__name__}: it is left as it is"
        )
    place = of_rank(manifest.section("data") or [], job.mesh.rank)
    if place is not None and job.loader is not None:
        job.loader.load_state_dict(place)
    _restore_random(job, manifest)


def _follow(scheduler: Any, job: Job, plan: Plan) -> None:
    """Groups that did not take over their settings have at least the learning rates that the scheduler goes on from."""
    groups, rates = job.optimizer.param_groups if job.optimizer is not None else [], getattr(scheduler, "_last_lr", [])
    base = getattr(scheduler, "base_lrs", rates)
    if len(groups) != len(rates) or len(base) != len(rates):
        return
    for index, group in enumerate(groups):
        if index >= len(plan.groups) or plan.groups[index] is None:
            group["initial_lr"] = base[index]
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].copy_(torch.as_tensor(rates[index]))
            else:
                group["lr"] = rates[index]


def restore_extra(job: Job, manifest: Manifest, plan: Plan) -> None:
    """The extra state of modules, which belongs to the model."""
    modules = {canonical_path(path): module for path, module in job.module.named_modules()}
    for path, state in (manifest.section("extra") or {}).items():
        if path in modules:
            modules[path].set_extra_state(state)
        else:
            plan.remarks.append(f"there is no module '{path}' to take over extra state")


def check_run(job: Job, manifest: Manifest) -> None:
    """CheckpointError for a place in the data that the job's loader cannot go to, and for sections that do not decode."""
    for name in SECTIONS:
        manifest.section(name)
    place = of_rank(manifest.section("data") or [], job.mesh.rank)
    states = of_rank(manifest.section("random") or [], job.mesh.rank)
    try:
        if states is not None:
            runtime.check_random_state(states)
        if place is not None and job.loader is not None:
            job.loader.check_state_dict(place)
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RuntimeError) as error:
        raise CheckpointError(f"{manifest.path}: {error}") from error


def of_rank(values: Sequence[Any], rank: int) -> Any:
    """What was saved of this rank, or of the first for ranks that there were not."""
    return values[rank] if rank < len(values) else values[0] if values else None


def _restore_random(job: Job, manifest: Manifest) -> None:
    """Ranks that there were not at the save continue from rank 0's state too, and are parted from it by their number."""
    states, rank = manifest.section("random") or [], job.mesh.rank
    if states:
        runtime.set_random_state(of_rank(states, rank), job.device)
    if states and rank >= len(states):
        runtime.seed_everything(int(torch.randint(1 << 40, ()).item()), rank)
