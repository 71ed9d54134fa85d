"""What follows from a parity check: another one with the host's spread, a part in the steps, or the end."""

from __future__ import annotations

import struct
from dataclasses import replace

import pytest

from potluck.codec.names import downs_of
from potluck.hub.actions import CommonBatch
from potluck.hub.checks import ATTEMPTS, HINT, SENDABLE
from potluck.hub.inputs import BuffersChanged, Packed, StepBegun
from potluck.hub.members import COMPUTING, SYNCING
from potluck.spec.messages import NoteMessage
from support.protocol_world import BATCH, SIZES, World, joined, of_kind, refusals

CPU = frozenset({"cpu"})


def entered(*guests: str, **terms: object) -> World:
    """Guests that hold the weights and have not been checked."""
    world = World(samples=100, **terms)
    for guest in guests:
        world.join(guest)
    world.code()
    for guest in guests:
        world.take_all(guest)
    return world


def due(world: World) -> CommonBatch:
    """Open a step with a check, which the host and the guests compute."""
    world.begin()
    common = world.protocol.checks.due
    assert common is not None
    world.take()
    world.compute()
    for guest, member in list(world.members.items()):
        world.take_all(guest)
        if member.check is not None:
            world.sketch(guest)
    return common


def test_a_gradient_that_differs_is_compared_once_more_with_the_hosts_spread() -> None:
    world = entered("a")
    assert due(world).twice is None, "once, as a rule"
    world.compare("the cosine of the two is 0.5", again=True, unmatched=CPU)
    assert world.members["a"].state == SYNCING
    assert refusals(world, "a") == []
    world.finish()
    world.take_all("a")
    assert due(world).twice == CPU
    world.compare(spread=0.4, unmatched=CPU)
    assert world.members["a"].state == COMPUTING
    (event,) = of_kind(world, "guest_joined")
    assert event.spread == 0.4
    (note,) = of_kind(world, "note")
    (told,) = [s for s in world.sent["a"] if s.message.kind == "note"]
    assert told.message == NoteMessage(text=note.text)
    assert "random numbers that differ between the host and a" in note.text


@pytest.mark.parametrize("batch", [120, 6])
def test_in_a_long_step_the_host_computes_its_own_samples_until_the_guests_weights_are_coded(batch: int) -> None:
    """The second comparison needs them, and coding a large model takes seconds: it would wait for them idle."""
    world = entered("a", batch=batch)
    due(world)
    world.finish()
    world.take_all("a")
    world.compare("the cosine of the two is 0.5", again=True)
    world.by_host, world.summed = [], []
    world.handle(StepBegun())
    world.take()
    assert world.in_hand is not None
    assert (world.in_hand[1] is None) == (batch == 120), "a short step would be over before the guest's answer"
    world.compute()
    world.code()
    world.take_all("a")
    world.take()
    assert world.in_hand is not None
    assert (world.in_hand[1] is not None) == (batch == 120)
    world.finish()


def test_one_that_passes_at_once_is_not_computed_twice_for() -> None:
    world = joined("a")
    assert of_kind(world, "guest_joined")[0].spread is None
    assert of_kind(world, "note") == []


@pytest.mark.parametrize("again", [False, True])
def test_one_that_differs_by_the_spread_as_well_is_refused_with_a_hint(again: bool) -> None:
    """Where the host's spread is none, at once; else after a few comparisons, for one by luck tells little."""
    world = entered("a")
    due(world)
    world.compare("the cosine of the two is 0.5", again=True)
    for _ in range(ATTEMPTS if again else 1):
        assert refusals(world, "a") == []
        world.finish()
        world.take_all("a")
        assert due(world).twice == frozenset()
        world.compare("the cosine of the two is -0.5", spread=0.9, again=again)
    assert refusals(world, "a") == [
        "its gradient differs from the host's on the same batch: the cosine of the two is -0.5"
    ]
    (refusal,) = [s for s in world.sent["a"] if s.message.kind == "refuse"]
    assert refusal.message.hint == HINT
    assert "random numbers" in HINT
    assert len(HINT) <= 200, "a guest shows no more of it"


def test_buffers_that_the_model_changes_are_told_once_and_named_first_in_a_refusal() -> None:
    world = entered("a")
    world.handle(BuffersChanged(module="Codebook", names=("q.embed", "q.size", "q.avg", "q.more")))
    world.handle(BuffersChanged(module="Codebook", names=("q.embed",)))
    (note,) = of_kind(world, "note")
    assert "the forward of Codebook changes its buffers (q.embed, q.size, q.avg and 1 more)" in note.text
    assert "without guests" in note.text
    due(world)
    world.compare("the cosine of the two is 0.9")
    assert refusals(world, "a") == [
        "its gradient differs from the host's on the same batch: the cosine of the two is 0.9 (the model changes "
        "its buffers q.embed, q.size, q.avg and 1 more as it computes)"
    ]
    (refusal,) = [s.message for s in world.sent["a"] if s.message.kind == "refuse"]
    assert refusal.hint.startswith("the model changes its buffers q.embed")
    assert refusal.hint.endswith(HINT)


def test_what_is_certainly_wrong_is_refused_at_once() -> None:
    world = entered("a")
    due(world)
    world.compare("it is not finite (NaN or infinity)")
    assert "not finite" in refusals(world, "a")[0]


def test_one_that_is_checked_again_later_is_judged_by_the_spread_at_once_and_nobody_is_told_twice() -> None:
    world = entered("a")
    due(world)
    world.compare("the cosine of the two is 0.5", again=True, unmatched=CPU)
    for _ in range(2):
        world.finish()
        world.take_all("a")
        assert due(world).twice == CPU
        world.compare(spread=0.4, unmatched=CPU)
        world.deliver("a")
        world.members["a"].state = SYNCING  # as the guard does every now and then
    assert len(of_kind(world, "note")) == 1
    assert len(of_kind(world, "guest_joined")) == 1


def test_one_that_has_helped_is_put_out_only_after_the_comparison_with_the_spread() -> None:
    world = joined("a")
    world.members["a"].state = SYNCING
    world.code()
    world.take_all("a")
    due(world)
    world.compare("the cosine of the two is 0.5", again=True)
    assert "a" in world.members
    world.finish()
    world.take_all("a")
    due(world)
    world.compare("the cosine of the two is 0.5", spread=1.0)
    assert refusals(world, "a")[0].startswith("computed a gradient that differs from the host's")
    assert len(of_kind(world, "guest_lost")) == 1


def test_where_auto_rounds_the_weights_too_much_they_go_in_fp16_and_nobody_counts_before() -> None:
    world = entered("a", "b", auto=downs_of(None))
    due(world)
    for _ in "ab":
        world.compare("the cosine of the two is 0.35", again=True)
    world.finish()
    for guest in "ab":
        world.take_all(guest)
    due(world)
    for _ in "ab":
        world.compare(spread=0.35, rounded=True)
    assert [m.state for m in world.members.values()] == [SYNCING, SYNCING]
    assert world.protocol.codecs.change == "fp16"
    assert [note.text for note in of_kind(world, "note")] == [
        f"{guest} holds weights that the codec has rounded, and they give this model another gradient than the "
        "host's own weights (cosine 0.35): weights are sent in fp16 from now on"
        for guest in "ab"
    ]
    world.finish()
    for guest in "ab":
        world.take_all(guest)
    assert due(world).twice is None
    for _ in "ab":
        world.compare()
    assert [m.state for m in world.members.values()] == [COMPUTING, COMPUTING]
    assert [event.spread for event in of_kind(world, "guest_joined")] == [None, None]
    assert len(of_kind(world, "note")) == 2


def test_where_fp16_rounds_too_much_as_well_the_note_says_what_does_not() -> None:
    world = entered("a", auto=downs_of(None))
    for spread in (0.35, 0.7):
        due(world)
        world.compare("the cosine of the two is 0.35", again=True)
        world.finish()
        world.take_all("a")
        due(world)
        world.compare(spread=spread, rounded=True)
        joined_now = world.members["a"].state == COMPUTING
        assert joined_now == (spread == 0.7)
        world.finish()
        world.take_all("a")
    assert of_kind(world, "note")[1].text.endswith("(cosine 0.70): --codec none does not round")


@pytest.mark.parametrize(
    ("terms", "fix"),
    [
        ({}, "--codec fp16 rounds less"),
        ({"auto": downs_of("int8")}, "--codec fp16 rounds less"),
        ({"codec_down": "fp16"}, "--codec none does not round"),
    ],
)
def test_a_given_codec_stays_and_the_note_names_one_that_rounds_less(terms: dict[str, object], fix: str) -> None:
    world = entered("a", **terms)
    due(world)
    world.compare("the cosine of the two is 0.35", again=True)
    world.finish()
    world.take_all("a")
    due(world)
    world.compare(spread=0.35, rounded=True)
    assert world.members["a"].state == COMPUTING
    assert world.protocol.codecs.change != "fp16"
    assert of_kind(world, "note")[0].text.endswith(f"(cosine 0.35): {fix}")


def test_with_a_given_codec_rounding_delays_nobody_elses_check() -> None:
    world = entered("a", "b")
    due(world)
    world.compare("the cosine of the two is 0.35", again=True)
    world.compare()
    world.finish()
    world.take_all("a")
    due(world)
    world.finish()
    world.join("c")
    world.code()
    world.take_all("c")
    world.compare(spread=0.35, rounded=True)  # the answer comes between two steps
    world.begin()
    assert world.protocol.checks.due is not None


def test_everybody_in_a_check_gets_the_same_batch_and_seed() -> None:
    world = entered("a", "b")
    common = due(world)
    for guest in "ab":
        (check,) = [s for s in world.sent[guest] if s.message.kind == "check"]
        (samples,) = [s for s in world.sent[guest] if s.message.kind == "samples"]
        assert check.message.seed == common.seed
        assert samples.frames == BATCH.frames


def test_the_digests_of_a_guests_random_numbers_are_handed_on() -> None:
    world = entered("a")
    world.begin()
    world.take()
    world.compute()
    random = {"cpu": "12", "numpy": "3"}
    world.say("a", "sketch", b"", check=1, count=2, loss=1.0, compute_s=0.1, random=random, **SIZES)
    assert world.comparing[0].random == random


def test_random_digests_that_make_no_sense_put_a_guest_out() -> None:
    world = entered("a")
    world.begin()
    world.take()
    world.compute()
    world.say("a", "sketch", b"", check=1, count=2, loss=1.0, compute_s=0.1, random=[1, 2])
    assert "a malformed 'sketch' message" in refusals(world, "a")[0]


# -- batches that do not travel


def compute(world: World, batch: Packed) -> None:
    world.begin()
    world.take()
    assert world.in_hand is not None
    world.common_computed(batch)


def compute_unsendable(world: World) -> None:
    compute(world, Packed(why_not="batch[0] is a PIL.Image"))


@pytest.mark.parametrize("same_again", [False, True])
def test_local_data_is_read_by_the_guest_where_reading_it_twice_gives_the_same(same_again: bool) -> None:
    """Then another data set shows in the gradient; where reading is random, the host's own tensors travel."""
    world = entered("a", local_data=True)
    compute(world, replace(BATCH, same_again=same_again))
    (check,) = [s for s in world.sent["a"] if s.message.kind == "check"]
    sent = [s.frames for s in world.sent["a"] if s.message.kind == "samples"]
    assert sent == ([] if same_again else [BATCH.frames])
    if same_again:
        assert struct.unpack("<2q", *check.frames) == tuple(world.ledger.samples_of([0, 1]))
    else:
        assert check.frames == ()
    assert of_kind(world, "note") == []


def test_a_batch_that_cannot_be_sent_refuses_the_guest() -> None:
    world = entered("a")
    compute_unsendable(world)
    assert refusals(world, "a") == ["the samples cannot be sent: batch[0] is a PIL.Image"]
    assert [s.message.hint for s in world.sent["a"] if s.message.kind == "refuse"] == [SENDABLE]


def test_with_local_data_guests_then_read_the_samples_themselves_and_the_host_says_so() -> None:
    world = entered("a", local_data=True)
    compute_unsendable(world)
    (check,) = [s for s in world.sent["a"] if s.message.kind == "check"]
    assert struct.unpack("<2q", *check.frames) == tuple(world.ledger.samples_of([0, 1]))
    assert [s for s in world.sent["a"] if s.message.kind == "samples"] == []
    (note,) = of_kind(world, "note")
    assert "batch[0] is a PIL.Image" in note.text
    assert "random numbers in the data set" in note.text
