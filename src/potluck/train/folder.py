"""The run folder: the paths of a run's files, its lock, and how its manifest is written and read.

runs/<id>/manifest.json    the resolved config, versions and machines
          events.jsonl     every step and every notable event
          checkpoints/     the last two checkpoints
          keys.json        the run's keys (0600), so that the same token holds after a restart
          token            what guests type (0600)
          .lock            held by the process that trains here
"""

from __future__ import annotations

import errno
import os
import secrets
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from potluck import checked, durable
from potluck._version import __version__
from potluck.bounds import Named, Text
from potluck.errors import RunFolderError
from potluck.failpoints import hit
from potluck.spec.events import RunEnded, RunStarted, from_json
from potluck.spec.manifest import Manifest

MANIFEST = "manifest.json"
LOCK = ".lock"
_LOCKED_BYTE = 1 << 30
"""On Windows a locked range cannot be read, but the process number must be readable."""


@dataclass(frozen=True, slots=True)
class RunFolder:
    """One run's folder."""

    path: Path

    @property
    def id(self) -> str:
        return self.path.name

    @property
    def events(self) -> Path:
        return self.path / "events.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def keys(self) -> Path:
        return self.path / "keys.json"

    @property
    def token(self) -> Path:
        return self.path / "token"

    def has_anything(self) -> bool:
        """Whether something happened that a person may want to read, or to resume."""
        try:
            if self.checkpoints.exists() and any(self.checkpoints.iterdir()):
                return True
            with self.events.open("rb") as lines:
                return any(_tells(line) for line in lines)
        except OSError as error:
            return not isinstance(error, FileNotFoundError)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Inside, no other process may train in this folder. A killed process releases the lock."""
        with _locked(self.path / LOCK) as holder:
            if holder is not None:
                raise RunFolderError(
                    f"{self.path} is in use by process {holder or '?'}",
                    hint="that run has not ended: end it first (a second one would overwrite its checkpoints)",
                )
            yield

    def write_manifest(self, manifest: Manifest) -> None:
        text = checked.to_json(manifest, indent=2)
        try:
            durable.replace(self.path / MANIFEST, text + "\n", what="manifest")
        except OSError as error:
            raise _unwritable(self.path, error) from error

    def write_token(self, token: str) -> None:
        try:
            durable.replace(self.token, token + "\n", what="token", private=True)
        except OSError as error:
            raise _unwritable(self.path, error) from error

    def read_manifest(self) -> Manifest:
        path = self.path / MANIFEST
        try:
            return checked.decode(path.read_bytes(), Manifest)
        except FileNotFoundError as error:
            raise RunFolderError(
                f"{self.path} is not a run: it has no {MANIFEST}",
                hint="give the folder of a run, such as runs/20260102-030405-gpt",
            ) from error
        except OSError as error:
            raise RunFolderError(
                f"{path} cannot be read: {error.strerror or error}", hint="check its permissions"
            ) from error
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            theirs = _other_version(path) if isinstance(error, msgspec.ValidationError) else None
            if theirs is not None:
                raise RunFolderError(
                    f"{path} was made by Potluck {theirs}, and this is {__version__}: {error}",
                    hint=f"resume the run with Potluck {theirs} or a newer one, or start a new run",
                ) from None
            raise RunFolderError(
                f"{path} is damaged: {error}",
                hint="restore the file from a copy of the run folder, or start a new run",
            ) from None


def _tells(line: bytes) -> bool:
    """Whether a line of a log tells more than that a training began and ended."""
    with suppress(msgspec.DecodeError):
        return not isinstance(from_json(line), RunStarted | RunEnded)
    return True


def _other_version(path: Path) -> str | None:
    """The version of Potluck that wrote a manifest that this one cannot read, if it is another version."""
    with suppress(OSError, msgspec.DecodeError, RecursionError):
        theirs = checked.decode(path.read_bytes(), _Versions).versions.get("potluck", "")
        return theirs if theirs not in ("", __version__) else None
    return None


class _Versions(msgspec.Struct):
    versions: Named[Text]


def new_folder(runs: Path, what: str) -> RunFolder:
    """A new, empty run folder, named after the time and the script."""
    stem = time.strftime("%Y%m%d-%H%M%S") + "-" + "".join(c if c.isalnum() else "-" for c in what)[:30]
    try:
        runs.mkdir(parents=True, exist_ok=True)
        for name in [stem, *(f"{stem}-{secrets.token_hex(2)}" for _ in range(20))]:
            path = runs / name
            hit("run.before-folder")
            try:
                path.mkdir()
            except FileExistsError:
                continue
            (path / "checkpoints").mkdir()
            hit("run.after-folder")
            return RunFolder(path)
    except OSError as error:
        raise _unmakeable(runs, error) from error
    raise RunFolderError(f"could not find a free name for a run in {runs}")


def open_folder(path: Path) -> RunFolder:
    """The folder of an existing run; anything else is an error."""
    if not path.is_dir():
        raise RunFolderError(f"there is no folder {path}", hint="see your run folders with: ls runs")
    folder = RunFolder(path)
    folder.read_manifest()
    return folder


def find_run(run: str | None, runs: Path) -> Path:
    """The run's folder, by path or by its id inside `runs`; the newest run if `run` is None."""
    known = sorted(
        (p.parent for p in runs.glob("*/events.jsonl")), key=lambda p: (p / "events.jsonl").stat().st_mtime
    )
    if run is None:
        if not known:
            raise RunFolderError(f"there is no run in {runs}", hint="name a run folder: potluck report RUN")
        return known[-1]
    for folder in (Path(run), runs / run):
        if folder.is_dir():
            return folder
    newest = ", ".join(p.name for p in reversed(known[-3:]))
    raise RunFolderError(
        f"no run folder {run!r}, neither here nor in {runs}",
        hint=f"the newest runs: {newest}" if newest else "name the folder that a run printed at its end",
    )


@contextmanager
def _locked(file: Path) -> Iterator[str | None]:
    """Lock a file; yields None, or the number of the process that holds it, as text."""
    try:
        # Closed in programs that are started from here (O_CLOEXEC); a fork gives its copy back below.
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o644)
    except OSError as error:
        raise _unwritable(file.parent, error) from error
    forked = _CloseAfterFork(descriptor)
    try:
        if not _try_lock(descriptor):
            yield os.pread(descriptor, 20, 0).decode("ascii", "replace").strip() if hasattr(os, "pread") else ""
            return
        os.ftruncate(descriptor, 0)
        os.write(descriptor, str(os.getpid()).encode())
        yield None
    finally:
        forked.close()


def _try_lock(descriptor: int) -> bool:
    """Lock a file for as long as this descriptor is open; False: another process holds it.

    This is not lockf(), whose lock is lost as soon as this process closes any other descriptor of the file, as it
    does when it copies the run folder.
    """
    try:
        if sys.platform == "win32":
            import msvcrt

            os.lseek(descriptor, _LOCKED_BYTE, os.SEEK_SET)
            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
            os.lseek(descriptor, 0, os.SEEK_SET)
        else:
            import fcntl

            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        # Others mean that the file system knows no locks.
        return error.errno not in (errno.EACCES, errno.EAGAIN, errno.EDEADLK)
    return True


class _CloseAfterFork:
    """A descriptor that a forked child closes; otherwise the child would hold the lock after this process was
    killed."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor: int | None = descriptor
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self.close)

    def close(self) -> None:
        if self._descriptor is not None:
            with suppress(OSError):
                os.close(self._descriptor)
            self._descriptor = None


def _unmakeable(path: Path, error: OSError) -> RunFolderError:
    """Why a folder for runs cannot be made: what is missing or in its way."""
    above = next((p for p in (path, *path.parents) if p.exists()), path)
    if above == path and path.is_dir():
        return _unwritable(path, error)
    why = f"{above} is a file"
    if above.is_dir():
        why = f"there is no {above / path.relative_to(above).parts[0]}, and making it failed: {error.strerror}"
    return _unwritable(path, error, f"cannot make the folder {path}: {why}")


def _unwritable(path: Path, error: OSError, what: str = "") -> RunFolderError:
    what = what or f"cannot write to {path}: {error.strerror or error}"
    reason = {
        errno.ENOSPC: "free some space on the disk",
        errno.EDQUOT: "your quota on that disk is used up",
        errno.EROFS: "that disk is read-only",
    }.get(error.errno or 0, "check the path, and that you may write there")
    return RunFolderError(what, hint=f"{reason}; a new run can go elsewhere: --runs DIR or POTLUCK_RUNS")
