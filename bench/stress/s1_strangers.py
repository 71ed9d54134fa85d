"""S1: strangers at the port of a host that trains: nobody is let in, no step takes longer, nothing leaks.

    .venv/bin/python bench/stress/s1_strangers.py [--times 10000] [--minutes 30] [--json]

Strangers of some 25 kinds knock in turn, several at once: bare connections, random bytes, HTTP, a TLS hello, old
ZMTP, greetings with NULL and PLAIN, made-up and recorded handshakes, ZeroMQ sockets with wrong keys (see
tests/support/strangers.py). Windows with and without them take turns within one run, and the medians of their steps
are compared. Afterwards all that the run has left is searched for the token and the secret keys, in any spelling.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

from _campaign import begin
from _forks import Process, Trouble, fork
from _scene import Scene

from potluck.wire.token import Token, decode
from support.leaks import leaks
from support.strangers import Strangers, record

A_RUN, A_WINDOW, AT_ONCE = 2500, 250, 8
"""Strangers in a run, in a window, and connected at the same time."""
QUIET_S = 3.0
SAMPLE_S = 0.008
"""Of host and guest: steps of an eighth of a second. Steps of 30 ms, which are Python's work mostly, were
6 % longer at a hundred strangers a second, each of whom takes half a millisecond of it."""
RESULT = "crowd.json"
SLOWER = 1.05

campaign = begin(
    "S1",
    "strangers: connects, garbage, HTTP, wrong key, replayed handshake",
    times=10_000,
    minutes=30,
    more=lambda parser: (
        parser.add_argument("--rate", type=float, default=100.0, help="strangers a second"),
        parser.add_argument("--any-speed", action="store_true", help="do not judge the step time"),
    ),
)
steps_s: dict[bool, list[float]] = {False: [], True: []}
outcomes: Counter[str] = Counter()


def attempt(number: int, folder: Path, chance: random.Random) -> int:
    wanted = min(A_RUN, campaign.times - campaign.done)
    done = 0
    with Scene(folder) as scene:
        pace = ("--device", f"paced:{SAMPLE_S}")
        host = scene.host("--wait-for", 1, "--checkpoint-every", 0, *pace)
        host.until(scene.has_manifest, "run")
        guest = scene.guest("ann", *pace)
        host.until(lambda: helped(scene) >= 20, "20 steps with a guest")
        token = decode((scene.run / "token").read_text())
        recordings = record(token, "recorded")
        while done < wanted and not campaign.time_is_up:
            window(scene, host, loud=False, work=lambda: time.sleep(QUIET_S))
            count = min(A_WINDOW, wanted - done)
            job = partial(knock, token, recordings, range(done, done + count), chance.randrange(1 << 30), folder)
            crowd = fork(job, name="strangers", log=folder / "strangers.log")
            window(scene, host, loud=True, work=partial(crowd.succeeds, 300))
            done += tell(folder / RESULT)
        campaign.add(steps=scene.finish(host))
        guest.succeeds()
        check(scene, folder)
    return done


def helped(scene: Scene) -> int:
    return sum(1 for e in scene.events("step") if e["samples"].get("ann"))


def window(scene: Scene, host: Process, *, loud: bool, work: Callable[[], None]) -> None:
    """The steps that begin and end while `work` goes on."""
    first = scene.reached() + 1
    work()
    last = scene.reached()
    if not host.running():
        raise Trouble(f"the host ended with {host.status}\n{scene.tails()}")
    found = [e for e in scene.events("step") if first < e["step"] <= last]
    if not found:
        raise Trouble(f"no step went by in a window with{'' if loud else 'out'} strangers")
    steps_s[loud] += [e["step_s"] for e in found]
    campaign.add(**{"steps_with_strangers" if loud else "steps_without": len(found)})


def knock(token: Token, recordings: list[bytes], which: range, seed: int, folder: Path) -> int:
    """In a process of its own: these strangers, AT_ONCE at a time."""
    numbers, began = iter(which), time.monotonic()
    lock = threading.Lock()
    found: Counter[str] = Counter()

    def one_after_another(seed: int) -> None:
        strangers = Strangers(port=token.port, host_public=token.host_public, recordings=recordings, seed=seed)
        while True:
            with lock:
                number = next(numbers, None)
            if number is None:
                break
            time.sleep(max(0.0, began + (number - which.start) / campaign.options.rate - time.monotonic()))
            strangers.knock(number)
        strangers.close()
        with lock:
            found.update({f"{kind}: {outcome}": n for (kind, outcome), n in strangers.outcomes.items()})
            found["accepted"] += strangers.accepted

    threads = [threading.Thread(target=one_after_another, args=(seed + i,)) for i in range(AT_ONCE)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (folder / RESULT).write_text(json.dumps(found))
    return 0


def tell(result: Path) -> int:
    found = Counter(json.loads(result.read_text()))
    campaign.add(accepted=found.pop("accepted", 0))
    outcomes.update(found)
    return sum(found.values())


def check(scene: Scene, folder: Path) -> None:
    """Nobody came in, nobody was lost, and no secret is anywhere."""
    hellos = Counter(e["machine"] for e in scene.events("guest_hello"))
    if hellos != {"ann": 1, "recorded": 1} or campaign.figures.get("accepted"):
        raise Trouble(f"somebody was let in: {hellos}, {campaign.figures.get('accepted')} accepted")
    if scene.events("guest_lost", machine="ann"):
        raise Trouble(f"the guest was lost: {scene.events('guest_lost', machine='ann')}")
    campaign.add(reported=len(scene.events("refused_stranger")))
    found = leaks(scene.run, sorted(folder.glob("*.log")))
    campaign.add(secrets_found=len(found))
    if found:
        raise Trouble("; ".join(found))


def main() -> int:
    campaign.run(attempt)
    if steps_s[True] and steps_s[False]:
        quiet, loud = statistics.median(steps_s[False]), statistics.median(steps_s[True])
        means = statistics.mean(steps_s[True]) / statistics.mean(steps_s[False])
        campaign.figures |= {"step_ratio": round(loud / quiet, 4), "step_ratio_of_means": round(means, 4)}
        campaign.figures["strangers_a_second"] = campaign.options.rate
        if loud / quiet > SLOWER and not campaign.options.any_speed:
            campaign.troubles.append(f"steps take {loud / quiet:.3f} times as long with strangers connected")
    for line, count in sorted(outcomes.items()):
        print(f"{count:6d}  {line}", file=sys.stderr)
    return campaign.end()


if __name__ == "__main__":
    sys.exit(main())
