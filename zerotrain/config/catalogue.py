"""From the names in the job file to torch's classes and their arguments, checked before anything is built."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch.optim import Optimizer
from torch.optim import lr_scheduler as torch_schedulers
from torch.optim.lr_scheduler import LRScheduler

from zerotrain.config.errors import ConfigError, found, nearest
from zerotrain.config.schedules import DEEPSPEED_SCHEDULES, ScheduleParams
from zerotrain.config.validate import Findings, auto_text, validated
from zerotrain.config.values import is_number, unquote_hint

ELEMENT_WISE = (
    "AdamW", "Adam", "SGD", "Adagrad", "RMSprop", "NAdam", "RAdam", "Adamax", "Adadelta", "ASGD", "Rprop",
)  # fmt: skip
"""torch.optim's optimizers that update each element from its own gradient and state, so that a shard is enough."""

_WHOLE_MATRIX = "needs whole matrices, and a rank holds only a share of each"
_TRUST_RATIO = "scales by the norm of each whole parameter, and a rank holds only a share of it"
_COMPRESSED = "compresses communication inside the optimizer, which zerotrain does not have"
_NOT_IN_TORCH = "is not in torch.optim; build it yourself and pass it to initialize(optimizer=...)"
_REFUSED_OPTIMIZERS = {
    "Muon": _WHOLE_MATRIX,
    "Adafactor": _WHOLE_MATRIX,
    "Shampoo": _WHOLE_MATRIX,
    "SOAP": _WHOLE_MATRIX,
    "LBFGS": "needs a closure and dot products over all parameters",
    "SparseAdam": "needs sparse gradients, and units reduce dense ones",
    "Lamb": _TRUST_RATIO,
    "FusedLamb": _TRUST_RATIO,
    "LARS": _TRUST_RATIO,
    "OneBitAdam": _COMPRESSED,
    "OneBitLamb": _COMPRESSED,
    "ZeroOneAdam": _COMPRESSED,
    "Lion": _NOT_IN_TORCH,
    "MuAdam": _NOT_IN_TORCH,
    "MuAdamW": _NOT_IN_TORCH,
    "MuSGD": _NOT_IN_TORCH,
}

_GIVEN_BY_CALLER = "must be made in Python; build the scheduler and pass it to initialize(lr_scheduler=...)"
_REFUSED_SCHEDULERS = {
    "LambdaLR": f"takes functions, which {_GIVEN_BY_CALLER}",
    "MultiplicativeLR": f"takes functions, which {_GIVEN_BY_CALLER}",
    "SequentialLR": f"takes schedulers, which {_GIVEN_BY_CALLER}",
    "ChainedScheduler": f"takes schedulers, which {_GIVEN_BY_CALLER}",
    "ReduceLROnPlateau": "needs a metric at every step, and the engine has none to give it",
    "LRScheduler": "is only the base of the schedulers",
}

# Arguments of DeepSpeed's own Adam: the values that ask for nothing here (None: any), else what to do.
_ADAM_EXTRAS: dict[str, tuple[tuple[Any, ...] | None, str]] = {
    "torch_adam": (None, ""),
    "set_grad_none": (None, ""),
    "bias_correction": ((True,), "torch's Adam always corrects the bias; remove the key"),
    "fp32_optimizer_states": ((True,), "optimizer states are always fp32; remove the key"),
    "freeze_step": ((), "it belongs to 1-bit Adam; remove the key"),
    "var_freeze_step": ((), "it belongs to 0/1 Adam; remove the key"),
    "cuda_aware": ((), "it belongs to 1-bit Adam; remove the key"),
    "comm_backend_name": ((), "it belongs to 1-bit Adam; remove the key"),
}


@dataclass(frozen=True)
class OptimizerPlan:
    """An optimizer that is known to accept its arguments."""

    cls: type[Optimizer]
    """The class in torch.optim."""

    kwargs: dict[str, Any]
    """Its arguments besides the parameters."""

    ignored: tuple[str, ...]
    """Paths of accepted arguments that have no effect."""


@dataclass(frozen=True)
class SchedulerPlan:
    """A scheduler whose arguments have been checked: one of DeepSpeed's five, or a class of torch."""

    name: str
    """Its name in its own spelling, whatever the file's."""

    params: ScheduleParams | None
    """The arguments of one of DeepSpeed's five; None for a class of torch."""

    kwargs: dict[str, Any]
    """The arguments of a class of torch besides the optimizer."""

    ignored: tuple[str, ...]
    """Paths of accepted arguments that have no effect."""

    def torch_class(self) -> type[LRScheduler]:
        """The class of torch of this name."""
        return cast(type[LRScheduler], getattr(torch_schedulers, self.name))


def plan_optimizer(name: str, params: Mapping[str, Any]) -> OptimizerPlan:
    """Find torch's class for a ``{"type": name, "params": params}`` and check its arguments by trying them.

    Raises ConfigError naming ``optimizer.type`` or every faulty ``optimizer.params.*``.
    """
    own_name = _lookup("optimizer.type", name, ELEMENT_WISE, _REFUSED_OPTIMIZERS, "optimizer")
    findings = Findings()
    kwargs = dict(params)
    if own_name in ("Adam", "AdamW"):
        own_name = _take_deepspeed_adam(own_name, kwargs, findings)
    if "max_grad_norm" in kwargs:
        findings.fault("optimizer.params.max_grad_norm", "write gradient_clipping at the top of the file instead")
        del kwargs["max_grad_norm"]
    cls = cast(type[Optimizer], getattr(torch.optim, own_name))
    kwargs = _checked_arguments(cls, kwargs, ("params",), "optimizer.params", findings)
    _blame(lambda trial: _try_optimizer(cls, trial), kwargs, "optimizer.params", cls.__name__, findings)
    if findings.problems:
        raise ConfigError(findings.problems)
    return OptimizerPlan(cls, kwargs, tuple(findings.ignored))


def plan_scheduler(name: str, params: Mapping[str, Any], optimizer: OptimizerPlan | None = None) -> SchedulerPlan:
    """Find the scheduler for a ``{"type": name, "params": params}`` and check its arguments.

    ``optimizer`` lets a class of torch be tried on it. Raises ConfigError naming ``scheduler.type`` or every faulty
    ``scheduler.params.*``.
    """
    names = (*DEEPSPEED_SCHEDULES, *(own for own in torch_schedulers.__all__ if own not in _REFUSED_SCHEDULERS))
    own_name = _lookup("scheduler.type", name, names, _REFUSED_SCHEDULERS, "scheduler")
    prefix, findings, kwargs = "scheduler.params", Findings(), dict(params)
    for resumed in ("last_batch_iteration", "last_epoch"):
        if kwargs.get(resumed) == -1:
            del kwargs[resumed]
            findings.ignored.append(f"{prefix}.{resumed}")
        elif resumed in kwargs:
            value = kwargs.pop(resumed)
            findings.fault(
                f"{prefix}.{resumed}", f"{found(value)} resumes a run, which loading a checkpoint does; remove it"
            )
    checked: ScheduleParams | None = None
    if own_name in DEEPSPEED_SCHEDULES:
        model = DEEPSPEED_SCHEDULES[own_name]
        for key in [key for key, value in kwargs.items() if value == "auto"]:
            findings.fault(f"{prefix}.{key}", auto_text(model.model_fields.get(key)))
            del kwargs[key]
        checked = validated(kwargs, model, findings, f"{prefix}.")
        kwargs = {}
    else:
        cls = cast(type[LRScheduler], getattr(torch_schedulers, own_name))
        kwargs = _checked_arguments(cls, kwargs, ("optimizer", "last_epoch"), prefix, findings)
        if optimizer is not None:
            _blame(lambda trial: _try_scheduler(cls, optimizer, trial), kwargs, prefix, own_name, findings)
    if findings.problems:
        raise ConfigError(findings.problems)
    return SchedulerPlan(own_name, checked, kwargs, tuple(findings.ignored))


def _lookup(path: str, name: str, known: tuple[str, ...], refused: Mapping[str, str], kind: str) -> str:
    """The spelling in ``known`` of ``name``, which may be in any case; ConfigError if it is none of them."""
    by_lower = {own.lower(): own for own in known}
    if name.lower() in by_lower:
        return by_lower[name.lower()]
    reasons = {own.lower(): reason for own, reason in refused.items()}
    if name.lower() in reasons:
        raise ConfigError(f"{path}: {found(name)} {reasons[name.lower()]}")
    close = nearest(name, known)
    hint = f"did you mean {close}?" if close else f"known are {', '.join(known)}"
    raise ConfigError(f"{path}: {found(name)} is not the name of a known {kind}; {hint}")


def _take_deepspeed_adam(own_name: str, kwargs: dict[str, Any], findings: Findings) -> str:
    """Take DeepSpeed's own arguments out of ``kwargs``; the class that they and ``own_name`` ask for."""
    decoupled = True
    if "adam_w_mode" in kwargs:
        decoupled = kwargs.pop("adam_w_mode")
        if not isinstance(decoupled, bool):
            findings.fault("optimizer.params.adam_w_mode", f"{found(decoupled)} is not true or false; left out: true")
        elif own_name == "AdamW":
            findings.ignored.append("optimizer.params.adam_w_mode")
    elif "decoupled_weight_decay" in kwargs:
        decoupled = False  # the argument of torch's Adam decides, so its class has to be torch's Adam
    for key in [key for key in kwargs if key in _ADAM_EXTRAS]:
        value, (harmless, move) = kwargs.pop(key), _ADAM_EXTRAS[key]
        if harmless is None or value in harmless:
            findings.ignored.append(f"optimizer.params.{key}")
        else:
            findings.fault(f"optimizer.params.{key}", f"{found(value)} cannot be followed: {move}")
    if own_name == "AdamW":
        return "AdamW"
    if decoupled:
        # torch's AdamW decays by 0.01 unless told otherwise; something named Adam must not decay unasked.
        kwargs.setdefault("weight_decay", 0.0)
        return "AdamW"
    return "Adam"


def _checked_arguments(
    cls: type[Any], kwargs: dict[str, Any], reserved: tuple[str, ...], prefix: str, findings: Findings
) -> dict[str, Any]:
    """The arguments in ``kwargs`` that ``cls`` knows and whose types fit; the others go to ``findings``."""
    signature = {name: p for name, p in inspect.signature(cls).parameters.items() if name not in reserved}
    kept: dict[str, Any] = {}
    for name, value in kwargs.items():
        path = f"{prefix}.{name}"
        if name not in signature:
            close = nearest(name, signature)
            hint = f"did you mean {close}?" if close else f"it has {', '.join(signature)}"
            findings.fault(path, f"{cls.__name__} has no such argument; {hint}")
        elif value == "auto":
            findings.fault(path, auto_text(None))
        elif (wrong := _wrong_type(value, signature[name].default)) is not None:
            findings.fault(path, f"{found(value)} {wrong}; left out, it is {found(signature[name].default)}")
        else:
            kept[name] = tuple(value) if isinstance(signature[name].default, tuple) else value
    required = [name for name, p in signature.items() if p.default is inspect.Parameter.empty and name not in kwargs]
    for name in required:
        findings.fault(f"{prefix}.{name}", f"missing; {cls.__name__} has no default for it")
    return kept


def _wrong_type(value: Any, default: Any) -> str | None:
    """How ``value`` differs in kind from the ``default`` of its argument, where that shows a kind; else None."""
    if isinstance(default, bool):
        return None if isinstance(value, bool) else "is not true or false"
    if isinstance(default, (int, float)):
        return None if is_number(value) else f"is not a number{unquote_hint(value)}"
    if isinstance(default, tuple):
        fits = isinstance(value, (list, tuple)) and len(value) == len(default) and all(map(is_number, value))
        return None if fits else f"is not a list of {len(default)} numbers"
    return None


def _blame(
    attempt: Callable[[dict[str, Any]], str | None], kwargs: dict[str, Any], prefix: str, name: str, findings: Findings
) -> None:
    """Report what ``attempt`` says of ``kwargs`` under each argument that, left out, ends the complaint."""
    complaint = attempt(kwargs)
    if complaint is None or findings.problems:
        return
    alone = [key for key in kwargs if attempt({other: kwargs[other] for other in kwargs if other != key}) is None]
    for key in alone:
        findings.fault(f"{prefix}.{key}", f"{found(kwargs[key])} is refused by {name}: {complaint}")
    if not alone:
        findings.fault(prefix, f"{name} refuses {found(kwargs)}: {complaint}")


def _try_optimizer(cls: type[Optimizer], kwargs: dict[str, Any]) -> str | None:
    """What torch says to one step of ``cls`` on a parameter of one element; None if nothing."""
    parameter = torch.nn.Parameter(torch.zeros(1))
    parameter.grad = torch.zeros(1)
    try:
        optimizer = cls([parameter], **kwargs)
        if not kwargs.get("capturable"):  # that works on accelerators only, where this parameter is not
            optimizer.step()
    except Exception as error:
        return str(error) or type(error).__name__
    return None


def _try_scheduler(cls: type[LRScheduler], optimizer: OptimizerPlan, kwargs: dict[str, Any]) -> str | None:
    """What torch says to ``cls`` over a planned optimizer; None if nothing."""
    try:
        cls(optimizer.cls([torch.nn.Parameter(torch.zeros(1))], **optimizer.kwargs), **kwargs)
    except Exception as error:
        return str(error) or type(error).__name__
    return None
