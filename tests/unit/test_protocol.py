"""Who may join, how guests are checked and how they go, message by message."""

from __future__ import annotations

import math
import struct
import time
from typing import Any

import pytest

from potluck.hub import actions as act
from potluck.hub import inputs
from potluck.hub.checks import MID_STEP_S
from potluck.hub.members import CHECKING, COMPUTING, JOINING, LARGEST_MICRO_BATCH, SYNCING
from potluck.hub.newcomers import MOST_EVENTS, WITHIN_S
from potluck.spec.events import kind_of
from potluck.spec.messages import CheckMessage, SamplesMessage, UnknownMessage
from potluck.spec.model_description import TensorSpec
from potluck.wire.frames import PROTOCOL, dump_json, packed_model
from support.fuzz import of_guest
from support.protocol_world import (
    ABOUT,
    BATCH,
    DONE,
    GRADIENT_BYTES,
    HOST_S,
    KINDS,
    MODEL,
    PIECES,
    SIZES,
    VERSIONS,
    World,
    joined,
    of_kind,
    refusals,
)

NEVER = 10**6
"""The number of a lease that is never given."""


# -- who may join


def test_a_guest_joins_is_brought_up_to_date_checked_and_counts() -> None:
    world = World(batch=6, samples=100)
    actions = world.say("a", "hello", name="mac", device="mps")
    assert act.SendWelcome(guest="a", name="mac") in actions
    member = world.members["a"]
    assert member.state == JOINING
    world.ready("a")
    assert member.state == SYNCING
    assert world.whole_step().samples == {"host": 6}  # it holds nothing yet
    world.take_all("a")
    world.begin()
    common = world.protocol.checks.due
    assert common is not None
    assert common.samples == 2
    world.take()
    world.compute()
    (check,) = [s for s in world.sent["a"] if s.message.kind == "check"]
    assert check.message == CheckMessage(check=1, step=1, sizes=(2,), seed=common.seed, epoch=0)
    (samples,) = [s for s in world.sent["a"] if s.message.kind == "samples"]
    assert samples.message == SamplesMessage(lease=-1, batch=0, tree=BATCH.tree)
    assert samples.frames == BATCH.frames
    assert member.feed.in_flight_bytes >= len(b"sample")
    assert world.protocol.checks.due is None
    assert member.state == CHECKING
    world.take_all("a")
    world.sketch("a")
    world.compare()
    assert member.state == COMPUTING
    assert of_kind(world, "guest_joined")[0].machine == "mac"
    assert member.lease is not None  # at once: on a slow host the next step may be a minute away
    world.deliver("a")
    assert world.finish().samples == {"host": 4, "mac": 2}
    assert world.whole_step().samples == {"host": 3, "mac": 3}


def test_a_newcomer_gets_no_lease_in_a_step_of_which_nothing_is_left_or_whose_weights_have_gone_on() -> None:
    for gone_on in (False, True):
        world = World(batch=6, samples=100)
        member = world.join("a")
        world.code()
        world.take_all("a")
        world.begin()
        while world.protocol.checks.due is not None or world.protocol.ledger.in_pool:
            world.take()
            world.compute()
        world.take_all("a")
        world.sketch("a")
        if gone_on:
            world.end()
        world.compare()
        assert member.state == COMPUTING
        assert member.lease is None


def test_who_comes_in_the_middle_of_a_long_step_is_checked_and_lent_samples_in_it() -> None:
    world = World(batch=60, samples=600)
    assert world.whole_step().samples == {"host": 60}
    world.begin()
    for _ in range(5):
        world.take()
        world.compute()
    member = world.join("a")
    world.code()
    world.take_all("a")
    assert member.state == SYNCING
    world.take()
    assert world.in_hand is not None
    assert world.in_hand[1] is not None  # a common batch, in the middle of the step
    world.compute()
    world.take_all("a")
    assert member.state == CHECKING
    world.sketch("a")
    world.compare()
    assert member.state == COMPUTING
    assert member.lease is not None
    world.take_all("a")
    world.deliver("a")
    while world.decoding:
        world.decode()
    samples = world.finish().samples
    assert samples["a"] > 10
    assert sum(samples.values()) == 60


def test_a_short_rest_of_a_step_has_no_check() -> None:
    world = World(batch=60, samples=600)
    world.whole_step()
    world.begin()
    while world.protocol.ledger.in_pool > 2 * MID_STEP_S / HOST_S / 3:
        world.take()
        world.compute()
    world.join("a")
    world.code()
    world.take_all("a")
    world.take()
    assert world.in_hand is not None
    assert world.in_hand[1] is None
    world.finish()
    world.take_all("a")
    world.begin()
    assert world.protocol.checks.due is not None


def test_versions_that_differ_are_noted_and_not_refused() -> None:
    world = World()
    world.say("a", "hello", name="a", potluck="1", torch="1.9")
    assert "runs torch 1.9, this host 2" in of_kind(world, "note")[0].text
    assert "a" in world.members


def test_names_are_made_unique_and_a_second_hello_changes_nothing() -> None:
    world = World()
    for guest in "abc":
        world.say(guest, "hello", name="host")
    world.say("a", "hello", name="other")
    assert [m.name for m in world.members.values()] == ["host-2", "host-3", "host-4"]
    world.say("d", "hello")
    world.say("e", "hello", name="")
    assert [world.members[g].name for g in "de"] == ["guest", "guest-2"]


def test_a_full_table_refuses() -> None:
    world = World(max_guests=1)
    world.hello("a")
    world.hello("b")
    assert refusals(world, "b") == ["all 1 places are taken"]
    assert list(world.members) == ["a"]


@pytest.mark.parametrize(
    ("theirs", "reason"),
    [
        (
            TensorSpec(name="w", shape=(4, 3), dtype="float32", role="trained"),
            "the host has w [4, 2] float32 (trained), the guest has w [4, 3] float32 (trained)",
        ),
        (TensorSpec(name="w", shape=(4, 2), dtype="float32", role="frozen"), "float32 (frozen)"),
        (None, "only the host has w [4, 2]"),
    ],
)
def test_another_model_is_refused_and_the_difference_named(theirs: TensorSpec | None, reason: str) -> None:
    world = World()
    world.hello("a")
    world.say("a", "ready", packed_model((theirs,) if theirs else (), {}), **SIZES)
    assert world.members == {}
    assert "a different model" in refusals(world, "a")[0]
    assert reason in refusals(world, "a")[0]
    assert reason in of_kind(world, "guest_refused")[0].reason


def test_a_description_that_is_far_longer_than_the_hosts_own_is_not_read() -> None:
    world = World()
    world.hello("a")
    hashes = {f"b{n}": "0" * 64 for n in range(20_000)}
    world.say("a", "ready", packed_model(MODEL, hashes), **SIZES)
    assert world.members == {}
    assert "bytes about its model, at most 1048" in refusals(world, "a")[0]
    world.hello("b")
    world.say("b", "ready", packed_model(MODEL, dict(list(hashes.items())[:5_000])), **SIZES)
    assert world.members["b"].state == "syncing"


def test_another_protocol_version_is_refused_whether_known_or_not() -> None:
    world = joined("a")
    for guest in "ax":
        world.handle(inputs.OtherProtocolArrived(guest=guest, theirs=9, address="1.2.3.4"))
        assert refusals(world, guest) == [f"it uses protocol 9, this host uses {PROTOCOL}"]
    assert world.members == {}


def test_a_gradient_that_differs_is_refused() -> None:
    world = World(samples=100)
    world.join("a")
    world.code()
    world.take_all("a")
    world.begin()
    world.take()
    world.compute()
    world.sketch("a")
    world.compare("the cosine of the two is 0.1")
    assert "differs from the host's on the same batch: the cosine" in refusals(world, "a")[0]
    world.finish()
    assert world.whole_step().samples == {"host": 6}


def test_a_sketch_counts_once_and_only_when_asked_for() -> None:
    world = World(samples=100)
    world.join("a")
    world.code()
    world.take_all("a")
    world.begin()
    world.take()
    world.compute()
    world.sketch("a")
    assert len(world.comparing) == 1
    world.say("a", "sketch", b"", check=1, count=1, loss=1.0, compute_s=0.1, **SIZES)
    assert "that nobody asked for" in refusals(world, "a")[0]
    world.compare()
    assert world.members == {}
    assert of_kind(world, "guest_joined") == []


def test_a_loss_that_is_not_finite_can_be_said() -> None:
    world = World(samples=100)
    world.join("a")
    world.code()
    world.take_all("a")
    world.begin()
    world.take()
    world.compute()
    world.say("a", "sketch", b"", check=1, count=2, loss=None, compute_s=0.1, **SIZES)
    assert world.comparing[0].loss != world.comparing[0].loss


def test_the_common_batch_suits_the_smallest_micro_batch() -> None:
    world = World(batch=12, samples=100)
    for guest, size in (("a", 9), ("b", 3)):
        world.hello(guest)
        world.say(guest, "ready", dump_json(ABOUT), micro_batch=size, largest_micro_batch=size)
        world.take_all(guest)
    world.code()
    for guest in "ab":
        world.take_all(guest)
    world.begin()
    for leaves, samples in (("b", 3), ("a", 4)):
        common = world.protocol.checks.due
        assert common is not None
        assert common.samples == samples
        world.say(leaves, "leave")
    assert world.protocol.checks.due is None


def test_a_check_that_came_too_late_is_made_again() -> None:
    """The host went on before the guest had the check's weights; it says so, and is checked at another step."""
    world = World(samples=100)
    world.join("a")
    world.code()
    world.take_all("a")
    world.begin()
    world.take()
    world.compute()
    assert world.members["a"].state == CHECKING
    world.say("a", "stopped", lease=-7, computed=0, compute_s=0.0)
    assert world.members["a"].state == CHECKING
    world.say("a", "stopped", lease=-1, computed=0, compute_s=0.0)
    assert world.members["a"].state == SYNCING
    world.finish()
    world.take_all("a")
    world.whole_step()
    assert world.members["a"].state == COMPUTING


def test_local_data_is_named_in_a_lease_and_a_random_common_batch_is_the_hosts() -> None:
    world = joined("a", local_data=True)
    assert [s.frames for s in world.sent["a"] if s.message.kind == "samples"] == [BATCH.frames]
    (check,) = [s for s in world.sent["a"] if s.message.kind == "check"]
    assert check.frames == ()
    world.begin()
    (lease,) = [s for s in world.sent["a"] if s.message.kind == "lease"]
    count = sum(lease.message.sizes)
    assert struct.unpack(f"<{count}q", *lease.frames) == tuple(world.ledger.samples_of(range(12 - count, 12)))
    assert world.read == []


# -- going


def leave(world: World) -> None:
    world.say("a", "leave", reason="the lid was closed")


def fall_silent(world: World) -> None:
    world.now += 6.0
    world.tick()


def talk_nonsense(world: World) -> None:
    world.say("a", "grad", b"x", lease=1, piece=99)


def be_unreachable(world: World) -> None:
    world.handle(inputs.PeerUnreachable(guest="a"))
    assert world.handle(inputs.PeerUnreachable(guest="nobody")) == []


WAYS = [(leave, "the lid was closed"), (fall_silent, "sent nothing for 6.0 s"), (talk_nonsense, "piece 99")]
WAYS += [(be_unreachable, "lost its connection")]


@pytest.mark.parametrize(("go", "reason"), WAYS)
def test_a_lease_comes_back_when_its_guest_goes(go: Any, reason: str) -> None:
    world = joined("a")
    world.begin()
    go(world)
    assert world.members == {}
    (event,) = of_kind(world, "guest_left") + of_kind(world, "guest_lost")
    assert reason in event.reason
    assert (event.machine, event.step, event.samples_taken_back) == ("a", 2, 3)
    result = world.finish()
    assert result.samples == {"host": 6}
    assert result.taken_back_samples == 3


def test_a_guest_whose_script_failed_says_so_in_words_that_cannot_steer_a_terminal() -> None:
    world = joined("a")
    world.say("a", "leave", reason="its script failed with ValueError:\n\x1b[2J" + "x" * 900, failed=True)
    (event,) = of_kind(world, "guest_left")
    assert event.failed is True
    assert event.reason.startswith("its script failed with ValueError:  [2Jxxx")
    assert len(event.reason) <= 200
    world = joined("a")
    world.say("a", "leave", reason="left")
    assert not of_kind(world, "guest_left")[0].failed


@pytest.mark.parametrize(("go", "reason"), WAYS)
@pytest.mark.parametrize("why_not", [None, "its gradient is not finite"])
def test_who_goes_while_decoding_goes_when_that_has_ended(go: Any, reason: str, why_not: str | None) -> None:
    """Whatever it says in between: its samples are in the sum, or back in the pool, before it is forgotten."""
    world = joined("a")
    world.begin()
    world.deliver("a")
    go(world)
    assert list(world.members) == ["a"]
    if go is not fall_silent:
        world.say("a", "alive")
        world.say("a", "grad", b"x", lease=1, piece=77)
    assert len(refusals(world, "a")) == (go is talk_nonsense), "it is told once"
    world.decode(why_not)
    world.tick()
    assert world.members == {}
    (event,) = of_kind(world, "guest_left") + of_kind(world, "guest_lost")
    assert reason in event.reason
    assert world.finish().samples == ({"host": 6} if why_not else {"host": 3, "a": 3})


def test_the_same_contribution_twice_is_counted_once_and_its_guest_put_out() -> None:
    world = joined("a")
    world.begin()
    world.deliver("a")
    world.deliver("a")
    assert len(world.decoding) == 1
    world.decode()
    assert world.members == {}
    assert "lease 1 twice" in refusals(world, "a")[0]
    assert world.finish().samples == {"host": 3, "a": 3}


def test_an_answer_to_another_lease_touches_nothing() -> None:
    world = joined("a")
    world.begin()
    assert world.say("a", "done", lease=NEVER, count=3, **DONE) == []
    world.deliver("a")
    assert world.say("a", "done", lease=NEVER, count=3, **DONE) == []
    world.decode()
    assert world.finish().samples == {"host": 3, "a": 3}


def test_a_gradient_that_is_not_finite_is_dropped_and_reported() -> None:
    world = joined("a")
    world.begin()
    world.deliver("a", finite=False)
    assert not world.decoding
    (event,) = of_kind(world, "contribution_dropped")
    why = "its gradient or its loss is not finite; a micro-batch of one sample may have caused it"
    assert (event.machine, event.reason) == ("a", why)
    result = world.finish()
    assert (result.samples, result.dropped_samples) == ({"host": 6}, 3)


def test_heartbeats_go_out_every_second_and_silence_has_its_limits() -> None:
    world = joined("a")
    world.hello("b")
    world.sent.clear()
    for _ in range(30):
        world.now += 0.1
        world.tick()
    assert [s.message.kind for s in world.sent["a"]] == ["alive"] * 3
    world.now += 2.1
    world.tick()
    assert list(world.members) == ["b"]  # it builds its model: that may take long
    world.now += 60.0
    world.tick()
    assert world.members == {}


def test_a_guest_that_is_heard_but_never_ready_or_never_answers_its_check_is_out() -> None:
    world = World(joining_s=100.0, checking_s=30.0)
    world.join("b")
    world.begin()
    world.take()
    world.compute()
    assert world.members["b"].state == CHECKING
    began = world.now
    world.hello("a")
    for _ in range(120):
        world.now += 1.0
        for guest in list(world.members):
            world.say(guest, "alive")
        world.tick()
        if world.now < began + 25.0:
            assert set(world.members) == {"a", "b"}
    assert world.members == {}
    reasons = {e.machine: e.reason for e in of_kind(world, "guest_refused")}
    assert "within 30 s" in reasons["b"]
    assert "within 100 s" in reasons["a"]
    assert world.sent["b"][-1].message.kind == "refuse"


def test_what_this_machine_slept_through_is_no_guests_delay() -> None:
    world = World(joining_s=100.0)
    world.hello("a")
    world.now += 200.0
    world.handle(inputs.StoodStill(seconds=200.0))
    world.tick()
    assert list(world.members) == ["a"]


def test_a_guest_that_does_not_read_is_put_out_with_the_reason() -> None:
    world = joined("a")
    world.handle(inputs.PeerNotReading(guest="a", waiting_bytes=17_000_000))
    assert world.members == {}
    assert "17 MB waited" in of_kind(world, "guest_lost")[0].reason
    assert world.handle(inputs.PeerNotReading(guest="a", waiting_bytes=1)) == []


@pytest.mark.parametrize("value", [-1, 1 << 70, 10**400, 1.5, 1e300, "3", True, None, [], {}])
@pytest.mark.parametrize(
    ("kind", "key"),
    [
        ("taken", "bytes"),
        ("closing", "lease"),
        ("closing", "keep"),
        ("closing", "eta_s"),
        ("grad", "piece"),
        ("grad", "lease"),
        ("done", "lease"),
        ("done", "count"),
        ("done", "compute_s"),
        ("done", "receive_s"),
        ("done", "micro_batch"),
        ("done", "largest_micro_batch"),
        ("stopped", "computed"),
        ("stopped", "compute_s"),
        ("hashed", "version"),
    ],
)
def test_a_number_that_cannot_be_puts_its_guest_out_and_the_step_is_full(kind: str, key: str, value: Any) -> None:
    if key.endswith("_s") and value == 1.5:
        pytest.skip("that one can be")
    world = joined("a")
    world.begin()
    lease = world.members["a"].lease
    assert lease is not None
    honest = next(m for m in of_guest(lease=lease.id, check=0) if m.kind == kind)
    world.say("a", kind, *map(bytes, honest.frames), **{**honest.fields, key: value})
    assert world.members == {}
    assert len(of_kind(world, "guest_lost")[0].reason) < 200
    world.finish()


def test_a_time_too_short_to_be_true_makes_no_endless_rate() -> None:
    world = joined("a")
    world.begin()
    world.take_all("a")
    world.deliver("a", compute_s=5e-324)
    while world.decoding:
        world.decode()
    world.finish()
    assert math.isfinite(world.members["a"].rate.value or 0.0)
    for _ in range(3):
        world.whole_step()


def test_strangers_are_told_that_they_are_unknown() -> None:
    world = joined()
    answer = act.Send(guest="z", message=UnknownMessage(**VERSIONS))
    for kind in KINDS:
        if kind != "hello":
            assert world.say("z", kind) == [answer]
    assert world.events == []


def test_a_hello_that_cannot_be_read_is_refused_with_its_reason() -> None:
    """As an unknown guest it would come back for ever."""
    world = joined()
    world.say("z", "hello", name=3)
    why = "its 'name' is wrong: expected `str`, got `int`"
    assert refusals(world, "z") == [f"sent a malformed 'hello' message: {why}"]
    assert "z" not in world.members
    assert len(of_kind(world, "guest_refused")) == 1


def test_bytes_of_a_stranger_that_are_no_message_get_no_answer() -> None:
    world = joined()
    assert world.arrives("z", [b"GET / HTTP/1.1"]) == []


@pytest.mark.parametrize("kind", [k for k in KINDS if k not in ("hello", "alive", "leave")])
@pytest.mark.parametrize("state", ["joining", "computing", "decoding"])
def test_a_message_without_its_fields_puts_the_guest_out(kind: str, state: str) -> None:
    world = joined("a")
    if state == "joining":
        world.hello("b")
    elif state == "decoding":
        world.begin()
        world.deliver("a")
    guest = "b" if state == "joining" else "a"
    world.say(guest, kind)
    assert len(refusals(world, guest)) == 1
    if state == "decoding":
        world.decode()
    assert guest not in world.members


# -- what guests say about themselves


@pytest.mark.parametrize("field", ["micro_batch", "largest_micro_batch"])
def test_a_guest_that_is_ready_must_say_its_sizes(field: str) -> None:
    world = World()
    world.hello("a")
    world.say("a", "ready", dump_json(ABOUT), **{k: v for k, v in SIZES.items() if k != field})
    assert world.members == {}
    assert field in refusals(world, "a")[0]


@pytest.mark.parametrize("field", ["receive_s", "micro_batch", "largest_micro_batch", "compute_s", "finite"])
def test_a_contribution_that_lacks_a_field_puts_its_guest_out(field: str) -> None:
    world = joined("a")
    world.begin()
    for index in range(PIECES):
        world.say("a", "grad", bytes(GRADIENT_BYTES), lease=1, piece=index)
    world.say("a", "done", lease=1, count=3, **{k: v for k, v in DONE.items() if k != field})
    assert world.members == {}
    assert field in refusals(world, "a")[0]
    assert world.finish().samples == {"host": 6}


NO_NUMBERS = [None, "x", "Infinity", [], [1.0], {}, math.nan, math.inf, -math.inf]


@pytest.mark.parametrize("value", [*NO_NUMBERS, True, "1"], ids=repr)
def test_a_time_that_is_no_number_puts_its_guest_out(value: Any) -> None:
    world = joined("a")
    world.begin()
    world.say("a", "done", lease=1, count=3, **{**DONE, "receive_s": value})
    (reason,) = refusals(world, "a")
    assert "receive_s" in reason or (isinstance(value, float) and "bytes that are no message" in reason)
    assert world.finish().samples == {"host": 6}


@pytest.mark.parametrize("value", NO_NUMBERS, ids=repr)
@pytest.mark.parametrize("field", ["micro_batch", "largest_micro_batch"])
def test_a_size_that_is_no_number_puts_its_guest_out(field: str, value: Any) -> None:
    world = joined("a")
    world.begin()
    world.say("a", "done", lease=1, count=3, **{**DONE, field: value})
    assert refusals(world, "a")
    world.hello("b")
    world.say("b", "ready", dump_json(ABOUT), **{**SIZES, field: value})
    assert refusals(world, "b")
    assert world.finish().samples == {"host": 6}


@pytest.mark.parametrize(
    "value",
    [0, -1, -(10**400), 10**400, 10**6, 1e308, -1e308, 5e-324, 1e-9],
    ids=lambda v: f"{v:.0e}" if isinstance(v, float) else str(v)[:5],
)
@pytest.mark.parametrize("field", ["receive_s", "micro_batch", "largest_micro_batch"])
def test_an_absurd_number_hurts_nobody(field: str, value: Any) -> None:
    """It is refused, or its guest gets what the host can answer for: steps are full, the others help."""
    world = joined("a", "b", batch=12)
    started = time.process_time()
    for _ in range(6):
        world.begin()
        for guest, member in list(world.members.items()):
            world.take_all(guest)
            if (lease := member.lease) is None:
                continue
            for index in range(PIECES):
                world.say(guest, "grad", bytes(GRADIENT_BYTES), lease=lease.id, piece=index)
            about = {**DONE, "compute_s": lease.count * HOST_S, **({field: value} if guest == "a" else {})}
            world.say(guest, "done", lease=lease.id, count=lease.count, **about)
        while world.decoding:
            world.decode()
        samples = world.finish().samples
        assert samples["b"] >= 1
        assert samples["host"] >= 1
    for member in world.members.values():
        assert 1 <= member.micro_batch <= member.largest_micro_batch <= LARGEST_MICRO_BATCH
    assert time.process_time() - started < 5.0


def test_how_long_the_weights_took_to_arrive_is_learned() -> None:
    world = joined("a", batch=12)
    member = world.members["a"]
    first = member.transfer.value
    assert first is not None  # a guess, from its first copy of the weights
    for _ in range(4):
        world.begin()
        world.take_all("a")
        world.deliver("a", receive_s=0.02)
        world.decode()
        world.finish()
    assert member.transfer.value == pytest.approx(0.02)
    for nothing in (0.0, 0.0):  # it has not seen all of them
        world.begin()
        world.take_all("a")
        world.deliver("a", receive_s=nothing)
        world.decode()
        world.finish()
        assert member.transfer.value == pytest.approx(0.02)


def test_what_the_script_does_between_two_steps_is_not_the_links_time() -> None:
    """A guest joins while the script of the host evaluates, twice for half a minute: its weights took 0.1 s."""
    script_s, link_s = 30.0, 0.1
    world = World(batch=12, samples=100)
    world.hello("a")
    world.begin()
    world.finish()
    world.ready("a")
    world.take_all("a")
    world.now += script_s
    world.begin()
    world.now += link_s
    world.take_all("a")
    world.finish()
    member = world.members["a"]
    assert member.sync_bytes
    world.now += script_s
    world.whole_step()
    assert member.transfer.value is not None
    assert member.transfer.value <= PIECES * GRADIENT_BYTES * link_s / member.sync_bytes + 1e-9


def test_a_contribution_may_overtake_the_word_that_it_will_be_smaller() -> None:
    """They travel on two connections; what is not in it is computed by the host."""
    world = joined("a")
    world.begin()
    assert world.members["a"].lease is not None
    actions = world.deliver("a", wrong=-1)
    assert act.Wake() in actions
    assert [d.count for d in world.decoding] == [2]
    assert world.say("a", "closing", lease=1, keep=2, eta_s=0.1) == []
    world.decode()
    assert world.say("a", "closing", lease=1, keep=2, eta_s=0.1) == []
    assert world.finish().samples == {"host": 4, "a": 2}


@pytest.mark.parametrize("wrong", [1, -1])
def test_a_contribution_that_differs_from_what_was_announced_is_dropped(wrong: int) -> None:
    world = joined("a", batch=8)
    world.begin()
    world.say("a", "closing", lease=1, keep=3, eta_s=0.1)
    world.deliver("a", wrong=wrong)
    assert not world.decoding
    assert "where 3 were leased" in of_kind(world, "contribution_dropped")[0].reason
    assert world.finish().samples == {"host": 8}


def test_the_fingerprint_of_these_tests_is_read_as_it_was_written() -> None:
    world = World()
    world.join("a")
    assert world.members["a"].state == SYNCING
    assert world.protocol.terms.fingerprint == MODEL


# -- a flood


def test_whoever_has_the_token_cannot_fill_the_log_with_hellos() -> None:
    world = World(max_guests=2)
    world.join("honest")
    for number in range(5000):
        guest = f"{number:x}"
        world.hello(guest)
        world.say(guest, "leave", reason="bored")
        world.now += 0.001
    flood = [e for e in world.events if kind_of(e) in ("guest_hello", "guest_left", "guest_refused", "note")]
    assert len(flood) <= MOST_EVENTS * (1 + 5.0 / WITHIN_S) + 10
    world.now += WITHIN_S
    world.hello("late")
    *_, note, hello = world.events
    assert "more hellos, refusals and departures of guests that had not joined are not in the log" in note.text  # type: ignore[union-attr]
    told = int(note.text.split()[0])  # type: ignore[union-attr]
    assert told + len(flood) >= 10_000
    assert kind_of(hello) == "guest_hello"


def test_a_guest_that_had_joined_is_always_told_of() -> None:
    world = joined("a")
    for number in range(2 * MOST_EVENTS):
        world.hello(f"g{number}")
        world.say(f"g{number}", "leave", reason="bored")
    world.say("a", "leave", reason="tired")
    assert kind_of(world.events[-1]) == "guest_left"
    assert world.events[-1].reason == "tired"  # type: ignore[union-attr]


@pytest.mark.parametrize("loss_sum", [1e31, -1e31, 1.7e308])
def test_a_loss_that_could_spoil_the_sum_puts_its_guest_out(loss_sum: float) -> None:
    world = joined("a")
    world.begin()
    lease = world.members["a"].lease
    assert lease is not None
    world.say("a", "done", lease=lease.id, count=lease.count, **{**DONE, "loss_sum": loss_sum})
    assert "a" not in world.members
