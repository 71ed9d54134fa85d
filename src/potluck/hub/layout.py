"""How a model's tensors are named and split for sending: the layout of pieces, and how two models differ."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from potluck.balance.codecs import BLOCK
from potluck.spec.model_description import TensorSpec

SMALLEST_PIECE = 1 << 16
USUAL_PIECE = 1 << 20
LARGEST_PIECE = 3 << 20
PIECES_WANTED = 64
FEWEST_PIECES = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Values start..stop of the flattened trained tensor number `tensor`."""

    tensor: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A contiguous range of the flat vector of trained parameters: the unit in which tensors are sent."""

    index: int
    offset: int
    count: int
    spans: tuple[Span, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The trained tensors in order, and the pieces that cover them."""

    tensors: tuple[TensorSpec, ...]
    pieces: tuple[Piece, ...]
    count: int
    pieces_of: tuple[tuple[int, ...], ...] = field(default=())
    """For each trained tensor, the indices of the pieces that hold a part of it."""


def piece_size(total: int) -> int:
    """Values per piece: about 64 pieces, small enough to overlap well and large enough for little overhead.

    A large model has about 40, as long as they fit into a message. Each piece is a message per guest and step, and
    the threads that handle messages compete with the one that keeps a GPU busy.
    """
    wanted = max(total // PIECES_WANTED, SMALLEST_PIECE)
    if wanted > USUAL_PIECE:
        wanted = min(total // FEWEST_PIECES, LARGEST_PIECE)
    return -(-wanted // BLOCK) * BLOCK  # so that no codec's block is in two pieces


def make_layout(tensors: Sequence[TensorSpec], size: int | None = None) -> Layout:
    """Split the flat vector of `tensors` into pieces of `size` values (the last may be shorter)."""
    total = sum(t.count for t in tensors)
    size = size or piece_size(total)
    pieces: list[Piece] = []
    pieces_of: list[list[int]] = [[] for _ in tensors]
    spans: list[Span] = []
    filled = offset = 0
    for number, tensor in enumerate(tensors):
        start = 0
        while start < tensor.count:
            stop = min(tensor.count, start + size - filled)
            spans.append(Span(tensor=number, start=start, stop=stop))
            pieces_of[number].append(len(pieces))
            filled += stop - start
            start = stop
            if filled == size:
                pieces.append(Piece(index=len(pieces), offset=offset, count=filled, spans=tuple(spans)))
                offset, filled, spans = offset + filled, 0, []
    if filled:
        pieces.append(Piece(index=len(pieces), offset=offset, count=filled, spans=tuple(spans)))
    return Layout(
        tensors=tuple(tensors),
        pieces=tuple(pieces),
        count=total,
        pieces_of=tuple(tuple(p) for p in pieces_of),
    )


def first_difference(host: Sequence[TensorSpec], guest: Sequence[TensorSpec]) -> str | None:
    """A description of the first tensor in which the two models differ, with both values; None if they agree."""
    for number, (ours, theirs) in enumerate(zip(host, guest)):
        if ours != theirs:
            return f"tensor {number}: the host has {ours}, the guest has {theirs}"
    if len(host) != len(guest):
        longer, side = (host, "host") if len(host) > len(guest) else (guest, "guest")
        extra = longer[min(len(host), len(guest))]
        return f"the host has {len(host)} tensors, the guest {len(guest)}: only the {side} has {extra}"
    return None
