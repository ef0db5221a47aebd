"""The watch: turns a hang of ranks that disagree into an error on each of them that names what differs.

Every rank keeps, per channel, the sequence of collectives that it entered. A thread publishes that about once a
second through the job's key-value store, with what the rank is waiting for, if it is. A rank that has waited longer than
`timeout` compares: when the others are provably not going to join (they entered another collective in its place, they
wait for one that this rank has not entered, or they have finished), it breaks its groups and raises. A rank that is
merely slow (computing, loading data, saving) is waited for as long as the process group allows.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, ClassVar
from weakref import WeakValueDictionary

import torch.distributed as dist

from zerotrain.comm import torch_compat
from zerotrain.errors import RankMismatchError

if TYPE_CHECKING:
    from zerotrain.comm.channel import Channel

PUBLISHED_HISTORY = 48
Peer = dict[str, Any]


@dataclass(frozen=True)
class Wait:
    """What a rank waits for: collective `sequence` of `channel` of the engine `job`, since `started` (monotonic seconds)."""

    job: str
    channel: str
    sequence: int
    text: str
    started: float

    @property
    def seconds(self) -> float:
        """How long it has lasted."""
        return time.monotonic() - self.started


class Watch:
    """One per engine. `job` names the engine in the store; `timeout` is in seconds."""

    _current: ClassVar[Wait | None] = None
    """What this process waits for, in whichever of its engines."""
    _engines: ClassVar[WeakValueDictionary[str, Watch]] = WeakValueDictionary()

    def __init__(self, job: str, timeout: float) -> None:
        self.timeout = timeout
        self.progress = "set-up"
        self.job = job
        self._channels: dict[str, Channel] = {}
        self._finished = False
        self._verdict: str | None = None
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._store: Any = None
        self._published = ""
        Watch._engines[job] = self

    def register(self, channel: Channel) -> None:
        """Watch `channel` as well."""
        self._channels[channel.name] = channel

    def start(self) -> None:
        """Start watching, if there is anybody to watch."""
        if dist.is_initialized() and dist.get_world_size() > 1 and dist.get_backend() != "fake":
            self._store = torch_compat.default_store()
            threading.Thread(target=self._run, name="zerotrain-watch", daemon=True).start()

    def stop(self) -> None:
        """Say that this rank will enter no further collective of this engine, and end the thread."""
        self._finished = True
        if not self._stop.is_set():
            self._publish()
        self._stop.set()

    @contextmanager
    def waiting(self, channel: Channel, entry: tuple[int, str]) -> Iterator[None]:
        """Around a blocking wait for `entry` of `channel`. Raises RankMismatchError where the wait is in vain."""
        if self._verdict is not None:
            raise RankMismatchError(self._verdict)
        wait = Wait(self.job, channel.name, *entry, started=time.monotonic())
        Watch._current = wait
        try:
            yield
        except RuntimeError as error:
            text = self._explain(wait, error)
            self._break_up()
            raise RankMismatchError(text) from error
        finally:
            Watch._current = None

    @property
    def broken(self) -> bool:
        """Whether the groups were broken up: no collective of this engine can succeed any more."""
        return self._verdict is not None

    def _break_up(self) -> None:
        for channel in self._channels.values():
            channel.abort()

    # -- the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        interval = min(1.0, self.timeout / 5)
        while not self._stop.wait(interval):
            if not self._publish():
                return
            wait = Watch._current
            if wait is None or wait.job != self.job or wait.seconds < self.timeout:
                continue
            verdict = self._judge(wait, self._peers())
            if verdict is not None and Watch._current is wait:
                self._verdict = verdict
                self._publish()
                self._break_up()

    def _state(self) -> Peer:
        wait = Watch._current
        return {
            "progress": self.progress,
            "finished": self._finished,
            "verdict": self._verdict,
            "blocked": None if wait is None else {**asdict(wait), "seconds": round(wait.seconds, 1)},
            "channels": {name: list(c.history)[-PUBLISHED_HISTORY:] for name, c in self._channels.items()},
        }

    def _publish(self) -> bool:
        """Tell the others where this rank is. False once the store cannot be reached any more."""
        with self._lock:
            text = json.dumps(self._state())
            if self._store is not None and text != self._published:
                self._with_store(lambda store: store.set(f"{self.job}/{dist.get_rank()}", text))
                self._published = text
            return self._store is not None

    def _peers(self) -> dict[int, Peer]:
        """What the other ranks last published."""
        peers: dict[int, Peer] = {}

        def read(store: Any) -> None:
            for rank in range(dist.get_world_size()):
                key = f"{self.job}/{rank}"
                if rank != dist.get_rank() and store.check([key]):
                    peers[rank] = json.loads(store.get(key))

        self._with_store(read)
        return peers

    def _with_store(self, use: Callable[[Any], Any]) -> None:
        """A store that fails once (its host died, the process group was destroyed) is not asked again."""
        try:
            if self._store is not None:
                use(self._store)
        except (RuntimeError, ValueError):
            self._store = None

    def _judge(self, wait: Wait, peers: dict[int, Peer]) -> str | None:
        """Why `wait` can never end, or None while it still may."""
        for rank, peer in peers.items():
            if peer["verdict"]:
                return str(peer["verdict"])
            theirs = dict(peer["channels"].get(wait.channel, ()))
            if rank not in self._channels[wait.channel].ranks:
                continue
            if theirs.get(wait.sequence, wait.text) != wait.text:
                instead = theirs[wait.sequence]
                return self._describe(rank, peer, wait.text, f"rank {rank} entered '{instead}' in its place")
            if wait.sequence in theirs or (theirs and min(theirs) > wait.sequence):
                continue  # entered there too: the transport is slow, or a third rank is to blame
            if peer["finished"]:
                return self._describe(rank, peer, wait.text, f"rank {rank} has finished")
            if self._stuck_elsewhere(peer["blocked"]):
                other = peer["blocked"]["text"]
                return self._describe(rank, peer, wait.text, f"rank {rank} waits for '{other}' instead")
        return None

    def _stuck_elsewhere(self, blocked: Peer | None) -> bool:
        """The peer has waited past the timeout for a collective, of any engine, that this rank has not entered."""
        if blocked is None or blocked["seconds"] < self.timeout:
            return False
        engine = Watch._engines.get(blocked["job"])
        channel = engine._channels.get(blocked["channel"]) if engine is not None else None
        return channel is None or channel.sequence < blocked["sequence"]

    def _describe(self, rank: int, peer: Peer, text: str, fact: str) -> str:
        me = dist.get_rank()
        return (
            f"the ranks disagree: rank {me} is in {self.progress} and waits for '{text}', but {fact} "
            f"(rank {rank} is in {peer['progress']}). Every rank must make the same calls in the same order, "
            "on the same modules"
        )

    # -- after a failed wait ------------------------------------------------------------------------------------------

    def _explain(self, wait: Wait, error: RuntimeError) -> str:
        """The text of the error for a wait that failed: what this rank saw, and what the others last said."""
        if self._verdict is None:
            self._publish()
            deadline = time.monotonic() + min(2.5, self.timeout)
            peers = self._peers()
            while self._verdict is None and self._store is not None and time.monotonic() < deadline:
                self._verdict = self._judge(wait, peers)
                time.sleep(0.1)
                peers = self._peers() or peers
            if self._verdict is None:
                seen = "; ".join(f"rank {rank} was last seen in {peer['progress']}" for rank, peer in peers.items())
                self._verdict = (
                    f"'{wait.text}' failed in {self.progress} on rank {dist.get_rank()}: another rank has ended or lost "
                    f"its connection. {seen or 'No other rank has reported'}. Look for the first error in its output"
                )
            self._publish()
        return f"{self._verdict} [{str(error).splitlines()[0][:160]}]"
