"""A TCP connection of its own between two ranks, for large tensors, encrypted where the group is; owns its bytes.

It must not know collectives, nor wait for ever: whoever waits here is asked again and again whether to go on.

ZeroMQ receives each chunk into memory of its own, in threads of its own. On a link that is as fast as memory the
copies and the handing over cost as much as the link. Here one thread sends from the tensor and receives into it.
"""

from __future__ import annotations

import contextlib
import hmac
import select
import socket
import ssl
import struct
import time
from collections import deque
from collections.abc import Callable

from potluck.dist.sealing import SECRET_BYTES, first_bytes, seal

_AT_ONCE = 512 << 10
"""Bytes of one call: less costs more calls, and more does not fit the system's buffers anyway."""
_ASK_S = 0.1
CONNECT_S = 5.0
"""The most that one step on the way to a connection may take."""
_INVITATION = struct.Struct(f"<H{SECRET_BYTES}s")  # port, and a secret
_KNOCK_BYTES = 16
_KNOCK_S = 0.3
_NOT_NOW = (BlockingIOError, InterruptedError, ssl.SSLWantReadError, ssl.SSLWantWriteError)
_OVER = (OSError, ValueError, AttributeError)
"""The latter two come from `ssl`, and from a wait, if another thread closes at the same moment."""


class Closed(Exception):
    """The other end is closed, or the connection broke."""


class Stream:
    """Both directions between two ranks; used by one thread at a time."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # A router that forgets idle connections must not forget this one between two steps.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if hasattr(socket, "TCP_KEEPIDLE"):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 30)
        self._connection = connection
        self._unsent: deque[memoryview] = deque()
        self._room = bytearray()
        self._asked = 0.0

    def push(self, part: memoryview) -> None:
        """Send it, as far as that goes without waiting; it must stay as it is until flush()."""
        if len(part):
            self._unsent.append(part)
            self._send()

    def pull(self, into: memoryview, ask: Callable[[], None]) -> None:
        """Fill all of `into`, sending meanwhile. `ask` is called now and then, and raises to end the waiting."""
        got = unsent = 0
        while got < len(into):
            self._now_and_then(ask)
            try:
                count = self._connection.recv_into(into[got : got + _AT_ONCE])
            except _NOT_NOW:
                if not self._send():
                    self._wait(receiving=True)
                continue
            except _OVER as error:
                raise Closed from error
            if count == 0:
                raise Closed
            got, unsent = got + count, unsent + count
            if unsent >= _AT_ONCE:
                # Not after every few bytes that came: the other has to have room for it.
                self._send()
                unsent = 0

    def room(self, nbytes: int) -> memoryview:
        """Memory to receive so many bytes into; the same at every call."""
        if len(self._room) < nbytes:
            self._room = bytearray(nbytes)
        return memoryview(self._room)[:nbytes]

    def flush(self, ask: Callable[[], None]) -> None:
        """Until everything is with the system; its memory may then be used again."""
        while self._unsent:
            self._now_and_then(ask)
            if not self._send():
                self._wait(receiving=False)

    def _send(self) -> bool:
        if not self._unsent:
            return False
        part = self._unsent[0]
        try:
            count = self._connection.send(part[:_AT_ONCE])
        except _NOT_NOW:
            return False
        except _OVER as error:
            raise Closed from error
        if count == len(part):
            self._unsent.popleft()
        else:
            self._unsent[0] = part[count:]
        return True

    def _now_and_then(self, ask: Callable[[], None]) -> None:
        """Also while bytes come: an abort and a deadline hold for those who send slowly, too."""
        now = time.monotonic()
        if now - self._asked >= _ASK_S:
            self._asked = now
            ask()

    def _wait(self, *, receiving: bool) -> None:
        try:
            _wait_for(self._connection, receiving=receiving, sending=bool(self._unsent))
        except _OVER as error:
            raise Closed from error

    def close(self) -> None:
        with contextlib.suppress(OSError):
            # Ends a wait that is under way. Not by TLS, which would be off while the connection is still there.
            socket.socket.shutdown(self._connection, socket.SHUT_RDWR)
        # What is unsent stays: who is just sending it must find it, and not that all was sent.
        self._connection.close()


def _wait_for(connection: socket.socket, *, receiving: bool, sending: bool) -> None:
    """Until something can be done, and no longer than a moment."""
    if hasattr(select, "poll"):  # for descriptors of any number, but not on Windows
        poll = select.poll()
        poll.register(connection, (select.POLLIN if receiving else 0) | (select.POLLOUT if sending else 0))
        poll.poll(1000 * _ASK_S)
        return
    own = [connection]
    select.select(own if receiving else [], own if sending else [], [], _ASK_S)


# -- how two ranks come to have one


class Door:
    """Where one rank waits for the other; what it must know comes by the mail, as an invitation."""

    def __init__(self, address: str, secret: bytes, port: int = 0) -> None:
        self._secret = secret
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._listener = socket.create_server((address, port), family=family)
        self.invitation = _INVITATION.pack(self._listener.getsockname()[1], secret)

    @classmethod
    def open(cls, address: str, secret: bytes, port: int = 0) -> Door | None:
        """None where the port (0: any) cannot be opened."""
        try:
            return cls(address, secret, port)
        except OSError:
            return None

    def admit(self, *, sealed: bool, within_s: float = CONNECT_S) -> Stream | None:
        """The one who was invited and has knocked; None if there is no such connection after all."""
        deadline = time.monotonic() + within_s
        while (left_s := deadline - time.monotonic()) > 0:
            self._listener.settimeout(left_s)
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return None
            if hmac.compare_digest(_said(connection), _knock(self._secret)):
                return _stream(connection, self._secret if sealed else None, server=True, within_s=within_s)
            connection.close()
        return None

    def close(self) -> None:
        self._listener.close()


class Visit:
    """Where the other rank has connected, and knocked."""

    def __init__(self, connection: socket.socket, secret: bytes) -> None:
        self._connection, self._secret = connection, secret

    def enter(self, *, sealed: bool, within_s: float = CONNECT_S) -> Stream | None:
        """While the other admits; None if it did not."""
        return _stream(self._connection, self._secret if sealed else None, server=False, within_s=within_s)


def follow(address: str, invitation: bytes, within_s: float = CONNECT_S) -> Visit | None:
    """Connect to who sent the invitation; None if that is not possible, as behind a firewall."""
    try:
        port, secret = _INVITATION.unpack(invitation)
        connection = socket.create_connection((address, port), timeout=within_s)
    except (struct.error, OSError):
        return None
    try:
        connection.sendall(_knock(secret))
    except OSError:
        connection.close()
        return None
    return Visit(connection, secret)


def _stream(connection: socket.socket, secret: bytes | None, *, server: bool, within_s: float) -> Stream | None:
    if secret is None:
        return Stream(connection)
    try:
        return Stream(seal(connection, secret, server=server, within_s=within_s))
    except OSError:
        return None


def _knock(secret: bytes) -> bytes:
    """What who was invited says first, in the clear: it tells nothing of the secret."""
    return hmac.digest(secret, b"potluck stream, a knock", "sha256")[:_KNOCK_BYTES]


def _said(connection: socket.socket) -> bytes:
    """The first bytes of who came. Who was invited has sent them before this is asked; others may say nothing."""
    with contextlib.suppress(OSError):
        return first_bytes(connection, _KNOCK_BYTES, time.monotonic() + _KNOCK_S)
    return b""
