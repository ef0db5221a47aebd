"""Whether an optimizer may be given flat pieces of parameters: decided by trying, not by a list of names.

ZeRO steps an optimizer on flat fragments. That is the same computation only if each element's update depends on no other
element (SGD, Adam and their kin), and a different one for optimizers that look at whole matrices or at norms of
parameters (Muon, Adafactor, LAMB, Shampoo, L-BFGS). So a twin of the optimizer steps a small matrix whole and in flat
pieces, and the results are compared.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from itertools import pairwise
from typing import Any

import torch
from torch import nn

STEPS = 3
SHAPE = (4, 6)
CUTS = (0, 5, 24)


def refusal(optimizer: torch.optim.Optimizer) -> str | None:
    """Why `optimizer` would train wrongly on fragments, or None if it is element-wise."""
    name = type(optimizer).__name__
    for group in optimizer.param_groups:
        try:
            whole, pieces = _train(optimizer, group, cut=False), _train(optimizer, group, cut=True)
        except Exception as error:
            return f"{name} could not be tried on flat pieces of a parameter: {type(error).__name__}: {error}"
        if not torch.allclose(whole, pieces, rtol=1e-6, atol=1e-9):
            return (
                f"{name} updates a flat piece of a parameter differently from the same elements in the whole parameter"
            )
    return None


def _train(optimizer: torch.optim.Optimizer, group: dict[str, Any], cut: bool) -> torch.Tensor:
    """A small matrix after a few steps of a twin of `optimizer` with the hyper-parameters of `group`."""
    generator = torch.Generator().manual_seed(1)
    device = next((p.device for p in group["params"]), torch.device("cpu"))
    start = torch.randn(SHAPE, generator=generator)
    slices = [slice(a, b) for a, b in pairwise(CUTS)]
    flat = start.reshape(-1)
    values = [flat[s].clone() for s in slices] if cut else [start]
    parameters = [nn.Parameter(value.to(device)) for value in values]
    twin = _twin(optimizer, group, parameters)
    for _ in range(STEPS):
        grad = torch.randn(SHAPE, generator=generator)
        grads = [grad.reshape(-1)[s] for s in slices] if cut else [grad]
        for parameter, value in zip(parameters, grads, strict=True):
            parameter.grad = value.to(device)
        twin.step()
    return torch.cat([p.detach().reshape(-1).cpu() for p in parameters])


def _twin(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], parameters: list[nn.Parameter]
) -> torch.optim.Optimizer:
    """An optimizer of the same class and settings over other parameters, without state and without the user's hooks."""
    twin = object.__new__(type(optimizer))
    settings = {k: v for k, v in group.items() if k != "params"}
    if not settings.get("lr", 1.0):  # warm-up starts at zero, where every optimizer agrees with every other
        settings["lr"] = 1e-2
    own = {"state", "param_groups", "defaults"}
    twin.__dict__.update({k: v for k, v in optimizer.__dict__.items() if k not in own and "hook" not in k})
    twin.__setstate__(
        {
            "defaults": copy.copy(optimizer.defaults),
            "state": defaultdict(dict),
            "param_groups": [{**copy.deepcopy(settings), "params": parameters}],
        }
    )
    twin.__dict__.pop("step", None)  # a learning rate scheduler's wrapper of the original's method
    return twin
