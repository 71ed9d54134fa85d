"""One collective's exchange with the other ranks: owns what this rank sends and receives, and how it fails."""

from __future__ import annotations

import contextlib
import logging
import secrets
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn

import torch
import zmq
from torch import Tensor

from potluck.dist.counting import SPENT
from potluck.dist.peers import Peers, gone_hint, unusable
from potluck.dist.profiled import RUNNING
from potluck.dist.queues import Aborted, DeadlinePassed, Kind, PeerGone, PeerMessage
from potluck.dist.record import Call
from potluck.dist.sealing import RENEWED_BYTES, SECRET_BYTES
from potluck.dist.streams import CONNECT_S, Stream, StreamClosed, StreamListener, connect
from potluck.errors import CollectiveError, CollectiveTimeoutError, RankGoneError

log = logging.getLogger("potluck.dist")

_COPIED_BYTES = 32 << 10
"""Smaller bodies are copied, which is cheaper than tracking them."""
_ALIGN = 16
_STREAMED_BYTES = 1 << 20
"""From this size on a stream is worth the message that announces its use."""
_REASONS_S = 1.0
_YES, _NO = memoryview(b"yes"), memoryview(b"no")


def raw(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, without a copy."""
    values: Any = tensor.view(torch.uint8).numpy() if tensor.numel() else bytearray()
    return memoryview(values)


def chunks(nbytes: int, chunk_bytes: int) -> Iterator[tuple[int, int]]:
    """How this many bytes are cut into messages; zero bytes are one empty message."""
    step = max(_ALIGN, chunk_bytes - chunk_bytes % _ALIGN)
    if nbytes == 0:
        yield 0, 0
    for start in range(0, nbytes, step):
        yield start, min(start + step, nbytes)


class Channel:
    """Connects this rank to the others of its group for one collective."""

    def __init__(self, peers: Peers, call: Call, stream_bytes: int = 0) -> None:
        """`stream_bytes`: how much goes to the other rank; large amounts use a stream if possible."""
        self.peers, self.rank, self.world, self.settings = peers, peers.rank, peers.world, peers.settings
        self.others = [(peers.rank + step) % peers.world for step in range(1, peers.world)]
        """The other ranks, beginning with the next, so that not all send to rank 0 first."""
        self._call, self._about = call, call.header.about
        self._trackers: list[tuple[int, Any]] = []
        self._stream: Stream | None = None
        self._unheard: set[int] | None = None
        """For the profiler: ranks whose first message has not arrived."""
        if RUNNING.ranges is not None:
            self._unheard = set(self.others)
            self.waits_for(self._unheard)  # ends the wait if this rank is alone
        if peers.may_stream and stream_bytes >= _STREAMED_BYTES:
            self._use_stream(stream_bytes)

    # -- large tensors between two ranks --------------------------------------------------------------------

    def _use_stream(self, nbytes: int) -> None:
        """Send and receive by the stream from here on.

        Before that, both ranks tell each other by message which collective they are in.
        """
        peers, other = self.peers, 1 - self.rank
        if peers.stream is not None and peers.streamed_bytes > RENEWED_BYTES:
            peers.stream.close()
            peers.stream = None
        if peers.stream is None:
            peers.stream, peers.streamed_bytes = self._new_stream(other), 0
            peers.may_stream = peers.stream is not None
        else:
            self.send_part(other, memoryview(b""))
            self.take(other)
        peers.streamed_bytes += nbytes
        self._stream = peers.stream

    @property
    def chunk_bytes(self) -> int:
        """The number of bytes reduced at a time."""
        chosen = self.settings.chunk_bytes
        return chosen if self._stream is None else max(chosen, _STREAMED_BYTES)

    def _new_stream(self, other: int) -> Stream | None:
        """Open the stream as agreed by messages. It is used only if both ranks have it."""
        peers = self.peers
        made = self._connect_stream(other) if self.rank == 1 else self._accept_stream(other)
        self.send_part(other, _YES if made is not None else _NO)
        agreed = bytes(self.take(other).view) == _YES and made is not None
        how = "use a stream" if agreed else "use ZeroMQ, because no stream could be opened"
        log.info("rank %d: large tensors to %s %s", peers.numbers[self.rank], peers.who(other), how)
        if made is not None and not agreed:
            made.close()
        return made if agreed else None

    def _accept_stream(self, other: int) -> Stream | None:
        with contextlib.ExitStack() as stack:
            connections, address = self.peers.queues.connections, self.peers.endpoints[0].address
            listener = StreamListener.open(
                address, secrets.token_bytes(SECRET_BYTES), connections.settings.stream_port
            )
            if listener is not None:
                stack.callback(listener.close)
            self.send_part(other, memoryview(b"" if listener is None else listener.offer))
            self.take(other)
            connected = bytes(self.take(other).view) == _YES
            if listener is None or not connected:
                return None
            return listener.accept(sealed=connections.encrypts, within_s=self._step_s)

    def _connect_stream(self, other: int) -> Stream | None:
        self.send_part(other, memoryview(b""))
        offer, owner = bytes(self.take(other).view), self.peers.endpoints[0]
        queues = self.peers.queues
        # A firewall that drops packets costs seconds: only once, not for each group.
        pending = None if owner.name in queues.no_stream else connect(owner.address, offer, self._step_s)
        if pending is None:
            queues.no_stream.add(owner.name)
        self.send_part(other, _YES if pending is not None else _NO)
        if pending is None:
            return None
        return pending.finish(sealed=queues.connections.encrypts, within_s=self._step_s)

    @property
    def _step_s(self) -> float:
        """The limit of each step to a stream: if all fail, there must be time left for messages."""
        return min(CONNECT_S, self._call.left_s / 4)

    def _check_stream(self, *, closed: bool = False) -> None:
        """Raise if waiting for the other rank is useless; `closed`: its stream has ended."""
        other = 1 - self.rank
        self.peers.check()
        reason = self.peers.queues.connections.why_gone(self.peers.endpoints[other], streaming=not closed)
        if reason is not None:
            self._gone(other, reason)
        if time.monotonic() > self._call.deadline:
            self._late()

    def _streaming(self, what: Callable[..., None], *arguments: Any) -> None:
        try:
            what(*arguments)
        except StreamClosed:
            # The reason comes by message, if the other rank had time to send it.
            until = time.monotonic() + _REASONS_S
            while time.monotonic() < until:
                self._check_stream(closed=True)
                time.sleep(0.02)
            self._gone(1 - self.rank, "has died, or its connection broke")

    # -- sending --------------------------------------------------------------------------------------------

    def send(self, rank: int, data: Tensor) -> None:
        """Send a flat CPU tensor in chunks. It must not change until settle(), or until the other rank has answered
        with something that needed it."""
        view = raw(data)
        for start, stop in chunks(len(view), self.settings.chunk_bytes):
            self.send_part(rank, view[start:stop])

    def send_part(self, rank: int, part: memoryview) -> None:
        peers = self.peers
        SPENT.sent += len(part)
        if self._stream is not None:
            self._streaming(self._stream.push, part)
            return
        track = len(part) >= _COPIED_BYTES
        label = (Kind.COLLECTIVE, peers.group, self._call.seq)
        tracker = peers.queues.send(peers.endpoints[rank], label, part, about=self._about, track=track)
        if tracker is not None and track:
            self._trackers.append((rank, tracker))

    def settle(self) -> None:
        """Wait until the memory of what was sent is no longer needed."""
        for rank, tracker in self._trackers:
            while not tracker.done:
                try:
                    tracker.wait(0.1)
                except zmq.NotDone:
                    reason = self.peers.queues.connections.why_gone(self.peers.endpoints[rank])
                    if reason is not None:
                        self._gone(rank, reason)
                    if time.monotonic() > self._call.deadline:
                        self._late()
        self._trackers.clear()
        if self._stream is not None:
            self._streaming(self._stream.flush, self._check_stream)

    # -- receiving ------------------------------------------------------------------------------------------

    def take(self, rank: int) -> PeerMessage:
        """The next message of this collective from a rank; it must be about the same collective."""
        peers, call = self.peers, self._call
        try:
            message = peers.queues.take(
                peers.group, peers.endpoints[rank], call.seq, call.deadline, contrary=self._is_contrary
            )
        except Aborted as aborted:
            raise unusable(str(aborted)) from None
        except PeerGone as gone:
            self._gone(rank, gone.reason)
        except DeadlinePassed:
            self._late()
        if self._is_contrary(message):
            self._mismatch(message)
        if self._unheard is not None:
            self.waits_for(self._unheard - {rank})
        return message

    def waits_for(self, ranks: Iterable[int]) -> None:
        """First messages are missing from these ranks only."""
        if self._unheard is not None:
            self._unheard.intersection_update(ranks)
            if not self._unheard and RUNNING.ranges is not None:
                self._unheard = None
                RUNNING.ranges.met()

    def _is_contrary(self, message: PeerMessage) -> bool:
        """Whether the sender is in another collective, so that the awaited rank may never send."""
        return message.about != self._about

    def parts(self, rank: int, nbytes: int) -> Iterator[tuple[int, memoryview]]:
        """What a rank sent with send(), part by part: (offset in bytes, bytes valid until the next part)."""
        offset = 0
        if self._stream is not None:
            buffer = self._stream.buffer(nbytes)
            self._streaming(self._stream.pull, buffer, self._check_stream)
            yield offset, buffer
            return
        while True:
            view = self.take(rank).view
            if offset + len(view) > nbytes:
                self._wrong_size(rank, offset + len(view), nbytes)
            yield offset, view
            offset += len(view)
            if offset >= nbytes:
                return

    def receive_chunk(self, rank: int, count: int, dtype: torch.dtype) -> Tensor:
        """The next chunk from a rank, in the memory in which it arrived."""
        ((_, view),) = self.parts(rank, count * dtype.itemsize)
        return torch.frombuffer(view, dtype=dtype) if count else torch.empty(0, dtype=dtype)

    def receive_into(self, rank: int, out: Tensor) -> None:
        """Receive into a flat contiguous CPU tensor."""
        target = raw(out)
        if self._stream is not None:
            self._streaming(self._stream.pull, target, self._check_stream)
            return
        for offset, view in self.parts(rank, len(target)):
            target[offset : offset + len(view)] = view

    def receive(self, rank: int, count: int, dtype: torch.dtype) -> Tensor:
        out = torch.empty(count, dtype=dtype)
        self.receive_into(rank, out)
        return out

    # -- failing --------------------------------------------------------------------------------------------

    def _gone(self, rank: int, reason: str) -> NoReturn:
        text = f"{self._call.name}: {self.peers.who(rank)} {reason}"
        self.peers.fail(text)
        raise RankGoneError(text, hint=gone_hint(reason)) from None

    def _late(self) -> NoReturn:
        peers = self.peers
        answers = peers.ask()
        missing: dict[int, str] = {}
        for rank in self.others:
            if rank not in answers:
                missing[peers.numbers[rank]] = "does not answer"
            elif answers[rank].sequence < self._call.seq:
                missing[peers.numbers[rank]] = answers[rank].where
        told = peers.queues.aborted(peers.group)
        if told is not None:  # another rank was first, and its text holds for all
            raise CollectiveTimeoutError(told, hint="look at the ranks that it names")
        error = self._call.timeout_error(missing)
        peers.fail(str(error))
        raise error

    def _mismatch(self, message: PeerMessage) -> NoReturn:
        sides = {self.peers.who_sent(message.source): message.about, self.peers.who(self.rank): self._about}
        lines = [f"  {who}: {sides[who].decode('utf-8', 'replace')}" for who in sorted(sides)]
        text = "\n".join([f"the ranks disagree at collective #{self._call.seq}:", *lines])
        self.peers.fail(text)
        raise CollectiveError(
            text,
            hint="every rank must make the same calls in the same order, with tensors of the same shape and dtype",
        )

    def _wrong_size(self, rank: int, got: int, wanted: int) -> NoReturn:
        text = f"{self._call.name}: {self.peers.who(rank)} sent {got} bytes or more where {wanted} were expected"
        self.peers.fail(text)
        raise CollectiveError(text, hint="do the sizes of the tensors agree between the ranks?")
