"""`zerotrain inspect | merge | export` on checkpoints that forked ranks wrote."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import zerotrain
from harness import run
from models import Regression, Shape, TinyLM, token_batch
from oracle import adamw, full_weights
from zerotrain.checkpoint import export as exporting
from zerotrain.checkpoint import folders, manifest
from zerotrain.checkpoint.export import export
from zerotrain.checkpoint.format import INDEX
from zerotrain.checkpoint.merge import merge
from zerotrain.checkpoint.reader import Checkpoint, open_source
from zerotrain.cli import main
from zerotrain.errors import CheckpointError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")  # dcp.load in one process
SHAPE = Shape(vocab=13, width=7, hidden=11, tied=True, frozen=True)
DEEPSPEED = Path(__file__).parent / "data" / "deepspeed"
TAG = "step-00000002"
NODES = [f"{TAG}.node-00000-of-00002", f"{TAG}.node-00001-of-00002"]
BF16 = {"bf16": {"enabled": True}}


class Odd(TinyLM):
    """With everything that a state dict can hold: a buffer, an integer one, one with infinities, extra state, a scalar."""

    def __init__(self) -> None:
        super().__init__(SHAPE)
        self.register_buffer("mask", torch.tensor([0.0, float("-inf")]))
        self.register_buffer("count", torch.tensor(7))
        self.register_buffer("empty", torch.empty(0, 3))
        self.gain = nn.Parameter(torch.tensor(1.5))

    def hidden_states(self, tokens: Tensor) -> Tensor:
        return super().hidden_states(tokens) * self.gain

    def get_extra_state(self) -> Any:
        return {"calls": (1, 2)}

    def set_extra_state(self, state: Any) -> None:
        self.loaded = state


def job(stage: int = 3, **more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage, "unit_min_elements": 1},
        "steps_per_print": None,
        **more,
    }


@dataclass
class Saved:
    root: Path
    weights: dict[str, Tensor]
    """The true (fp32) values by every name; buffers too."""

    @property
    def folder(self) -> Path:
        return self.root / TAG


def save(root: Path, steps: int = 2, own_folders: bool = False, keep: bool = False, **more: Any) -> Saved:
    def body(rank: int) -> dict[str, Tensor]:
        torch.manual_seed(3)
        model = Odd()
        engine = zerotrain.initialize(model=model, optimizer=adamw(model.parameters()), config=job(**more))[0]
        for step in range(steps):
            tokens, targets = token_batch(step, 4, vocab=13)
            engine.backward(engine(tokens[rank * 2 :][:2], targets[rank * 2 :][:2]))
            engine.step()
            if keep:
                engine.save_checkpoint(root)
        if not keep:
            engine.save_checkpoint(root / f"node{rank}" if own_folders else root, client_state={"a": 1})
        return full_weights(model) | {name: b.clone() for name, b in model.named_buffers()}

    return Saved(root, run(2, body)[0])


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return save(tmp_path_factory.mktemp("plain"))


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return save(tmp_path_factory.mktemp("mixed"), **BF16)


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return save(tmp_path_factory.mktemp("nodes"), own_folders=True, **BF16)


@pytest.fixture
def copied(plain: Saved, tmp_path: Path) -> Saved:
    shutil.copytree(plain.root, tmp_path / "copy")
    return Saved(tmp_path / "copy", plain.weights)


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def in_hf(folder: Path) -> dict[str, Tensor]:
    names = json.loads((folder / INDEX).read_text())["weight_map"]
    return {name: load_file(folder / file)[name] for name, file in names.items()}


def in_torch(folder: Path) -> dict[str, Any]:
    return torch.load(folder / "pytorch_model.bin", weights_only=True)


def in_dcp(folder: Path) -> dict[str, Tensor]:
    reader = dcp.FileSystemReader(folder)
    about = reader.read_metadata().state_dict_metadata
    state = {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in about.items()}
    dcp.load(state, storage_reader=reader, no_dist=True)
    return state


READ = {"hf": in_hf, "torch": in_torch, "dcp": in_dcp}


# -- export -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [None, *exporting.DTYPES])
@pytest.mark.parametrize("to", exporting.FORMATS)
@pytest.mark.parametrize("kind", ["plain", "mixed"])
def test_exports_are_the_gathered_model_or_its_rounding(
    kind: str, to: str, dtype: str | None, request: pytest.FixtureRequest, tmp_path: Path, capsys: Any
) -> None:
    saved: Saved = request.getfixturevalue(kind)
    out = tmp_path / "deep" / "out"
    options = [] if dtype is None else ["--dtype", dtype]
    assert main(["export", str(saved.root), "--to", to, "--output", str(out), *options]) == 0
    assert capsys.readouterr().out == f"{out}\n"
    found = READ[to](out)
    found.pop("_extra_state", None)
    stored = open_source(saved.root).weights
    names = set(saved.weights) - ({"head.weight"} if to == "hf" else set())
    assert set(found) == names
    for name in names:
        value = saved.weights[name]
        kept = stored.get(name, stored["embed.weight"]).dtype
        wanted = value if not value.is_floating_point() else value.to(exporting.DTYPES[dtype] if dtype else kept)
        assert found[name].dtype == wanted.dtype, name
        assert torch.equal(found[name], wanted), name
    assert [path.name for path in out.parent.iterdir()] == ["out"]
    assert not any(path.name.startswith(("staged", ".lock")) for path in out.iterdir())


def test_fp32_of_a_bf16_job_comes_from_the_masters(mixed: Saved, tmp_path: Path) -> None:
    found = in_hf(export(mixed.root, tmp_path / "out", dtype=torch.float32))
    assert not torch.equal(found["embed.weight"], found["embed.weight"].bfloat16().float())


def test_torch_files_share_tied_weights_and_load_strictly(plain: Saved, tmp_path: Path) -> None:
    state = in_torch(export(plain.root, tmp_path / "out", "torch"))
    assert state["head.weight"].data_ptr() == state["embed.weight"].data_ptr()
    model = Odd()
    model.load_state_dict(state, strict=True)
    assert model.loaded == {"calls": (1, 2)}
    size = (tmp_path / "out" / "pytorch_model.bin").stat().st_size
    assert size < 2 * sum(value.nbytes for value in plain.weights.values()) + 8000


def test_dcp_folders_load_into_the_models_own_state_dict(plain: Saved, tmp_path: Path) -> None:
    export(plain.root, tmp_path / "out", "dcp")
    model = TinyLM(SHAPE)
    dcp.load(model.state_dict(), checkpoint_id=tmp_path / "out", no_dist=True)
    for name, value in model.state_dict().items():
        assert torch.equal(value, plain.weights[name]), name


def test_shards_stay_below_the_size_asked_for(plain: Saved, tmp_path: Path) -> None:
    assert (
        main(["export", str(plain.root), "--to", "hf", "--output", str(tmp_path / "out"), "--max-shard-size", "1KB"])
        == 0
    )
    files = sorted((tmp_path / "out").glob("model-*.safetensors"))
    assert len(files) > 2
    assert all(sum(tensor.nbytes for tensor in load_file(file).values()) <= 1000 for file in files)
    assert set(in_hf(tmp_path / "out")) == set(plain.weights) - {"head.weight"}


@pytest.mark.parametrize("to", exporting.FORMATS)
def test_what_was_exported_is_a_source_again(plain: Saved, to: Any, tmp_path: Path) -> None:
    first = export(plain.root, tmp_path / "first", to)
    again = in_hf(export(first, tmp_path / "again"))
    for name in set(plain.weights) - {"head.weight", "empty"}:
        assert torch.equal(again[name], plain.weights[name]), name


def test_values_too_large_for_fp16_are_refused(tmp_path: Path) -> None:
    save_file({"w": torch.tensor([1.0, 1e6])}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"tensor 'w' has values beyond 65504"):
        export(tmp_path / "model.safetensors", tmp_path / "out", dtype=torch.float16)
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


@pytest.mark.parametrize("what", ["a file", "a full folder"])
def test_an_output_that_exists_is_left_alone(plain: Saved, what: str, tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "out"
    if what == "a file":
        out.write_text("precious")
    else:
        out.mkdir()
        (out / "precious").write_text("")
    assert main(["export", str(plain.root), "--to", "hf", "--output", str(out)]) == 1
    assert "is not an empty folder" in capsys.readouterr().err
    assert out.read_text() == "precious" if what == "a file" else [path.name for path in out.iterdir()] == ["precious"]


def test_an_empty_output_folder_is_used(plain: Saved, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    assert "embed.weight" in in_hf(export(plain.root, tmp_path / "out"))


@pytest.mark.parametrize("to", exporting.FORMATS)
def test_a_failed_export_leaves_nothing(
    copied: Saved, to: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("zerotrain.checkpoint.writer.os.pwrite", full)
    with pytest.raises(CheckpointError, match="No space left"):
        export(copied.root, tmp_path / "out", to)
    assert [path.name for path in tmp_path.iterdir()] == ["copy"]


@pytest.mark.parametrize("name", sorted(path.name for path in DEEPSPEED.iterdir() if path.is_dir()))
def test_masters_of_other_tools_are_used_too(name: str, tmp_path: Path) -> None:
    source = open_source(DEEPSPEED / name)
    found = in_hf(export(source, tmp_path / "out", dtype=torch.float32))
    for key, value in found.items():
        chosen = f"{key}/master" if f"{key}/master" in source.states else key
        wanted = torch.empty(value.numel(), dtype=value.dtype)
        source.read(chosen, 0, value.numel(), wanted)
        assert torch.equal(value.flatten(), wanted), key


@pytest.mark.parametrize("to", ["torch", "dcp"])
def test_a_disk_that_is_full_half_way(to: Any, tmp_path: Path) -> None:
    """The staged file fits; the one of torch, which is larger, does not."""
    save_file({f"w{i}": torch.ones(700) for i in range(100)}, tmp_path / "model.safetensors")
    size = (tmp_path / "model.safetensors").stat().st_size

    def body(rank: int) -> str:
        import resource

        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 64, size + 64))
        with pytest.raises(CheckpointError) as raised:
            export(tmp_path / "model.safetensors", tmp_path / "out", to)
        return str(raised.value)

    assert re.search(r"could not be written: .*File too large", run(1, body, group=False)[0])
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


@pytest.mark.parametrize("to", exporting.FORMATS)
def test_exporting_takes_little_memory(to: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Anonymous memory: pages of mapped files do not count, the kernel takes them back whenever it needs them."""
    tensors = {f"layers.{i}.weight": torch.full((1 << 20,), float(i)) for i in range(15)}  # 60 MB
    tensors["layers.15.weight"] = torch.ones(4 << 20)  # 16 MB
    save_file(tensors, tmp_path / "model.safetensors")
    del tensors
    monkeypatch.setattr(exporting, "BLOCK", 1 << 18)
    monkeypatch.setattr("zerotrain.checkpoint.reader.BLOCK", 1 << 18)

    def body(rank: int) -> int:
        export(tmp_path / "model.safetensors", tmp_path / "warm", to, dtype=torch.bfloat16)  # imports, allocator
        peak = Peak()
        export(tmp_path / "model.safetensors", tmp_path / "out", to, dtype=torch.bfloat16)
        return peak.stop()

    assert run(1, body, group=False)[0] < 8 << 20


class Peak:
    """Samples this process's anonymous memory from a thread; ``stop()`` returns its growth in bytes."""

    def __init__(self) -> None:
        import threading

        self._first = self._most = self._now()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()

    @staticmethod
    def _now() -> int:
        found = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
        assert found
        return int(found[1]) << 10

    def _watch(self) -> None:
        while not self._ended.wait(0.001):
            self._most = max(self._most, self._now())

    def stop(self) -> int:
        self._ended.set()
        self._thread.join()
        return max(self._most, self._now()) - self._first


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """A bf16 job of transformers' Llama, its tokenizer beside the weights that it was loaded from."""
    transformers = pytest.importorskip("transformers")
    from transformers import LlamaForCausalLM

    root = tmp_path_factory.mktemp("llama")
    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        vocab_size=19, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=16, tie_word_embeddings=True,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(root / "first")
    (root / "first" / "tokenizer_config.json").write_text('{"model_max_length": 16}')

    def body(rank: int) -> dict[str, Tensor]:
        model = LlamaForCausalLM.from_pretrained(root / "first", dtype=torch.float32)
        engine = zerotrain.initialize(model=model, optimizer=adamw(model.parameters()), config=job(**BF16))[0]
        for step in range(2):
            tokens, _ = token_batch(step, 4, vocab=19)
            mine = tokens[rank * 2 :][:2]
            engine.backward(engine(input_ids=mine, labels=mine).loss)
            engine.step()
        engine.save_checkpoint(root)
        return full_weights(model)

    return Saved(root, run(2, body)[0])


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("to", ["hf", "torch"])
def test_transformers_opens_what_was_exported(llama: Saved, to: str, dtype: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    out = tmp_path / "out"
    assert main(["export", str(llama.root), "--to", to, "--dtype", dtype, "--output", str(out)]) == 0
    model = AutoModelForCausalLM.from_pretrained(out, dtype="auto")
    for name, parameter in model.named_parameters(remove_duplicate=False):
        wanted = llama.weights[name].to(exporting.DTYPES[dtype])
        assert parameter.dtype == wanted.dtype, name
        assert torch.equal(parameter, wanted), name
    assert json.loads((out / "config.json").read_text())["dtype"] == str(exporting.DTYPES[dtype]).removeprefix("torch.")
    assert json.loads((out / "tokenizer_config.json").read_text()) == {"model_max_length": 16}


def test_the_files_beside_foreign_weights_come_along(llama: Saved, tmp_path: Path) -> None:
    out = export(llama.root / "first", tmp_path / "out", dtype=torch.bfloat16)
    assert {path.name for path in out.iterdir()} == {
        "config.json", "generation_config.json", "tokenizer_config.json", INDEX, "model-00001-of-00001.safetensors",
    }  # fmt: skip
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"


# -- merge ------------------------------------------------------------------------------------------------------------


def assert_same(a: Path, b: Path) -> None:
    """The same states, read in full, and the same files, but for how they were cut into fragments."""
    one, other = open_source(a), open_source(b)
    assert one.weights == other.weights
    assert one.states == other.states
    assert one.tied == other.tied
    for key in [*one.weights, *one.states]:
        info = one.info(key)
        left, right = (torch.empty(info.numel, dtype=info.dtype) for _ in range(2))
        one.read(key, 0, info.numel, left)
        other.read(key, 0, info.numel, right)
        assert torch.equal(left, right), key
    for name in manifest.load(a).files:
        assert (a / name).read_bytes() == (b / name).read_bytes(), name
    assert {path.name for path in a.iterdir()} == {path.name for path in b.iterdir()}


@pytest.mark.parametrize("given", ["roots", "folders", "side by side", "tag"])
def test_merged_nodes_equal_a_shared_save(nodes: Saved, mixed: Saved, given: str, tmp_path: Path, capsys: Any) -> None:
    roots = [nodes.root / "node0", nodes.root / "node1"]
    directories = {
        "roots": roots,
        "folders": [root / name for root, name in zip(roots, NODES, strict=True)][::-1],
        "side by side": [tmp_path / "both"],
        "tag": [*roots, roots[0], "--tag", TAG],
    }[given]
    if given == "side by side":
        for root in roots:
            shutil.copytree(root, tmp_path / "both", dirs_exist_ok=True)
    assert main(["merge", *map(str, directories), "--output", str(tmp_path / "out")]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'out' / TAG}\n"
    assert folders.latest(tmp_path / "out") == TAG
    assert folders.check(tmp_path / "out" / TAG).parts == 1
    merged = open_source(tmp_path / "out")
    assert isinstance(merged, Checkpoint)
    merged.verify()
    assert_same(tmp_path / "out" / TAG, mixed.folder)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["latest", TAG]


def test_training_goes_on_from_a_merged_checkpoint(nodes: Saved, tmp_path: Path) -> None:
    merge([nodes.root / "node0", nodes.root / "node1"], tmp_path)

    def body(rank: int) -> dict[str, Tensor]:
        model = Odd()
        engine = zerotrain.initialize(model=model, optimizer=adamw(model.parameters()), config=job(2, **BF16))[0]
        assert engine.load_checkpoint(tmp_path).client_state == {"a": 1}
        return full_weights(model)

    for name, value in run(1, body)[0].items():
        assert torch.equal(value, nodes.weights[name]), name


def test_merging_beside_the_parts(nodes: Saved, tmp_path: Path) -> None:
    for root in ("node0", "node1"):
        shutil.copytree(nodes.root / root, tmp_path / "both", dirs_exist_ok=True)
    merge([tmp_path / "both"], tmp_path / "both")
    source = open_source(tmp_path / "both")
    assert isinstance(source, Checkpoint)
    assert source.manifest.parts == 1


def test_what_cannot_be_merged(nodes: Saved, mixed: Saved, tmp_path: Path) -> None:
    out = tmp_path / "out"
    zero, one = nodes.root / "node0", nodes.root / "node1"
    with pytest.raises(CheckpointError, match=f"by 2 nodes, and these are missing: {NODES[1]}"):
        merge([zero], out)
    with pytest.raises(CheckpointError, match="nothing to merge"):
        merge([mixed.root], out)
    with pytest.raises(CheckpointError, match="there is no checkpoint 'other'"):
        merge([zero, one], out, tag="other")
    with pytest.raises(CheckpointError, match="has no file 'latest'"):
        merge([tmp_path], out)
    with pytest.raises(CheckpointError, match="is not a folder"):
        merge([tmp_path / "nowhere"], out)
    assert not out.exists()
    merge([zero, one], out)
    with pytest.raises(CheckpointError, match="exists; remove it"):
        merge([zero, one], out)


def test_a_flipped_byte_stops_a_merge(nodes: Saved, tmp_path: Path) -> None:
    shutil.copytree(nodes.root, tmp_path / "copy")
    folder = tmp_path / "copy" / "node1" / NODES[1]
    source = open_source(folder)
    assert isinstance(source, Checkpoint)
    part = source.parts[0]
    key, tensor = next((key, tensor) for key, tensor in part.tensors.items() if tensor.fragments)
    flip(folder / tensor.file, part.offsets[key] + tensor.fragments[0][0] * tensor.info.dtype.itemsize)
    with pytest.raises(CheckpointError, match=f"tensor '{re.escape(key)}' is damaged in .*{NODES[1]}"):
        merge([tmp_path / "copy" / "node0", tmp_path / "copy" / "node1"], tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


def test_parts_of_different_saves_do_not_merge(nodes: Saved, tmp_path: Path) -> None:
    other = save(tmp_path / "other", steps=2, own_folders=True, stage=2, **BF16)
    with pytest.raises(CheckpointError, match="not parts of the same checkpoint"):
        merge([nodes.root / "node0", other.root / "node1"], tmp_path / "out")


@pytest.mark.parametrize("fault", ["nobody", "both", "twins", "elsewhere"])
def test_parts_that_do_not_make_a_whole(nodes: Saved, fault: str, tmp_path: Path) -> None:
    shutil.copytree(nodes.root, tmp_path / "copy")
    zero, one = (tmp_path / "copy" / f"node{i}" / name for i, name in enumerate(NODES))
    given = [zero, one]
    mine, other = manifest.load(zero), manifest.load(one)
    holder = other if fault == "both" else mine
    key, tensor = next((key, tensor) for key, tensor in holder.optimizer.items() if tensor.fragments)
    (start, stop, digest), *_ = tensor.fragments
    if fault == "nobody":
        changed, text = replace(tensor, fragments=()), "no node wrote elements 0"
    elif fault == "both":
        changed, text = replace(tensor, fragments=((0, tensor.info.numel, digest),)), "two nodes wrote elements"
    elif fault == "twins":
        shutil.copytree(zero, tmp_path / "copy" / zero.name)
        given.append(tmp_path / "copy" / zero.name)
        changed, text = replace(tensor, fragments=((start, stop, "0" * 16),)), "are of the same node and differ"
    else:
        changed, text = None, f"different checkpoints: {TAG}, {TAG}x; say which with --tag"
        given = [zero, one.rename(one.with_name(one.name.replace(TAG, f"{TAG}x")))]
    if changed is not None:
        (zero / "manifest.json").write_bytes(manifest.dump(replace(mine, optimizer={**mine.optimizer, key: changed})))
    with pytest.raises(CheckpointError, match=text):
        merge(given, tmp_path / "out")
    assert not (tmp_path / "out").exists()


# -- inspect ----------------------------------------------------------------------------------------------------------


def said(capsys: Any, *arguments: str | Path, status: int = 0) -> str:
    assert main(list(map(str, arguments))) == status
    out: str = capsys.readouterr().out
    return out


def test_inspect_says_what_a_checkpoint_holds(mixed: Saved, capsys: Any) -> None:
    text = said(capsys, "inspect", mixed.folder)
    for fact in (
        r"^checkpoint .*step-00000002$",
        r"^step +2 \(.*8 samples",
        r"^written by +2 ranks, ZeRO stage 3, dp_replicate 1 x dp_shard 2$",
        r"^weights +\d+ tensors, [\d,]+ elements, [\d.]+ k?B \(.*bfloat16.*\)$",
        r"^master weights +\d+ tensors, .*\(float32\)$",
        r"^state exp_avg +\d+ tensors, .*\(float32\)$",
        r"^tied +head.weight is embed.weight$",
        r"^optimizer +torch.optim.adamw.AdamW$",
        r"^  group 0 +\d+ parameters: .*lr 0.01",
        r"^  bf16.enabled = true$",
        r"^  zero_optimization.stage = 3$",
    ):
        assert re.search(fact, text, re.MULTILINE), f"{fact} is not in\n{text}"
    assert "gradient_clipping" not in text
    assert said(capsys, "inspect", mixed.root, "--tag", TAG).splitlines()[1:] == text.splitlines()[1:]


def test_inspect_lists_tensors(mixed: Saved, capsys: Any) -> None:
    text = said(capsys, "inspect", mixed.folder, "--tensors")
    assert re.search(r"^  bfloat16 +13x7 +embed.weight  model-00001-of-00001.safetensors$", text, re.MULTILINE)
    assert re.search(r"^  float32 +13x7 +embed.weight/exp_avg  optimizer-", text, re.MULTILINE)
    assert re.search(r"^  tied +head.weight is embed.weight$", text, re.MULTILINE)


def test_inspect_lists_the_checkpoints_of_a_folder(tmp_path: Path, capsys: Any) -> None:
    save(tmp_path, steps=4, keep=True)
    next((tmp_path / "step-00000001").glob("optimizer-*")).unlink()
    (tmp_path / "step-00000003" / "manifest.json").unlink()
    lines = said(capsys, "inspect", tmp_path).splitlines()
    assert re.fullmatch(r"step-00000001  damaged", lines[0])
    assert "optimizer-00001-of-00001.safetensors is part of the checkpoint and cannot be read" in lines[1]
    assert re.fullmatch(r"step-00000002  step 2  [\d.]+ kB", lines[2])
    assert re.fullmatch(r"step-00000003  damaged", lines[3])
    assert "has no manifest.json" in lines[4]
    assert re.fullmatch(r"step-00000004  step 4  [\d.]+ kB  latest", lines[5])
    assert said(capsys, "inspect", tmp_path, "--verify", status=1).splitlines() == lines
    shutil.rmtree(tmp_path / "step-00000004")
    assert "names step-00000004, which is not there" in said(capsys, "inspect", tmp_path)


def test_inspect_says_which_nodes_folders_are_here(nodes: Saved, capsys: Any) -> None:
    listed = said(capsys, "inspect", nodes.root / "node0")
    assert re.search(r"1 of 2 nodes' folders  latest$", listed, re.MULTILINE)
    text = said(capsys, "inspect", nodes.root / "node0", "--tag", TAG, "--verify")
    assert f"1 of 2 folders are here: {NODES[0]}" in text


def test_verify_finds_nothing_wrong_with_a_good_one(plain: Saved, capsys: Any) -> None:
    assert "verified: every checksum" in said(capsys, "inspect", plain.folder, "--verify")
    assert "damaged" not in said(capsys, "inspect", plain.root, "--verify")


def test_verify_names_every_damaged_tensor_and_file(copied: Saved, capsys: Any) -> None:
    source = open_source(copied.root)
    assert isinstance(source, Checkpoint)
    part = source.parts[0]
    for key in ("norm.weight", "embed.weight/exp_avg"):
        flip(copied.folder / part.tensors[key].file, part.offsets[key])
    flip(copied.folder / INDEX, 30)
    for arguments in ([copied.folder], [copied.root, "--tag", TAG], [copied.root]):
        lines = [
            line
            for line in said(capsys, "inspect", *arguments, "--verify", status=1).splitlines()
            if " is damaged" in line
        ]
        assert len(lines) == 3
        assert re.search(f"{INDEX} is damaged: its checksum", lines[0])
        assert re.search(r"tensor 'norm.weight' is damaged in .*model-00001-of-00001.safetensors: elements 0", lines[1])
        assert re.search(r"tensor 'embed.weight/exp_avg' is damaged in .*optimizer-00001-of-00001", lines[2])


def test_verify_of_a_truncated_file_names_its_tensors(copied: Saved, capsys: Any) -> None:
    path = copied.folder / "model-00001-of-00001.safetensors"
    path.write_bytes(path.read_bytes()[:-4])
    text = said(capsys, "inspect", copied.folder, "--verify", status=1)
    assert re.search(r"safetensors is damaged: it has \d+ bytes and should have \d+", text)
    assert "tensor 'embed.weight' cannot be checked" in text
    assert "exp_avg" not in text


def test_inspect_of_foreign_files(tmp_path: Path, capsys: Any) -> None:
    torch.save({"w": torch.ones(2, 3)}, tmp_path / "model.bin")
    text = said(capsys, "inspect", tmp_path / "model.bin", "--tensors", "--verify")
    assert "torch.save" in text
    assert re.search(r"^weights +1 tensors, 6 elements, 24 B \(float32\)$", text, re.MULTILINE)
    assert re.search(r"^  float32 +2x3 +w$", text, re.MULTILINE)
    assert "no checksums" in text


# -- the command ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        ["inspect", "nowhere"],
        ["merge", "nowhere", "--output", "out"],
        ["export", "nowhere", "--to", "hf", "--output", "out"],
    ],
)
def test_errors_are_one_line(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert re.fullmatch(r"zerotrain: error: .*nowhere.*\n", err)
    assert list(tmp_path.iterdir()) == []


def test_the_command_is_installed() -> None:
    project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())["project"]
    assert project["scripts"] == {"zerotrain": f"{main.__module__}:{main.__name__}"}


@pytest.mark.parametrize("arguments", [[], ["inspect"], ["merge"], ["export"]])
def test_help_and_usage(arguments: list[str], capsys: Any) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*arguments, "--help"])
    assert ended.value.code == 0
    assert "usage: zerotrain" in capsys.readouterr().out
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2


@pytest.mark.parametrize("text", ["5 apples", "-1", "0"])
def test_a_size_that_is_none(text: str, capsys: Any) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["export", "x", "--to", "hf", "--output", "y", f"--max-shard-size={text}"])
    assert ended.value.code == 2
    assert "is not a size" in capsys.readouterr().err


def test_the_output_may_be_cut_off(plain: Saved) -> None:
    """As by `| head -1`."""
    command = [sys.executable, "-m", "zerotrain.cli", "inspect", str(plain.folder), "--tensors"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait() == 1


def test_no_process_group_is_made(mixed: Saved, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> Iterator[None]:
        raise AssertionError("a process group was made")

    monkeypatch.setattr(torch.distributed, "init_process_group", refuse)
    monkeypatch.setattr(torch.distributed, "new_group", refuse)
    assert main(["inspect", str(mixed.root), "--verify"]) == 0
    for to in exporting.FORMATS:
        assert main(["export", str(mixed.root), "--to", to, "--output", str(tmp_path / to)]) == 0


def test_a_job_without_an_optimizer_under_a_tag_of_its_own(tmp_path: Path) -> None:
    def body(rank: int) -> dict[str, Tensor]:
        model = Regression()
        engine = zerotrain.initialize(model=model, config=job(0))[0]
        engine.save_checkpoint(tmp_path / "root", tag="mine")
        return full_weights(model)

    weights = run(1, body)[0]
    found = in_hf(export(tmp_path / "root", tmp_path / "out", tag="mine", max_shard_size=1))
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[name], value) for name, value in weights.items())
