"""Tracks running rigs: a private folder with a lock and a small JSON file for each, and whether its processes are
alive.

Each user of a rig holds a shared lock on its lock file; the kernel releases it when the process ends, however it
ends. The rig's supervisor takes the rig down once it gets the lock exclusively.
"""

from __future__ import annotations

import contextlib
import os
import stat
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
from msgspec import Struct

from potluck import checked
from potluck.bounds import Named, Natural, Text
from potluck.errors import UserError
from potluck.lab import cgroup

if sys.platform != "win32":  # where the lab's namespaces are not possible, it must still be possible to say so
    import fcntl

START_LOCK = "start.lock"
START_WAIT_S = 60.0
POLL_S = 0.02


class Process(Struct, frozen=True, kw_only=True):
    """A process that cannot be mistaken for a later one with the same id."""

    pid: Natural
    started: Natural
    """In the kernel's ticks since the boot."""
    boot: Text
    space: Text
    """The PID namespace of the id, because another container's processes are not visible."""

    @property
    def lives(self) -> bool:
        return self == identify(self.pid)

    @property
    def gone(self) -> bool:
        """Whether it has certainly ended. A process that is not visible from here may still run."""
        return self.boot != _boot() or (self.space == _space() and not self.lives)


class State(Struct, frozen=True, kw_only=True):
    """A rig that is up or starting."""

    supervisor: Process
    holders: Named[Process] = {}
    """By machine: the process that keeps the machine's namespace."""
    cgroup: Text | None = None
    """The folder of its machines' cgroups."""
    limited: Named[Text] = {}
    """By machine: its own cgroup, where it has one."""
    ready: bool = False
    """Whether all of it is up."""


def identify(pid: int) -> Process | None:
    """The process with this id, or None if none runs."""
    try:
        # The command's name may hold anything, even brackets: what follows the last one is regular.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    if fields[0] in ("Z", "X"):
        return None
    return Process(pid=pid, started=int(fields[19]), boot=_boot(), space=_space())


def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _space() -> str:
    return os.readlink("/proc/self/ns/pid")


def folder() -> Path:
    """The user's own folder for it, made when missing."""
    user = os.geteuid()
    path = _base(user) / f"potluck-lab-{user}"
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != user or found.st_mode & 0o077:
        raise UserError(
            f"{path} is not a folder of yours alone, so the lab does not use it",
            hint="remove it, or set XDG_RUNTIME_DIR to a folder of your own",
        )
    return path


def _base(user: int) -> Path:
    for candidate in (os.environ.get("XDG_RUNTIME_DIR"), f"/run/user/{user}"):
        # Under sudo the variable may still name the other user's folder.
        if candidate and os.path.isdir(candidate) and os.stat(candidate).st_uid == user:
            return Path(candidate)
    return Path(tempfile.gettempdir())


def lock_path(folder: Path, rig: str) -> Path:
    return folder / f"{rig}.lock"


def state_path(folder: Path, rig: str) -> Path:
    return folder / f"{rig}.json"


def read(folder: Path, rig: str) -> State | None:
    try:
        return checked.decode(state_path(folder, rig).read_bytes(), State)
    except (OSError, msgspec.DecodeError):
        return None


def write(folder: Path, rig: str, state: State) -> None:
    path = state_path(folder, rig)
    new = path.with_suffix(".new")
    new.write_bytes(msgspec.json.encode(state))
    new.replace(path)


def remove(folder: Path, rig: str) -> None:
    """Remove a rig's files, the lock last."""
    path = state_path(folder, rig)
    for file in (path.with_suffix(".new"), path, lock_path(folder, rig)):
        file.unlink(missing_ok=True)


def open_lock(path: Path, *, create: bool) -> int:
    """A lock file that commands do not inherit."""
    return os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | (os.O_CREAT if create else 0), 0o600)


def try_lock(file: int, *, alone: bool) -> bool:
    """Take the lock, exclusively or shared, if it is free now."""
    try:
        fcntl.flock(file, (fcntl.LOCK_EX if alone else fcntl.LOCK_SH) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def unlock(file: int) -> None:
    fcntl.flock(file, fcntl.LOCK_UN)


def is_at(file: int, path: Path) -> bool:
    """Whether an open file is still the one at this path."""
    try:
        return os.path.samestat(os.fstat(file), os.stat(path))
    except FileNotFoundError:
        return False


@contextlib.contextmanager
def starting(folder: Path) -> Iterator[None]:
    """Inside, no other process brings a rig up or removes leftovers."""
    file = open_lock(folder / START_LOCK, create=True)
    try:
        deadline = time.monotonic() + START_WAIT_S
        while not try_lock(file, alone=True):
            if time.monotonic() > deadline:
                raise UserError(
                    f"another lab command holds {folder / START_LOCK} for more than {START_WAIT_S:.0f} s",
                    hint="look whether one is stopped (Ctrl-Z), and end it",
                )
            time.sleep(POLL_S)
        yield
    finally:
        os.close(file)


def sweep(folder: Path) -> list[str]:
    """Remove only the leftovers of dead supervisors. Call it inside `starting`. Returns the rigs' names."""
    removed = []
    for rig in sorted({path.stem for path in folder.iterdir() if path.name != START_LOCK}):
        state = read(folder, rig)
        if state is None:
            # Whoever is bringing it up holds `starting`, as we do now: it never came to be.
            if _unused(lock_path(folder, rig)):
                remove(folder, rig)
                removed.append(rig)
        elif state.supervisor.gone:
            if state.cgroup is not None:
                cgroup.remove(Path(state.cgroup))
            remove(folder, rig)
            removed.append(rig)
    return removed


def _unused(lock: Path) -> bool:
    try:
        file = open_lock(lock, create=False)
    except FileNotFoundError:
        return True
    try:
        return try_lock(file, alone=True)
    finally:
        os.close(file)
