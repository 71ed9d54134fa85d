"""Replaces small files and syncs them to disk, so that a crash leaves the old or the new file, complete."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from potluck.failpoints import hit


def replace(path: Path, text: str, *, what: str, private: bool = False) -> None:
    """Replace a file atomically: a reader at any moment, also after a crash, finds the old text or the new.

    `private`: no other user can read it at any moment. If it raises OSError, the old file is unchanged.
    """
    temporary = path.with_name(f".{path.name}.new")
    hit("file.before-write", what)
    # What a process that was killed left under this name may be open to others, or a link.
    with contextlib.suppress(FileNotFoundError):
        os.unlink(temporary)
    # The mode is given at creation: a chmod afterwards would leave a moment to read a secret.
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if private else 0o666)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            hit("file.written", what)
            _flush(file.fileno())
        hit("file.synced", what)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    hit("file.renamed", what)
    sync(path.parent)
    hit("file.after-write", what)


def sync(path: Path) -> None:
    """Wait until a file's bytes, or a folder's entries, are on the disk."""
    if os.name == "nt" and path.is_dir():
        return  # Windows opens no folders
    descriptor = os.open(path, os.O_RDWR if os.name == "nt" else os.O_RDONLY)
    try:
        _flush(descriptor)
    finally:
        os.close(descriptor)


def _flush(descriptor: int) -> None:
    try:
        import fcntl

        # On macOS fsync() stops at the drive's own cache.
        fcntl.fcntl(descriptor, fcntl.F_FULLFSYNC)  # type: ignore[attr-defined, unused-ignore]
    except (ImportError, AttributeError, OSError):
        os.fsync(descriptor)
