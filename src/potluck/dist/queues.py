"""Messages between processes: owns the queues in which they wait, and waiting for them with a deadline.

A thread that waits for a message reads the socket itself and queues messages for others, because passing a message
between threads would cost more than a small message. Another thread, the monitor, reads while no thread waits, so
that questions are answered and the end of a peer is detected.

On close, CLOSE is sent after all queued data. Its acknowledgement proves that everything before it arrived. Only
then are the sockets closed. A peer that does not read cannot delay this for long.
"""

from __future__ import annotations

import contextlib
import enum
import struct
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from potluck import checked
from potluck.bounds import Text, Whole
from potluck.dist.config import Resolved
from potluck.dist.connections import Connections, Endpoint
from potluck.errors import PotluckError, RankGoneError

T = TypeVar("T")

PROTOCOL = 5
_HEAD = struct.Struct("<HBB16sQqQII")
_MAGIC = 0x504C
_TICK_S = 0.1
_READ_MS = 100
_BATCH = 64
_CHECKED = 1
_CLOSE_S, _CLOSE_MOST_S, _SLOWEST_BYTES_PER_S = 5.0, 30.0, 125_000
"""How long closing waits for sent data to arrive; longer if much is queued, as on a slow link."""
_IDLE_CLOSE_S = 1.0
"""The same for peers to which nothing was sent."""


class Kind(enum.IntEnum):
    """The purpose of a message."""

    COLLECTIVE = 1
    POINT_TO_POINT = 2
    CLOSE = 4
    ABORT = 5
    ASK = 6
    """Asks a peer which collective of a group it is in."""
    TELL = 7
    CLOSE_ACK = 8


class RankState(msgspec.Struct, frozen=True, kw_only=True):
    """TELL: which collective of a group a rank is in."""

    sequence: Whole = 0
    """Number of the rank's last collective."""
    where: Text = "unknown"


@dataclass(frozen=True, slots=True)
class PeerMessage:
    """A message that arrived."""

    source: str
    total: int
    """Bytes of the whole tensor of which this is a part."""
    about: bytes
    """The sender's description of the collective it is in, or of the tensor it sends."""
    view: memoryview


Label = tuple[Kind, int, int]
"""(kind, group, tag) of a message."""

QueueKey = tuple[int, int, str, int]
"""(kind, group, source, tag)."""


class Aborted(Exception):
    """The group has failed; the text is the reason."""


class DeadlinePassed(Exception):
    """Nothing arrived before the deadline."""


class PeerGone(Exception):
    """A peer that was waited for is gone."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(reason)
        self.name = name
        self.reason = reason


class MessageQueues:
    """Sends and receives the messages of this process; all its groups share it."""

    def __init__(self, settings: Resolved, host: str = "") -> None:
        self.connections = Connections(settings, host)
        self.endpoint = self.connections.endpoint
        self._checksum = settings.checksum
        self.lock = threading.Lock()
        self._arrived = threading.Condition(self.lock)
        self._reading = False
        self._queues: dict[QueueKey, deque[PeerMessage]] = {}
        self._sources: dict[tuple[int, int], deque[str]] = {}
        """For each (group, tag): the senders of waiting point-to-point messages, in the order of arrival."""
        self._aborted: dict[int, str] = {}
        self._told: dict[tuple[int, str], RankState] = {}
        self._answers: dict[int, Callable[[], RankState]] = {}
        self._known: dict[str, Endpoint] = {}
        self._sent_bytes: dict[str, int] = {}
        """For each peer to which data was sent."""
        self._acknowledged: set[str] = set()
        self.no_stream: set[str] = set()
        """Peers to which no stream could be opened."""
        self._closing = False
        self._stop = threading.Event()
        self._monitor = threading.Thread(target=self._watch, name="potluck-dist-monitor", daemon=True)
        self._monitor.start()

    # -- members --------------------------------------------------------------------------------------------

    def admit(self, endpoints: list[Endpoint]) -> None:
        self.connections.admit(endpoints)
        self._known.update((endpoint.name, endpoint) for endpoint in endpoints)

    def open(self, group: int, answer: Callable[[], RankState]) -> None:
        """Begin a group; `answer` returns this rank's present collective when another rank asks."""
        with self.lock:
            self._answers[group] = answer

    def forget(self, group: int) -> None:
        """End a group and drop its messages."""
        with self.lock:
            self._answers.pop(group, None)
            for key in [key for key in self._queues if key[1] == group]:
                del self._queues[key]
            for source in [source for source in self._sources if source[0] == group]:
                del self._sources[source]

    # -- sending --------------------------------------------------------------------------------------------

    def send(
        self,
        to: Endpoint,
        label: Label,
        body: memoryview | None = None,
        *,
        about: bytes = b"",
        total: int = 0,
        track: bool = False,
    ) -> Any:
        kind, group, tag = label
        flags = _CHECKED if self._checksum and body is not None else 0
        crc = zlib.crc32(body) if flags and body is not None else 0
        name = self.endpoint.name.encode("ascii")
        head = _HEAD.pack(_MAGIC, (PROTOCOL << 4) | kind, flags, name, group, tag, total, crc, len(about)) + about
        if kind in (Kind.COLLECTIVE, Kind.POINT_TO_POINT):
            self._sent_bytes[to.name] = self._sent_bytes.get(to.name, 0) + (0 if body is None else len(body))
        return self.connections.send(to, head, body, track=track)

    # -- receiving ------------------------------------------------------------------------------------------

    def take(
        self,
        group: int,
        source: Endpoint,
        tag: int,
        deadline: float,
        kind: Kind = Kind.COLLECTIVE,
        contrary: Callable[[PeerMessage], bool] | None = None,
    ) -> PeerMessage:
        """The next message of that kind from one peer. Raises Aborted, PeerGone or DeadlinePassed.

        `contrary`: while that peer sends nothing, return a message of another peer for which this is true.
        """
        key: QueueKey = (kind, group, source.name, tag)

        def look() -> PeerMessage | None:
            waiting = self._queues.get(key)
            if waiting:
                message = waiting.popleft()
                if not waiting:
                    del self._queues[key]
                return message
            if contrary is not None:
                for (of_kind, of_group, _, of_tag), messages in self._queues.items():
                    if (of_kind, of_group, of_tag) == (kind, group, tag) and messages and contrary(messages[0]):
                        return messages[0]
            return None

        return self.wait(look, group, [source], deadline)

    def sources(self, group: int, tag: int) -> list[str]:
        """Who has sent point-to-point messages with this tag, in the order of arrival. Call with the lock held."""
        return list(self._sources.get((group, tag), ()))

    def has_message(self, group: int, source: str, tag: int) -> bool:
        """Call with the lock held."""
        return bool(self._queues.get((Kind.POINT_TO_POINT, group, source, tag)))

    def notify(self) -> None:
        """Wake all waiting threads. Call with the lock held."""
        self._arrived.notify_all()

    def wait(self, look: Callable[[], T | None], group: int, sources: list[Endpoint], deadline: float) -> T:
        """Wait until `look`, called with the lock held, finds something; raise if all `sources` are gone."""
        while True:
            with self.lock:
                found = look()
                if found is not None:
                    return found
                self._check(group, sources, deadline)
                if self._reading:
                    self._arrived.wait(_READ_MS / 1000)
                    continue
                self._reading = True
            left_ms = max(1, int((deadline - time.monotonic()) * 1000))
            self._read(min(_READ_MS, left_ms))

    def _check(self, group: int, sources: list[Endpoint], deadline: float) -> None:
        if group in self._aborted:
            raise Aborted(self._aborted[group])
        if self.connections.closed or self._stop.is_set():
            raise RankGoneError("the process group was shut down during a collective")
        reasons = {source.name: self.connections.why_gone(source) for source in sources}
        if reasons and all(reasons.values()):
            name, reason = next(iter(reasons.items()))
            raise PeerGone(name, str(reason))
        if time.monotonic() > deadline:
            raise DeadlinePassed

    def _read(self, timeout_ms: int) -> None:
        """Queue the arrived messages, then let another thread read. The caller has set `_reading`."""
        try:
            for _ in range(_BATCH):
                received = self.connections.receive(timeout_ms)
                if received is None:
                    return
                timeout_ms = 0
                self._deliver(*received)
        finally:
            with self.lock:
                self._reading = False
                self._arrived.notify_all()

    def _deliver(self, head: bytes, body: memoryview | None) -> None:
        if len(head) < _HEAD.size:
            return
        magic, kind, flags, raw, group, tag, total, crc, length = _HEAD.unpack_from(head)
        if magic != _MAGIC or kind >> 4 != PROTOCOL:
            return
        kind &= 15
        source = raw.decode("ascii", "replace")
        about = head[_HEAD.size : _HEAD.size + length]
        view = memoryview(b"") if body is None else body
        if flags & _CHECKED and zlib.crc32(view) != crc:
            self._fail(group, f"a message from {source} arrived damaged (checksum)")
            return
        if kind in (Kind.COLLECTIVE, Kind.POINT_TO_POINT):
            message = PeerMessage(source, total, about, view)
            with self.lock:
                self._queues.setdefault((kind, group, source, tag), deque()).append(message)
                if kind == Kind.POINT_TO_POINT:
                    names = self._sources.setdefault((group, tag), deque(maxlen=4096))
                    if source not in names:
                        names.append(source)
        else:
            self._control(kind, source, group, about)

    def _control(self, kind: int, source: str, group: int, about: bytes) -> None:
        if kind == Kind.CLOSE:
            self.connections.peer_closes(source)
            # Two that close at once need no acknowledgement: each gets the other's CLOSE.
            if not self._closing and source in self._known:
                with contextlib.suppress(PotluckError):
                    self.send(self._known[source], (Kind.CLOSE_ACK, 0, 0))
                self.connections.peer_closes(source)  # again: the acknowledgement may have made the connection
        elif kind == Kind.ABORT:
            self._fail(group, about.decode("utf-8", "replace"))
        elif kind == Kind.ASK:
            answer, known = self._answers.get(group), self._known.get(source)
            if known is not None:
                told = msgspec.json.encode(answer() if answer is not None else RankState())
                with contextlib.suppress(PotluckError):
                    self.send(known, (Kind.TELL, group, 0), about=told)
        elif kind == Kind.TELL:
            with contextlib.suppress(ValueError), self.lock:
                self._told[group, source] = checked.decode(about, RankState)
        elif kind == Kind.CLOSE_ACK:
            with self.lock:
                self._acknowledged.add(source)

    # -- failing --------------------------------------------------------------------------------------------

    def _fail(self, group: int, text: str) -> None:
        with self.lock:
            self._aborted.setdefault(group, text)
            self._arrived.notify_all()

    def abort(self, group: int, text: str, others: list[Endpoint]) -> None:
        """End every wait of the group, here and on the others, with this text."""
        self._fail(group, text)
        for other in others:
            with contextlib.suppress(PotluckError):
                self.send(other, (Kind.ABORT, group, 0), about=text.encode()[:4000])

    def aborted(self, group: int) -> str | None:
        return self._aborted.get(group)

    def ask(self, group: int, others: list[Endpoint], within_s: float) -> dict[str, RankState]:
        """What the other ranks of this group do, by name; peers that do not answer in time are left out."""
        wanted = {other.name for other in others}
        with self.lock:
            for name in wanted:
                self._told.pop((group, name), None)
        for other in others:
            with contextlib.suppress(PotluckError):
                self.send(other, (Kind.ASK, group, 0))

        def look() -> bool | None:
            return all((group, name) in self._told for name in wanted) or None

        with contextlib.suppress(PotluckError, DeadlinePassed, PeerGone, Aborted):
            self.wait(look, group, others, time.monotonic() + within_s)
        with self.lock:
            return {name: self._told[group, name] for name in wanted if (group, name) in self._told}

    # -- the monitor thread, and the end --------------------------------------------------------------------

    def _watch(self) -> None:
        while not self._stop.is_set():
            self.connections.watch(_TICK_S)
            with self.lock:
                if self._reading:
                    continue
                self._reading = True
            self._read(0)

    def _close_handshake(self) -> None:
        """Send CLOSE, and wait until every peer has acknowledged it, is gone, or its time is over."""
        began = time.monotonic()
        self._closing = True
        until: dict[str, float] = {}
        for peer in self.connections.all():
            name, nbytes = peer.endpoint.name, self._sent_bytes.get(peer.endpoint.name)
            if peer.closed or peer.broken is not None:
                continue
            with contextlib.suppress(PotluckError):
                self.send(peer.endpoint, (Kind.CLOSE, 0, 0))
            if nbytes is not None:
                until[name] = began + min(_CLOSE_MOST_S, _CLOSE_S + nbytes / _SLOWEST_BYTES_PER_S)
            elif peer.connected:
                until[name] = began + _IDLE_CLOSE_S

        def look() -> bool | None:
            now = time.monotonic()
            for name in list(until):
                peer = self.connections.to(self._known[name])
                unreached = not peer.connected and now > began + _CLOSE_S
                if name in self._acknowledged or peer.closed or peer.broken or unreached or now > until[name]:
                    del until[name]
            return not until or None

        with contextlib.suppress(PotluckError, DeadlinePassed, PeerGone, Aborted):
            self.wait(look, 0, [], began + _CLOSE_MOST_S + 1.0)

    def close(self) -> None:
        """Wait until sent data has arrived, and close all connections."""
        self._close_handshake()
        self._stop.set()
        self._monitor.join()
        with self.lock:
            deadline = time.monotonic() + 1.0
            while self._reading and time.monotonic() < deadline:
                self._arrived.wait(0.05)
            if self._reading:
                return  # a thread that does not end still reads: its socket must stay open
            self._reading = True
        self.connections.close()
