"""Parameters that are not whole refuse to be read, instead of crashing or answering with old values.

While a parameter's values are elsewhere its object stays what it was (identity, shape, dtype, requires_grad), but its
class becomes a guard, entered and left by assigning `__class__`, as torch's own `UninitializedParameter` does. Metadata
passes; whatever needs values asks the parameter's owner, which either makes them whole in time (a gather under way, a
use inside the forward pass) or raises `ReleasedParameterError` naming the parameter and `gathered()`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol
from weakref import ref

import torch
from torch import nn

_T = torch.Tensor
_ATTRIBUTES = (
    "shape", "dtype", "device", "layout", "ndim", "requires_grad", "grad", "grad_fn", "is_leaf", "names", "itemsize",
    "nbytes", "is_cpu", "is_cuda", "is_sparse", "is_meta", "is_quantized", "is_xpu", "is_mps", "is_mkldnn", "is_nested",
    "_version", "_backward_hooks", "output_nr", "retains_grad", "_post_accumulate_grad_hooks", "grad_dtype",
)  # fmt: skip
_METHODS = (
    "size", "dim", "numel", "nelement", "stride", "is_contiguous", "is_floating_point", "is_complex", "element_size",
    "register_hook", "register_post_accumulate_grad_hook", "requires_grad_", "storage_offset", "ndimension",
    "__hash__", "__len__", "untyped_storage",
)  # fmt: skip


def _metadata() -> frozenset[Any]:
    found: set[Any] = {getattr(_T, name) for name in _METHODS if hasattr(_T, name)}
    for name in _ATTRIBUTES:
        descriptor = getattr(_T, name, None)
        for access in ("__get__", "__set__", "__delete__"):
            if hasattr(descriptor, access):
                found.add(getattr(descriptor, access))
    functions = (torch.is_floating_point, torch.is_complex, torch.numel, torch._has_compatible_shallow_copy_type)
    return frozenset(found.union(functions))


_METADATA = _metadata()
_SET_DATA = _T.data.__set__  # type: ignore[attr-defined]
_REPR = _T.__repr__
_CONVERSIONS = frozenset(
    {_T.to, _T.float, _T.double, _T.half, _T.bfloat16, _T.cpu, _T.cuda, _T.type, _T.contiguous, _T.xpu}
)


class Owner(Protocol):
    """What the guard asks for values: the unit that the parameter belongs to."""

    def require(self, parameter: nn.Parameter, function: Callable[..., Any]) -> None:
        """Make `parameter` whole and unguarded, or raise ReleasedParameterError."""


class Guarded:
    """Mixed in before the parameter's own class while its values are elsewhere."""

    _zerotrain_owner: Callable[[], Owner | None]

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if func in _METADATA:
                return func(*args, **kwargs)
            if func == _REPR:
                p = args[0]
                return f"Parameter(sharded, shape={tuple(p.shape)}, dtype={p.dtype}, requires_grad={p.requires_grad})"
            if func == _SET_DATA and args[0] is args[1]:
                return None  # `module.to(...)` that changes nothing assigns a parameter's data to itself
            if func in _CONVERSIONS and _changes_nothing(func, args, kwargs):
                return args[0]
        for parameter in _guarded_in((args, kwargs)):
            owner = parameter._zerotrain_owner()
            if owner is None:
                from zerotrain.errors import ReleasedParameterError

                raise ReleasedParameterError("this parameter's engine was closed, and its values went with it")
            owner.require(parameter, func)
        return func(*args, **kwargs)


_classes: dict[type, type] = {}


def guard(parameter: nn.Parameter, owner: ref[Any]) -> None:
    """Enter the guard. `parameter` keeps its identity; reading its values asks `owner()` from now on."""
    plain = type(parameter)
    if issubclass(plain, Guarded):
        return
    if plain not in _classes:
        _classes[plain] = type(f"Sharded{plain.__name__}", (Guarded, plain), {"_zerotrain_plain": plain})
    parameter._zerotrain_owner = owner  # type: ignore[attr-defined]
    parameter.__class__ = _classes[plain]


def unguard(parameter: nn.Parameter) -> None:
    """Leave the guard, if it was entered."""
    plain = getattr(type(parameter), "_zerotrain_plain", None)
    if plain is not None:
        parameter.__class__ = plain


def _guarded_in(value: Any) -> Iterator[Any]:
    if isinstance(value, Guarded):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _guarded_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _guarded_in(item)


def _changes_nothing(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """A conversion to the dtype and device that the parameter has already."""
    probe = torch.empty(0, dtype=args[0].dtype, device=args[0].device)
    changed = func(probe, *args[1:], **{k: v for k, v in kwargs.items() if k != "copy"})
    return not kwargs.get("copy") and isinstance(changed, _T) and changed is probe
