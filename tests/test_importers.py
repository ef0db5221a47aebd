"""Checkpoints of other origins: read as their own tools read them, by runs, and never run."""

from __future__ import annotations

import json
import os
import pickle
import random
import shutil
import sys
import types
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

from harness import run
from zerotrain.checkpoint.importers import IMPORTERS
from zerotrain.checkpoint.importers.dcp import boxes
from zerotrain.checkpoint.importers.flat import Stream
from zerotrain.checkpoint.source import Source
from zerotrain.errors import CheckpointError

DEEPSPEED = Path(__file__).parent / "data" / "deepspeed"
STAGES_2 = ("bf16_optimizer", "zero1", "zero2", "zero2_elastic", "zero2_groups", "zero2_robin")
STAGES_3 = ("zero3", "zero3_groups")


def open_source(path: Path) -> Source:
    return next(importer for importer in IMPORTERS if importer.opens(path)).open_source(path)


def whole(source: Source, key: str) -> torch.Tensor:
    info = source.info(key)
    out = torch.empty(info.numel, dtype=info.dtype)
    source.read(key, 0, info.numel, out)
    return out.view(info.shape)


def check_runs(source: Source) -> None:
    """Every run of a tensor is that part of the whole one; also in another dtype."""
    chance = random.Random(0)
    for key in [*source.weights, *source.states]:
        expected = whole(source, key).reshape(-1)
        for _ in range(6):
            start = chance.randint(0, expected.numel())
            stop = chance.randint(start, expected.numel())
            out = torch.full((stop - start,), 77, dtype=expected.dtype)
            source.read(key, start, stop, out)
            assert torch.equal(out, expected[start:stop]), (key, start, stop)
        out = torch.empty(expected.numel(), dtype=torch.float64)
        source.read(key, 0, expected.numel(), out)
        assert torch.equal(out, expected.double())


class Attack:
    """Runs a command where it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.mark}",)


def refused(path: Path, *texts: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        open_source(path)
    for text in texts:
        assert text in str(caught.value)


# -- torch.save -------------------------------------------------------------------------------------------------------


def state_dict() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    shared = torch.randn(4, 3, generator=generator)
    return {
        "a.weight": torch.randn(5, 7, generator=generator),
        "a.turned": torch.randn(3, 5, generator=generator).t(),
        "half": torch.randn(9, generator=generator).bfloat16(),
        "count": torch.tensor(4),
        "none": torch.empty(0, 3),
        "embed": shared,
        "head": shared,
    }


def check_state_dict(source: Source) -> None:
    expected = state_dict()
    assert {key: info.shape for key, info in source.weights.items()} == {k: tuple(t.shape) for k, t in expected.items()}
    for key, tensor in expected.items():
        assert source.weights[key].dtype == tensor.dtype
        assert torch.equal(whole(source, key), tensor)
    check_runs(source)
    source.close()


@pytest.mark.parametrize(
    "wrap",
    [
        lambda weights: weights,
        lambda weights: OrderedDict(weights),
        lambda weights: {"state_dict": weights, "epoch": 3},
        lambda weights: {"model": weights, "optimizer": {"state": {0: {"step": torch.ones(())}}}},
        lambda weights: {"module": {"state_dict": weights}, "lr": 1e-3},
    ],
)
@pytest.mark.parametrize("suffix", [".bin", ".pt", ".pth"])
def test_state_dicts_in_a_file(tmp_path: Path, wrap: Callable[[Any], Any], suffix: str) -> None:
    torch.save(wrap(state_dict()), tmp_path / f"weights{suffix}")
    check_state_dict(open_source(tmp_path / f"weights{suffix}"))


def test_files_are_mapped_rather_than_read(tmp_path: Path) -> None:
    torch.save({"a": torch.zeros(1 << 20)}, tmp_path / "a.pt")
    source = open_source(tmp_path / "a.pt")
    with (tmp_path / "a.pt").open("r+b") as file:  # what is changed in the file is seen: nothing was copied
        raw = file.read()
        file.seek(raw.index(bytes(4096)) + 2048)
        file.write(b"\xff" * 8)
    assert whole(source, "a").count_nonzero() > 0


def test_torchs_old_format(tmp_path: Path) -> None:
    torch.save(state_dict(), tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    check_state_dict(open_source(tmp_path / "old.pt"))


def test_large_files_in_torchs_old_format_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zerotrain.checkpoint.importers.pickles.LARGEST_LEGACY", 100)
    torch.save(state_dict(), tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    refused(tmp_path / "old.pt", "old.pt", "old format")


def test_a_folder_with_one_file(tmp_path: Path) -> None:
    torch.save(state_dict(), tmp_path / "pytorch_model.bin")
    check_state_dict(open_source(tmp_path))


def sharded(folder: Path) -> Path:
    weights = state_dict()
    names = {key: f"pytorch_model-0000{i % 2 + 1}-of-00002.bin" for i, key in enumerate(weights)}
    for name in set(names.values()):
        torch.save({key: weights[key] for key in weights if names[key] == name}, folder / name)
    index = folder / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": names}))
    return index


def test_shards_with_an_index(tmp_path: Path) -> None:
    sharded(tmp_path)
    check_state_dict(open_source(tmp_path))


@pytest.mark.parametrize("name", ["gone.bin", "../weights.bin", "/weights.bin", "", 3, None, ["a"]])
def test_an_index_that_names_no_file_beside_it(tmp_path: Path, name: Any) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    torch.save(state_dict(), tmp_path / "weights.bin")
    index = sharded(folder)
    content = json.loads(index.read_text())
    content["weight_map"]["half"] = name
    index.write_text(json.dumps(content))
    refused(folder, "pytorch_model.bin.index.json")


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"weight_map": []}', "\0", '{"weight_map": {"a": "x"'])
def test_damaged_indices(tmp_path: Path, text: str) -> None:
    sharded(tmp_path).write_text(text)
    refused(tmp_path, "pytorch_model.bin.index.json")


def test_an_index_that_tells_the_wrong_shard(tmp_path: Path) -> None:
    index = sharded(tmp_path)
    content = json.loads(index.read_text())
    content["weight_map"]["missing"] = content["weight_map"]["half"]
    index.write_text(json.dumps(content))
    refused(tmp_path, "'missing'")


def test_no_code_of_a_torch_file_runs(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    for new in (True, False):
        torch.save({"a": torch.ones(2), "b": Attack(mark)}, tmp_path / "a.pt", _use_new_zipfile_serialization=new)
        refused(tmp_path / "a.pt", "a.pt", "system")
    (tmp_path / "a.pt").write_bytes(pickle.dumps(Attack(mark)))
    refused(tmp_path / "a.pt", "a.pt")
    assert not mark.exists()


def test_whole_modules_are_refused_by_name(tmp_path: Path) -> None:
    torch.save(nn.Linear(2, 2), tmp_path / "a.pt")
    refused(tmp_path / "a.pt", "torch.nn.modules.linear.Linear")


@pytest.mark.parametrize("content", [3, [torch.ones(2)], {"a": 1}, {3: torch.ones(2)}, {"model": {}}])
def test_torch_files_without_a_state_dict(tmp_path: Path, content: Any) -> None:
    torch.save(content, tmp_path / "a.pt")
    refused(tmp_path / "a.pt", "no state dict")


@pytest.mark.parametrize("tensor", [torch.eye(3).to_sparse(), torch.empty(3, device="meta")])
def test_tensors_without_plain_values(tmp_path: Path, tensor: torch.Tensor) -> None:
    torch.save({"odd": tensor}, tmp_path / "a.pt")
    refused(tmp_path / "a.pt", "a.pt", "'odd'")


def test_truncated_torch_files(tmp_path: Path) -> None:
    file = tmp_path / "a.pt"
    for new in (True, False):
        torch.save(state_dict(), file, _use_new_zipfile_serialization=new)
        raw = file.read_bytes()
        for size in (0, 1, 3, 50, len(raw) // 2, len(raw) - 1):
            file.write_bytes(raw[:size])
            refused(file, "a.pt")


# -- torch.distributed.checkpoint -------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(), (7,), (3, 4), (2, 3, 4), (1, 5, 1, 2)])
def test_boxes_cover_a_run_in_order(shape: tuple[int, ...]) -> None:
    numbers = torch.arange(torch.Size(shape).numel()).view(shape)
    for start in range(numbers.numel() + 1):
        for stop in range(start, numbers.numel() + 1):
            found = list(boxes(shape, start, stop))
            parts = [
                numbers[tuple(slice(low, high) for low, high in zip(box.lows, box.highs, strict=True))].reshape(-1)
                for box in found
            ]
            assert torch.equal(torch.cat([*parts, torch.empty(0, dtype=torch.int64)]), torch.arange(start, stop))
            assert [box.start for box in found] == [sum(p.numel() for p in parts[:i]) for i in range(len(parts))]
            assert len(found) <= max(1, 2 * len(shape))


class Net(nn.Module):
    """Sizes that two ranks cannot share evenly, a buffer, a parameter without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first = nn.Linear(5, 7)
        self.norm = nn.BatchNorm1d(7)
        self.state = nn.Linear(7, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.state(self.norm(self.first(x)))


def trained(fsdp: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = Net()
    if fsdp:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (2,))
        fully_shard(model.first, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model(torch.randn(4, 5)).sum().backward()
    optimizer.step()
    return model, optimizer


def full(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def expected_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    found = {name: full(tensor) for name, tensor in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        for state in ("exp_avg", "exp_avg_sq"):
            found[f"{name}/{state}"] = full(optimizer.state[parameter][state])
    return found


def save_dcp(folder: Path, fsdp: bool, flatten: bool, layout: str = "model") -> dict[str, torch.Tensor]:
    """Save on two ranks; what there must be in it."""

    def body(rank: int) -> dict[str, torch.Tensor]:
        model, optimizer = trained(fsdp)
        options = StateDictOptions(flatten_optimizer_state_dict=flatten)
        weights, states = get_state_dict(model, optimizer, options=options)
        content: dict[str, Any] = {"model": weights, "optim": states, "step": 3, "extra": {"t": torch.ones(2)}}
        if layout == "app":
            content = {"app": {"model": weights, "optimizer": states}}
        elif layout == "flat":
            content = {**weights, "optimizer": states}
        elif layout == "bare":
            content = dict(weights)
        dcp.save(content, checkpoint_id=folder)
        return expected_of(model, optimizer)

    return run(2, body)[0]


def check_dcp(source: Source, expected: dict[str, torch.Tensor]) -> None:
    assert {*source.weights, *source.states} == set(expected)
    for key, tensor in expected.items():
        assert source.info(key).dtype == tensor.dtype
        assert torch.equal(whole(source, key), tensor)
        assert (key in source.states) == ("/" in key)
    names = {key.split("/")[0] for key in expected if "/" in key}
    assert {name: float(scalars["step"]) for name, scalars in source.scalars.items()} == dict.fromkeys(names, 1.0)
    check_runs(source)
    source.close()


@pytest.mark.parametrize("flatten", [False, True])
@pytest.mark.parametrize("fsdp", [False, True])
def test_folders_of_distributed_checkpoint(tmp_path: Path, fsdp: bool, flatten: bool) -> None:
    expected = save_dcp(tmp_path / "dcp", fsdp, flatten)
    check_dcp(open_source(tmp_path / "dcp"), expected)


@pytest.mark.parametrize("layout", ["app", "flat", "bare"])
def test_where_the_weights_lie_in_the_folder(tmp_path: Path, layout: str) -> None:
    expected = save_dcp(tmp_path / "dcp", False, layout == "flat", layout)
    if layout == "bare":
        expected = {key: tensor for key, tensor in expected.items() if "/" not in key}
    check_dcp(open_source(tmp_path / "dcp"), expected)


def test_chunks_that_cut_any_dimension(tmp_path: Path) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    whole_ones = {"columns": torch.randn(4, 5), "last": torch.randn(2, 3, 5), "middle": torch.randn(3, 4, 2)}
    dims = {"columns": 1, "last": 2, "middle": 1}

    def body(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        cut = {name: distribute_tensor(tensor, mesh, [Shard(dims[name])]) for name, tensor in whole_ones.items()}
        dcp.save({"model": cut}, checkpoint_id=tmp_path / "dcp")

    run(2, body)
    source = open_source(tmp_path / "dcp")
    for name, tensor in whole_ones.items():
        assert torch.equal(whole(source, name), tensor)
    check_runs(source)


def save_alone(folder: Path, content: dict[str, Any]) -> Path:
    dcp.save(content, checkpoint_id=folder, no_dist=True)
    return folder


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("nested", [False, True])
def test_a_weight_beside_the_model_is_not_lost(tmp_path: Path, nested: bool) -> None:
    """`model.` is a part of the names where not all have it, and none where it is the key of a dict."""
    weights = {"model.a": torch.ones(2), "model.b": torch.ones(3), "head": torch.ones(4)}
    source = open_source(save_alone(tmp_path, {"model": weights, "t": torch.ones(1)} if nested else weights))
    assert set(source.weights) == set(weights)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("top", ["model", "module", "state_dict", "app"])
def test_a_prefix_of_all_flat_names_is_taken_off(tmp_path: Path, top: str) -> None:
    source = open_source(save_alone(tmp_path, {f"{top}.a": torch.ones(2), f"{top}.b": torch.ones(3)}))
    assert set(source.weights) == {"a", "b"}


@pytest.mark.filterwarnings("ignore")
def test_a_plain_optimizer_has_no_names(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    folder = save_alone(tmp_path, {"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    source = open_source(folder)
    assert set(source.weights) == {"weight", "bias"}
    assert not source.states
    assert not source.scalars


class Evil:
    """A class that the index of a folder has no use for."""


@pytest.mark.filterwarnings("ignore")
def test_no_code_of_an_index_runs(tmp_path: Path) -> None:
    folder, mark = save_alone(tmp_path / "dcp", {"model": state_dict()}), tmp_path / "mark"
    index = folder / ".metadata"
    metadata = pickle.loads(index.read_bytes())
    for value, name in ((Attack(mark), "system"), (Evil(), "Evil"), (torch.device("cpu"), "torch.device")):
        metadata.planner_data = {"a": value}
        index.write_bytes(pickle.dumps(metadata))
        refused(folder, ".metadata", name)
    for function in (b"builtins\neval", b"os\nsystem", b"torch\nload", b"collections\nOrderedDict.fromkeys"):
        index.write_bytes(b"c" + function + b"\n(S'touch " + str(mark).encode() + b"'\ntR.")
        refused(folder, ".metadata", function.decode().replace("\n", "."))
    assert not mark.exists()


@pytest.mark.filterwarnings("ignore")
def test_no_code_of_a_chunk_runs(tmp_path: Path) -> None:
    mark, weight = tmp_path / "mark", torch.ones(2)
    states = {"state": {"a": {"step": Attack(mark)}}, "param_groups": [{"lr": 1.0}]}
    folder = save_alone(tmp_path / "dcp", {"model": {"a": weight}, "optim": states})
    refused(folder, ".distcp", "system")
    assert not mark.exists()


@pytest.mark.filterwarnings("ignore")
def test_damaged_folders(tmp_path: Path) -> None:
    folder = save_alone(tmp_path / "dcp", {"model": state_dict()})
    index, data = folder / ".metadata", next(folder.glob("*.distcp"))
    raw, content = index.read_bytes(), data.read_bytes()
    for size in (0, 1, 20, len(raw) // 2, len(raw) - 1):
        index.write_bytes(raw[:size])
        refused(folder, ".metadata")
    index.write_bytes(pickle.dumps({"a": 1}))
    refused(folder, ".metadata")
    index.write_bytes(raw)
    data.write_bytes(content[: len(content) // 2])
    refused(folder, data.name, "truncated")
    data.unlink()
    refused(folder, data.name, "not there")
    data.write_bytes(bytes(len(content)))
    source = open_source(folder)
    with pytest.raises(CheckpointError, match=r"(?s)'half'.*\.distcp"):
        whole(source, "half")


def edit(folder: Path, change: Callable[[Any], None]) -> None:
    index = folder / ".metadata"
    metadata = pickle.loads(index.read_bytes())
    change(metadata)
    index.write_bytes(pickle.dumps(metadata))


@pytest.mark.filterwarnings("ignore")
def test_indices_that_lie(tmp_path: Path) -> None:
    folder = save_alone(tmp_path / "dcp", {"model": state_dict()})
    raw = (folder / ".metadata").read_bytes()

    def places(metadata: Any) -> list[Any]:
        return list(metadata.storage_data.values())

    def outside(metadata: Any) -> None:
        places(metadata)[0].relative_path = "../secret"

    def before(metadata: Any) -> None:
        places(metadata)[0].offset = -5

    def packed(metadata: Any) -> None:
        places(metadata)[0].transform_descriptors = ["zstd"]

    def unknown(metadata: Any) -> None:
        metadata.storage_data.popitem()

    def beyond(metadata: Any) -> None:
        metadata.state_dict_metadata["model.half"].chunks[0].sizes = torch.Size([10])

    for change in (outside, before, packed, unknown, beyond):
        edit(folder, change)
        refused(folder, ".metadata")
        (folder / ".metadata").write_bytes(raw)

    def hole(metadata: Any) -> None:
        metadata.state_dict_metadata["model.half"].chunks.clear()

    def another(metadata: Any) -> None:
        metadata.state_dict_metadata["model.half"].properties.dtype = torch.float16

    for change in (hole, another):
        edit(folder, change)
        with pytest.raises(CheckpointError, match="'half'"):
            whole(open_source(folder), "half")
        (folder / ".metadata").write_bytes(raw)


# -- DeepSpeed --------------------------------------------------------------------------------------------------------


def key_of(source: Source, name: str) -> str:
    """The key of what DeepSpeed expects under `<kind>/<name>`; its `weights` are fp32 ones."""
    kind, _, name = name.partition("/")
    if kind != "weights":
        return f"{name}/{kind}"
    name = source.tied.get(name, name)
    return f"{name}/master" if f"{name}/master" in source.states else name


@pytest.mark.parametrize("name", [*STAGES_2, *STAGES_3])
def test_deepspeed_as_its_own_tools_read_it(name: str) -> None:
    source = open_source(DEEPSPEED / name)
    for what, tensor in load_file(DEEPSPEED / name / "expected.safetensors").items():
        key = key_of(source, what)
        out = torch.empty(tensor.numel(), dtype=tensor.dtype)
        source.read(key, 0, out.numel(), out)
        assert source.info(key).shape == tuple(tensor.shape)
        assert torch.equal(out.view(tensor.shape), tensor), what
    assert source.tied == {"head.weight": "embed.weight"}
    assert "seen" in source.weights
    assert "frozen.weight" in source.weights
    trainable = set(source.weights) - {"seen", "norm.shift", "frozen.weight"}
    assert set(source.states) == {f"{n}/{s}" for n in trainable for s in ("master", "exp_avg", "exp_avg_sq")}
    assert {n: float(s["step"]) for n, s in source.scalars.items()} == dict.fromkeys(trainable, 3.0)
    check_runs(source)
    source.close()


@pytest.mark.parametrize("name", ["zero1", "zero2", "zero2_elastic", "zero2_robin"])
def test_masters_of_fp32_training_are_the_weights(name: str) -> None:
    source = open_source(DEEPSPEED / name)
    for key in source.states:
        if key.endswith("/master"):
            assert torch.equal(whole(source, key), whole(source, key.removesuffix("/master")))


def test_round_robin_keeps_each_moment_with_its_parameter() -> None:
    """The same training without round robin gives the same moments, but for the order of sums in the clipped norm."""
    shuffled, plain = open_source(DEEPSPEED / "zero2_robin"), open_source(DEEPSPEED / "zero2_elastic")
    for key in plain.states:
        torch.testing.assert_close(whole(shuffled, key), whole(plain, key))


def test_the_folder_of_a_tag() -> None:
    assert set(open_source(DEEPSPEED / "zero2" / "step3").states) == set(open_source(DEEPSPEED / "zero2").states)


@pytest.fixture(params=["zero2", "zero3"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A copy of a checkpoint, to damage."""
    copy = tmp_path / "job"
    shutil.copytree(DEEPSPEED / request.param, copy)
    return copy


def test_missing_files_of_deepspeed(folder: Path) -> None:
    for file in sorted((folder / "step3").glob("*_states.pt")):
        moved = file.rename(folder.parent / file.name)
        refused(folder, "step3")
        moved.rename(file)
    open_source(folder)


def test_truncated_files_of_deepspeed(folder: Path) -> None:
    for file in sorted((folder / "step3").glob("*_states.pt")):
        raw = file.read_bytes()
        for size in (0, 10, len(raw) // 2, len(raw) - 1):
            file.write_bytes(raw[:size])
            refused(folder, file.name)
        file.write_bytes(raw)
    open_source(folder)


def test_no_code_of_deepspeeds_files_runs(folder: Path, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    for file in sorted((folder / "step3").glob("*_states.pt")):
        raw = file.read_bytes()
        torch.save({"optimizer_state_dict": Attack(mark)}, file)
        refused(folder, file.name, "system")
        file.write_bytes(raw)
    assert not mark.exists()


@pytest.fixture
def loss_scalers() -> Iterator[types.ModuleType]:
    """A module of DeepSpeed's name, with a class that is let in and one that is not, while files are written."""
    name = "deepspeed.runtime.fp16.loss_scaler"
    module = types.ModuleType(name)
    for kind in ("DynamicLossScaler", "Other"):
        made = type(kind, (), {"__module__": name})
        setattr(module, kind, made)
    names = ["deepspeed", "deepspeed.runtime", "deepspeed.runtime.fp16", name]
    sys.modules.update({**{n: types.ModuleType(n) for n in names}, name: module})
    yield module
    for one in names:
        sys.modules.pop(one)


def rewrite(file: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change a file; the integer stands for the stage, as no DeepSpeed is here."""
    from zerotrain.checkpoint.importers.deepspeed_files import STUBS

    with torch.serialization.safe_globals(list(STUBS)):
        content = torch.load(file, weights_only=True)
    inner = content.get("optimizer_state_dict", {})
    inner.pop("loss_scaler", None)
    inner.pop("param_slice_mappings", None)
    change(content)
    torch.save(content, file)


def test_classes_of_deepspeed_need_no_deepspeed(folder: Path, loss_scalers: types.ModuleType) -> None:
    file = next((folder / "step3").glob("*_rank_0_*optim_states.pt"))
    scaler = loss_scalers.DynamicLossScaler()
    scaler.cur_scale = 1024
    rewrite(file, lambda content: content["optimizer_state_dict"].update(loss_scaler=scaler))
    assert "exp_avg" in {key.split("/")[1] for key in open_source(folder).states}
    rewrite(file, lambda content: content["optimizer_state_dict"].update(loss_scaler=loss_scalers.Other()))
    refused(folder, file.name, "deepspeed.runtime.fp16.loss_scaler.Other")


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda content: content.clear(), "optimizer_state_dict"),
        (lambda content: content["optimizer_state_dict"].update(partition_count=[4]), "2 ranks"),
        (lambda content: content["optimizer_state_dict"].update(zero_stage=1), "stage"),
        (lambda content: content["optimizer_state_dict"].update(zero_stage=9), "stage"),
        (lambda content: content["optimizer_state_dict"].pop("single_partition_of_fp32_groups"), "single_partition"),
        (lambda content: content["optimizer_state_dict"]["single_partition_of_fp32_groups"].pop(), "IndexError"),
        (
            lambda content: content["optimizer_state_dict"].update(single_partition_of_fp32_groups=[torch.ones(9)]),
            "elements",
        ),
        (lambda content: content.update(optimizer_state_dict=7), "partition_count"),
        (lambda content: content["optimizer_state_dict"].update(base_optimizer_state=7), "damaged"),
    ],
)
def test_files_of_stage_2_that_do_not_fit(tmp_path: Path, change: Callable[[Any], None], text: str) -> None:
    folder = tmp_path / "job"
    shutil.copytree(DEEPSPEED / "zero2", folder)
    rewrite(folder / "step3" / "zero_pp_rank_1_mp_rank_00_optim_states.pt", change)
    refused(folder, "step3", text)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda content: content["optimizer_state_dict"].update(fp32_flat_groups=[torch.ones(9)]), "elements"),
        (lambda content: content["optimizer_state_dict"]["fp32_flat_groups"].append(torch.ones(1)), "elements"),
        (lambda content: content["optimizer_state_dict"].update(ds_zero_partition_groups={}), "stage 3"),
        (lambda content: content["optimizer_state_dict"].pop("optimizer_state_dict"), "exp_avg has 0 elements"),
    ],
)
def test_files_of_stage_3_that_do_not_fit(tmp_path: Path, change: Callable[[Any], None], text: str) -> None:
    folder = tmp_path / "job"
    shutil.copytree(DEEPSPEED / "zero3", folder)
    rewrite(folder / "step3" / "zero_pp_rank_1_mp_rank_00_optim_states.pt", change)
    refused(folder, "step3", text)


def test_kinds_of_deepspeed_checkpoints_that_are_refused(tmp_path: Path) -> None:
    for extra in ("mp_rank_01_model_states.pt", "layer_01-model_00-model_states.pt"):
        folder = tmp_path / extra
        shutil.copytree(DEEPSPEED / "zero2", folder)
        shutil.copy(folder / "step3" / "mp_rank_00_model_states.pt", folder / "step3" / extra)
        refused(folder, extra)
    folder = tmp_path / "pipeline"
    shutil.copytree(DEEPSPEED / "zero2", folder)
    rewrite(folder / "step3" / "mp_rank_00_model_states.pt", lambda content: content.update(module=None))
    refused(folder, "pipeline")


@pytest.mark.parametrize("text", ["", "gone", "../job", "\0", "x" * 5000, "."])
def test_a_latest_file_that_names_no_tag(tmp_path: Path, text: str) -> None:
    folder = tmp_path / "job"
    shutil.copytree(DEEPSPEED / "zero2", folder)
    (folder / "latest").write_text(text)
    assert not any(importer.opens(folder) for importer in IMPORTERS)


def test_streams_end_where_their_tensors_do() -> None:
    stream = Stream([torch.arange(3), torch.arange(0), torch.arange(3, 7)])
    out = torch.empty(5, dtype=torch.int64)
    stream.copy(1, 6, out)
    assert out.tolist() == [1, 2, 3, 4, 5]
    with pytest.raises(IndexError, match="of 7"):
        stream.copy(5, 8, out)


# -- which is asked ---------------------------------------------------------------------------------------------------


def test_what_no_importer_opens(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("nothing")
    for path in (tmp_path, tmp_path / "notes.txt", tmp_path / "gone.pt"):
        assert not any(importer.opens(path) for importer in IMPORTERS)
