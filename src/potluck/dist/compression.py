"""Compressed all-reduce: owns what each rank packs, adds and distributes, and the residuals of packing.

The caller sends and receives the payloads.

Each rank owns a part of the tensor. It receives that part from all others, packed, adds it in float32 in the order
of the ranks, and distributes the sum, packed again. So every rank sends 2(N-1)/N of the packed tensor, and all
ranks get the same bits, because all decode the same payload:

    exchange = compressor.begin(identity, flat, rank, world, average=True)
    for part in others:       send exchange.outgoing(part) to rank `part`
    for source in all ranks:  exchange.add(source, payload)       # None for one's own
    payload = exchange.result(), to everybody
    for part in all ranks:    exchange.place(part, payload)

Both packings have error feedback: the rounding error of a payload is added to the next one of the same tensor. A
value that is not finite makes values of the result not finite, as without compression, and does not stay in the
residuals.
"""

from __future__ import annotations

import itertools
import threading
from collections import OrderedDict
from collections.abc import Hashable

import torch
from torch import Tensor

from potluck.codec import Codec, encode_with_feedback, get
from potluck.codec.cached import PIECE as CACHED
from potluck.codec.cached import Packing, in_blocks
from potluck.dist.counting import spends
from potluck.dist.schedules import Span, split

DTYPES = frozenset({torch.float32, torch.float16, torch.bfloat16})
"""The compressed types. float64 is reduced exactly, for its digits."""

REDUCTIONS = frozenset({"SUM", "AVG"})

_MULTIPLE = 128
"""Parts are aligned with the codecs' blocks."""
PIECE = 3840 * _MULTIPLE
"""Elements of a piece: small enough for a processor's cache, and to be sent while the next is packed."""
_MOST_PIECES = 8
"""The most pieces of a message between two ranks, half a MiB of int8: each message costs Python's time."""
_MOST_TENSORS = 256


def identity_of(tensor: Tensor, name: str | None = None) -> Hashable:
    """Identifies a tensor from step to step: by its name, else by its address and size."""
    return name if name is not None else (str(tensor.device), tensor.data_ptr(), tensor.numel(), tensor.dtype)


class Residuals:
    """The residuals of the most recently used tensors: [n] float32 each. Usable from any thread."""

    def __init__(self, most: int = _MOST_TENSORS) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._kept: OrderedDict[Hashable, Tensor] = OrderedDict()

    def get(self, key: Hashable, count: int, device: torch.device) -> Tensor:
        """The tensor's residual, to be changed in place; zeros if there is none of this size."""
        with self._lock:
            found = self._kept.pop(key, None)
            if found is None or found.numel() != count or found.device != device:
                found = torch.zeros(count, dtype=torch.float32, device=device)
            self._kept[key] = found
            while len(self._kept) > self._most:
                self._kept.popitem(last=False)
            return found


class Compressor:
    """Compressed all-reduces with one codec; keeps the residuals between them."""

    def __init__(self, codec: str, *, feedback: bool = True) -> None:
        """
        Args:
            codec: fp16, bf16, int8, int4, topk or topk:RATIO.
            feedback: False only to measure its effect.
        """
        self.codec: Codec = get(codec)
        # For what goes to the owners, and for what owners distribute.
        self._up = Residuals() if feedback else None
        self._down = Residuals() if feedback else None
        self._room = SendBuffer()

    @staticmethod
    def suits(reduction: str, dtype: torch.dtype) -> bool:
        """Whether this reduction of this dtype can be compressed; otherwise it is done exactly."""
        return reduction in REDUCTIONS and dtype in DTYPES

    def begin(self, identity: Hashable, flat: Tensor, rank: int, world: int, *, average: bool = False) -> Exchange:
        """An all-reduce of `flat`, [n] and contiguous, in place."""
        (whole,) = self.begin_pieces(identity, flat, rank, world, average=average, piece=max(flat.numel(), 1))
        return whole

    def begin_pieces(
        self,
        identity: Hashable,
        flat: Tensor,
        rank: int,
        world: int,
        *,
        average: bool = False,
        piece: int = PIECE,
    ) -> list[Exchange]:
        """The same, as one exchange for each piece: the first piece of all parts, then the second, ..."""
        count, device = flat.numel(), flat.device
        up = self._up.get(identity, count, device) if self._up is not None else None
        spans = split(count, world, _MULTIPLE)
        start, stop = spans[rank]
        down = self._down.get(identity, stop - start, device) if self._down is not None else None
        longest = max(last - first for first, last in spans)
        exchanges = []
        for at in range(0, max(longest, 1), piece):
            pieces = tuple((min(first + at, last), min(first + at + piece, last)) for first, last in spans)
            mine = None if down is None else down[pieces[rank][0] - start : pieces[rank][1] - start]
            exchanges.append(Exchange(self.codec, flat, pieces, rank, up=up, down=mine, average=average))
        return exchanges

    def begin_pair(self, identity: Hashable, flat: Tensor, *, average: bool = False) -> PairExchange:
        """An all-reduce of `flat`, [n], contiguous and in host memory, in place, between two ranks."""
        up = self._up.get(identity, flat.numel(), flat.device) if self._up is not None else None
        return PairExchange(self.codec, flat, up, average=average, room=self._room)


class Exchange:
    """One compressed all-reduce on one rank. Payloads are [n] uint8, on the tensor's device."""

    def __init__(
        self,
        codec: Codec,
        flat: Tensor,
        spans: tuple[Span, ...],
        rank: int,
        *,
        up: Tensor | None,
        down: Tensor | None,
        average: bool,
    ) -> None:
        self.spans = spans
        """The part of the tensor that each rank owns."""
        self._codec, self._flat, self._rank = codec, flat.detach(), rank
        self._up, self._down, self._average = up, down, average
        self._sum = torch.empty(0, device=flat.device)
        self._next = 0

    def payload_bytes(self, part: int) -> int:
        """The length of any payload of this part."""
        start, stop = self.spans[part]
        return self._codec.nbytes(stop - start)

    @spends("reduction")
    def outgoing(self, part: int) -> Tensor:
        """The payload for the owner of this part. Call it once for each part except this rank's own."""
        assert part != self._rank
        start, stop = self.spans[part]
        values = self._flat[start:stop].to(torch.float32, copy=True)
        if self._up is None:
            return self._codec.encode(values)
        return encode_with_feedback(self._codec, values, self._up[start:stop])

    @spends("reduction")
    def add(self, source: int, payload: Tensor | None = None) -> None:
        """Add a rank's payload for this rank's part, in the order of the ranks; None: this rank's own values.

        Raises:
            WireError: the payload is not of this codec and size.
        """
        assert source == self._next, "sums must not depend on who came first"
        assert (payload is None) == (source == self._rank)
        self._next += 1
        start, stop = self.spans[self._rank]
        if payload is None:
            values = self._flat[start:stop].to(torch.float32, copy=source == 0)
        else:
            values = self._codec.decode(payload, stop - start)
        if source == 0:
            self._sum = values
        else:
            self._sum.add_(values)

    @spends("reduction")
    def result(self) -> Tensor:
        """The payload for every rank, once everything was added."""
        assert self._next == len(self.spans)
        if self._average:
            self._sum.div_(len(self.spans))
        if self._down is None:
            return self._codec.encode(self._sum)
        return encode_with_feedback(self._codec, self._sum, self._down)

    @spends("reduction")
    def place(self, part: int, payload: Tensor) -> None:
        """Write an owner's result into the tensor; this rank's own too, so that all ranks have the same bits.

        Raises:
            WireError: the payload is not of this codec and size.
        """
        start, stop = self.spans[part]
        if self._flat.dtype == torch.float32:
            self._codec.decode(payload, stop - start, out=self._flat[start:stop])
        else:
            self._flat[start:stop].copy_(self._codec.decode(payload, stop - start))


class PairExchange:
    """One compressed all-reduce between two ranks: each sends its packed tensor, and adds what the other sent.

    This sends as many bytes as the owners algorithm, in one hop and with one rounding. Both ranks decode both
    payloads and add them, so they get the same bits. The data is cut into messages of whole pieces, and the rest of
    the last piece.
    """

    def __init__(self, codec: Codec, flat: Tensor, up: Tensor | None, *, average: bool, room: SendBuffer) -> None:
        self._codec, self._flat, self._up, self._divide_by = codec, flat.detach(), up, 2 if average else 1
        self._spans = _messages(flat.numel())
        self._whole = flat.numel() // CACHED * CACHED if in_blocks(codec) else 0
        """Elements of whole pieces, if each piece has its own payload."""
        ends = itertools.accumulate(map(self._packed_bytes, self._spans), initial=0)
        self._places = list(itertools.pairwise(ends))
        self._payload = room.of(self.payload_bytes)
        self._packing: Packing | None = None
        if in_blocks(codec) and self._whole:
            kept = None if up is None else up[: self._whole]
            packed = self._payload[: self._packed_bytes((0, self._whole))]
            self._packing = Packing(codec, self._flat[: self._whole], kept, packed)

    def _packed_bytes(self, span: Span) -> int:
        count = span[1] - span[0]
        return count // CACHED * self._codec.nbytes(CACHED) if span[1] <= self._whole else self._codec.nbytes(count)

    def __len__(self) -> int:
        """The number of messages that each of the two ranks sends."""
        return len(self._spans)

    @property
    def payload_bytes(self) -> int:
        """The bytes of all messages."""
        return self._places[-1][1] if self._places else 0

    def message_bytes(self, number: int) -> int:
        start, stop = self._places[number]
        return stop - start

    def _own(self, number: int) -> Tensor:
        start, stop = self._places[number]
        return self._payload[start:stop]

    @spends("reduction")
    def outgoing(self, number: int) -> Tensor:
        """Pack a message; call it once for each, in order."""
        message, (start, stop) = self._own(number), self._spans[number]
        if self._packing is not None and stop <= self._whole:
            self._packing.encode(start // CACHED, stop // CACHED)
            return message
        values = self._flat[start:stop].to(torch.float32, copy=True)
        up = None if self._up is None else self._up[start:stop]
        message.copy_(self._codec.encode(values) if up is None else encode_with_feedback(self._codec, values, up))
        return message

    @spends("reduction")
    def place(self, number: int, theirs: Tensor) -> None:
        """Write the sum of both ranks' messages into the tensor, after this rank's was packed.

        Raises:
            WireError: the message is not of this codec and size.
        """
        start, stop = self._spans[number]
        if self._packing is not None and stop <= self._whole:
            self._packing.add(start // CACHED, stop // CACHED, theirs, divide_by=self._divide_by)
            return
        decode, count = self._codec.decode, stop - start
        total = decode(self._own(number), count).add_(decode(theirs, count))
        self._flat[start:stop].copy_(total.div_(self._divide_by) if self._divide_by > 1 else total)


def _messages(count: int) -> list[Span]:
    """Message sizes: whole pieces together, and the rest of the last piece alone.

    The first messages are small so that sending starts soon, and the last ones so that adding ends soon.
    """
    sizes: list[int] = []
    first, left = 1, count // CACHED
    while left:
        sizes.append(CACHED * min(first, _MOST_PIECES, max(1, left // 2)))
        first, left = 2 * first, left - sizes[-1] // CACHED
    rest = [count % CACHED] if count % CACHED else []
    return [*itertools.pairwise(itertools.accumulate(sizes + rest, initial=0))]


class SendBuffer:
    """Memory for a rank's payloads, kept because new memory costs a page fault for each page."""

    def __init__(self) -> None:
        self._held = torch.empty(0, dtype=torch.uint8)

    def of(self, nbytes: int) -> Tensor:
        """[nbytes] uint8: the same memory at every call."""
        if self._held.numel() < nbytes:
            self._held = torch.empty(nbytes, dtype=torch.uint8)
        return self._held[:nbytes]
