"""Guests that die, fall asleep and come late, in one run: it goes on, and every step is exactly full."""

from __future__ import annotations

import signal
import socket
from pathlib import Path

import pytest

from potluck.wire.token import decode
from support.fleet import JOB, Event, Fleet, port_is_open
from support.processes import TestProcess

BATCH = 24
PACE_S = 0.04
"""Seconds a sample, on every machine: a step takes 0.96 s alone, and 0.32 s with two guests."""
SILENCE_S = 5.0
"""After this long without a word a guest is out."""
DEVICE = ["--device", f"paced:{PACE_S}", "--micro-batch", "2"]


def contributes_from(fleet: Fleet, host: TestProcess, machine: str, step: int) -> None:
    fleet.wait_for(
        host, lambda: [s for s in fleet.steps_with(machine) if s > step], f"samples of {machine} after step {step}"
    )


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="needs SIGSTOP (POSIX)")
def test_one_killed_one_asleep_one_late(tmp_path: Path) -> None:
    until = tmp_path / "enough"
    with Fleet(tmp_path) as fleet:
        host = fleet.host(JOB, "--wait-for", "2", *DEVICE, arguments=["--batch", BATCH, "--until", until])
        ann, bob = (fleet.guest(name, *DEVICE) for name in ("ann", "bob"))
        contributes_from(fleet, host, "ann", 0)
        contributes_from(fleet, host, "bob", 0)
        fleet.wait_for_step(host, 5)
        cai = fleet.guest("cai", *DEVICE)

        killed_after = fleet.step_reached()
        ann.kill()
        contributes_from(fleet, host, "cai", 0)

        asleep_after = fleet.step_reached()
        bob.stop()
        lost = fleet.wait_for_event(host, "guest_lost", "bob")
        bob.resume()
        fleet.wait_for_event(host, "guest_joined", "bob", count=2)
        contributes_from(fleet, host, "bob", lost["step"])
        ann_lost = fleet.wait_for_event(host, "guest_lost", "ann")

        until.touch()
        host.succeeds(deadline_s=30)
        for guest in (bob, cai):
            guest.succeeds(deadline_s=20)
        fleet.assert_every_step_is_full(global_batch=BATCH)
        assert max(fleet.steps_with("ann")) <= killed_after + 1
        assert not set(fleet.steps_with("bob")) & set(range(asleep_after + 2, lost["step"] + 1))
        assert min(fleet.steps_with("cai")) > 5
        assert_nobody_waited_for(fleet, ann_lost, BATCH * PACE_S)
        for taken_back in before(fleet.events("lease_taken_back", "bob"), lost):
            assert_nobody_waited_for(fleet, taken_back, BATCH * PACE_S)
        assert not port_is_open(fleet.port)


def before(events: list[Event], last: Event) -> list[Event]:
    """Those of the events that came before another one; there must be some."""
    found = [e for e in events if e["t_s"] < last["t_s"]]
    assert found, f"nothing happened before {last}"
    return found


def assert_nobody_waited_for(fleet: Fleet, event: Event, alone_s: float) -> None:
    """The step in which a guest failed was not delayed until its silence was noticed.

    The host waits for a lease no longer than computing it takes, then computes it: at worst twice the step alone.
    """
    step = next(e for e in fleet.steps() if e["t_s"] >= event["t_s"])
    room_s = 1.0  # the machine may be busy
    assert step["step_s"] < 2 * alone_s + room_s < SILENCE_S


@pytest.mark.slow
@pytest.mark.timeout(150)
def test_guests_that_stall_now_and_then_lose_leases_and_nothing_else(tmp_path: Path) -> None:
    with Fleet(tmp_path) as fleet:
        words = ["--batch", BATCH, "--steps", 70, "--jitter", 0.02]
        device = ["--device", "paced:0.003", "--micro-batch", "2"]
        host = fleet.host(JOB, "--wait-for", "2", *device, arguments=words)
        guests = [fleet.guest(name, *device) for name in ("ann", "bob")]
        host.succeeds(deadline_s=90)
        for guest in guests:
            guest.succeeds(deadline_s=20)
        fleet.assert_every_step_is_full(global_batch=BATCH, steps=70)
        assert len(fleet.events("lease_taken_back")) > 3
        # On a busy box one of them may be asked for nothing in so short a run.
        assert any(fleet.steps_with(name) for name in ("ann", "bob")), "nobody contributed"
        assert fleet.events("guest_lost") == []
        fleet.assert_nothing_left()


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no ::1")
def test_a_host_on_ipv6_trains_with_its_guest_and_the_doctor_reaches_it(tmp_path: Path) -> None:
    with Fleet(tmp_path) as fleet:
        enough = tmp_path / "enough"
        host = fleet.host(
            JOB, "--bind", "::1", "--wait-for", "1", "--device", "paced:0.002", arguments=["--until", enough]
        )
        guest = fleet.guest("ann", "--device", "paced:0.002")
        fleet.wait_for_step(host, 3)
        assert decode((fleet.folder / "token").read_text()).addresses == ("::1",)
        doctor = fleet.potluck("doctor", "--token-file", str(fleet.folder / "token"), "--json", name="doctor")
        doctor.wait(40)
        assert "::1" in doctor.stdout()
        assert "Traceback" not in doctor.stderr()
        enough.touch()
        host.succeeds(deadline_s=30)
        guest.succeeds(deadline_s=30)
        assert fleet.events("guest_joined", "ann")[0]["address"] == "::1"
        fleet.assert_every_step_is_full(global_batch=32)
