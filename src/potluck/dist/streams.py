"""A TCP connection of its own between two ranks, for large tensors, encrypted where the group is; owns its bytes.

It must not know collectives, nor wait for ever: whoever waits here is asked again and again whether to go on.

ZeroMQ receives each chunk into memory of its own, in threads of its own. On a link that is as fast as memory the
copies and the handing over cost as much as the link. Here one thread sends from the tensor and receives into it.
"""

from __future__ import annotations

import contextlib
import hmac
import select
import selectors
import socket
import ssl
import struct
import threading
import time
from collections import deque
from collections.abc import Callable

from potluck.dist.sealing import SECRET_BYTES, seal
from potluck.wire.waker import Waker

_AT_ONCE = 512 << 10
"""Bytes of one call: less costs more calls, and more does not fit the system's buffers anyway."""
_ASK_S = 0.1
CONNECT_S = 5.0
"""The most that one step on the way to a connection may take."""
_INVITATION = struct.Struct(f"<H{SECRET_BYTES}s")  # port, and a secret
_KNOCK_BYTES = 16
MOST_WAITING = 64
"""Connections at a door that have not knocked."""
_NO_FILES_S = 0.05
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


class StreamListener:
    """Where one rank waits for the other; what it must know comes by the mail, as an invitation.

    A thread listens to all who come at once, so that those who say nothing keep nobody out. When they are too many,
    the oldest has to go: who was invited knocks right away.
    """

    def __init__(self, address: str, secret: bytes, port: int = 0) -> None:
        self._secret = secret
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._listener = socket.create_server((address, port), family=family)
        self._listener.setblocking(False)
        self.invitation = _INVITATION.pack(self._listener.getsockname()[1], secret)
        self._waiting: dict[socket.socket, bytes] = {}
        """What each has said so far, the oldest first."""
        self._invited: socket.socket | None = None
        self._over = threading.Event()
        self._waker = Waker()
        self._thread = threading.Thread(target=self._serve, name="potluck-dist-door", daemon=True)
        self._thread.start()

    @classmethod
    def open(cls, address: str, secret: bytes, port: int = 0) -> StreamListener | None:
        """None where the port (0: any) cannot be opened."""
        try:
            return cls(address, secret, port)
        except OSError:
            return None

    def admit(self, *, sealed: bool, within_s: float = CONNECT_S) -> Stream | None:
        """The one who was invited and has knocked; None if there is no such connection after all."""
        self._over.wait(within_s)
        connection, self._invited = self._invited, None
        if connection is None:
            return None
        return _stream(connection, self._secret if sealed else None, server=True, within_s=within_s)

    def close(self) -> None:
        self._over.set()
        self._waker.wake()
        self._thread.join()
        self._waker.close()
        if self._invited is not None:
            self._invited.close()

    def _serve(self) -> None:
        """Until the one who was invited has knocked, or it is over."""
        with selectors.DefaultSelector() as selector:
            for each in (self._listener, self._waker.inner):
                selector.register(each, selectors.EVENT_READ)
            while not self._over.is_set():
                for key, _ in selector.select():
                    if key.fileobj is self._listener:
                        self._let_wait(selector)
                    elif key.fileobj in self._waiting:
                        self._hear(selector, key.fileobj)
            self._listener.close()
            for connection in list(self._waiting):
                self._hang_up(selector, connection)

    def _let_wait(self, selector: selectors.BaseSelector) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:
            # It is gone already, or this process may open no more files: it must not try without a pause.
            self._over.wait(_NO_FILES_S)
            return
        connection.setblocking(False)
        self._waiting[connection] = b""
        selector.register(connection, selectors.EVENT_READ)
        if len(self._waiting) > MOST_WAITING:
            self._hang_up(selector, next(iter(self._waiting)))

    def _hear(self, selector: selectors.BaseSelector, connection: socket.socket) -> None:
        try:
            more = connection.recv(_KNOCK_BYTES - len(self._waiting[connection]))
        except _NOT_NOW:
            return
        except OSError:
            more = b""
        said = self._waiting[connection] = self._waiting[connection] + more
        if more and len(said) < _KNOCK_BYTES:
            return
        if self._invited is None and hmac.compare_digest(said, _knock(self._secret)):
            selector.unregister(connection)
            del self._waiting[connection]
            self._invited = connection
            self._over.set()
        else:
            self._hang_up(selector, connection)

    def _hang_up(self, selector: selectors.BaseSelector, connection: socket.socket) -> None:
        selector.unregister(connection)
        del self._waiting[connection]
        connection.close()


class PendingStream:
    """Where the other rank has connected, and knocked."""

    def __init__(self, connection: socket.socket, secret: bytes) -> None:
        self._connection, self._secret = connection, secret

    def enter(self, *, sealed: bool, within_s: float = CONNECT_S) -> Stream | None:
        """While the other admits; None if it did not."""
        return _stream(self._connection, self._secret if sealed else None, server=False, within_s=within_s)


def follow(address: str, invitation: bytes, within_s: float = CONNECT_S) -> PendingStream | None:
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
    return PendingStream(connection, secret)


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
