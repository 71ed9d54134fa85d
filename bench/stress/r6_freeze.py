"""R6: freeze a guest (SIGSTOP, as a laptop does that falls asleep) or its network (blackhole), and let it go again.

    .venv/bin/python bench/stress/r6_freeze.py [--times 100] [--minutes 30] [--json]

Three guests, two of them behind a proxy. Each round freezes one to three of them at random moments. Each must be
named as silent within the heartbeat limit of 5 s (and `--slack` for a busy machine); no step of that time may last
longer than the host alone needs for it twice, once for waiting and once for computing what it took back; afterwards
the guest is back by itself. At the end all steps are full and every sample is counted exactly once (count_job.py).
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from _campaign import begin
from _forks import ROOT, Process, Trouble
from _scene import BATCH, Scene

from potluck.lab.proxy import ProxyProcess
from potluck.lab.shaping import Fault, LinkSpec
from potluck.wire.token import decode, encode

LIMIT_S = 5.0
FROZEN_S = 7.0
PACE_S = 0.004
ROUNDS = 10
NAMES = ("ann", "bob", "cai")


def more(parser: Any) -> None:
    parser.add_argument("--slack", type=float, default=1.0, help="seconds that a busy machine may cost")


os.environ["PYTHONPATH"] = str(ROOT / "src")  # for the proxy
campaign = begin("R6", "SIGSTOP or blackhole a guest", times=100, minutes=30, more=more)


@dataclass
class Frozen:
    name: str
    at: float
    lost_before: int
    joined_before: int
    thaw: Callable[[], None]
    thawed: bool = False


def attempt(number: int, folder: Path, chance: random.Random) -> int:
    (folder / "proxy").mkdir()
    links = [LinkSpec(name=name) for name in NAMES[1:]]
    done = 0
    with Scene(folder) as scene, ProxyProcess(links, folder=folder / "proxy") as proxy:
        host = scene.host("--wait-for", 3, "--checkpoint-every", 0, "--device", f"paced:{PACE_S}")
        host.until(scene.has_manifest, "run")
        guests = {name: guest(scene, proxy, name, folder) for name in NAMES}
        try:
            host.until(lambda: scene.helped() >= set(NAMES), "help of all")
            for _ in range(ROUNDS):
                if campaign.done + done >= campaign.times or campaign.time_is_up:
                    break
                done += one_round(scene, host, proxy, guests, chance)
            campaign.add(steps=scene.finish(host))
            for process in guests.values():
                process.succeeds()
        except Trouble as trouble:
            raise Trouble(f"{trouble}\n{scene.tails()}") from None
    return done


def guest(scene: Scene, proxy: ProxyProcess, name: str, folder: Path) -> Process:
    """One of them directly, the others through the proxy."""
    options: list[object] = ["--device", f"paced:{PACE_S}"]
    if name != NAMES[0]:
        token = decode((scene.run / "token").read_text())
        port = proxy.open(name, (token.addresses[0], token.port))
        file = folder / f"token-{name}"
        file.write_text(encode(replace(token, addresses=("127.0.0.1",), port=port)))
        options += ["--token-file", file]
    return scene.guest(name, *options)


def one_round(
    scene: Scene, host: Process, proxy: ProxyProcess, guests: dict[str, Process], chance: random.Random
) -> int:
    first = scene.reached()
    frozen = []
    for name in chance.sample(NAMES, chance.randint(1, len(NAMES))):
        time.sleep(chance.uniform(0.0, 0.3))
        frozen.append(freeze(scene, proxy, guests[name], chance))
    deadline = time.monotonic() + FROZEN_S
    while time.monotonic() < deadline:
        if not host.running():
            raise Trouble("the host ended")
        time.sleep(0.05)
    for one in frozen:
        one.thaw()
    for one in frozen:
        check_named(scene, one)
    check_steps(scene, first)
    for one in frozen:
        host.until(lambda one=one: joins(scene, one.name) > one.joined_before, f"{one.name} back again")
    return len(frozen)


def joins(scene: Scene, name: str) -> int:
    return len(scene.events("guest_joined", machine=name))


def freeze(scene: Scene, proxy: ProxyProcess, process: Process, chance: random.Random) -> Frozen:
    name = process.name
    lost = len(scene.events("guest_lost", machine=name))
    joined = joins(scene, name)
    if name != NAMES[0] and chance.random() < 0.5:
        campaign.add(blackholes=1)
        proxy.add_faults(name, [Fault(kind="blackhole", at_s=0.0, for_s=FROZEN_S)])
        return Frozen(name, time.monotonic(), lost, joined, lambda: None)
    campaign.add(stops=1)
    process.signal(signal.SIGSTOP)
    return Frozen(name, time.monotonic(), lost, joined, lambda: process.signal(signal.SIGCONT))


def check_named(scene: Scene, one: Frozen) -> None:
    """By the host's own clock, which on one machine is everybody's."""
    lost = scene.events("guest_lost", machine=one.name)[one.lost_before :]
    if not lost:
        raise Trouble(f"{one.name} was frozen for {FROZEN_S} s and nobody noticed")
    noticed_s = scene.events("run_start")[-1]["clock_s"] + lost[0]["t_s"] - one.at
    campaign.most(latest_notice_s=round(noticed_s, 2))
    if noticed_s > LIMIT_S + campaign.options.slack:
        raise Trouble(f"{one.name} was noticed after {noticed_s:.1f} s")
    if not lost[0]["reason"].startswith("sent nothing for "):
        raise Trouble(f"{one.name} was frozen and is said to have {lost[0]['reason']!r}")


def check_steps(scene: Scene, first: int) -> None:
    longest = max((e["step_s"] for e in scene.history()[first:]), default=0.0)
    campaign.most(longest_step_s=longest)
    if longest > 2 * BATCH * PACE_S + campaign.options.slack:
        raise Trouble(f"a step took {longest:.2f} s, where the host alone needs {BATCH * PACE_S:.2f} s")


campaign.run(attempt)
raise SystemExit(campaign.end())
