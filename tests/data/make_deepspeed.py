"""Make the DeepSpeed checkpoints of this folder: two ranks on the CPU, a tiny model, a few steps of Adam.

Needs DeepSpeed (0.19.8 made those that are here) beside torch; the tests need only what this script leaves behind:

    DS_ACCELERATOR=cpu python tests/data/make_deepspeed.py tests/data/deepspeed

For each checkpoint, `expected.safetensors` holds what DeepSpeed itself says is in it: `weights/<name>` by its
`zero_to_fp32`, `<state>/<name>` and `master/<name>` by its `safe_get_full_*`.
"""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.multiprocessing as mp
from torch import nn

WORLD = 2
STEPS = 3
STATES = ("exp_avg", "exp_avg_sq")
UNNEEDED = ("zero_to_fp32.py", "zero_to_torch.py")


class Case(NamedTuple):
    stage: int
    precision: str = "fp32"
    groups: int = 1
    options: dict[str, Any] | None = None
    optimizer: str = "AdamW"


CASES = {
    "zero1": Case(1),
    "zero2": Case(2),
    "zero2_groups": Case(2, "bf16", 2),
    "zero2_robin": Case(2, "fp32", 2, {"round_robin_gradients": True}),
    "zero2_elastic": Case(2, "fp32", 2, {"elastic_checkpoint": True}),
    "zero3": Case(3),
    "zero3_groups": Case(3, "bf16", 2, {"sub_group_size": 10, "stage3_param_persistence_threshold": 4}),
    "bf16_optimizer": Case(1, "bf16", 2, {"immediate": True}),
}


class Net(nn.Module):
    """Odd sizes, a frozen weight, buffers (one of them of integers), a weight with two names."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.hidden = nn.Linear(3, 7)
        self.norm = nn.LayerNorm(7)
        self.frozen = nn.Linear(7, 5)
        self.out = nn.Linear(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.ones(1))
        self.frozen.weight.requires_grad_(False)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.norm.register_buffer("shift", torch.linspace(-1, 1, 7))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.seen += tokens.numel()
        hidden = self.norm(self.hidden(self.embed(tokens)))
        hidden = torch.tanh(hidden + self.norm.shift.to(hidden.dtype))
        return self.head(self.out(self.frozen(hidden))) * self.scale


def config(case: Case) -> dict[str, Any]:
    options = dict(case.options or {})
    made: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": case.stage, **options},
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": case.precision == "bf16"},
    }
    if options.pop("immediate", False):  # DeepSpeed then takes its BF16_Optimizer
        made["zero_optimization"] = {"stage": 1}
        made["data_types"] = {"grad_accum_dtype": "fp32"}
    return made


def groups(model: Net, count: int) -> list[dict[str, Any]]:
    """One group, or matrices and the rest apart."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    if count == 1:
        return [{"params": parameters}]
    matrices, rest = [p for p in parameters if p.dim() > 1], [p for p in parameters if p.dim() < 2]
    return [{"params": matrices, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]


def train(rank: int, port: int, name: str, folder: str) -> None:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(WORLD),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        GLOO_SOCKET_IFNAME="lo",
        DS_ACCELERATOR="cpu",
    )
    import deepspeed

    deepspeed.init_distributed(dist_backend="gloo")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    case, model = CASES[name], Net()
    optimizer = torch.optim.AdamW(groups(model, case.groups), lr=1e-2)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config(case))
    generator = torch.Generator().manual_seed(rank)
    for _ in range(STEPS):
        tokens = torch.randint(5, (4,), generator=generator)
        loss = nn.functional.cross_entropy(engine(tokens).float(), tokens)
        engine.backward(loss)
        engine.step()
    engine.save_checkpoint(folder, tag="step3")
    # What `safe_get_full_*` tells is wrong with round robin: it takes the parameters in their order before it.
    expected = {} if "round_robin_gradients" in (case.options or {}) else state_of(engine)
    if rank == 0:
        finish(Path(folder), expected)


def state_of(engine: Any) -> dict[str, torch.Tensor]:
    """The live engine's weights and states, whole; collective."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    if hasattr(engine.optimizer, "_lazy_init_hp_params_optimizer_state"):
        # It links all groups after the first group's first step, when the others have no states yet: once more.
        engine.optimizer._hp_optimizer_states_linked = False
        engine.optimizer._lazy_init_hp_params_optimizer_state()
    found = {}
    for name, parameter in engine.module.named_parameters():
        if not parameter.requires_grad:
            continue
        found[f"master/{name}"] = safe_get_full_fp32_param(parameter).clone()
        for state in STATES:
            found[f"{state}/{name}"] = safe_get_full_optimizer_state(parameter, state).clone()
    return found


def finish(folder: Path, expected: dict[str, torch.Tensor]) -> None:
    """Add what DeepSpeed's own script reads, and take away what no test needs."""
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
    from safetensors.torch import save_file

    for unneeded in UNNEEDED:
        (folder / unneeded).unlink(missing_ok=True)
    try:
        whole = get_fp32_state_dict_from_zero_checkpoint(str(folder))
    except ValueError as error:  # it does not know the files of the BF16_Optimizer
        print(f"{folder.name}: {error}")
        whole = {}
    expected |= {f"weights/{name}": tensor for name, tensor in whole.items()}
    save_file({key: t.detach().clone().contiguous() for key, t in expected.items()}, folder / "expected.safetensors")


def main() -> None:
    root = Path(sys.argv[1])
    for name in sys.argv[2:] or CASES:
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            port = sock.getsockname()[1]
        mp.spawn(train, (port, name, str(root / name)), WORLD)


if __name__ == "__main__":
    main()
