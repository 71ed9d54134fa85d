"""Writes files that a flag names, and checks before minutes of work whether they can be written."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click

from potluck import checked, durable
from potluck.errors import UserError

_CANNOT_REPLACE = {errno.EBUSY, errno.EACCES, errno.EPERM, errno.EROFS}
"""The errors of a file whose folder takes no other file in its place, such as one mounted into a container."""


@contextmanager
def written(path: Path | str) -> Iterator[None]:
    """Inside, an OSError about the file becomes an error for the user."""
    try:
        yield
    except OSError as error:
        folder = Path(path).parent
        why = (error.strerror or error) if folder.is_dir() else f"there is no folder {folder}"
        raise UserError(f"cannot write {path}: {why}", hint="choose another file") from error


def check_writable(*paths: Path | str | None) -> None:
    """Leaves no new file behind. None and - (standard output) can always be written."""
    for path in paths:
        if path is None or str(path) == "-" or _is_device(Path(path)):
            continue
        new = not Path(path).exists()
        with written(path):
            open(path, "ab").close()
            if new:  # several ranks may check the same file at the same time
                Path(path).resolve().unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Replace a file. A link, such as /dev/stdout, stays one: the file that it leads to is written in place."""
    with written(path):
        if not path.is_symlink() and not _is_device(path):
            try:
                return durable.replace(path, text, what="result")
            except OSError as error:
                if error.errno not in _CANNOT_REPLACE or not path.is_file():
                    raise
        path.write_text(text, encoding="utf-8")


def _is_device(path: Path) -> bool:
    """Whether it is something like /dev/stdout or a pipe, which a rename would replace."""
    return path.exists() and not path.is_file() and not path.is_dir()


def write_json(path: Path | str, table: object) -> None:
    """Write to a file, or for - to standard output."""
    text = checked.to_json(table)
    if str(path) == "-":
        click.echo(text)
    else:
        write_text(Path(path), text + "\n")
