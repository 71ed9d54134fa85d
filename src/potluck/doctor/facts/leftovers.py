"""Finds leftovers of earlier runs on this machine: orphaned processes and checkpoints. Ends and removes nothing."""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from potluck.errors import RunFolderError
from potluck.spec.facts import Checkpoint, Orphan

MOST_BYTES_READ = 10**9
"""Checkpoints larger than this are compared by the sizes of their files only."""
_MOST_CHECKPOINTS = 2
_VERBS = {"train", "host", "join"}
_PROGRAM = re.compile(r"potluck(\.exe|\.\w+\.\w+)?")
"""The command, or one of its modules (python -m), such as that which waits for a sweep's next trial."""
_LAUNCHERS = re.compile(r"torchrun|torch\.distributed\.(run|launch)|torch/distributed/(run|launch)")
_INIT = 1


def orphans() -> tuple[Orphan, ...]:
    """Trainings whose starter is gone."""
    found = []
    for process in psutil.process_iter(["pid", "ppid", "cmdline", "create_time"]):
        info = process.info
        orphan = orphan_of(info["pid"], info["ppid"], info["cmdline"] or [], info["create_time"] or 0.0)
        if orphan is not None:
            found.append(orphan)
    return tuple(found)


def orphan_of(pid: int, parent: int, command: Sequence[str], created: float) -> Orphan | None:
    verb = potluck_verb(command)
    if verb is None and not _LAUNCHERS.search(" ".join(command[:4])):
        return None
    why, surely = "", False
    if "--parent" in command[:-1]:
        number = command[list(command).index("--parent") + 1]
        if number.isdigit() and not psutil.pid_exists(int(number)):
            why, surely = f"it was started by process {number}, which is gone", True
    elif parent == _INIT:
        why = "its parent is process 1: what started it has ended, or it is a service"
    if not why:
        return None
    # Its arguments may hold a token.
    shown = f"potluck {verb}" if verb else " ".join(command[:3])
    return Orphan(pid=pid, command=shown, age_s=max(0.0, time.time() - created), why=why, surely=surely)


def potluck_verb(command: Sequence[str]) -> str | None:
    for before, word in itertools.pairwise(command):
        if word in _VERBS and _PROGRAM.fullmatch(Path(before).name):
            return word
    return None


def checkpoints(run: Path) -> tuple[Checkpoint, ...]:
    """The newest checkpoints of a run folder, and whether they are intact."""
    from potluck.train.checkpoint_folder import DamagedError, FolderManifest, newest_first, verified

    try:
        folders = newest_first(run / "checkpoints")[:_MOST_CHECKPOINTS]
    except RunFolderError as error:
        return (Checkpoint(path=str(run / "checkpoints"), whole=False, why=error.what),)
    found = []
    for folder in folders:
        try:
            if _size(folder) > MOST_BYTES_READ:
                _compare_sizes(folder)
            else:
                verified(folder, FolderManifest)
            found.append(Checkpoint(path=str(folder), whole=True))
        except (DamagedError, OSError, ValueError, LookupError, TypeError) as error:
            found.append(Checkpoint(path=str(folder), whole=False, why=str(error)))
    return tuple(found)


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


def _compare_sizes(folder: Path) -> None:
    from potluck.train.checkpoint_folder import DamagedError, read_manifest

    for name, expected in read_manifest(folder).files.items():
        size = (folder / name).stat().st_size
        if size != expected.bytes:
            raise DamagedError(f"{name} has {size:,} bytes instead of {expected.bytes:,}")
