"""What a save leaves on disk: ordinary files that other tools open, every byte written once, nothing gathered."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

import zerotrain
from harness import run
from models import Shape, TinyLM, token_batch
from scenario import engine_for
from zerotrain.checkpoint import manifest as manifests
from zerotrain.checkpoint.reader import open_source

COMMON: dict[str, Any] = {
    "vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
}  # fmt: skip
GROUPED = {**COMMON, "num_key_value_heads": 1}
BUILD: dict[str, Callable[[], nn.Module]] = {
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**GROUPED)),
    "llama tied": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**GROUPED, tie_word_embeddings=True)),
    "gpt2": lambda: transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=32, n_embd=16, n_layer=2, n_head=2, n_positions=32)
    ),
    "mixtral": lambda: transformers.MixtralForCausalLM(transformers.MixtralConfig(**GROUPED, num_local_experts=4)),
    "t5": lambda: transformers.T5ForConditionalGeneration(
        transformers.T5Config(vocab_size=32, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2)
    ),
    "bert": lambda: transformers.BertForMaskedLM(transformers.BertConfig(**COMMON)),
    "vit": lambda: transformers.ViTForImageClassification(
        transformers.ViTConfig(
            image_size=8, patch_size=4, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2
        )
    ),
}


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("name", BUILD)
def test_transformers_opens_what_training_wrote(tmp_path: Path, name: str, bf16: bool) -> None:
    def body(rank: int) -> tuple[str, dict[str, Tensor], str]:
        torch.manual_seed(0)
        model = BUILD[name]()
        checkpoint = {"max_shard_size": 8000}
        engine = engine_for(model, 3, bf16={"enabled": bf16}, checkpoint=checkpoint)
        folder = engine.save_checkpoint(tmp_path)
        with zerotrain.gathered(model):
            return str(folder), {key: value.clone() for key, value in model.state_dict().items()}, type(model).__name__

    folder, gathered, kind = run(2, body)[0]
    assert len(list(Path(folder).glob("model-*.safetensors"))) > 1
    opened, told = getattr(transformers, kind).from_pretrained(folder, dtype="auto", output_loading_info=True)
    assert not any(told.values()), told
    transformers.AutoModel.from_pretrained(folder)
    stored: dict[str, Tensor] = {}
    for path in sorted(Path(folder).glob("model-*.safetensors")):
        stored |= load_file(path)
    assert json.loads((Path(folder) / "model.safetensors.index.json").read_text())["weight_map"].keys() == stored.keys()
    for key, value in gathered.items():
        mine = opened.state_dict()[key]
        assert torch.equal(mine, value.to(mine.dtype)), (
            key
        )  # T5 has weights that we keep in fp32 and transformers does not
        if key in stored:
            assert stored[key].dtype == value.dtype
            assert torch.equal(stored[key], value), key
    names = {id(p): key for key, p in opened.named_parameters()}
    assert stored.keys() >= set(names.values()), "tied weights are stored under their first name, once"
    assert len(stored) == len(names) + len(dict(opened.named_buffers()).keys() & gathered.keys())


def test_companions_of_the_folder_a_model_came_from(tmp_path: Path) -> None:
    source = tmp_path / "source"
    model = BUILD["llama"]()
    model.save_pretrained(source)
    (source / "tokenizer.json").write_text('{"some": "tokenizer"}')

    def body(rank: int) -> str:
        loaded = transformers.LlamaForCausalLM.from_pretrained(source)
        return str(engine_for(loaded, 1).save_checkpoint(tmp_path / "out"))

    folder = Path(run(2, body)[0])
    assert (folder / "tokenizer.json").read_text() == '{"some": "tokenizer"}'
    assert json.loads((folder / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    assert (folder / "generation_config.json").is_file()


def trained(stage: int, **extra: Any) -> tuple[Any, TinyLM]:
    torch.manual_seed(1)
    model = TinyLM(Shape(vocab=13, width=7, hidden=11, tied=True, frozen=True))
    engine = engine_for(model, stage, **extra)
    engine.backward(engine(*token_batch(0, 2, vocab=13)))
    engine.step()
    return engine, model


LAYOUTS = [
    (0, 1, {}),
    (0, 3, {}),
    (1, 2, {}),
    (2, 3, {}),
    (3, 2, {}),
    (3, 4, {"shard_group_size": 2}),
    (1, 4, {"shard_group_size": 2}),
]


@pytest.mark.parametrize(("stage", "world", "zero"), LAYOUTS)
def test_every_byte_is_written_once_and_nothing_is_gathered(
    tmp_path: Path, stage: int, world: int, zero: dict[str, Any]
) -> None:
    def body(rank: int) -> tuple[str, list[tuple[str, int, int]], dict[str, int]]:
        engine, _ = trained(stage, zero=zero, bf16={"enabled": True})
        written: list[tuple[str, int, int]] = []
        pwrite = os.pwrite

        def counting(handle: int, data: Any, offset: int) -> int:
            count = pwrite(handle, data, offset)
            written.append((os.path.basename(os.readlink(f"/proc/self/fd/{handle}")), offset, offset + count))
            return count

        before = dict(engine.traffic.sent_bytes)
        os.pwrite = counting  # type: ignore[assignment]
        folder = engine.save_checkpoint(tmp_path)
        sent = {key: value - before.get(key, 0) for key, value in engine.traffic.sent_bytes.items()}
        return str(folder), written, {key: value for key, value in sent.items() if value}

    ranks = run(world, body)
    folder = Path(ranks[0][0])
    by_file: dict[str, list[tuple[int, int]]] = {}
    for _, written, sent in ranks:
        assert not sent, "no tensor travels for a save"
        for name, start, stop in written:
            by_file.setdefault(name, []).append((start, stop))
    assert by_file.keys() == {path.name for path in folder.glob("*.safetensors")}
    for name, runs in by_file.items():
        runs.sort()
        assert runs[0][0] == 0
        assert runs[-1][1] == (folder / name).stat().st_size
        assert all(first[1] == second[0] for first, second in pairwise(runs)), name
    elements = [sum(stop - start for _, start, stop in written) for _, written, _ in ranks]
    assert max(elements) < 2.2 * sum(elements) / world, "the work is spread over the ranks"


def test_optimizer_files_hold_whole_tensors_under_the_parameters_names(tmp_path: Path) -> None:
    def body(rank: int) -> tuple[str, dict[str, Tensor]]:
        engine, model = trained(3, bf16={"enabled": True})
        folder = engine.save_checkpoint(tmp_path)
        whole: dict[str, Tensor] = {}
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                whole[f"{name}/master"] = zerotrain.full_parameter(parameter)
                for key in ("exp_avg", "exp_avg_sq"):
                    whole[f"{name}/{key}"] = zerotrain.full_optimizer_state(parameter, key)
        return str(folder), whole

    folder, whole = run(3, body)[0]
    stored: dict[str, Tensor] = {}
    for path in Path(folder).glob("optimizer-*.safetensors"):
        with safe_open(path, framework="pt") as file:
            stored |= {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    assert stored.keys() == whole.keys()
    for key, value in whole.items():
        assert torch.equal(stored[key], value), key


def test_fp32_masters_are_not_stored_twice(tmp_path: Path) -> None:
    def body(rank: int) -> str:
        return str(trained(2)[0].save_checkpoint(tmp_path))

    source = open_source(Path(run(2, body)[0]))
    assert not any(key.endswith("/master") for key in source.states)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_a_rank_reads_only_what_it_holds(tmp_path: Path, world: int) -> None:
    run(2, lambda rank: trained(3)[0].save_checkpoint(tmp_path) and None)

    def body(rank: int) -> tuple[int, int]:
        engine, _ = trained(3)
        read = Counter[str]()
        preadv = os.preadv

        def counting(handle: int, buffers: Any, offset: int) -> int:
            count = preadv(handle, buffers, offset)
            read["bytes"] += count
            return count

        os.preadv = counting  # type: ignore[assignment]
        engine.load_checkpoint(tmp_path)
        held = engine.held_bytes()
        return read["bytes"], held["parameters"] + held["optimizer"]

    sizes = [path.stat().st_size for path in (tmp_path / "step-00000001").glob("*.safetensors")]
    reads = [read for read, _ in run(world, body)]
    assert sum(reads) <= sum(sizes), "together no more than everything"
    assert max(reads) <= sum(sizes) / world * 1.1 + 512


def test_the_manifest_says_what_it_promises(tmp_path: Path) -> None:
    def body(rank: int) -> str:
        engine, _ = trained(2, zero={"shard_group_size": 1})
        return str(engine.save_checkpoint(tmp_path, client_state={"epoch": 3, "pair": (1, 2.5), "nan": float("inf")}))

    folder = Path(run(2, body)[0])
    manifest = manifests.load(folder)
    assert manifest.section("progress") == {"step": 1, "skipped_steps": 0, "samples": 2, "tokens": 0.0}
    assert manifest.section("topology") == {"world_size": 2, "dp_replicate": 2, "dp_shard": 1, "stage": 2}
    assert manifest.section("client_state") == {"epoch": 3, "pair": (1, 2.5), "nan": float("inf")}
    assert manifest.section("class") == "torch.optim.adamw.AdamW"
    assert manifest.section("tied") == {"head.weight": "embed.weight"}
    assert len(manifest.section("random")) == 2
    for name, tensor in manifest.tensors().items():
        assert not tensor.missing(), name
    text = json.loads((folder / "manifest.json").read_text())["manifest"]
    assert (text["format"], text["version"]) == ("zerotrain", 1)
    assert {path.name for path in folder.iterdir()} == {*text["files"], "manifest.json"}
