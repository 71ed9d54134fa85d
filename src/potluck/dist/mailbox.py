"""What one process of a machine sends to another through shared memory; owns the pieces and the tags.

It must not know of collectives.
"""

from __future__ import annotations

import struct
import threading
from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor

from potluck.dist.rings import Patience, Ring
from potluck.errors import CollectiveError

_HEAD = struct.Struct("<qq")  # tag, bytes of the whole message
_ONE = (0,)


class Mailbox:
    """One direction between two members. A message that is not asked for yet waits in its receiver's memory."""

    def __init__(self, ring: Ring, peer: int) -> None:
        self._ring = ring
        self._peer = peer
        self._lock = threading.Lock()
        self._early: dict[int, deque[Tensor]] = {}

    def send(self, values: Tensor, tag: int, patience: Patience) -> None:
        """`values` [n], contiguous."""
        patience = self._for_peer(patience)
        raw = _bytes_of(values)
        with self._lock:
            for at in range(0, max(raw.numel(), 1), self._ring.shape.slot_bytes):
                number = self._ring.free(_ONE, patience)
                if at == 0:
                    self._ring.write_note(0, number, _HEAD.pack(tag, raw.numel()))
                piece = raw[at : at + self._ring.shape.slot_bytes]
                self._ring.slot(0, number, torch.uint8)[: piece.numel()].copy_(piece)
                self._ring.post(0)

    def receive(self, values: Tensor, tag: int, patience: Patience) -> None:
        """The oldest message with this tag, into `values` [n]."""
        patience = self._for_peer(patience)
        raw = _bytes_of(values)
        with self._lock:
            waiting = self._early.get(tag)
            if waiting:
                message = waiting.popleft()
                _same_size(message.numel(), raw.numel(), tag)
                raw.copy_(message)
                return
            while True:
                found, nbytes = self._next(patience)
                if found == tag:
                    fits = nbytes == raw.numel()
                    self._take(raw if fits else torch.empty(nbytes, dtype=torch.uint8), patience)
                    _same_size(nbytes, raw.numel(), tag)
                    return
                message = torch.empty(nbytes, dtype=torch.uint8)
                self._take(message, patience)
                self._early.setdefault(found, deque()).append(message)

    def has(self, tag: int) -> bool:
        """Whether a message with this tag has begun to arrive and is the next to be read."""
        with self._lock:
            if self._early.get(tag):
                return True
            number = self._ring.read_round
            return self._ring.has(_ONE, number) and _HEAD.unpack(self._ring.note(0, number))[0] == tag

    def _next(self, patience: Patience) -> tuple[int, int]:
        number = self._ring.read_round
        self._ring.arrived(_ONE, number, patience)
        tag, nbytes = _HEAD.unpack(self._ring.note(0, number))
        return tag, nbytes

    def _take(self, raw: Tensor, patience: Patience) -> None:
        for at in range(0, max(raw.numel(), 1), self._ring.shape.slot_bytes):
            number = self._ring.read_round
            self._ring.arrived(_ONE, number, patience)
            piece = raw[at : at + self._ring.shape.slot_bytes]
            piece.copy_(self._ring.slot(0, number, torch.uint8)[: piece.numel()])
            self._ring.done(0)

    def _for_peer(self, patience: Patience) -> Patience:
        """The ring knows one writer and one reader; who that is, is told to whom it concerns."""

        def check(missing: Callable[[], list[int]]) -> None:
            patience.check(lambda: [self._peer] if missing() else [])

        return Patience(patience.deadline, check, lambda _: patience.late([self._peer]))


def _bytes_of(values: Tensor) -> Tensor:
    return values.view(torch.uint8) if values.numel() else torch.empty(0, dtype=torch.uint8)


def _same_size(sent: int, wanted: int, tag: int) -> None:
    if sent != wanted:
        raise CollectiveError(
            f"a message of {sent} bytes with tag {tag} was received into a tensor of {wanted} bytes",
            hint="send and recv of a pair need tensors of the same size and dtype",
        )
