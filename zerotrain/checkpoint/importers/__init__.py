"""Checkpoints of other origins, each as a `Source`.

Each module of `IMPORTERS` has `opens(path) -> bool`, a cheap look at names, and `open_source(path) -> Source`, which
raises CheckpointError. No importer runs what a file's pickles tell it to.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from zerotrain.checkpoint.importers import dcp, deepspeed, torch_files
from zerotrain.checkpoint.source import Source


class Importer(Protocol):
    """A module that reads checkpoints of one origin."""

    def opens(self, path: Path) -> bool:
        """Whether `path` looks like one of them."""

    def open_source(self, path: Path) -> Source:
        """The checkpoint at `path`; CheckpointError where it is damaged or refused."""


IMPORTERS: tuple[Importer, ...] = (deepspeed, dcp, torch_files)
"""The importers, in the order to ask them."""
