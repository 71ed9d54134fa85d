"""A socket for another machine's doctor or probe: admits only connections with its new token, for a limited
time."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from potluck.wire.keys import new_keys
from potluck.wire.token import Token, cables_first, checked_bind, encode, local_addresses
from potluck.wire.transport import HostSocket

_POLL_S = 0.5


class Listening:
    """Closed at the end of its context."""

    def __init__(self, bind: str | None, port: int | None) -> None:
        self.bind = checked_bind(bind, ipv6=False) or local_addresses()[0]
        self._keys = new_keys()
        self.socket = HostSocket(bind=self.bind, port=port or 0, keys=self._keys)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.socket.close()

    @property
    def token(self) -> str:
        """The text with which another machine connects."""
        addresses = cables_first(local_addresses()) if self.bind == "0.0.0.0" else (self.bind,)
        return encode(
            Token(
                addresses=addresses,
                port=self.socket.port,
                host_public=self._keys.public,
                guest_secret=self._keys.guest_secret,
            )
        )

    @staticmethod
    def serve(turn: Callable[[float], None], for_s: float) -> None:
        """Call `turn`, which answers each peer, until the time is over."""
        end = time.monotonic() + for_s
        while time.monotonic() < end:
            turn(_POLL_S)
