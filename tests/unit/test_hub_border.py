"""The border of the host's protocol: every input is handled, and what is decided is decided behind `handle`."""

from __future__ import annotations

from typing import get_args

import pytest

from potluck.hub import actions as act
from potluck.hub import inputs
from potluck.hub.actions import Take
from potluck.hub.feed import NOTHING, PART_BYTES, FixedTensor, TensorPart, lacking
from potluck.hub.members import CHECKING, SYNCING
from potluck.hub.protocol import LOOK_AGAIN_S, HostProtocol
from support.protocol_world import FIXED, World, joined, new_protocol


def kinds(actions: list[act.Action]) -> list[str]:
    """Of messages their kind, of other actions their name."""
    return [a.message.kind if isinstance(a, act.Send) else type(a).__name__ for a in actions]


def wanted(world: World, computing: bool | None) -> Take:
    take = world.ask(inputs.BatchWanted(count=2, computing=computing))
    assert isinstance(take, Take)
    return take


def test_every_input_has_its_handler_and_there_is_one_way_in() -> None:
    protocol = new_protocol(6, 7)
    assert set(protocol._handlers) == set(get_args(inputs.Input))
    public = {name for name in vars(HostProtocol) if not name.startswith("_")}
    assert public == {"handle", "synced", "host_sample_s", "samples_of", "holds", "judges"}


# -- the training thread


def out_with_a_lease() -> World:
    """All of the host's own samples are computed, and a guest has not delivered."""
    world = joined("a", batch=12)
    world.begin()
    world.take_all("a")
    while world.take() is None and world.in_hand is not None:
        world.compute()
    return world


def test_nobody_is_waited_for_or_given_up_while_the_device_computes() -> None:
    world = out_with_a_lease()
    assert wanted(world, None) == Take(ask_device=True)
    world.now += 3600.0
    assert wanted(world, True) == Take(wait_until=world.now + LOOK_AGAIN_S, idle=False)
    assert world.members["a"].lease is not None
    assert not world.members["a"].lease.revoked
    taken = wanted(world, False)
    assert taken.positions, "the device is idle: the lease is late, and is computed here"
    assert world.members["a"].lease.revoked


def test_where_samples_are_left_the_device_is_not_asked() -> None:
    world = joined("a", batch=12)
    world.begin()
    assert wanted(world, None).positions


def test_a_full_step_stays_open_for_those_who_need_its_weights_while_the_device_computes() -> None:
    world = World(batch=2, samples=100)
    world.join("a")
    world.begin()
    world.take()
    world.compute()
    assert world.members["a"].state == CHECKING
    assert world.ledger.full
    assert wanted(world, None).ask_device
    assert not wanted(world, True).full
    assert wanted(world, False).full
    world.sketch("a")
    world.compare()
    assert wanted(world, None).full, "nobody needs them any more"


def test_a_full_step_stays_open_until_its_weights_are_coded_for_who_is_sent_them() -> None:
    world = joined("a", batch=4)
    world.handle(inputs.StepBegun())  # the coder has not begun
    while not world.ledger.full:
        world.take()
        if world.in_hand is not None:
            world.compute()
        elif world.members["a"].lease is not None:
            world.deliver("a")
            world.decode()
    assert wanted(world, None).ask_device
    world.code()
    assert wanted(world, None).full


# -- what guests are sent


def test_a_newcomer_is_sent_the_fixed_tensors_that_it_lacks() -> None:
    fixed = (
        FixedTensor(name="same", digest="1", values=3, value_bytes=4),
        FixedTensor(name="other", digest="2", values=PART_BYTES, value_bytes=2),
        FixedTensor(name="missing", digest="3", values=5, value_bytes=8),
    )
    half = PART_BYTES // 2
    assert lacking(fixed, {"same": "1", "other": "1"}) == [
        TensorPart("other", 0, half, PART_BYTES),
        TensorPart("other", half, PART_BYTES, PART_BYTES),
        TensorPart("missing", 0, 5, 40),
    ]


def test_fixed_tensors_are_queued_once_and_not_for_one_who_has_gone() -> None:
    """They are hashed beside everything else: meanwhile a guest may go, and come back with the same id."""
    world = World()
    other = tuple(FixedTensor(name=t.name, digest="other", values=2, value_bytes=4) for t in FIXED)
    assert world.handle(inputs.FixedHashed(guest="a", tensors=other)) == []
    world.hello("a")
    assert world.handle(inputs.FixedHashed(guest="a", tensors=other)) == []
    assert not world.members["a"].feed.open
    world.ready("a")
    assert world.members["a"].feed.open
    assert world.handle(inputs.FixedHashed(guest="a", tensors=other)) == []
    assert not world.members["a"].feed.tensors


@pytest.mark.parametrize("in_step", [False, True])
def test_for_a_newcomer_the_weights_are_coded_only_in_a_step(in_step: bool) -> None:
    """Between two steps the model may hold other weights, for an evaluation."""
    world = World()
    world.begin()
    if not in_step:
        world.finish()
    world.hello("a")
    member = world.members["a"]
    member.fixed_digests, member.state = {}, SYNCING
    actions = world.handle(inputs.FixedHashed(guest="a", tensors=()))
    assert ("CodeChange" in kinds(actions)) == in_step


def test_a_change_is_kept_until_all_who_take_part_were_sent_it() -> None:
    world = joined("a", "b", batch=12)
    for guest in ("a", "b"):
        world.take_all(guest)
    world.members["b"].feed.in_flight_bytes = 95  # its window is full
    world.begin()
    assert all(piece.change == b"change" for piece in world.state)
    assert world.members["a"].feed.current(world.state)
    world.say("b", "taken", bytes=95)
    assert all((piece.change, piece.base, piece.version) == (None, NOTHING, 1) for piece in world.state)
    assert world.members["b"].feed.current(world.state)


def test_samples_that_come_too_late_for_a_guest_or_its_lease() -> None:
    world = joined("a", batch=12)
    world.begin()
    lease = world.members["a"].lease
    assert lease is not None
    assert lease.unread == 0
    packed = inputs.SamplesPacked(guest="a", lease=lease.id - 1, batch=0, tree=None, frames=(bytes(7),))
    before = world.members["a"].feed.in_flight_bytes
    assert kinds(world.handle(packed)) == ["samples"], "it is on its way: the guest drops it"
    assert (lease.unread, world.members["a"].feed.in_flight_bytes) == (0, before + 7)
    assert world.protocol.holds("a", lease.id)
    world.say("a", "leave")
    assert world.handle(packed) == []
    assert not world.protocol.holds("a", lease.id)
    assert world.handle(inputs.SamplesNotPacked(guest="a", why="…")) == []


def test_a_guest_that_cannot_have_the_samples_is_refused() -> None:
    world = joined("a", batch=12)
    world.begin()
    world.handle(inputs.SamplesNotPacked(guest="a", why="batch[0] is an image"))
    assert "a" not in world.members
    assert world.events[-1].reason == "the samples cannot be sent: batch[0] is an image"
    assert "collate_fn" in world.sent["a"][-1].message.hint
    world.finish()


def test_everybody_is_told_when_the_run_ends() -> None:
    world = joined("a", "b")
    assert kinds(world.handle(inputs.HostClosing(reason="finished"))) == ["bye", "bye"]


def test_the_bound_of_a_contribution_follows_the_hosts_own_norm() -> None:
    world = joined("a", guest_bound=10.0)
    told = world.handle(inputs.GradientKnown(step=0, norm=8.0, samples=4, applied=True))
    assert told == [act.LimitNorm(most_a_sample=20.0)]
