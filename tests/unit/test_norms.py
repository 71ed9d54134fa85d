"""How large a guest's gradient may be by the host's own, and whose fault one was that could not be right."""

from __future__ import annotations

import math

import pytest

from potluck.hub import inputs
from potluck.hub.norms import RECENT_STEPS, Norms
from potluck.hub.protocol import WRONG_HINT
from support.protocol_world import World, joined, of_kind

INF = math.inf


def test_before_the_host_knows_its_own_gradient_there_is_no_bound() -> None:
    norms = Norms(1000.0)
    assert norms.most_a_sample == INF
    for nothing in (math.nan, INF, 0.0):
        norms.host_gradient(1, nothing, 4)
    assert norms.most_a_sample == INF, "nor by a gradient of zero, which says nothing"


def test_it_follows_the_largest_of_the_last_steps_and_forgets_it() -> None:
    norms = Norms(10.0)
    norms.host_gradient(0, 8.0, 4)
    assert norms.most_a_sample == 20.0
    for step in range(1, RECENT_STEPS):
        norms.host_gradient(step, 0.004, 4)
    assert norms.most_a_sample == 20.0, "a few small steps are no reason to refuse a large one"
    norms.host_gradient(RECENT_STEPS, 0.004, 4)
    assert norms.most_a_sample == pytest.approx(0.01)


def test_none_is_bounded_where_that_is_wished() -> None:
    norms = Norms(0.0)
    norms.host_gradient(0, 8.0, 4)
    assert norms.most_a_sample == INF


@pytest.mark.parametrize(
    ("claimed", "found", "guilty"),
    [
        (INF, 3.0, True),
        (INF, math.nan, False),
        (1e6, 3.0, True),
        (1e6, 5e5, False),  # the samples are so: an outlier that only the guest had
        (1e6, INF, False),
    ],
)
def test_who_was_wrong_is_known_when_the_host_has_computed_the_same_samples(
    claimed: float, found: float, guilty: bool
) -> None:
    norms = Norms(1000.0)
    norms.suspect("a", step=4, norm=claimed)
    assert norms.host_gradient(3, 3.0, 4) == []
    assert norms.host_gradient(4, found, 4) == [("a", guilty)]
    assert norms.host_gradient(5, 3.0, 4) == []


def test_a_step_of_which_nothing_was_told_leaves_nothing_behind() -> None:
    norms = Norms(1000.0)
    norms.suspect("a", step=4, norm=INF)
    assert norms.host_gradient(7, 3.0, 4) == []
    assert norms.host_gradient(4, 3.0, 4) == []


# -- what the protocol does with it


def bad_step(world: World, *, host: float, single: bool = False) -> None:
    """A step in which the guest's gradient is not finite, and the host's own norm comes to this."""
    step = world.ledger.step
    world.begin()
    world.take_all("a")
    lease = world.members["a"].lease
    assert lease is not None
    assert lease.sizes[-1] == 1
    if not single:
        world.say("a", "closing", lease=lease.id, keep=lease.count - 1, eta_s=0.1)
    world.deliver("a", finite=False)
    world.finish()
    world.handle(inputs.GradientKnown(step=step, norm=host, samples=4, applied=True))


def test_a_guest_that_is_wrong_three_times_in_a_row_is_put_out() -> None:
    world = joined("a", batch=12, codec="fp16")
    for _ in range(2):
        bad_step(world, host=1.0)
    assert "a" in world.members
    assert not of_kind(world, "guest_sits_out"), "it was not late"
    bad_step(world, host=1.0)
    assert "a" not in world.members
    (lost,) = of_kind(world, "guest_lost")
    assert lost.put_out
    assert "not finite or far too large 3 times in a row (in codec fp16)" in lost.reason
    (refusal,) = [s for s in world.sent["a"] if s.message.kind == "refuse"]
    assert refusal.message.hint == WRONG_HINT, "its model was the same when it joined"
    assert len(of_kind(world, "contribution_dropped")) == 3


def test_a_micro_batch_of_one_sample_is_named_where_a_contribution_is_not_finite() -> None:
    world = joined("a", batch=12)
    for _ in range(3):
        bad_step(world, host=1.0, single=True)
    assert "a" not in world.members
    dropped = [event.reason for event in of_kind(world, "contribution_dropped")]
    assert dropped[-1].endswith("not finite; a micro-batch of one sample may have caused it")
    (refusal,) = [s for s in world.sent["a"] if s.message.kind == "refuse"]
    assert refusal.message.hint.startswith("a loss that takes std() over its batch")
    assert refusal.message.hint.endswith(WRONG_HINT)


def test_a_guest_whose_samples_are_so_is_not_to_blame() -> None:
    world = joined("a", batch=12)
    for _ in range(6):
        bad_step(world, host=math.nan)
    assert world.members["a"].wrong_in_a_row == 0
    assert not of_kind(world, "guest_sits_out")


def test_one_that_counts_clears_its_name() -> None:
    world = joined("a", batch=12)
    for _ in range(3):
        bad_step(world, host=1.0)
        world.whole_step()
        assert "a" in world.members


def test_one_that_is_too_large_does_not_count_and_its_samples_go_back() -> None:
    world = joined("a", batch=12)
    world.begin()
    world.take_all("a")
    world.deliver("a")
    (decode,) = world.decoding
    step = world.ledger.step
    world.decode("its gradient is too large: …", wrong_norm=1e9)
    (event,) = of_kind(world, "contribution_dropped")
    assert (event.machine, event.samples) == ("a", decode.count)
    world.finish()
    world.handle(inputs.GradientKnown(step=step, norm=1.0, samples=12, applied=True))
    assert world.members["a"].wrong_in_a_row == 1


def test_what_packing_lost_of_a_step_that_was_not_applied_is_forgotten() -> None:
    """Of a huge gradient even the rounding is huge: with the next one it would spoil that, too."""
    world = joined("a", "b", batch=12)
    world.whole_step()
    world.join("newcomer")
    world.handle(inputs.GradientKnown(step=world.ledger.step - 1, norm=1.0, samples=12, applied=False))
    told = [guest for guest, sends in world.sent.items() if any(s.message.kind == "dropped" for s in sends)]
    assert sorted(told) == ["a", "b"]
