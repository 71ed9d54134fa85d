"""How a host's token reaches its guests: the printed line, a QR code, a file, a code in the local network."""

from __future__ import annotations

import io
import shlex
import stat
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from potluck import durable
from potluck.errors import ConfigError
from potluck.spec.events import RunNote, StrangerRefused
from potluck.wire.code import TRIES, Codes, CodeServer, need_libraries

if TYPE_CHECKING:
    from potluck.train.session import Session


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharing:
    """The ways that were asked for, beside the printed line."""

    token_file: Path | None = None
    lan: bool = False
    """Announce the run in the local network, and send the token to whoever knows a code."""
    qr: bool = False

    def check(self) -> None:
        """Raises before the run begins where a library is missing."""
        if self.lan:
            need_libraries("--lan")
        if self.qr:
            need_libraries("--qr", "segno")


@contextmanager
def shared(opened: Session, sharing: Sharing, view: str, *, tell: bool) -> Iterator[None]:
    """Inside, guests can get the token of this run in these ways. `tell`: print the line to type there."""
    token, on_stderr = opened.token, view == "json"
    assert token is not None
    with ExitStack() as stack:
        if sharing.token_file is not None:
            stack.enter_context(in_file(sharing.token_file, token))
        if tell:
            # With a file, the token stays out of a batch system's log.
            path = sharing.token_file
            way = token if path is None else shlex.join(["--token-file", str(path)])
            click.echo("On each machine that should help, type:\n", err=on_stderr)
            click.echo(f"  potluck join {way}\n", err=on_stderr)
            if sharing.qr:
                click.echo(qr_code(f"potluck join {token}", sys.stderr if on_stderr else sys.stdout), err=on_stderr)
        if sharing.lan:
            code = stack.enter_context(_by_code(opened, view))
            click.echo("or, in this network, type `potluck join` there and then this code:\n", err=on_stderr)
            click.echo(f"  {code}\n", err=on_stderr)
        yield


@contextmanager
def in_file(path: Path, token: str) -> Iterator[None]:
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


def qr_code(text: str, stream: object) -> str:
    """The text as a QR code: in half blocks, or in the terminal's colours where the stream has no UTF-8."""
    import segno

    from potluck.report.text import writes_utf8

    drawn = io.StringIO()
    segno.make(text, micro=False, error="l").terminal(drawn, compact=writes_utf8(stream), border=2)
    return drawn.getvalue()


@contextmanager
def _by_code(opened: Session, view: str) -> Iterator[str]:
    """Inside, the run is announced, and sends its token to who knows the code that this yields."""
    from potluck.wire.discovery import Announcement
    from potluck.wire.token import decode

    emit = opened.context.log.emit
    shown: str | None = None

    def on_try(address: str, right: bool) -> None:
        nonlocal shown
        if right:
            emit(RunNote(text=f"a machine at {address} got the token by the code"))
            return
        emit(StrangerRefused(address=address, reason="wrong code"))
        if codes.current is None:
            emit(RunNote(text="joining by a code is off: too many wrong ones; the token still works"))
        elif codes.current != shown:
            shown = codes.current
            words = f"{TRIES} wrong tries: that code is gone, the new one is {shown}"
            # Past the log, which must not hold it.
            if view in ("json", "quiet"):
                click.echo(words, err=True)
            else:
                opened.show(words)

    token, port = opened.token, opened.spec.config.port
    assert token is not None
    addresses = decode(token).addresses
    with ExitStack() as stack:
        bind = addresses[0] if len(addresses) == 1 and ":" not in addresses[0] else "0.0.0.0"
        server = CodeServer(bind, port + 1 if port else 0, on_try)
        stack.callback(server.close)
        announced = Announcement(addresses, server.port)
        stack.callback(announced.close)
        codes = Codes(announced.number)
        shown = codes.current
        assert shown is not None
        server.start(codes, token)
        yield shown
