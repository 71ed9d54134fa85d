"""R1: kill -9 a random guest at a random moment, and start it again; the host must not notice but in its log.

    .venv/bin/python bench/stress/r1_guest_kills.py [--times 200] [--minutes 30] [--json]

Three guests to a run of a fixed number of steps, kills until it ends: as a rule of one that is helping, at times
of one that is still coming in. The host names each one that had said hello. At the end: the wanted number of steps,
each once with exactly `global_batch` samples, and weights that prove every sample counted exactly once (see
count_job.py).
"""

from __future__ import annotations

import random
import time
from pathlib import Path

from _campaign import begin
from _forks import Process, Trouble
from _scene import Scene

STEPS = 800
NAMES = ("ann", "bob", "cai")
campaign = begin("R1", "kill -9 a random guest at a random moment", times=200, minutes=30)


def attempt(number: int, folder: Path, chance: random.Random) -> int:
    with Scene(folder, steps=STEPS) as scene:
        host = scene.host("--wait-for", 1, "--checkpoint-every", 0)
        host.until(scene.has_manifest, "run")
        guests = {name: scene.guest(name) for name in NAMES}
        try:
            kills = kill_until_the_end(scene, host, guests, chance)
            host.succeeds()
            campaign.add(steps=scene.check_end(STEPS), runs=1, named=len(scene.events("guest_lost")))
            campaign.most(longest_step_s=max(e["step_s"] for e in scene.history()[1:]))
        except Trouble as trouble:
            raise Trouble(f"{trouble}\n{scene.tails()}") from None
    return kills


def kill_until_the_end(scene: Scene, host: Process, guests: dict[str, Process], chance: random.Random) -> int:
    kills = 0
    host.until(lambda: scene.reached() >= 3, "first steps")
    while host.running() and campaign.done + kills < campaign.times:
        name = chance.choice(NAMES)
        if chance.random() < 0.6 and not wait_for_help(scene, host, name):
            break
        time.sleep(chance.uniform(0.0, 0.3))
        if not host.running():
            break
        guests[name].kill()
        kills += 1
        guests[name] = scene.guest(name)
    return kills


def wait_for_help(scene: Scene, host: Process, name: str) -> bool:
    """Until this guest, in its newest life, has contributed; False when the run is over before."""
    joined = len(scene.events("guest_joined", machine=name))
    gone = len(scene.events("guest_lost", machine=name))
    while host.running():
        if joined > gone and helped_lately(scene, name):
            return True
        if len(scene.events("guest_joined", machine=name)) > joined:
            return True
        time.sleep(0.02)
    return False


def helped_lately(scene: Scene, name: str) -> bool:
    return any(e["samples"].get(name) for e in scene.events("step")[-3:])


campaign.run(attempt)
raise SystemExit(campaign.end())
