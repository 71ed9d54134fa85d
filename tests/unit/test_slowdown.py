"""A guest with which the whole run is slower sits out; one that helps stays, whatever the host's own speed does."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import pytest

from potluck.hub import inputs
from potluck.hub.members import COMPUTING, SITTING_OUT
from potluck.hub.slowdown import TRYING
from potluck.spec.events import GuestSitsOut
from support.protocol_world import new_protocol
from support.stepping_table import Table, events

BATCH = 20
Times = Callable[[int, bool], float]
"""Seconds of a step: by its number, and whether guests take part."""


class Run:
    """Steps of a table that take as long as a test says."""

    def __init__(self, table: Table, times: Times, here: tuple[str, ...] = ()) -> None:
        self.table, self.times, self.here = table, times, here
        self.helped: list[bool] = []
        self.out: list[GuestSitsOut] = []
        self.tried = 0
        """Steps of trials."""

    def steps(self, count: int) -> None:
        table = self.table
        for _ in range(count):
            step = table.ledger.step
            table.now += 0.001
            self.out += events(table.begin(), "guest_sits_out")
            self.tried += any(m.reason == TRYING for m in table.members.values())
            table.compute_all()
            for name, member in table.members.items():
                if member.lease is not None and not member.lease.revoked:
                    table.deliver(name)
            assert table.compute_all().full
            helped = bool(table.stepping.end().samples.keys() - {"host"})
            self.helped.append(helped)
            seconds = self.times(step, helped)
            slowdown, sample_s = table.stepping.slowdown, table.stepping.host_sample_s
            slowdown.timed(step, BATCH, seconds, host_sample_s=sample_s, here=self.here)

    def share(self, last: int) -> float:
        """The part of the last steps in which a guest took part."""
        return sum(self.helped[-last:]) / last


def alone_then(table: Table, times: Times, *guests: str, here: bool = True) -> Run:
    """A run whose guests come after thirty steps."""
    run = Run(table, times, here=guests if here else ())
    run.steps(30)
    for guest in guests:
        table.now += 1.0
        table.join(guest).joined_at = table.now
    return run


@pytest.mark.parametrize("here", [True, False], ids=["on this machine", "elsewhere"])
def test_a_guest_that_slows_the_run_down_sits_out_and_is_told_why(here: bool) -> None:
    run = alone_then(Table(batch=BATCH), lambda _, helped: BATCH / (805 if helped else 1100), "laptop", here=here)
    run.steps(600)
    (first, *_) = run.out
    assert first.machine == "laptop"
    assert first.reason.startswith("with it the run reaches 805 samples/s, without it 1,100; tries again at step ")
    assert run.table.members["laptop"].state == SITTING_OUT
    # Where steps are this short, two seconds of them are 80: they decide, before the trial and behind it.
    assert sum(run.helped) < 200


def test_it_tries_again_after_longer_and_longer_pauses_that_cost_little() -> None:
    run = alone_then(Table(batch=BATCH), lambda _, helped: 2.5 if helped else 2.0, "laptop")
    run.steps(5000)
    starts = [event.step for event in run.out]
    pauses = [b - a for a, b in itertools.pairwise(starts)]
    assert len(pauses) >= 3
    assert pauses[:3] == sorted(pauses[:3])
    assert pauses[2] > 2 * pauses[0]
    assert run.share(2500) < 0.02


def test_it_stays_when_it_helps_at_the_next_attempt() -> None:
    slows = [True]
    run = alone_then(Table(batch=BATCH), lambda _, h: (2.5 if slows[0] else 1.2) if h else 2.0, "laptop")
    run.steps(100)
    assert len(run.out) == 1
    slows[0] = False
    run.steps(2000)
    assert len(run.out) == 1
    assert run.table.members["laptop"].state == COMPUTING
    assert run.share(1000) > 0.97


@pytest.mark.parametrize("here", [True, False], ids=["on this machine", "elsewhere"])
def test_guests_that_help_stay_and_trials_cost_less_than_a_hundredth(here: bool) -> None:
    run = alone_then(Table(batch=BATCH), lambda _, helped: 1.0 if helped else 1.6, "a", "b", here=here)
    run.steps(1500)
    assert not run.out
    assert 0.6 * run.tried < 0.01 * 1500


def test_a_host_that_becomes_slower_itself_does_not_blame_its_guest() -> None:
    """The guest makes it 1.5 times as fast, before and after the host's own speed halves."""

    def times(step: int, helped: bool) -> float:
        return (2.0 if step >= 200 else 1.0) / (1.5 if helped else 1.0)

    run = alone_then(Table(batch=BATCH), times, "laptop", here=False)
    run.steps(2000)
    assert run.tried, "seen from the speed before, the run seems slower"
    assert not run.out
    assert run.share(1000) > 0.97


def test_a_host_that_becomes_faster_in_the_very_trial_does_not_blame_its_guest() -> None:
    run = alone_then(Table(batch=BATCH), lambda _, helped: 2.5 if helped else 2.0, "laptop", here=False)
    while not run.tried:
        run.steps(1)
    run.times = lambda _, helped: 1.0 if helped else 1.5
    run.steps(300)
    assert not run.out
    assert run.share(100) == 1.0


def test_moods_of_the_host_blame_nobody() -> None:
    """Its speed changes every ninety steps by up to four times, and steps scatter by a fifth."""
    dice = random.Random(5)
    moods = [dice.choice((1.0, 2.0, 4.0)) for _ in range(100)]

    def times(step: int, helped: bool) -> float:
        return moods[step // 90] * dice.uniform(0.8, 1.2) / (1.3 if helped else 1.0)

    run = alone_then(Table(batch=BATCH), times, "laptop", here=False)
    run.steps(1500)
    assert not run.out
    assert run.share(1500) > 0.97


def test_noise_is_no_slowdown() -> None:
    """A guest that neither helps nor harms: the steps scatter by a third."""
    dice = random.Random(7)
    run = alone_then(Table(batch=BATCH), lambda *_: dice.uniform(1.0, 2.0), "laptop")
    run.steps(1500)
    assert len(run.out) <= 1


def test_a_guest_on_this_machine_from_the_first_step_on_is_tried_without() -> None:
    run = Run(Table("laptop", batch=BATCH), lambda _, helped: 2.5 if helped else 2.0, here=("laptop",))
    run.steps(100)
    assert [event.machine for event in run.out] == ["laptop"]


def test_one_elsewhere_from_the_first_step_on_is_tried_without_where_little_is_at_stake() -> None:
    """Alone the host would take 20 × 0.1 s, by the speed of its samples."""
    for with_s, tried in ((2.1, True), (1.0, False)):
        run = Run(Table("laptop", batch=BATCH), lambda _, helped, s=with_s: s if helped else 2.0)  # type: ignore[misc]
        run.steps(200)
        assert bool(run.tried) is tried


def test_the_guest_on_this_machine_goes_first_then_who_joined_last() -> None:
    run = alone_then(Table(batch=BATCH), lambda _, helped: 2.5 if helped else 2.0, "a", "b", "c")
    run.here = ("a",)
    run.steps(250)
    assert [event.machine for event in run.out[:3]] == ["a", "c", "b"]


def test_the_protocol_passes_the_steps_times_on(monkeypatch: pytest.MonkeyPatch) -> None:
    protocol, told = new_protocol(4, 100), []
    monkeypatch.setattr(protocol.stepping.slowdown, "timed", lambda *step, **known: told.append((step, known)))
    protocol.handle(inputs.StepTimed(step=3, samples=4, seconds=0.5, here=("g",)), 1.0)
    assert told == [((3, 4, 0.5), {"host_sample_s": None, "here": ("g",)})]


@pytest.mark.parametrize(("gain", "most"), [(1.45, 5), (1.03, 12)])
def test_a_trial_ends_as_soon_as_it_is_clear_that_a_guest_on_this_machine_helps(gain: float, most: int) -> None:
    """With a guest from the first step on, nobody knows how fast the host would be alone."""
    table = Table(batch=BATCH)
    table.join("laptop")
    run = Run(table, lambda step, helped: (2.0 if helped else 2.0 * gain) * (1 + 0.004 * (step % 3)), ("laptop",))
    run.steps(40)
    assert 0 < run.tried <= most
    assert not run.out
    assert run.share(10) == 1.0


@pytest.mark.parametrize("into", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("guests", [("laptop",), ("laptop", "tower")], ids=len)
def test_a_guest_may_leave_during_a_trial(guests: tuple[str, ...], into: int) -> None:
    table = Table(batch=BATCH)
    for guest in guests:
        table.join(guest)
    run = Run(table, lambda step, helped: 2.0 if helped else 2.9, guests)
    while run.tried < into and table.ledger.step < 60:
        run.steps(1)
    assert run.tried
    del table.members["laptop"]
    run.steps(40)
    assert run.share(10) == (1.0 if len(guests) > 1 else 0.0)
