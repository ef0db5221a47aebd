"""Jobs that die, or meet a failing disk, while they save: the last checkpoint is whole and the latest, whatever happens."""

from __future__ import annotations

import errno
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import zerotrain
from harness import outcomes, run
from models import Regression, vector_batch
from scenario import engine_for
from zerotrain.checkpoint import folders
from zerotrain.checkpoint.reader import open_checkpoint

# Everything that a save does to the disk, but writes of small files, which go through a temporary name and `replace`.
CALLS = ("open", "mkdir", "pwrite", "posix_fallocate", "fsync", "rename", "replace", "unlink", "rmdir")


def engine_at(root: Path, **checkpoint: Any) -> Any:
    torch.manual_seed(1)
    model = Regression(width=8, depth=2)
    checkpoint = {"directory": str(root), "resume": "auto", **checkpoint}
    return engine_for(model, 3, checkpoint=checkpoint, mismatch_timeout=1.0)


def step(engine: Any) -> float:
    rows = vector_batch(engine.global_steps, 2)
    engine.backward(engine(*(part[engine.rank : engine.rank + 1] for part in rows)))
    engine.step()
    return float(engine.metrics["loss"])


@dataclass
class Fuse:
    """Counts this process's calls, and at number `at` does what `blow` does before, or in the place of, the call."""

    at: int
    blow: Callable[[str], None]
    count: int = 0

    def attach(self, names: tuple[str, ...] = CALLS) -> None:
        for name in names:
            setattr(os, name, self._wrapped(name, getattr(os, name)))

    def _wrapped(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            self.count += 1
            if self.count == self.at:
                self.blow(name)
            return call(*args, **kwargs)

        return wrapper


def tensors_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}


@dataclass
class World:
    """Roots with a checkpoint after step 1, and the files of the steps after it."""

    base: Path
    steps: dict[int, dict[str, bytes]]
    calls: list[int]
    """How many calls each rank makes in a save."""


@pytest.fixture(scope="module", params=["a new tag", "the same tag again"])
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[World, str | None]:
    tag = "again" if request.param == "the same tag again" else None
    root = tmp_path_factory.mktemp("base")

    def body(rank: int) -> int:
        engine = engine_at(root / "steps")
        fuse = Fuse(0, lambda name: None)
        for number in (1, 2):
            step(engine)
            engine.save_checkpoint(root / "steps", f"at{number}")
            if number == 1:
                engine.save_checkpoint(root / "base", tag)
                engine.save_checkpoint(root / "counted", tag)  # replacing a checkpoint makes more calls
            else:
                engine._keeper.saver._leaders.clear()  # a job that resumes tries the folder out again
                fuse.attach()
                engine.save_checkpoint(root / "counted", tag)
        return fuse.count

    calls = run(2, body)
    return World(root / "base", {n: tensors_of(root / "steps" / f"at{n}") for n in (1, 2)}, calls), tag


def die(root: Path, tag: str | None, victim: int, at: int, together: bool) -> list[Any]:
    """Resume at step 1, and die in the save after step 2, `victim` alone or the whole job."""

    def body(rank: int) -> bool:
        engine = engine_at(root)
        assert engine.global_steps == 1
        step(engine)
        peers = engine._job.world.exchange_object(os.getpid(), "process ids")

        def kill(name: str) -> None:
            for pid in peers if together else ():
                if pid != os.getpid():
                    os.kill(pid, signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)

        if rank == victim:
            Fuse(at, kill).attach()
        engine.save_checkpoint(tag=tag)
        return True

    return outcomes(2, body)


def assert_whole(root: Path, world: World, saved: bool) -> int:
    """The best checkpoint under `root` is one of the two, whole; after a save that returned it is the second."""
    folders.recover(root)
    tags, _ = folders.good_tags(root)
    source = open_checkpoint([root / tags[0]], root)
    source.verify()
    number = source.manifest.step
    source.close()
    assert tensors_of(root / tags[0]) == world.steps[number]
    assert number in ((2,) if saved else (1, 2))
    return number


def test_killed_at_every_call_of_a_save(world: tuple[World, str | None], tmp_path: Path) -> None:
    """The whole job at every call of either rank; more than fifty points."""
    made, tag = world
    points = [(victim, at) for victim in (0, 1) for at in range(1, made.calls[victim] + 1)]
    assert len(points) > 25, "two cases of this test make fifty"
    found = []
    for victim, at in points:
        root = tmp_path / f"{victim}-{at}"
        shutil.copytree(made.base, root)
        results = die(root, tag, victim, at, together=True)
        assert not any(result.ok for result in results) or all(result.ok for result in results)
        found.append(assert_whole(root, made, saved=all(result.ok for result in results)))
    assert set(found) == {1, 2}, "some die before the new checkpoint is the latest, some after"


def test_what_a_dead_job_left_is_removed_by_the_next_save(world: tuple[World, str | None], tmp_path: Path) -> None:
    made, tag = world
    for at in (made.calls[0] // 3, made.calls[0] * 2 // 3, made.calls[0] - 2):
        root = tmp_path / str(at)
        shutil.copytree(made.base, root)
        die(root, tag, 0, at, together=True)

        def body(rank: int, root: Path = root) -> None:
            engine = engine_at(root)
            step(engine)
            engine.save_checkpoint()

        run(2, body)
        assert not [path.name for path in root.iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize("victim", [0, 1])
def test_one_rank_killed_is_an_error_on_the_other(world: tuple[World, str | None], tmp_path: Path, victim: int) -> None:
    made, tag = world
    for at in (1, made.calls[victim] // 2):
        root = tmp_path / f"{at}"
        shutil.copytree(made.base, root)
        results = die(root, tag, victim, at, together=False)
        assert results[victim].exitcode == -signal.SIGKILL
        assert results[1 - victim].error_type == "RankMismatchError", results[1 - victim].describe()
        assert_whole(root, made, saved=False)


SCRIPT = """
import sys, torch, zerotrain
from pathlib import Path
sys.path.insert(0, {tests!r})
from models import Regression, vector_batch
torch.manual_seed(1)
engine = zerotrain.initialize(model=Regression(width=256, depth=8), config={{
    "optimizer": {{"type": "AdamW", "params": {{"lr": 1e-3}}}}, "zero_optimization": {{"stage": 3}},
    "checkpoint": {{"directory": {root!r}, "resume": "auto", "async": {asynchronous}, "keep_last": 2}}}})[0]
while True:
    engine.backward(engine(*vector_batch(engine.global_steps, 2, width=256)))
    engine.step()
    engine.save_checkpoint()
    print(engine.global_steps, flush=True)
"""


@pytest.mark.parametrize(("number", "asynchronous"), [(signal.SIGKILL, True), (signal.SIGTERM, False)])
def test_killed_at_random_times(tmp_path: Path, asynchronous: bool, number: signal.Signals) -> None:
    """A job that does nothing but save is ended again and again; it goes on where it was, never further back."""
    seed = random.Random(int(number) + asynchronous)
    text = SCRIPT.format(tests=str(Path(__file__).parent), root=str(tmp_path), asynchronous=asynchronous)
    reached = 0
    for _ in range(3):
        process = subprocess.Popen(
            [sys.executable, "-c", text], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        first = process.stdout.readline()
        assert int(first) >= reached - asynchronous, "it began again where it was"
        time.sleep(seed.uniform(0.05, 0.4))
        process.send_signal(number)
        lines = [first, *process.communicate()[0].splitlines()]
        reached = max(int(line) for line in lines if line.strip())
        folders.recover(tmp_path)
        tags, _ = folders.good_tags(tmp_path)
        source = open_checkpoint([tmp_path / tags[0]], tmp_path)
        source.verify()
        assert source.manifest.step >= reached - asynchronous
        source.close()


# -- a disk that fails ------------------------------------------------------------------------------------------------


def failing(code: int) -> Callable[[str], None]:
    def blow(name: str) -> None:
        raise OSError(code, os.strerror(code))

    return blow


FAULTS = [("pwrite", errno.ENOSPC), ("fsync", errno.EIO), ("posix_fallocate", errno.ENOSPC), ("rename", errno.EROFS)]


def save_and_be_told(engine: Any) -> None:
    """A synchronous save fails at once; the error of an asynchronous one comes out of the next step."""
    engine.save_checkpoint()
    engine._keeper.saver.wait()
    step(engine)


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize(("call", "code"), FAULTS)
@pytest.mark.parametrize("victim", [0, 1])
def test_a_failing_disk_is_an_error_on_every_rank_and_training_goes_on(
    tmp_path: Path, call: str, code: int, victim: int, asynchronous: bool
) -> None:
    if victim == 1 and call in ("posix_fallocate", "rename"):
        victim = 0  # only the leader makes these

    def body(rank: int) -> tuple[list[float], str]:
        engine = engine_at(tmp_path, **{"async": asynchronous})
        losses = [step(engine)]
        engine.save_checkpoint()
        engine._keeper.saver.wait()
        losses.append(step(engine))
        original = getattr(os, call)
        if rank == victim:
            Fuse(2 if call == "pwrite" else 1, failing(code)).attach((call,))
        with pytest.raises(zerotrain.CheckpointError) as caught:
            save_and_be_told(engine)
        setattr(os, call, original)
        if not asynchronous:
            step(engine)
        losses.append(engine.metrics["loss"])
        losses.append(step(engine))
        assert folders.good_tags(tmp_path)[0][0] == "step-00000001"
        engine.save_checkpoint()
        engine.close()
        return losses, str(caught.value)

    def undisturbed(rank: int) -> list[float]:
        engine = engine_at(tmp_path / "none")
        return [step(engine) for _ in range(4)]

    results = run(2, body)
    assert results[0][0] == results[1][0] == run(2, undisturbed)[0]
    for _, text in results:
        assert os.strerror(code) in text
    assert folders.good_tags(tmp_path)[0] == ["step-00000004", "step-00000001"]
    assert not [path.name for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_a_file_size_limit_is_a_failing_write(tmp_path: Path) -> None:
    import resource

    def body(rank: int) -> None:
        engine = engine_at(tmp_path)
        step(engine)
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (64, before[1]))
        with pytest.raises(zerotrain.CheckpointError):
            engine.save_checkpoint()
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        engine.save_checkpoint()

    run(2, body)


FULL_DISK = """
import errno, sys, torch, zerotrain
sys.path.insert(0, {tests!r})
from models import Regression, vector_batch
engine = zerotrain.initialize(model=Regression(width=256, depth=8), config={{
    "optimizer": {{"type": "AdamW", "params": {{"lr": 1e-3}}}}, "zero_optimization": {{"stage": 3}},
    "checkpoint": {{"directory": {root!r}}}}})[0]
failed = 0
for _ in range(4):
    engine.backward(engine(*vector_batch(engine.global_steps, 2, width=256)))
    engine.step()
    try:
        engine.save_checkpoint()
    except zerotrain.CheckpointError as error:
        assert "No space left" in str(error), error
        failed += 1
from zerotrain.checkpoint import folders
from pathlib import Path
assert failed == 2, failed
assert folders.good_tags(Path({root!r}))[0] == ["step-00000002", "step-00000001"]
print("held")
"""


def test_a_full_disk(tmp_path: Path) -> None:
    """A file system with room for two checkpoints of about 6 MB, in a namespace of its own."""
    mount = f'mount -t tmpfs -o size=14m none {tmp_path} && exec {sys.executable} -c "$SCRIPT"'
    text = FULL_DISK.format(tests=str(Path(__file__).parent), root=str(tmp_path / "out"))
    command = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", mount]
    done = subprocess.run(command, env={**os.environ, "SCRIPT": text}, capture_output=True, text=True, timeout=60)
    if "unshare" in done.stderr or "mount:" in done.stderr:
        pytest.skip("no namespaces of one's own here; the failing calls above stand in")
    assert done.returncode == 0, done.stderr
    assert "held" in done.stdout
