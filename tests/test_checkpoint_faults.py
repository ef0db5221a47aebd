"""An error at every late call of a save, what a kill in the first calls leaves, foreign types in headers and manifests."""

from __future__ import annotations

import copy
import errno
import json
import os
import random
import shutil
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import zerotrain
from harness import outcomes, run
from test_checkpoint_crash import CALLS, Fuse, die, engine_at, failing, step
from test_checkpoint_damage import TAG, engine_of, entry, header_file, intact, root  # noqa: F401
from test_checkpoint_damage import step as step_of
from zerotrain.checkpoint import folders, manifest
from zerotrain.checkpoint.reader import open_source


@pytest.fixture(scope="module", params=["a new tag", "the same tag again"])
def base(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, str | None, list[int]]:
    """A root with a checkpoint after step 1, the tag to save, and the calls of each rank in saving step 2 into it."""
    made = tmp_path_factory.mktemp("base") / "root"
    tag = "again" if request.param == "the same tag again" else None

    def first(rank: int) -> None:
        engine = engine_at(made)
        step(engine)
        engine.save_checkpoint(tag=tag)

    def count(rank: int) -> int:
        engine = engine_at(made.parent / "counted")
        step(engine)
        fuse = Fuse(0, lambda name: None)
        fuse.attach()
        engine.save_checkpoint(tag=tag)
        return fuse.count

    run(2, first)
    shutil.copytree(made, made.parent / "counted")  # with what is there: replacing a checkpoint makes more calls
    return made, tag, run(2, count)


def fault(where: Path, tag: str | None, victim: int, at: int) -> list[tuple[str, int]]:
    """What each rank was told of a save whose call `at` fails on `victim`, and the step of the latest checkpoint then."""

    def body(rank: int) -> tuple[str, int]:
        engine = engine_at(where)
        step(engine)
        originals = {name: getattr(os, name) for name in CALLS}
        if rank == victim:
            Fuse(at, failing(errno.EIO)).attach()
        told = ""
        try:
            engine.save_checkpoint(tag=tag)
        except zerotrain.CheckpointError as error:
            told = str(error)
        for name, call in originals.items():
            setattr(os, name, call)
        engine._job.world.exchange_object(None, "all have been told")
        source = open_source(where)
        source.verify()
        found = source.manifest.step
        engine._job.world.exchange_object(None, "all have looked")
        step(engine)
        engine.save_checkpoint(tag="after")
        return told, found

    return run(2, body)


def test_an_error_at_any_call_names_the_rank_and_leaves_the_last_checkpoint(
    base: tuple[Path, str | None, list[int]], tmp_path: Path
) -> None:
    made, tag, calls = base
    wrong = []
    for at in sorted({2, 6, 9, *range(26, calls[0] + 1, 2), calls[0] - 1}):
        where = tmp_path / str(at)
        shutil.copytree(made, where)
        try:
            (own, latest), (other, _) = fault(where, tag, 0, at)
            if bool(own) != bool(other) or (other and not ("rank 0" in other and os.strerror(errno.EIO) in other)):
                wrong.append((at, "told", own, other))
            if latest != (1 if own else 2):
                wrong.append((at, "latest is of step", latest, "failed" if own else "saved"))
        except AssertionError as error:
            wrong.append((at, str(error).splitlines()[-1][:120]))
        if left := [path.name for path in where.iterdir() if path.name.startswith(".")]:
            wrong.append((at, left))
    assert not wrong, "\n".join(map(str, wrong))


def test_a_job_killed_in_the_first_or_last_calls_leaves_nothing_behind(
    base: tuple[Path, str | None, list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, tag, calls = base
    monkeypatch.setattr(folders, "PROBE_SECONDS", 0.0)
    wrong = []
    points = [(0, at) for at in sorted({2, 4, 6, 9, calls[0] - 9, calls[0] - 3, calls[0]})] + [
        (1, at) for at in (2, 4, 6)
    ]
    for victim, at in points:
        where = tmp_path / f"{victim}-{at}"
        shutil.copytree(made, where)
        die(where, tag, victim, at, together=True)

        def resumed(rank: int, where: Path = where) -> int:
            engine = engine_at(where)
            begun = int(engine.global_steps)
            step(engine)
            engine.save_checkpoint()
            return begun

        assert run(2, resumed)[0] in (1, 2)
        left = [str(path.relative_to(where)) for path in (*where.glob(".*"), *where.glob("*/.*"))]
        wrong += [(victim, at, left)] if left else []
    assert not wrong, "\n".join(map(str, wrong))


def test_a_job_killed_while_it_saves_in_the_background(
    base: tuple[Path, str | None, list[int]], tmp_path: Path
) -> None:
    made, tag, calls = base
    found = []
    for at in (*range(1, calls[0], 6), calls[0]):
        where = tmp_path / str(at)
        shutil.copytree(made, where)

        def body(rank: int, where: Path = where, at: int = at) -> None:
            engine = engine_at(where, **{"async": True})
            step(engine)
            everyone = engine._job.world.exchange_object(os.getpid(), "process ids")

            def kill(name: str) -> None:
                for pid in (*(pid for pid in everyone if pid != os.getpid()), os.getpid()):
                    os.kill(pid, signal.SIGKILL)

            if rank == 0:
                Fuse(at, kill).attach()
            engine.save_checkpoint(tag=tag)
            step(engine)
            engine.close()

        def resumed(rank: int, where: Path = where) -> int:
            engine = engine_at(where)
            begun = int(engine.global_steps)
            engine.load_checkpoint(verify=True)
            assert engine.global_steps == begun
            return begun

        assert {result.exitcode for result in outcomes(2, body)} == {-signal.SIGKILL}
        found += run(2, resumed)
    assert set(found) == {1, 2}


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_place_that_is_no_folder_is_an_error_on_every_rank(tmp_path: Path, asynchronous: bool) -> None:
    (tmp_path / "file").write_text("")

    def body(rank: int) -> str:
        engine = engine_of(checkpoint={"async": asynchronous})
        step_of(engine)
        with pytest.raises(zerotrain.CheckpointError) as caught:
            engine.save_checkpoint(tmp_path / "file")
        step_of(engine)
        engine.save_checkpoint(tmp_path / "folder")
        engine.close()
        return str(caught.value)

    for text in run(2, body):
        assert "cannot write checkpoints into" in text
        assert "rank 0" in text
    assert folders.good_tags(tmp_path / "folder")[0] == ["step-00000002"]


@pytest.mark.parametrize("shape", [None, 4, True, "4", {}, [[4]], [4.0], [None]])
def test_a_header_whose_shape_is_no_list_of_numbers(tmp_path: Path, shape: Any) -> None:
    path = header_file(tmp_path / "model.safetensors", {"a": {**entry(0, 16, [4]), "shape": shape}})
    with pytest.raises(zerotrain.CheckpointError):
        open_source(path)


def places(node: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner = node.items() if isinstance(node, dict) else enumerate(node[:2]) if isinstance(node, list) else ()
    return [path] * bool(path) + [place for key, value in inner for place in places(value, (*path, key))]


VALUES = (None, True, -1, 1 << 70, 1.5, "", "../x", [], [1], {}, {"a": 1}, {"$tensor": 1}, {"$dict": [[[], 1]]})


def signed(body: Any) -> bytes:
    text = json.dumps(body, separators=(",", ":"), ensure_ascii=False).encode()
    return b'{"checksum":"' + manifest.checksum(text).encode() + b'","manifest":' + text + b"}"


def test_foreign_types_in_a_manifest_are_refused_before_anything_changes(root: Path) -> None:  # noqa: F811
    path = root / TAG / "manifest.json"
    whole = json.loads(path.read_bytes())["manifest"]
    chosen = random.Random(3).sample([(p, v) for p in places(whole) for v in VALUES], 250)
    chosen += [(("progress",), None), (("extra",), [1]), (("files", "model-00001-of-00001.safetensors"), {})]

    def body(rank: int) -> list[str]:
        wrong = []
        for place, value in chosen:
            changed = copy.deepcopy(whole)
            node = changed
            for key in place[:-1]:
                node = node[key]
            node[place[-1]] = value
            path.write_bytes(signed(changed))
            engine = engine_of()
            for what in (partial(engine.load_checkpoint, root, TAG, verify=True), partial(folders.good_tags, root)):
                try:
                    what()
                except zerotrain.CheckpointError as error:
                    if "mixture" in str(error):
                        wrong.append(f"{place} = {value!r}: half loaded: {error}"[:200])
                except Exception as error:
                    wrong.append(f"{place} = {value!r}: {type(error).__name__}: {error}"[:200])
        return wrong

    wrong = run(1, body)[0]
    assert not wrong, f"{len(wrong)} of {len(chosen)}:\n" + "\n".join(wrong[:30])


def test_a_section_that_is_nested_too_deep(root: Path) -> None:  # noqa: F811
    path = root / TAG / "manifest.json"
    whole = json.loads(path.read_bytes())["manifest"]
    nested: list[Any] = []
    for _ in range(500):
        nested = [nested]
    path.write_bytes(signed({**whole, "client_state": nested}))

    def body(rank: int) -> None:
        with pytest.raises(zerotrain.CheckpointError):
            engine_of().load_checkpoint(root)

    run(1, body)
