"""Owns the folders of checkpoints: each is complete or absent, verified, and old ones are removed.


A checkpoint is written into a folder `.tmp-…` beside the others and appears by a rename when all of it is on the
disk. A newer one of the same step waits as `step-00000100.new` until the old one is removed.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import shutil
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import safetensors
from msgspec import Struct

from potluck import checked
from potluck.bounds import Named, Natural, Short
from potluck.durable import sync
from potluck.errors import PotluckError, RunFolderError, UserError
from potluck.failpoints import hit

FORMAT = 2
MANIFEST = "manifest.json"

_NAME = re.compile(r"step-(\d{8,})(\.new)?")
_TEMPORARY = ".tmp-"

# One checkpoint at a time: tidying up for one must not take away the temporary folder of another.
_WRITING = threading.Lock()


class FileEntry(Struct, frozen=True, kw_only=True):
    """The manifest's entry for a file."""

    bytes: Natural
    sha256: Short


class FolderManifest(Struct, frozen=True, kw_only=True):
    """What every manifest says, whatever the checkpoint is of."""

    format: Natural
    step: Natural
    files: Named[FileEntry]


M = TypeVar("M", bound=FolderManifest)


class DamagedError(Exception):
    """A short reason why a checkpoint cannot be used."""


def publish(folder: Path, step: int, write: Callable[[Path], FolderManifest], *, keep: int) -> Path:
    """Make the checkpoint of `step`, then remove all but the last `keep`.

    `write` gets the temporary folder, writes synced files into it and returns the manifest.
    """
    if keep < 1:
        raise ValueError(f"keep is {keep}, at least the newest checkpoint is kept")
    temporary = folder / f"{_TEMPORARY}{step:08d}-{os.getpid()}"
    final = folder / f"step-{step:08d}"
    try:
        with _WRITING:
            folder.mkdir(parents=True, exist_ok=True)
            sync(folder.parent)
            _tidy(folder, after_a_crash=True)
            hit("checkpoint.before-folder")
            temporary.mkdir()
            _write_manifest(temporary, write(temporary))
            hit("checkpoint.before-rename")
            os.rename(temporary, final.with_suffix(".new") if final.exists() else final)
            hit("checkpoint.renamed")
            sync(folder)
            hit("checkpoint.published")
            _tidy(folder)
            _prune(folder, step, keep)
            return final
    except PotluckError:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    except (OSError, safetensors.SafetensorError) as error:
        shutil.rmtree(temporary, ignore_errors=True)  # a full disk needs the room
        raise _cannot_write(folder, step, error) from error


def tidy(folder: Path) -> None:
    """After a crash, before anything is read: clean up after an interrupted save or removal."""
    with _WRITING, contextlib.suppress(OSError):  # a folder that cannot be written to can still be read
        _tidy(folder, after_a_crash=True)


def newest_first(folder: Path) -> list[Path]:
    """The folders of checkpoints. Of two with the same step, the `.new` one is newer."""
    found = []
    try:
        for path in folder.iterdir():
            match = _NAME.fullmatch(path.name)
            if match and path.is_dir():
                found.append((int(match[1]), bool(match[2]), path))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise RunFolderError(
            f"cannot read {folder}: {error.strerror}", hint="check that it is a folder that you may read"
        ) from error
    return [path for _, _, path in sorted(found, reverse=True)]


def read_manifest(path: Path) -> FolderManifest:
    """What every manifest says, of this checkpoint; its files are not looked at."""
    return checked.decode((path / MANIFEST).read_bytes(), FolderManifest)


def verified(path: Path, kind: type[M]) -> M:
    """The manifest of a checkpoint, after all its files were verified. Raises DamagedError."""
    try:
        text = (path / MANIFEST).read_bytes()
        table = json.loads(text)
        if not isinstance(table, dict) or _rendered(table) != text:
            raise DamagedError(f"{MANIFEST} is damaged")
        if table.get("format", FORMAT) != FORMAT:
            raise DamagedError(f"its format is {table['format']}, this version of potluck reads {FORMAT}")
        manifest = checked.as_kind(table, kind)
        for name, expected in manifest.files.items():
            if not name or Path(name).name != name:
                raise DamagedError(f"{MANIFEST} names {name!r}, which is no file of the checkpoint")
            size = (path / name).stat().st_size
            if size != expected.bytes:
                raise DamagedError(f"{name} has {size:,} bytes instead of {expected.bytes:,}")
            if _sha256(path / name) != expected.sha256:
                raise DamagedError(f"{name} is damaged (its hash differs)")
    except FileNotFoundError as error:
        raise DamagedError(f"{Path(error.filename).name} is missing") from error
    except OSError as error:
        raise DamagedError(f"{error.filename} cannot be read: {error.strerror}") from error
    except msgspec.ValidationError as error:
        # A hash shows damage. A manifest that was written by hand can have the right hash and lack the rest.
        raise DamagedError(f"{MANIFEST} lacks what a checkpoint has: {error}") from error
    except (ValueError, RecursionError) as error:
        raise DamagedError(f"{MANIFEST} is damaged ({type(error).__name__})") from error
    return manifest


def fingerprint(file: Path) -> FileEntry:
    return FileEntry(bytes=file.stat().st_size, sha256=_sha256(file))


def _write_manifest(folder: Path, manifest: FolderManifest) -> None:
    hit("checkpoint.before-manifest")
    text, kind = _rendered(msgspec.to_builtins(manifest)), type(manifest)
    try:
        checked.as_kind(json.loads(text), kind)
    except msgspec.ValidationError as error:
        # Better no checkpoint, and the run told so, than one that is acknowledged and can never be read.
        raise UserError(
            f"a checkpoint cannot hold a value of this run: {error}",
            hint="the name after $ says which: a setting of run.steps(), run.state, or a state_dict()",
            step=manifest.step,
        ) from error
    (folder / MANIFEST).write_bytes(text)
    hit("checkpoint.manifest-written")
    sync(folder / MANIFEST)
    hit("checkpoint.manifest-synced")
    sync(folder)


def _rendered(manifest: Mapping[str, Any]) -> bytes:
    """The manifest's file: its own hash is that of the same text without the hash."""
    body = {key: value for key, value in manifest.items() if key != "sha256"}
    digest = hashlib.sha256(json.dumps(body, indent=1).encode()).hexdigest()
    return json.dumps({**body, "sha256": digest}, indent=1).encode()


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _tidy(folder: Path, *, after_a_crash: bool = False) -> None:
    """Remove the leftovers of an interrupted save, and rename a `.new` folder into place.

    A `.new` folder left by a crash must be intact, because the run may have continued from the one that it
    replaces.
    """
    for spare in folder.glob("step-*.new"):
        if after_a_crash and spare.with_suffix("").exists() and not _is_whole(spare):
            _remove(spare)
            continue
        hit("checkpoint.before-replace")
        if spare.with_suffix("").exists():
            _remove(spare.with_suffix(""))
        hit("checkpoint.replacing")
        os.rename(spare, spare.with_suffix(""))
        hit("checkpoint.replaced")
    for left_over in folder.glob(f"{_TEMPORARY}*"):
        shutil.rmtree(left_over)
    sync(folder)


def _is_whole(path: Path) -> bool:
    try:
        verified(path, FolderManifest)
    except DamagedError:
        return False
    return True


def _prune(folder: Path, step: int, keep: int) -> None:
    """Keep the last `keep`.

    Those of later steps are removed too: a run at `step` found them damaged when it was resumed.
    """
    paths = newest_first(folder)
    later = [path for path in paths if int(path.name.removeprefix("step-")) > step]
    for path in (*later, *paths[len(later) + keep :]):
        _remove(path)


def _remove(path: Path) -> None:
    """Remove a checkpoint. It disappears for every reader at once, whatever happens while its files are removed."""
    hidden = path.with_name(f"{_TEMPORARY}gone-{path.name}")
    hit("checkpoint.before-remove")
    os.rename(path, hidden)
    hit("checkpoint.removing")
    shutil.rmtree(hidden)
    hit("checkpoint.removed")


def _cannot_write(folder: Path, step: int, error: Exception) -> RunFolderError:
    reason, code = str(error), None
    if isinstance(error, OSError) and error.strerror:
        reason, code = error.strerror, error.errno
    elif match := re.search(r"([^:]+) \(os error (\d+)\)", reason):  # how the safetensors library says it
        reason, code = match[1].strip(), int(match[2])
    return RunFolderError(
        f"cannot write a checkpoint into {folder}: {reason}",
        hint="free some space on the disk; the checkpoints before this one are intact"
        if code in (errno.ENOSPC, errno.EDQUOT)
        else "check that you may write there and that the disk works",
        step=step,
    )
