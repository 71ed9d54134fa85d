"""Steps of milliseconds with a guest that cannot help: the host does little for it, and its rests are long."""

from __future__ import annotations

import pytest

from potluck.hub import actions as act
from potluck.hub.feeding import FOLLOW_S, Feeding
from potluck.hub.members import LONGEST_BENCH_STEPS, LONGEST_REST_S, SITTING_OUT
from potluck.hub.stepping import Stepping
from support.protocol_world import World
from support.stepping_table import Table

STEP_S = 0.0015


def coded(feeding: Feeding, *, step_s: float, seconds: float, needed: bool = False) -> int:
    """How many of the steps of so many seconds are coded."""
    steps = round(seconds / step_s)
    return sum(feeding.begin_step(100 + n * step_s, step_s, needed=needed) for n in range(steps))


def test_short_steps_are_coded_one_by_one_only_for_who_computes_on_them() -> None:
    table = Table("g")
    feeding = Feeding(pieces=1, members=table.members)
    member = table.members["g"]
    member.feed.open = False
    assert coded(feeding, step_s=STEP_S, seconds=1.0) == 0
    member.feed.open = True
    assert coded(feeding, step_s=STEP_S, seconds=10.0) <= 10.0 / FOLLOW_S + 1
    assert coded(feeding, step_s=STEP_S, seconds=1.0, needed=True) == round(1.0 / STEP_S)
    assert coded(feeding, step_s=2 * FOLLOW_S, seconds=10.0) == 20
    assert feeding.begin_step(200.0, None, needed=False)  # how long a step takes is not known yet


def host_alone(world: World) -> None:
    """A step in which the guests answer nothing."""
    world.begin()
    while world.take() is None and world.in_hand is not None:
        world.compute()
    world.finish()


def test_a_guest_that_joins_where_steps_are_short_is_not_followed_step_by_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World(batch=6, samples=100)
    world.hello("a")
    world.ready("a")
    assert world.members["a"].feed.open
    coding = []
    handle = world.protocol.handle

    def spied(event: object, now: float) -> list[act.Action]:
        actions = handle(event, now)  # type: ignore[arg-type]
        coding.append(sum(isinstance(action, act.CodeChange) for action in actions))
        return actions

    host_alone(world)  # how long a step takes is known from here on
    monkeypatch.setattr(world.protocol, "handle", spied)
    monkeypatch.setattr(Stepping, "alone_s", STEP_S)
    began = world.now
    for step in range(50):
        world.now = began + step * STEP_S
        host_alone(world)
    assert sum(coding) <= 3


def test_where_steps_are_short_rests_grow_to_half_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    table = Table()
    member = table.join("slow", rate=0.001)
    monkeypatch.setattr(Stepping, "alone_s", STEP_S)
    table.begin()
    lengths = []
    for _ in range(20):
        member.rest(1000, "late")
        lengths.append(member.rests_until_step - 1000)
    assert lengths == sorted(lengths)
    assert lengths[-1] == LONGEST_REST_S / STEP_S


def test_where_steps_are_long_rests_are_as_they_were() -> None:
    table = Table("g")
    table.begin()
    assert table.members["g"].longest_rest == LONGEST_BENCH_STEPS


def test_the_hosts_own_norm_is_not_computed_for_guests_that_have_no_part() -> None:
    world = World(batch=6, samples=100)
    assert not world.protocol.judges
    world.hello("a")
    assert not world.protocol.judges  # it builds its model
    world.ready("a")
    assert world.protocol.judges  # before its first contribution it must be known how large that may be
    for member in world.members.values():
        member.state = SITTING_OUT
    assert not world.protocol.judges
    world.protocol.norms.suspect("a", step=world.ledger.step, norm=1e9)
    assert world.protocol.judges
