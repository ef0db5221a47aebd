"""Module buffers (running statistics, counters): exact in their own dtypes, and in step across ranks."""

from __future__ import annotations

import torch
from torch import nn

from zerotrain.comm import Channel
from zerotrain.zero.report import union


class ModuleBuffers:
    """The buffers of `model`. After a step, those that changed on any rank take rank 0's bytes on every rank.

    Buffers that never change (masks, rotary tables) cost nothing after the start.
    """

    def __init__(self, model: nn.Module, world: Channel) -> None:
        self._model = model
        self._world = world
        self._seen: dict[str, tuple[int, int]] = {}
        self._share(list(self._named()))

    def changed(self) -> int:
        """How many buffers were written or replaced on this rank since the last look."""
        return len(self._changed())

    def synchronise(self) -> None:
        """Give every rank what rank 0 holds in the buffers that any rank changed. Every rank must call this."""
        named = self._named()
        mine = self._changed()
        flags = torch.tensor([name in mine for name in named], dtype=torch.uint8, device=self._world.device)
        shared = union(self._world, flags, "changed buffers")
        self._share([name for name, flag in zip(named, shared.tolist(), strict=True) if flag])

    def accept(self) -> None:
        """Take the present values, equal on all ranks, as the ones that were shared last."""
        self._share([])

    def _share(self, names: list[str]) -> None:
        named = self._named()
        for name in names:
            buffer = named[name].detach()
            whole = buffer.contiguous()
            self._world.broadcast(whole, f"buffer '{name}'")
            if whole.data_ptr() != buffer.data_ptr():
                buffer.copy_(whole)
        self._seen = {name: (id(buffer), buffer._version) for name, buffer in named.items()}

    def _changed(self) -> set[str]:
        """Native kernels write running statistics without a trace, but their modules count as well: one that changed any
        buffer is taken to have changed all of its own."""
        named = self._named()
        written = {name for name, b in named.items() if self._seen.get(name) != (id(b), b._version)}
        owners = {name.rpartition(".")[0] for name in written}
        return {name for name in named if name.rpartition(".")[0] in owners}

    def _named(self) -> dict[str, torch.Tensor]:
        return dict(self._model.named_buffers())
