"""Checkpoints that are damaged, incomplete or hostile: a clear error on every rank, before anything has changed."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import zerotrain
from harness import run
from models import Regression, vector_batch
from oracle import full_weights
from scenario import engine_for
from zerotrain import runtime
from zerotrain.checkpoint import folders, manifest
from zerotrain.checkpoint.reader import Checkpoint, open_source

TAG = "step-00000001"


def engine_of(**extra: Any) -> Any:
    torch.manual_seed(1)
    return engine_for(Regression(width=6, depth=2), 3, **extra)


def step(engine: Any) -> float:
    rows = vector_batch(engine.global_steps, 2, width=6)
    share = slice(engine.rank, engine.rank + 1) if engine.world_size > 1 else slice(0, 2)
    engine.backward(engine(*(part[share] for part in rows)))
    engine.step()
    return float(engine.metrics["loss"])


@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one checkpoint."""
    root = tmp_path_factory.mktemp("intact")

    def body(rank: int) -> None:
        engine = engine_of()
        step(engine)
        engine.save_checkpoint(root)

    run(2, body)
    return root


@pytest.fixture
def root(intact: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    shutil.copytree(intact, tmp_path / "out")
    return tmp_path / "out"


def refused(root: Path, match: str, **options: Any) -> None:
    """The load raises on both ranks, and the engine trains on as if it had not been tried."""

    def body(rank: int, load: bool) -> list[float]:
        engine = engine_of()
        losses = [step(engine)]
        if load:
            with pytest.raises(zerotrain.CheckpointError, match=match):
                engine.load_checkpoint(root, **options)
        return [*losses, step(engine)]

    assert run(2, lambda rank: body(rank, True)) == run(2, lambda rank: body(rank, False))


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def the(root: Path, pattern: str) -> Path:
    [found] = (root / TAG).glob(pattern)
    return found


def test_a_flipped_byte_in_a_tensor_is_found_by_verify_which_names_it(root: Path) -> None:
    flip(the(root, "model-*.safetensors"), -1)
    refused(root, r"tensor 'layers\.\d\.\w+' is damaged in .*model-00001-of-00001\.safetensors", verify=True)


def test_verify_is_on_where_another_machine_wrote(root: Path) -> None:
    flip(the(root, "model-*.safetensors"), -1)
    made = manifest.load(root / TAG)
    elsewhere = manifest.Manifest(made.model, made.optimizer, made.files, {**made.state, "host": "another machine"})
    (root / TAG / "manifest.json").write_bytes(manifest.dump(elsewhere))
    refused(root, "is damaged in")


def test_ranks_on_several_machines_agree_whether_to_verify(tmp_path: Path) -> None:
    """One job on two nodes saves, and loads again: only rank 0's node is the one that the checkpoint names."""

    def body(rank: int, name: str) -> float:
        runtime.machine = lambda: f"{name}{rank}"
        engine = engine_of()
        if not (tmp_path / "latest").exists():
            engine.save_checkpoint(tmp_path)
        engine.load_checkpoint(tmp_path)
        return step(engine)

    assert run(2, lambda rank: body(rank, "node")) == run(2, lambda rank: body(rank, "other node"))


@pytest.mark.parametrize("pattern", ["model-*.safetensors", "optimizer-*.safetensors"])
def test_a_truncated_file(root: Path, pattern: str) -> None:
    path = the(root, pattern)
    os.truncate(path, path.stat().st_size - 4)
    refused(root, "bytes and should have")


@pytest.mark.parametrize("pattern", ["model-*.safetensors", "optimizer-*.safetensors", "model.safetensors.index.json"])
def test_a_missing_file(root: Path, pattern: str) -> None:
    the(root, pattern).unlink()
    refused(root, "is part of the checkpoint and cannot be read")


def test_a_changed_manifest(root: Path) -> None:
    path = root / TAG / "manifest.json"
    path.write_text(path.read_text().replace('"step":1', '"step":7'))
    refused(root, "checksum")


def test_a_changed_header(root: Path) -> None:
    path = the(root, "model-*.safetensors")
    path.write_bytes(path.read_bytes().replace(b"layers.0.weight", b"layers.9.weight", 1))
    refused(root, "disagree about tensor 'layers.0.weight'")


def test_a_small_file_that_was_changed_is_found_by_verify(root: Path) -> None:
    flip(root / TAG / "model.safetensors.index.json", 10)
    refused(root, r"index\.json is damaged", verify=True)


def rewritten(root: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """A manifest with another content and the right checksum."""
    path = root / TAG / "manifest.json"
    body = json.loads(path.read_text())["manifest"]
    change(body)
    text = json.dumps(body, separators=(",", ":"), ensure_ascii=False).encode()
    path.write_bytes(b'{"checksum":"' + manifest.checksum(text).encode() + b'","manifest":' + text + b"}")


HOSTILE: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "newer version": (lambda body: body.update(version=2), "format version 2, and this release reads up to 1"),
    "file elsewhere": (lambda body: body["model"]["layers.0.weight"].update(file="../x"), "not a plain file name"),
    "file list elsewhere": (lambda body: body["files"].update({"/etc/passwd": {"bytes": 1}}), "not a plain file name"),
    "huge tensor": (lambda body: body["model"]["layers.0.weight"].update(shape=[1 << 40, 1 << 20]), "disagree"),
    "overlapping fragments": (
        lambda body: body["model"]["layers.0.weight"].update(fragments=[[0, 9, ""], [8, 36, ""]]),
        "overlap",
    ),
    "gap": (lambda body: body["model"]["layers.0.weight"].update(fragments=[[0, 9, ""]]), "not written whole"),
    "unknown value": (lambda body: body.update(tied={"$code": "print()"}), "not a kind of value"),
    "missing section": (lambda body: body.pop("groups"), "is not a manifest"),
    "wrong type": (lambda body: body.update(model=[]), "is not a manifest"),
    "unknown dtype": (lambda body: body["model"]["layers.0.weight"].update(dtype="Q4"), "is not a manifest"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_manifests(root: Path, name: str) -> None:
    change, match = HOSTILE[name]
    rewritten(root, change)
    refused(root, match)


def header_file(path: Path, header: Any, data: bytes = b"\0" * 16, length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)
    return path


def entry(start: int, stop: int, shape: list[int], dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


HEADERS: dict[str, tuple[Any, int | None, str]] = {
    "huge header": ({}, 1 << 62, "its header claims"),
    "not json": (b"{{{{", None, "cannot be read"),
    "deep json": (b"[" * 100_000, None, "cannot be read"),
    "a list": ([], None, "is a JSON object"),
    "overlap": ({"a": entry(0, 8, [2]), "b": entry(4, 16, [3])}, None, "overlaps"),
    "gap": ({"a": entry(0, 4, [1]), "b": entry(8, 16, [2])}, None, "gap"),
    "beyond the end": ({"a": entry(0, 1 << 50, [1 << 48])}, None, "its header describes"),
    "shape": ({"a": entry(0, 16, [5])}, None, "does not fit"),
    "negative": ({"a": entry(-16, 0, [4])}, None, "does not fit"),
    "dtype": ({"a": entry(0, 16, [4], "F5")}, None, "damaged"),
    "no offsets": ({"a": {"dtype": "F32"}}, None, "damaged"),
}


@pytest.mark.parametrize("name", HEADERS)
def test_hostile_headers_of_foreign_files(tmp_path: Path, name: str) -> None:
    header, length, match = HEADERS[name]
    path = header_file(tmp_path / "model.safetensors", header, length=length)
    with pytest.raises(zerotrain.CheckpointError, match=match):
        open_source(path)


def test_an_index_that_names_a_missing_file_or_another_folder(tmp_path: Path) -> None:
    for name, match in (("none.safetensors", "not there"), ("../x.safetensors", "not a plain file name")):
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
        with pytest.raises(zerotrain.CheckpointError, match=match):
            open_source(tmp_path)


@pytest.mark.parametrize("tag", ["../out", "/etc", "a/b", "", ".hidden", "latest", "a\0b", "x" * 300])
def test_tags_that_are_no_names(root: Path, tag: str) -> None:
    refused(root, "cannot be the tag", tag=tag)

    def body(rank: int) -> None:
        engine = engine_of()
        with pytest.raises(zerotrain.CheckpointError, match="cannot be the tag"):
            engine.save_checkpoint(root, tag)
        step(engine)

    run(2, body)


def test_a_tag_that_is_not_there_says_which_are(root: Path) -> None:
    refused(root, f"no checkpoint 'step-9' in .*; there are: {TAG}", tag="step-9")
    refused(root / "nothing", "does not exist")


def test_symbolic_links_in_a_circle(root: Path) -> None:
    loop = root / TAG / "manifest.json"
    loop.unlink()
    loop.symlink_to(loop.name)
    refused(root, "manifest|nothing that can be loaded|names one of them")
    (root / "latest").unlink()
    (root / "latest").symlink_to("latest")
    refused(root, "cannot be read")
    (root / "loop").symlink_to("loop")
    refused(root / "loop", "cannot be read|does not exist|nothing that can be loaded")


def test_latest_that_names_what_is_gone(root: Path) -> None:
    (root / "latest").write_text("step-00000077\n")
    refused(root, "no file `latest` names one of them; give a tag")
    tags, reasons = folders.good_tags(root)
    assert tags == [TAG]
    assert "step-00000077" in reasons[0]


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_damage_is_an_error_or_harmless(intact: Path, tmp_path: Path, data: st.DataObject) -> None:
    """Bytes changed or cut off anywhere: reading raises CheckpointError, or gives values; nothing else, and in bounds."""
    target = tmp_path / "fuzz"
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(intact / TAG, target)
    path = data.draw(st.sampled_from(sorted(target.iterdir())))
    content = bytearray(path.read_bytes())
    head = min(len(content) - 1, 4000)
    if data.draw(st.booleans()):
        for _ in range(data.draw(st.integers(1, 4))):
            content[data.draw(st.integers(0, head))] = data.draw(st.integers(0, 255))
    else:
        del content[data.draw(st.integers(0, head)) :]
    path.write_bytes(content)
    try:
        source = open_source(target)
        assert isinstance(source, Checkpoint)
        source.verify()
        for key in (*source.weights, *source.states):
            info = source.info(key)
            source.read(key, 0, info.numel, torch.empty(info.numel, dtype=info.dtype))
    except zerotrain.CheckpointError:
        pass


def test_a_read_that_fails_half_way_leaves_the_engine_refusing_to_train(root: Path) -> None:
    def body(rank: int) -> None:
        engine = engine_of()
        step(engine)
        preadv, count = os.preadv, 0

        def failing(handle: int, buffers: Any, offset: int) -> int:
            nonlocal count
            count += 1
            if rank == 1 and count == 3:
                raise OSError(5, "Input/output error")
            return preadv(handle, buffers, offset)

        os.preadv = failing  # type: ignore[assignment]
        with pytest.raises(zerotrain.CheckpointError, match="holds a mixture"):
            engine.load_checkpoint(root)
        with pytest.raises(zerotrain.CheckpointError, match="failed half-way"):
            step(engine)
        with pytest.raises(zerotrain.CheckpointError, match="failed half-way"):
            engine.save_checkpoint(root, "mixture")
        engine.load_checkpoint(root)
        step(engine)

    run(2, body)


# -- in the background ------------------------------------------------------------------------------------------------


def slow_writes(seconds: float) -> None:
    pwrite = os.pwrite

    def slow(*args: Any) -> int:
        time.sleep(seconds)
        return pwrite(*args)

    os.pwrite = slow  # type: ignore[assignment]


def test_the_snapshot_is_of_the_moment_of_the_call(tmp_path: Path) -> None:
    def body(rank: int) -> tuple[dict[str, Any], bool]:
        engine = engine_of(checkpoint={"async": True})
        slow_writes(0.05)
        step(engine)
        engine.save_checkpoint(tmp_path)
        then = full_weights(engine.module)
        step(engine)
        step(engine)
        busy = engine._keeper.saver.busy
        engine.close()
        return then, busy

    then, busy = run(2, body)[0]
    assert busy, "training went on while the checkpoint was being written"
    source = open_source(tmp_path)
    for key, value in then.items():
        got = torch.empty(value.numel())
        source.read(key, 0, value.numel(), got)
        assert torch.equal(got.view_as(value), value), key


@pytest.mark.parametrize("if_busy", ["wait", "refuse"])
def test_a_second_save_waits_or_is_refused(tmp_path: Path, if_busy: str) -> None:
    def body(rank: int) -> None:
        engine = engine_of(checkpoint={"async": True, "if_busy": if_busy})
        slow_writes(0.05)
        engine.save_checkpoint(tmp_path)
        step(engine)
        if if_busy == "refuse":
            with pytest.raises(zerotrain.CheckpointError, match="still being written"):
                engine.save_checkpoint(tmp_path)
            engine._keeper.saver.wait()
        engine.save_checkpoint(tmp_path)
        engine.close()

    run(2, body)
    assert folders.tags(tmp_path) == ["step-00000000", "step-00000001"]


def test_an_error_in_the_background_comes_out_of_close(tmp_path: Path) -> None:
    def body(rank: int) -> None:
        engine = engine_of(checkpoint={"async": True})

        def failing(*args: Any) -> None:
            raise OSError(28, "No space left on device")

        os.posix_fallocate = failing
        engine.save_checkpoint(tmp_path)
        with pytest.raises(zerotrain.CheckpointError, match="No space left"):
            engine.close()

    run(2, body)
    assert list(tmp_path.iterdir()) == []


# -- which are kept ---------------------------------------------------------------------------------------------------


def test_retention(tmp_path: Path) -> None:
    def body(rank: int) -> None:
        engine = engine_of(checkpoint={"directory": str(tmp_path), "keep_last": 2, "keep_every": 4})
        engine.save_checkpoint(tag="best")
        for _ in range(10):
            step(engine)
            engine.save_checkpoint()
        engine.load_checkpoint(tag="step-00000004")
        step(engine)
        engine.save_checkpoint()

    run(2, body)
    assert folders.tags(tmp_path) == ["best", *(f"step-{n:08d}" for n in (4, 5, 8, 10))]
    assert folders.latest(tmp_path) == "step-00000005", "the newest is the one written last, not the one furthest on"


# -- without a file system in common ----------------------------------------------------------------------------------


def test_nodes_without_a_common_file_system(tmp_path: Path) -> None:
    """Every rank writes a folder of its own; together, or each with what it holds, they load."""

    def save(rank: int) -> dict[str, Any]:
        engine = engine_of()
        step(engine)
        engine.save_checkpoint(tmp_path / f"node{rank}")
        return full_weights(engine.module)

    def load(rank: int, where: Callable[[int], Path]) -> dict[str, Any]:
        engine = engine_of()
        engine.load_checkpoint(where(rank))
        return full_weights(engine.module)

    want = run(2, save)[0]
    names = [[path.name for path in (tmp_path / f"node{rank}").iterdir() if path.is_dir()] for rank in range(2)]
    assert names == [[f"{TAG}.node-00000-of-00002"], [f"{TAG}.node-00001-of-00002"]]
    shutil.copytree(tmp_path / "node0", tmp_path / "both")
    shutil.copytree(tmp_path / "node1", tmp_path / "both", dirs_exist_ok=True)
    for world, where in (
        (2, lambda rank: tmp_path / f"node{rank}"),
        (2, lambda rank: tmp_path / "both"),
        (3, lambda rank: tmp_path / "both"),
    ):
        for got in run(world, lambda rank, where=where: load(rank, where)):
            assert all(torch.equal(value, want[name]) for name, value in got.items())

    def missing(rank: int) -> None:
        with pytest.raises(zerotrain.CheckpointError, match="zerotrain merge"):
            load(rank, lambda rank: tmp_path / "node0")

    run(1, missing)
