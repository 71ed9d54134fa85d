"""R9: churn. Every few seconds a guest joins or leaves, in order or not; the host must never stand still.

    .venv/bin/python bench/stress/r9_churn.py [--minutes 20] [--times 100000] [--json]

`--times` counts joins and leaves. Up to six guests, at times none. The host is wedged if no step ends for 20 s
(`--wedged`). Runs of five minutes; at the end of each: every step once with exactly `global_batch` samples, and
weights that prove every sample counted exactly once (see count_job.py).
"""

from __future__ import annotations

import random
import signal
import time
from pathlib import Path
from typing import Any

from _campaign import begin
from _forks import Process, Trouble
from _scene import Scene

RUN_S = 300.0
MOST_GUESTS = 6
PACE_S = 0.005
ENDINGS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGSTOP)


def more(parser: Any) -> None:
    parser.add_argument("--wedged", type=float, default=20.0, help="seconds without a step")
    parser.add_argument("--pause", type=float, default=2.5, help="seconds between two changes, on average")


signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup guests would rightly stay
campaign = begin("R9", "churn: a join or a leave every few seconds", times=100_000, minutes=20, more=more)


class Churn:
    """Guests that come and go, and the eye on the host."""

    def __init__(self, scene: Scene, host: Process, chance: random.Random) -> None:
        self.scene, self.host, self.chance = scene, host, chance
        self.here: dict[str, Process] = {}
        self.asleep: list[Process] = []
        self.changes = 0
        self._size, self._grew = -1, time.monotonic()
        self._log = scene.run / "events.jsonl"

    def change(self) -> None:
        self.changes += 1
        if self.here and (len(self.here) >= MOST_GUESTS or self.chance.random() < 0.5):
            process = self.here.pop(self.chance.choice(sorted(self.here)))
            how = self.chance.choice(ENDINGS)
            process.signal(how)
            if how == signal.SIGSTOP:
                self.asleep.append(process)
            campaign.add(leaves=1)
            return
        name = f"guest-{self.changes}"
        self.here[name] = self.scene.guest(name, "--device", f"paced:{PACE_S * self.chance.choice((1, 2, 8))}")
        campaign.add(joins=1)

    def wait(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if not self.host.running():
                raise Trouble(f"the host ended with {self.host.status}")
            size = self._log.stat().st_size if self._log.exists() else 0
            if size != self._size:
                self._size, self._grew = size, time.monotonic()
            still_s = time.monotonic() - self._grew
            campaign.most(longest_pause_s=round(still_s, 2))
            if still_s > campaign.options.wedged:
                raise Trouble(f"wedged: nothing for {still_s:.0f} s")
            time.sleep(0.1)


def attempt(number: int, folder: Path, chance: random.Random) -> int:
    with Scene(folder) as scene:
        host = scene.host("--checkpoint-every", 100, "--device", f"paced:{PACE_S}")
        host.until(scene.has_manifest, "run")
        churn = Churn(scene, host, chance)
        ends = time.monotonic() + RUN_S
        try:
            while time.monotonic() < ends and campaign.done + churn.changes < campaign.times:
                if campaign.time_is_up:
                    break
                churn.change()
                churn.wait(chance.uniform(0.0, 2 * campaign.options.pause))
            for process in churn.asleep:
                process.kill()
            campaign.add(steps=scene.finish(host), runs=1)
            for process in churn.here.values():
                process.wait(30.0)
            campaign.add(guests_seen=len(scene.events("guest_joined")), lost=len(scene.events("guest_lost")))
        except Trouble as trouble:
            raise Trouble(f"{trouble}\n{scene.tails()[-4000:]}") from None
    return churn.changes


campaign.run(attempt)
raise SystemExit(campaign.end())
