"""A TCP connection for large tensors between two ranks, encrypted where the group is: owns how its bytes are moved.

ZeroMQ receives each chunk into its own memory, in its own threads. On a link as fast as memory, the copies and
thread switches cost as much as the link. Here one thread sends from the tensor and receives into it.
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
"""Bytes per call: fewer bytes need more calls, more do not fit into the system's buffers."""
_CHECK_S = 0.1
CONNECT_S = 5.0
"""Timeout of each step of opening a stream."""
_OFFER = struct.Struct(f"<H{SECRET_BYTES}s")  # port, and a secret
_HELLO_BYTES = 16
MOST_WAITING = 64
"""The most connections that have not said hello."""
_NO_FILES_S = 0.05
_NOT_NOW = (BlockingIOError, InterruptedError, ssl.SSLWantReadError, ssl.SSLWantWriteError)
_OVER = (OSError, ValueError, AttributeError)
"""`ssl` and a wait raise the last two if another thread closes the connection at the same time."""


class StreamClosed(Exception):
    """The other end closed the stream, or the connection broke."""


class Stream:
    """Both directions between two ranks; used by one thread at a time."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # Routers forget idle connections: not this one, between two steps.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if hasattr(socket, "TCP_KEEPIDLE"):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 30)
        self._connection = connection
        self._unsent: deque[memoryview] = deque()
        self._buffer = bytearray()
        self._checked = 0.0

    def push(self, part: memoryview) -> None:
        """Send what can be sent without waiting; `part` must not change until flush()."""
        if len(part):
            self._unsent.append(part)
            self._send()

    def pull(self, into: memoryview, check: Callable[[], None]) -> None:
        """Fill all of `into`, and send at the same time. `check` is called occasionally, and raises to end the
        wait."""
        got = unsent = 0
        while got < len(into):
            self._now_and_then(check)
            try:
                count = self._connection.recv_into(into[got : got + _AT_ONCE])
            except _NOT_NOW:
                if not self._send():
                    self._wait(receiving=True)
                continue
            except _OVER as error:
                raise StreamClosed from error
            if count == 0:
                raise StreamClosed
            got, unsent = got + count, unsent + count
            if unsent >= _AT_ONCE:
                # Not after every few bytes received: the other end must have room for it.
                self._send()
                unsent = 0

    def buffer(self, nbytes: int) -> memoryview:
        """Memory to receive this many bytes into; the same at every call."""
        if len(self._buffer) < nbytes:
            self._buffer = bytearray(nbytes)
        return memoryview(self._buffer)[:nbytes]

    def flush(self, check: Callable[[], None]) -> None:
        """Wait until the system has taken everything. Then the memory may be reused."""
        while self._unsent:
            self._now_and_then(check)
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
            raise StreamClosed from error
        if count == len(part):
            self._unsent.popleft()
        else:
            self._unsent[0] = part[count:]
        return True

    def _now_and_then(self, check: Callable[[], None]) -> None:
        """Call this also while bytes arrive: an abort or a deadline must end a slow transfer too."""
        now = time.monotonic()
        if now - self._checked >= _CHECK_S:
            self._checked = now
            check()

    def _wait(self, *, receiving: bool) -> None:
        try:
            _wait_for(self._connection, receiving=receiving, sending=bool(self._unsent))
        except _OVER as error:
            raise StreamClosed from error

    def close(self) -> None:
        with contextlib.suppress(OSError):
            # Ends a wait in another thread. Not through TLS, whose state that thread still uses.
            socket.socket.shutdown(self._connection, socket.SHUT_RDWR)
        # Unsent data stays queued: a thread in flush() must not take it for sent.
        self._connection.close()


def _wait_for(connection: socket.socket, *, receiving: bool, sending: bool) -> None:
    """Wait until the connection is ready, or for a moment."""
    if hasattr(select, "poll"):  # takes descriptors of any number, but is not on Windows
        poll = select.poll()
        poll.register(connection, (select.POLLIN if receiving else 0) | (select.POLLOUT if sending else 0))
        poll.poll(1000 * _CHECK_S)
        return
    own = [connection]
    select.select(own if receiving else [], own if sending else [], [], _CHECK_S)


# -- opening a stream


class StreamListener:
    """Accepts the stream of the other rank, which gets the port and a secret by message, as an offer.

    A thread reads from all connections, so silent ones block nobody. Above the limit the oldest is closed, because
    the other rank sends its hello immediately.
    """

    def __init__(self, address: str, secret: bytes, port: int = 0) -> None:
        self._secret = secret
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._listener = socket.create_server((address, port), family=family)
        self._listener.setblocking(False)
        self.offer = _OFFER.pack(self._listener.getsockname()[1], secret)
        self._waiting: dict[socket.socket, bytes] = {}
        """The bytes that each connection has sent so far, oldest connection first."""
        self._accepted: socket.socket | None = None
        self._done = threading.Event()
        self._waker = Waker()
        self._thread = threading.Thread(target=self._serve, name="potluck-dist-listener", daemon=True)
        self._thread.start()

    @classmethod
    def open(cls, address: str, secret: bytes, port: int = 0) -> StreamListener | None:
        """None if the port (0: any) cannot be opened."""
        try:
            return cls(address, secret, port)
        except OSError:
            return None

    def accept(self, *, sealed: bool, within_s: float = CONNECT_S) -> Stream | None:
        """The stream to the other rank; None if it did not connect."""
        self._done.wait(within_s)
        connection, self._accepted = self._accepted, None
        if connection is None:
            return None
        return _stream(connection, self._secret if sealed else None, server=True, within_s=within_s)

    def close(self) -> None:
        self._done.set()
        self._waker.wake()
        self._thread.join()
        self._waker.close()
        if self._accepted is not None:
            self._accepted.close()

    def _serve(self) -> None:
        """Run until the other rank has said hello, or the listener is closed."""
        with selectors.DefaultSelector() as selector:
            for each in (self._listener, self._waker.inner):
                selector.register(each, selectors.EVENT_READ)
            while not self._done.is_set():
                for key, _ in selector.select():
                    if key.fileobj is self._listener:
                        self._accept_one(selector)
                    elif key.fileobj in self._waiting:
                        self._read_hello(selector, key.fileobj)
            self._listener.close()
            for connection in list(self._waiting):
                self._drop(selector, connection)

    def _accept_one(self, selector: selectors.BaseSelector) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:
            # It is gone, or this process may open no more files: do not try again without a pause.
            self._done.wait(_NO_FILES_S)
            return
        connection.setblocking(False)
        self._waiting[connection] = b""
        selector.register(connection, selectors.EVENT_READ)
        if len(self._waiting) > MOST_WAITING:
            self._drop(selector, next(iter(self._waiting)))

    def _read_hello(self, selector: selectors.BaseSelector, connection: socket.socket) -> None:
        try:
            more = connection.recv(_HELLO_BYTES - len(self._waiting[connection]))
        except _NOT_NOW:
            return
        except OSError:
            more = b""
        heard = self._waiting[connection] = self._waiting[connection] + more
        if more and len(heard) < _HELLO_BYTES:
            return
        if self._accepted is None and hmac.compare_digest(heard, _hello(self._secret)):
            selector.unregister(connection)
            del self._waiting[connection]
            self._accepted = connection
            self._done.set()
        else:
            self._drop(selector, connection)

    def _drop(self, selector: selectors.BaseSelector, connection: socket.socket) -> None:
        selector.unregister(connection)
        del self._waiting[connection]
        connection.close()


class PendingStream:
    """A connection to the other rank that is not encrypted yet."""

    def __init__(self, connection: socket.socket, secret: bytes) -> None:
        self._connection, self._secret = connection, secret

    def finish(self, *, sealed: bool, within_s: float = CONNECT_S) -> Stream | None:
        """The connection, while the other rank accepts; None if it did not."""
        return _stream(self._connection, self._secret if sealed else None, server=False, within_s=within_s)


def connect(address: str, offer: bytes, within_s: float = CONNECT_S) -> PendingStream | None:
    """Connect to the rank that made the offer; None if that fails, as behind a firewall."""
    try:
        port, secret = _OFFER.unpack(offer)
        connection = socket.create_connection((address, port), timeout=within_s)
    except (struct.error, OSError):
        return None
    try:
        connection.sendall(_hello(secret))
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


def _hello(secret: bytes) -> bytes:
    """The first bytes on the connection, unencrypted; they reveal nothing about the secret."""
    return hmac.digest(secret, b"potluck stream, hello", "sha256")[:_HELLO_BYTES]
