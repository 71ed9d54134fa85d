"""Tells guests that connect before the training begins to wait, and for what.

Owns the host's socket until the hub takes it over, and the hellos that arrived before that. It decides nothing
about guests: the hub gets every hello as if it had just arrived. If no training ever begins, the guests are told
that.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from potluck.errors import WireError
from potluck.spec.events import LoopAwaited, RunEvent
from potluck.spec.messages import AliveMessage, ByeMessage, FromHost, HelloMessage, LeaveMessage, WaitMessage
from potluck.wire.frames import FROM_GUEST, MalformedError, VersionError, pack
from potluck.wire.transport import HostSocket

SAY_AFTER_S = 60.0
"""If the script has not reached its loop by then, the person at the host gets a warning."""
HEARTBEAT_S = 1.0
MOST_WAITING = 256
LARGEST_HELLO_BYTES = 1 << 16

Early = tuple[bytes, list[Any]]


class WaitingRoom:
    """Open from `start` until `hand_over` or `close`; its own thread answers guests."""

    def __init__(
        self,
        socket: HostSocket,
        *,
        what: str,
        emit: Callable[[RunEvent], None],
        say_after_s: float = SAY_AFTER_S,
    ) -> None:
        """`what` is the name of the script."""
        self._socket, self._what, self._emit = socket, what, emit
        self._say_after_s = say_after_s
        self._waiting: dict[bytes, list[Any]] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="potluck-waiting", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def hand_over(self) -> list[Early]:
        """The training begins: return the waiting hellos for the hub. From here on the caller owns the socket."""
        self._end()
        waiting, self._waiting = list(self._waiting.items()), {}
        return waiting

    def close(self, reason: str) -> None:
        """No training will begin: tell the waiting guests. Does nothing after `hand_over`."""
        for peer, _ in self.hand_over():
            self._send(peer, ByeMessage(reason=reason))

    def _end(self) -> None:
        if not self._stop.is_set():
            self._stop.set()
            self._socket.wake()
            self._thread.join(5.0)

    def _run(self) -> None:
        began = beat = time.monotonic()
        said = False
        while not self._stop.is_set():
            for peer, frames in self._socket.receive(0.2):
                self._receive(peer, frames)
            now = time.monotonic()
            if now - beat >= HEARTBEAT_S:
                beat = now
                self._waiting = {p: f for p, f in self._waiting.items() if self._send(p, AliveMessage())}
            if not said and now - began >= self._say_after_s:
                said = True
                guests = len(self._waiting)
                self._emit(LoopAwaited(what=self._what, seconds=round(now - began, 1), guests=guests))

    def _receive(self, peer: bytes, frames: list[Any]) -> None:
        try:
            message = FROM_GUEST.read(frames).message
            is_hello = isinstance(message, HelloMessage)
            if isinstance(message, LeaveMessage):
                self._waiting.pop(peer, None)
        except WireError as error:
            # The hub will say what is wrong with it.
            malformed = isinstance(error, MalformedError) and error.kind == HelloMessage.kind
            is_hello = malformed or isinstance(error, VersionError)
        room = len(self._waiting) < MOST_WAITING or peer in self._waiting
        if is_hello and room and sum(len(f) for f in frames) <= LARGEST_HELLO_BYTES:
            self._waiting[peer] = frames
            self._send(peer, WaitMessage(reason=f"{self._what} has not reached its training loop yet"))

    def _send(self, peer: bytes, message: FromHost) -> bool:
        return self._socket.send(peer, pack(message))
