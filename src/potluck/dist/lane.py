"""One group's way through the mail: owns what a rank sends and takes within one collective, and how that fails.

It must not know which algorithm sends what to whom.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
import zmq
from torch import Tensor

from potluck.dist.counting import SPENT
from potluck.dist.links import Endpoint
from potluck.dist.mesh import Aborted, DeadlinePassed, Kind, Mesh, Parcel, PeerGone
from potluck.dist.profiled import RUNNING
from potluck.dist.record import Header, timeout_error
from potluck.dist.sealing import RENEWED_BYTES, SECRET_BYTES
from potluck.dist.streams import CONNECT_S, Closed, Stream, StreamListener, follow
from potluck.errors import CollectiveError, CollectiveTimeoutError, RankGoneError

log = logging.getLogger("potluck.dist")

_COPIED_BYTES = 32 << 10
"""Smaller bodies are copied: that is cheaper than to watch over them."""
_ALIGN = 16
_ASK_S = 1.0
_STREAMED_BYTES = 1 << 20
"""From here on a connection of its own is worth a word by mail."""
_REASONS_S = 1.0
_NOT_REACHED = (
    "is there a firewall? POTLUCK_DIST_PORT_BASE=29600 makes rank r listen at 29600 + r, to be let through; "
    "POTLUCK_DIST_INTERFACE chooses another network; potluck doctor ADDRESS tries the way"
)
_YES, _NO = memoryview(b"yes"), memoryview(b"no")


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What all ranks of a group do alike."""

    chunk_bytes: int
    small_bytes: int
    algorithm: str = "auto"
    """How an all-reduce above small_bytes goes: auto, direct, owners or ring."""
    streams: bool = False
    """Whether two ranks may have a connection of their own for what is large: where chunks have no checksums."""


@dataclass(frozen=True, slots=True)
class Call:
    """One collective of this rank: what it is, and when it has to be over."""

    header: Header
    about: bytes
    """The header in words, which are the same on all ranks that are in the same collective."""
    deadline: float
    began: float

    @property
    def left_s(self) -> float:
        return max(0.001, self.deadline - time.monotonic())


def raw(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, not copied."""
    values: Any = tensor.view(torch.uint8).numpy() if tensor.numel() else bytearray()
    return memoryview(values)


def what_to_do(reason: str) -> str:
    """About a rank that is gone for this reason."""
    never = reason.startswith("could not be reached")
    return _NOT_REACHED if never else "look at that rank's own output: it ended first"


def chunks(nbytes: int, chunk_bytes: int) -> Iterator[tuple[int, int]]:
    """How a message of so many bytes is cut; an empty one is one empty parcel."""
    step = max(_ALIGN, chunk_bytes - chunk_bytes % _ALIGN)
    if nbytes == 0:
        yield 0, 0
    for start in range(0, nbytes, step):
        yield start, min(start + step, nbytes)


class Lane:
    """The ranks of one group, and the mail between them."""

    def __init__(self, mesh: Mesh, group: int, rank: int, endpoints: list[Endpoint], terms: Terms) -> None:
        self.mesh, self.group, self.rank, self.world = mesh, group, rank, len(endpoints)
        self.endpoints, self.terms = endpoints, terms
        self._ranks = {endpoint.name: rank for rank, endpoint in enumerate(endpoints)}
        self.numbers = list(range(self.world))
        """What people call the ranks: where these are only some of a group, their numbers there."""
        self._everybody = endpoints
        self._parts: list[Lane] = []
        self._stream: Stream | None = None
        self._streamed = 0
        """Bytes each way, by this stream."""
        self._mail_only = not (terms.streams and self.world == 2)
        """No stream is to be had, or it was tried in vain."""

    def close(self) -> None:
        """Nobody uses it any more."""
        for part in (*self._parts, self):
            if part._stream is not None:
                part._stream.close()
                part._stream = None

    def between(self, ranks: list[int]) -> Lane:
        """For some of the ranks, among whom this one is: they count from 0, and fail for all."""
        chosen = [self.endpoints[rank] for rank in ranks]
        lane = Lane(self.mesh, self.group, ranks.index(self.rank), chosen, self.terms)
        lane.numbers, lane._everybody = list(ranks), self.endpoints
        self._parts.append(lane)
        return lane

    @property
    def others(self) -> list[Endpoint]:
        return [endpoint for rank, endpoint in enumerate(self.endpoints) if rank != self.rank]

    def rank_of(self, name: str) -> int:
        return self._ranks[name]

    def name_of(self, endpoint: str) -> str:
        """As who(), for an endpoint of the whole group."""
        ranks = {other.name: rank for rank, other in enumerate(self._everybody)}
        return f"rank {ranks[endpoint]} ({self._everybody[ranks[endpoint]].host})"

    def who(self, rank: int) -> str:
        """A rank as people should read it."""
        return f"rank {self.numbers[rank]} ({self.endpoints[rank].host})"

    def check(self) -> None:
        """Raise if the group has failed."""
        text = self.mesh.aborted(self.group)
        if text is not None:
            raise CollectiveError(text, hint="the group cannot be used any more: destroy it and make a new one")

    def fail(self, text: str) -> None:
        """End the group here and on every other rank, with the same words."""
        own = self.mesh.endpoint.name
        self.mesh.abort(self.group, text, [other for other in self._everybody if other.name != own])

    def where_others_stand(self) -> dict[int, dict[str, Any]]:
        told = self.mesh.ask(self.group, self.others, _ASK_S)
        return {self._ranks[name]: answer for name, answer in told.items()}


class Trip:
    """One collective of one rank, from the first parcel to the last."""

    def __init__(self, lane: Lane, call: Call) -> None:
        self.lane, self.call = lane, call
        self.sequence, self.about, self.deadline = call.header.seq, call.about, call.deadline
        self._trackers: list[tuple[int, Any]] = []
        self._stream: Stream | None = None
        self._unheard: set[int] | None = None
        """For the profiler: ranks from which something is still to come for the first time."""
        if RUNNING.ranges is not None:
            self._unheard = {rank for rank in range(lane.world) if rank != lane.rank}
            self.waits_for(self._unheard)  # where this rank is alone, for nobody

    @property
    def name(self) -> str:
        return f"{self.call.header.op} #{self.sequence}"

    # -- what is large, between two ranks ---------------------------------------------------------------------

    def stream(self, nbytes: int) -> None:
        """From here on, if there is so much and it can be, what goes to the other rank has a connection of its own.

        Both ranks say by mail that they are in this collective, and which it is, before a byte of it is sent.
        """
        lane = self.lane
        if lane._mail_only or nbytes < _STREAMED_BYTES:
            return
        other = 1 - lane.rank
        if lane._stream is not None and lane._streamed > RENEWED_BYTES:
            lane._stream.close()
            lane._stream = None
        if lane._stream is None:
            lane._stream, lane._streamed = self._new_stream(other), 0
            lane._mail_only = lane._stream is None
        else:
            self.send_part(other, memoryview(b""))
            self.take(other)
        lane._streamed += nbytes
        self._stream = lane._stream

    @property
    def chunk_bytes(self) -> int:
        """How much is reduced at once."""
        chosen = self.lane.terms.chunk_bytes
        return chosen if self._stream is None else max(chosen, _STREAMED_BYTES)

    def _new_stream(self, other: int) -> Stream | None:
        """Agreed on by mail, and used only if both ranks have it."""
        lane = self.lane
        sealed = lane.mesh.links.encrypts
        made = self._follow_invitation(other, sealed) if lane.rank == 1 else self._invite(other, sealed)
        self.send_part(other, _YES if made is not None else _NO)
        agreed = bytes(self.take(other).view) == _YES and made is not None
        way = "have a connection of their own" if agreed else "go by ZeroMQ, as no other connection could be made"
        log.info("rank %d: large tensors to %s %s", lane.numbers[lane.rank], lane.who(other), way)
        if made is not None and not agreed:
            made.close()
        return made if agreed else None

    def _invite(self, other: int, sealed: bool) -> Stream | None:
        with contextlib.ExitStack() as stack:
            address, port = self.lane.endpoints[0].address, self.lane.mesh.links.door_port
            door = StreamListener.open(address, secrets.token_bytes(SECRET_BYTES), port)
            if door is not None:
                stack.callback(door.close)
            self.send_part(other, memoryview(b"" if door is None else door.invitation))
            self.take(other)
            connected = bytes(self.take(other).view) == _YES
            return door.admit(sealed=sealed, within_s=self._step_s) if door is not None and connected else None

    def _follow_invitation(self, other: int, sealed: bool) -> Stream | None:
        self.send_part(other, memoryview(b""))
        invitation, owner = bytes(self.take(other).view), self.lane.endpoints[0]
        closed = self.lane.mesh.closed_doors
        # A firewall that drops what comes costs seconds: once, and not again for each group.
        visit = None if owner.name in closed else follow(owner.address, invitation, self._step_s)
        if visit is None:
            closed.add(owner.name)
        self.send_part(other, _YES if visit is not None else _NO)
        return None if visit is None else visit.enter(sealed=sealed, within_s=self._step_s)

    @property
    def _step_s(self) -> float:
        """To connect, to be let in, to be sealed: all in vain, and there must be time left for the mail."""
        return min(CONNECT_S, self.call.left_s / 4)

    def _ask(self, *, closed: bool = False) -> None:
        """Whether to go on waiting for the other rank; `closed`: its connection has ended."""
        lane, other = self.lane, 1 - self.lane.rank
        text = lane.mesh.aborted(lane.group)
        if text is not None:
            raise CollectiveError(text, hint="the group cannot be used any more: destroy it and make a new one")
        reason = lane.mesh.links.why_gone(lane.endpoints[other], streaming=not closed)
        if reason is not None:
            self._gone(other, reason)
        if time.monotonic() > self.deadline:
            self._late()

    def _streaming(self, what: Callable[..., None], *arguments: Any) -> None:
        try:
            what(*arguments)
        except Closed:
            # Its reasons come by the mail, if it had time to say them.
            until = time.monotonic() + _REASONS_S
            while time.monotonic() < until:
                self._ask(closed=True)
                time.sleep(0.02)
            self._gone(1 - self.lane.rank, "has died, or its connection broke")

    # -- sending --------------------------------------------------------------------------------------------

    def send(self, rank: int, data: Tensor) -> None:
        """Send a flat CPU tensor, in chunks. It must stay as it is until settle(), or until the other rank has
        answered with something that needed it."""
        view = raw(data)
        for start, stop in chunks(len(view), self.lane.terms.chunk_bytes):
            self.send_part(rank, view[start:stop])

    def send_part(self, rank: int, part: memoryview) -> None:
        lane = self.lane
        SPENT.sent += len(part)
        if self._stream is not None:
            self._streaming(self._stream.push, part)
            return
        track = len(part) >= _COPIED_BYTES
        tracker = lane.mesh.send(
            lane.endpoints[rank], (Kind.COLLECTIVE, lane.group, self.sequence), part, about=self.about, track=track
        )
        if tracker is not None and track:
            self._trackers.append((rank, tracker))

    def settle(self) -> None:
        """Wait until nothing that was sent is needed in memory any more."""
        for rank, tracker in self._trackers:
            while not tracker.done:
                try:
                    tracker.wait(0.1)
                except zmq.NotDone:
                    reason = self.lane.mesh.links.why_gone(self.lane.endpoints[rank])
                    if reason is not None:
                        self._gone(rank, reason)
                    if time.monotonic() > self.deadline:
                        self._late()
        self._trackers.clear()
        if self._stream is not None:
            self._streaming(self._stream.flush, self._ask)

    # -- receiving ------------------------------------------------------------------------------------------

    def take(self, rank: int) -> Parcel:
        """The next parcel of this collective from a rank; it must be about the same collective."""
        lane = self.lane
        try:
            parcel = lane.mesh.take(
                lane.group, lane.endpoints[rank], self.sequence, self.deadline, contrary=self._contrary
            )
        except Aborted as aborted:
            raise CollectiveError(
                str(aborted), hint="the group cannot be used any more: destroy it and make a new one"
            ) from None
        except PeerGone as gone:
            self._gone(rank, gone.reason)
        except DeadlinePassed:
            self._late()
        if parcel.about != self.about:
            self._mismatch(parcel)
        if self._unheard is not None:
            self.waits_for(self._unheard - {rank})
        return parcel

    def waits_for(self, ranks: Iterable[int]) -> None:
        """Only from these something is still to come for the first time, where it is not all of the others."""
        if self._unheard is not None:
            self._unheard.intersection_update(ranks)
            if not self._unheard and RUNNING.ranges is not None:
                self._unheard = None
                RUNNING.ranges.met()

    def _contrary(self, parcel: Parcel) -> bool:
        """Somebody else sent something for this collective that it is not: who is waited for may never send."""
        return parcel.about != self.about

    def parts(self, rank: int, nbytes: int) -> Iterator[tuple[int, memoryview]]:
        """What a rank sent with send(), as it comes: (offset in bytes, bytes until the next come)."""
        offset = 0
        if self._stream is not None:
            room = self._stream.room(nbytes)
            self._streaming(self._stream.pull, room, self._ask)
            yield offset, room
            return
        while True:
            view = self.take(rank).view
            if offset + len(view) > nbytes:
                self._wrong_size(rank, offset + len(view), nbytes)
            yield offset, view
            offset += len(view)
            if offset >= nbytes:
                return

    def receive_into(self, rank: int, out: Tensor) -> None:
        """Into a flat contiguous CPU tensor."""
        target = raw(out)
        if self._stream is not None:
            self._streaming(self._stream.pull, target, self._ask)
            return
        for offset, view in self.parts(rank, len(target)):
            target[offset : offset + len(view)] = view

    def receive(self, rank: int, count: int, dtype: torch.dtype) -> Tensor:
        out = torch.empty(count, dtype=dtype)
        self.receive_into(rank, out)
        return out

    # -- failing --------------------------------------------------------------------------------------------

    def _gone(self, rank: int, reason: str) -> NoReturn:
        text = f"{self.name}: {self.lane.who(rank)} {reason}"
        self.lane.fail(text)
        raise RankGoneError(text, hint=what_to_do(reason)) from None

    def _late(self) -> NoReturn:
        lane, waited_s = self.lane, time.monotonic() - self.call.began
        stand = lane.where_others_stand()
        missing: dict[int, str] = {}
        for rank in range(lane.world):
            if rank != lane.rank and rank not in stand:
                missing[lane.numbers[rank]] = "does not answer"
            elif rank != lane.rank and stand[rank].get("sequence", 0) < self.sequence:
                missing[lane.numbers[rank]] = str(stand[rank].get("where", "unknown"))
        told = lane.mesh.aborted(lane.group)
        if told is not None:  # another rank was first, and its words hold for all
            raise CollectiveTimeoutError(told, hint="look at the ranks that it names")
        error = timeout_error(self.call.header, missing=list(missing), waited_s=waited_s, last_seen=missing)
        lane.fail(str(error))
        raise error

    def _mismatch(self, parcel: Parcel) -> NoReturn:
        sides = {self.lane.name_of(parcel.source): parcel.about, self.lane.who(self.lane.rank): self.about}
        lines = [f"  {who}: {sides[who].decode('utf-8', 'replace')}" for who in sorted(sides)]
        text = "\n".join([f"the ranks disagree at collective #{self.sequence}:", *lines])
        self.lane.fail(text)
        raise CollectiveError(
            text,
            hint="every rank must make the same calls in the same order, with tensors of the same shape and dtype",
        )

    def _wrong_size(self, rank: int, got: int, wanted: int) -> NoReturn:
        text = f"{self.name}: {self.lane.who(rank)} sent {got} bytes or more where {wanted} were expected"
        self.lane.fail(text)
        raise CollectiveError(text, hint="do the sizes of the tensors agree between the ranks?")
