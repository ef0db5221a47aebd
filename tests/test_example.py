"""The example as people run it: through `accelerate launch`, two ranks, a folder of text."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LIMIT = 90  # seconds; a run takes about ten


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of text with a file that is none."""
    folder = tmp_path_factory.mktemp("text")
    line = "the quick brown fox jumps over the lazy dog\n"
    (folder / "deep").mkdir()
    (folder / "a.txt").write_text(line * 100)
    (folder / "deep" / "b.md").write_text(line.upper() * 20)
    (folder / "c.bin").write_bytes(b"\0\1\2" * 1000)
    return folder


def launch(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the example on two ranks; its processes are ended whatever happens."""
    command = [sys.executable, "-m", "accelerate.commands.launch"]
    command += ["--config_file", "configs/launch/two_ranks.yaml", "examples/pretrain.py", *arguments]
    sizes = ["--layers", "2", "--heads", "2", "--hidden", "32", "--seq-len", "32"]
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    process = subprocess.Popen(
        [*command, *sizes],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, error = process.communicate(timeout=LIMIT)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    return subprocess.CompletedProcess(command, process.returncode, out, error)


def loss_after(label: str, output: str) -> float:
    found = re.search(rf"^{label} ([\d.]+)", output, re.MULTILINE)
    assert found, output
    return float(found[1])


@pytest.mark.parametrize(("config", "model"), [("zero2", "gpt"), ("zero3", "llama")])
def test_example_on_two_ranks(text: Path, config: str, model: str) -> None:
    if model == "llama":
        pytest.importorskip("transformers")
    run = launch("--config", f"configs/{config}.json", "--data", str(text), "--steps", "4", "--model", model)
    assert run.returncode == 0, run.stderr
    assert len(re.findall("^training loss", run.stdout, re.MULTILINE)) == 1, "rank 0 alone reports"
    assert f"stage {config[-1]}, world size 2, " in run.stdout
    first = loss_after("training loss", run.stdout)
    assert 5.3 < first < 5.8, "ln 256 is 5.55"
    assert loss_after("held-out loss", run.stdout) < first
    assert re.search(r"^sample:\ndef .", run.stdout, re.MULTILINE)
    bar = run.stderr.split("\r")[-1]
    assert re.search(r"4/4 .*loss \d.*lr .*grad norm .*tokens/s, [\d,]+ MiB", bar), bar


def test_example_goes_on_where_it_was(text: Path, tmp_path: Path) -> None:
    """Six steps at once, and six in two runs, of which the second resumes: the same losses at the end."""
    job = json.loads((ROOT / "configs" / "zero3-resume.json").read_text())
    ends = []
    for name, lengths in (("whole", (6,)), ("cut", (3, 6))):
        job["checkpoint"]["directory"] = str(tmp_path / name)
        (tmp_path / f"{name}.json").write_text(json.dumps(job))
        for steps in lengths:
            run = launch("--config", str(tmp_path / f"{name}.json"), "--data", str(text), "--steps", str(steps))
            assert run.returncode == 0, run.stderr
        ends.append(re.findall(r"-> ([\d.]+) in 6 steps|^held-out loss ([\d.]+)", run.stdout, re.MULTILINE))
        assert (tmp_path / name / "step-00000006" / "manifest.json").is_file()
    assert ends[0] == ends[1]
    assert f"resumed from {tmp_path / 'cut' / 'step-00000003'}" in run.stderr


def refusal(*arguments: str, path: Path = ROOT) -> str:
    """What the example says where it refuses to start, on one rank."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(dict.fromkeys([str(path), str(ROOT)])), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "examples/pretrain.py", "--config", "configs/zero2.json", *arguments]
    run = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=LIMIT)
    assert run.returncode == 1, run.stderr
    assert "Traceback" not in run.stderr
    return run.stderr


def test_a_folder_without_text_is_refused(tmp_path: Path) -> None:
    assert "no text found" in refusal("--data", str(tmp_path))


def test_llama_without_transformers_names_the_extra(text: Path, tmp_path: Path) -> None:
    (tmp_path / "transformers.py").write_text("raise ImportError('not installed')\n")
    assert "[hf]" in refusal("--data", str(text), "--model", "llama", path=tmp_path)
