"""Samples that travel ahead of their lease: what is sent when, what a lease makes of it, and what is dropped."""

from __future__ import annotations

from typing import Any

import pytest

from potluck.balance.leases import Least, Speed
from potluck.balance.ledger import EpochSteps, Ledger, LedgerError
from potluck.errors import WireError
from potluck.hub import inputs
from potluck.hub.ahead import LARGEST_PART_BYTES, PARTS_UNDER_WAY, AheadBatch, _composed
from potluck.hub.guest_work import Kept
from potluck.spec.messages import AheadMessage, LeaseMessage
from support.protocol_world import World, joined, of_kind

HEAVY = 200_000
"""Bytes of a sample, so that two are worth sending ahead."""


def ahead_of(world: World, guest: str) -> list[AheadMessage]:
    return [s.message for s in world.sent[guest] if isinstance(s.message, AheadMessage)]


def last_lease(world: World, guest: str) -> LeaseMessage:
    return [s.message for s in world.sent[guest] if isinstance(s.message, LeaseMessage)][-1]


def in_step(*guests: str, **settings: Any) -> World:
    """Everybody has a lease and its weights; nothing has been read for the next step."""
    world = joined(*guests, **{"batch": 24, "samples": 1000, "sample_bytes": HEAVY, **settings})
    world.begin()
    for guest in guests:
        world.take_all(guest)
    return world


def end_step(world: World, *guests: str) -> Any:
    for guest in guests:
        world.deliver(guest)
    while world.decoding:
        world.decode()
    return world.finish()


# -- sending


def test_the_next_lease_names_what_was_sent_ahead_and_carries_only_the_rest() -> None:
    world = in_step("a")
    world.take_ahead("a")
    sent = {message.batch for message in ahead_of(world, "a")}
    assert len(sent) > 1
    assert all(message.step == world.ledger.step + 1 for message in ahead_of(world, "a"))
    assert end_step(world, "a").ahead_samples == 0
    world.begin()
    lease = last_lease(world, "a")
    assert set(lease.ahead) - {0} == sent
    fresh = sum(size for size, number in zip(lease.sizes, lease.ahead) if not number)
    assert fresh <= 1 + world.members["a"].micro_batch  # no more than what the quota has changed, and an extra
    result = end_step(world, "a")
    assert result.ahead_samples == sum(lease.sizes) - fresh
    assert result.unneeded_samples == 0
    assert sorted(world.counted) == list(range(world.ledger.step * 24))


def test_weights_and_the_samples_of_leases_go_first() -> None:
    world = joined("a", batch=24, samples=1000, sample_bytes=HEAVY)
    world.is_open, world.by_host, world.summed = True, [], []
    world.handle(inputs.StepBegun())  # the change is not coded yet
    world.take_ahead("a")
    assert not world.reading
    assert not ahead_of(world, "a")
    world.code()
    world.take_all("a")
    assert world.reading, "all has been sent: now is the time"


def test_of_a_lease_that_was_not_sent_ahead_only_the_first_micro_batch_goes_before_the_weights() -> None:
    world = joined("a", batch=24, samples=1000, sample_bytes=HEAVY)
    world.whole_step()  # now the host knows how large samples are
    for batch in list(world.members["a"].ahead.batches):
        world.members["a"].ahead.batches.remove(batch)
    world.is_open, world.by_host, world.summed = True, [], []
    world.handle(inputs.StepBegun())
    lease = last_lease(world, "a")
    assert len(lease.sizes) > 2
    assert [batch for of, batch in world.read if of == lease.lease] == [0]
    world.code()
    world.take_all("a")
    assert [batch for of, batch in world.read if of == lease.lease] == list(range(len(lease.sizes)))
    end_step(world, "a")
    assert sorted(world.counted) == list(range(world.ledger.step * 24))


def test_only_a_few_parts_are_under_way() -> None:
    world = in_step("a")
    world.read_ahead()
    assert len(ahead_of(world, "a")) == PARTS_UNDER_WAY
    flying = world.members["a"].ahead.in_flight_bytes
    assert flying <= PARTS_UNDER_WAY * LARGEST_PART_BYTES
    world.say("a", "taken", bytes=flying // 2, ahead=True)
    assert len(ahead_of(world, "a")) == PARTS_UNDER_WAY + 1
    assert not world.members["a"].feed.in_flight_bytes, "they do not count as weights that are under way"


def test_what_is_left_of_a_batch_follows_its_lease_at_once() -> None:
    world = in_step("a")
    world.read_ahead()
    begun = ahead_of(world, "a")[0]
    assert sum(len(s.frames[0]) for s in world.sent["a"] if s.message == begun) < begun.bytes
    end_step(world, "a")
    world.begin()  # it looks whether the guest has all that the lease names
    assert begun.batch in last_lease(world, "a").ahead


@pytest.mark.parametrize(
    "settings",
    [
        {"sample_bytes": 100},  # they take no time
        {"local_data": True},  # guests read them themselves
        {"steps": 2},  # there is no next step
    ],
)
def test_nothing_is_sent_ahead_where_it_is_of_no_use(settings: dict[str, Any]) -> None:
    world = in_step("a", **settings)
    assert world.members["a"].lease is not None
    assert not world.reading
    assert not ahead_of(world, "a")


def test_a_guest_that_keeps_nothing_is_sent_nothing_ahead() -> None:
    world = joined("a", batch=24, samples=1000, sample_bytes=HEAVY)
    world.members["a"].ahead.most_bytes = 0  # as one of an earlier version, which does not say
    world.begin()
    world.take_all("a")
    assert world.members["a"].lease is not None
    assert not world.reading


def test_a_step_gets_half_of_what_the_guest_keeps() -> None:
    world = in_step("a", batch=200)
    world.take_ahead("a")
    kept = world.kept["a"].most_bytes
    assert kept / 2 - 4 * HEAVY < sum({m.batch: m.bytes for m in ahead_of(world, "a")}.values()) <= kept / 2


def test_samples_that_turn_out_larger_are_not_sent() -> None:
    world = in_step("a", batch=200)
    world.sample_bytes *= 20
    world.take_ahead("a")
    assert sum({m.batch: m.bytes for m in ahead_of(world, "a")}.values()) <= world.kept["a"].most_bytes / 2


def test_samples_that_cannot_be_read_ahead_come_with_their_lease() -> None:
    world = in_step("a")
    world.read_ahead(fails=True)
    assert not world.reading
    end_step(world, "a")
    world.begin()
    assert last_lease(world, "a").ahead == ()
    end_step(world, "a")
    assert sorted(world.counted) == list(range(world.ledger.step * 24))


# -- what becomes of it


def test_what_a_guest_that_left_was_sent_is_counted_and_dealt_to_others() -> None:
    world = in_step("a", "b")
    world.take_ahead("a")
    samples = {m.batch: m.bytes for m in ahead_of(world, "a")}
    world.say("a", "leave", reason="tired")
    result = end_step(world, "b")
    assert result.unneeded_bytes == sum(samples.values()) > 0
    assert result.unneeded_samples == sum(samples.values()) // HEAVY
    world.begin()
    end_step(world, "b")
    assert of_kind(world, "guest_left")
    assert sorted(world.counted) == list(range(world.ledger.step * 24))


def test_a_guest_without_a_lease_in_the_next_step_was_sent_them_for_nothing() -> None:
    world = in_step("a")
    world.take_ahead("a")
    sent_bytes = sum({m.batch: m.bytes for m in ahead_of(world, "a")}.values())
    end_step(world, "a")
    world.members["a"].rest(world.ledger.step, "it is slow", steps=4)
    world.begin()
    result = end_step(world)
    assert (result.ahead_samples, result.unneeded_bytes) == (0, sent_bytes)
    assert not world.members["a"].ahead.batches


def test_a_smaller_quota_leaves_some_of_it() -> None:
    world = in_step("a")
    world.take_ahead("a")
    sent = len({m.batch for m in ahead_of(world, "a")})
    end_step(world, "a")
    world.members["a"].rate.value = 3.0
    world.begin()
    used = [number for number in last_lease(world, "a").ahead if number]
    assert len(used) < sent
    result = end_step(world, "a")
    assert result.unneeded_samples > 0
    assert result.unneeded_bytes == result.unneeded_samples * HEAVY


def test_guests_are_sent_different_samples() -> None:
    world = in_step("a", "b")
    for guest in "ab":
        world.take_ahead(guest)
    positions = [p for batch in world.of_ahead.values() for p in batch]
    assert len(positions) == len(set(positions)) > 4
    end_step(world, "a", "b")
    world.begin()
    assert all(any(last_lease(world, guest).ahead) for guest in "ab")
    assert end_step(world, "a", "b").unneeded_samples == 0


# -- how a lease is cut

SPEED = Speed(rate_samples_per_s=10, overhead_s=0.0, usual=8, most=8)


def batches(*sizes: int) -> list[AheadBatch]:
    return [
        AheadBatch(number=n, step=1, positions=tuple(range(size)), sent_bytes=1) for n, size in enumerate(sizes, 1)
    ]


def cut(sizes: tuple[int, ...], quota: int, speed: Speed = SPEED, spare: int = 100) -> list[tuple[int, int]]:
    return [(size, b.number if b else 0) for size, b in _composed(batches(*sizes), quota, spare, speed)]


@pytest.mark.parametrize(
    ("sent", "quota", "expected"),
    [
        ((8, 8, 8), 24, [(8, 1), (8, 2), (8, 3)]),
        ((8, 8, 8), 27, [(8, 1), (8, 2), (3, 0), (8, 3)]),  # what comes now has time to arrive
        ((8, 8, 8), 22, [(8, 1), (6, 0), (8, 3)]),
        ((8, 8), 12, [(8, 2), (4, 0)]),
        ((8, 8), 4, []),
        ((), 4, []),
        ((8,) * 13, 103, [(8, n) for n in range(1, 14)]),  # one more of 103 is no reason for another cut
        ((8,) * 13, 105, [(8, n) for n in range(1, 14)]),
    ],
)
def test_a_lease_is_what_was_sent_and_the_rest(
    sent: tuple[int, ...], quota: int, expected: list[tuple[int, int]]
) -> None:
    assert cut(sent, quota) == expected


def test_a_lease_never_has_more_than_the_host_can_spare() -> None:
    assert sum(size for size, _ in cut((8,) * 13, 103, spare=0)) <= 103


def test_a_short_last_micro_batch_would_not_hide_the_gradient() -> None:
    thin = Speed(rate_samples_per_s=10, overhead_s=0.0, transfer_s=0.4, usual=8, most=30)
    assert cut((20,), 22, thin) == [(2, 0), (20, 1)]


def test_with_batch_statistics_a_lease_gets_no_further_micro_batch() -> None:
    least = Speed(rate_samples_per_s=10, overhead_s=0.0, usual=60, most=60, least=Least(micro_batch=2, lease=8))
    assert cut((60,), 61, least) == [(60, 1)]
    assert cut((60,), 65, least) == []


# -- the ledger


def test_a_lease_takes_the_positions_that_it_wants() -> None:
    ledger = Ledger(EpochSteps(samples=20, global_batch=10, order=lambda epoch: range(20)))
    ledger.open_step()
    assert ledger.after() is not None
    assert ledger.after() == ledger.after()
    first = ledger.lease("a", 4, wanted=(7, None, 8, None), spare={9})
    assert first.positions == (7, 5, 8, 6)
    with pytest.raises(LedgerError):
        ledger.lease("b", 2, wanted=(7, None))
    assert ledger.lease("b", 2, spare={9}).positions == (3, 4)
    assert ledger.take(9) == (0, 1, 2, 9)


# -- the guest's side


def part(number: int, step: int = 1, nbytes: int = 10) -> AheadMessage:
    return AheadMessage(batch=number, step=step, bytes=nbytes)


def new_kept(most_bytes: int = 40) -> Kept:
    return Kept(most_bytes, lambda tree, parts: b"".join(parts))


def test_a_batch_is_there_when_all_its_parts_are() -> None:
    kept = new_kept()
    kept.add(part(1), b"01234")
    assert not kept.has(1)
    kept.add(part(1), b"56789")
    assert kept.has(1)
    assert kept.take(1) == (b"0123456789", 10)
    assert not kept.has(1)
    assert kept.nbytes == 0


def test_a_lease_may_overtake_what_it_names() -> None:
    kept = new_kept()
    kept.add(part(1), b"01234")
    kept.leased(1, (0, 1, 2))
    kept.add(part(1), b"56789")
    kept.add(part(2), b"0123456789")
    kept.add(part(3), b"0123456789")
    assert kept.has(1)
    assert kept.has(2)
    assert not kept.has(3)


def test_what_no_lease_names_is_dropped() -> None:
    kept = new_kept()
    for number, step in ((1, 1), (2, 1), (3, 2)):
        kept.add(part(number, step), b"0123456789")
    kept.leased(1, (2,))
    assert not kept.has(1)
    assert kept.has(2)
    assert kept.has(3)
    kept.leased(2, ())
    assert kept.nbytes == 0


def test_without_a_lease_it_is_dropped_two_steps_later() -> None:
    kept = new_kept()
    kept.add(part(1, 1), b"0123456789")
    kept.add(part(2, 2), b"0123456789")
    assert kept.has(1)
    kept.add(part(3, 3), b"0123456789")
    assert not kept.has(1)
    assert kept.has(2)
    assert kept.has(3)


def test_no_host_can_make_a_guest_keep_more_than_its_limit() -> None:
    kept = new_kept()
    with pytest.raises(WireError):
        kept.add(part(1, nbytes=41), b"0")
    with pytest.raises(WireError):
        kept.add(part(1, nbytes=3), b"0123")
    kept = new_kept(1 << 20)
    for number in range(1, 1025):
        kept.add(part(number), b"0")
    with pytest.raises(WireError):
        kept.add(part(1025), b"0")
