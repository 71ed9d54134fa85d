"""One step at a time: no patience beyond what computing would take, no late gradient, no sample lost."""

from __future__ import annotations

import struct
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from potluck.balance.leases import Speed
from potluck.balance.ledger import EpochSteps, Ledger
from potluck.hub.actions import Action, SendSamples, Wake
from potluck.hub.ahead import SendingAhead
from potluck.hub.feeding import Feeding
from potluck.hub.members import COMPUTING, GAIN_WINDOW, LATE, QUOTA_RETRY_STEPS, SITTING_OUT, SYNCING
from potluck.hub.reasons import why_not
from potluck.hub.stepping import SILENT_S, Stepping
from potluck.train.data import epoch_order
from support.stepping_table import HOST_S, STATE, Table, events, freeze, sends

# -- leases


def test_nobody_gets_a_lease_before_the_host_knows_its_own_speed() -> None:
    ledger = Ledger(EpochSteps(samples=10, global_batch=4, order=epoch_order(10, 0)))
    ahead = SendingAhead(ledger=ledger, members={}, feeding=Feeding(pieces=1, members={}))
    stepping = Stepping(ledger=ledger, members={}, host_name="host", local_data=False, ahead=ahead)
    assert stepping.begin(0.0, STATE, 1) == []
    assert stepping.host_sample_s is None
    take, _ = stepping.take(2, 0.0)
    stepping.host_launched(take.positions)
    stepping.host_computed(len(take.positions), 1.0)
    assert stepping.host_sample_s == 0.5


def test_an_equal_guest_gets_half_and_the_samples_of_its_micro_batches() -> None:
    table = Table("g")
    table.members["g"].micro_batch = 4
    actions = table.begin()
    (lease,) = sends(actions, "lease")
    assert lease.message.sizes == (4, 3, 3, 1)  # the last one is beyond its quota
    assert lease.message.quota == 10
    assert lease.message.step == 1
    assert lease.message.host_sample_s == pytest.approx(HOST_S)
    assert lease.message.within_s == pytest.approx(1.0)
    batches = [a.positions for a in actions if isinstance(a, SendSamples)]
    assert [p for b in batches for p in b] == list(range(29, 40))
    assert [len(b) for b in batches] == [4, 3, 3, 1]


def test_local_samples_are_named_and_not_sent() -> None:
    table = Table("g", local_data=True)
    actions = table.begin()
    (lease,) = sends(actions, "lease")
    assert struct.unpack("<10q", *lease.frames) == tuple(table.ledger.samples_of(range(30, 40)))
    assert not any(isinstance(a, SendSamples) for a in actions)


@pytest.mark.parametrize("lacks", ["pieces", "credit", "answer", "parity"])
def test_a_lease_needs_the_weights_the_credit_the_last_answer_and_the_check(lacks: str) -> None:
    table = Table("g")
    member = table.members["g"]
    if lacks == "pieces":
        member.feed.have = [0]
    elif lacks == "credit":
        member.feed.extra(1)
    elif lacks == "answer":
        table.begin()
        table.compute_all()
        table.now += 5
        table.compute_all()
        table.stepping.end()
        assert member.lease is not None
        assert member.lease.revoked
    else:
        member.state = SYNCING
    assert sends(table.begin(), "lease") == []


# -- patience


def test_the_host_waits_for_a_lease_no_longer_than_computing_it_would_take() -> None:
    table = Table("g")
    table.begin()
    count = table.members["g"].lease.count  # type: ignore[union-attr]
    take = table.compute_all()
    out_since = table.now
    assert take.wait_until == pytest.approx(out_since + count * HOST_S)
    table.now = take.wait_until - 1e-6  # type: ignore[operator]
    assert table.compute_all().positions == ()
    table.now += 2e-6
    taken, actions = table.stepping.take(4, table.now)
    assert len(taken.positions) == 4
    assert sends(actions, "revoke")[0].message.lease == 1
    (event,) = events(actions, "lease_taken_back")
    assert (event.machine, event.samples) == ("g", count)
    table.compute(taken)
    assert table.compute_all().full
    assert table.stepping.end().taken_back_samples == count


def test_the_patience_ends_with_what_is_left_of_a_lease() -> None:
    table = Table("g")
    table.begin()
    table.compute_all()
    out_since = table.now
    member = table.members["g"]
    assert table.stepping.closing(member, lease=1, keep=8, eta_s=0.01, now=table.now) == [Wake()]
    take = table.compute_all()  # what the guest gave back is computed here
    assert table.now == pytest.approx(out_since + 2 * HOST_S)
    assert take.wait_until == pytest.approx(out_since + 8 * HOST_S)


def test_what_the_host_slept_through_is_not_a_guests_time() -> None:
    """Neither is its lease taken back, nor does it pass for slow when it delivers."""
    table = Table("g")
    table.begin()
    take, member = table.compute_all(), table.members["g"]
    assert take.wait_until is not None
    table.stepping.closing(member, lease=1, keep=10, eta_s=0.1, now=table.now)
    left_s = take.wait_until - table.now
    table.now += 300.0
    member.last_heard = table.now
    table.stepping.stood_still(300.0, table.now)
    take, actions = table.stepping.take(4, table.now)
    assert events(actions, "lease_taken_back") == []
    assert take.wait_until == pytest.approx(table.now + left_s, abs=0.2)
    table.deliver("g")
    assert member.misses == []
    assert max(member.overhead.value or 0.0, member.transfer.value or 0.0, member.tail.value or 0.0) < 5.0


def test_what_was_promised_since_the_host_woke_holds() -> None:
    """Its first message is heard before the host sees that it slept."""
    table = Table("g")
    table.begin()
    table.compute_all()
    member = table.members["g"]
    table.now += 300.0
    member.last_heard = table.now
    table.stepping.closing(member, lease=1, keep=10, eta_s=0.2, now=table.now)
    table.stepping.stood_still(300.0, table.now)
    assert member.lease is not None
    assert member.lease.closing_at == table.now + 0.2
    assert not events(table.stepping.take(4, table.now)[1], "lease_taken_back")


def test_a_silent_guest_gets_no_patience() -> None:
    table = Table("g")
    table.begin()
    table.compute_all()
    table.members["g"].last_heard = table.now - SILENT_S - 0.1
    take, actions = table.stepping.take(4, table.now)
    assert take.positions
    assert "sent nothing for 2.6 s" in events(actions, "lease_taken_back")[0].reason


def test_a_guest_that_says_it_will_be_late_is_believed() -> None:
    table = Table("g")
    table.begin()
    table.compute_all()
    member = table.members["g"]
    table.stepping.closing(member, lease=1, keep=10, eta_s=60.0, now=table.now)
    assert table.take().positions


def test_a_guest_that_is_about_to_deliver_is_waited_for() -> None:
    table = Table("g")
    table.begin()
    table.compute_all()
    table.stepping.closing(table.members["g"], lease=1, keep=10, eta_s=0.2, now=table.now)
    assert table.take().wait_until == pytest.approx(table.now + 10 * HOST_S)


def test_a_contribution_that_is_being_decoded_is_not_taken_back() -> None:
    table = Table("g")
    table.begin()
    table.compute_all()
    member = table.members["g"]
    assert member.lease is not None
    table.stepping.piece(member, lease=1, index=0, payload=b"")
    assert table.stepping.complete(member, lease=1, count=10, pieces=1) is None
    for _ in range(3):
        table.now += 30
        take = table.take()
        assert take.wait_until is not None
        assert take.wait_until > table.now
    assert Wake() in table.stepping.counted(member, now=table.now)
    assert table.take().full


def test_leases_are_taken_back_one_at_a_time() -> None:
    table = Table("a", "b", batch=30)
    table.begin()
    table.compute_all()
    table.now += 100
    for member in table.members.values():
        member.last_heard = table.now
    take, actions = table.stepping.take(1, table.now)
    assert len(sends(actions, "revoke")) == 1
    table.compute(take)
    other = next(name for name in "ab" if not table.members[name].lease.revoked)  # type: ignore[union-attr]
    table.deliver(other)
    assert table.compute_all().full
    assert table.stepping.end().samples[other] == 10


@settings(max_examples=60, deadline=None)
@given(
    guests=st.integers(1, 4),
    batch=st.integers(2, 40),
    arrivals=st.lists(st.floats(0, 10), min_size=4, max_size=4),
)
def test_waiting_costs_at_most_what_the_leases_would_have_cost(
    guests: int, batch: int, arrivals: list[float]
) -> None:
    """Whenever contributions come, or never: a step takes at most twice what the host alone would take."""
    table = Table(*"abcd"[:guests], batch=batch)
    started = table.now
    table.begin()
    due = {name: started + arrivals[i] for i, name in enumerate(table.members)}
    leased = sum(m.lease.count for m in table.members.values() if m.lease)
    waited = 0.0
    while True:
        for name, member in table.members.items():
            member.last_heard = table.now
            if member.lease is not None and due[name] <= table.now and not member.lease.revoked:
                table.deliver(name)
        take = table.take(3)
        if take.full:
            break
        if take.positions:
            table.compute(take)
            continue
        assert take.wait_until is not None
        pending = [due[n] for n, m in table.members.items() if m.lease and not m.lease.revoked]
        until = max(table.now, min([take.wait_until, *[d for d in pending if d > table.now]]))
        waited += until - table.now
        table.stepping.waited(until - table.now)
        table.now = until
    result = table.stepping.end()
    assert sum(result.samples.values()) == batch
    assert result.wait_s == pytest.approx(waited)
    assert waited <= leased * HOST_S + 1e-9
    assert table.now - started <= 2 * batch * HOST_S + 1e-9


# -- contributions


def test_trimming_returns_samples_to_the_host() -> None:
    table = Table("g")
    table.begin()
    member = table.members["g"]
    table.stepping.closing(member, lease=1, keep=4, eta_s=0.1, now=table.now)
    assert table.ledger.in_pool == 16
    table.deliver("g", 4)
    assert table.compute_all().full
    assert table.stepping.end().samples == {"host": 16, "g": 4}


def test_nothing_can_be_trimmed_once_the_contribution_has_arrived() -> None:
    """Its gradient holds all the samples: given back, some would be counted twice."""
    table = Table("g")
    table.begin()
    member = table.members["g"]
    table.stepping.piece(member, lease=1, index=0, payload=b"first")
    assert table.stepping.complete(member, lease=1, count=10, pieces=1) is None
    assert table.stepping.closing(member, lease=1, keep=4, eta_s=0.1, now=table.now) == []
    table.stepping.piece(member, lease=1, index=0, payload=b"second")
    table.stepping.stopped(member, lease=1, computed=10, compute_s=1.0, now=table.now)
    assert member.lease is not None
    assert member.lease.pieces == {0: b"first"}
    table.stepping.counted(member, now=table.now)
    assert table.compute_all().full
    assert table.stepping.end().samples == {"host": 10, "g": 10}


@pytest.mark.parametrize(
    ("count", "pieces", "reason"),
    [(9, 1, "9 samples where 10 were leased"), (10, 2, "only 1 of 2 pieces arrived")],
)
def test_a_contribution_must_be_whole(count: int, pieces: int, reason: str) -> None:
    table = Table("g")
    table.begin()
    member = table.members["g"]
    table.stepping.piece(member, lease=1, index=0, payload=b"")
    why_not = table.stepping.complete(member, lease=1, count=count, pieces=pieces)
    assert why_not is not None
    assert reason in why_not
    actions = table.stepping.drop(member, reason=why_not, now=table.now)
    assert events(actions, "contribution_dropped")[0].reason == why_not
    assert table.compute_all().full
    result = table.stepping.end()
    assert result.samples == {"host": 20}
    assert result.dropped_samples == 10


def test_a_late_contribution_is_dropped_reported_and_never_counted() -> None:
    table = Table("g")
    freeze(table.members["g"].overhead)
    assert table.step("g") == {"host": 20}
    (event,) = events(table.actions, "contribution_dropped")
    assert (event.machine, event.step, event.samples) == ("g", 2, 10)
    assert "taken back" in event.reason
    assert sends(table.actions, "dropped")[0].message.lease == 1
    assert table.members["g"].samples == 0
    assert table.members["g"].lease is None
    assert table.step() == {"host": 10, "g": 10}


def test_a_guest_that_lets_go_of_a_revoked_lease_gets_another() -> None:
    table = Table("g")
    table.begin()
    table.compute_all()
    table.now += 2
    table.compute_all()
    table.stepping.end()
    member = table.members["g"]
    table.stepping.stopped(member, lease=1, computed=3, compute_s=0.3, now=table.now)
    assert member.lease is None
    assert member.rate.value == pytest.approx(10.0)
    member.overhead.value = member.overhead.spread = 0.0
    assert sends(table.begin(), "lease")


def test_a_guest_that_goes_gives_its_samples_back() -> None:
    table = Table("g")
    table.begin()
    assert table.stepping.gone(table.members["g"]) == 10
    assert table.stepping.gone(table.members.pop("g")) == 0
    assert table.compute_all().full
    assert table.stepping.end().samples == {"host": 20}


# -- sitting out


def test_two_late_in_a_row_sit_out_with_a_reason_and_try_again() -> None:
    table = Table("g")
    member = table.members["g"]
    freeze(member.overhead)  # this test is about lateness, not about what is learned of it
    table.step("g")
    assert member.state == LATE
    table.step("g")
    assert member.state == SITTING_OUT
    assert member.reason == "was too late 2 times in a row"
    assert events(table.actions, "guest_sits_out") == []  # said when the lease was taken back, not again now
    assert member.rests == 1
    assert not member.feed.open
    assert member.rests_until_step == 2 + 2
    assert table.step() == {"host": 20}
    assert table.step().keys() == {"host", "g"}
    assert member.state == COMPUTING
    assert (member.misses, member.rests) == ([], 0)


def not_finite(table: Table) -> list[Action]:
    """A step in which the guest's contribution comes in time and must not count."""
    table.begin()
    table.compute_all()
    member = table.members["g"]
    assert member.lease is not None
    actions = table.stepping.drop(member, reason="its gradient is not finite", now=table.now)
    table.compute_all()
    table.stepping.end()
    return actions


def test_a_guest_whose_gradients_are_not_finite_was_not_too_late() -> None:
    table = Table("g")
    member = table.members["g"]
    not_finite(table)
    (event,) = events(not_finite(table), "guest_sits_out")
    assert member.reason == "delivered nothing that counts 2 times in a row: its gradient is not finite"
    assert event.reason.startswith(member.reason)


def test_different_reasons_are_all_named() -> None:
    table = Table("g")
    member = table.members["g"]
    freeze(member.overhead)
    table.step("g")
    not_finite(table)
    assert member.reason.endswith("2 times in a row: it was too late; its gradient is not finite")


@pytest.mark.parametrize(
    ("known", "reason", "judged"),
    [
        ("nothing", "did not deliver within", "was too late 2 times in a row"),
        ("a later end", "would have delivered only after", "was too late 2 times in a row"),
        ("weights under way", "was still receiving weights or samples after", "it was still receiving"),
        ("samples unread", "had not been sent its samples after", "its samples came late"),
        ("silence", "sent nothing for", "it sent nothing"),
    ],
)
def test_the_reason_of_a_lease_that_was_taken_back_is_what_is_known(known: str, reason: str, judged: str) -> None:
    table = Table("g")
    member = table.members["g"]
    freeze(member.overhead)
    for _ in range(2):
        member.feed.in_flight_bytes = 0
        table.begin()
        lease = member.lease
        assert lease is not None
        if known == "weights under way":
            member.feed.in_flight_bytes = 7
        if known == "samples unread":
            lease.unread = 1
        while (take := table.take()).positions:
            table.compute(take)
        if known == "a later end":
            table.stepping.closing(member, lease=lease.id, keep=lease.count, eta_s=9.0, now=table.now)
        else:
            table.now += 60.0
        if known != "silence":
            member.last_heard = table.now
        take, actions = table.stepping.take(4, table.now)
        (event,) = events(actions, "lease_taken_back")
        assert event.reason.startswith(reason)
        table.compute(take)
        assert table.compute_all().full
        table.stepping.end()
        table.stepping.stopped(member, lease=lease.id, computed=0, compute_s=0.0, now=table.now)
    assert member.state == SITTING_OUT
    assert member.reason.endswith(judged)


def test_the_figures_of_a_reason_can_be_told_apart_where_a_step_is_short() -> None:
    speed = Speed(rate_samples_per_s=250.0, overhead_s=0.021)
    told = why_not(speed, 0.023, guessed=False)
    assert "4.0 ms to compute it and 21 ms to get its" in told
    assert told.endswith("where the step takes 23 ms")


def test_a_guest_for_whom_a_step_has_no_sample_is_not_said_to_be_slow() -> None:
    table = Table("a", "b", "c", "d", batch=4, rate=20.0)
    actions = table.begin()
    (event,) = events(actions, "guest_sits_out")
    assert event.reason.startswith("would not make the step shorter: one sample takes it 50 ms, the step ")


def test_a_guest_that_was_held_up_when_it_joined_shows_with_one_small_lease_how_fast_its_link_is() -> None:
    """What its first weights took is a guess, and the only thing that speaks against it."""
    table = Table()
    member = table.join("g")
    member.micro_batch = member.largest_micro_batch = 4
    member.transfer.add(9.0)
    (lease,) = sends(table.begin(), "lease")
    assert lease.message.sizes == (2,)
    assert member.state == COMPUTING
    table.compute_all()
    member.transfer.value = 0.01  # as the protocol does with the first contribution's own measurement
    table.deliver("g")
    assert table.compute_all().full
    table.stepping.end()
    (lease,) = sends(table.begin(), "lease")
    assert sum(lease.message.sizes) > 5


def test_one_whose_trial_shows_nothing_sits_out_by_its_first_weights_and_says_so() -> None:
    table = Table()
    member = table.join("g")
    member.transfer.add(9.0)
    table.step("g")
    assert member.misses == ["it was too late"]
    member.lease = None
    (event,) = events(table.begin(), "guest_sits_out")
    assert "and deliver the gradient (by what its first weights took)" in event.reason


def test_one_on_time_clears_the_record() -> None:
    table = Table("g")
    member = table.members["g"]
    freeze(member.overhead)
    for late in (("g",), (), ("g",), (), ("g",)):
        table.step(*late)
        assert member.state != SITTING_OUT


def test_rests_double_up_to_a_limit() -> None:
    member = Table("g").members["g"]
    lengths = []
    for _ in range(9):
        member.rest(100, "late")
        lengths.append(member.rests_until_step - 100)
    assert lengths == [2, 4, 8, 16, 32, 64, 64, 64, 64]


def test_a_guest_that_cannot_help_sits_out_and_tries_again_later() -> None:
    table = Table()
    member = table.join("slow", rate=0.4)  # 2.5 s a sample, where the host's step takes 2.0 s
    actions = table.begin()
    assert sends(actions, "lease") == []
    assert member.state == SITTING_OUT
    (event,) = events(actions, "guest_sits_out")
    assert "cannot deliver one sample within a step: 2.50 s to compute it" in event.reason
    assert member.rests_until_step == 1 + QUOTA_RETRY_STEPS
    table.compute_all()
    table.stepping.end()
    for _ in range(QUOTA_RETRY_STEPS - 1):
        table.step()
        assert member.lease is None
    assert events(table.begin(), "guest_sits_out") == []  # it is known already
    assert member.rests_until_step > 1 + QUOTA_RETRY_STEPS


def test_after_its_rest_a_guest_that_gets_no_lease_is_told_why() -> None:
    """It was late, and is tried again. By then it is known to be too slow: that is another reason."""
    table = Table("g")
    member = table.members["g"]
    freeze(member.overhead)
    table.step("g")
    table.step("g")
    assert member.reason == "was too late 2 times in a row"
    member.rate.value, member.rate.spread = 0.4, 0.0  # a sample takes it longer than the step
    told: list[Any] = []
    for _ in range(4):
        actions = table.begin()
        told += [action.message.text for action in sends(actions, "note")]
        told += [event.reason for event in events(actions, "guest_sits_out")]
        table.compute_all()
        table.stepping.end()
    event, note = sorted(told, key=len)
    assert event.startswith("cannot deliver one sample within a step: 2.")
    assert note == f"this machine sits out for a while: {event}"


def test_a_guest_is_told_once_for_each_reason() -> None:
    table = Table()
    member = table.join("slow", rate=0.4)
    (note,) = sends(table.begin(), "note")
    assert note.guest == "slow"
    table.compute_all()
    table.stepping.end()
    for _ in range(40):
        assert sends(table.begin(), "note") == []
        table.compute_all()
        table.stepping.end()
    assert member.state == SITTING_OUT


@pytest.mark.parametrize("of", ["overhead", "rate"])
def test_one_bad_measurement_does_not_shut_a_guest_out_for_good(of: str) -> None:
    """A link that stalled or a device that was busy once: the spread that is left of it must be forgotten, too."""
    table = Table()
    member = table.join("g", rate=10.0 if of == "overhead" else 0.8)
    measured = member.overhead if of == "overhead" else member.rate
    measured.spread = 5.0  # as overhead more than a step; off the rate so much that no sample would be done
    for _ in range(1200):
        table.begin()
        if member.lease is not None:
            return
        assert member.state == SITTING_OUT
        table.compute_all()
        table.stepping.end()
    raise AssertionError("it never got another lease")


def test_a_guest_that_costs_more_waiting_than_it_brings_sits_out() -> None:
    table = Table("g")
    member = table.members["g"]
    freeze(member.overhead, member.rate)
    for _ in range(GAIN_WINDOW):
        assert member.state == COMPUTING
        table.begin()
        table.compute_all()
        table.stepping.waited(1.5)  # its ten samples are worth 1.0 s
        actions = table.deliver("g")
        assert table.compute_all().full
        table.stepping.end()
    assert member.state == SITTING_OUT
    assert member.reason == "waiting for it took more time than it saved"
    assert events(actions, "guest_sits_out")


def test_a_resting_guest_is_brought_up_to_date_before_its_next_lease() -> None:
    table = Table("g")
    member = table.members["g"]
    member.rest(1, "late")
    member.feed.have = [0]
    for _ in range(2):
        table.step()
        assert not member.feed.open
    table.begin()
    assert (member.state, member.reason, member.feed.open) == (LATE, "catching up", True)
    assert member.lease is None
    table.compute_all()
    table.stepping.end()
    member.feed.have = [1]
    assert sends(table.begin(), "lease")
    assert member.state == COMPUTING


# -- the tail


def test_a_guest_is_told_how_long_the_end_of_its_gradient_takes() -> None:
    table = Table("ann")
    for _ in range(12):
        (lease,) = sends(table.begin(), "lease")
        member = table.members["ann"]
        # It says when it will have delivered, by what it was told; in truth it takes 0.3 s longer than computing.
        eta_s = 0.2 + lease.message.tail_s
        table.stepping.closing(member, lease=lease.message.lease, keep=99, eta_s=eta_s, now=table.now)
        table.now += 0.2 + 0.3
        table.deliver("ann")
        table.compute_all()
        table.stepping.end()
    assert lease.message.tail_s == pytest.approx(0.3, rel=0.05)


def test_what_decoding_takes_on_the_host_belongs_to_the_tail_and_the_overhead() -> None:
    """Or the host waits for it in every step: 124 million parameters in thin take it 0.1 s for each guest."""
    found = {}
    for decode_s in (0.0, 0.25):
        table = Table("ann", batch=100)
        for _ in range(12):
            (lease,) = sends(table.begin(), "lease")
            member = table.members["ann"]
            table.stepping.closing(
                member, lease=lease.message.lease, keep=99, eta_s=0.2 + lease.message.tail_s, now=table.now
            )
            table.now += 0.2 + 0.3
            table.deliver("ann", sample_s=0.0001, decode_s=decode_s)
            table.compute_all()
            table.stepping.end()
        found[decode_s] = lease.message.tail_s, member.overhead.value or 0.0
    assert found[0.25][0] - found[0.0][0] == pytest.approx(0.25, rel=0.1)
    assert found[0.25][1] - found[0.0][1] == pytest.approx(0.25, rel=0.1)


def test_a_lease_says_the_epoch_of_its_step() -> None:
    table = Table("g", batch=400)  # of 1000 samples
    epochs = []
    for _ in range(5):
        epochs += [lease.message.epoch for lease in sends(table.begin(), "lease")]
        table.compute_all()
        table.deliver("g")
        table.compute_all()
        table.stepping.end()
    assert epochs == [0, 0, 1, 1, 2]
