"""Guests that die, fall asleep and come late, in one run: it goes on, and every step is exactly full."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from support.fleet import JOB, Event, Fleet
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


def step_under_way(fleet: Fleet, event: Event) -> Event:
    """The step in which the event fell: the first that ended after it."""
    return next(e for e in fleet.steps() if e["t_s"] >= event["t_s"])


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="SIGSTOP")
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
        fleet.wait_for_event(host, "guest_lost", "ann")

        until.touch()
        host.succeeds(deadline_s=30)
        for guest in (bob, cai):
            guest.succeeds(deadline_s=20)
        fleet.assert_every_step_is_full(global_batch=BATCH)
        assert max(fleet.steps_with("ann")) <= killed_after + 1
        assert not set(fleet.steps_with("bob")) & set(range(asleep_after + 2, lost["step"] + 1))
        assert min(fleet.steps_with("cai")) > 5
        for name in ("ann", "bob"):
            assert_nobody_waited_for(fleet, name)


def assert_nobody_waited_for(fleet: Fleet, machine: str) -> None:
    """Its samples were taken back long before its silence was noticed, and the step computed without it."""
    taken_back = fleet.events("lease_taken_back", machine)
    assert taken_back, f"no lease of {machine} was taken back"
    lost = fleet.events("guest_lost", machine)[0]
    assert "sent nothing" in lost["reason"]
    before = [e for e in taken_back if e["t_s"] < lost["t_s"]]
    assert before, f"{machine} was lost before its lease was taken back"
    for event in before:
        step = step_under_way(fleet, event)
        # The host waits for a lease no longer than computing it takes, then computes it: at worst twice the step
        # alone. The machine may be busy; but a step that waits for the silence to be noticed is far above.
        assert step["step_s"] < 2 * BATCH * PACE_S + 1.0 < SILENCE_S
