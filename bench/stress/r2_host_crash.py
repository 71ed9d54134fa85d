"""R2: kill -9 the host at a random moment with guests attached, and start it again with the same command.

    .venv/bin/python bench/stress/r2_host_crash.py [--times 100] [--minutes 30] [--json]

Some ten kills to a run. After each: every checkpoint readable, none that was acknowledged lost, at most one
checkpoint interval of steps to be computed again (and those made while the next one was being written), the
token as it was, and the guests, which nobody restarts, back by themselves. At the end: every step once with
exactly `global_batch` samples, and weights that prove every sample counted exactly once (see count_job.py).
"""

from __future__ import annotations

import random
import time
from pathlib import Path

from _campaign import begin
from _forks import Process, Trouble
from _scene import EVERY, Scene

KILLS_A_RUN = 10
campaign = begin("R2", "kill -9 the host, resume with the same command", times=100, minutes=30)


def attempt(number: int, folder: Path, chance: random.Random) -> int:
    kills = min(KILLS_A_RUN, campaign.times - campaign.done)
    with Scene(folder) as scene:
        host = scene.host("--wait-for", 1)
        host.until(scene.has_manifest, "run")
        token = (scene.run / "token").read_text()
        guests = [scene.guest(name) for name in ("ann", "bob")[: 1 + number % 2]]
        for kill in range(kills):
            try:
                host = kill_and_resume(scene, host, guests, chance)
            except Trouble as trouble:
                raise Trouble(f"kill {kill}: {trouble}\n{scene.tails()}") from None
            if (scene.run / "token").read_text() != token:
                raise Trouble(f"kill {kill}: the token is another one")
        try:
            rejoined(scene, host, guests)
            campaign.add(steps=scene.finish(host))
            for guest in guests:
                guest.succeeds()
        except Trouble as trouble:
            raise Trouble(f"{trouble}\n{scene.tails()}") from None
    return kills


def kill_and_resume(scene: Scene, host: Process, guests: list[Process], chance: random.Random) -> Process:
    """One kill: as a rule with the guests at work, at times while the host or they are still coming back."""
    if chance.random() < 0.7:
        rejoined(scene, host, guests)
        campaign.add(killed_with_guests=1)
    time.sleep(chance.uniform(0.0, 0.6))
    if not host.running():
        raise Trouble(f"the host had ended by itself, with {host.status}")
    host.kill()
    reached, acknowledged = scene.reached(), scene.acknowledged()
    saved = scene.check_checkpoints()
    # One that was being written does not count: then the one before it does.
    due = reached // EVERY * EVERY
    allowed = EVERY if acknowledged >= due else EVERY + reached - due
    if len(scene.history()) - saved > allowed:
        raise Trouble(f"killed at step {reached}, resumed at {saved}: more than an interval of {EVERY}")
    campaign.most(most_steps_again=max(0, reached - saved))
    campaign.add(steps_again=max(0, reached - saved), cut_saves=len(list(scene.run.glob("checkpoints/.tmp-*"))))
    host = scene.host(resume=True)
    if chance.random() < 0.8:
        host.until(scene.started, "start")
        scene.check_resumed(saved)
    return host


def rejoined(scene: Scene, host: Process, guests: list[Process]) -> None:
    """Until every guest is back, its weights and its gradient checked by the newest host."""
    names = {guest.name for guest in guests}
    host.until(lambda: scene.joined() >= names, "return of every guest")


campaign.run(attempt)
raise SystemExit(campaign.end())
