"""What happens between a step and a save, or a load: nothing of it is lost, mixed up, or decided by one rank alone."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as schedulers

import zerotrain
from harness import run
from models import Regression, vector_batch
from oracle import adamw
from test_checkpoint_optimizers import engine_of, logged, steps
from zerotrain.checkpoint.plain import decode, encode
from zerotrain.checkpoint.reader import open_source


def test_buffers_that_ranks_changed_apart_are_saved_as_rank_0_has_them(tmp_path: Path) -> None:
    class Normed(Regression):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(8)

    def body(rank: int) -> torch.Tensor:
        model = Normed()
        engine = engine_of(model, adamw(model.parameters()))
        model.norm(torch.randn(6, 8, generator=torch.Generator().manual_seed(rank)) + rank)
        mine = model.norm.running_mean.clone()
        engine.save_checkpoint(tmp_path)
        return mine

    want = run(2, body)[0]
    source, got = open_source(tmp_path), torch.empty(8)
    source.read("norm.running_mean", 0, 8, got)
    assert torch.equal(got, want)


def test_a_folder_that_is_no_checkpoint_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "work.py").write_text("precious")
    (tmp_path / "venv").mkdir()
    (tmp_path / "venv" / ".lock").write_text("another program's")

    def body(rank: int) -> None:
        model = Regression()
        engine = engine_of(model, adamw(model.parameters()))
        with pytest.raises(zerotrain.CheckpointError, match="is not a checkpoint"):
            engine.save_checkpoint(tmp_path, "src")
        engine.save_checkpoint(tmp_path, "fine")
        engine.save_checkpoint(tmp_path, "fine")

    run(2, body)
    assert (tmp_path / "src" / "work.py").read_text() == "precious"
    assert (tmp_path / "venv" / ".lock").is_file()
    assert not list((tmp_path / "fine").glob(".*"))


class Clock(torch.optim.Optimizer):
    """Keeps a tensor scalar under a name that torch's optimizers do not use."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    state["ticks"] = state.get("ticks", torch.tensor(0)) + 1
                    p.sub_(p.grad * group["lr"] / float(state["ticks"]))


def test_scalars_of_any_name_stay_with_their_parameters(tmp_path: Path) -> None:
    def body(rank: int) -> None:
        engines = []
        for seed in (1, 2):
            torch.manual_seed(seed)
            model = Regression()
            engines.append(engine_of(model, Clock(model.parameters()), 2))
        first, second = engines
        first.module.layers[2].requires_grad_(True)
        x, y = (part[rank : rank + 1] for part in vector_batch(0, 2))
        for _ in range(2):  # the last layer gets no gradient
            hidden = torch.tanh(first.module.layers[1](torch.tanh(first.module.layers[0](x))))
            first.backward((hidden - y).square().mean())
            first.step()
        steps(first, 2, 3)
        first.save_checkpoint(tmp_path)
        second.load_checkpoint(tmp_path)
        for engine in engines:
            ticks = [float(zerotrain.full_optimizer_state(p, "ticks")) for p in engine.module.parameters()]
            assert ticks == [3, 3, 3, 3, 1, 1]
        assert steps(second, 3, 5) == steps(first, 3, 5)

    run(1, body)


def test_a_group_added_after_the_last_step_is_saved_and_loaded(tmp_path: Path) -> None:
    def made(seed: int) -> Any:
        torch.manual_seed(seed)
        model = Regression()
        optimizer = torch.optim.AdamW(model.layers[:2].parameters(), lr=1e-2)
        return engine_of(model, optimizer, 3), model

    def body(rank: int) -> None:
        first, model = made(1)
        steps(first, 0, 2)
        first.optimizer.add_param_group({"params": list(model.layers[2].parameters()), "lr": 3e-3})
        steps(first, 2, 4)
        first.save_checkpoint(tmp_path)
        second, other = made(2)
        second.optimizer.add_param_group({"params": list(other.layers[2].parameters()), "lr": 0.9})
        second.load_checkpoint(tmp_path)
        assert second.get_lr() == [1e-2, 3e-3]
        assert [loss for loss, _ in steps(second, 4, 6)] == [loss for loss, _ in steps(first, 4, 6)]
        second.optimizer.param_groups[1]["lr"] = 5e-3
        second.save_checkpoint(tmp_path)

    run(2, body)


def test_parameters_thawed_before_a_load_take_their_state(tmp_path: Path) -> None:
    def body(rank: int) -> None:
        torch.manual_seed(1)
        model = Regression()
        first = engine_of(model, adamw(model.parameters()), 2)
        steps(first, 0, 3)
        first.save_checkpoint(tmp_path)
        torch.manual_seed(2)
        other = Regression()
        other.layers[0].requires_grad_(False)
        second = engine_of(other, adamw(other.parameters()), 3)
        other.layers[0].requires_grad_(True)
        second.load_checkpoint(tmp_path)
        assert float(zerotrain.full_optimizer_state(other.layers[0].weight, "step")) == 3
        got, want = (torch.tensor([loss for loss, _ in steps(engine, 3, 5)]) for engine in (second, first))
        torch.testing.assert_close(got, want, rtol=1e-6, atol=0)

    run(2, body)


def test_another_optimizer_follows_the_scheduler_that_goes_on(tmp_path: Path) -> None:
    def made(kind: type[torch.optim.Optimizer]) -> Any:
        model = Regression()
        optimizer = kind(model.parameters(), lr=1e-2)  # type: ignore[call-arg]
        return engine_of(model, optimizer, 2, schedulers.StepLR(optimizer, 2))

    def body(rank: int) -> None:
        first = made(torch.optim.AdamW)
        steps(first, 0, 4)
        first.save_checkpoint(tmp_path)
        second = made(torch.optim.SGD)
        second.load_checkpoint(tmp_path)
        assert [lr for _, lr in steps(second, 4, 8)] == [lr for _, lr in steps(first, 4, 8)]

    run(2, body)


def test_a_scheduler_with_a_counter_goes_on(tmp_path: Path) -> None:
    assert decode(encode(Counter({3: 1, 7: 2}), "milestones")) == Counter({3: 1, 7: 2})

    def made() -> Any:
        model = Regression()
        optimizer = adamw(model.parameters())
        linear, steep = schedulers.LinearLR(optimizer, total_iters=2), schedulers.MultiStepLR(optimizer, [2, 4])
        return engine_of(model, optimizer, 2, schedulers.SequentialLR(optimizer, [linear, steep], [2]))

    def body(rank: int) -> None:
        first, second = made(), made()
        steps(first, 0, 1)
        first.save_checkpoint(tmp_path)
        second.load_checkpoint(tmp_path)
        assert [lr for _, lr in steps(second, 1, 8)] == [lr for _, lr in steps(first, 1, 8)]

    run(2, body)


def test_what_fails_on_one_rank_alone_fails_on_all(tmp_path: Path) -> None:
    def body(rank: int) -> None:
        model = Regression()
        engine = engine_of(model, adamw(model.parameters()))
        original = zerotrain.checkpoint.saver.companion_files
        if rank == 1:
            zerotrain.checkpoint.saver.companion_files = lambda module: 1 / 0
        with pytest.raises(zerotrain.CheckpointError, match="ZeroDivisionError"):
            engine.save_checkpoint(tmp_path)
        zerotrain.checkpoint.saver.companion_files = original
        engine.save_checkpoint(tmp_path)

    run(2, body)


def test_frozen_parameters_in_a_group_are_no_news(tmp_path: Path) -> None:
    def body(rank: int) -> None:
        model = Regression()
        model.layers[0].requires_grad_(False)
        engine = engine_of(model, adamw(model.parameters()))
        steps(engine, 0, 2)
        engine.save_checkpoint(tmp_path)
        assert logged(engine, tmp_path) == ""
        other = Regression()
        other.layers[0].requires_grad_(False)
        other.layers[1].requires_grad_(False)
        text = logged(engine_of(other, adamw(other.parameters())), tmp_path)
        assert ("2 parameters are not trained any more (layers.1.weight, ...)" in text) == (rank == 0)

    run(2, body)


def test_resuming_goes_on_to_an_older_one_where_the_newest_cannot_be_read(tmp_path: Path) -> None:
    def body(rank: int) -> None:
        model = Regression()
        first = engine_of(model, adamw(model.parameters()), checkpoint={"directory": str(tmp_path)})
        for step in range(2):
            steps(first, step, step + 1)
            first.save_checkpoint()
        preadv = os.preadv

        def failing(handle: int, buffers: Any, offset: int) -> int:
            if "step-00000002" in os.readlink(f"/proc/self/fd/{handle}"):
                raise OSError(5, "Input/output error")
            return preadv(handle, buffers, offset)

        os.preadv = failing  # type: ignore[assignment]
        first.resume()
        assert first.global_steps == 1
        steps(first, 1, 2)

    run(2, body)


def test_a_closed_engine_saves_and_loads_nothing(tmp_path: Path) -> None:
    def body(rank: int) -> None:
        model = Regression()
        engine = engine_of(model, adamw(model.parameters()))
        engine.save_checkpoint(tmp_path)
        engine.close()
        for call in (engine.save_checkpoint, engine.load_checkpoint):
            with pytest.raises(zerotrain.CheckpointError, match="closed"):
                call(tmp_path)

    run(1, body)
