"""How a host's token reaches its guests: the printed line, a QR code, a file, a code in the local network."""

from __future__ import annotations

import stat
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import click

from potluck import durable
from potluck.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharing:
    """The ways that were asked for, beside the printed line."""

    token_file: Path | None = None


@contextmanager
def shared(token: str, sharing: Sharing, *, tell: bool, on_stderr: bool) -> Iterator[None]:
    """Inside, guests can get the token in these ways. `tell`: print the line to type, on stdout or stderr."""
    with ExitStack() as stack:
        if sharing.token_file is not None:
            stack.enter_context(_in_file(sharing.token_file, token))
        if tell:
            click.echo("On each machine that should help, type:\n", err=on_stderr)
            click.echo(f"  potluck join {token}\n", err=on_stderr)
        yield


@contextmanager
def _in_file(path: Path, token: str) -> Iterator[None]:
    """Inside, the file holds the token, readable only by this user. It appears whole, under its final name."""
    text = token + "\n"
    try:
        # A rename would replace a device such as /dev/stdout.
        if path.exists() and not stat.S_ISREG(path.lstat().st_mode):
            raise OSError("it exists and is not a regular file")
        durable.replace(path, text, what="token", private=True)
    except OSError as error:
        raise ConfigError(
            f"the token cannot be written to {path}: {error.strerror or error}",
            hint="--token-file takes a new file in a folder that exists and that the guests can read",
        ) from None
    try:
        yield
    finally:
        # Another run may have replaced it.
        with suppress(OSError, UnicodeDecodeError):
            if path.read_text(encoding="utf-8") == text:
                path.unlink()
