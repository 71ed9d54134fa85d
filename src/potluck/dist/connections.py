"""The sockets between this process and its peers: owns the keys, admission, and which peers are alive.

Every process has one socket that receives (PULL) and, for each peer it sends to, one that sends (PUSH). Each
process has a CURVE key pair. The public keys come with the endpoints, from the rendezvous; a connection with any
other key is refused. A connection that has not shown a key is limited as at a host (wire/admission.py).

A peer whose connection broke counts as gone. ZeroMQ would reconnect, but unsent messages would be lost, and a
collective must not continue without a message.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import re
import secrets
import sys
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec
import zmq
from zmq.utils import z85

from potluck.dist.config import Resolved
from potluck.errors import NetworkError, PortTakenError, PotluckError, WireError
from potluck.limits import logical_cores
from potluck.wire import gate
from potluck.wire.admission import (
    CURVE_OVERHEAD_BYTES,
    DISCONNECTED,
    HANDSHAKE_S,
    SUCCEEDED,
    ZAP_ENDPOINT,
    Monitor,
    Watch,
)
from potluck.wire.admitted import Admitted
from potluck.wire.files import make_room
from potluck.wire.pending import Pending

_ZAP_DOMAIN = b"potluck-dist"
_GRACE_S = 0.5
"""How long a peer's last messages may still arrive after its connection broke."""
_STREAMING_GRACE_S = 3.0
"""The same for data on a stream."""
_LINGER_MS = 3000

PART_BYTES = 512 << 10
"""The longest frame, and so the most memory that a connection without a key can use. Longer bodies are sent as
several frames; a chunk of the default size is one."""
MOST_WAITING = 512
"""The most connections that have not shown a key, and never more than a quarter of the files that may be open."""
_HELLO = b""
"""The first message on a connection, by which the watch recognises a peer."""
_ADMITTED_S, _ADMITTED_POLL_S = 0.5, 0.005
"""How long after a peer was admitted to check for its first message, and how often. Until it is read, many
connections from the peer's own address could displace it."""
_ANSWERS_PER_TURN = 64
_STRANGERS_LOGGED = 5
_KEY = re.compile(r"[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")
"""32 bytes in Z85."""

log = logging.getLogger("potluck.dist")

ShortText = Annotated[str, msgspec.Meta(max_length=255)]


def check_printable(*texts: object) -> None:
    """Refuse control characters: otherwise anybody who can write to the store could write to people's terminals."""
    if not all(text.isprintable() for text in texts if isinstance(text, str)):
        raise ValueError("control characters")


class Endpoint(msgspec.Struct, frozen=True, kw_only=True):
    """Where a process receives messages; sent through the store as JSON."""

    name: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{16}$")]
    """Random for every start, so that a restarted process is another peer."""
    address: ShortText
    port: Annotated[int, msgspec.Meta(ge=1, le=65_535)]
    key: ShortText
    """The public key (Z85), or "" without encryption."""
    host: ShortText
    """The machine's name, for people."""

    def __post_init__(self) -> None:
        ipaddress.ip_address(self.address)
        check_printable(self.address, self.host)

    @property
    def has_key(self) -> bool:
        return _KEY.fullmatch(self.key) is not None

    @property
    def url(self) -> str:
        address = f"[{self.address}]" if ":" in self.address else self.address
        return f"tcp://{address}:{self.port}"


@dataclass(slots=True)
class PeerConnection:
    """The connection to one peer, and the peer's state."""

    endpoint: Endpoint
    socket: zmq.Socket[bytes]
    monitor: Monitor
    lock: threading.Lock = field(default_factory=threading.Lock)
    since: float = field(default_factory=time.monotonic)
    connected: bool = False
    broken: float | None = None
    """When the connection broke."""
    closed: bool = False
    """Whether the peer has announced its close."""


class Connections:
    """All sockets of this process. `receive` belongs to one thread at a time; any thread may call the rest."""

    def __init__(self, settings: Resolved, host: str) -> None:
        self.settings, self.encrypts = settings, settings.encryption
        # Half of the I/O threads encrypt, half decrypt: one thread for both would be busy with either.
        half = 2 if logical_cores() >= 8 else 1
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=2 * half)
        self._receiving_threads, self._sending_threads = (1 << half) - 1, ((1 << half) - 1) << half
        self._public, self._secret = zmq.curve_keypair() if self.encrypts else (b"", b"")
        self._admitted_keys: set[bytes] = set()
        self._last_admitted = -_ADMITTED_S
        self._strangers = 0
        self._peers: dict[str, PeerConnection] = {}
        self._lock = threading.Lock()
        self.closed = False
        self._zap = self._context.socket(zmq.REP)
        self._zap.bind(ZAP_ENDPOINT)
        self._inbox = self._new_inbox()
        self._watch: Watch | None = None
        try:
            port = self._listen()
        except BaseException:
            if self._watch is not None:
                self._watch.close()
            self._context.destroy(0)
            raise
        name, key = secrets.token_hex(8), self._public.decode("ascii")
        self.endpoint = Endpoint(name=name, address=settings.address, port=port, key=key, host=host)

    def _new_inbox(self) -> zmq.Socket[bytes]:
        inbox = self._context.socket(zmq.PULL)
        inbox.setsockopt(zmq.RCVHWM, 0)
        inbox.setsockopt(zmq.AFFINITY, self._receiving_threads)
        inbox.setsockopt(zmq.MAXMSGSIZE, PART_BYTES + CURVE_OVERHEAD_BYTES)
        inbox.setsockopt(zmq.HANDSHAKE_IVL, int(HANDSHAKE_S * 1000))
        if self.encrypts:
            inbox.setsockopt(zmq.CURVE_SERVER, 1)
            inbox.setsockopt(zmq.CURVE_SECRETKEY, self._secret)
            inbox.setsockopt(zmq.ZAP_DOMAIN, _ZAP_DOMAIN)
            inbox.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
        return inbox

    def _listen(self) -> int:
        """Open the port. With encryption, connections without a key are limited; the number of peers is not."""
        address, port, batch = self.settings.address, self.settings.port, None
        if self.encrypts:
            limit = make_room()
            most = MOST_WAITING if limit is None else min(MOST_WAITING, limit // 4)
            batch = max(1, most // 4)
            pending = Pending(most=most, stays_s=HANDSHAKE_S)
            peers = Admitted(most=sys.maxsize, most_bytes=sys.maxsize)
            self._watch = Watch(self._context.socket, self._inbox, pending, peers)
        try:
            port, held = gate.listen(self._inbox, address, port, batch)
        except PortTakenError as error:
            raise PortTakenError(
                f"{error.what}, on {address}", hint="choose another port base, or 0 for any free port"
            ) from None
        except PotluckError as error:
            raise NetworkError(
                f"this rank cannot listen on {address}: {error.what}",
                hint="name an address of this machine, or leave the choice to potluck",
            ) from None
        if self._watch is not None:
            self._watch.keep(held)
        return port

    # -- who may connect ------------------------------------------------------------------------------------

    def admit(self, endpoints: Iterable[Endpoint]) -> None:
        """Let these peers send to this process from now on.

        Raises:
            WireError: one of them has no key, and this process encrypts.
        """
        keys = [self._key_of(endpoint) for endpoint in endpoints]
        with self._lock:
            self._admitted_keys.update(keys)

    def _key_of(self, endpoint: Endpoint) -> bytes:
        if not self.encrypts:
            return b""
        if not endpoint.has_key:
            raise WireError(f"the peer at {endpoint.url} has no key to encrypt with")
        return endpoint.key.encode("ascii")

    def _authenticate(self) -> None:
        """Answer some of the connection requests: a flood of strangers must not block this thread."""
        with contextlib.suppress(zmq.Again):
            for _ in range(_ANSWERS_PER_TURN):
                version, number, domain, address, _, mechanism, *credentials = self._zap.recv_multipart(zmq.NOBLOCK)
                key = z85.encode(credentials[0]) if credentials else b""
                with self._lock:
                    known = domain == _ZAP_DOMAIN and mechanism == b"CURVE" and key in self._admitted_keys
                status = [b"200", b"OK"] if known else [b"400", b"unknown key"]
                self._zap.send_multipart([version, number, *status, b"", b""])
                if known:
                    self._last_admitted = time.monotonic()
                else:
                    self._refused(address.decode("ascii", "replace"))

    def _refused(self, address: str) -> None:
        """Log a stranger, up to a limit."""
        self._strangers += 1
        if self._strangers <= _STRANGERS_LOGGED or self._strangers % 100 == 0:
            log.info("refused a stranger from %s (%d so far)", address, self._strangers)

    # -- sending --------------------------------------------------------------------------------------------

    def to(self, endpoint: Endpoint) -> PeerConnection:
        """The connection to a peer. The first call starts connecting."""
        peer = self._peers.get(endpoint.name)
        if peer is not None:
            return peer
        with self._lock:
            if self.closed:
                raise NetworkError(
                    "the process group has been shut down", hint="make a new process group to continue"
                )
            peer = self._peers.get(endpoint.name)
            if peer is None:
                peer = self._peers[endpoint.name] = self._connect(endpoint)
        return peer

    def _connect(self, endpoint: Endpoint) -> PeerConnection:
        key = self._key_of(endpoint)
        socket = self._context.socket(zmq.PUSH)
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.AFFINITY, self._sending_threads)
        socket.setsockopt(zmq.LINGER, _LINGER_MS)
        socket.setsockopt(zmq.IPV6, int(":" in endpoint.address))
        # libzmq's threads send and answer heartbeats, so a process that computes for long stays alive.
        socket.setsockopt(zmq.HEARTBEAT_IVL, int(self.settings.heartbeat_s * 1000))
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, int(self.settings.heartbeat_timeout_s * 1000))
        socket.setsockopt(zmq.HANDSHAKE_IVL, int(HANDSHAKE_S * 1000))
        if self.encrypts:
            socket.setsockopt(zmq.CURVE_SERVERKEY, key)
            socket.setsockopt(zmq.CURVE_PUBLICKEY, self._public)
            socket.setsockopt(zmq.CURVE_SECRETKEY, self._secret)
        monitor = Monitor(self._context.socket, socket, DISCONNECTED | SUCCEEDED)
        socket.connect(endpoint.url)
        socket.send(_HELLO)
        return PeerConnection(endpoint=endpoint, socket=socket, monitor=monitor)

    def send(self, endpoint: Endpoint, head: bytes, body: memoryview | None = None, *, track: bool = False) -> Any:
        """Queue a message; never waits. With `track`, the body is not copied: it must not change until the returned
        tracker is `done`."""
        peer = self.to(endpoint)
        with peer.lock:
            if peer.socket.closed:
                return None
            if body is None:
                peer.socket.send(head)
                return None
            peer.socket.send(head, zmq.SNDMORE)
            trackers: list[Any] = []
            while len(body) > PART_BYTES:
                part, body = body[:PART_BYTES], body[PART_BYTES:]
                trackers.append(peer.socket.send(part, zmq.SNDMORE, copy=not track, track=track))
            last: Any = peer.socket.send(body, 0, copy=not track, track=track)
            return last if not trackers or not track else zmq.MessageTracker(last, *trackers)

    # -- receiving ------------------------------------------------------------------------------------------

    def receive(self, timeout_ms: int) -> tuple[bytes, memoryview | None] | None:
        """The next message as head and body (None: no body); None if nothing arrived in time."""
        if timeout_ms and not self._inbox.poll(timeout_ms):
            return None
        try:
            head = self._inbox.recv(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return None
        parts: list[memoryview] = []
        more = head.more
        while more:
            part = self._inbox.recv(copy=False)
            parts.append(part.buffer)
            more = part.more
        if not parts and len(head) == 0 and self._watch is not None:
            with contextlib.suppress(zmq.ZMQError):
                self._watch.heard(int(head.get(zmq.SRCFD)))
        body = None if not parts else parts[0] if len(parts) == 1 else memoryview(b"".join(parts))
        return head.bytes, body

    # -- which peers are alive ------------------------------------------------------------------------------

    def all(self) -> list[PeerConnection]:
        return list(self._peers.values())

    def peer_closes(self, name: str) -> None:
        """The peer announced its close, so the end of its connection is no fault."""
        peer = self._peers.get(name)
        if peer is not None:
            peer.closed = True

    def watch(self, wait_s: float) -> None:
        """Read every connection's events, then answer connection requests for up to `wait_s`. One thread only."""
        for peer in self.all():
            for event, _ in peer.monitor.drain():
                if event == SUCCEEDED:
                    peer.connected = True
                elif peer.connected and peer.broken is None:
                    peer.broken = time.monotonic()
        if time.monotonic() - self._last_admitted < _ADMITTED_S:
            wait_s = min(wait_s, _ADMITTED_POLL_S)
        if self._zap.poll(int(wait_s * 1000)):
            self._authenticate()
        for address in () if self._watch is None else self._watch.refused():
            self._refused(address)

    def why_gone(self, endpoint: Endpoint, *, streaming: bool = False) -> str | None:
        """Why a peer will send nothing more, for people; None while it counts as alive.

        `streaming`: its data comes by a stream, and this connection may end before that data arrives.
        """
        peer, now = self.to(endpoint), time.monotonic()
        where = f"{endpoint.host}, {endpoint.address} port {endpoint.port}"
        if peer.closed and not streaming:
            return f"has left the group ({where})"
        if peer.broken is not None and now - peer.broken > (_STREAMING_GRACE_S if streaming else _GRACE_S):
            return f"has died, is frozen, or its connection broke ({where})"
        if not peer.connected and now - peer.since > self.settings.connect_timeout_s:
            return f"could not be reached within {self.settings.connect_timeout_s:g} s ({where})"
        return None

    def close(self) -> None:
        """Send queued data, then close all sockets. No thread may be in receive() or watch()."""
        with self._lock:
            if self.closed:
                return
            self.closed = True
        for peer in self._peers.values():
            with peer.lock:
                in_vain = peer.broken is not None or peer.closed or not peer.connected
                peer.socket.disable_monitor()
                peer.socket.close(0 if in_vain else _LINGER_MS)
                peer.monitor.socket.close(0)
        self._zap.close(0)
        if self._watch is not None:
            self._watch.close()
        self._inbox.close(0)
        self._context.destroy(0)
