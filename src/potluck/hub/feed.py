"""The queue of what one guest must still be sent, with flow control by credit. PURE.

Every piece of the replica has a version, and a coded change that leads to it from the version before. A guest that
holds that earlier version is sent the change. One that missed more is sent the whole piece. So one rule serves
newcomers, regular guests and guests that fell behind, and the host keeps one coded message per piece and no
history.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from potluck.errors import WireError

NOTHING = -1
"""The version of a piece that a guest does not hold at all."""
PENDING = -2
"""A piece that is being read to be sent whole. Until it is sent, no change of it may be sent."""
PART_BYTES = 4 << 20
"""Fixed tensors are sent in parts of this size."""


@dataclass(frozen=True, slots=True)
class PieceState:
    """A piece of the replica: its version, and the version that its coded change starts from."""

    base: int
    version: int
    change_bytes: int
    whole_bytes: int
    change: Any = None
    """The coded change itself."""
    codec: str = ""
    """Its codec; empty: the one that the guest was told when it joined."""


@dataclass(frozen=True, slots=True)
class Item:
    """One thing to send: ("change" | "whole", piece) or ("tensor", index into the feed's tensor list)."""

    kind: str
    index: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class TensorPart:
    """A part of a frozen parameter or a buffer that the guest does not hold."""

    name: str
    start: int
    stop: int
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedTensor:
    """A frozen parameter or a buffer of the host's model."""

    name: str
    digest: str
    values: int
    value_bytes: int


def lacking(fixed: Iterable[FixedTensor], theirs: Mapping[str, str]) -> list[TensorPart]:
    """The fixed tensors, in parts, that a guest with these digests does not hold."""
    parts = []
    for tensor in fixed:
        if theirs.get(tensor.name) == tensor.digest:
            continue
        per_part = max(1, PART_BYTES // tensor.value_bytes)
        for start in range(0, tensor.values, per_part):
            stop = min(tensor.values, start + per_part)
            parts.append(TensorPart(tensor.name, start, stop, (stop - start) * tensor.value_bytes))
    return parts


class Feed:
    """The queue of one guest, never longer than its window."""

    def __init__(self, *, pieces: int, window_bytes: int) -> None:
        self.have = [NOTHING] * pieces
        self.tensors: deque[TensorPart] = deque()
        self.in_flight_bytes = 0
        self.window_bytes = window_bytes
        self.open = False
        """Whether pieces are sent now. A guest that sits out is sent none."""
        self._cursor = 0
        self._tensors_pending = 0
        self._surplus_bytes = self._largest_bytes = 0

    def next(self, state: Sequence[PieceState]) -> Item | None:
        """The next thing to send, or None: nothing to send, or no credit."""
        if not self.open:
            return None
        if self.tensors:
            part = self.tensors[0]
            return Item("tensor", 0, part.nbytes) if self._fits(part.nbytes) else None
        whole = None
        for offset in range(len(state)):
            index = (self._cursor + offset) % len(state)
            now, have = state[index], self.have[index]
            if have in (now.version, PENDING) or now.version == NOTHING:
                continue
            if have == now.base and have != NOTHING:
                self._cursor = index
                return Item("change", index, now.change_bytes) if self._fits(now.change_bytes) else None
            whole = index if whole is None or index < whole else whole
        if whole is None:
            self._cursor = 0
            return None
        size = state[whole].whole_bytes
        return Item("whole", whole, size) if self._fits(size) else None

    def change_sent(self, item: Item, version: int) -> None:
        """A coded change was sent; the guest's piece will be at `version`."""
        self._under_way(item.nbytes)
        self.have[item.index] = version

    def asked(self, item: Item) -> None:
        """A whole piece or a part of a tensor is being read for this guest. Its bytes count from now on."""
        self._under_way(item.nbytes)
        if item.kind == "tensor":
            self.tensors.popleft()
            self._tensors_pending += 1
        else:
            self.have[item.index] = PENDING

    def answered(self, item: Item, version: int) -> None:
        """The part that was read has been sent."""
        if item.kind == "tensor":
            self._tensors_pending -= 1
        else:
            self.have[item.index] = version

    def extra(self, nbytes: int) -> None:
        """Other bytes (the samples of a lease) were sent too."""
        self._under_way(nbytes)

    def forget(self) -> None:
        """The guest's weights are wrong: send every piece whole. A piece that is being read now is correct."""
        self.have = [have if have == PENDING else NOTHING for have in self.have]

    def taken(self, nbytes: int) -> None:
        """The guest has received this many bytes.

        An honest guest that reconnected may confirm a message from before, so a surplus of one window is accepted.
        More is an error.
        """
        self._surplus_bytes += max(0, nbytes - self.in_flight_bytes)
        if nbytes < 0 or self._surplus_bytes > max(self.window_bytes, self._largest_bytes):
            raise WireError(f"an acknowledgement of {nbytes} bytes, where {self.in_flight_bytes} were in flight")
        self.in_flight_bytes = max(0, self.in_flight_bytes - nbytes)

    def current(self, state: Sequence[PieceState]) -> bool:
        """Whether the guest was sent everything, and all of it is up to date with the replica."""
        if self.tensors or self._tensors_pending or not state:
            return False
        return all(have == now.version != NOTHING for have, now in zip(self.have, state))

    def _under_way(self, nbytes: int) -> None:
        self.in_flight_bytes += nbytes
        self._largest_bytes = max(self._largest_bytes, nbytes)

    def _fits(self, nbytes: int) -> bool:
        """Whether this may be sent now: it fits into the window, or it is the second of its kind in flight.

        A piece of a large model fills the window. With one at a time the link would be idle from its last byte
        until the guest's answer: over the internet (100 Mbit/s, 30 ms each way) 0.57 of the link, with two 0.99.
        """
        return self.in_flight_bytes == 0 or self.in_flight_bytes + nbytes <= max(self.window_bytes, 2 * nbytes)
