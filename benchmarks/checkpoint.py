"""Compare saving and loading of the same states on the same disk, in one run: zerotrain, torch.distributed.checkpoint
(of FSDP2), and torch.save of each rank's own tensors.

python benchmarks/checkpoint.py                  300 M parameters with AdamW, two ranks, and loading on three
python benchmarks/checkpoint.py --preset tiny    a trial
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import measure
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from engines import fused_adamw
from model import PRESETS, build
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

import zerotrain

RESHARDED = 3  # ranks that load what two have saved


@dataclass(frozen=True)
class Way:
    """One way to save and load. `save` returns when everything is on disk, unless `finish` waits for that.

    `copying` tells how much of the last save's time went into copying the states.
    """

    save: Callable[[Path], Any]
    load: Callable[[Path], Any] | None = None
    finish: Callable[[], Any] = lambda: None
    copying: Callable[[], float] = lambda: 0.0


def zerotrain_ways(preset: str, stage: int) -> tuple[dict[str, Way], Callable[[], float]]:
    def engine(asynchronous: bool) -> zerotrain.Engine:
        model = build("gpt", preset)
        config = {
            "zero_optimization": {"stage": stage},
            "checkpoint": {"async": asynchronous, "shared_filesystem": True},
            "steps_per_print": None,
        }
        return zerotrain.initialize(model=model, optimizer=fused_adamw(model), config=config)[0]

    plain, background = engine(False), engine(True)
    step(plain, preset)
    step(background, preset)
    saver, spent = background._keeper.saver, [0.0]
    copied = saver._copied

    def timed_copy(runs: Any) -> Any:
        begun = time.perf_counter()
        copies = copied(runs)
        spent.append(time.perf_counter() - begun)
        return copies

    saver._copied = timed_copy  # type: ignore[method-assign]
    ways = {
        "zerotrain": Way(plain.save_checkpoint, plain.load_checkpoint),
        "zerotrain, async": Way(background.save_checkpoint, None, saver.wait, lambda: spent[-1]),
    }
    return ways, lambda: step(plain, preset)


def step(engine: zerotrain.Engine, preset: str) -> float:
    """One training step of 256 tokens per rank; seconds."""
    batch = measure.batches(engine.rank, PRESETS[preset].vocab, 256, 1)[0]
    dist.barrier()
    begun = time.perf_counter()
    engine.backward(engine(*batch))
    engine.step()
    return time.perf_counter() - begun


def fsdp2(preset: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    model: Any = build("gpt", preset)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = fused_adamw(model)
    tokens, targets = measure.batches(dist.get_rank(), PRESETS[preset].vocab, 256, 1)[0]
    model(tokens, targets).backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def peer_ways(preset: str) -> dict[str, Way]:
    model, optimizer = fsdp2(preset)

    def states() -> dict[str, Any]:
        weights, moments = get_state_dict(model, optimizer)
        return {"model": weights, "optim": moments}

    def dcp_load(folder: Path) -> None:
        found = states()
        dcp.load(found, checkpoint_id=str(folder))
        set_state_dict(model, optimizer, model_state_dict=found["model"], optim_state_dict=found["optim"])

    def own() -> list[torch.Tensor]:
        tensors: list[Any] = [*model.parameters()]
        tensors += [v for state in optimizer.state.values() for v in state.values() if v.ndim]
        return [t.to_local().detach() for t in tensors]

    def torch_save(folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        path = folder / f"{dist.get_rank()}.pt"
        torch.save(own(), path)
        with path.open("rb+") as file:
            os.fsync(file.fileno())

    def torch_load(folder: Path) -> None:
        found = torch.load(folder / f"{dist.get_rank()}.pt", weights_only=True)
        for mine, value in zip(own(), found, strict=True):
            mine.copy_(value)

    return {
        "torch.distributed.checkpoint": Way(lambda f: dcp.save(states(), checkpoint_id=str(f)), dcp_load),
        "torch.save, then fsync": Way(torch_save, torch_load),
    }


def raw_write(folder: Path, size: int) -> None:
    """What the disk does: the same bytes from one buffer, flushed."""
    folder.mkdir(exist_ok=True)
    block = memoryview(bytearray(os.urandom(8 << 20)))
    with (folder / f"{dist.get_rank()}.raw").open("wb", buffering=0) as file:
        for _ in range(-(-size // len(block))):
            file.write(block)
        os.fsync(file.fileno())


def timed(call: Callable[[], Any]) -> float:
    dist.barrier()
    begun = time.perf_counter()
    call()
    dist.barrier()
    return time.perf_counter() - begun


def peak_of(call: Callable[[], Any]) -> float:
    """MiB that the process needed above what it had before."""
    Path("/proc/self/clear_refs").write_text("5")
    before = measure._status("VmRSS")
    call()
    return (measure._status("VmHWM") - before) / 2**20


def two_ranks(rank: int, options: argparse.Namespace, root: Path) -> dict[str, Any]:
    ours, train = zerotrain_ways(options.preset, options.stage)
    ways = {**ours, **peer_ways(options.preset)}
    parameters = sum(p.numel() for p in build("gpt", options.preset).parameters())
    size = parameters * 12 // 2
    ways["raw write of the same bytes"] = Way(lambda folder: raw_write(folder, size))
    found: dict[str, dict[str, list[float]]] = {
        name: {"save": [], "stall": [], "beside": [], "load": [], "peak": []} for name in ways
    }
    for turn in range(1 + options.rounds):
        order = [*ways][turn % len(ways) :] + [*ways][: turn % len(ways)]  # nobody always comes after the same one
        for name, way in ((name, ways[name]) for name in order):
            folder, stall, peak = root / name.replace(" ", "-"), 0.0, 0.0
            if rank == 0:
                shutil.rmtree(folder, ignore_errors=True)
            os.sync()

            def save(way: Way = way, folder: Path = folder) -> None:
                nonlocal stall, peak
                begun = time.perf_counter()
                peak = peak_of(lambda: way.save(folder))
                stall = time.perf_counter() - begun
                way.finish()

            seconds = timed(save)
            loading = timed(lambda way=way, folder=folder: way.load(folder)) if way.load else 0.0
            if turn:
                beside = stall - way.copying()
                measured = {"save": seconds, "stall": stall, "beside": beside, "load": loading, "peak": peak}
                for key, value in measured.items():
                    found[name][key].append(value)
            keep = turn == options.rounds and name in ("zerotrain", "torch.distributed.checkpoint")
            if rank == 0 and not keep:
                shutil.rmtree(folder, ignore_errors=True)
    return {"ways": found, "step": statistics.median(train() for _ in range(5)), "parameters": parameters}


def three_ranks(rank: int, options: argparse.Namespace, root: Path) -> dict[str, list[float]]:
    """Loading on another number of ranks, in turns."""
    ours, _ = zerotrain_ways(options.preset, options.stage)
    ways = {**ours, **peer_ways(options.preset)}
    names = ("zerotrain", "torch.distributed.checkpoint")
    found: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(options.rounds):
        for name in names:
            folder, load = root / name.replace(" ", "-"), ways[name].load
            assert load is not None
            found[name].append(timed(lambda load=load, folder=folder: load(folder)))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=PRESETS, default="300M")
    parser.add_argument("--stage", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="where to write (default: the folder of temporary files)")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        root = Path(folder)
        ranks = measure.run(2, two_ranks, options, root)
        resharded = measure.run(RESHARDED, three_ranks, options, root)[0]
    rows = []
    for name, found in ranks[0]["ways"].items():
        median = {key: statistics.median(values) for key, values in found.items()}
        rows.append({
            "way": name,
            "save_s": median["save"],
            "load_s": median["load"],
            "resharded_load_s": statistics.median(resharded[name]) if name in resharded else 0.0,
            "stall_s": max(statistics.median(rank["ways"][name]["stall"]) for rank in ranks),
            "beside_copy_s": max(statistics.median(rank["ways"][name]["beside"]) for rank in ranks),
            "peak_mib": max(statistics.median(rank["ways"][name]["peak"]) for rank in ranks),
        })  # fmt: skip
    report = {"parameters": ranks[0]["parameters"], "step_s": ranks[0]["step"], "stage": options.stage, "rows": rows}
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "checkpoint.json").write_text(json.dumps(report, indent=2))
    print(f"{report['parameters'] / 1e6:.0f} M parameters, AdamW, 12 bytes each; a step takes {report['step_s']:.2f} s")
    print(
        "| way | save | training stalls | extra memory of a rank | load | load on three ranks |\n|---|---|---|---|---|---|"
    )
    beside = next(row["beside_copy_s"] for row in rows if row["way"] == "zerotrain, async")
    for row in rows:
        cells = [f"{row['save_s']:.2f} s", f"{row['stall_s']:.2f} s", f"{row['peak_mib']:.0f} MiB"]
        cells += [f"{row[key]:.2f} s" if row[key] else "" for key in ("load_s", "resharded_load_s")]
        print(f"| {row['way']} | {' | '.join(cells)} |")
    print(
        f"beside the copy, an asynchronous save takes {beside:.3f} s of training: {beside / report['step_s']:.1%} of a step"
    )


if __name__ == "__main__":
    main()
