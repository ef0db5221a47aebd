"""The comparison runs, and its engines compute the same thing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
ENGINES = ["floor", "ddp", "fsdp2_reshard", "zero2", "zero3"]


def test_compare_runs_and_losses_agree(tmp_path: Path) -> None:
    command = [sys.executable, "benchmarks/compare.py", "--preset", "tiny", "--tokens", "16", "--rounds", "2"]
    command += ["--engines", ",".join(ENGINES), "--out", str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    [result] = tmp_path.glob("*.json")
    rows = {row["engine"]: row for row in json.loads(result.read_text())["rows"]}
    assert list(rows) == ENGINES
    for name, row in rows.items():
        assert row["median_ms"] > 0
        if name != "floor":  # whose ranks go their own ways
            assert row["loss_difference"] < 1e-5, name
    assert rows["floor"]["wire_bytes_per_parameter"] < rows["zero2"]["wire_bytes_per_parameter"]


def test_checkpoint_runs_and_measures_every_way(tmp_path: Path) -> None:
    command = [sys.executable, "benchmarks/checkpoint.py", "--preset", "tiny", "--rounds", "1"]
    command += ["--folder", str(tmp_path), "--out", str(tmp_path / "out")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    rows = {row["way"]: row for row in json.loads((tmp_path / "out" / "checkpoint.json").read_text())["rows"]}
    assert {name for name, row in rows.items() if row["load_s"]} >= {"zerotrain", "torch.distributed.checkpoint"}
    assert all(row["save_s"] > 0 for row in rows.values())
    assert list(tmp_path.iterdir()) == [tmp_path / "out"], "what was written is removed"
