"""Folders of checkpoints: a checkpoint is there whole or not at all, whatever ends the job at whatever moment.

latest                    one line: the tag of the last complete checkpoint; replaced atomically
step-00001200/            complete: it got this name after every byte of it was on disk
.step-00001300.part-1f3a  being written, locked by its writer; what a dead writer left is removed by the next save
.step-00001200.old-77c0   a complete one that is being replaced by another of the same tag
.step-00000900.gone-9b1e  being removed
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from zerotrain.checkpoint import manifest as manifests
from zerotrain.checkpoint.format import MANIFEST
from zerotrain.checkpoint.manifest import Manifest
from zerotrain.errors import CheckpointError

LATEST = "latest"
LOCK = ".zerotrain-lock"
PROBE = ".probe-"
PROBE_SECONDS = 600.0  # after which a file of `saver.probe` is one that a dead job left
_TAG = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+=-]{0,199}")
_STEP = re.compile(r"step-(\d+)")
_NODE = re.compile(r"(?P<tag>.+)\.node-\d{5}-of-\d{5}")
_TEMPORARY = re.compile(rf"\.{LATEST}\.[0-9a-f]{{8}}")
_HIDDEN = re.compile(r"\.(?P<tag>.+)\.(?P<kind>part|old|gone)-[0-9a-f]+")


def tag_of(step: int) -> str:
    """The tag of a checkpoint after `step` optimizer steps, where none is given."""
    return f"step-{step:08d}"


def node_folder(tag: str, part: int, parts: int) -> str:
    """The folder that one of `parts` nodes writes of checkpoint `tag`, where they do not share a file system."""
    return tag if parts == 1 else f"{tag}.node-{part:05d}-of-{parts:05d}"


def check_tag(tag: str) -> str:
    """`tag`; CheckpointError for one that is no plain name of a folder."""
    if not isinstance(tag, str) or not _TAG.fullmatch(tag) or tag == LATEST or _NODE.fullmatch(tag):
        raise CheckpointError(
            f"{tag!r} cannot be the tag of a checkpoint: letters, digits and '.', '_', '+', '=', '-', beginning with a "
            f"letter or a digit, and not '{LATEST}'"
        )
    return tag


# -- writing ----------------------------------------------------------------------------------------------------------


@dataclass
class Partial:
    """A checkpoint that is being written, in `path`. Its lock shows that the writer lives."""

    root: Path
    name: str
    """The name it will have."""
    path: Path
    lock: int

    def publish(self, tag: str | None = None) -> Path:
        """Give it its name, in the place of what had it before, and have `latest` name `tag`, if given.

        An OSError on the way puts everything back as it was; after that, nothing fails any more.
        """
        final, old = self.root / self.name, _hidden(self.root, self.name, "old")
        sync(self.path)
        replaced = final.exists()
        if replaced:
            final.rename(old)
        try:
            self.path.rename(final)
            try:
                sync(self.root)
                if tag is not None:
                    point_latest(self.root, tag)
            except OSError:
                final.rename(self.path)
                raise
        except OSError:
            if replaced:
                old.rename(final)
            raise
        with contextlib.suppress(OSError):  # what is left is removed by the next save
            self._unlock()
            (final / LOCK).unlink()
            if replaced:
                shutil.rmtree(old)
        return final

    def discard(self) -> None:
        """Remove it: the save failed."""
        self._unlock()
        shutil.rmtree(self.path, ignore_errors=True)

    def _unlock(self) -> None:
        handle, self.lock = self.lock, -1
        if handle >= 0:
            os.close(handle)


def begin(root: Path, name: str) -> Partial:
    """An empty, locked folder under `root` that will be called `name`.

    CheckpointError where something has that name that is no checkpoint, and would be lost.
    """
    final = root / name
    if final.is_symlink() or (final.exists() and not (final / MANIFEST).is_file() and not _is_empty(final)):
        raise CheckpointError(f"{final} is there and is not a checkpoint; choose another tag, or remove it")
    path = _hidden(root, name, "part")
    path.mkdir(parents=True)
    try:
        lock = os.open(path / LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        path.rmdir()
        raise
    with contextlib.suppress(OSError):  # a file system without locks
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return Partial(root, name, path, lock)


def point_latest(root: Path, tag: str) -> None:
    """Have `latest` name `tag`."""
    write_file(root / LATEST, f"{tag}\n".encode())
    with contextlib.suppress(OSError):  # it does name the tag now, and its contents are on disk
        sync(root)


def write_file(path: Path, data: bytes) -> None:
    """Write a small file so that it is there with all its contents or not at all. The caller flushes the folder."""
    part = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with part.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def sync(folder: Path) -> None:
    """Flush a folder's entries to disk."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def recover(root: Path) -> None:
    """Undo half of a replacement: a checkpoint that a dead job had moved aside gets its name back."""
    for path, tag, kind in _leftovers(root):
        if kind == "old" and not (root / tag).exists():
            path.rename(root / tag)


def clean(root: Path) -> None:
    """Put right what a dead job left: recover, and remove parts that nobody writes any more. What resists stays."""
    recover(root)
    for path in (*root.glob(f".{LATEST}.*"), *root.glob(f"{PROBE}*"), *root.glob(f"*/{LOCK}")):
        with contextlib.suppress(OSError):
            if _is_left(path):
                path.unlink()
    for path, _, kind in _leftovers(root):
        if kind != "part" or not _locked(path):
            shutil.rmtree(path, ignore_errors=True)


def _is_empty(path: Path) -> bool:
    return path.is_dir() and next(path.iterdir(), None) is None


def _is_left(path: Path) -> bool:
    """Whether a small file is a dead job's: an old probe, the lock of a checkpoint that is complete, a temporary name."""
    if path.name.startswith(PROBE):
        return path.stat().st_mtime < time.time() - PROBE_SECONDS
    if path.name == LOCK:
        return (path.parent / MANIFEST).is_file() and not path.parent.name.startswith(".") and not _locked(path.parent)
    return _TEMPORARY.fullmatch(path.name) is not None


def prune(root: Path, keep_last: int | None, keep_every: int | None, newest: str) -> None:
    """Remove old checkpoints with default tags, but the `keep_last` newest, those whose step is a multiple of
    `keep_every`, the one just written, and the one that `latest` names. No-op unless `keep_last` is given."""
    if keep_last is None:
        return
    steps = {tag: int(match[1]) for tag in tags(root) if (match := _STEP.fullmatch(tag))}
    written = {tag: (folders_of(root, tag)[0] / MANIFEST).stat().st_mtime_ns for tag in steps}
    by_age = sorted(steps, key=lambda tag: (written[tag], steps[tag]), reverse=True)
    kept = {newest, latest(root), *by_age[:keep_last]}
    kept |= {tag for tag in steps if keep_every and steps[tag] % keep_every == 0}
    for tag in by_age:
        if tag not in kept:
            for folder in folders_of(root, tag):
                gone = _hidden(root, folder.name, "gone")
                folder.rename(gone)
                shutil.rmtree(gone, ignore_errors=True)


def _hidden(root: Path, tag: str, kind: str) -> Path:
    return root / f".{tag}.{kind}-{secrets.token_hex(4)}"


def _leftovers(root: Path) -> Iterator[tuple[Path, str, str]]:
    for path in sorted(root.iterdir()) if root.is_dir() else ():
        match = _HIDDEN.fullmatch(path.name)
        if match and path.is_dir() and not path.is_symlink():
            yield path, match["tag"], match["kind"]


def _locked(path: Path) -> bool:
    """Whether a living process writes into `path`."""
    try:
        handle = os.open(path / LOCK, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(handle)
    return False


# -- finding ----------------------------------------------------------------------------------------------------------


def tags(root: Path) -> list[str]:
    """The tags of the complete checkpoints under `root`, in the order of their names."""
    names = sorted(path.name for path in root.iterdir()) if root.is_dir() else []
    names = [name for name in names if _TAG.fullmatch(name) and (root / name / MANIFEST).is_file()]
    return list(dict.fromkeys(match["tag"] if (match := _NODE.fullmatch(name)) else name for name in names))


def folders_of(root: Path, tag: str) -> list[Path]:
    """Where checkpoint `tag` lies: one folder, or those that nodes wrote and that are here; CheckpointError for none."""
    whole = root / check_tag(tag)
    nodes = [path for path in root.glob(f"{tag}.node-*") if _NODE.fullmatch(path.name) and path.is_dir()]
    if whole.is_dir() and nodes and manifests.load(whole).state != manifests.load(sorted(nodes)[0]).state:
        raise CheckpointError(
            f"{whole} and {nodes[0]} are there, of different saves: remove the older, or load it by its path"
        )
    if whole.is_dir():
        return [whole]
    if not nodes:
        known = ", ".join(tags(root)) if root.is_dir() else ""
        raise CheckpointError(
            f"there is no checkpoint '{tag}' in {root}" + (f"; there are: {known}" if known else ", nor any other")
        )
    return sorted(nodes)


def latest(root: Path) -> str | None:
    """The tag that `latest` names, or None."""
    try:
        with (root / LATEST).open("rb") as file:
            tag = file.read(256).decode().strip()
        return check_tag(tag)
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{root / LATEST} cannot be read: {error}") from error


def check(folder: Path) -> Manifest:
    """The manifest of a checkpoint whose files are all there with the right sizes; CheckpointError otherwise."""
    manifest = manifests.load(folder)
    for name, about in manifest.files.items():
        try:
            size = (folder / name).stat().st_size
        except OSError as error:
            raise CheckpointError(f"{folder / name} is part of the checkpoint and cannot be read: {error}") from error
        if size != about["bytes"]:
            raise CheckpointError(f"{folder / name} has {size} bytes and should have {about['bytes']}: it is damaged")
    return manifest


def good_tags(root: Path) -> tuple[list[str], list[str]]:
    """The tags to resume from, best first, and what is wrong with the others.

    The one that `latest` names comes first, then the others from the highest step down.
    """
    reasons: list[str] = []
    try:
        first = latest(root)
    except CheckpointError as error:
        first, reasons = None, [str(error)]
    steps: dict[str, int] = {}
    for tag in dict.fromkeys([*([first] if first else []), *tags(root)]):
        try:
            steps[tag] = min(check(folder).step for folder in folders_of(root, tag))
        except CheckpointError as error:
            reasons.append(str(error))
    return sorted(steps, key=lambda tag: (tag == first, steps[tag], tag), reverse=True), reasons
