"""codec auto: int4 where the link is no bottleneck, thin where it is; the host's choice and the plan's are one."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from msgspec.structs import replace as changed

from potluck.balance.codecs import (
    INT4,
    LOSS_OF_ONE_PERCENT,
    THIN,
    THIN_LOSS,
    THIN_PART,
    choose,
    thinner,
)
from potluck.balance.leases import Speed, ideal
from potluck.codec.names import BF16_CHANGES, DOWN_THIN, downs_of
from potluck.hub.actions import Emit
from potluck.hub.codec_choice import FINE_PART, INT4_BYTES, STAYS_STEPS, CodecChoice
from potluck.lab import rigs
from potluck.plan.hub import potluck
from potluck.plan.rigs import fleet_of, job_of
from potluck.report.sentences import describe
from potluck.spec.events import GuestCodec
from potluck.spec.messages import LeaseMessage
from support.protocol_world import World, joined

SPEED = Speed(rate_samples_per_s=10.0, overhead_s=0.05, transfer_s=0.0, usual=4, most=64)
BATCH, HOST_RATE = 100, 20.0  # a step of 3.3 s with one guest


def chosen(transfer_s: float, *, now: str = INT4, coding_s: float = 0.01, **others: Speed) -> str:
    guests = {"guest": replace(SPEED, transfer_s=transfer_s), **others}
    found = choose(BATCH, HOST_RATE, guests, "guest", coding_s=coding_s, now=now)
    assert found.reason
    return found.codec


@pytest.mark.parametrize(
    ("transfer_s", "codec"),
    [(0.0, INT4), (0.01, INT4), (0.3, INT4), (1.2, THIN), (2.0, THIN), (3.0, THIN), (60.0, INT4)],
)
def test_thin_where_the_link_is_the_bottleneck_and_can_be_helped(transfer_s: float, codec: str) -> None:
    assert chosen(transfer_s) == codec


def test_a_choice_is_kept_where_both_are_about_as_good() -> None:
    """Transfers at which thin gains between a third and one percent: whatever was chosen stays."""
    between = [
        t / 1000 for t in range(300, 1200) if chosen(t / 1000) == INT4 and chosen(t / 1000, now=THIN) == THIN
    ]
    assert between
    assert chosen(between[-1] * 1.5) == THIN
    assert chosen(between[0] * 0.5, now=THIN) == INT4


def test_thin_must_pay_for_the_loss_that_it_costs() -> None:
    """What more steps in the same time are worth is at least what thin costs, twice where it is to be chosen."""
    for now, worth in ((INT4, 2 * THIN_LOSS), (THIN, THIN_LOSS)):
        found = set()
        for hundredths in range(1, 400):
            speed = replace(SPEED, transfer_s=hundredths / 100)
            int4_s, _ = ideal(BATCH, HOST_RATE, {"guest": speed})
            thin_s, _ = ideal(BATCH, HOST_RATE, {"guest": thinner(speed, 0.01)})
            pays = 100 * (int4_s / thin_s - 1) * LOSS_OF_ONE_PERCENT >= worth
            found.add(pays)
            assert (chosen(speed.transfer_s, now=now) == THIN) == pays
        assert found == {True, False}


def test_a_link_that_hovers_where_both_are_as_good_does_not_flap() -> None:
    """Measured 20 % more and less in turn, for 2,000 steps, wherever it hovers."""
    for middle in (0.2, 0.35, 0.5, 0.8):
        world = world_of(middle)
        member, choice = world.members["a"], world.protocol.codecs
        turns = 0
        for step in range(2000):
            member.transfer.value = middle * (0.8 + 0.4 * (step % 2)) * choice.part
            turns += len(choice.begin_step(12, 0.1, step))
        assert turns <= 1 + 7, f"{turns} changes at {middle} s"


@pytest.mark.parametrize(
    ("transfer_s", "words"),
    [
        (0.001, "its link is fast enough"),
        (0.3, r"its link is fast enough \(int4 takes 300 ms each way, in a step of \S+ s, while it computes\)"),
        (1.14, r"thin would make steps hardly faster \(int4 takes 1\.14 s each way, in a step of \S+ s\)"),
        (2.0, r"its link is slow, and steps are \d+ % faster with thin \(int4 takes 2\.00 s each way, in a .*\)"),
        (60.0, r"its link is too slow for thin, too \(int4 takes 1 min 00 s each way, in a step of 5\.00 s\)"),
    ],
)
def test_the_reason_is_in_plain_words_wherever_it_is_shown(transfer_s: float, words: str) -> None:
    guests = {"guest": replace(SPEED, transfer_s=transfer_s)}
    found = choose(BATCH, HOST_RATE, guests, "guest", coding_s=0.01)
    assert re.fullmatch(words, found.reason), found.reason
    event = GuestCodec(machine="laptop", step=3, codec=found.codec, reason=found.reason)
    shown = describe(event)  # in the view and the log
    assert shown is not None
    bits = {"int4": "4 bits", "thin": "about 2 bits"}[found.codec]
    assert shown.text == f"laptop sends its gradients in {bits} a value (codec {found.codec}): {found.reason}"


def test_thin_is_not_chosen_where_coding_it_takes_as_long_as_the_link() -> None:
    assert chosen(1.2, coding_s=1.2) == INT4


def test_where_guests_compute_most_of_the_batch_thin_must_gain_more() -> None:
    fast = replace(SPEED, rate_samples_per_s=200.0, transfer_s=0.0)
    gains = [t / 100 for t in range(1, 100) if chosen(t / 100) != chosen(t / 100, other=fast)]
    assert gains, "the other guest makes no difference"


def world_of(*links_s: float, down: tuple[str, str] = ("int4", DOWN_THIN)) -> World:
    """A step of 12 samples takes the host 1.2 s; guests a, b ... are as fast, on links that take this long."""
    world = joined(*"abc"[: len(links_s)], batch=12, auto=down, coded_bytes=20)
    for member, link_s in zip(world.members.values(), links_s):
        member.transfer.value = link_s
    return world


def leases(world: World) -> list[str]:
    return [s.message.codec for s in world.sent["a"] if isinstance(s.message, LeaseMessage)]


def told(world: World) -> list[tuple[str, int]]:
    return [(event.codec, event.step) for event in world.events if isinstance(event, GuestCodec)]


@pytest.mark.parametrize(("link", "codec", "down"), [(0.0, "int4", "int4"), (0.5, "thin", DOWN_THIN)])
def test_leases_and_changes_name_the_codec_and_everybody_is_told(link: float, codec: str, down: str) -> None:
    world = world_of(link)
    for _ in range(3):
        world.whole_step()
    assert set(leases(world)) == {codec}
    assert told(world) == [(codec, 2)]
    assert world.protocol.codecs.change == down


def test_a_link_that_becomes_slow_gets_thin_and_one_that_recovers_int4() -> None:
    world = world_of(0.0)
    member = world.members["a"]
    for _ in range(2):
        world.whole_step()
    for link_s, wanted, steps in ((0.5, "thin", 3), (0.0, "int4", 2 * STAYS_STEPS)):
        for _ in range(steps):
            member.transfer.value = link_s * world.protocol.codecs.part
            world.whole_step()
        assert member.codec == wanted
        assert leases(world)[-1] == wanted
    assert [codec for codec, _ in told(world)] == ["int4", "thin", "int4"]


def test_a_link_that_is_slow_only_on_the_way_up_gets_thin() -> None:
    """What the weights' change takes says nothing of it: the end of the contributions does."""
    world = world_of(0.01)
    member = world.members["a"]
    found = []
    for step in range(500):
        # With thin all of it is hidden, which looks as if the link were good.
        tail_s = 0.8 if member.codec == "int4" and step else 0.1
        member.tail.value, member.overhead.value, member.overhead.spread = tail_s, tail_s, 0.0
        for action in world.protocol.codecs.begin_step(12, 0.1, step):
            assert isinstance(action, Emit)
            assert isinstance(action.event, GuestCodec)
            found.append((step, action.event.codec))
            if action.event.codec == "thin":
                assert "int4 takes 10 ms and 660 ms back, in a step of" in action.event.reason
    assert [codec for _, codec in found[:3]] == ["int4", "thin", "int4"]
    turns = [step for step, _ in found]
    assert turns[2] - turns[1] >= 2 * STAYS_STEPS
    assert len(turns) < 8, "it flips to and fro"


def test_what_the_host_takes_to_decode_is_no_slow_link() -> None:
    """It is part of a contribution's end: half a second for a model of a billion parameters."""
    world = world_of(0.01)
    member = world.members["a"]
    for step in range(40):
        member.decoding.value, member.tail.value = 0.7, 0.8
        member.overhead.value, member.overhead.spread = 0.8, 0.0
        world.protocol.codecs.begin_step(12, 0.1, step)
        assert member.codec == "int4"


def test_a_guest_with_a_good_link_keeps_int4_beside_one_with_a_thin_one() -> None:
    """The change of the weights is coded once: in thin, because one of them needs that."""
    world = world_of(0.5, 0.0)
    for _ in range(2):
        world.whole_step()
    assert (world.members["a"].codec, world.members["b"].codec) == ("thin", "int4")
    assert world.protocol.codecs.change == DOWN_THIN


def test_what_was_measured_with_one_codec_is_scaled_for_the_other() -> None:
    world = world_of(0.5)
    member = world.members["a"]
    choice = world.protocol.codecs
    choice.begin_step(12, 0.1, 0)
    assert (member.codec, member.transfer.value) == ("thin", 0.5 * THIN_PART)
    choice.begin_step(12, 0.1, 1)
    assert (member.codec, member.transfer.value) == ("thin", 0.5 * THIN_PART), "it flips to and fro"


def test_where_the_weights_are_rounded_too_much_their_changes_go_in_fp16_whatever_the_link() -> None:
    world = world_of(0.5)
    choice, member = world.protocol.codecs, world.members["a"]
    choice.begin_step(12, 0.1, 0)
    assert (choice.change, member.transfer.value) == (DOWN_THIN, 0.5 * THIN_PART)
    assert choice.round_less() == "fp16"
    for step in range(1, 100):
        choice.begin_step(12, 0.1, step)
        assert (member.codec, choice.change) == ("thin", "fp16"), "gradients stay in what suits the link"
    assert member.transfer.value == pytest.approx(0.5 * FINE_PART)


def test_without_auto_no_message_names_a_codec() -> None:
    choice = CodecChoice({}, (), None)
    assert (choice.first, choice.change, choice.begin_step(12, 0.1, 0)) == ("", "", [])
    world = joined("a", batch=12)
    world.whole_step()
    assert set(leases(world)) == {""}


def test_where_the_changes_codec_is_given_only_the_gradients_is_chosen() -> None:
    world = world_of(0.5, down=downs_of("int8"))
    world.whole_step()
    assert (world.members["a"].codec, world.protocol.codecs.change) == ("thin", "int8")


def test_changes_are_exact_where_thin_is_needed_and_all_guests_compute_in_bf16() -> None:
    """And what was measured with them on the links still tells what int4 would take there."""
    world = world_of(0.5, 0.5)
    choice, (a, b) = world.protocol.codecs, world.members.values()
    a.bf16 = True
    choice.begin_step(12, 0.1, 0)
    assert choice.change == DOWN_THIN, "b does not"
    b.bf16 = True
    choice.begin_step(12, 0.1, 1)
    assert (choice.change, choice.part, a.transfer.value) == (BF16_CHANGES, THIN_PART, 0.5 * THIN_PART)
    int4_bytes = INT4_BYTES * sum(t.count for t in world.protocol.terms.fingerprint if t.role == "trained")
    choice._change_bytes = lambda: 0.1 * int4_bytes  # type: ignore[assignment, return-value]
    for step in range(2, 200):
        choice.begin_step(12, 0.1, step)
        assert (a.codec, b.codec, choice.change) == ("thin", "thin", BF16_CHANGES), "it flips to and fro"
    assert choice.part == pytest.approx(0.1, rel=0.5)
    assert a.transfer.value == pytest.approx(0.5 * choice.part)
    b.bf16 = False
    choice.begin_step(12, 0.1, 200)
    assert (choice.change, choice.part) == (DOWN_THIN, THIN_PART)
    assert a.transfer.value == pytest.approx(0.5 * THIN_PART)


def test_exact_changes_need_a_slow_link_and_no_given_codec() -> None:
    for world in (world_of(0.0), world_of(0.5, down=downs_of("int8"))):
        world.members["a"].bf16 = True
        world.whole_step()
        assert world.protocol.codecs.change in ("int4", "int8")


def test_a_guest_says_with_its_check_whether_it_computes_in_bf16() -> None:
    world = joined("a")
    assert not world.members["a"].bf16
    world.members["a"].check = 7
    world.sketch("a", bf16=True)
    assert world.members["a"].bf16


@pytest.mark.parametrize("rig", rigs.NAMES)
def test_the_plan_predicts_the_choice(rig: str) -> None:
    """What `auto` chose on each of the built-in rigs when they were measured (docs/performance.md)."""
    thin = rig in ("wifi", "thin-twins", "internet")
    job, fleet = job_of(rigs.load(rig)), fleet_of(rigs.load(rig))
    assert job.codec == "auto"
    row = potluck(job, fleet)
    assert (f"codec {'thin' if thin else 'int4'}" in row.waits) or not any(row.shares[g.name] for g in fleet.guests)
    assert ("its link is slow, and steps are" in row.waits) == thin
    best = min(potluck(changed(job, codec=codec), fleet).step_s for codec in ("int4", "thin"))
    assert row.step_s == pytest.approx(best, rel=0.03)
