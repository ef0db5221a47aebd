"""Checkpoints of other origins, each as a `Source`."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from zerotrain.checkpoint.source import Source


class Importer(Protocol):
    """A module that reads one foreign format."""

    def opens(self, path: Path) -> bool:
        """Whether `path` looks like that format; cheap."""

    def open_source(self, path: Path) -> Source:
        """The tensors at `path`; CheckpointError where it is damaged."""


IMPORTERS: tuple[Importer, ...] = ()
