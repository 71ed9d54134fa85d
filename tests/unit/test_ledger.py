"""The ledger loses no sample and repeats none, under any order of opens, takes, leases, trims and deaths."""

from __future__ import annotations

import json
from collections import Counter

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from potluck.balance.ledger import EpochSteps, Ledger, LedgerError
from potluck.errors import ConfigError
from potluck.train.data import epoch_order


class LedgerMachine(RuleBasedStateMachine):
    """Plays host and guests in any order, and keeps books of its own to compare with."""

    @initialize(samples=st.integers(1, 11), batch=st.integers(1, 16), step=st.integers(0, 3))
    def start(self, samples: int, batch: int, step: int) -> None:
        self.samples, self.batch, self.first = samples, batch, step
        self.source = EpochSteps(samples=samples, global_batch=batch, order=epoch_order(samples, 5), step=step)
        self.ledger = Ledger(self.source, step=step)
        self.is_open = False
        self.with_host: list[int] = []
        self.leases: dict[int, tuple[str, list[int]]] = {}
        self.ended: list[int] = []
        self.by_machine: Counter[str] = Counter()
        self.counted_now: list[int] = []
        self.counted: list[int] = []

    # -- the step

    @precondition(lambda self: not self.is_open)
    @rule()
    def open(self) -> None:
        self.ledger.open_step()
        self.is_open = True

    @precondition(lambda self: self.is_open)
    @rule()
    def open_twice(self) -> None:
        with pytest.raises(LedgerError):
            self.ledger.open_step()

    @precondition(lambda self: self.is_open)
    @rule()
    def close(self) -> None:
        if len(self.counted_now) < self.batch:
            with pytest.raises(LedgerError):
                self.ledger.close_step()
            return
        assert self.ledger.full
        assert Counter(self.ledger.close_step()) == self.by_machine
        self.counted += self.counted_now
        self.counted_now, self.by_machine, self.is_open = [], Counter(), False

    # -- the host

    @precondition(lambda self: self.is_open)
    @rule(count=st.integers(0, 10))
    def take(self, count: int) -> None:
        taken = self.ledger.take(count)
        assert len(taken) <= count
        self.with_host += taken

    @precondition(lambda self: self.with_host)
    @rule(data=st.data())
    def host_computes(self, data: st.DataObject) -> None:
        done = data.draw(st.lists(st.sampled_from(self.with_host), unique=True, min_size=1))
        self.ledger.host_counts(done, "host")
        self.with_host = [p for p in self.with_host if p not in done]
        self.count("host", done)

    @precondition(lambda self: self.is_open)
    @rule(data=st.data())
    def host_claims_what_it_does_not_hold(self, data: st.DataObject) -> None:
        position = data.draw(st.integers(0, self.batch * 8).filter(lambda p: p not in self.with_host))
        with pytest.raises(LedgerError):
            self.ledger.host_counts([position], "host")

    # -- the guests

    @precondition(lambda self: self.is_open and self.ledger.in_pool)
    @rule(guest=st.sampled_from("abc"), count=st.integers(2, 10))
    def lease(self, guest: str, count: int) -> None:
        lease = self.ledger.lease(guest, min(count, self.ledger.in_pool))
        assert lease.id not in self.leases
        assert lease.id not in self.ended
        self.leases[lease.id] = (guest, list(lease.positions))

    @precondition(lambda self: self.is_open)
    @rule()
    def lease_more_than_there_is(self) -> None:
        with pytest.raises(LedgerError):
            self.ledger.lease("a", self.ledger.in_pool + 1)

    def any_lease(self, data: st.DataObject) -> int:
        """One that is open, or (seldom) one that has ended or never was."""
        others = [*self.ended[-1:], 10**6]
        return data.draw(st.sampled_from([*self.leases, *self.leases, *others]))

    @precondition(lambda self: self.is_open)
    @rule(data=st.data(), keep=st.integers(-1, 6))
    def trim(self, data: st.DataObject, keep: int) -> None:
        lease = self.any_lease(data)
        held = self.leases[lease][1] if lease in self.leases else []
        back = self.ledger.trim(lease, keep)
        assert back == (len(held) - keep if 0 < keep < len(held) else 0)
        del held[len(held) - back :]

    @rule(data=st.data())
    def dies(self, data: st.DataObject) -> None:
        lease = self.any_lease(data)
        held = self.leases.pop(lease, ("", []))[1]
        assert self.ledger.take_back(lease) == len(held)
        self.ended.append(lease)

    @rule(data=st.data(), wrong=st.sampled_from([0, 0, 0, 1, -1]))
    def delivers(self, data: st.DataObject, wrong: int) -> None:
        lease = self.any_lease(data)
        guest, held = self.leases.get(lease, ("", []))
        counted = self.ledger.deliver(lease, len(held) + wrong)
        assert counted == (lease in self.leases and not wrong)
        if counted:
            del self.leases[lease]
            self.ended.append(lease)
            self.count(guest, held)

    def count(self, machine: str, positions: list[int]) -> None:
        self.counted_now += positions
        self.by_machine[machine] += len(positions)

    # -- what must always hold

    @invariant()
    def every_position_is_in_one_place(self) -> None:
        if not getattr(self, "is_open", False):
            return
        leased = [p for _, held in self.leases.values() for p in held]
        known = [*self.with_host, *leased, *self.counted_now]
        first = self.ledger.step * self.batch
        assert len(set(known)) == len(known)
        assert set(known) <= set(range(first, first + self.batch))
        assert self.ledger.in_pool == self.batch - len(known)
        assert {n: list(lease.positions) for n, lease in self.ledger.leases.items()} == {
            n: held for n, (_, held) in self.leases.items()
        }
        assert self.ledger.full == (len(self.counted_now) == self.batch)

    def teardown(self) -> None:
        """Whatever happened, the host can finish the step, and every sample of an epoch was counted once."""
        if not hasattr(self, "ledger"):
            return
        if self.is_open:
            for lease in list(self.leases):
                self.ledger.take_back(lease)
            self.leases.clear()
            self.with_host += self.ledger.take(self.batch)
            self.ledger.host_counts(self.with_host, "host")
            self.count("host", self.with_host)
            self.with_host = []
            self.close()
        begin, end = self.first * self.batch, self.ledger.step * self.batch
        assert sorted(self.counted) == list(range(begin, end))
        for epoch in range(-(-begin // self.samples), end // self.samples):
            positions = range(epoch * self.samples, (epoch + 1) * self.samples)
            assert sorted(self.source.samples_of(positions)) == list(range(self.samples))


TestLedger = LedgerMachine.TestCase
TestLedger.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)


def make(samples: int = 10, batch: int = 4, step: int = 0) -> Ledger:
    return Ledger(
        EpochSteps(samples=samples, global_batch=batch, order=epoch_order(samples, 3), step=step), step=step
    )


def run_alone(ledger: Ledger, steps: int) -> list[int]:
    seen = []
    for _ in range(steps):
        ledger.open_step()
        positions = ledger.take(ledger.global_batch)
        seen += ledger.samples_of(positions)
        ledger.host_counts(positions, "host")
        ledger.close_step()
    return seen


def test_each_epoch_is_another_permutation() -> None:
    seen = run_alone(make(), 10)
    epochs = [seen[i : i + 10] for i in range(0, 40, 10)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4


def test_a_resumed_ledger_continues_at_the_very_sample() -> None:
    whole = run_alone(make(), 12)
    first = make()
    before = run_alone(first, 5)
    second = make(step=first.step)
    assert before + run_alone(second, 7) == whole


def test_samples_are_plain_numbers_that_fit_into_a_header() -> None:
    """Where the data set is local, they are sent."""
    ledger = make(batch=8)
    ledger.open_step()
    samples = ledger.samples_of(range(8))
    assert json.loads(json.dumps(samples)) == samples


def test_an_epoch_is_ordered_once_while_it_lasts() -> None:
    asked: list[int] = []

    def order(epoch: int) -> list[int]:
        asked.append(epoch)
        return list(np.random.default_rng(epoch).permutation(5))

    ledger = Ledger(EpochSteps(samples=5, global_batch=2, order=order))
    for step in range(10):
        ledger.open_step()
        host, lease = ledger.take(1), ledger.lease("g", 1)
        ledger.samples_of([*lease.positions, *host])
        ledger.host_counts(host, "host")
        assert ledger.deliver(lease.id, 1), step
        ledger.close_step()
    assert asked == [0, 1, 2, 3]


def test_the_host_takes_from_the_front_and_guests_from_the_end() -> None:
    ledger = make(batch=6)
    ledger.open_step()
    assert ledger.lease("g", 2).positions == (4, 5)
    assert ledger.take(2) == (0, 1)


def test_a_lease_that_is_cut_short_keeps_its_first_samples() -> None:
    ledger = make(batch=6)
    ledger.open_step()
    lease = ledger.lease("g", 4)
    assert ledger.trim(lease.id, 3) == 1
    assert lease.positions == (2, 3, 4)
    assert not ledger.deliver(lease.id, 4)
    assert ledger.deliver(lease.id, 3)
    assert ledger.take(9) == (0, 1, 5)


@pytest.mark.parametrize(("samples", "batch"), [(0, 4), (10, 0), (10, -1)])
def test_an_empty_data_set_and_an_empty_step_are_the_users_mistakes(samples: int, batch: int) -> None:
    with pytest.raises(ConfigError):
        Ledger(EpochSteps(samples=samples, global_batch=batch, order=lambda epoch: []))


def test_nothing_happens_outside_of_a_step() -> None:
    ledger = make()
    assert ledger.leases == {}
    assert ledger.take_back(1) == ledger.trim(1, 1) == 0
    assert not ledger.deliver(1, 1)
    for call in (ledger.close_step, lambda: ledger.take(1), lambda: ledger.lease("g", 1), lambda: ledger.full):
        with pytest.raises(LedgerError):
            call()
