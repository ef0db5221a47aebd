"""Checkpoints of other origins in an engine: what they hold is what trains on, in any stage and dtype."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.state_dict import get_state_dict

import zerotrain
from harness import run
from models import Shape, TinyLM, token_batch
from oracle import adamw, full_weights
from scenario import engine_for

DATA = Path(__file__).parent / "data"
CASES = sorted(path.name for path in (DATA / "deepspeed").iterdir() if path.is_dir())


def net() -> torch.nn.Module:
    """The model that the DeepSpeed checkpoints were made of, with other values."""
    spec = importlib.util.spec_from_file_location("make_deepspeed", DATA / "make_deepspeed.py")
    assert spec is not None
    assert spec.loader is not None
    module = ModuleType(spec.name)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    torch.manual_seed(99)
    made: torch.nn.Module = module.Net()
    return made


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("stage", "world"), [(0, 1), (2, 2), (3, 3)])
def test_a_deepspeed_checkpoint_trains_on(name: str, stage: int, world: int) -> None:
    expected = load_file(DATA / "deepspeed" / name / "expected.safetensors")

    def body(rank: int) -> dict[str, torch.Tensor]:
        model = net()
        engine = engine_for(model, stage)
        engine.load_checkpoint(DATA / "deepspeed" / name)
        found = {f"weights/{key}": value for key, value in full_weights(model).items()}
        for key, parameter in model.named_parameters():
            if parameter.requires_grad:
                for state in ("exp_avg", "exp_avg_sq"):
                    found[f"{state}/{key}"] = zerotrain.full_optimizer_state(parameter, state)
                assert float(zerotrain.full_optimizer_state(parameter, "step")) == 3
        found |= {f"weights/{key}": buffer.clone() for key, buffer in model.named_buffers()}
        loss = engine(torch.arange(4) % 5).float().square().mean()
        engine.backward(loss)
        assert engine.step()
        return found

    for found in run(world, body):
        compared = [key for key in expected if key in found]
        if name == "zero2_robin":  # where DeepSpeed's own access to whole moments is wrong
            compared = [key for key in compared if key.startswith(("weights", "master"))]
        assert len(compared) >= (8 if name == "zero2_robin" else 18)
        for key in compared:
            want = expected.get(key.replace("weights/", "master/"), expected[key])
            assert torch.equal(found[key].double(), want.double()), key


SHAPE = Shape(vocab=13, width=7, hidden=11, tied=True)


def trained() -> tuple[TinyLM, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = TinyLM(SHAPE)
    optimizer = adamw(model.parameters())
    for step in range(2):
        optimizer.zero_grad()
        model(*token_batch(step, 2, vocab=13)).backward()
        optimizer.step()
    return model, optimizer


def loaded(path: Path, stage: int, world: int = 2) -> list[tuple[dict[str, torch.Tensor], dict[str, Any]]]:
    def body(rank: int) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        torch.manual_seed(50 + rank)
        model = TinyLM(SHAPE)
        engine = engine_for(model, stage)
        engine.load_checkpoint(path)
        states: dict[str, Any] = {}
        for name, parameter in model.named_parameters():
            for key in ("exp_avg", "exp_avg_sq", "step"):
                try:
                    states[f"{name}/{key}"] = zerotrain.full_optimizer_state(parameter, key)
                except KeyError:
                    states[f"{name}/{key}"] = None
        return full_weights(model), states

    return run(world, body)


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("flat", [False, True])
def test_a_distributed_checkpoint_trains_on(tmp_path: Path, stage: int, flat: bool) -> None:
    from torch.distributed.checkpoint.state_dict import StateDictOptions

    model, optimizer = trained()
    weights, moments = get_state_dict(model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=flat))
    dcp.save({"model": weights, "optim": moments}, checkpoint_id=str(tmp_path / "dcp"), no_dist=True)
    for got, states in loaded(tmp_path / "dcp", stage):
        for name, parameter in model.named_parameters():
            assert torch.equal(got[name], parameter), name
            for key in ("exp_avg", "exp_avg_sq", "step"):
                assert torch.equal(states[f"{name}/{key}"], optimizer.state[parameter][key]), (name, key)


@pytest.mark.parametrize("form", ["bin", "folder of bin", "safetensors", "folder of safetensors"])
def test_weights_in_a_file_are_loaded_and_the_optimizer_starts_fresh(tmp_path: Path, form: str) -> None:
    model, _ = trained()
    weights = {name: value.clone() for name, value in model.state_dict().items() if name != "head.weight"}
    name = "pytorch_model.bin" if "bin" in form else "model.safetensors"
    if "bin" in form:
        torch.save(weights, tmp_path / name)
    else:
        save_file(weights, tmp_path / name)
    for got, states in loaded(tmp_path if "folder" in form else tmp_path / name, 3):
        assert all(value is None for value in states.values())
        for key, parameter in model.named_parameters():
            assert torch.equal(got[key], parameter), key


@pytest.mark.parametrize("prefix", ["module.", "model."])
def test_a_prefix_on_either_side_is_found(tmp_path: Path, prefix: str) -> None:
    """A wrapped model's weights in a bare one, and the other way round."""
    model, _ = trained()
    weights = {name: value.clone() for name, value in model.state_dict().items() if name != "head.weight"}
    save_file({prefix + name: value for name, value in weights.items()}, tmp_path / "wrapped.safetensors")
    save_file(weights, tmp_path / "bare.safetensors")
    for got, _ in loaded(tmp_path / "wrapped.safetensors", 2):
        assert all(torch.equal(got[key], parameter) for key, parameter in model.named_parameters())

    def body(rank: int) -> dict[str, torch.Tensor]:
        wrapper = torch.nn.Module()
        setattr(wrapper, prefix[:-1], TinyLM(SHAPE))
        engine = engine_for(wrapper, 2)
        engine.load_checkpoint(tmp_path / "bare.safetensors")
        return full_weights(wrapper)

    for got in run(2, body):
        assert all(torch.equal(got[prefix + key], parameter) for key, parameter in model.named_parameters())
