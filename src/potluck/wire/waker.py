"""Ends a poll that waits in one thread from another thread."""

from __future__ import annotations

import contextlib
import socket
import threading


class Waker:
    """Ends a poll from another thread. A socket pair, because zmq sockets are not safe to share."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.inner, self._outer = socket.socketpair()
        self.inner.setblocking(False)
        self._outer.setblocking(False)

    def wake(self) -> None:
        # Full means that it is awake already, closed that nobody sleeps. The lock keeps close() from giving
        # the descriptor to another thread between the two.
        with self._lock, contextlib.suppress(OSError):
            self._outer.send(b"\0")

    def drain(self) -> bool:
        woken = False
        with contextlib.suppress(OSError):
            while self.inner.recv(4096):
                woken = True
        return woken

    def close(self) -> None:
        with self._lock:
            self.inner.close()
            self._outer.close()
