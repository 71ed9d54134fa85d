"""Moves the bytes of connections over links: the sockets, and what is in transit between them.

`shaping.py` decides what a link does to a chunk. Rates apply when a chunk is read, so that a sender that is too
fast finds its own buffer full; latency applies when it is written. Connections take turns, a chunk each, and a
chunk takes about 2 ms of its link's time.
"""

from __future__ import annotations

import contextlib
import math
import os
import selectors
import socket
import struct
from collections import deque
from collections.abc import Callable

from potluck.lab.shaping import Direction, Link
from potluck.wire.reach import UNDER_WAY

MOST_CHUNKS = 16_384
"""Most chunks in one pipe: each may be one byte, and has its own overhead."""
MOST_BUFFERED_BYTES = 256 * 1024 * 1024
"""Most bytes in all pipes together; beyond it a pipe holds at most one chunk."""

# Loopback's own segments of 64 KiB give every sender a buffer of 4 MB, seconds of a thin link's time.
_SEGMENT_BYTES = 1448
_NOT_NOW = (BlockingIOError, InterruptedError)
_FIN = b""
_RESET = None


class Flow:
    """All connections and their turns. Used by one thread at a time."""

    def __init__(self, counters: list[int] | memoryview) -> None:
        """`counters` holds, for each link in turn, the bytes that went up and those that went down."""
        self.counters = counters
        self.selector = selectors.DefaultSelector()
        self.connections: set[Connection] = set()
        self.buffered_bytes = 0
        self.hungry: deque[Pipe] = deque()
        """Pipes whose source has data, in the order of their turns."""
        self.loaded: dict[Pipe, None] = {}
        """Pipes with data in transit."""

    def turn(self, now: float) -> float:
        """Do all work that is possible now. Returns the time of the next work."""
        wake_at = math.inf
        for connection in [c for c in self.connections if c.waits]:
            wake_at = min(wake_at, connection.connect(now))
        wake_at = min(wake_at, self._read(now))
        for pipe in list(self.loaded):
            wake_at = min(wake_at, pipe.write(now))
        return wake_at

    def _read(self, now: float) -> float:
        """Give each waiting pipe a turn. Returns the time of the next turn."""
        wake_at = math.inf
        waiting: list[Pipe] = []
        served: list[Pipe] = []
        while self.hungry:
            pipe = self.hungry.popleft()
            if pipe.ended:
                continue
            pipe.hungry_since = min(pipe.hungry_since, now)
            opens_at = pipe.policy.opens_at(now)
            if opens_at > now:
                wake_at = min(wake_at, opens_at)
                waiting.append(pipe)
            elif not pipe.has_room(now):
                pipe.parked = True  # until something of it is written
            elif pipe.read(now):
                wake_at = min(wake_at, pipe.policy.opens_at(now))
                served.append(pipe)
        # Pipes that could not have a turn come before those that had one.
        self.hungry.extend(waiting)
        self.hungry.extend(served)
        return wake_at

    def reset(self, link: Link) -> None:
        """Reset every connection that crosses a link."""
        for connection in [c for c in self.connections if c.link is link]:
            connection.close(reset=True)

    def close(self) -> None:
        for connection in list(self.connections):
            connection.close(reset=True)
        self.selector.close()


class End:
    """One socket, and the events that the selector reports for it: each once, until it is requested again."""

    def __init__(self, selector: selectors.BaseSelector, member: socket.socket) -> None:
        self.socket = member
        self.on_read: Callable[[], None]
        self.on_write: Callable[[], None]
        self._selector = selector
        self._wanted = 0
        member.setblocking(False)
        prepare(member)

    def want(self, event: int) -> None:
        self._set(self._wanted | event)

    def close(self, *, reset: bool) -> None:
        self._set(0)
        close_socket(self.socket, reset=reset)

    def _set(self, events: int) -> None:
        if not self._wanted and events:
            self._selector.register(self.socket, events, self._ready)
        elif self._wanted and not events:
            self._selector.unregister(self.socket)
        elif events != self._wanted:
            self._selector.modify(self.socket, events, self._ready)
        self._wanted = events

    def _ready(self, mask: int) -> None:
        mask &= self._wanted  # something before this in the same round may have closed it
        self._set(self._wanted & ~mask)
        if mask & selectors.EVENT_READ:
            self.on_read()
        if mask & selectors.EVENT_WRITE:
            self.on_write()


class Connection:
    """The client, the target, and a pipe for each direction."""

    def __init__(self, flow: Flow, link: Link, accepted: socket.socket, target: tuple[str, int]) -> None:
        self.flow = flow
        self.link = link
        self.waits = True
        """The target is not connected yet, because the link is cut."""
        self._target = target
        self._near = End(flow.selector, accepted)
        self._far = End(flow.selector, socket.socket(socket.AF_INET, socket.SOCK_STREAM))
        self._pipes = (
            Pipe(self, self._near, self._far, "up"),
            Pipe(self, self._far, self._near, "down"),
        )

    def connect(self, now: float) -> float:
        """Begin to connect. If the link is cut, connect when it no longer is."""
        held_until = max(policy.held_until(now) for policy in self.link.policies.values())
        if held_until > now:
            return held_until
        self.waits = False
        if self._far.socket.connect_ex(self._target) not in UNDER_WAY:
            self.close(reset=True)
        else:
            self._far.on_write = self._connected
            self._far.want(selectors.EVENT_WRITE)
        return math.inf

    def _connected(self) -> None:
        if self._far.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self.close(reset=True)
            return
        for pipe in self._pipes:
            pipe.begin()

    def broken(self, end: End, now: float) -> None:
        """An end has failed: deliver its data first, and then its failure."""
        for pipe in self._pipes:
            if pipe.source is end:
                pipe.source_broke(now)
            else:
                pipe.sink_broke()

    def close_if_over(self) -> None:
        if all(pipe.ended and pipe.finished for pipe in self._pipes):
            self.close(reset=False)

    def close(self, *, reset: bool) -> None:
        if self not in self.flow.connections:
            return
        self.flow.connections.remove(self)
        for pipe in self._pipes:
            pipe.ended = True
            pipe.discard()
        for end in (self._near, self._far):
            end.close(reset=reset)


class Pipe:
    """One direction of one connection: reads when the policy lets it, writes what is due, keeps the order."""

    def __init__(self, connection: Connection, source: End, sink: End, direction: Direction) -> None:
        self._connection = connection
        self._flow = connection.flow
        self.source = source
        self._sink = sink
        self.policy = connection.link.policies[direction]
        self._counter = 2 * connection.link.number + (direction == "down")
        self._chunks: deque[tuple[float, bytes | None]] = deque()
        self._bytes = 0
        self._last_due = -math.inf
        self._vanishes = False  # nothing of it arrives any more
        self._blocked = False
        self.hungry_since = math.inf
        self.parked = False
        """It could read, but has no room."""
        self.ended = False
        """Nothing more is read."""
        self.finished = False
        """Nothing more is written."""

    def begin(self) -> None:
        self.source.on_read = self._become_hungry
        self._sink.on_write = self._unblocked
        self.source.want(selectors.EVENT_READ)

    def _become_hungry(self) -> None:
        self.parked = False
        self.hungry_since = math.inf
        self._flow.hungry.append(self)

    def _unblocked(self) -> None:
        self._blocked = False

    def has_room(self, now: float) -> bool:
        if not self._chunks:
            return True
        full = self._bytes >= self.policy.room_bytes(now) or len(self._chunks) >= MOST_CHUNKS
        return not full and self._flow.buffered_bytes < MOST_BUFFERED_BYTES

    def read(self, now: float) -> bool:
        """Take a chunk from the source. Returns whether there is probably more."""
        quantum = self.policy.quantum_bytes(now)
        try:
            chunk = self.source.socket.recv(quantum)
        except _NOT_NOW:
            self.source.want(selectors.EVENT_READ)
            return False
        except OSError:
            self._connection.broken(self.source, now)
            return False
        due = self.policy.due(len(chunk), now, self.hungry_since)
        self._flow.counters[self._counter] += len(chunk)
        self._vanishes = self._vanishes or self.policy.vanishes(now)
        self.ended = not chunk
        if chunk and not (self._vanishes or self.finished):
            arrives, self.ended = self.policy.edited(chunk, now)
            if arrives:
                self._append(arrives, due)
        if self.ended:
            self._append_end(_FIN, due)
        elif len(chunk) < quantum:
            self.source.want(selectors.EVENT_READ)
        return not self.ended and len(chunk) == quantum

    def source_broke(self, now: float) -> None:
        self.ended = True
        if self.finished and not self._vanishes:
            self._connection.close(reset=True)
            return
        self._vanishes = self._vanishes or self.policy.vanishes(now)
        self._append_end(_RESET, self.policy.due(0, now, now))

    def sink_broke(self) -> None:
        """Keep reading and discard it, to see the source's end."""
        self.finished = True
        self.discard()
        if self.parked:
            self._become_hungry()

    def _append_end(self, marker: bytes | None, due: float) -> None:
        """Close the sink's direction after all data."""
        if self._vanishes or self.finished:
            self.finished = True
            self._connection.close_if_over()
        else:
            self._append(marker, due)

    def _append(self, chunk: bytes | None, due: float) -> None:
        self._last_due = max(due, self._last_due)
        self._chunks.append((self._last_due, chunk))
        self._count(len(chunk or b""))
        self._flow.loaded[self] = None

    def _count(self, change: int) -> None:
        self._bytes += change
        self._flow.buffered_bytes += change

    def discard(self) -> None:
        self._count(-self._bytes)
        self._chunks.clear()
        self._flow.loaded.pop(self, None)

    def write(self, now: float) -> float:
        """Deliver chunks that are due. Returns when the next one will be due, if that depends on time."""
        wake_at = math.inf
        while self._chunks and not self._blocked:
            due, chunk = self._chunks[0]
            wake_at = max(due, self.policy.held_until(now))
            if wake_at > now:
                break
            wake_at = math.inf
            try:
                self._deliver(chunk, due)
            except _NOT_NOW:
                self._blocked = True
                self._sink.want(selectors.EVENT_WRITE)
            except OSError:
                self._connection.broken(self._sink, now)
        if not self._chunks:
            self._flow.loaded.pop(self, None)
        if self.parked and not self.ended and self.has_room(now):
            self._become_hungry()
            return now
        return wake_at

    def _deliver(self, chunk: bytes | None, due: float) -> None:
        if chunk is _RESET:
            self._connection.close(reset=True)
        elif not chunk:
            self._sink.socket.shutdown(socket.SHUT_WR)
            self._chunks.popleft()
            self.finished = True
            self._connection.close_if_over()
        else:
            sent = self._sink.socket.send(chunk)
            self._count(-sent)
            if sent < len(chunk):
                self._chunks[0] = (due, chunk[sent:])
            else:
                self._chunks.popleft()


def prepare(member: socket.socket) -> None:
    """Send small chunks immediately, in segments of Ethernet's size, if the system can."""
    with contextlib.suppress(OSError):  # macOS says so of a connection that is gone again
        member.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with contextlib.suppress(OSError, AttributeError):  # Windows has no such option
        member.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, _SEGMENT_BYTES)


def close_socket(member: socket.socket, *, reset: bool) -> None:
    """Close a socket, in order or so that its peer sees a reset."""
    if reset:
        with contextlib.suppress(OSError):
            at_once = struct.pack("hh" if os.name == "nt" else "ii", 1, 0)
            member.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, at_once)
    member.close()
