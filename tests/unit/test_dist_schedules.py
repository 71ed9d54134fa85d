"""The ring, played by ranks that move tokens: what each ends up with, and that nobody waits for ever."""

from __future__ import annotations

import itertools
import random
from collections import Counter, deque
from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from potluck.dist import schedules as s

Tokens = Counter[object]
Memory = dict[int, Tokens]

fast = settings(max_examples=60, deadline=None)
worlds = st.integers(1, 9)
pieces_of = st.integers(1, 5)
seeds = st.integers(0, 2**32 - 1)


Steps = tuple[s.RingStep, ...]


@dataclass
class Player:
    """One rank of the ring: its steps, how far it is, and its chunks."""

    steps: Steps
    ahead: int
    """The send of a step may start when the receives up to so many steps before it are done."""
    memory: Memory
    sent: int = 0
    received: int = 0

    def may_send(self) -> bool:
        return self.sent < len(self.steps) and self.sent < self.received + self.ahead

    def may_receive(self) -> bool:
        """The send of a step starts before its receive."""
        return self.received < min(len(self.steps), self.sent)


def play(players: list[Player], seed: int, *, room: int = 1) -> Counter[int]:
    """All ranks to their ends, in an order drawn from the seed; says how many chunks each has sent.

    A message reads its chunk as late as it can, when it arrives: a chunk must keep until then.

    Args:
        room: how many messages fit between two ranks.
    """
    chance = random.Random(seed)
    world = len(players)
    links: list[deque[int]] = [deque() for _ in players]
    """From each rank to its right neighbour."""
    moved: Counter[int] = Counter()

    def send(rank: int) -> None:
        player = players[rank]
        links[rank].append(player.steps[player.sent].send)
        player.sent += 1
        moved[rank] += 1

    def receive(rank: int) -> None:
        player, left = players[rank], (rank - 1) % world
        step = player.steps[player.received]
        tokens = Counter(players[left].memory[links[left].popleft()])
        player.memory[step.receive] = player.memory[step.receive] + tokens if step.combine else tokens
        player.received += 1

    while True:
        sends = [(send, r) for r in range(world) if players[r].may_send() and len(links[r]) < room]
        receives = [(receive, r) for r in range(world) if players[r].may_receive() and links[(r - 1) % world]]
        if not sends + receives:
            break
        act, rank = chance.choice(sends + receives)
        act(rank)
    stuck = [rank for rank, player in enumerate(players) if player.received < len(player.steps)]
    assert not stuck, f"ranks {stuck} wait for ever"
    assert not any(links), "messages that nobody takes"
    return moved


def everyone(world: int, pieces: int, ahead: int | None = None) -> list[Player]:
    """Ranks that start with all chunks of their own."""
    chunks = range(world * pieces)
    return [
        Player(s.ring_all_reduce(r, world, pieces), ahead or pieces, {c: Counter([(r, c)]) for c in chunks})
        for r in range(world)
    ]


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
    players = everyone(world, pieces)
    moved = play(players, seed, room=room)
    for rank, player in enumerate(players):
        assert player.memory == {chunk: summed(chunk, world) for chunk in range(world * pieces)}
        assert moved[rank] * world == 2 * (world - 1) * world * pieces


@given(st.integers(2, 9), st.integers(1, 1000))
def test_the_rings_bytes_are_the_closed_form(world: int, per_block: int) -> None:
    """In elements, with the spans that the chunks stand for: 2(N-1)/N of the tensor, on every rank."""
    pieces, count = 3, world * per_block
    spans = s.cut(s.split(count, world), pieces)
    for rank in range(world):
        sends = [spans[step.send] for step in s.ring_all_reduce(rank, world, pieces)]
        assert sum(stop - start for start, stop in sends) * world == 2 * (world - 1) * count


def test_what_a_rank_sends_is_what_its_neighbour_receives() -> None:
    for rank in range(4):
        mine, right = (s.ring_all_reduce(r, 4, 3) for r in (rank, (rank + 1) % 4))
        assert [step.send for step in mine] == [step.receive for step in right]


def test_sends_that_run_too_far_ahead_are_caught() -> None:
    """The game can be lost: sends that leave before their chunk is reduced give wrong sums."""
    outcomes = []
    for seed in range(10):
        players = everyone(4, 2, ahead=3)
        play(players, seed)
        outcomes.append(all(p.memory == {c: summed(c, 4) for c in range(8)} for p in players))
    assert not all(outcomes)


# -- the choice


def test_what_is_chosen() -> None:
    limits = (1000, 10_000, 25_000)
    assert s.choose(500, 2, *limits) == "direct"
    assert s.choose(5_000, 2, *limits) == "direct"
    assert s.choose(5_001, 2, *limits) == "owners"
    assert s.choose(100_000_000, 2, *limits) == "owners"
    assert s.choose(1000, 4, *limits) == "direct"
    assert s.choose(1001, 4, *limits) == "owners"
    assert s.choose(100_001, 5, *limits) == "owners"
    assert s.choose(100_001, 4, *limits) == "ring"


def test_alone_there_is_nothing_to_do() -> None:
    assert s.ring_all_reduce(0, 1) == ()
