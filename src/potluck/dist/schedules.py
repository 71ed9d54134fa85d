"""Owns how an all-reduce goes between machines: which algorithm, the parts of the tensor, and the ring's rounds.

It must not know tensors, bytes on a link, or time: chunks are numbers, and what they hold is the caller's affair.

A `Schedule` is read by each rank on its own, in this way:

- the sends of round t may start as soon as the receives of all rounds up to t - ahead are done and applied;
- the receives of a round are applied in the order in which they stand, after the sends of that round have started;
- messages from one rank to another arrive in the order in which they were sent, so that no message needs a name:
  the k-th receive from a rank is the k-th send of that rank to this one;
- in a round that combines, what arrives is reduced into the chunk; in any other it takes the chunk's place.

A send reads its chunk until it is through. A chunk that was sent is written again only by what depends on its
arrival.

Ranks are those of the group, 0 .. world - 1. What each algorithm costs, for S bytes on each of N ranks:

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


@dataclass(frozen=True, slots=True)
class Move:
    """One message."""

    peer: int
    """The other rank."""
    chunk: int
    """Which part of the data, as `cut` counts them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    sends: tuple[Move, ...] = ()
    receives: tuple[Move, ...] = ()
    combine: bool = False
    """What arrives is reduced into the chunk, instead of replacing it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """One rank's part in a collective."""

    rounds: tuple[Round, ...]
    ahead: int
    """By how many rounds the sends may run ahead of the receives; at least 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Thresholds:
    """Where one algorithm takes over from another."""

    small_bytes: int
    """Up to this size latency is all that counts."""
    chunk_bytes: int
    """How much is sent at once, so that sending, receiving and reducing overlap."""
    ring_bytes: int = 4 * 1024 * 1024
    """Above this size for each rank it matters that a link carries one neighbour's data at a time, and not how many
    hops there are."""


def split(count: int, parts: int, multiple: int = 1) -> tuple[Span, ...]:
    """0..count in `parts` spans of nearly equal length; some are empty where there is too little.

    Args:
        multiple: every span but the last that holds anything starts and ends at a multiple of this.
    """
    units = -(-count // multiple)
    whole, left = divmod(units, parts)
    ends = [min(count, multiple * (whole * i + min(i, left))) for i in range(parts + 1)]
    return tuple(itertools.pairwise(ends))


def cut(spans: tuple[Span, ...], pieces: int) -> tuple[Span, ...]:
    """Every span in `pieces` parts: part p of span b has the number b * pieces + p, as the ring counts chunks."""
    return tuple((start + a, start + b) for start, stop in spans for a, b in split(stop - start, pieces))


def pieces_for(nbytes: int, chunk_bytes: int) -> int:
    """In how many chunks of at most `chunk_bytes` this many bytes go; at least one."""
    return max(1, -(-nbytes // chunk_bytes))


def ring_all_reduce(rank: int, world: int, pieces: int = 1) -> Schedule:
    """Chunks go round once to be reduced and once more to be handed out, without a pause between.

    There are `world` blocks of `pieces` chunks; chunk p of block b has the number b * pieces + p. A chunk goes on
    as soon as it is reduced, while those behind it are still on their way. Block r is reduced last by rank r.
    """
    scatter = _ring(rank, world, pieces, first=rank - 1, combine=True)
    gather = _ring(rank, world, pieces, first=rank, combine=False)
    return Schedule(rounds=scatter + gather, ahead=pieces)


def _ring(rank: int, world: int, pieces: int, *, first: int, combine: bool) -> tuple[Round, ...]:
    right, left = (rank + 1) % world, (rank - 1) % world
    return tuple(
        Round(
            sends=(Move(right, (first - step) % world * pieces + piece),),
            receives=(Move(left, (first - step - 1) % world * pieces + piece),),
            combine=combine,
        )
        for step in range(world - 1)
        for piece in range(pieces)
    )


def choose(nbytes: int, world: int, thresholds: Thresholds) -> Literal["direct", "owners", "ring"]:
    """How to reduce a tensor of this size; the same on every rank that gives the same figures."""
    if nbytes <= thresholds.small_bytes:
        return "direct"
    if world == 2 and nbytes <= thresholds.chunk_bytes // 2:
        # There is nothing to overlap yet, and one hop is quicker than two.
        return "direct"
    return "owners" if world == 2 or nbytes <= thresholds.ring_bytes * world else "ring"
