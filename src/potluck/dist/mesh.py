"""The mail between processes: owns parcels, the boxes in which they wait, and waiting for them with a deadline.

It must not know collectives: whoever waits says for what, from whom, and until when.

No thread stands between a parcel and who waits for it: whoever waits reads the socket, and puts what is meant for
others into their boxes. One thread of our own, the pulse, reads when nobody waits, so that questions are answered
and the end of a peer is seen.

On close, FAREWELL is sent after all queued data. Its acknowledgement proves that everything before it arrived.
Only then are the doors closed. A peer that reads nothing cannot hold that up for long.
"""

from __future__ import annotations

import contextlib
import enum
import json
import struct
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from potluck.dist.links import Endpoint, Links, LinkSettings
from potluck.errors import PotluckError, RankGoneError

T = TypeVar("T")

PROTOCOL = 4
_HEAD = struct.Struct("<HBB16sQqQII")
_MAGIC = 0x504C
_TICK_S = 0.1
_READ_MS = 100
_BATCH = 64
_CHECKED = 1
_PART_S, _PART_MOST_S, _SLOWEST_BYTES_PER_S = 5.0, 30.0, 125_000
"""How long the end waits for what was sent to arrive: so long, and longer where much was sent over a slow link."""
_GOODBYE_S = 1.0
"""The same for peers to whom nothing was sent."""


class Kind(enum.IntEnum):
    """What a parcel is for."""

    COLLECTIVE = 1
    MESSAGE = 2
    FAREWELL = 4
    ABORT = 5
    ASK = 6
    TELL = 7
    GOT_ALL = 8
    """The answer to a farewell: it has come, and so has all that was sent before it."""


@dataclass(frozen=True, slots=True)
class Parcel:
    """What came: `about` is the sender's description of what it takes part in."""

    source: str
    tag: int
    total: int
    """Bytes of the whole message, of which this is a part."""
    about: bytes
    view: memoryview
    """Its bytes."""


Label = tuple[Kind, int, int]
"""(kind, group, tag) of a parcel."""

Box = tuple[int, int, str, int]
"""(kind, group, source, tag)."""


class Mesh:
    """The mail of this process; all its groups share it."""

    def __init__(self, settings: LinkSettings, *, host: str = "", checksum: bool = False) -> None:
        self.links = Links(settings, host)
        self.endpoint = self.links.endpoint
        self._checksum = checksum
        self.lock = threading.Lock()
        self._arrived = threading.Condition(self.lock)
        self._reading = False
        self._boxes: dict[Box, deque[Parcel]] = {}
        self._sources: dict[tuple[int, int], deque[str]] = {}
        """For each (group, tag): who sent the messages that wait, first come first."""
        self._aborted: dict[int, str] = {}
        self._told: dict[tuple[int, str], dict[str, Any]] = {}
        self._answers: dict[int, Callable[[], dict[str, Any]]] = {}
        self._known: dict[str, Endpoint] = {}
        self._sent: dict[str, int] = {}
        """Bytes sent to each peer that something was sent to."""
        self._got_all: set[str] = set()
        self.closed_doors: set[str] = set()
        """Peers that no connection besides the mail could be made to."""
        self._parting = False
        self._stop = threading.Event()
        self._pulse = threading.Thread(target=self._beat, name="potluck-dist-pulse", daemon=True)
        self._pulse.start()

    # -- members --------------------------------------------------------------------------------------------

    def admit(self, endpoints: list[Endpoint]) -> None:
        self.links.admit(endpoints)
        self._known.update((endpoint.name, endpoint) for endpoint in endpoints)

    def open(self, group: int, answer: Callable[[], dict[str, Any]]) -> None:
        """A group begins; `answer` says where it stands when another rank asks."""
        with self.lock:
            self._answers[group] = answer

    def forget(self, group: int) -> None:
        """The group has ended: what still comes for it is nobody's."""
        with self.lock:
            self._answers.pop(group, None)
            for box in [box for box in self._boxes if box[1] == group]:
                del self._boxes[box]
            for key in [key for key in self._sources if key[0] == group]:
                del self._sources[key]

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
        flags = _CHECKED if self._checksum and body is not None else 0
        crc = zlib.crc32(body) if flags and body is not None else 0
        head = self._head(label, flags, total, crc, len(about)) + about
        if label[0] in (Kind.COLLECTIVE, Kind.MESSAGE):
            self._sent[to.name] = self._sent.get(to.name, 0) + (0 if body is None else len(body))
        return self.links.send(to, head, body, track=track)

    def _head(self, label: Label, flags: int = 0, total: int = 0, crc: int = 0, about: int = 0) -> bytes:
        kind, group, tag = label
        name = self.endpoint.name.encode("ascii")
        return _HEAD.pack(_MAGIC, (PROTOCOL << 4) | kind, flags, name, group, tag, total, crc, about)

    # -- receiving ------------------------------------------------------------------------------------------

    def take(
        self,
        group: int,
        source: Endpoint,
        tag: int,
        deadline: float,
        kind: Kind = Kind.COLLECTIVE,
        contrary: Callable[[Parcel], bool] | None = None,
    ) -> Parcel:
        """The next parcel of that kind from one peer. Raises Aborted, PeerGone or DeadlinePassed.

        Args:
            contrary: while nothing comes from that peer, a parcel of another that this holds for is returned.
        """
        box: Box = (kind, group, source.name, tag)

        def look() -> Parcel | None:
            waiting = self._boxes.get(box)
            if waiting:
                parcel = waiting.popleft()
                if not waiting:
                    del self._boxes[box]
                return parcel
            if contrary is not None:
                for (of_kind, of_group, _, of_tag), parcels in self._boxes.items():
                    if (of_kind, of_group, of_tag) == (kind, group, tag) and parcels and contrary(parcels[0]):
                        return parcels[0]
            return None

        return self.wait(look, group, [source], deadline)

    def sources(self, group: int, tag: int) -> list[str]:
        """Who has sent messages with this tag, first come first; for who holds the lock."""
        return list(self._sources.get((group, tag), ()))

    def has_message(self, group: int, source: str, tag: int) -> bool:
        """For who holds the lock."""
        return bool(self._boxes.get((Kind.MESSAGE, group, source, tag)))

    def notify(self) -> None:
        """Whoever waits shall look again; for who holds the lock."""
        self._arrived.notify_all()

    def wait(self, look: Callable[[], T | None], group: int, sources: list[Endpoint], deadline: float) -> T:
        """Until `look`, called with the lock held, finds something. If all sources are gone, it never will."""
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
            try:
                left_ms = max(1, int((deadline - time.monotonic()) * 1000))
                self._read(min(_READ_MS, left_ms))
            finally:
                with self.lock:
                    self._reading = False
                    self._arrived.notify_all()

    def _check(self, group: int, sources: list[Endpoint], deadline: float) -> None:
        if group in self._aborted:
            raise Aborted(self._aborted[group])
        if self.links.closed or self._stop.is_set():
            raise RankGoneError("the process group was shut down while a collective was under way")
        reasons = {source.name: self.links.why_gone(source) for source in sources}
        if reasons and all(reasons.values()):
            name, reason = next(iter(reasons.items()))
            raise PeerGone(name, str(reason))
        if time.monotonic() > deadline:
            raise DeadlinePassed([source.name for source in sources])

    def _read(self, timeout_ms: int) -> None:
        """Put what has come into the boxes; the caller owns the reading."""
        for _ in range(_BATCH):
            received = self.links.receive(timeout_ms)
            if received is None:
                return
            timeout_ms = 0
            self._deliver(*received)

    def _deliver(self, head: bytes, body: memoryview | None) -> None:
        if len(head) < _HEAD.size:
            return
        magic, kind, flags, raw, group, tag, total, crc, about = _HEAD.unpack_from(head)
        if magic != _MAGIC or kind >> 4 != PROTOCOL:
            return
        kind &= 15
        source = raw.decode("ascii", "replace")
        view = memoryview(b"") if body is None else body
        if flags & _CHECKED and zlib.crc32(view) != crc:
            self._fail(group, f"a parcel from {source} was damaged on its way (checksum)")
            return
        if kind in (Kind.COLLECTIVE, Kind.MESSAGE):
            parcel = Parcel(source, tag, total, head[_HEAD.size : _HEAD.size + about], view)
            with self.lock:
                self._boxes.setdefault((kind, group, source, tag), deque()).append(parcel)
                if kind == Kind.MESSAGE:
                    names = self._sources.setdefault((group, tag), deque(maxlen=4096))
                    if source not in names:
                        names.append(source)
        else:
            self._command(kind, source, group, head[_HEAD.size : _HEAD.size + about])

    def _command(self, kind: int, source: str, group: int, about: bytes) -> None:
        if kind == Kind.FAREWELL:
            self.links.has_left(source)
            # Two that part at once need no answer: each hears the other's farewell.
            if not self._parting and source in self._known:
                with contextlib.suppress(PotluckError):
                    self.send(self._known[source], (Kind.GOT_ALL, 0, 0))
                self.links.has_left(source)  # again: the answer may have made the link
        elif kind == Kind.ABORT:
            self._fail(group, about.decode("utf-8", "replace"))
        elif kind == Kind.ASK:
            answer, known = self._answers.get(group), self._known.get(source)
            if known is not None:
                told = json.dumps(answer() if answer is not None else {}).encode()
                with contextlib.suppress(PotluckError):
                    self.send(known, (Kind.TELL, group, 0), about=told)
        elif kind == Kind.TELL:
            with contextlib.suppress(ValueError), self.lock:
                self._told[group, source] = json.loads(about)
        elif kind == Kind.GOT_ALL:
            with self.lock:
                self._got_all.add(source)

    # -- failing --------------------------------------------------------------------------------------------

    def _fail(self, group: int, text: str) -> None:
        with self.lock:
            self._aborted.setdefault(group, text)
            self._arrived.notify_all()

    def abort(self, group: int, text: str, others: list[Endpoint]) -> None:
        """End everything that the group waits for, here and on the others, with this text."""
        self._fail(group, text)
        for other in others:
            with contextlib.suppress(PotluckError):
                self.send(other, (Kind.ABORT, group, 0), about=text.encode()[:4000])

    def aborted(self, group: int) -> str | None:
        return self._aborted.get(group)

    def ask(self, group: int, others: list[Endpoint], within_s: float) -> dict[str, dict[str, Any]]:
        """Where the others stand in this group, by name; who does not answer in time is not in it."""
        with self.lock:
            for other in others:
                self._told.pop((group, other.name), None)
        for other in others:
            with contextlib.suppress(PotluckError):
                self.send(other, (Kind.ASK, group, 0))
        wanted = {other.name for other in others}

        def look() -> bool | None:
            return all((group, name) in self._told for name in wanted) or None

        with contextlib.suppress(PotluckError, DeadlinePassed, PeerGone, Aborted):
            self.wait(look, group, others, time.monotonic() + within_s)
        with self.lock:
            return {name: self._told[group, name] for name in wanted if (group, name) in self._told}

    # -- the pulse ------------------------------------------------------------------------------------------

    def _beat(self) -> None:
        while not self._stop.is_set():
            self.links.watch(_TICK_S)
            with self.lock:
                if self._reading:
                    continue
                self._reading = True
            try:
                self._read(0)
            finally:
                with self.lock:
                    self._reading = False
                    self._arrived.notify_all()

    def _part(self) -> None:
        """Say farewell, and wait until every peer has it and all before it, or is gone, or its time is over."""
        began = time.monotonic()
        self._parting = True
        until: dict[str, float] = {}
        for peer in self.links.peers():
            link, nbytes = self.links.reach(peer), self._sent.get(peer.name)
            if link.left or link.broken is not None:
                continue
            with contextlib.suppress(PotluckError):
                self.send(peer, (Kind.FAREWELL, 0, 0))
            if nbytes is not None:
                until[peer.name] = began + min(_PART_MOST_S, _PART_S + nbytes / _SLOWEST_BYTES_PER_S)
            elif link.there:
                until[peer.name] = began + _GOODBYE_S

        def look() -> bool | None:
            now = time.monotonic()
            for name in list(until):
                link = self.links.reach(self._known[name])
                unreached = not link.there and now > began + _PART_S
                if name in self._got_all or link.left or link.broken or unreached or now > until[name]:
                    del until[name]
            return not until or None

        with contextlib.suppress(PotluckError, DeadlinePassed, PeerGone, Aborted):
            self.wait(look, 0, [], began + _PART_MOST_S + 1.0)

    def close(self) -> None:
        """See that what was sent arrives, say goodbye, and end."""
        self._part()
        self._stop.set()
        self._pulse.join()
        with self.lock:
            deadline = time.monotonic() + 1.0
            while self._reading and time.monotonic() < deadline:
                self._arrived.wait(0.05)
            if self._reading:
                return  # a thread that will not end still reads: its socket must not be taken from under it
            self._reading = True
        self.links.close()


class Aborted(Exception):
    """The group has failed; the text is the reason."""


class DeadlinePassed(Exception):
    """Nothing came from these peers until the deadline."""

    def __init__(self, names: list[str]) -> None:
        super().__init__(", ".join(names))
        self.names = names


class PeerGone(Exception):
    """A peer that was waited for is gone."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(reason)
        self.name = name
        self.reason = reason
