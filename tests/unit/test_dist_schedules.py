"""Schedules, played by ranks that move tokens: what each ends up with, and that nobody waits for ever."""

from __future__ import annotations

import itertools
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

fast = settings(max_examples=60, deadline=None)
worlds = st.integers(1, 9)
pieces_of = st.integers(1, 5)
seeds = st.integers(0, 2**32 - 1)


@dataclass
class Player:
    """One rank: its schedule, how far it is, and its chunks."""

    schedule: s.Schedule
    memory: Memory
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


def play(players: list[Player], seed: int, *, room: int = 1) -> Counter[int]:
    """All ranks to their ends, in an order drawn from the seed; says how many chunks each has sent.

    A message reads its chunk as late as it can, when it arrives: a chunk must keep until then.

    Args:
        room: how many messages fit between two ranks.
    """
    chance = random.Random(seed)
    links: dict[tuple[int, int], deque[s.Move]] = {}
    moved: Counter[int] = Counter()

    def send(rank: int) -> Callable[[], None] | None:
        player = players[rank]
        player.release()
        if not player.queue:
            return None
        link = links.setdefault((rank, player.queue[0].peer), deque())
        if len(link) >= room:
            return None

        def act() -> None:
            link.append(player.queue.popleft())
            moved[rank] += 1

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
            tokens = Counter(players[move.peer].memory[link.popleft().chunk])
            combine = player.schedule.rounds[at].combine
            player.memory[move.chunk] = player.memory[move.chunk] + tokens if combine else tokens
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
    return moved


def everyone(world: int, chunks: int, make: Callable[[int], s.Schedule]) -> list[Player]:
    """Ranks that start with all chunks of their own."""
    return [Player(make(r), {chunk: Counter([(r, chunk)]) for chunk in range(chunks)}) for r in range(world)]


def summed(chunk: int, world: int) -> Tokens:
    return Counter((rank, chunk) for rank in range(world))


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


@fast
@given(worlds, pieces_of, seeds, st.integers(1, 3))
def test_the_ring_reduces_everything_for_all_with_the_fewest_bytes(
    world: int, pieces: int, seed: int, room: int
) -> None:
    players = everyone(world, world * pieces, lambda r: s.ring_all_reduce(r, world, pieces))
    moved = play(players, seed, room=room)
    per_chunk = 16
    total = world * pieces * per_chunk
    for rank, player in enumerate(players):
        assert player.memory == {chunk: summed(chunk, world) for chunk in range(world * pieces)}
        assert moved[rank] * per_chunk * world == 2 * (world - 1) * total


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
        players = everyone(4, 8, lambda r: wrong[r])
        play(players, seed)
        outcomes.append(all(p.memory == {c: summed(c, 4) for c in range(8)} for p in players))
    assert not all(outcomes)


def test_a_schedule_whose_receives_come_too_early_is_caught() -> None:
    def waiting(peer: int) -> s.Schedule:
        move = (s.Move(peer, 0),)
        return s.Schedule(rounds=(s.Round(receives=move), s.Round(sends=move)), ahead=1)

    with pytest.raises(AssertionError, match="for ever"):
        play(everyone(2, 1, lambda r: waiting(1 - r)), 0)


# -- the choice


def test_what_is_chosen() -> None:
    limits = s.Thresholds(small_bytes=1000, ring_bytes=25_000, chunk_bytes=10_000)
    assert s.choose(500, 2, limits) == "direct"
    assert s.choose(5_000, 2, limits) == "direct"
    assert s.choose(5_001, 2, limits) == "owners"
    assert s.choose(100_000_000, 2, limits) == "owners"
    assert s.choose(1000, 4, limits) == "direct"
    assert s.choose(1001, 4, limits) == "owners"
    assert s.choose(100_001, 5, limits) == "owners"
    assert s.choose(100_001, 4, limits) == "ring"


def test_alone_there_is_nothing_to_do() -> None:
    assert s.ring_all_reduce(0, 1).rounds == ()
