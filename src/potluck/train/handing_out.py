"""Gives guests a run's token without typing it: from a file, or for a short code in the local network."""

from __future__ import annotations

import stat
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from potluck import durable
from potluck.errors import ConfigError
from potluck.spec.events import RunNote, StrangerRefused
from potluck.train.event_log import EventLog
from potluck.wire.code import TRIES, Codes, CodeServer, need_libraries
from potluck.wire.discovery import Announcement
from potluck.wire.token import decode


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharing:
    """The requested ways to hand out a token."""

    token_file: Path | None = None
    lan: bool = False
    """Announce the run in the local network, and send the token to guests that know a code."""

    def check(self) -> None:
        """Raises an error before the run begins if a library is missing."""
        if self.lan:
            need_libraries("--lan")


@contextmanager
def in_file(path: Path, token: str) -> Iterator[None]:
    """Inside, the file contains the token, readable only by this user. It appears complete, under its final
    name."""
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


@contextmanager
def by_code(token: str, port: int, log: EventLog, show: Callable[[str], None]) -> Iterator[str]:
    """Inside, the run is announced, and sends its token to guests that know the yielded code.

    `port`: where it listens; 0: at a free one. `show` shows a sentence with a new code, which must not be in the
    log.
    """
    emit = log.emit
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
            show(f"{TRIES} wrong tries: that code is no longer valid, the new one is {shown}")

    addresses = decode(token).addresses
    with ExitStack() as stack:
        bind = addresses[0] if len(addresses) == 1 and ":" not in addresses[0] else "0.0.0.0"
        server = CodeServer(bind, port, on_try)
        stack.callback(server.close)
        announced = Announcement(addresses, server.port)
        stack.callback(announced.close)
        codes = Codes(announced.number)
        shown = codes.current
        assert shown is not None
        server.start(codes, token)
        yield shown
