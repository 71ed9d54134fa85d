"""Owns who sends what to whom in a collective: pure functions that give each rank its rounds.

It must not know tensors, bytes on a link, or time: chunks are numbers, and what they hold is the caller's affair.

A `Schedule` is read by each rank on its own, in this way:

- the sends of round t may start as soon as the receives of all rounds up to t - ahead are done and applied;
- the receives of a round are applied in the order in which they stand, after the sends of that round have started;
- messages from one rank to another arrive in the order in which they were sent, so that no message needs a name:
  the k-th receive from a rank is the k-th send of that rank to this one;
- in a round that combines, what arrives is reduced into the chunk; in any other it takes the chunk's place.

A send reads its chunk until it is through. In `direct` alone a round sends and combines the same chunk, so there
the caller must reduce into other memory, or wait until the send is through. In all others a chunk that was sent is
not written again, or (the ring) only by what depends on its having arrived.

Ranks are those of the group, 0 .. world - 1. What each algorithm costs, for S bytes on each rank:

    direct          2 ranks, all-reduce          S sent per rank, 1 latency
    exchange        all-gather, gather-reduce    (N - 1) S sent per rank, 1 latency
    ring            all-reduce                   2 (N - 1) / N S sent per rank, 2 (N - 1) latencies
    owners          all-reduce                   2 (N - 1) / N S sent per rank, 2 latencies, all to all at once
    binomial        broadcast, reduce            at most ceil(log2 N) S sent by one rank, ceil(log2 N) latencies
    chain           broadcast, reduce            S sent per rank, N - 1 latencies of a chunk
    pairwise        all-to-all, reduce-scatter   (N - 1) / N S sent per rank, 1 latency
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

Span = tuple[int, int]
"""start, stop: elements of a flat tensor."""


@dataclass(frozen=True, slots=True)
class Move:
    """One message."""

    peer: int
    """The other rank."""
    chunk: int
    """Which part of the data: what this number means is said by the function that made the schedule."""


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
    ahead: int = 1
    """By how many rounds the sends may run ahead of the receives; at least 1."""

    def __post_init__(self) -> None:
        assert self.ahead >= 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Thresholds:
    """Where one algorithm takes over from another."""

    small_bytes: int = 32 * 1024
    """Up to this size latency is all that counts."""
    ring_bytes: int = 4 * 1024 * 1024
    """Above this size for each rank it matters that a link carries one neighbour's data at a time, and not how many
    hops there are."""
    chunk_bytes: int = 512 * 1024
    """How much is sent at once, so that sending, receiving and reducing overlap."""


# -- parts of a tensor


def split(count: int, parts: int, multiple: int = 1) -> tuple[Span, ...]:
    """0..count in `parts` spans of nearly equal length; some are empty where there is too little.

    Args:
        multiple: every span but the last that holds anything starts and ends at a multiple of this.
    """
    units = -(-count // multiple)
    whole, left = divmod(units, parts)
    ends = [min(count, multiple * (whole * i + min(i, left))) for i in range(parts + 1)]
    return tuple(itertools.pairwise(ends))


def cut(spans: tuple[Span, ...], pieces: int, multiple: int = 1) -> tuple[Span, ...]:
    """Every span in `pieces` parts: part p of span b has the number b * pieces + p, as `ring` counts chunks."""
    return tuple((start + a, start + b) for start, stop in spans for a, b in split(stop - start, pieces, multiple))


def pieces_for(nbytes: int, chunk_bytes: int) -> int:
    """In how many chunks of at most `chunk_bytes` this many bytes go; at least one."""
    return max(1, -(-nbytes // chunk_bytes))


# -- all-reduce, reduce-scatter, all-gather


def direct(rank: int, world: int = 2, pieces: int = 1) -> Schedule:
    """All-reduce between two ranks: each sends everything and reduces what it gets. Chunks: 0 .. pieces - 1."""
    assert world == 2
    peer = 1 - rank
    rounds = (
        Round(sends=(Move(peer, chunk),), receives=(Move(peer, chunk),), combine=True) for chunk in range(pieces)
    )
    return Schedule(rounds=tuple(rounds), ahead=pieces)


def exchange(rank: int, world: int) -> Schedule:
    """Everybody's data to everybody at once. Chunk r is rank r's data; one's own is there already.

    Gather-reduce is this and then a reduction over the chunks, in the order of their ranks, which gives the same
    bits everywhere.
    """
    sends = tuple(Move((rank + step) % world, rank) for step in range(1, world))
    receives = tuple(Move(source, source) for source in ((rank - step) % world for step in range(1, world)))
    return Schedule(rounds=(Round(sends=sends, receives=receives),) if world > 1 else ())


gather_reduce = exchange


def ring_reduce_scatter(rank: int, world: int, pieces: int = 1) -> Schedule:
    """After it, block r is reduced on rank r; the other blocks hold partial results.

    There are `world` blocks of `pieces` chunks; chunk p of block b has the number b * pieces + p. A chunk goes on
    as soon as it is reduced, while those behind it are still on their way.
    """
    rounds = _ring(rank, world, pieces, first=rank - 1, combine=True)
    return Schedule(rounds=rounds, ahead=pieces)


def ring_all_gather(rank: int, world: int, pieces: int = 1) -> Schedule:
    """Before it, rank r has block r; after it, every rank has every block. Chunks as in the reduce-scatter."""
    return Schedule(rounds=_ring(rank, world, pieces, first=rank, combine=False), ahead=pieces)


def ring_all_reduce(rank: int, world: int, pieces: int = 1) -> Schedule:
    """The reduce-scatter and the all-gather without a pause between them."""
    scatter = ring_reduce_scatter(rank, world, pieces)
    gather = ring_all_gather(rank, world, pieces)
    return Schedule(rounds=scatter.rounds + gather.rounds, ahead=pieces)


def owners_all_reduce(rank: int, world: int, pieces: int = 1) -> Schedule:
    """Each rank reduces its own block and hands it out: a ring's bytes in two hops, where all links are alike.

    Chunks as in the ring. All other ranks send to the owner of a block at once.
    """
    others = [(rank + step) % world for step in range(1, world)]
    collect = tuple(
        Round(
            sends=tuple(Move(owner, owner * pieces + piece) for owner in others),
            receives=tuple(Move(source, rank * pieces + piece) for source in sorted(others)),
            combine=True,
        )
        for piece in range(pieces)
    )
    hand_out = tuple(
        Round(
            sends=tuple(Move(other, rank * pieces + piece) for other in others),
            receives=tuple(Move(owner, owner * pieces + piece) for owner in sorted(others)),
        )
        for piece in range(pieces)
    )
    return Schedule(rounds=collect + hand_out if world > 1 else (), ahead=pieces)


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


def pairwise(rank: int, world: int) -> Schedule:
    """All-to-all. A send's chunk is the rank it is for; a receive's chunk is the rank it is from.

    So the two count different tensors: input and output. One's own part never leaves. With a reduction over what
    arrived, in the order of the ranks, it is a reduce-scatter.
    """
    rounds = []
    for step in range(1, world):
        to, source = (rank + step) % world, (rank - step) % world
        rounds.append(Round(sends=(Move(to, to),), receives=(Move(source, source),)))
    return Schedule(rounds=tuple(rounds), ahead=max(1, world - 1))


# -- from one and to one


def binomial_broadcast(rank: int, world: int, root: int = 0, pieces: int = 1) -> Schedule:
    """Down a tree from the root. Chunks: 0 .. pieces - 1; each is handed on as soon as it is there."""
    parent, children = _tree(rank, world, root)
    return _downward(parent, children, pieces)


def binomial_reduce(rank: int, world: int, root: int = 0, pieces: int = 1) -> Schedule:
    """Up a tree: after it, the root's chunks are reduced, and all others hold partial results."""
    parent, children = _tree(rank, world, root)
    return _upward(parent, tuple(reversed(children)), pieces)


def chain_broadcast(rank: int, world: int, root: int = 0, pieces: int = 1) -> Schedule:
    """From each rank to the next. Nobody sends anything twice: the best for many chunks."""
    parent, children = _line(rank, world, root)
    return _downward(parent, children, pieces)


def chain_reduce(rank: int, world: int, root: int = 0, pieces: int = 1) -> Schedule:
    """As `chain_broadcast`, the other way: each rank reduces and hands on."""
    parent, children = _line(rank, world, root)
    return _upward(parent, children, pieces)


def binomial_gather(rank: int, world: int, root: int = 0) -> Schedule:
    """Up a tree, nothing reduced. Chunk r is rank r's data; ranks on the way hold those of their subtree."""
    parent, children = _tree(rank, world, root)
    rounds = [
        Round(receives=tuple(Move(child, chunk) for chunk in _below(child, world, root)))
        for child in reversed(children)
    ]
    if parent is not None:
        rounds.append(Round(sends=tuple(Move(parent, chunk) for chunk in _below(rank, world, root))))
    return Schedule(rounds=tuple(rounds))


def binomial_scatter(rank: int, world: int, root: int = 0) -> Schedule:
    """Down a tree. Chunk r is for rank r; ranks on the way hold those of their subtree for a while."""
    parent, children = _tree(rank, world, root)
    rounds = []
    if parent is not None:
        rounds.append(Round(receives=tuple(Move(parent, chunk) for chunk in _below(rank, world, root))))
    sends = tuple(Move(child, chunk) for child in children for chunk in _below(child, world, root))
    if sends:
        rounds.append(Round(sends=sends))
    return Schedule(rounds=tuple(rounds))


def star_gather(rank: int, world: int, root: int = 0) -> Schedule:
    """Everybody straight to the root. Chunk r is rank r's data."""
    if rank != root:
        return Schedule(rounds=(Round(sends=(Move(root, rank),)),))
    others = ((root + step) % world for step in range(1, world))
    return Schedule(rounds=(Round(receives=tuple(Move(other, other) for other in others)),))


def star_scatter(rank: int, world: int, root: int = 0) -> Schedule:
    """The root straight to everybody. Chunk r is for rank r."""
    if rank != root:
        return Schedule(rounds=(Round(receives=(Move(root, rank),)),))
    others = ((root + step) % world for step in range(1, world))
    return Schedule(rounds=(Round(sends=tuple(Move(other, other) for other in others)),))


def _downward(parent: int | None, children: tuple[int, ...], pieces: int) -> Schedule:
    # A chunk that arrived in one round leaves in the next, while the one after it arrives.
    rounds = []
    for at in range(pieces + 1):
        arriving = (Move(parent, at),) if parent is not None and at < pieces else ()
        leaving = tuple(Move(child, at - 1) for child in children) if at else ()
        if arriving or leaving:
            rounds.append(Round(sends=leaving, receives=arriving))
    return Schedule(rounds=tuple(rounds))


def _upward(parent: int | None, children: tuple[int, ...], pieces: int) -> Schedule:
    rounds = []
    for at in range(pieces + 1):
        arriving = tuple(Move(child, at) for child in children) if at < pieces else ()
        leaving = (Move(parent, at - 1),) if parent is not None and at else ()
        if arriving or leaving:
            rounds.append(Round(sends=leaving, receives=arriving, combine=True))
    return Schedule(rounds=tuple(rounds))


def _line(rank: int, world: int, root: int) -> tuple[int | None, tuple[int, ...]]:
    place = (rank - root) % world
    parent = (rank - 1) % world if place else None
    return parent, ((rank + 1) % world,) if place + 1 < world else ()


def _tree(rank: int, world: int, root: int) -> tuple[int | None, tuple[int, ...]]:
    """A rank's parent, and its children, the one with the largest subtree first."""
    place = (rank - root) % world
    reach = _reach(place, world)
    parent = (place - reach + root) % world if place else None
    children = []
    while reach > 1:
        reach //= 2
        if place + reach < world:
            children.append((place + reach + root) % world)
    return parent, tuple(children)


def _reach(place: int, world: int) -> int:
    """How many places, from this one on, belong to its subtree: its lowest bit; for the root, all."""
    return place & -place if place else 1 << max(0, world - 1).bit_length()


def _below(rank: int, world: int, root: int) -> tuple[int, ...]:
    place = (rank - root) % world
    return tuple((p + root) % world for p in range(place, min(world, place + _reach(place, world))))


# -- which of them

ALGORITHMS: dict[str, dict[str, Callable[..., Schedule]]] = {
    "all_reduce": {
        "direct": direct,
        "gather_reduce": gather_reduce,
        "owners": owners_all_reduce,
        "ring": ring_all_reduce,
    },
    "reduce_scatter": {"pairwise": pairwise, "ring": ring_reduce_scatter},
    "all_gather": {"exchange": exchange, "ring": ring_all_gather},
    "broadcast": {"binomial": binomial_broadcast, "chain": chain_broadcast},
    "reduce": {"binomial": binomial_reduce, "chain": chain_reduce},
    "gather": {"star": star_gather, "binomial": binomial_gather},
    "scatter": {"star": star_scatter, "binomial": binomial_scatter},
    "all_to_all": {"pairwise": pairwise},
}

_STAR_WORLD = 8


def choose(collective: str, nbytes: int, world: int, thresholds: Thresholds) -> str:
    """The algorithm's name in `ALGORITHMS[collective]`; the same on every rank that gives the same figures.

    Args:
        nbytes: what one rank has at its largest: the tensor that is reduced or broadcast, the input of a
            reduce-scatter, the output of an all-gather, one rank's part of a gather or scatter.
    """
    small = nbytes <= thresholds.small_bytes
    few_hops = world == 2 or nbytes <= thresholds.ring_bytes * world
    if collective == "all_reduce":
        if small:
            return "direct" if world == 2 else "gather_reduce"
        if world == 2 and nbytes <= thresholds.chunk_bytes // 2:
            # There is nothing to overlap yet, and one hop is quicker than two.
            return "direct"
        return "owners" if few_hops else "ring"
    if collective == "reduce_scatter":
        return "pairwise" if few_hops else "ring"
    if collective == "all_gather":
        return "exchange" if few_hops else "ring"
    if collective in ("broadcast", "reduce"):
        # With one chunk there is nothing to overlap, and the tree has fewer latencies.
        return "binomial" if nbytes <= max(thresholds.small_bytes, thresholds.chunk_bytes) else "chain"
    if collective in ("gather", "scatter"):
        return "binomial" if small and world > _STAR_WORLD else "star"
    assert collective == "all_to_all", collective
    return "pairwise"
