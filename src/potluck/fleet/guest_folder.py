"""The temporary folder of a guest's script; removes those that killed guests have left."""

from __future__ import annotations

import os
import platform
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

PREFIX = "potluck-guest-"


@contextmanager
def guest_folder() -> Iterator[Path]:
    """A new folder, which is removed afterwards, or by a later guest of this user if this process is killed.

    Its process holds a lock on it. Numbers of processes would not do, because containers may share a folder for
    temporary files. Nor would locks alone where machines share it: a lock may be known to its machine only.
    """
    prefix = f"{PREFIX}{re.sub(r'[^A-Za-z0-9]', '_', platform.node())}-"
    _remove_left(prefix)
    made = Path(tempfile.mkdtemp(prefix=f".{prefix}"))
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, made, ignore_errors=True)
        if sys.platform == "win32":
            yield made
            return
        stack.callback(os.close, _locked(made))
        # Only now: others remove a folder of this name that is not locked.
        folder = made.rename(made.with_name(made.name.removeprefix(".")))
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        yield folder


def _remove_left(prefix: str) -> None:
    if sys.platform == "win32":  # it locks no folders
        return
    for folder in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        with suppress(OSError), ExitStack() as stack:
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            stack.callback(os.close, descriptor)
            if os.fstat(descriptor).st_uid == os.geteuid():
                _lock(descriptor)  # an error if it is in use, or if nothing can be locked there
                shutil.rmtree(folder)


if sys.platform != "win32":
    import fcntl

    def _lock(descriptor: int) -> None:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def _locked(folder: Path) -> int:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        with suppress(OSError):  # the file system knows no locks
            _lock(descriptor)
        return descriptor
