"""The repository as people find it: its layout, the commands of the README, the files in configs/."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

import zerotrain
from zerotrain.config import load_config

ROOT = Path(__file__).parent.parent
LAUNCH = sorted((ROOT / "configs" / "launch").glob("*.yaml"))
JOBS = sorted((ROOT / "configs").glob("*.json"))
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("configs/*.md"), *ROOT.glob("docs/*.md")])
PROCESSES = {"one_rank": 1, "two_ranks": 2, "four_ranks": 4, "eight_gpus": 8, "two_nodes": 16}
FIRST = (
    "pip install -e . -c constraints.txt && accelerate launch --config_file configs/launch/two_ranks.yaml "
    "examples/pretrain.py --config configs/zero2.json"
)
SECOND = "pip install -e '.[test]' -c constraints.txt && pytest"


def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


@pytest.mark.parametrize(
    "path",
    [
        ".ci/run",
        ".gitignore",
        "CHANGELOG.md",
        "CONTRIBUTING.md",
        "LICENSE",
        "README.md",
        "configs/README.md",
        "constraints.txt",
        "docs/design.md",
        "docs/launching.md",
        "examples/gpt.py",
        "examples/pretrain.py",
        "pyproject.toml",
        "setup.cfg",
        "zerotrain/py.typed",
    ],
)
def test_what_people_expect_is_there(path: str) -> None:
    assert (ROOT / path).is_file()


@pytest.mark.parametrize("command", [FIRST, SECOND])
def test_the_readme_has_the_two_commands_on_lines_of_their_own(command: str) -> None:
    assert command in (ROOT / "README.md").read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text(encoding="utf-8"))
    assert [target for target in targets if not (page.parent / target).exists()] == []


def test_what_the_readme_names_exists() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    files = re.findall(r"`((?:configs|docs|examples|tests|benchmarks|zerotrain)/[\w./-]+)`", text)
    assert files
    assert [name for name in files if not (ROOT / name).exists()] == []
    tests = set(re.findall(r"test_\w+(?=\.py)", text)) | set(re.findall(r"`(test_\w+)`", text))
    assert sorted(name for name in tests if not (ROOT / "tests" / f"{name}.py").exists()) == []


def test_ci_runs_the_readmes_commands() -> None:
    script = ROOT / ".ci" / "run"
    text = script.read_text(encoding="utf-8")
    assert script.stat().st_mode & 0o111
    for pattern in re.findall(r"grep -m 1 -F (?:'([^']+)'|\"([^\"]+)\") README\.md", text):
        assert FIRST.startswith("".join(pattern)) or "".join(pattern) == SECOND


def test_every_dependency_is_pinned() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = {line.partition("==")[0].replace("_", "-") for line in lines if "==" in line}
    extras = project()["optional-dependencies"]
    wanted = [*project()["dependencies"], *extras["test"], *extras["hf"], *extras["bench"]]
    assert {re.split(r"[<>=!~\[; ]", requirement)[0] for requirement in wanted} <= pins
    assert "torch==2.13.0" in lines


def test_the_version_is_told_once() -> None:
    assert "version" in project()["dynamic"]
    assert re.fullmatch(r"\d+\.\d+\.\d+", zerotrain.__version__)


def test_public_names_exist() -> None:
    assert all(hasattr(zerotrain, name) for name in zerotrain.__all__)
    assert zerotrain.engine.initialize is zerotrain.initialize


@pytest.mark.parametrize("path", JOBS, ids=lambda path: path.stem)
def test_jobs_load_for_some_number_of_ranks(path: Path) -> None:
    assert isinstance(json.loads(path.read_text(encoding="utf-8")), dict)
    batch = load_config(path).batch(4)
    assert batch.train == batch.micro * batch.accumulation * 4


@pytest.mark.parametrize("path", LAUNCH, ids=lambda path: path.stem)
def test_launch_files_start_the_processes_they_name(path: Path) -> None:
    """As accelerate reads them; MULTI_GPU is the type that starts N processes on any machine."""
    from accelerate.commands.config.config_args import load_config_from_file

    config = load_config_from_file(str(path))
    assert config.num_processes == PROCESSES[path.stem]
    assert config.distributed_type == "MULTI_GPU"
    assert config.num_machines == (2 if path.stem == "two_nodes" else 1)
    assert not config.use_cpu
    assert config.mixed_precision == "no", "precision belongs to the job file"


@pytest.mark.parametrize("path", [p for p in LAUNCH if p.stem.endswith(("rank", "ranks"))], ids=lambda path: path.stem)
def test_launch_files_start_that_many_ranks_here(path: Path, tmp_path: Path) -> None:
    """Also without a GPU, where another type starts one rank and says nothing. The script spares itself torch."""
    script = tmp_path / "script.py"
    script.write_text(
        "import os, pathlib\n"
        "pathlib.Path(__file__).with_name('rank' + os.environ['RANK']).write_text(os.environ['WORLD_SIZE'])\n"
    )
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(path), str(script)]
    run = subprocess.run(command, env=dict(os.environ), capture_output=True, text=True, timeout=90)
    assert run.returncode == 0, run.stderr
    started = {found.name: found.read_text() for found in tmp_path.glob("rank*")}
    assert started == {f"rank{rank}": str(PROCESSES[path.stem]) for rank in range(PROCESSES[path.stem])}


def test_every_launch_file_is_known() -> None:
    assert {path.stem for path in LAUNCH} == set(PROCESSES)
