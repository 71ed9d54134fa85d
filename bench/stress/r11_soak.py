"""R11: a soak with three guests; memory and file descriptors of the host and of the guests must stay flat.

    .venv/bin/python bench/stress/r11_soak.py [--minutes 60] [--json]

Measures every few seconds; the first quarter is the warm-up. Prints for each machine the slope of a line through
the rest (KiB and descriptors a minute) and how much more there was in the last quarter than in the second. Bad: a
descriptor more, or memory that grew by more than `--growth` of what it was. At the end the run is checked as in R9.
"""

from __future__ import annotations

import random
import statistics
import time
from pathlib import Path
from typing import Any

import psutil
from _campaign import begin
from _forks import Process, Trouble
from _scene import Scene

NAMES = ("ann", "bob", "cai")
PACE_S = 0.01


def more(parser: Any) -> None:
    parser.add_argument("--growth", type=float, default=0.02, help="the largest part by which memory may grow")
    parser.add_argument("--look", type=float, default=5.0, help="seconds between two measurements")


FEWEST = 16
"""Measurements, however short the soak is."""
campaign = begin("R11", "soak with 3 guests: memory and descriptors flat", times=1, minutes=60, more=more)


class Measured:
    """One process over time."""

    def __init__(self, process: Process) -> None:
        self.name, self._process = process.name, psutil.Process(process.pid)
        self.minutes: list[float] = []
        self.kib: list[float] = []
        self.files: list[float] = []

    def look(self) -> None:
        self.minutes.append(time.monotonic() / 60)
        self.kib.append(self._process.memory_info().rss / 1024)
        self.files.append(self._process.num_fds())

    def judge(self) -> None:
        quarter = len(self.minutes) // 4
        if quarter < 3:
            raise Trouble("too few measurements")
        minutes = self.minutes[quarter:]
        kib_slope, file_slope = (
            statistics.linear_regression(minutes, values[quarter:]).slope for values in (self.kib, self.files)
        )
        second, last = slice(quarter, 2 * quarter), slice(-quarter, None)
        grew = statistics.median(self.kib[last]) / statistics.median(self.kib[second]) - 1
        files = max(self.files[last]) - max(self.files[second])
        campaign.figures |= {
            f"{self.name}_kib_a_minute": round(kib_slope, 1),
            f"{self.name}_mib": round(statistics.median(self.kib[last]) / 1024, 1),
            f"{self.name}_grew": round(grew, 4),
            f"{self.name}_files_a_minute": round(file_slope, 3),
            f"{self.name}_files": int(max(self.files[last])),
        }
        if grew > campaign.options.growth or files > 0:
            campaign.troubles.append(f"{self.name}: memory grew by {grew:.1%}, descriptors by {files:.0f}")


def attempt(number: int, folder: Path, chance: random.Random) -> None:
    with Scene(folder) as scene:
        host = scene.host("--wait-for", 3, "--checkpoint-every", 500, "--device", f"paced:{PACE_S}")
        host.until(scene.has_manifest, "run")
        guests = [scene.guest(name, "--device", f"paced:{PACE_S}") for name in NAMES]
        try:
            host.until(lambda: scene.helped() >= set(NAMES), "help of all")
            measured = [Measured(process) for process in (host, *guests)]
            campaign.began = time.monotonic()  # the start is no part of the soak, however long it took
            while not campaign.time_is_up or len(measured[0].minutes) < FEWEST:
                for one in measured:
                    one.look()
                deadline = time.monotonic() + campaign.options.look
                while time.monotonic() < deadline:
                    for process in (host, *guests):
                        if not process.running():
                            raise Trouble(f"{process.name} ended with {process.status}")
                    time.sleep(0.2)
            for one in measured:
                one.judge()
            campaign.add(steps=scene.finish(host))
            for guest in guests:
                guest.succeeds()
            lost = scene.events("guest_lost")
            campaign.add(lost=len(lost), compared=len(scene.events("replica_checked")))
            if scene.events("replica_mismatch"):
                raise Trouble("replicas differed")
        except Trouble as trouble:
            raise Trouble(f"{trouble}\n{scene.tails()[-4000:]}") from None


campaign.run(attempt)
raise SystemExit(campaign.end())
