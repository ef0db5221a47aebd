"""What belongs to an optimizer, a scheduler and a model besides weights: saved, and restored where it fits."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler as schedulers

import zerotrain
from harness import run
from models import Regression, Shape, TinyLM, token_batch, vector_batch
from oracle import adamw, full_weights

Make = Callable[[Iterable[Any]], torch.optim.Optimizer]


class Odd(torch.optim.Optimizer):
    """Element-wise, with a state per element, a Python number, a text and a tensor of its own shape."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr, "note": ("a", 1)})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state.update(speed=torch.zeros_like(p), calls=0, mood="calm", pair=torch.zeros(2))
                state["calls"] += 1
                state["pair"] += torch.tensor([1.0, 2.0])
                state["speed"].mul_(0.9).add_(p.grad)
                p.sub_(state["speed"] * group["lr"] * (1 + 0.1 * state["calls"] + 0.01 * float(state["pair"].sum())))


class Bare(torch.optim.Optimizer):
    """Without any state."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad * group["lr"])


OPTIMIZERS: dict[str, Make] = {
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "adam amsgrad": lambda p: torch.optim.Adam(p, lr=1e-2, amsgrad=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2),
    "sgd momentum": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, dampening=0.3),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
    "rmsprop centered": lambda p: torch.optim.RMSprop(p, lr=1e-3, centered=True, momentum=0.5),
    "nadam": lambda p: torch.optim.NAdam(p, lr=1e-2),
    "radam": lambda p: torch.optim.RAdam(p, lr=1e-2),
    "adadelta": lambda p: torch.optim.Adadelta(p),
    "adamax": lambda p: torch.optim.Adamax(p, lr=1e-2),
    "asgd": lambda p: torch.optim.ASGD(p, lr=1e-2, t0=2),
    "rprop": lambda p: torch.optim.Rprop(p, lr=1e-2),
    "odd": Odd,
    "bare": Bare,
}


class Partly(nn.Module):
    """Its second head is used from step 2 on, so that optimizers hold no state for it before."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(5, 7)
        self.first, self.second = nn.Linear(7, 3), nn.Linear(7, 3)

    def forward(self, x: Tensor, late: bool) -> Tensor:
        h = torch.tanh(self.body(x))
        y = self.first(h) + (self.second(h) if late else 0)
        return y.square().mean()


def engine_of(model: nn.Module, optimizer: Any, stage: int = 2, scheduler: Any = None, **extra: Any) -> Any:
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": stage, "unit_min_elements": 1},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": None,
        **extra,
    }
    return zerotrain.initialize(model=model, optimizer=optimizer, lr_scheduler=scheduler, config=config)[0]


def partly_steps(engine: Any, first: int, last: int) -> list[float]:
    losses = []
    for number in range(first, last):
        x = torch.randn(2, 5, generator=torch.Generator().manual_seed(number))[engine.rank % 2]
        engine.backward(engine(x, number >= 3))
        engine.step()
        losses.append(engine.metrics["loss"])
    return losses


@pytest.mark.parametrize(("source", "target"), [((2, 2), (2, 2)), ((3, 2), (1, 3)), ((0, 1), (3, 2))])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_any_optimizer_goes_on_where_it_was(
    tmp_path: Path, name: str, source: tuple[int, int], target: tuple[int, int]
) -> None:
    def made(stage: int, seed: int) -> Any:
        torch.manual_seed(seed)
        model = Partly()
        return engine_of(model, OPTIMIZERS[name](model.parameters()), stage)

    def uncut(rank: int) -> tuple[list[float], dict[str, Tensor]]:
        engine = made(source[0], 1)
        partly_steps(engine, 0, 2)
        engine.save_checkpoint(tmp_path)
        return partly_steps(engine, 2, 5), full_weights(engine.module)

    def resumed(rank: int) -> tuple[list[float], dict[str, Tensor]]:
        engine = made(target[0], 2)
        partly_steps(engine, 0, 4)  # states that the load must replace, one of a parameter that had none
        engine.load_checkpoint(tmp_path)
        return partly_steps(engine, 2, 5), full_weights(engine.module)

    losses, weights = run(source[1], uncut)[0]
    if source == target:
        assert run(target[1], resumed)[0][0] == losses
    elif {source[1], target[1]} == {2}:
        assert run(target[1], resumed)[0][0] == pytest.approx(losses, rel=1e-5)
    for got, mine in zip(run(target[1], resumed)[0][1].values(), weights.values(), strict=True):
        if source == target:
            assert torch.equal(got, mine)


def rows(engine: Any, number: int) -> Any:
    return [part[engine.rank : engine.rank + 1] for part in vector_batch(number, engine.world_size)]


def steps(engine: Any, first: int, last: int) -> list[tuple[float, list[float]]]:
    found = []
    for number in range(first, last):
        engine.backward(engine(*rows(engine, number)))
        engine.step()
        found.append((engine.metrics["loss"], engine.get_lr()))
    return found


def two_groups(model: nn.Module, reorder: bool = False) -> torch.optim.Optimizer:
    biases = [p for n, p in model.named_parameters() if n.endswith("bias")]
    weights = [p for n, p in model.named_parameters() if n.endswith("weight")]
    groups = [{"params": weights, "weight_decay": 0.1}, {"params": biases, "lr": 3e-3, "weight_decay": 0.0}]
    if reorder:
        groups = [{"params": biases[::-1]}, {"params": weights[::-1]}]
    return torch.optim.AdamW(groups, lr=1e-2)


def test_param_groups_are_found_by_their_parameters(tmp_path: Path) -> None:
    """Groups in another order, with other settings, and parameters in another order within them."""

    def body(rank: int) -> None:
        torch.manual_seed(1)
        model = Regression()
        engine = engine_of(model, two_groups(model))
        steps(engine, 0, 2)
        engine.optimizer.param_groups[0]["lr"] = 5e-3
        engine.save_checkpoint(tmp_path)
        want = steps(engine, 2, 4)
        torch.manual_seed(2)
        other = Regression()
        second = engine_of(other, two_groups(other, reorder=True), 3)
        second.load_checkpoint(tmp_path)
        assert [(g["lr"], g["weight_decay"]) for g in second.optimizer.param_groups] == [(3e-3, 0.0), (5e-3, 0.1)]
        got = steps(second, 2, 4)
        assert [loss for loss, _ in got] == pytest.approx([loss for loss, _ in want], rel=1e-6)

    run(2, body)


def test_groups_that_mix_saved_groups_are_an_error(tmp_path: Path) -> None:
    def body(rank: int) -> None:
        model = Regression()
        engine_of(model, two_groups(model)).save_checkpoint(tmp_path)
        other = Regression()
        engine = engine_of(other, torch.optim.AdamW(other.parameters(), lr=7e-3))
        with pytest.raises(zerotrain.CheckpointError, match="2 saved groups with different settings"):
            engine.load_checkpoint(tmp_path)
        engine.load_checkpoint(tmp_path, strict=False)
        assert engine.get_lr() == [7e-3]

    run(2, body)


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "one cycle": lambda o: schedulers.OneCycleLR(o, max_lr=1e-2, total_steps=20),
    "sequential": lambda o: schedulers.SequentialLR(
        o, [schedulers.LinearLR(o, 0.1, total_iters=3), schedulers.CosineAnnealingLR(o, 10)], [3]
    ),
    "cosine restarts": lambda o: schedulers.CosineAnnealingWarmRestarts(o, 3),
    "lambda": lambda o: schedulers.LambdaLR(o, lambda step: 1 / (step + 1)),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_go_on(tmp_path: Path, name: str) -> None:
    def made(seed: int) -> Any:
        torch.manual_seed(seed)
        model = Regression()
        optimizer = adamw(model.parameters())
        return engine_of(model, optimizer, 3, SCHEDULERS[name](optimizer))

    def body(rank: int) -> None:
        first = made(1)
        steps(first, 0, 4)
        first.save_checkpoint(tmp_path)
        want = steps(first, 4, 8)
        second = made(2)
        second.load_checkpoint(tmp_path)
        assert steps(second, 4, 8) == want

    run(2, body)


def test_the_loss_scale_goes_on(tmp_path: Path) -> None:
    fp16 = {"enabled": True, "initial_scale_power": 24, "loss_scale_window": 3, "hysteresis": 1}

    def body(rank: int) -> None:
        engines = []
        for seed in (1, 2):
            torch.manual_seed(seed)
            model = Regression()
            engines.append(engine_of(model, adamw(model.parameters()), 2, fp16=fp16))
        first, second = engines
        steps(first, 0, 9)
        assert first.skipped_steps > 0
        first.save_checkpoint(tmp_path)
        second.load_checkpoint(tmp_path)
        assert (second.loss_scale, second.skipped_steps) == (first.loss_scale, first.skipped_steps)
        trace = [[(loss, e.loss_scale) for loss, _ in steps(e, 9, 16)] for e in engines]
        assert trace[0] == trace[1]

    run(2, body)


def logged(engine: Any, *args: Any, **options: Any) -> str:
    """What rank 0 says about a load."""
    lines: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    handler = Keep()
    logging.getLogger("zerotrain").addHandler(handler)
    try:
        engine.load_checkpoint(*args, **options)
    finally:
        logging.getLogger("zerotrain").removeHandler(handler)
    return "\n".join(lines)


def saved(root: Path, **extra: Any) -> Any:
    torch.manual_seed(1)
    model = Regression()
    engine = engine_of(model, adamw(model.parameters()), 2, **extra)
    steps(engine, 0, 3)
    engine.save_checkpoint(root)
    return engine


def test_weights_only(tmp_path: Path) -> None:
    """From the tag that was asked for; the optimizer's state starts fresh, and counters stay."""

    def body(rank: int) -> None:
        first = saved(tmp_path)
        want = full_weights(first.module)
        steps(first, 3, 4)
        first.save_checkpoint(tmp_path)
        torch.manual_seed(2)
        model = Regression()
        engine = engine_of(model, adamw(model.parameters()), 3)
        steps(engine, 0, 1)
        engine.load_checkpoint(tmp_path, "step-00000003", weights_only=True)
        assert all(torch.equal(value, want[name]) for name, value in full_weights(model).items())
        assert engine.global_steps == 1
        for parameter in model.parameters():
            with pytest.raises(KeyError):
                zerotrain.full_optimizer_state(parameter, "exp_avg")
        steps(engine, 1, 2)

    run(2, body)


def test_another_optimizer_starts_fresh_and_says_so(tmp_path: Path) -> None:
    def body(rank: int) -> None:
        first = saved(tmp_path)
        want = full_weights(first.module)
        model = Regression()
        engine = engine_of(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), 3)
        text = logged(engine, tmp_path)
        assert ("AdamW and is torch.optim.sgd.SGD: its state starts fresh" in text) == (rank == 0)
        assert engine.get_lr() == [0.1]
        assert all(torch.equal(value, want[name]) for name, value in full_weights(model).items())
        assert engine.global_steps == 3
        steps(engine, 3, 5)

    run(2, body)


def test_newly_frozen_and_newly_trainable_parameters(tmp_path: Path) -> None:
    def body(rank: int) -> None:
        torch.manual_seed(1)
        model = Regression()
        model.layers[0].requires_grad_(False)
        engine = engine_of(model, adamw(model.parameters()), 2)
        steps(engine, 0, 2)
        engine.save_checkpoint(tmp_path)
        state = zerotrain.full_optimizer_state(model.layers[1].weight, "exp_avg")
        want = full_weights(model)
        torch.manual_seed(2)
        other = Regression()
        other.layers[2].requires_grad_(False)
        second = engine_of(other, adamw(p for p in other.parameters() if p.requires_grad), 3)
        text = logged(second, tmp_path)
        if rank == 0:
            assert "no optimizer state for layers.0.weight, layers.0.bias: it starts fresh" in text
            assert "2 parameters are not trained any more (layers.2.weight, ...): their state is dropped" in text
        assert all(torch.equal(value, want[name]) for name, value in full_weights(other).items())
        assert torch.equal(zerotrain.full_optimizer_state(other.layers[1].weight, "exp_avg"), state)
        with pytest.raises(KeyError):
            zerotrain.full_optimizer_state(other.layers[0].weight, "exp_avg")
        steps(second, 2, 4)

    run(2, body)


class Reshaped(nn.Module):
    """Misses a bias, has one layer more, and one of another width."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8, bias=False), nn.Linear(8, 8), nn.Linear(8, 4)])
        self.extra = nn.Linear(4, 8)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return (self.extra(x) - y).square().mean()


def test_what_does_not_fit_is_listed_and_nothing_changes(tmp_path: Path) -> None:
    def body(rank: int) -> None:
        first = saved(tmp_path)
        want = full_weights(first.module)
        model = Reshaped()
        engine = engine_of(model, adamw(model.parameters()), 3)
        before = full_weights(model)
        with pytest.raises(zerotrain.CheckpointError) as caught:
            engine.load_checkpoint(tmp_path)
        text = str(caught.value)
        assert "2 missing: extra.weight, extra.bias" in text
        assert "1 not in the model: layers.0.bias" in text
        assert "layers.2.weight (8x8 in the checkpoint, 4x8 in the model)" in text
        assert "strict=False" in text
        assert all(torch.equal(value, before[name]) for name, value in full_weights(model).items())
        assert engine.global_steps == 0
        assert ("2 missing" in logged(engine, tmp_path, strict=False)) == (rank == 0)
        after = full_weights(model)
        for name, value in after.items():
            fits = name in ("layers.0.weight", "layers.1.weight", "layers.1.bias")
            assert torch.equal(value, want[name] if fits else before[name]), name
        steps(engine, 3, 4)

    run(2, body)


class Stateful(nn.Module):
    """Running statistics, a buffer that is not saved, and state that is neither parameter nor buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)
        self.register_buffer("scratch", torch.zeros(3), persistent=False)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.history: list[Any] = []

    def get_extra_state(self) -> Any:
        return {"history": self.history}

    def set_extra_state(self, state: Any) -> None:
        self.history = state["history"]

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.count += 1
        self.scratch += 1
        self.history = [*self.history, (int(self.count), "seen")]
        return (self.norm(self.layer(x)) - y).square().mean()


def test_buffers_and_extra_state(tmp_path: Path) -> None:
    def made(seed: int) -> Any:
        torch.manual_seed(seed)
        model = Stateful()
        return engine_of(model, adamw(model.parameters()), 3, train_batch_size=None)

    def go(engine: Any, first: int, last: int) -> list[float]:
        losses = []
        for number in range(first, last):
            x, y = vector_batch(number, 8)
            share = slice(4 * engine.rank, 4 * engine.rank + 4)
            engine.backward(engine(x[share], y[share]))
            engine.step()
            losses.append(engine.metrics["loss"])
        return losses

    def body(rank: int) -> None:
        first = made(1)
        go(first, 0, 3)
        first.save_checkpoint(tmp_path)
        buffers = {name: value.clone() for name, value in first.module.named_buffers()}
        want = go(first, 3, 5)
        second = made(2)
        second.load_checkpoint(tmp_path)
        for name, value in second.module.named_buffers():
            assert torch.equal(value, torch.zeros(3) if name == "scratch" else buffers[name]), name
        assert second.module.history == [(1, "seen"), (2, "seen"), (3, "seen")]
        assert go(second, 3, 5) == want

    run(2, body)


class OddShapes(nn.Module):
    """Parameters and buffers of every awkward shape and dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.empty, self.scalar, self.one = (nn.Parameter(torch.randn(shape)) for shape in ((0, 3), (), (1,)))
        self.weight, self.wide = nn.Parameter(torch.randn(5, 3)), nn.Parameter(torch.randn(3, dtype=torch.float64))
        self.whole = nn.Parameter(torch.randint(0, 5, (4,)), requires_grad=False)
        self.mask = nn.Parameter(torch.rand(7) > 0.5, requires_grad=False)
        buffers = {"flag": torch.tensor(True), "nothing": torch.zeros(0), "short": torch.randn(3).half()}
        for name, value in {**buffers, "turn": torch.randn(3, dtype=torch.complex64)}.items():
            self.register_buffer(name, value)

    def forward(self, x: Tensor) -> Tensor:
        y = (x @ self.weight.T) * self.scalar * self.one
        return y.square().sum() + self.wide.square().sum().float()


@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_awkward_shapes_and_dtypes(tmp_path: Path, stage: int, world: int) -> None:
    def made(seed: int, stage: int) -> Any:
        torch.manual_seed(seed)
        model = OddShapes()
        return engine_of(model, adamw(p for p in model.parameters() if p.requires_grad), stage)

    def go(engine: Any) -> list[float]:
        losses = []
        for _ in range(2):
            engine.backward(engine(torch.full((2, 3), 1.0 + engine.rank)))
            engine.step()
            losses.append(engine.metrics["loss"])
        return losses

    def values(engine: Any) -> dict[str, Tensor]:
        with zerotrain.gathered(engine.module):
            return {name: value.clone() for name, value in engine.module.state_dict().items()}

    def body(rank: int) -> None:
        first, second = made(1, stage), made(2, (stage + 1) % 4)
        go(first)
        first.save_checkpoint(tmp_path)
        want = values(first)
        text = logged(second, tmp_path, verify=True)
        assert text == "", "nothing is worth a remark"
        got = values(second)
        assert got.keys() == want.keys()
        for name, value in want.items():
            assert got[name].dtype == value.dtype
            assert torch.equal(got[name], value), name
        assert go(second) == pytest.approx(go(first), rel=1e-5)

    run(world, body)


@pytest.mark.parametrize("stage", [1, 3])
def test_tied_models_and_untied_ones_load_each_others(tmp_path: Path, stage: int) -> None:
    def body(rank: int) -> None:
        engines = {}
        for tied in (True, False):
            torch.manual_seed(int(tied))
            model = TinyLM(Shape(tied=tied))
            engines[tied] = engine_of(model, adamw(model.parameters()), stage)
            engines[tied].backward(engines[tied](*token_batch(0, 2)))
            engines[tied].step()
            engines[tied].save_checkpoint(tmp_path / str(tied))
        tied_weights, untied_weights = full_weights(engines[True].module), full_weights(engines[False].module)
        engines[False].load_checkpoint(tmp_path / "True")
        got = full_weights(engines[False].module)
        assert all(torch.equal(value, tied_weights[name]) for name, value in got.items())
        engines[True].load_checkpoint(tmp_path / "False")
        got = full_weights(engines[True].module)
        assert all(torch.equal(value, untied_weights[name]) for name, value in got.items() if name != "head.weight")

    run(2, body)


def test_client_state_that_json_cannot_hold_is_refused_by_name(tmp_path: Path) -> None:
    def body(rank: int) -> None:
        engine = saved(tmp_path)
        with pytest.raises(zerotrain.CheckpointError, match=r"client_state\.model is a .*Regression"):
            engine.save_checkpoint(tmp_path, "bad", client_state={"model": Regression()})
        steps(engine, 3, 4)
        assert engine.load_checkpoint(tmp_path).client_state is None

    run(2, body)


def test_ranks_that_save_different_things_are_told(tmp_path: Path) -> None:
    def body(rank: int) -> None:
        engine = saved(tmp_path)
        with pytest.raises(zerotrain.RankMismatchError, match="tag is 'a0' on rank 0 and 'a1' on rank 1"):
            engine.save_checkpoint(tmp_path, f"a{rank}")

    run(2, body)


def test_where_is_asked_for(tmp_path: Path) -> None:
    def body(rank: int) -> None:
        engine = saved(tmp_path)
        for call in (engine.save_checkpoint, engine.load_checkpoint, engine.resume):
            with pytest.raises(zerotrain.CheckpointError, match=r"checkpoint\.directory"):
                call()

    run(1, body)


def test_an_engine_without_an_optimizer_saves_and_loads_weights(tmp_path: Path) -> None:
    def body(rank: int) -> None:
        torch.manual_seed(1)
        engine = engine_of(Regression(), None, 3)
        want = full_weights(engine.module)
        engine.save_checkpoint(tmp_path)
        torch.manual_seed(2)
        model = Regression()
        other = engine_of(model, adamw(model.parameters()), 3)
        assert ("the optimizer starts fresh" in logged(other, tmp_path)) == (rank == 0)
        assert all(torch.equal(value, want[name]) for name, value in full_weights(model).items())
        saved(tmp_path / "trained")
        engine.load_checkpoint(tmp_path / "trained")

    run(2, body)
