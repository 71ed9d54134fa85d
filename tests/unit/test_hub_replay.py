"""A recorded sequence of inputs leads to the same actions again: nothing else decides."""

from __future__ import annotations

import contextlib
import json

import pytest

from potluck.balance.ledger import LedgerError
from potluck.hub import inputs
from potluck.hub.protocol import HostProtocol
from support.protocol_world import GRADIENT_BYTES, SEED, World, of_kind
from support.replay import INPUTS, replay


@pytest.fixture(scope="module")
def tape() -> list[str]:
    """A host and two guests that are checked and contribute, until one is lost in the middle of a step."""
    tape: list[str] = []
    world = World(batch=12, samples=100, tape=tape, check_replica_every=2, guest_bound=10.0, sample_bytes=100_000)
    for guest in ("a", "b"):
        world.join(guest)
    for _ in range(4):
        world.whole_step()
        world.hash()
        world.handle(inputs.GradientKnown(step=world.ledger.step - 1, norm=2.0, samples=4, applied=True))
        for guest, member in world.members.items():
            if member.hash_awaited is not None:
                world.answer_hash(guest)
    world.begin()
    for guest in ("a", "b"):
        world.take_all(guest)
    world.take()
    world.deliver("a")
    lease = world.members["b"].lease
    assert lease is not None
    world.say("b", "grad", bytes(GRADIENT_BYTES), lease=lease.id, piece=0)
    world.handle(inputs.PeerUnreachable(guest="b"))
    world.decode()
    assert world.finish().samples.keys() == {"host", "a"}
    (lost,) = of_kind(world, "guest_lost")
    assert lost.samples_taken_back == lease.count
    assert of_kind(world, "replica_checked")
    world.handle(inputs.StepTimed(step=world.ledger.step - 1, samples=4, seconds=0.1))
    world.handle(inputs.BuffersChanged(module="Codebook", names=("q.embed",)))
    world.handle(inputs.HostClosing(reason="finished"))
    return tape


def told(tape: list[str]) -> list[str]:
    return [json.loads(line)["input"]["input"] for line in tape[1:]]


def test_a_recorded_run_replays_to_the_same_actions(tape: list[str]) -> None:
    protocol = replay(tape, seed=SEED)
    assert list(protocol.members) == ["a"]
    assert protocol.ledger.step == 5
    rare = {"UnreadableArrived", "OtherProtocolArrived", "PeerNotReading", "StoodStill", "SamplesNotPacked"}
    assert set(told(tape)) >= INPUTS.keys() - rare - {"Tick", "HostWaited"}


def test_what_may_be_read_changes_nothing(tape: list[str]) -> None:
    def read(protocol: HostProtocol) -> None:
        protocol.synced()
        with contextlib.suppress(LedgerError):  # between steps there are none
            protocol.samples_of([0])
        protocol.holds("a", 1)
        assert protocol.host_sample_s is None or protocol.host_sample_s > 0

    replay(tape, seed=SEED, between=read)


@pytest.mark.parametrize("missing", ["PeerUnreachable", "ContributionDecoded", "HostComputed", "PieceCoded"])
def test_without_one_of_its_inputs_the_run_is_another(tape: list[str], missing: str) -> None:
    first = 1 + told(tape).index(missing)
    with pytest.raises(AssertionError):
        replay([*tape[:first], *tape[first + 1 :]], seed=SEED)


def test_a_time_is_an_input_too(tape: list[str]) -> None:
    late = 1 + told(tape).index("HostLaunched")
    lines = [json.loads(line) for line in tape]
    for line in lines[late:]:
        line["now"] += 100.0 * (line["input"]["input"] != "MessageArrived")
    with pytest.raises(AssertionError):
        replay([json.dumps(line) for line in lines], seed=SEED)
