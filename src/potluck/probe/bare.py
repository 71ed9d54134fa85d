"""One plain TCP connection between two probes: the rate of the link without our stack, for comparison.

Port and one-time secret are agreed over the encrypted connection. A client is served once, if it has the secret and
comes from the client's own address.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import socket
import threading
import time

from potluck.probe.stream import Meter
from potluck.spec.probed import Rate

SECRET_BYTES = 32
ACCEPT_S = 3.0
_SECRET_S = 1.0
_MOST_STRANGERS = 8
_TURN_S = 0.25
"""Timeout of each call, so that the end of the other side is detected."""
_PATIENCE_S = 1.5
_TAIL_S = 0.2
"""Sending lasts this much longer than measuring, so that the measurement does not include the end."""
_PIECE = 256 * 1024
_GO = b"\x01"


class Offer:
    """The listening side. Create it, send its port and secret, then run serve() in a thread; close() ends that."""

    def __init__(self, bind: str, client: str, *, takes: bool, sends: bool, seconds: float) -> None:
        """`client`: the only address that is admitted. Raises OSError if it cannot listen on `bind`."""
        self._client, self._takes, self._sends, self._seconds = client, takes, sends, seconds
        self.secret = secrets.token_bytes(SECRET_BYTES)
        self._server = socket.create_server((bind, 0), backlog=2)
        self.port: int = self._server.getsockname()[1]
        self._link: socket.socket | None = None
        self._closed = False

    def serve(self) -> Rate | None:
        """The rate at which data arrived here; None if none was expected or nobody connected."""
        with self._server:
            self._link = self._accepted()
        if self._link is None or self._closed:
            self.close()
            return None
        try:
            with self._link:
                self._link.sendall(_GO)
                return exchange(self._link, sends=self._sends, takes=self._takes, seconds=self._seconds)
        except OSError:
            return None

    def close(self) -> None:
        """Callable from any thread."""
        self._closed = True
        for member in (self._server, self._link):
            if member is not None:
                with contextlib.suppress(OSError):
                    member.shutdown(socket.SHUT_RDWR)
                member.close()

    def _accepted(self) -> socket.socket | None:
        deadline = time.monotonic() + ACCEPT_S
        for _ in range(_MOST_STRANGERS):
            left = deadline - time.monotonic()
            if left <= 0 or self._closed:
                return None
            try:
                self._server.settimeout(left)
                link, (address, _) = self._server.accept()
            except OSError:
                return None
            if address == self._client and self._knows(link):
                return link
            link.close()
        return None

    def _knows(self, link: socket.socket) -> bool:
        received = b""
        deadline = time.monotonic() + _SECRET_S
        try:
            while len(received) < SECRET_BYTES and (left := deadline - time.monotonic()) > 0:
                link.settimeout(left)
                part = link.recv(SECRET_BYTES - len(received))
                if not part:
                    return False
                received += part
        except OSError:
            return False
        return hmac.compare_digest(received, self.secret)


def measure(address: str, port: int, secret: bytes, *, sends: bool, takes: bool, seconds: float) -> Rate | None:
    """The connecting side. Returns the rate at which data arrived here. Raises OSError if it is not admitted."""
    with socket.create_connection((address, port), timeout=ACCEPT_S) as link:
        link.sendall(secret)
        if link.recv(1) != _GO:
            raise ConnectionRefusedError("the other side closed the connection")
        return exchange(link, sends=sends, takes=takes, seconds=seconds)


def exchange(link: socket.socket, *, sends: bool, takes: bool, seconds: float) -> Rate | None:
    """Send, receive or both for some seconds. Returns the receiving rate."""
    with contextlib.suppress(OSError):
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    link.settimeout(_TURN_S)
    if not takes:
        _send(link, seconds)
        with contextlib.suppress(OSError):  # the other side closes the connection when it has seen enough
            link.settimeout(_PATIENCE_S)
            link.recv(1)
        return None
    sender = threading.Thread(target=_send, args=(link, seconds), name="bare-send", daemon=True)
    if sends:
        sender.start()
    try:
        return _take(link, seconds, to_the_end=sends)
    except BaseException:
        link.close()  # so that the sender ends, too
        raise
    finally:
        if sends:
            sender.join(seconds + _PATIENCE_S)


def _send(link: socket.socket, seconds: float) -> None:
    piece = os.urandom(_PIECE)  # a tunnel that compresses must not flatter itself
    end = time.monotonic() + seconds + _TAIL_S
    try:
        while time.monotonic() < end:
            with contextlib.suppress(TimeoutError):
                link.send(piece)
        link.shutdown(socket.SHUT_WR)
    except OSError:
        return


def _take(link: socket.socket, seconds: float, *, to_the_end: bool) -> Rate | None:
    """`to_the_end`: closing earlier would break data that is still sent from here."""
    meter, buffer = Meter(seconds), bytearray(4 * _PIECE)
    deadline = time.monotonic() + seconds + _PATIENCE_S
    with contextlib.suppress(OSError):
        while (now := time.monotonic()) < deadline and (to_the_end or not meter.over(now)):
            try:
                count = link.recv_into(buffer)
            except TimeoutError:
                continue
            if not count:
                break
            meter.add(count, time.monotonic())
    return meter.rate()
