"""S3: hundreds of connections held half-open at a host, each opened again as soon as it is closed.

    .venv/bin/python bench/stress/s3_half_open.py [--times 500] [--minutes 5] [--json]

--times connections are held for --minutes: a quarter says nothing, a quarter only greets, a quarter sends nearly
all of the longest frame that a host takes, and a quarter sends a byte every half second. Meanwhile a host trains
with a guest, and every ten seconds another guest joins, helps, and leaves. Its steps are compared with those of the
same run before and after, where guests come and go just so. --files bounds how many files the host may open
(RLIMIT_NOFILE, soft and hard); 0: as many as this shell may.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import resource
import statistics
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import psutil
from _campaign import begin
from _forks import Process, Trouble, fork
from _scene import Scene

from potluck.wire.frames import PART_BYTES
from support.strangers import MANNERS, Crowd

QUIET_S = 20.0
A_GUEST_EVERY_S = 10.0
JOIN_DEADLINE_S = 60.0
SLOWER = 1.05
RESULT, ENOUGH = "crowd.json", "enough-strangers"

numbers = itertools.count(1)
campaign = begin(
    "S3",
    "half-open connections held",
    times=500,
    minutes=5,
    more=lambda parser: (
        parser.add_argument("--files", type=int, default=0, help="files that the host may open"),
        parser.add_argument("--manners", default=",".join(MANNERS), help="how they are held"),
        parser.add_argument("--any-speed", action="store_true", help="do not judge the step time"),
    ),
)


def attempt(number: int, folder: Path, chance: random.Random) -> int:
    with Scene(folder) as scene:
        host = start_host(scene)
        host.until(scene.has_manifest, "run")
        guest = scene.guest("ann")
        host.until(lambda: helped(scene, "ann") >= 20, "steps with a guest")
        quiet = [guests_come_and_go(scene, host, QUIET_S)]
        alone = {f"{name}_without": value for name, value in campaign.figures.items()}
        campaign.figures.clear()
        held = hold_for(60 * campaign.minutes, scene, host, folder)
        with_crowd = alone | campaign.figures | json.loads((folder / RESULT).read_text())
        time.sleep(3.0)
        quiet.append(guests_come_and_go(scene, host, QUIET_S))
        campaign.figures = with_crowd
        judge(scene, quiet, held)
        campaign.add(steps=scene.finish(host))
        guest.succeeds()
    return campaign.times


def start_host(scene: Scene) -> Process:
    before, files = resource.getrlimit(resource.RLIMIT_NOFILE), campaign.options.files
    if not files:
        return scene.host("--wait-for", 1, "--checkpoint-every", 50)
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, before[1]))
    try:
        # The hard limit could not be raised again here: prlimit does it to the child alone.
        host = scene.host("--wait-for", 1, "--checkpoint-every", 50)
        resource.prlimit(host.pid, resource.RLIMIT_NOFILE, (files, files))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    return host


def helped(scene: Scene, name: str) -> int:
    return sum(1 for e in scene.events("step") if e["samples"].get(name))


# -- the crowd ----------------------------------------------------------------------------------------------


def hold_for(seconds: float, scene: Scene, host: Process, folder: Path) -> tuple[int, int]:
    """The steps between which the crowd was there."""
    port = json.loads((scene.run / "manifest.json").read_text())["port"]
    job = partial(hold, port, campaign.times, campaign.options.manners.split(","), folder)
    crowd = fork(job, name="crowd", log=folder / "crowd.log")
    try:
        time.sleep(2.0)
        span = guests_come_and_go(scene, host, seconds)
        (folder / ENOUGH).touch()
        crowd.succeeds(60)
        return span
    finally:
        crowd.kill()


def hold(port: int, count: int, manners: Sequence[str], folder: Path) -> int:
    """In a process of its own, until it is enough."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    crowd = Crowd(port, count, frame_bytes=PART_BYTES, manners=manners)
    while not (folder / ENOUGH).exists():
        for _ in range(5):
            crowd.turn(0.1)
        temporary = folder / f"{RESULT}.new"
        temporary.write_text(json.dumps({"held": crowd.held, "opened": crowd.opened, "closed": crowd.closed}))
        os.replace(temporary, folder / RESULT)
    crowd.close()
    return 0


# -- guests -------------------------------------------------------------------------------------------------


def guests_come_and_go(scene: Scene, host: Process, seconds: float) -> tuple[int, int]:
    """For so long, a guest every ten seconds; the steps between which that was."""
    process = psutil.Process(host.pid)
    first, ends, next_guest = scene.reached(), time.monotonic() + seconds, time.monotonic() + 1.0
    while time.monotonic() < ends:
        if not host.running():
            raise Trouble(f"the host ended with {host.status}\n{host.tail(40)}")
        campaign.most(most_files=process.num_fds(), most_rss_mb=process.memory_info().rss >> 20)
        if time.monotonic() >= next_guest:
            next_guest = time.monotonic() + A_GUEST_EVERY_S
            join_once(scene, host)
        time.sleep(0.2)
    return first, scene.reached()


def join_once(scene: Scene, host: Process) -> None:
    """A guest joins, helps at least once, and leaves."""
    name = f"guest-{next(numbers)}"
    began = time.monotonic()
    guest = scene.guest(name)
    while not helped(scene, name):
        if not guest.running() or time.monotonic() > began + JOIN_DEADLINE_S:
            raise Trouble(f"{name} did not come to help\n{guest.tail()}\n{host.tail()}")
        time.sleep(0.1)
    campaign.add(joined=1)
    campaign.most(slowest_join_s=round(time.monotonic() - began, 2))
    guest.signal(15)
    guest.wait(30)


# -- what must hold -----------------------------------------------------------------------------------------


def judge(scene: Scene, quiet_spans: Sequence[tuple[int, int]], held_span: tuple[int, int]) -> None:
    if lost := scene.events("guest_lost", machine="ann"):
        raise Trouble(f"the guest was lost: {lost}")
    quiet = [seconds for span in quiet_spans for seconds in steps_between(scene, *span)]
    held = steps_between(scene, *held_span)
    ratio = statistics.median(held) / statistics.median(quiet)
    campaign.figures |= {"steps_quiet": len(quiet), "steps_held": len(held), "step_ratio": round(ratio, 4)}
    campaign.figures["step_ratio_of_means"] = round(statistics.mean(held) / statistics.mean(quiet), 4)
    if ratio > SLOWER and not campaign.options.any_speed:
        raise Trouble(f"steps take {ratio:.3f} times as long with the crowd connected")


def steps_between(scene: Scene, first: int, last: int) -> list[float]:
    return [e["step_s"] for e in scene.events("step") if first < e["step"] <= last]


if __name__ == "__main__":
    campaign.run(attempt)
    sys.exit(campaign.end())
