"""Compare training engines in one run: step time, bytes on the wire, resident memory and losses.

python benchmarks/compare.py                                  fp32, 33 M parameters, two ranks
python benchmarks/compare.py --dtype bf16 --accumulation 4
python benchmarks/compare.py --one-rank [--model small]
python benchmarks/compare.py --memory --preset 300M
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import platform
import statistics
from pathlib import Path
from typing import Any

import measure
import torch
from engines import ENGINES
from model import PRESETS

PEERS_OF_ONE = ["floor", "zero0", "zero3"]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=PRESETS, default="33M")
    parser.add_argument("--model", choices=["gpt", "small"], default="gpt")
    parser.add_argument("--tokens", type=int, default=256, help="per rank and micro batch")
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--engines", default="", help="comma-separated; default: all that are installed")
    parser.add_argument("--one-rank", action="store_true", help="one rank, against the plain torch loop")
    parser.add_argument("--memory", action="store_true", help="resident memory instead of time")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    return parser.parse_args()


def chosen(options: argparse.Namespace) -> list[str]:
    names = options.engines.split(",") if options.engines else PEERS_OF_ONE if options.one_rank else list(ENGINES)
    if importlib.util.find_spec("deepspeed") is None:
        left_out = [name for name in names if name.startswith("deepspeed")]
        if left_out:
            print(f"DeepSpeed is not installed; left out: {', '.join(left_out)}")
        names = [name for name in names if name not in left_out]
    return names


def import_everything(names: list[str]) -> None:
    """Import, before the fork, what engines use: neither their time nor their memory has imports in it.

    dynamo is what the first step of any torch optimizer imports.
    """
    modules = ["torch._dynamo", "torch.distributed.fsdp", "torch.distributed.optim", "torch.distributed.tensor"]
    for prefix, module in {"zero": "zerotrain", "deepspeed": "deepspeed"}.items():
        if any(name.startswith(prefix) for name in names):
            modules.append(module)
    for module in modules:
        importlib.import_module(module)


def time_rows(names: list[str], plan: dict[str, Any], world: int) -> list[dict[str, Any]]:
    ranks = measure.run(world, measure.times, names, plan)
    seconds, wire, parameters = ranks[0]["seconds"], ranks[0]["wire"], ranks[0]["parameters"]
    base = next((name for name in (["floor", "ddp"] if world == 1 else ["ddp"]) if name in names), names[0])
    rows = []
    for name in names:
        loss = statistics.fmean(rank["losses"][name] for rank in ranks)
        reference = statistics.fmean(rank["losses"][base] for rank in ranks)
        rows.append(
            {
                "engine": name,
                "median_ms": 1e3 * statistics.median(seconds[name]),
                "min_ms": 1e3 * min(seconds[name]),
                f"ratio_to_{base}": measure.median_ratio(seconds[name], seconds[base]),
                "wire_bytes_per_parameter": wire[name] / parameters,
                "loss": loss,
                "loss_difference": abs(loss - reference) / abs(reference),
                "parameters": parameters,
            }
        )
    # The floor's ranks do not exchange gradients, so on several ranks its loss is another.
    compared = [row for row in rows if world == 1 or row["engine"] != "floor"]
    worst = max(compared, key=lambda row: row["loss_difference"])
    print(f"largest relative difference to the loss of {base}: {worst['loss_difference']:.2g} ({worst['engine']})")
    return rows


def memory_rows(names: list[str], plan: dict[str, Any], world: int) -> list[dict[str, Any]]:
    rows = []
    for name in names:
        ranks = measure.run(world, measure.memory, name, plan)
        largest = {key: max(rank[key] for rank in ranks) for key in ranks[0]}
        rows.append({"engine": name, "peak_bytes_per_parameter": largest["peak"],
                     "steady_bytes_per_parameter": largest["steady"], "parameters": largest["parameters"]})  # fmt: skip
        print(f"  {name}: peak {largest['peak']:.2f}, steady {largest['steady']:.2f} bytes per parameter", flush=True)
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    keys = [key for key in rows[0] if key != "parameters"]
    lines = ["| " + " | ".join(keys) + " |", "|" + "---|" * len(keys)]
    for row in rows:
        cells = [f"{v:.3g}" if key == "loss_difference" else f"{v:.3f}" if isinstance(v, float) else str(v)
                 for key, v in ((key, row[key]) for key in keys)]  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    options = arguments()
    names, world = chosen(options), 1 if options.one_rank else 2
    import_everything(names)
    plan = {
        "model": options.model, "preset": options.preset, "tokens": options.tokens, "bf16": options.dtype == "bf16",
        "accumulation": options.accumulation, "rounds": options.rounds, "warmup": options.warmup,
    }  # fmt: skip
    rows = memory_rows(names, plan, world) if options.memory else time_rows(names, plan, world)
    machine = {"torch": torch.__version__, "cores": os.cpu_count(), "threads_per_rank": 1, "system": platform.machine()}
    kind = "memory" if options.memory else "time"
    model = f"gpt {options.preset}" if options.model == "gpt" else "small"
    text = (
        f"{kind}, {model} ({rows[0]['parameters']:,} parameters), "
        f"{options.dtype}, {world} rank(s), {options.tokens} tokens per rank, accumulation {options.accumulation}, "
        f"{options.rounds} rounds; {machine}\n\n{table(rows)}\n"
    )
    print(text)
    options.out.mkdir(parents=True, exist_ok=True)
    stem = f"{kind}-{options.model}-{options.preset}-{options.dtype}-acc{options.accumulation}-world{world}"
    (options.out / f"{stem}.md").write_text(text)
    (options.out / f"{stem}.json").write_text(
        json.dumps({"plan": plan, "world": world, "machine": machine, "rows": rows})
    )


if __name__ == "__main__":
    main()
