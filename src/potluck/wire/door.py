"""The door of a host: owns who is let in (ZAP) and noticing who was not (socket monitor).

It must not know messages. It is served by the thread that receives, so there is no thread and no lock here.

ZAP (ZeroMQ RFC 27): libzmq asks at inproc://zeromq.zap.01 in its own context before a handshake ends, with
[version, request id, domain, address, routing id, mechanism, public key]; the answer is
[version, request id, status, text, user id, metadata].
"""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import Callable

import zmq

SocketMaker = Callable[[int], zmq.Socket[bytes]]
"""Makes a zmq socket of a type, in the context of the others, and ends it with them."""

ZAP_DOMAIN = b"potluck"
_ZAP_ENDPOINT = "inproc://zeromq.zap.01"
_UNKNOWN = "unknown"

# Plain ints: zmq.Event is a Flag whose arithmetic has a price per event.
ACCEPTED = int(zmq.EVENT_ACCEPTED)
DISCONNECTED = int(zmq.EVENT_DISCONNECTED)
SUCCEEDED = int(zmq.EVENT_HANDSHAKE_SUCCEEDED)
FAILED_AUTH = int(zmq.EVENT_HANDSHAKE_FAILED_AUTH)
FAILED_PROTOCOL = int(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL)
FAILED_NO_DETAIL = int(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL)


class Monitor:
    """The events of one zmq socket, as (event, value) pairs."""

    def __init__(self, new_socket: SocketMaker, watched: zmq.Socket[bytes], events: int) -> None:
        endpoint = f"inproc://monitor-{id(self)}"
        watched.monitor(endpoint, events)
        self.socket = new_socket(zmq.PAIR)
        # libzmq's I/O thread waits while this queue is full: a stranger who knocks often could stop it.
        self.socket.setsockopt(zmq.RCVHWM, 0)
        self.socket.connect(endpoint)

    def drain(self) -> list[tuple[int, int]]:
        events = []
        with contextlib.suppress(zmq.Again):
            while True:
                first, *_ = self.socket.recv_multipart(zmq.NOBLOCK)
                events.append(struct.unpack("=Hi", first))
        return events


class Door:
    """Admits the holders of one public key to a socket and reports everybody else's address."""

    def __init__(
        self,
        new_socket: SocketMaker,
        guarded: zmq.Socket[bytes],
        admitted: bytes,
        on_denied: Callable[[str], None] | None,
    ) -> None:
        self._admitted = admitted
        self._on_denied = on_denied
        self._connections: dict[int, tuple[str, int]] = {}
        self._successes = 0
        self._failure: int | None = None
        self._zap = new_socket(zmq.REP)
        self._zap.bind(_ZAP_ENDPOINT)
        guarded.setsockopt(zmq.ZAP_DOMAIN, ZAP_DOMAIN)
        # Without this libzmq lets everybody in while nobody answers at the ZAP endpoint.
        guarded.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
        self._monitor = Monitor(
            new_socket,
            guarded,
            ACCEPTED | DISCONNECTED | SUCCEEDED | FAILED_AUTH | FAILED_PROTOCOL | FAILED_NO_DETAIL,
        )
        self.sockets = (self._zap, self._monitor.socket)

    def serve(self) -> None:
        """Answer who has knocked and note who went away; never waits."""
        with contextlib.suppress(zmq.Again):
            while True:
                self._answer(self._zap.recv_multipart(zmq.NOBLOCK))
        events = self._monitor.drain()
        last_end = {value: number for number, (event, value) in enumerate(events) if event == DISCONNECTED}
        for number, (event, value) in enumerate(events):
            if event == ACCEPTED:
                # The number of a descriptor that is closed by now may already be another connection's.
                gone = last_end.get(value, -1) > number
                self._connections[value] = (_UNKNOWN if gone else _peer_address(value), self._successes)
            elif event == SUCCEEDED:
                self._successes += 1
            elif event == DISCONNECTED:
                self._left(value)
            else:
                self._failure = event

    def _answer(self, request: list[bytes]) -> None:
        version, number, domain, address, _, mechanism, *credentials = request
        known = domain == ZAP_DOMAIN and mechanism == b"CURVE" and credentials == [self._admitted]
        status, text = (b"200", b"OK") if known else (b"400", b"unknown key")
        self._zap.send_multipart([version, number, status, text, b"", b""])
        if not known:
            self._deny(address.decode("ascii", "replace"))

    def _left(self, descriptor: int) -> None:
        """Tell a stranger who was turned away from a guest who left.

        libzmq names the failure right before the disconnect, with two exceptions. Bytes that are no ZMTP at
        all (HTTP) bring no failure: such a connection ends without any success since it began. And a refusal
        by key was reported when ZAP refused. Who hung up first (a guest that looks for an address that
        answers) or stayed silent is no news.
        """
        address, successes = self._connections.pop(descriptor, (_UNKNOWN, -1))
        failure, self._failure = self._failure, None
        if failure == FAILED_PROTOCOL or (failure is None and successes == self._successes):
            self._deny(address)

    def _deny(self, address: str) -> None:
        if self._on_denied is not None:
            self._on_denied(address)


def _peer_address(descriptor: int) -> str:
    try:
        with socket.fromfd(descriptor, socket.AF_INET, socket.SOCK_STREAM) as peer:
            return str(peer.getpeername()[0])
    except (OSError, IndexError):
        return _UNKNOWN
