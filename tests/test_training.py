"""Every way of driving a training step: accumulation, several backwards, no_sync, early boundaries, token means."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from harness import run
from models import Regression, Shape, TinyLM, token_batch, vector_batch
from oracle import Job, check, full_weights, start
from scenario import STAGES, Plain, Scenario, engine_for, play

stages = pytest.mark.parametrize("stage", STAGES)
Turn = Callable[[Any, int, int, int], Any]


def vectors(rank: int, step: int, micro: int) -> tuple[Tensor, Tensor]:
    """Different data for every rank, step and micro batch."""
    return vector_batch(100 * step + 10 * micro + rank, 2)


def ordinary(engine: Any, rank: int, step: int, micro: int) -> Tensor:
    loss = engine(*vectors(rank, step, micro))
    engine.backward(loss)
    return loss


# ------------------------------------------------------------------------------------------------------- backwards


@stages
def test_plain_backward_is_as_good_as_the_engines(stage: int) -> None:
    def turn(engine: Any, rank: int, step: int, micro: int) -> Tensor:
        loss = engine(*vectors(rank, step, micro))
        loss.backward()
        return loss

    play(Scenario(Regression, turn, stage, accumulation=2, windows=(2, 2)))


@pytest.mark.parametrize("interleaved", [False, True])
@stages
def test_several_backwards_before_one_step(stage: int, interleaved: bool) -> None:
    """Their gradients add up, as in torch; the step still counts one micro batch."""

    def turn(engine: Any, rank: int, step: int, micro: int) -> list[Tensor]:
        first, second = vectors(rank, step, micro), vectors(rank, step, micro + 5)
        if interleaved:
            losses = [engine(*first), engine(*second)]
            for loss in losses:
                engine.backward(loss)
            return losses
        losses = []
        for batch in (first, second):
            losses.append(engine(*batch))
            engine.backward(losses[-1])
        return losses

    play(Scenario(Regression, turn, stage, accumulation=2, windows=(2, 2)))


@stages
def test_backward_with_retained_graph(stage: int) -> None:
    def turn(engine: Any, rank: int, step: int, micro: int) -> Tensor:
        loss = engine(*vectors(rank, step, micro))
        loss.backward(retain_graph=True)
        (2 * loss).backward()
        return loss

    play(Scenario(Regression, turn, stage))


@stages
def test_two_forwards_one_backward(stage: int) -> None:
    """A contrastive loss over two forwards of the same weights."""

    class Tower(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = Regression(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            return F.normalize(self.body.predict(x), dim=-1)

    def turn(engine: Any, rank: int, step: int, micro: int) -> Tensor:
        left, right = vectors(rank, step, micro)
        scores = engine(left) @ engine(right).T
        loss = F.cross_entropy(5 * scores, torch.arange(2))
        engine.backward(loss)
        return loss

    play(Scenario(Tower, turn, stage))


@stages
def test_preference_loss_against_a_forward_without_grad(stage: int) -> None:
    """Policy and reference share weights: one forward under no_grad between two that are trained."""

    def turn(engine: Any, rank: int, step: int, micro: int) -> Tensor:
        chosen = engine(*vectors(rank, step, micro))
        with torch.no_grad():
            anchor = engine(*vectors(rank, step, micro + 3))
        rejected = engine(*vectors(rank, step, micro + 6))
        loss = F.softplus(chosen - rejected) + 0.1 * (chosen - anchor).square()
        engine.backward(loss)
        return loss

    play(Scenario(Regression, turn, stage))


@stages
def test_forward_that_is_never_followed_by_backward(stage: int) -> None:
    """A dropped loss and an evaluation in the middle of a window leave no trace."""

    def turn(engine: Any, rank: int, step: int, micro: int) -> Tensor:
        engine(*vectors(rank, step, micro + 7))
        loss = ordinary(engine, rank, step, micro)
        engine.eval()
        with torch.no_grad():
            engine(*vectors(rank, step, micro + 8))
        engine.train()
        return loss

    play(Scenario(Regression, turn, stage, accumulation=2, windows=(2, 2)))


@stages
def test_gradient_penalty(stage: int) -> None:
    """Double backward: the loss holds the gradient of an output with respect to the input."""

    def turn(engine: Any, rank: int, step: int, micro: int) -> Tensor:
        x, y = vectors(rank, step, micro)
        x.requires_grad_()
        loss = engine(x, y)
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        total = loss + 10 * (slope.norm() - 0.1).square()
        engine.backward(total)
        return total

    play(Scenario(Regression, turn, stage, accumulation=2, windows=(2, 2)))


@stages
def test_gradients_of_the_inputs(stage: int) -> None:
    """torch.autograd.grad with respect to the input only (saliency) does not disturb the next step."""

    def turn(engine: Any, rank: int, step: int, micro: int) -> list[Tensor]:
        x, y = vectors(rank, step, micro)
        x.requires_grad_()
        (slope,) = torch.autograd.grad(engine(x, y), x)
        return [slope, ordinary(engine, rank, step, micro)]

    play(Scenario(Regression, turn, stage))


# --------------------------------------------------------------------------------------------------------- windows


class Packed(Regression):
    """Takes inputs and targets side by side in one tensor."""

    def forward(self, batch: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(batch[:, :8], batch[:, 8:])


def packed_batch(step: int, rows: int) -> tuple[Tensor, ...]:
    return (torch.cat(vector_batch(step, rows), dim=1),)


@pytest.mark.parametrize("accumulation", [2, 4])
@stages
def test_train_batch(stage: int, accumulation: int) -> None:
    """One call takes a whole window from an iterator and returns the mean loss of all ranks."""
    job = Job(Packed, packed_batch, stage=stage, accumulation=accumulation)
    want = check(job)

    def body(rank: int) -> tuple[list[float], dict[str, Tensor]]:
        engine = start(job)
        losses = []
        for step in range(job.steps):
            pieces = iter([job.piece(step, micro, rank)[0] for micro in range(accumulation)])
            losses.append(engine.train_batch(pieces))
            assert next(pieces, None) is None, "train_batch left a micro batch in the iterator"
        return losses, full_weights(engine.module)

    for losses, weights in run(2, body):
        assert losses == pytest.approx(want.losses, rel=1e-5)
        for name, value in want.weights.items():
            assert torch.equal(weights[name], value), name


@pytest.mark.parametrize("where", ["all_but_last", "all", "first_only"])
@stages
def test_no_sync(stage: int, where: str) -> None:
    """no_sync delays the exchange of gradients and changes no number, also where the whole window is inside."""

    def turn(engine: Any, rank: int, step: int, micro: int) -> Tensor:
        quiet = {"all_but_last": micro < 2, "all": True, "first_only": micro == 0}[where]
        with engine.no_sync() if quiet else contextlib.nullcontext():
            return ordinary(engine, rank, step, micro)

    play(Scenario(Regression, turn, stage, accumulation=3, windows=(3, 3)))


@stages
def test_no_sync_sends_no_gradients(stage: int) -> None:
    def body(rank: int) -> tuple[int, int, int]:
        engine = engine_for(Regression(), stage, accumulation=3)
        sent = []
        for micro in range(3):
            engine.traffic.reset()
            with engine.no_sync() if micro < 2 else contextlib.nullcontext():
                ordinary(engine, rank, 0, micro)
            engine.step()
            sent.append(sum(engine.traffic.sent_bytes.get(kind, 0) for kind in ("reduce_scatter", "all_reduce")))
        return sent[0], sent[1], sent[2]

    for first, second, last in run(2, body):
        assert (first, second) == (0, 0)
        assert last > 0


@stages
def test_incomplete_windows(stage: int) -> None:
    """step(boundary=True) closes a window early and averages over the micro batches that it holds."""
    play(Scenario(Regression, ordinary, stage, accumulation=3, windows=(3, 2, 1, 3), clip=0.05))


@stages
def test_incomplete_window_in_bf16(stage: int) -> None:
    scenario = Scenario(Regression, ordinary, stage, accumulation=3, windows=(3, 2, 3), dtype=torch.bfloat16, clip=0.05)
    play(scenario, rtol=1e-4, atol=5e-5)


@stages
def test_counters(stage: int) -> None:
    def body(rank: int) -> list[tuple[int, int]]:
        engine = engine_for(Regression(), stage, accumulation=2)
        seen = [(engine.micro_steps, engine.global_steps)]
        for micro in range(3):
            ordinary(engine, rank, 0, micro)
            engine.step()
            seen.append((engine.micro_steps, engine.global_steps))
        engine.step(boundary=True)
        return [*seen, (engine.micro_steps, engine.global_steps)]

    def with_early_close(rank: int) -> tuple[int, int]:
        engine = engine_for(Regression(), stage, accumulation=3)
        ordinary(engine, rank, 0, 0)
        assert engine.step(boundary=True) is True
        return engine.micro_steps, engine.global_steps

    assert [seen[:4] for seen in run(2, body)] == [[(0, 0), (1, 0), (0, 1), (1, 1)]] * 2
    assert run(2, with_early_close) == [(0, 1)] * 2


@pytest.mark.parametrize("after", ["backward", "step"])
@stages
def test_zero_grad_inside_a_window(stage: int, after: str) -> None:
    """Forgets what the window holds; the window that follows averages over its own micro batches only."""

    def turn(engine: Any, rank: int, step: int, micro: int) -> Tensor:
        if micro == 0 and not isinstance(engine, Plain):
            ordinary(engine, rank, step, 9)
            if after == "step":
                engine.step()
            engine.zero_grad()
        return ordinary(engine, rank, step, micro)

    play(Scenario(Regression, turn, stage, accumulation=3, windows=(2, 2)))


# ---------------------------------------------------------------------------------------------------------- tokens


class SummedLM(TinyLM):
    """The sum of the losses of the first ``count`` tokens of every row."""

    def forward(self, tokens: Tensor, targets: Tensor, keep: Tensor) -> Tensor:  # type: ignore[override]
        losses = F.cross_entropy(self.logits(tokens).float().flatten(0, 1), targets.flatten(), reduction="none")
        return (losses * keep.flatten()).sum()


def token_turn(engine: Any, rank: int, step: int, micro: int) -> Tensor:
    """Rank r keeps r tokens of a row in its first micro batch (rank 0 none), and 5 - r in the others."""
    tokens, targets = token_batch(100 * step + 10 * micro + rank, 2)
    count = rank if micro == 0 else 5 - rank
    keep = torch.zeros(2, 5)
    keep[:, :count] = 1
    loss = engine(tokens, targets, keep)
    engine.backward(loss, tokens=2 * count)
    return loss


@pytest.mark.parametrize("clip", [0.0, 0.2])
@pytest.mark.parametrize("world", [2, 4])
@stages
def test_mean_over_tokens(stage: int, world: int, clip: float) -> None:
    build = partial(SummedLM, Shape(tied=True))
    play(Scenario(build, token_turn, stage, world=world, accumulation=2, windows=(2, 2, 2), clip=clip))


@stages
def test_mean_over_tokens_in_an_early_window(stage: int) -> None:
    build = partial(SummedLM, Shape())
    play(Scenario(build, token_turn, stage, accumulation=3, windows=(3, 2), clip=0.2))


def test_mean_over_tokens_with_replicas() -> None:
    build = partial(SummedLM, Shape())
    play(Scenario(build, token_turn, 3, world=4, accumulation=2, windows=(2, 2), zero={"shard_group_size": 2}))


@stages
def test_tokens_cost_one_scalar(stage: int) -> None:
    """No collective more than one of a few bytes, compared with the same steps without tokens."""

    def body(rank: int) -> tuple[dict[str, int], dict[str, int], dict[str, int], dict[str, int]]:
        seen: list[dict[str, int]] = []
        for tokens in (None, 3):
            engine = engine_for(Regression(), stage, accumulation=2, gradient_clipping=1.0)
            for step in range(2):
                engine.traffic.reset()
                for micro in range(2):
                    loss = engine(*vectors(rank, step, micro))
                    engine.backward(loss, tokens=tokens)
                    engine.step()
            seen += [dict(engine.traffic.calls), dict(engine.traffic.sent_bytes)]
        return seen[0], seen[1], seen[2], seen[3]

    for calls, sent, calls_tokens, sent_tokens in run(2, body):
        assert sum(calls_tokens.values()) <= sum(calls.values()) + 1
        assert sum(sent_tokens.values()) <= sum(sent.values()) + 64


# ------------------------------------------------------------------------------------------------- loss of a model


@stages
def test_autocast_over_fp32_parameters(stage: int) -> None:
    """torch.autocast computes in bf16 while weights and gradients stay fp32."""

    def turn(engine: Any, rank: int, step: int, micro: int) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            loss = engine(*vectors(rank, step, micro))
        engine.backward(loss)
        return loss

    play(Scenario(partial(Regression, 8, 4), turn, stage, accumulation=2, windows=(2, 2, 2)), rtol=1e-4, atol=5e-5)


@stages
def test_autocast_with_recomputation(stage: int) -> None:
    build = partial(TinyLM, Shape(recompute="nonreentrant"))

    def turn(engine: Any, rank: int, step: int, micro: int) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            loss = engine(*token_batch(10 * step + rank, 2))
        engine.backward(loss)
        return loss

    play(Scenario(build, turn, stage), rtol=1e-4, atol=5e-5)
