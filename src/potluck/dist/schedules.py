"""Plans an all-reduce over the network: the algorithm, the parts of the tensor, and the ring's steps. PURE.

What each algorithm costs, for S bytes on each of N ranks:

    direct    (N - 1) S sent per rank, 1 latency
    owners    2 (N - 1) / N S sent per rank, 2 latencies, all to all at once
    ring      2 (N - 1) / N S sent per rank, 2 (N - 1) latencies, to one neighbour
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Literal

Span = tuple[int, int]
"""start, stop: elements of a flat tensor."""

RING_BYTES = 4 * 1024 * 1024
"""Above this size per rank, a link that has one neighbour's data at a time matters more than the number of hops."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RingStep:
    """What a rank sends to its right neighbour and receives from its left one."""

    send: int
    """The number of a chunk, as `cut` counts them."""
    receive: int
    combine: bool
    """Whether received data is reduced into the chunk or replaces it."""


def split(count: int, parts: int, multiple: int = 1) -> tuple[Span, ...]:
    """0..count in `parts` spans of nearly equal length. Some are empty if there are too few elements.

    `multiple`: every span except the last non-empty one starts and ends at a multiple of this.
    """
    units = -(-count // multiple)
    whole, left = divmod(units, parts)
    ends = [min(count, multiple * (whole * i + min(i, left))) for i in range(parts + 1)]
    return tuple(itertools.pairwise(ends))


def cut(spans: tuple[Span, ...], pieces: int) -> tuple[Span, ...]:
    """Every span in `pieces` chunks: chunk p of span b has the number b * pieces + p."""
    return tuple((start + a, start + b) for start, stop in spans for a, b in split(stop - start, pieces))


def pieces_for(nbytes: int, chunk_bytes: int) -> int:
    """The number of chunks of at most `chunk_bytes` for this many bytes; at least one."""
    return max(1, -(-nbytes // chunk_bytes))


def ring_all_reduce(rank: int, world: int, pieces: int = 1) -> tuple[RingStep, ...]:
    """One rank's steps: chunks go round the ring once to be reduced and once to be distributed, without a pause.

    There are `world` blocks of `pieces` chunks; block r is reduced last by rank r. A chunk is forwarded as soon as
    it is reduced, while later chunks are still arriving: the send of step t may start when the receives up to step
    t - pieces are done. Chunks arrive in the order in which the left neighbour sent them.
    """
    return tuple(
        RingStep(
            send=(first - step) % world * pieces + piece,
            receive=(first - step - 1) % world * pieces + piece,
            combine=combine,
        )
        for first, combine in ((rank - 1, True), (rank, False))
        for step in range(world - 1)
        for piece in range(pieces)
    )


def choose(
    nbytes: int, world: int, small_bytes: int, chunk_bytes: int, ring_bytes: int = RING_BYTES
) -> Literal["direct", "owners", "ring"]:
    """The algorithm for a tensor of this size; the same on every rank with the same settings."""
    if nbytes <= small_bytes:
        return "direct"
    if world == 2 and nbytes <= chunk_bytes // 2:
        # There is nothing to overlap yet, and one hop is faster than two.
        return "direct"
    return "owners" if world == 2 or nbytes <= ring_bytes * world else "ring"
