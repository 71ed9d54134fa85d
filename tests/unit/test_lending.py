"""Samples lent beyond the quota: a guest faster than thought computes them, others hand them back in time."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from potluck.balance.quota import EXTRA_PART
from potluck.hub.guest import Work
from potluck.hub.members import Member
from potluck.hub.stepping import MOST_MICRO_BATCHES
from potluck.spec.messages import LeaseMessage
from potluck.train import guest_loop
from support.stepping_table import HOST_S, Table, freeze, sends


@dataclass
class Guest:
    """A guest that computes at its own speed and cuts its leases as the real one does."""

    sample_s: float
    tail_s: float = 0.0
    events: list[tuple[float, str, int]] = field(default_factory=list)

    def takes(self, lease: LeaseMessage, now: float, patch: pytest.MonkeyPatch) -> None:
        """What it will say about this lease, and when."""
        names = ("step", "quota", "within_s", "host_sample_s", "transfer_s", "tail_s")
        told = {name: getattr(lease, name) for name in names}
        sizes = lease.sizes
        work = Work(id=lease.lease, check=False, sizes=sizes, received=now, **told)
        known: Any = SimpleNamespace(_sample_s=self.sample_s)
        done, self.events = 0, []
        for number, size in enumerate(sizes):
            following = sizes[number + 1] if number + 1 < len(sizes) else 0
            patch.setattr(guest_loop.time, "monotonic", lambda now=now: now)
            last = not following or guest_loop.GuestTrainer._too_late_for(known, work, done, size, following)
            done += size
            if last:
                self.events.append((now, "closing", done))
            now += size * self.sample_s
            if last:
                self.events.append((now + self.tail_s, "done", done))
                return


class Fleet:
    """A table whose guests answer at their times."""

    def __init__(self, batch: int, **guests: Guest) -> None:
        self.table, self.guests = Table(batch=batch), guests

    def thinks(self, name: str, sample_s: float, micro_batch: int = 5) -> Member:
        member = self.table.join(name, rate=1 / sample_s)
        member.micro_batch = member.largest_micro_batch = micro_batch
        member.tail.add(0.0)
        freeze(member.rate, member.overhead, member.tail)
        return member

    def step(self, patch: pytest.MonkeyPatch) -> tuple[float, float, dict[str, int]]:
        """One step: how long it took, how long the host stood idle, and who computed how many samples."""
        table = self.table
        started, idle_s = table.now, 0.0
        self.leases = {send.guest: send.message for send in sends(table.begin(), "lease")}
        with patch.context() as context:
            for name, lease in self.leases.items():
                self.guests[name].takes(lease, started, context)
        while True:
            for member in table.members.values():
                member.last_heard = table.now
            self.say()
            take = table.take()
            if take.full:
                return table.now - started, idle_s, table.stepping.end().samples
            if take.positions:
                table.compute(take)
                continue
            assert take.wait_until is not None
            due = [event[0] for name in self.leases for event in self.guests[name].events]
            until = min([take.wait_until, *due])
            assert until > table.now
            idle_s += until - table.now
            table.now = until

    def say(self) -> None:
        for name, leased in self.leases.items():
            guest, member = self.guests[name], self.table.members[name]
            while guest.events and guest.events[0][0] <= self.table.now + 1e-9:
                _, kind, count = guest.events.pop(0)
                lease = leased.lease
                if member.lease is None or member.lease.revoked:
                    continue
                if kind == "closing":
                    self.table.stepping.closing(member, lease=lease, keep=count, eta_s=0.0, now=self.table.now)
                else:
                    self.table.deliver(name, count, guest.sample_s)


def test_a_lease_is_cut_where_the_quota_ends() -> None:
    fleet = Fleet(30)
    fleet.thinks("g", 0.2)
    (lease,) = sends(fleet.table.begin(), "lease")
    assert (lease.message.sizes, lease.message.quota) == ((5, 5, 5), 10)
    assert lease.message.within_s == pytest.approx(2.0), "the time with the quota, not with more"
    assert fleet.table.ledger.in_pool == 15


def test_a_guest_twice_as_fast_as_thought_computes_the_extra_in_the_same_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fleet = Fleet(30, g=Guest(sample_s=0.1))
    fleet.thinks("g", 0.2)
    seconds, idle_s, samples = fleet.step(monkeypatch)
    assert samples == {"host": 15, "g": 15}
    assert seconds == pytest.approx(1.5)  # where 2.0 s were predicted
    assert idle_s == pytest.approx(0.0)


def test_a_guest_as_fast_as_thought_hands_the_extra_back_before_the_host_needs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fleet = Fleet(30, g=Guest(sample_s=0.2))
    fleet.thinks("g", 0.2)
    seconds, idle_s, samples = fleet.step(monkeypatch)
    assert samples == {"host": 20, "g": 10}
    assert seconds == pytest.approx(2.0)
    assert idle_s == pytest.approx(0.0)


def test_a_guest_half_as_fast_as_thought_costs_no_more_than_it_would_without_the_extra(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fleet = Fleet(30, g=Guest(sample_s=0.4))
    fleet.thinks("g", 0.2)
    seconds, idle_s, samples = fleet.step(monkeypatch)
    assert samples == {"host": 25, "g": 5}
    assert seconds == pytest.approx(2.5)
    assert idle_s == pytest.approx(0.0)


@settings(max_examples=80, deadline=None)
@given(
    batch=st.integers(10, 80),
    thought=st.lists(st.floats(0.05, 0.6), min_size=1, max_size=4),
    micro_batch=st.integers(1, 8),
)
def test_guests_as_fast_as_thought_never_let_the_host_stand_idle_for_the_extra(
    batch: int, thought: list[float], micro_batch: int
) -> None:
    """All extras together: each alone may be small, and yet the host would have nothing left to do."""
    guests = {name: Guest(sample_s=s) for name, s in zip("abcd", thought)}
    fleet = Fleet(batch, **guests)
    for name, guest in guests.items():
        fleet.thinks(name, guest.sample_s, micro_batch)
    with pytest.MonkeyPatch.context() as patch:
        seconds, _, samples = fleet.step(patch)
    predicted = max((lease.within_s for lease in fleet.leases.values()), default=batch * HOST_S)
    assert seconds <= predicted + HOST_S + 1e-6  # the host looks up once a sample
    assert sum(samples.values()) == batch
    lent = {n: sum(lease.sizes) - lease.quota for n, lease in fleet.leases.items()}
    longest_s = max(guest.sample_s for guest in guests.values()) * micro_batch
    assert sum(lent.values()) * HOST_S <= EXTRA_PART * longest_s + 1e-9


def test_the_extras_of_several_guests_count_together() -> None:
    fleet = Fleet(104)
    for name in "abc":
        fleet.thinks(name, 0.2)
    fleet.table.members["b"].rate.spread = 0.3
    leases = sends(fleet.table.begin(), "lease")
    extras = {lease.guest: sum(lease.message.sizes) - lease.message.quota for lease in leases}
    # Half of a micro-batch of 1.0 s, all for the one whose speed changes; each by itself might have had that.
    assert extras == {"a": 0, "b": 5, "c": 0}


def test_the_host_keeps_what_it_must_of_what_it_could_lend() -> None:
    fleet = Fleet(20)
    fleet.thinks("g", 0.01, micro_batch=200)
    fleet.table.stepping._host_sample_s.value = HOST_S
    (lease,) = sends(fleet.table.begin(), "lease")
    assert fleet.table.ledger.in_pool >= 1
    assert sum(lease.message.sizes) <= 19


def test_the_extra_adds_no_more_micro_batches_than_a_lease_may_have() -> None:
    table = Table(batch=6000)
    table.join("g", rate=1.0)  # by its time for a sample it might have five more
    (lease,) = sends(table.begin(), "lease")
    assert lease.message.quota == MOST_MICRO_BATCHES
    assert sum(lease.message.sizes) == MOST_MICRO_BATCHES


def test_a_thin_link_has_large_ends_and_no_extra() -> None:
    table = Table(batch=100)
    member = table.join("g", rate=10.0)
    member.micro_batch, member.largest_micro_batch = 4, 64
    member.transfer.add(0.79)  # the forward of 24 samples, the backward of 12
    (lease,) = sends(table.begin(), "lease")
    assert lease.message.sizes == (24, 4, 4, 3, 3, 12)
    assert lease.message.quota == 50


def test_a_link_that_takes_longer_than_the_step_lets_the_guest_sit_out_and_hope() -> None:
    table = Table(batch=20)
    member = table.join("g", rate=10.0)
    member.leased = True  # it has had its trial
    member.transfer.add(1.5)
    assert sends(table.begin(), "lease") == []
    assert "100 ms to compute it and 2.90 s to get its samples and the weights" in member.reason
    assert member.reason.endswith("where the step takes 2.00 s")
    assert member.transfer.value == pytest.approx(1.05)


def test_what_the_transfers_do_not_hide_is_no_overhead() -> None:
    """It depends on how large a lease is; what is left does not."""
    member = Table("g").members["g"]
    member.largest_micro_batch = 64
    member.transfer.add(3.0)
    member.overhead.value = None
    # One micro-batch of 30 samples hides 1 s of the way in and 2 s of the way out: 3 + 2 + 1 s, and 0.4 s more.
    member.delivered(count=30, compute_s=3.0, since_start_s=6.4)
    assert member.overhead.value == pytest.approx(0.4)
    assert member.speed is not None
    assert member.speed.lease_s(30) == pytest.approx(6.4)


def test_what_the_link_does_not_hide_is_in_the_guests_word() -> None:
    thin = Work(id=1, check=False, step=0, sizes=(6,), received=0.0, transfer_s=4.0, tail_s=0.5)
    assert guest_loop.last_takes_s(thin, 3.0) == 1 + 4 + 0.5
    assert guest_loop.last_takes_s(thin, 3.0, gated=True) == 4 + 4 + 0.5
    assert guest_loop.last_takes_s(thin, 30.0, gated=True) == 30.5
