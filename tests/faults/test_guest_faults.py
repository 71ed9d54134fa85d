"""Guests and hosts that die, freeze and come back: named, in time, and no step is short of a sample."""

from __future__ import annotations

import random
import signal
import time
from pathlib import Path

import pytest

from potluck.hub import inputs
from potluck.report.sentences import describe
from support import replay
from support.fleet import JOB, Fleet, port_is_open
from support.protocol_world import joined, of_kind

BATCH, PACE_S = 24, 0.01
DEVICE = ["--device", f"paced:{PACE_S}", "--micro-batch", "2"]
SILENCE_S = 5.0
ROOM_S = 2.5
"""The machine may be busy."""

posix = pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="needs SIGSTOP (POSIX)")


# -- what the protocol makes of it


def test_a_guest_that_comes_back_before_the_host_noticed_keeps_its_name() -> None:
    world = joined("a", batch=12)
    world.begin()
    world.take_all("a")
    lease = world.members["a"].lease
    assert lease is not None
    world.say("new", "hello", name="a", device="cpu", potluck="1", torch="2", before="a")
    assert [m.name for m in world.members.values()] == ["a"]
    assert world.members.keys() == {"new"}
    (lost,) = of_kind(world, "guest_lost")
    assert lost.samples_taken_back == lease.count
    message = describe(lost)
    assert message is not None
    assert "a (1.2.3.4) came back on a new connection during step 2" in message.text
    assert world.finish().samples == {"host": 12}


def test_even_while_its_last_contribution_is_being_added() -> None:
    world = joined("a", batch=12)
    world.begin()
    world.take_all("a")
    world.deliver("a")
    world.say("new", "hello", name="a", device="cpu", potluck="1", torch="2", before="a")
    assert [m.name for m in world.members.values()] == ["a", "a"]
    world.decode()
    assert world.members.keys() == {"new"}
    assert world.finish().samples["a"] > 0


def test_nobody_can_put_another_out_by_a_name_that_is_none() -> None:
    world = joined("a", batch=12)
    for before in ("", "b"):
        world.say("new", "hello", name="a", device="cpu", potluck="1", torch="2", before=before)
        assert [m.name for m in world.members.values()] == ["a", "a-2"]
    for before in (None, 7, ["a"]):
        world.say("newer", "hello", name="a", device="cpu", potluck="1", torch="2", before=before)
        assert [m.name for m in world.members.values()] == ["a", "a-2"], "what cannot be read is refused"


def test_when_the_host_slept_its_guests_are_not_to_blame() -> None:
    world = joined("a", batch=12)
    world.begin()
    world.take_all("a")
    world.now += 300.0
    world.handle(inputs.StoodStill(seconds=300.0))
    world.tick()
    assert world.members.keys() == {"a"}
    assert "stood still for 300.0 s" in of_kind(world, "note")[-1].text
    world.now += 5.1
    world.tick()
    assert world.members == {}, "but from now on their silence counts again"
    world.finish()


# -- in a run


@posix
@pytest.mark.timeout(120)
def test_one_guest_dies_one_sleeps_and_then_the_host_sleeps(tmp_path: Path) -> None:
    """The short form of R1 and R6. All is noticed in time and named, the steps wait for nobody, and who wakes or is
    started again is back. Whatever the host decided in this run it decides again when its inputs are replayed."""
    until, tape = tmp_path / "enough", tmp_path / "tape.jsonl"
    with Fleet(tmp_path) as fleet:
        words, recording = ["--batch", BATCH, "--until", until], {"HUB_TAPE": str(tape)}
        program = [str(replay.__file__)]
        host = fleet.host(JOB, "--wait-for", "2", *DEVICE, arguments=words, env=recording, program=program)
        ann, bob = (fleet.guest(name, *DEVICE) for name in ("ann", "bob"))
        for name in ("ann", "bob"):
            fleet.wait_for_event(host, "guest_joined", name)
        asleep, stopped_at = fleet.step_reached(), time.monotonic()
        ann.stop()
        time.sleep(random.uniform(0.0, 0.3))
        bob.kill()
        fleet.wait_for_event(host, "guest_lost", "bob")  # or the new one would be bob-2 for a while
        bob = fleet.guest("bob", *DEVICE)
        lost = fleet.wait_for_event(host, "guest_lost", "ann")
        assert time.monotonic() - stopped_at < SILENCE_S + ROOM_S
        assert lost["reason"].startswith("sent nothing for 5.")
        assert f"ann (127.0.0.1) {lost['reason']} during step {lost['step']}" in host.stdout()
        ann.resume()
        for name in ("ann", "bob"):
            fleet.wait_for_event(host, "guest_joined", name, count=2)
        assert "lost its connection" in fleet.events("guest_lost", "bob")[0]["reason"]
        assert all(e["step_s"] < 2 * BATCH * PACE_S + ROOM_S for e in fleet.steps()[asleep:])

        host.stop()
        ann.wait_until(lambda: "host gone, waiting (5 s)" in ann.stdout(), SILENCE_S + ROOM_S, "a word about it")
        host.resume()
        fleet.wait_for_step(host, fleet.step_reached() + 3)
        assert "the host is back" in ann.stdout()
        assert any("stood still" in e["text"] for e in fleet.events("note"))
        assert len(fleet.events("guest_lost")) == 2, "nobody was put out because the host had slept"
        # A slow machine makes fewer messages in this time.
        host.wait_until(lambda: tape.read_bytes().count(b"\n") > 1000, 30, "enough to replay")

        until.touch()
        host.succeeds(deadline_s=20)
        for guest in (ann, bob):
            guest.succeeds(deadline_s=20)
        fleet.assert_every_step_is_full(global_batch=BATCH)
        assert list(fleet.folder.glob("flight-host-*.jsonl"))
        assert not port_is_open(fleet.port)
        lines = tape.read_text(encoding="utf-8").splitlines()
        assert len(lines) > 1000
        replay.replay(lines, seed=0)


@pytest.mark.timeout(60)
def test_a_host_that_stands_still_between_hearing_and_judging_blames_nobody(tmp_path: Path) -> None:
    """The worst moment to fall asleep: one guest's message is in hand, and the others' are still in the socket."""
    until = tmp_path / "enough"
    with Fleet(tmp_path) as fleet:
        asleep = {"POTLUCK_FAILPOINT": f"host.received.done=stall:{SILENCE_S + 1}@4"}
        options = ["--wait-for", "2", *DEVICE]
        host = fleet.host(JOB, *options, arguments=["--batch", BATCH, "--until", until], env=asleep)
        guests = [fleet.guest(name, *DEVICE) for name in ("ann", "bob")]
        note = fleet.wait_for_event(host, "note", "host")
        assert "stood still for 6." in note["text"]
        fleet.wait_for_step(host, fleet.step_reached() + 3)
        assert not fleet.events("guest_lost")
        until.touch()
        for process in (host, *guests):
            process.succeeds(deadline_s=20)
        fleet.assert_every_step_is_full(global_batch=BATCH)
