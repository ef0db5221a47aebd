"""A run that is cut and resumed writes the same loss log as one that is not: to the last bit, wherever the cut falls."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset

import zerotrain
from harness import run

STEPS = 200
LENGTH = 37  # samples of an epoch: neither micro nor global batches divide it
Log = list[tuple[int, float, float]]


class Noisy(Dataset[dict[str, Tensor]]):
    """Samples with random augmentation from every generator there is."""

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        noise = 0.01 * torch.randn(8) + 0.01 * random.random() + 0.01 * float(np.random.rand())
        x = torch.full((8,), float(index)) / LENGTH + noise
        return {"x": x, "y": x.roll(1)}


class Stream(IterableDataset[dict[str, Tensor]]):
    def __iter__(self) -> Any:
        dataset = Noisy()
        return (dataset[index] for index in range(LENGTH))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.drop, self.down = nn.Linear(8, 16), nn.Dropout(0.2), nn.Linear(16, 8)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.down(self.drop(torch.tanh(self.up(x)))) - y).square().mean()


def config(stage: int, folder: Path, accumulation: int = 2, **extra: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": accumulation,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": STEPS, "warmup_num_steps": 20}},
        "gradient_clipping": 1.0,
        "seed": 7,
        "steps_per_print": None,
        "zero_optimization": {"stage": stage},
        "checkpoint": {"directory": str(folder), "resume": "auto", **extra},
    }


def train(
    job: dict[str, Any], until: int, save_after: int = 0, data: type = Noisy, early: bool = False
) -> tuple[int, Log]:
    """Train up to step `until` and save after `save_after` micro batches (`early`: before the batch just fetched is used).

    The step that training began at, and a line of the log for every step since.
    """
    torch.manual_seed(3)
    engine, _, loader, _ = zerotrain.initialize(model=Net(), training_data=data(), config=job)
    begun, micro, log = engine.global_steps, 0, []
    while engine.global_steps < until:
        for batch in loader:
            micro += 1
            if early and micro == save_after:
                engine.save_checkpoint()
            engine.backward(engine(**batch))
            before = engine.global_steps
            engine.step()
            if engine.global_steps > before:
                log.append((engine.global_steps, engine.metrics["loss"], engine.metrics["lr"]))
            if not early and micro == save_after:
                engine.save_checkpoint()
            if engine.global_steps >= until:
                break
    engine.close()
    return begun, log


# Micro batches: the first, at and inside an accumulation window, around the end of an epoch (10 per rank), far in.
CUTS = (1, 7, 10, 11, 20, 133)


@pytest.mark.parametrize(("stage", "cuts"), [(3, CUTS), (0, (7, 20))])
def test_cut_and_resumed_is_equal_to_uncut(tmp_path: Path, stage: int, cuts: tuple[int, ...]) -> None:
    uncut = run(2, lambda rank: train(config(stage, tmp_path / "none"), STEPS))
    assert [line[0] for line in uncut[0][1]] == list(range(1, STEPS + 1))
    for cut in cuts:
        job = config(stage, tmp_path / str(cut))
        run(2, lambda rank, job=job, cut=cut: train(job, cut // 2 + 3, save_after=cut))
        resumed = run(2, lambda rank, job=job: train(job, STEPS))
        for rank in range(2):
            begun, log = resumed[rank]
            assert begun == cut // 2
            assert log == uncut[rank][1][begun:], f"cut after {cut} micro batches, rank {rank}"


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("data", [Noisy, Stream])
def test_a_save_before_the_fetched_batch_is_used_does_not_lose_it(
    tmp_path: Path, data: type, asynchronous: bool
) -> None:
    for cut in (4, 5, 12):
        job = config(3, tmp_path / str(cut), **{"async": asynchronous})
        uncut = run(2, lambda rank, job=job: train({**job, "checkpoint": {}}, 20, data=data))
        run(2, lambda rank, job=job, cut=cut: train(job, 8, save_after=cut, data=data, early=True))
        resumed = run(2, lambda rank, job=job: train(job, 20, data=data))
        assert resumed[0] == ((cut - 1) // 2, uncut[0][1][(cut - 1) // 2 :]), cut


def test_a_chain_of_cuts(tmp_path: Path) -> None:
    """Cut every few steps, under the retention of one checkpoint."""
    uncut = run(2, lambda rank: train(config(3, tmp_path / "none"), 40))[0][1]
    job, log = config(3, tmp_path / "chain", keep_last=1), []
    for end in range(5, 41, 5):
        begun, lines = run(2, lambda rank, end=end: train(job, end, save_after=10))[0]
        assert begun == end - 5
        log += lines
    assert log == uncut


class Indices(Dataset[dict[str, Tensor]]):
    """The samples are their own numbers, and the model hands them out."""

    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": torch.full((8,), index / 48), "y": torch.tensor(index)}


class Recorder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.seen: list[int] = []

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.seen += y.tolist()
        return (self.layer(x) - x).square().mean()


@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 2), (2, 1), (1, 4)])
def test_another_number_of_ranks_sees_the_rest_of_the_epoch(tmp_path: Path, before: int, after: int) -> None:
    """The global batch stays at 12, so that losses stay, too; every sample of the epoch comes exactly once."""

    def part(world: int, folder: Path, steps: int) -> tuple[list[int], list[float]]:
        torch.manual_seed(5)
        model = Recorder()
        job = config(2, folder, accumulation=1)
        job.update(train_batch_size=12, train_micro_batch_size_per_gpu=12 // world)
        engine, _, loader, _ = zerotrain.initialize(model=model, training_data=Indices(), config=job)
        losses = []
        for batch in loader:
            engine.backward(engine(**batch))
            engine.step()
            losses.append(engine.metrics["loss"])
            if engine.global_steps >= steps:
                break
        engine.save_checkpoint()
        return model.seen, losses

    whole = run(before, lambda rank: part(before, tmp_path / "whole", 4))
    first = run(before, lambda rank: part(before, tmp_path / "cut", 2))
    rest = run(after, lambda rank: part(after, tmp_path / "cut", 4))
    assert sorted(index for seen, _ in [*first, *rest] for index in seen) == list(range(48))
    assert len(rest[0][1]) == 2
    assert first[0][1] + rest[0][1] == pytest.approx(whole[0][1], rel=1e-5)


def test_ranks_that_there_were_not_draw_other_numbers(tmp_path: Path) -> None:
    def body(rank: int) -> float:
        zerotrain.initialize(model=Net(), config=config(1, tmp_path))
        return float(torch.rand(()))

    def save(rank: int) -> None:
        zerotrain.initialize(model=Net(), config=config(1, tmp_path))[0].save_checkpoint()

    run(2, save)
    drawn = run(4, body)
    assert len(set(drawn)) == 4
    assert drawn[:2] == run(2, body)


def test_batches_from_elsewhere_cannot_be_replayed_inside_a_window(tmp_path: Path) -> None:
    def body(rank: int) -> None:
        engine = zerotrain.initialize(model=Net(), config=config(2, tmp_path, accumulation=2))[0]
        x = torch.ones(2, 8)
        engine.backward(engine(x=x, y=x))
        engine.step()
        with pytest.raises(zerotrain.CheckpointError, match="1 micro batches into an accumulation window"):
            engine.save_checkpoint()
        engine.backward(engine(x=x, y=x))
        engine.step()
        engine.save_checkpoint()

    run(2, body)


def test_resuming_passes_over_damaged_checkpoints(tmp_path: Path) -> None:
    job = config(3, tmp_path)
    run(2, lambda rank: train(job, 6, save_after=4))
    run(2, lambda rank: train(job, 6, save_after=4))
    newest = tmp_path / "step-00000004"
    with next(newest.glob("optimizer-*")).open("ab") as file:
        file.write(b"more")
    assert run(2, lambda rank: train(job, 6))[0][0] == 2


def test_resuming_refuses_to_start_over_where_every_checkpoint_is_damaged(tmp_path: Path) -> None:
    job = config(3, tmp_path)
    run(2, lambda rank: train(job, 2, save_after=2))
    (tmp_path / "step-00000001" / "manifest.json").write_text("{}")

    def body(rank: int) -> None:
        with pytest.raises(zerotrain.CheckpointError, match=r"no checkpoint in .* can be resumed from"):
            train(job, 6)

    run(2, body)
