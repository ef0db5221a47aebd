"""Forked workers for distributed tests: a two-rank cell costs about a tenth of a second.

``run(world, body)`` forks ``world`` processes, gives each a gloo group on the loopback interface and returns what
``body(rank)`` returned on every rank, in rank order. The processes are forked from the test process, so ``body`` may
be any closure; they are always ended before ``run`` returns, and a cell that hangs is killed after ``timeout``
seconds with every rank's Python stack in the error.
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing as mp
import os
import pickle
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

TIMEOUT = 30.0
GRACE = 10.0  # seconds the other ranks may still take once one rank has failed
_FORK = mp.get_context("fork")


@dataclass
class Outcome:
    """How one rank ended: ``value``, or ``error`` (the exception's text, ``trace`` in full), or ``exitcode``."""

    rank: int
    value: Any = None
    error: str | None = None
    error_type: str = ""
    error_bases: tuple[str, ...] = ()
    trace: str = ""
    exitcode: int | None = None
    hung: bool = False
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        return self.error is None and not self.hung and self.exitcode == 0

    def describe(self) -> str:
        if self.ok:
            return f"rank {self.rank}: fine"
        if self.hung:
            return f"rank {self.rank}: killed after {self.seconds:.1f} s, it was at\n{self.trace}"
        if self.error is not None:
            return f"rank {self.rank}: {self.trace}"
        return f"rank {self.rank}: process ended with exit code {self.exitcode}"


class WorkersFailed(AssertionError):
    """At least one rank failed; the message holds every rank's traceback or stack."""


def run(
    world: int,
    body: Callable[[int], Any],
    *,
    timeout: float = TIMEOUT,
    group: bool = True,
) -> list[Any]:
    """What ``body(rank)`` returned on each of ``world`` ranks; raises WorkersFailed if one of them failed."""
    results = outcomes(world, body, timeout=timeout, group=group)
    if not all(outcome.ok for outcome in results):
        raise WorkersFailed("\n" + "\n".join(outcome.describe() for outcome in results))
    return [outcome.value for outcome in results]


def outcomes(
    world: int,
    body: Callable[[int], Any],
    *,
    timeout: float = TIMEOUT,
    group: bool = True,
) -> list[Outcome]:
    """As ``run``, but failures come back as outcomes. ``group=False``: environment set, no process group yet."""
    with _listener() as listener, tempfile.TemporaryDirectory() as folder:
        port = int(listener.getsockname()[1])
        if not group:  # the body makes the group itself, through the environment: it needs the port free
            listener.close()
        workers: list[Any] = []
        pipes: list[Connection] = []
        for rank in range(world):
            ours, theirs = _FORK.Pipe(duplex=False)
            place = _Place(rank, world, port, listener, Path(folder) / f"{rank}.stack", group)
            process = _FORK.Process(target=_worker, args=(place, body, theirs), daemon=True)
            process.start()
            theirs.close()
            workers.append(process)
            pipes.append(ours)
        listener.close()  # rank 0 alone holds it now: when rank 0 dies, the port is dead too
        try:
            return _collect(workers, pipes, Path(folder), timeout)
        finally:
            for process in workers:
                if process.is_alive():
                    process.kill()
                process.join()
            for pipe in pipes:
                pipe.close()


def free_port() -> int:
    """A loopback port that was free a moment ago."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


# ---------------------------------------------------------------------------------------------- the parent's side


@contextlib.contextmanager
def _listener() -> Iterator[socket.socket]:
    """An already listening socket for rank 0's store, so that no other process can take the port in between."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen(64)
        yield sock


def _collect(workers: list[Any], pipes: list[Connection], folder: Path, timeout: float) -> list[Outcome]:
    started = time.monotonic()
    deadline = started + timeout
    results: dict[int, Outcome] = {}
    open_pipes = {pipe: rank for rank, pipe in enumerate(pipes)}
    while open_pipes and (left := deadline - time.monotonic()) > 0:
        for ready in wait(list(open_pipes), timeout=left):
            rank = open_pipes.pop(ready)  # type: ignore[index]
            outcome = _receive(rank, ready, workers[rank])  # type: ignore[arg-type]
            outcome.seconds = time.monotonic() - started
            results[rank] = outcome
            if not outcome.ok:
                deadline = min(deadline, time.monotonic() + GRACE)
    for rank in open_pipes.values():
        trace = _stack_of(workers[rank], folder / f"{rank}.stack")
        results[rank] = Outcome(rank, hung=True, trace=trace, seconds=time.monotonic() - started)
    return [results[rank] for rank in range(len(workers))]


def _receive(rank: int, pipe: Connection, process: Any) -> Outcome:
    try:
        outcome: Outcome = pickle.loads(pipe.recv_bytes())
    except EOFError:  # the process died without a word: killed, or a hard exit
        process.join(5)
        return Outcome(rank, exitcode=process.exitcode)
    return outcome


def _stack_of(process: Any, path: Path) -> str:
    """The Python stacks of a stuck worker (faulthandler writes them on SIGUSR1)."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(process.pid, signal.SIGUSR1)
    for _ in range(20):
        time.sleep(0.05)
        if path.exists() and path.stat().st_size:
            break
    return path.read_text() if path.exists() else "(no stack)"


# ---------------------------------------------------------------------------------------------- the worker's side


@dataclass(frozen=True)
class _Place:
    rank: int
    world: int
    port: int
    listener: socket.socket
    stack: Path
    group: bool


def _worker(place: _Place, body: Callable[[int], Any], pipe: Connection) -> None:
    with place.stack.open("w") as stack:
        faulthandler.register(signal.SIGUSR1, file=stack, all_threads=True)
        outcome = Outcome(place.rank, exitcode=0)
        try:
            _enter(place)
            outcome.value = body(place.rank)
            # Pickled here, not by the pipe: torch would otherwise pass tensors by shared memory of a dying process.
            message = pickle.dumps(outcome)
        except BaseException as error:  # reported to the parent, whatever it is
            kinds = tuple(kind.__name__ for kind in type(error).__mro__)
            outcome = Outcome(
                place.rank, None, str(error), type(error).__name__, kinds, traceback.format_exc(), exitcode=0
            )
            message = pickle.dumps(outcome)
        pipe.send_bytes(message)
        sys.stdout.flush()
        sys.stderr.flush()
        with contextlib.suppress(BaseException):
            if dist.is_initialized():
                dist.destroy_process_group()
        os._exit(0)


def _enter(place: _Place) -> None:
    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(place.rank),
        LOCAL_RANK=str(place.rank),
        WORLD_SIZE=str(place.world),
        LOCAL_WORLD_SIZE=str(place.world),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(place.port),
        GLOO_SOCKET_IFNAME="lo",
    )
    if not place.group:
        return
    limit = timedelta(seconds=TIMEOUT)
    master = place.rank == 0
    listen_fd = place.listener.detach()
    if not master:
        os.close(listen_fd)
    store = dist.TCPStore(
        "127.0.0.1",
        place.port,
        place.world,
        is_master=master,
        timeout=limit,
        wait_for_workers=False,
        master_listen_fd=listen_fd if master else None,
    )
    dist.init_process_group("gloo", store=store, rank=place.rank, world_size=place.world, timeout=limit)
