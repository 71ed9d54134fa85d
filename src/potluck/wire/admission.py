"""Admission to a host: authenticates connections (ZAP), reports refused ones, and closes those above the limits.

ZAP (ZeroMQ RFC 27): libzmq asks at inproc://zeromq.zap.01 in its own context before a handshake ends, with
[version, request id, domain, address, routing id, mechanism, public key]; the answer is
[version, request id, status, text, user id, metadata].
"""

from __future__ import annotations

import contextlib
import socket
import struct
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator

import zmq

from potluck.wire.admitted import Admitted
from potluck.wire.files import Room
from potluck.wire.gate import Gate
from potluck.wire.pending import AcceptedConnection, Pending
from potluck.wire.waker import Waker

Peer = tuple[str, int]
"""Address and port of a connection's remote end."""
SocketMaker = Callable[[int], zmq.Socket[bytes]]
"""Makes a zmq socket of a type in the shared context, which closes it."""

HANDSHAKE_S = 5.0
"""libzmq ends a handshake that takes longer."""
CURVE_OVERHEAD_BYTES = 1024
"""Encryption adds some 40 bytes to a frame, and MAXMSGSIZE counts them."""
ZAP_DOMAIN = b"potluck"
ZAP_ENDPOINT = "inproc://zeromq.zap.01"
_UNKNOWN = "unknown"
_MANY_EVENTS, _MOST_EVENTS = 16, 1000
_TURN_S = 0.01
STAY_S = 0.1
"""A new connection is kept at least this long, which is enough to authenticate."""
_LOOK_AGAIN_MS, _NO_FILES_MS = 10, 250
_MOST_UNREPORTED = 10_000
"""The most refused strangers that are remembered until the host starts to receive."""

_BYTES_RECEIVED_AT = 128
"""Offset of tcpi_bytes_received in Linux's struct tcp_info."""

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
        # libzmq's I/O thread waits while this queue is full: a stranger that connects often could stop it.
        self.socket.setsockopt(zmq.RCVHWM, 0)
        self.socket.connect(endpoint)

    def drain(self) -> list[tuple[int, int]]:
        """The pending events; in a flood only some of them, so that the caller can act in between."""
        events: list[tuple[int, int]] = []
        with contextlib.suppress(zmq.Again):
            while len(events) < _MOST_EVENTS:
                first, *_ = self.socket.recv_multipart(zmq.NOBLOCK)
                events.append(struct.unpack("=Hi", first))
        return events


class Authenticator:
    """Admits only peers with one public key to a socket, and reports the addresses of others.

    The thread that receives serves it; `Watch` has its own thread.
    """

    def __init__(
        self,
        new_socket: SocketMaker,
        guarded: zmq.Socket[bytes],
        admitted: bytes,
        on_denied: Callable[[str], None] | None,
        room: Room,
        inside: Admitted,
    ) -> None:
        self._admitted = admitted
        self._on_denied = on_denied
        self.socket = new_socket(zmq.REP)
        self.socket.bind(ZAP_ENDPOINT)
        guarded.setsockopt(zmq.ZAP_DOMAIN, ZAP_DOMAIN)
        # Without this libzmq lets everybody in while nobody answers at the ZAP endpoint.
        guarded.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
        self.watch = Watch(new_socket, guarded, Pending(most=room.waiting, stays_s=HANDSHAKE_S), inside)

    def serve(self) -> None:
        """Answer pending authentication requests and report the refused ones. Does not wait."""
        with contextlib.suppress(zmq.Again):
            while True:
                self._answer(self.socket.recv_multipart(zmq.NOBLOCK))
        for address in self.watch.refused():
            self._deny(address)

    def _answer(self, request: list[bytes]) -> None:
        version, number, domain, address, _, mechanism, *credentials = request
        known = domain == ZAP_DOMAIN and mechanism == b"CURVE" and credentials == [self._admitted]
        status, text = (b"200", b"OK") if known else (b"400", b"unknown key")
        self.socket.send_multipart([version, number, status, text, b"", b""])
        if not known:
            self._deny(address.decode("ascii", "replace"))

    def _deny(self, address: str) -> None:
        if self._on_denied is not None:
            self._on_denied(address)


class Watch:
    """Watches connections in a separate thread, and closes those above the limits.

    It runs from the start, because strangers can connect while the host still loads its data and receives nothing.
    """

    def __init__(
        self, new_socket: SocketMaker, guarded: zmq.Socket[bytes], pending: Pending, inside: Admitted
    ) -> None:
        self._pending, self._inside = pending, inside
        self._lock = threading.Lock()
        self._connections: dict[int, tuple[Peer | None, int]] = {}
        self._spoke: dict[int, Peer] = {}
        """Connections of guests, on which a message arrived, by descriptor and peer: a descriptor may pass from a
        stranger to a guest before this thread has seen the stranger leave."""
        self._names: dict[int, bytes] = {}
        """The routing ids of guests that sent a message."""
        self._gone: dict[int, tuple[Peer, bytes]] = {}
        """The last guest that left each descriptor, and its routing id: see `_came`."""
        self._successes = 0
        self._failure: int | None = None
        self._refused: deque[str] = deque(maxlen=_MOST_UNREPORTED)
        self._monitor = Monitor(
            new_socket,
            guarded,
            ACCEPTED | DISCONNECTED | SUCCEEDED | FAILED_AUTH | FAILED_PROTOCOL | FAILED_NO_DETAIL,
        )
        self._waker = Waker()
        self._gate: Gate | None = None
        self._stop = False
        self._thread = threading.Thread(target=self._run, name="potluck-admission", daemon=True)
        self._thread.start()

    def keep(self, gate: Gate | None) -> None:
        """From now on admit the connections that wait in this gate's queue, and close the gate at the end."""
        self._gate = gate
        self._waker.wake()

    # -- the thread that receives -----------------------------------------------------------------------

    def refused(self) -> Iterator[str]:
        """The addresses of strangers refused since the last call."""
        while self._refused:
            yield self._refused.popleft()

    def heard(self, descriptor: int, name: bytes = b"") -> None:
        """A message arrived on this connection, so its sender has the key and this routing id."""
        surplus: list[AcceptedConnection] = []
        peer = _peer(descriptor)
        with self._lock:
            self._inside.spoke(descriptor)
            if peer is not None:
                self._names[descriptor] = name
            if peer is not None and self._spoke.get(descriptor) != peer:
                self._spoke[descriptor] = peer
                self._pending.left(descriptor)
                surplus = self._inside.too_many(self._pending)
        for connection in surplus:
            _shut(connection)

    def close_named(self, name: bytes) -> None:
        """Close the connections with this routing id and drop what is queued for them."""
        with self._lock:
            ends = [(number, self._spoke[number]) for number, known in self._names.items() if known == name]
        for number, (address, port) in ends:
            _shut(AcceptedConnection(descriptor=number, address=address, port=port, since=0.0))

    def close_endless(self) -> None:
        """Close the connections that send an endless message. Call it after all complete messages were read."""
        with self._lock:
            crowd = self._inside.endless(_received_bytes)
        for connection in crowd:
            _shut(connection)

    def close(self) -> None:
        """End the thread; the owner of the sockets closes them afterwards."""
        self._stop = True
        self._waker.wake()
        if self._thread is not threading.current_thread():  # what nobody closed is collected in any thread
            self._thread.join()
        if self._gate is not None:
            self._gate.close()
            self._gate = None
        self._waker.close()

    # -- its own thread ---------------------------------------------------------------------------------

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._waker.inner.fileno(), zmq.POLLIN)
        poller.register(self._monitor.socket, zmq.POLLIN)
        patience_ms: int | None = None
        while not self._stop:
            poller.poll(patience_ms)
            self._waker.drain()
            events = self._monitor.drain()
            self._note(events)
            patience_ms, crowd = self._admit(poller)
            with self._lock:
                crowd += self._pending.too_many(time.monotonic())
                surplus = self._inside.too_many(self._pending)
            for connection in surplus:
                _shut(connection)
            for connection in crowd:
                _shut(connection)
                self._refused.append(connection.address)
            if len(events) > _MANY_EVENTS and not crowd:
                # In a flood many are dealt with in one turn, or each would interrupt the training. Otherwise at
                # once: who is turned away is gone in a moment, and then its address cannot be found any more.
                time.sleep(_TURN_S)

    def _admit(self, poller: zmq.Poller) -> tuple[int | None, list[AcceptedConnection]]:
        """Admit waiting connections if there is room. Returns when to check again (None: at an event) and which
        connections to close."""
        gate = self._gate
        if gate is None or not gate.holds:
            return None, []
        if not gate.somebody_waits():
            poller.register(gate.fileno(), zmq.POLLIN)
            return None, []
        with self._lock:
            pending = self._pending
            free = min(pending.most + self._inside.most - len(self._connections), pending.most - len(pending))
            if free < gate.batch:
                poller.register(gate.fileno(), 0)
                return _LOOK_AGAIN_MS, pending.make_way(gate.batch - free, time.monotonic() - STAY_S)
        gate.admit()
        if gate.somebody_waits():
            # This process has no file left, or libzmq's thread no time.
            poller.register(gate.fileno(), 0)
            return _NO_FILES_MS, []
        poller.register(gate.fileno(), zmq.POLLIN)
        return None, []

    def _note(self, events: list[tuple[int, int]]) -> None:
        last_end = {value: number for number, (event, value) in enumerate(events) if event == DISCONNECTED}
        for number, (event, value) in enumerate(events):
            if event == ACCEPTED:
                # The number of a descriptor that is closed by now may already be another connection's.
                gone = last_end.get(value, -1) > number
                self._came(value, None if gone else _peer(value))
            elif event == SUCCEEDED:
                self._successes += 1
            elif event == DISCONNECTED:
                self._left(value)
            else:
                self._failure = event

    def _came(self, descriptor: int, peer: Peer | None) -> None:
        self._connections[descriptor] = (peer, self._successes)
        if peer is not None:
            address, port = peer
            connection = AcceptedConnection(
                descriptor=descriptor, address=address, port=port, since=time.monotonic()
            )
            with self._lock:
                # A stranger may be noted only when its descriptor is a guest's already. Then the stranger's end was
                # taken for the guest's, and this is the guest that was heard before.
                gone = self._gone.pop(descriptor, None)
                if gone is not None and gone[0] == peer:
                    self._spoke[descriptor], self._names[descriptor] = gone
                self._inside.came(connection)
                if self._spoke.get(descriptor) != peer:  # it may have been heard before it was seen
                    self._pending.came(connection)

    def _left(self, descriptor: int) -> None:
        """Distinguish a refused stranger from a guest that left.

        libzmq names the failure right before the disconnect, with two exceptions. Bytes that are not ZMTP at
        all (HTTP) give no failure: such a connection ends without a success since it began. And a refusal by key
        was already reported when ZAP refused. A peer that closed first (a guest that looks for an address that
        answers) or stayed silent is not reported.
        """
        peer, successes = self._connections.pop(descriptor, (None, -1))
        with self._lock:
            if peer is not None and self._spoke.get(descriptor) == peer:
                del self._spoke[descriptor]
                self._gone[descriptor] = peer, self._names.pop(descriptor, b"")
            self._pending.left(descriptor)
            self._inside.left(descriptor)
        failure, self._failure = self._failure, None
        if failure == FAILED_PROTOCOL or (failure is None and successes == self._successes):
            self._refused.append(peer[0] if peer else _UNKNOWN)


@contextlib.contextmanager
def _borrowed(descriptor: int) -> Iterator[socket.socket]:
    """A Python socket for libzmq's descriptor. Not a duplicate, which would need another descriptor."""
    end = socket.socket(fileno=descriptor)  # of its own family: an IPv6 address does not fit into the other's
    try:
        yield end
    finally:
        end.detach()


def _peer(descriptor: int) -> Peer | None:
    """Address and port of the remote end of the connection that has this descriptor now."""
    try:
        with _borrowed(descriptor) as end:
            address, port, *_ = end.getpeername()
            return str(address), int(port)
    except (OSError, ValueError):
        return None


def _shut(connection: AcceptedConnection) -> None:
    """Close a connection; libzmq notices and forgets it."""
    with contextlib.suppress(OSError, ValueError), _borrowed(connection.descriptor) as end:
        # The number may be another connection's by now; that one has another port.
        if end.getpeername()[:2] == (connection.address, connection.port):
            end.shutdown(socket.SHUT_RDWR)


def _received_bytes(connection: AcceptedConnection) -> int | None:
    """Bytes received on this connection so far; None if not known.

    Called often for every connection, so it makes only one system call; `_shut` checks who owns the descriptor.
    """
    if sys.platform != "linux":
        return None
    with contextlib.suppress(OSError, ValueError, struct.error):
        end = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, fileno=connection.descriptor)
        try:
            info = end.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES_RECEIVED_AT + 8)
        finally:
            end.detach()
        return int(struct.unpack_from("=Q", info, _BYTES_RECEIVED_AT)[0])
    return None
