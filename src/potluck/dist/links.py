"""The sockets between this process and its peers: owns keys, who is let in, and who is alive.

It must not know groups, ranks or what the parcels mean.

Every process has one socket that takes parcels (PULL) and one for each peer that it has something to say to
(PUSH). Each has a key pair (CURVE); the public keys come with the endpoints, from the rendezvous, and nobody
else is let in. Who has not shown a key gets little of this process, by the rules of a host's door (wire/door.py).
A connection that breaks is a peer that is gone: ZeroMQ would connect anew, but what was on the way
is lost, and a collective with a hole in it must not go on.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import json
import logging
import os
import re
import secrets
import struct
import sys
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import zmq
from zmq.utils import z85

from potluck.errors import NetworkError, PortTakenError, WireError
from potluck.wire import gate
from potluck.wire.admitted import Admitted
from potluck.wire.door import CURVE_OVERHEAD_BYTES, HANDSHAKE_S, ZAP_ENDPOINT, Watch
from potluck.wire.files import make_room
from potluck.wire.lobby import Lobby

_ZAP_DOMAIN = b"potluck-dist"
_GONE = int(zmq.EVENT_DISCONNECTED)
_THERE = int(zmq.EVENT_HANDSHAKE_SUCCEEDED)
_GRACE_S = 0.5
"""How long after its connection broke a peer's last parcels may still be on their way to us."""
_STREAMING_GRACE_S = 3.0
"""The same for what comes by a connection of its own."""
_LINGER_MS = 3000

PART_BYTES = 512 << 10
"""The longest frame, and so the most that a connection without a key can make this process keep. Longer bodies go
as several frames; a chunk of the default size is one."""
MOST_WAITING = 512
"""Connections that have not shown a key; and never more than a quarter of the files that may be open."""
_KNOCK = b""
"""What a peer says first, so that its connection is known to be a peer's."""
_LET_IN_S, _LET_IN_DOZE_S = 0.5, 0.005
"""After somebody was let in, its knock is read soon: until then a crowd of its own address could push it out."""
_ANSWERS_A_TURN = 64
_STRANGERS_NAMED = 5
_KEY = re.compile(r"[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")
"""32 bytes in Z85."""
_NAME = re.compile("[0-9a-f]{16}")
_MOST_CHARACTERS = 255

log = logging.getLogger("potluck.dist")


def is_short_text(value: object) -> bool:
    """Whether it can be shown to people: whoever writes to the store could else write to their terminals."""
    return isinstance(value, str) and len(value) <= _MOST_CHARACTERS and value.isprintable()


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Where a process takes parcels. It crosses the store as JSON."""

    name: str
    """Random, new for every start: a process that was started again is another peer."""
    address: str
    port: int
    key: str
    """The public key (Z85), or "" where encryption is off."""
    host: str
    """The machine's name, for people."""

    def to_json(self) -> str:
        return json.dumps({slot: getattr(self, slot) for slot in self.__slots__})

    @classmethod
    def from_json(cls, text: str | bytes) -> Endpoint:
        try:
            values = json.loads(text)
            endpoint = cls(**{slot: values[slot] for slot in cls.__slots__})
            ipaddress.ip_address(endpoint.address)
            sound = _NAME.fullmatch(endpoint.name) and 0 < endpoint.port < 65536 and isinstance(endpoint.key, str)
            if not sound or not is_short_text(endpoint.host):
                raise ValueError
            return endpoint
        except (ValueError, KeyError, TypeError, RecursionError):
            raise WireError(
                "the store holds something that is not a rank's address",
                hint="do all ranks run the same version of potluck?",
            ) from None

    @property
    def has_key(self) -> bool:
        """Whether what goes there can be encrypted."""
        return _KEY.fullmatch(self.key) is not None

    @property
    def url(self) -> str:
        address = f"[{self.address}]" if ":" in self.address else self.address
        return f"tcp://{address}:{self.port}"


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSettings:
    """What the configuration says about sockets."""

    address: str = "127.0.0.1"
    port: int = 0
    """Where to listen; 0: whatever is free."""
    door_port: int = 0
    """Where the other of two ranks connects for large tensors; 0: whatever is free."""
    encrypt: bool = True
    heartbeat_s: float = 1.0
    """libzmq's own threads ask and answer, so that a process which computes for long is not taken for dead."""
    heartbeat_timeout_s: float = 5.0
    connect_s: float = 60.0


@dataclass(slots=True)
class _Link:
    """What this process knows of one peer, and how it speaks to it."""

    endpoint: Endpoint
    socket: zmq.Socket[bytes]
    monitor: zmq.Socket[bytes]
    lock: threading.Lock = field(default_factory=threading.Lock)
    since: float = 0.0
    there: bool = False
    broken: float | None = None
    left: bool = False


def _io_threads() -> int:
    """Half of them encrypt what goes out, half decrypt what comes in: one for both would be busy with either."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return 4 if cores >= 8 else 2


class Links:
    """All sockets of this process. `receive` belongs to one thread at a time; the rest is safe for all."""

    def __init__(self, settings: LinkSettings, host: str) -> None:
        self._settings, self.door_port, self.encrypts = settings, settings.door_port, settings.encrypt
        threads = _io_threads()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=threads)
        half = threads // 2
        self._to_receive, self._to_send = (1 << half) - 1, ((1 << half) - 1) << half
        self._public, self._secret = zmq.curve_keypair() if settings.encrypt else (b"", b"")
        self._admitted: set[bytes] = set()
        self._let_in = -_LET_IN_S
        self._strangers = 0
        self._links: dict[str, _Link] = {}
        self._lock = threading.Lock()
        self.closed = False
        self._zap = self._context.socket(zmq.REP)
        self._zap.bind(ZAP_ENDPOINT)
        self._inbox = self._new_inbox()
        self._watch = self._new_watch() if settings.encrypt else None
        try:
            port = self._bind()
        except BaseException:
            if self._watch is not None:
                self._watch.close()
            self._context.destroy(0)
            raise
        name = secrets.token_hex(8)
        self.endpoint = Endpoint(
            name=name, address=settings.address, port=port, key=self._public.decode("ascii"), host=host
        )

    def _new_inbox(self) -> zmq.Socket[bytes]:
        inbox = self._context.socket(zmq.PULL)
        inbox.setsockopt(zmq.RCVHWM, 0)
        inbox.setsockopt(zmq.AFFINITY, self._to_receive)
        inbox.setsockopt(zmq.MAXMSGSIZE, PART_BYTES + CURVE_OVERHEAD_BYTES)
        inbox.setsockopt(zmq.HANDSHAKE_IVL, int(HANDSHAKE_S * 1000))
        inbox.setsockopt(zmq.IPV6, int(":" in self._settings.address))
        if self._settings.encrypt:
            inbox.setsockopt(zmq.CURVE_SERVER, 1)
            inbox.setsockopt(zmq.CURVE_SECRETKEY, self._secret)
            inbox.setsockopt(zmq.ZAP_DOMAIN, _ZAP_DOMAIN)
            inbox.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
        return inbox

    def _new_watch(self) -> Watch:
        """Turns out those who crowd the inbox without a key. Peers are never too many."""
        limit = make_room()
        most = MOST_WAITING if limit is None else min(MOST_WAITING, limit // 4)
        self._batch = max(1, most // 4)
        lobby = Lobby(most=most, stays_s=HANDSHAKE_S)
        return Watch(self._context.socket, self._inbox, lobby, Admitted(most=sys.maxsize, most_bytes=sys.maxsize))

    def _bind(self) -> int:
        settings = self._settings
        address = f"[{settings.address}]" if ":" in settings.address else settings.address
        try:
            if self._watch is not None and gate.IS_AVAILABLE:
                entrance = gate.Gate(settings.address, settings.port, self._batch)
                try:
                    entrance.lend_to(self._inbox)
                finally:
                    self._watch.keep(entrance)  # and closes it
                return entrance.port
            self._inbox.bind(f"tcp://{address}:{settings.port or '*'}")
        except (zmq.ZMQError, OSError) as error:
            if error.errno in (zmq.EADDRINUSE, errno.EADDRINUSE):
                raise PortTakenError(
                    f"port {settings.port} of {settings.address} is taken",
                    hint="choose another port base, or 0 for any free port",
                ) from None
            raise NetworkError(
                f"this rank cannot listen on {settings.address}: {error}",
                hint="name an address of this machine, or leave the choice to potluck",
            ) from None
        bound = self._inbox.getsockopt(zmq.LAST_ENDPOINT)
        assert isinstance(bound, bytes)
        return int(bound.rstrip(b"\0").rpartition(b":")[2])

    # -- who is let in ------------------------------------------------------------------------------------

    def admit(self, endpoints: Iterable[Endpoint]) -> None:
        """Their holders may send to this process from now on.

        Raises:
            WireError: one of them has no key, and this process encrypts.
        """
        keys = [self._key_of(endpoint) for endpoint in endpoints]
        with self._lock:
            self._admitted.update(keys)

    def _key_of(self, endpoint: Endpoint) -> bytes:
        if not self.encrypts:
            return b""
        if not endpoint.has_key:
            raise WireError(f"the peer at {endpoint.url} has no key to encrypt with")
        return endpoint.key.encode("ascii")

    def _answer_door(self) -> None:
        """Of those who knock, some at a time: there is more to do than to answer a flood of strangers."""
        with contextlib.suppress(zmq.Again):
            for _ in range(_ANSWERS_A_TURN):
                version, number, domain, address, _, mechanism, *credentials = self._zap.recv_multipart(zmq.NOBLOCK)
                key = z85.encode(credentials[0]) if credentials else b""
                with self._lock:
                    known = domain == _ZAP_DOMAIN and mechanism == b"CURVE" and key in self._admitted
                status = [b"200", b"OK"] if known else [b"400", b"unknown key"]
                self._zap.send_multipart([version, number, *status, b"", b""])
                if known:
                    self._let_in = time.monotonic()
                else:
                    self._turned_away(address.decode("ascii", "replace"))

    def _turned_away(self, address: str) -> None:
        """Say so, but not without end."""
        self._strangers += 1
        if self._strangers <= _STRANGERS_NAMED or self._strangers % 100 == 0:
            log.info("refused a stranger from %s (%d so far)", address, self._strangers)

    # -- sending --------------------------------------------------------------------------------------------

    def reach(self, endpoint: Endpoint) -> _Link:
        """The link to a peer; its socket begins to connect when this is first asked."""
        link = self._links.get(endpoint.name)
        if link is not None:
            return link
        with self._lock:
            if self.closed:
                raise NetworkError("the process group has been shut down", hint="make a new one to go on")
            link = self._links.get(endpoint.name)
            if link is None:
                link = self._links[endpoint.name] = self._connect(endpoint)
        return link

    def _connect(self, endpoint: Endpoint) -> _Link:
        key = self._key_of(endpoint)
        socket = self._context.socket(zmq.PUSH)
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.AFFINITY, self._to_send)
        socket.setsockopt(zmq.LINGER, _LINGER_MS)
        socket.setsockopt(zmq.IPV6, int(":" in endpoint.address))
        socket.setsockopt(zmq.HEARTBEAT_IVL, int(self._settings.heartbeat_s * 1000))
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, int(self._settings.heartbeat_timeout_s * 1000))
        socket.setsockopt(zmq.HANDSHAKE_IVL, int(HANDSHAKE_S * 1000))
        if self.encrypts:
            socket.setsockopt(zmq.CURVE_SERVERKEY, key)
            socket.setsockopt(zmq.CURVE_PUBLICKEY, self._public)
            socket.setsockopt(zmq.CURVE_SECRETKEY, self._secret)
        where = f"inproc://monitor-{endpoint.name}"
        socket.monitor(where, _GONE | _THERE)
        monitor = self._context.socket(zmq.PAIR)
        monitor.connect(where)
        socket.connect(endpoint.url)
        socket.send(_KNOCK)
        now = time.monotonic()
        return _Link(endpoint=endpoint, socket=socket, monitor=monitor, since=now)

    def send(self, endpoint: Endpoint, head: bytes, body: memoryview | None = None, *, track: bool = False) -> Any:
        """Queue a parcel; never waits. With `track`, the body is not copied: it must stay as it is until the
        tracker that is returned says `done`."""
        link = self.reach(endpoint)
        with link.lock:
            if link.socket.closed:
                return None
            if body is None:
                link.socket.send(head)
                return None
            link.socket.send(head, zmq.SNDMORE)
            trackers: list[Any] = []
            while len(body) > PART_BYTES:
                part, body = body[:PART_BYTES], body[PART_BYTES:]
                trackers.append(link.socket.send(part, zmq.SNDMORE, copy=not track, track=track))
            last: Any = link.socket.send(body, 0, copy=not track, track=track)
            return last if not trackers or not track else zmq.MessageTracker(last, *trackers)

    # -- receiving ------------------------------------------------------------------------------------------

    def receive(self, timeout_ms: int) -> tuple[bytes, memoryview | None] | None:
        """The next parcel, as its head and its body, if it has one; None when nothing came in time."""
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

    def peers(self) -> list[Endpoint]:
        """To whom there is a link."""
        return [link.endpoint for link in list(self._links.values())]

    def has_left(self, name: str) -> None:
        """It said goodbye: its broken connection is then no accident."""
        link = self._links.get(name)
        if link is not None:
            link.left = True

    # -- who is alive ---------------------------------------------------------------------------------------

    def watch(self, doze_s: float) -> None:
        """Look at every connection, then wait a moment at the door; one thread's only."""
        for link in list(self._links.values()):
            with contextlib.suppress(zmq.Again):
                while True:
                    event, _ = struct.unpack("=Hi", link.monitor.recv_multipart(zmq.NOBLOCK)[0])
                    if event == _THERE:
                        link.there = True
                    elif event == _GONE and link.there and link.broken is None:
                        link.broken = time.monotonic()
        if time.monotonic() - self._let_in < _LET_IN_S:
            doze_s = min(doze_s, _LET_IN_DOZE_S)
        if self._zap.poll(int(doze_s * 1000)):
            self._answer_door()
        for address in () if self._watch is None else self._watch.turned_away():
            self._turned_away(address)

    def why_gone(self, endpoint: Endpoint, *, streaming: bool = False) -> str | None:
        """What happened to a peer that is waited for, in words; None while nothing speaks against it.

        `streaming`: its bytes come by a connection of their own, which a farewell or an end of this one may
        overtake.
        """
        link = self.reach(endpoint)
        now = time.monotonic()
        where = f"{endpoint.host}, {endpoint.address} port {endpoint.port}"
        if link.left and not streaming:
            return f"has left the group ({where})"
        if link.broken is not None and now - link.broken > (_STREAMING_GRACE_S if streaming else _GRACE_S):
            return f"has died, is frozen, or its connection broke ({where})"
        if not link.there and now - link.since > self._settings.connect_s:
            return f"could not be reached within {self._settings.connect_s:g} s ({where})"
        return None

    def close(self, farewell: bytes | None = None) -> None:
        """Say goodbye, let what was sent go out, and end all sockets. Nobody may be in receive() or watch()."""
        with self._lock:
            if self.closed:
                return
            self.closed = True
        for link in self._links.values():
            with link.lock:
                if farewell is not None and link.broken is None and not link.left:
                    link.socket.send(farewell)
                linger = 0 if link.broken is not None or link.left or not link.there else _LINGER_MS
                link.socket.disable_monitor()
                link.socket.close(linger)
                link.monitor.close(0)
        self._zap.close(0)
        if self._watch is not None:
            self._watch.close()
        self._inbox.close(0)
        self._context.destroy(0)
