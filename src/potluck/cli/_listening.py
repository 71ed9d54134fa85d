"""`--listen` of `potluck doctor` and `potluck probe`: a listening socket and its token, for a limited time.

What is done for a peer that connects is a function given by the verb.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

import click

from potluck.fleet.life import leased
from potluck.report.text import clean
from potluck.wire.keys import new_keys
from potluck.wire.token import Token, cables_first, checked_bind, encode, local_addresses
from potluck.wire.transport import HostSocket

_POLL_S = 0.5


class Listening:
    """A socket that admits only peers with a newly made token; closed at the end of its context."""

    def __init__(self, verb: str, bind: str | None, port: int | None) -> None:
        self._verb = verb
        self.bind = checked_bind(bind, ipv6=False) or local_addresses()[0]
        self._keys = new_keys()
        self.socket = HostSocket(bind=self.bind, port=port or 0, keys=self._keys)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.socket.close()

    def serve(self, turn: Callable[[float], None], for_s: float, *, token_on_stderr: bool) -> None:
        """Print the command for the other machine, then call `turn` until `for_s` or Ctrl-C ends it."""
        addresses = cables_first(local_addresses()) if self.bind == "0.0.0.0" else (self.bind,)
        token = Token(
            addresses=addresses,
            port=self.socket.port,
            host_public=self._keys.public,
            guest_secret=self._keys.guest_secret,
        )
        click.echo("\nOn the other machine, type:\n", err=token_on_stderr)
        click.echo(f"  potluck {self._verb} {encode(token)}\n", err=token_on_stderr)
        click.echo(f"listening at {self.bind} port {self.socket.port}; Ctrl-C ends it", err=True)
        sys.stdout.flush()
        end = time.monotonic() + for_s
        with leased(), contextlib.suppress(KeyboardInterrupt):
            while time.monotonic() < end:
                turn(_POLL_S)

    @staticmethod
    def visited(words: str) -> Callable[[str, str], None]:
        """A callback that reports a peer on stderr."""
        return lambda name, address: click.echo(f"{clean(name)} ({address}) {words}", err=True)
