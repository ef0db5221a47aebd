"""What is measured, and how: time in turns, bytes of the loopback interface, resident memory."""

from __future__ import annotations

import ctypes
import gc
import socket
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from engines import ENGINES, Batch, Options, Step
from model import build


def run(world: int, body: Callable[..., Any], *args: Any) -> list[Any]:
    """What `body(rank, *args)` returned on each of `world` forked ranks in a gloo group on loopback."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    results = mp.get_context("fork").SimpleQueue()
    context = mp.start_processes(
        _rank, (world, port, results, body, args), nprocs=world, join=False, start_method="fork"
    )
    found = []
    ended = False
    while not ended:  # read while waiting: a rank may block on a full pipe, and one that failed never writes
        ended = context.join(timeout=0.05)  # raises what a rank raised, and ends the others
        while not results.empty():
            found.append(results.get())
    return [value for _, value in sorted(found, key=lambda pair: pair[0])]


def _rank(rank: int, world: int, port: int, results: Any, body: Callable[..., Any], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, world, rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    results.put((rank, body(rank, *args)))
    dist.barrier()
    dist.destroy_process_group()


def batches(rank: int, vocab: int, tokens: int, count: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(100 + rank)
    text = torch.randint(0, vocab, (count, 1, tokens + 1), generator=generator)
    return [(piece[:, :-1], piece[:, 1:]) for piece in text]


def times(rank: int, names: Sequence[str], plan: dict[str, Any]) -> dict[str, Any]:
    """Seconds of every round, wire bytes of a step and the last loss, by engine; engines take turns in each round."""
    options = Options(plan["bf16"], plan["accumulation"])
    steps: dict[str, Step] = {}
    parameters, vocab = 0, 0
    for name in names:
        model: Any = build(plan["model"], plan["preset"])
        parameters, vocab = sum(p.numel() for p in model.parameters()), model.vocab
        steps[name] = ENGINES[name](model, options)
    data = batches(rank, vocab, plan["tokens"], 4 * options.accumulation)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    losses = dict.fromkeys(names, 0.0)
    for turn in range(plan["warmup"] + plan["rounds"]):
        first = turn % 4 * options.accumulation
        for name in names:
            dist.barrier()
            begun = time.perf_counter()
            losses[name] = steps[name](data[first : first + options.accumulation])
            dist.barrier()
            if turn >= plan["warmup"]:
                seconds[name].append(time.perf_counter() - begun)
    wire = {name: _wire_bytes(lambda step=steps[name]: step(data[: options.accumulation])) for name in names}
    return {"seconds": seconds, "losses": losses, "wire": wire, "parameters": parameters}


def _wire_bytes(step: Callable[[], Any]) -> float:
    """Bytes that all ranks together put on the loopback interface in a step, by the interface's own counter.

    The least of three readings: other programs' traffic is in the counter too, and can only add to it.
    """
    readings = []
    for _ in range(3):
        dist.barrier()
        time.sleep(0.1)
        before = _loopback()
        step()
        step()
        dist.barrier()
        time.sleep(0.1)
        readings.append((_loopback() - before) / 2)
    return min(readings)


def _loopback() -> int:
    for line in Path("/proc/net/dev").read_text().splitlines():
        if line.strip().startswith("lo:"):
            return int(line.split(":")[1].split()[0])
    return 0


def memory(rank: int, name: str, plan: dict[str, Any]) -> dict[str, float]:
    """Peak and steady resident bytes per parameter above the process's own, of an engine alone in its process."""
    options = Options(plan["bf16"], plan["accumulation"])
    _trim()
    base = _status("VmRSS")
    model: Any = build(plan["model"], plan["preset"])
    parameters, vocab = sum(p.numel() for p in model.parameters()), model.vocab
    step = ENGINES[name](model, options)
    del model
    data = batches(rank, vocab, plan["tokens"], options.accumulation)
    step(data)
    Path("/proc/self/clear_refs").write_text("5")
    step(data)
    step(data)
    peak = _status("VmHWM")
    _trim()
    steady = _status("VmRSS")
    return {"peak": (peak - base) / parameters, "steady": (steady - base) / parameters, "parameters": parameters}


def _trim() -> None:
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    return 0


def median_ratio(mine: Sequence[float], base: Sequence[float]) -> float:
    """The median over rounds of the ratio within a round, which slow drifts of the machine do not touch."""
    return statistics.median(a / b for a, b in zip(mine, base, strict=True))
