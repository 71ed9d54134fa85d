"""Schedules, played by ranks that move tokens: what each ends up with, and that nobody waits for ever."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from potluck.dist import schedules as s

Tokens = Counter[object]
Memory = dict[int, Tokens]
Make = Callable[..., s.Schedule]
Case = tuple[int, int, int]

fast = settings(max_examples=60, deadline=None)
worlds = st.integers(1, 9)
pieces_of = st.integers(1, 5)
seeds = st.integers(0, 2**32 - 1)


@dataclass
class Player:
    """One rank: its schedule, how far it is, and its chunks. `out` is `memory` unless inputs and outputs differ."""

    schedule: s.Schedule
    memory: Memory
    out: Memory
    sent: int = 0
    received: int = 0
    queue: deque[s.Move] = field(default_factory=deque)

    def __post_init__(self) -> None:
        self.receives = [(at, move) for at, r in enumerate(self.schedule.rounds) for move in r.receives]

    def done_before(self, round_: int) -> bool:
        return self.received == len(self.receives) or self.receives[self.received][0] >= round_

    def finished(self) -> bool:
        return not self.queue and self.sent == len(self.schedule.rounds) and self.received == len(self.receives)

    def started(self, round_: int) -> bool:
        """Whether the sends up to this round have left."""
        left = sum(len(r.sends) for r in self.schedule.rounds[: self.sent]) - len(self.queue)
        return left >= sum(len(r.sends) for r in self.schedule.rounds[: round_ + 1])

    def release(self) -> None:
        """Start every send that the schedule allows by now."""
        rounds = self.schedule.rounds
        while self.sent < len(rounds) and self.done_before(self.sent - self.schedule.ahead + 1):
            self.queue.extend(rounds[self.sent].sends)
            self.sent += 1


@dataclass
class Played:
    players: list[Player]
    moved: Counter[int]
    """Chunks sent by each rank, by rank."""
    chunks: list[Counter[int]]


def play(players: list[Player], seed: int, *, room: int = 1, late: bool = True) -> Played:
    """All ranks to their ends, in an order drawn from the seed.

    Args:
        room: how many messages fit between two ranks.
        late: a message reads its chunk as late as it can, when it arrives: a chunk must keep until then.
    """
    chance = random.Random(seed)
    links: dict[tuple[int, int], deque[tuple[s.Move, Tokens]]] = {}
    moved: Counter[int] = Counter()
    chunks: list[Counter[int]] = [Counter() for _ in players]

    def send(rank: int) -> Callable[[], None] | None:
        player = players[rank]
        player.release()
        if not player.queue:
            return None
        link = links.setdefault((rank, player.queue[0].peer), deque())
        if len(link) >= room:
            return None

        def act() -> None:
            move = player.queue.popleft()
            link.append((move, Counter(player.memory[move.chunk])))
            moved[rank] += 1
            chunks[rank][move.chunk] += 1

        return act

    def receive(rank: int) -> Callable[[], None] | None:
        player = players[rank]
        if player.received == len(player.receives):
            return None
        at, move = player.receives[player.received]
        link = links.get((move.peer, rank))
        if not link or not player.started(at):
            return None

        def act() -> None:
            sent, tokens = link.popleft()
            if late:
                tokens = Counter(players[move.peer].memory[sent.chunk])
            combine = player.schedule.rounds[at].combine
            player.out[move.chunk] = player.out[move.chunk] + tokens if combine else tokens
            player.received += 1

        return act

    while True:
        ready = [act for rank in range(len(players)) for act in (send(rank), receive(rank)) if act is not None]
        if not ready:
            break
        chance.choice(ready)()
    stuck = [rank for rank, player in enumerate(players) if not player.finished()]
    assert not stuck, f"ranks {stuck} wait for ever"
    assert not any(links.values()), "messages that nobody takes"
    return Played(players, moved, chunks)


def blank(rank: int, chunks: int, own: set[int]) -> Memory:
    return {chunk: Counter([(rank, chunk)]) if chunk in own else Counter() for chunk in range(chunks)}


def everyone(world: int, chunks: int, make: Callable[[int], s.Schedule]) -> list[Player]:
    """Ranks that start with all chunks of their own, as for a reduction."""
    players = []
    for rank in range(world):
        memory = blank(rank, chunks, set(range(chunks)))
        players.append(Player(make(rank), memory, memory))
    return players


def owners(world: int, make: Make, own: Callable[[int], set[int]], chunks: int) -> list[Player]:
    players = []
    for rank in range(world):
        memory = blank(rank, chunks, own(rank))
        players.append(Player(make(rank), memory, memory))
    return players


def summed(chunk: int, world: int) -> Tokens:
    return Counter((rank, chunk) for rank in range(world))


# -- parts


@given(st.integers(0, 10_000), st.integers(1, 40), st.integers(1, 200))
def test_a_split_covers_everything_once_and_evenly(count: int, parts: int, multiple: int) -> None:
    spans = s.split(count, parts, multiple)
    assert len(spans) == parts
    assert spans[0][0] == 0
    assert spans[-1][1] == count
    assert all(stop == start for (_, stop), (start, _) in itertools.pairwise(spans))
    lengths = [stop - start for start, stop in spans]
    assert min(lengths) >= 0
    assert max(lengths) - min(lengths) <= 2 * multiple if multiple > 1 else max(lengths) - min(lengths) <= 1
    assert all(start % multiple == 0 or start == count for start, _ in spans)


@given(st.integers(0, 1000), worlds, pieces_of)
def test_cutting_spans_keeps_their_order(count: int, world: int, pieces: int) -> None:
    blocks = s.split(count, world)
    chunks = s.cut(blocks, pieces)
    assert len(chunks) == world * pieces
    for block, (start, stop) in enumerate(blocks):
        mine = chunks[block * pieces : (block + 1) * pieces]
        assert (mine[0][0], mine[-1][1]) == (start, stop)
        assert sum(b - a for a, b in mine) == stop - start


def test_pieces() -> None:
    assert [s.pieces_for(n, 100) for n in (0, 1, 100, 101, 1000)] == [1, 1, 1, 2, 10]


# -- reductions over all


@fast
@given(pieces_of, seeds, st.integers(1, 3))
def test_direct_gives_both_the_sum(pieces: int, seed: int, room: int) -> None:
    played = play(everyone(2, pieces, lambda r: s.direct(r, 2, pieces)), seed, room=room, late=False)
    for rank, player in enumerate(played.players):
        assert player.memory == {chunk: summed(chunk, 2) for chunk in range(pieces)}
        assert played.moved[rank] == pieces  # S, which is 2(N-1)/N S for two


@fast
@given(worlds, seeds, st.integers(1, 3))
def test_exchange_gives_all_everybodys(world: int, seed: int, room: int) -> None:
    players = owners(world, lambda r: s.exchange(r, world), lambda r: {r}, world)
    played = play(players, seed, room=room)
    for rank, player in enumerate(played.players):
        assert player.memory == {r: Counter([(r, r)]) for r in range(world)}
        assert played.moved[rank] == world - 1
        assert len(player.schedule.rounds) <= 1


@fast
@given(worlds, pieces_of, seeds, st.integers(1, 3), st.sampled_from([s.ring_all_reduce, s.owners_all_reduce]))
def test_ring_and_owners_reduce_everything_for_all_with_the_fewest_bytes(
    world: int, pieces: int, seed: int, room: int, make: Make
) -> None:
    players = everyone(world, world * pieces, lambda r: make(r, world, pieces))
    played = play(players, seed, room=room)
    per_chunk = 16
    total = world * pieces * per_chunk
    for rank, player in enumerate(played.players):
        assert player.memory == {chunk: summed(chunk, world) for chunk in range(world * pieces)}
        assert played.moved[rank] * per_chunk * world == 2 * (world - 1) * total


@fast
@given(worlds, pieces_of, seeds)
def test_the_ring_scatters_and_gathers(world: int, pieces: int, seed: int) -> None:
    scattered = play(everyone(world, world * pieces, lambda r: s.ring_reduce_scatter(r, world, pieces)), seed)
    for rank, player in enumerate(scattered.players):
        for piece in range(pieces):
            chunk = rank * pieces + piece
            assert player.memory[chunk] == summed(chunk, world)
        assert scattered.moved[rank] == (world - 1) * pieces

    def own(rank: int) -> set[int]:
        return set(range(rank * pieces, (rank + 1) * pieces))

    gathered = play(owners(world, lambda r: s.ring_all_gather(r, world, pieces), own, world * pieces), seed)
    for rank, player in enumerate(gathered.players):
        assert player.memory == {c: Counter([(c // pieces, c)]) for c in range(world * pieces)}
        assert gathered.moved[rank] == (world - 1) * pieces


@given(st.integers(2, 9), st.integers(1, 1000))
def test_the_rings_bytes_are_the_closed_form(world: int, per_block: int) -> None:
    """In elements, with the spans that the chunks stand for: 2(N-1)/N of the tensor, on every rank."""
    pieces, count = 3, world * per_block
    spans = s.cut(s.split(count, world), pieces)
    for rank in range(world):
        sends = [move for r in s.ring_all_reduce(rank, world, pieces).rounds for move in r.sends]
        assert sum(spans[m.chunk][1] - spans[m.chunk][0] for m in sends) * world == 2 * (world - 1) * count


def test_chunks_of_the_ring_are_under_way_together() -> None:
    """With 4 chunks in a block, 4 may leave before anything has come; the fifth is the first that waits."""
    players = everyone(3, 12, lambda r: s.ring_all_reduce(r, 3, 4))
    players[0].release()
    assert len(players[0].queue) == 4
    players[0].received = 1
    players[0].release()
    assert len(players[0].queue) == 5


def test_a_schedule_that_runs_too_far_ahead_is_caught() -> None:
    """The game can be lost: sends that leave before their chunk is reduced give wrong sums."""
    wrong = [s.Schedule(rounds=s.ring_all_reduce(r, 4, 2).rounds, ahead=3) for r in range(4)]
    outcomes = []
    for seed in range(10):
        played = play(everyone(4, 8, lambda r: wrong[r]), seed)
        outcomes.append(all(p.memory == {c: summed(c, 4) for c in range(8)} for p in played.players))
    assert not all(outcomes)


def test_a_schedule_whose_receives_come_too_early_is_caught() -> None:
    def waiting(peer: int) -> s.Schedule:
        move = (s.Move(peer, 0),)
        return s.Schedule(rounds=(s.Round(receives=move), s.Round(sends=move)))

    with pytest.raises(AssertionError, match="for ever"):
        play(everyone(2, 1, lambda r: waiting(1 - r)), 0)


@fast
@given(worlds, seeds, st.integers(1, 3))
def test_pairwise_gives_each_its_part_of_all(world: int, seed: int, room: int) -> None:
    players = []
    for rank in range(world):
        memory = blank(rank, world, set(range(world)))
        players.append(Player(s.pairwise(rank, world), memory, {rank: Counter([(rank, rank)])}))
    played = play(players, seed, room=room)
    for rank, player in enumerate(played.players):
        assert player.out == {source: Counter([(source, rank)]) for source in range(world)}
        assert played.moved[rank] == world - 1


# -- from one and to one


@st.composite
def rooted(draw: st.DrawFn) -> Case:
    world = draw(worlds)
    return world, draw(st.integers(0, world - 1)), draw(pieces_of)


@fast
@given(rooted(), seeds, st.sampled_from([s.binomial_broadcast, s.chain_broadcast]))
def test_a_broadcast_reaches_all(case: Case, seed: int, make: Make) -> None:
    world, root, pieces = case
    own = {root: set(range(pieces))}
    played = play(owners(world, lambda r: make(r, world, root, pieces), lambda r: own.get(r, set()), pieces), seed)
    for player in played.players:
        assert player.memory == {chunk: Counter([(root, chunk)]) for chunk in range(pieces)}
    assert sum(played.moved.values()) == (world - 1) * pieces
    most = math.ceil(math.log2(world)) if make is s.binomial_broadcast and world > 1 else 1
    assert max([0, *played.moved.values()]) <= most * pieces


@fast
@given(rooted(), seeds, st.sampled_from([s.binomial_reduce, s.chain_reduce]))
def test_a_reduction_to_one_holds_all_once(case: Case, seed: int, make: Make) -> None:
    world, root, pieces = case
    played = play(everyone(world, pieces, lambda r: make(r, world, root, pieces)), seed)
    assert played.players[root].memory == {chunk: summed(chunk, world) for chunk in range(pieces)}
    assert sum(played.moved.values()) == (world - 1) * pieces
    assert all(played.moved[rank] == pieces for rank in range(world) if rank != root)


@fast
@given(rooted(), seeds, st.sampled_from([s.binomial_gather, s.star_gather]))
def test_a_gather_brings_all_to_one(case: Case, seed: int, make: Make) -> None:
    world, root, _ = case
    played = play(owners(world, lambda r: make(r, world, root), lambda r: {r}, world), seed)
    assert played.players[root].memory == {rank: Counter([(rank, rank)]) for rank in range(world)}


@fast
@given(rooted(), seeds, st.sampled_from([s.binomial_scatter, s.star_scatter]))
def test_a_scatter_brings_each_its_own(case: Case, seed: int, make: Make) -> None:
    world, root, _ = case
    own = {root: set(range(world))}
    played = play(owners(world, lambda r: make(r, world, root), lambda r: own.get(r, set()), world), seed)
    for rank, player in enumerate(played.players):
        assert player.memory[rank] == Counter([(root, rank)])


def test_a_tree_is_as_deep_as_it_must_be() -> None:
    """Eight ranks: the farthest is three messages away."""

    def depth(rank: int) -> int:
        parents = [move.peer for r in s.binomial_broadcast(rank, 8, 3).rounds for move in r.receives]
        return 1 + depth(parents[0]) if parents else 0

    assert max(depth(rank) for rank in range(8)) == 3


# -- the choice


@given(st.sampled_from(sorted(s.ALGORITHMS)), st.integers(0, 2**40), st.integers(2, 64))
def test_the_choice_exists_and_is_the_same_for_all(collective: str, nbytes: int, world: int) -> None:
    name = s.choose(collective, nbytes, world, s.Thresholds())
    assert name in s.ALGORITHMS[collective]
    assert isinstance(s.ALGORITHMS[collective][name](0, world), s.Schedule)


def test_what_is_chosen() -> None:
    limits = s.Thresholds(small_bytes=1000, ring_bytes=25_000, chunk_bytes=10_000)
    assert s.choose("all_reduce", 500, 2, limits) == "direct"
    assert s.choose("all_reduce", 5_000, 2, limits) == "direct"
    assert s.choose("all_reduce", 5_001, 2, limits) == "owners"
    assert s.choose("all_reduce", 100_000_000, 2, limits) == "owners"
    assert s.choose("all_reduce", 1000, 4, limits) == "gather_reduce"
    assert s.choose("all_reduce", 1001, 4, limits) == "owners"
    assert s.choose("all_reduce", 100_001, 5, limits) == "owners"
    assert s.choose("all_reduce", 100_001, 4, limits) == "ring"
    assert s.choose("reduce_scatter", 100_001, 4, limits) == "ring"
    assert s.choose("all_gather", 100_000, 4, limits) == "exchange"
    assert s.choose("broadcast", 10_000, 4, limits) == "binomial"
    assert s.choose("broadcast", 10_001, 4, limits) == "chain"
    assert s.choose("gather", 100, 16, limits) == "binomial"
    assert s.choose("gather", 5000, 16, limits) == "star"
    with pytest.raises(AssertionError):
        s.choose("conjure", 1, 2, limits)


def test_alone_there_is_nothing_to_do() -> None:
    for name, algorithms in s.ALGORITHMS.items():
        for algorithm, make in algorithms.items():
            if algorithm != "direct":
                moves = [m for r in make(0, 1).rounds for m in (*r.sends, *r.receives)]
                assert not moves, f"{name} by {algorithm}"
