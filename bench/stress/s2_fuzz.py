"""S2: a holder of the token sends anything at all: mutated messages through everything that decodes them.

    .venv/bin/python bench/stress/s2_fuzz.py [--times 1000000] [--minutes 60] [--live 20000] [--json]

--times are decoded in this process: frames, cut parts, trees, the host's protocol with steps under way, payloads of
every codec, entropy coded streams, sketches, tokens (see tests/support/fuzz.py; --target NAME: one of them alone).
Only WireError may come out, none may take a second, and all together may not grow the process by more than
MOST_GROWTH_MB. Then --live more go over real connections to a host that trains with an honest guest; its steps must
be full and that guest must stay.
"""

from __future__ import annotations

import argparse
import faulthandler
import random
import resource
import sys
import tempfile
import traceback
from pathlib import Path

import psutil
from _campaign import begin
from _forks import Trouble
from _scene import Scene
from count_job import Counter

from potluck.hub.model_tensors import ModelTensors
from potluck.wire.frames import packed_model
from potluck.wire.token import decode
from support.fuzz import SHARES, Fuzz
from support.rogue import Rogue

MOST_GROWTH_MB = 200
SLOW_S = 1.0
A_ROUND = 10_000
HANG_S = 120.0


def more_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--live", type=int, default=20_000, help="messages to a real host")
    parser.add_argument("--target", choices=[name for name, _, _ in SHARES], help="decode nothing else")


campaign = begin(
    "S2",
    "fuzzed frames after authentication",
    times=1_000_000,
    minutes=60,
    more=more_options,
)


def decode_all() -> None:
    before_mb = peak_mb()
    fuzz = Fuzz(campaign.seed, campaign.options.target)
    while campaign.done < campaign.times and not campaign.time_is_up and len(campaign.troubles) < 20:
        # What hangs in C would not be ended by an exception: then the traceback is all there will be.
        faulthandler.dump_traceback_later(HANG_S, exit=True)
        for _ in range(min(A_ROUND, campaign.times - campaign.done)):
            campaign.done += 1
            try:
                fuzz.once()
            except Exception:
                campaign.troubles.append(f"number {campaign.done}: {traceback.format_exc(limit=-4)}")
                fuzz = Fuzz(campaign.seed + campaign.done, campaign.options.target)
                break
        print(f"S2: {campaign.done} of {campaign.times}, {len(campaign.troubles)} bad", file=sys.stderr, flush=True)
    faulthandler.cancel_dump_traceback_later()
    growth_mb = peak_mb() - before_mb
    campaign.figures |= {
        "decoded": campaign.done,
        **dict(sorted(fuzz.counts.items())),
        "steps_of_the_fuzzed_host": fuzz.steps,
        "slowest_s": round(fuzz.slowest_s, 4),
        "growth_mb": growth_mb,
    }
    if fuzz.slowest_s > SLOW_S:
        campaign.troubles.append(f"one took {fuzz.slowest_s:.2f} s")
    if growth_mb > MOST_GROWTH_MB:
        campaign.troubles.append(f"the process grew by {growth_mb} MB")


def peak_mb() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // (1024 if sys.platform == "linux" else 1 << 20)


def live(folder: Path, chance: random.Random) -> None:
    """Over a real connection, to a host that goes on training."""
    with Scene(folder) as scene:
        host = scene.host("--wait-for", 1, "--checkpoint-every", 0)
        host.until(scene.has_manifest, "run")
        guest = scene.guest("ann")
        host.until(lambda: any(e["samples"].get("ann") for e in scene.events("step")), "a step with a guest")
        process = psutil.Process(host.pid)
        before_mb = process.memory_info().rss >> 20
        rogue = Rogue(decode((scene.run / "token").read_text()), chance.randrange(1 << 30), about_the_model())
        try:
            while rogue.sent < campaign.options.live and not campaign.time_is_up:
                rogue.say()
                if rogue.sent % 500 == 0:
                    campaign.most(live_growth_mb=(process.memory_info().rss >> 20) - before_mb)
                    if not host.running():
                        raise Trouble(f"the host ended with {host.status}\n{host.tail(40)}")
        finally:
            rogue.close()
        campaign.figures |= {"live_sent": rogue.sent}
        campaign.figures |= {f"live_answers: {kind}": count for kind, count in sorted(rogue.heard.items())}
        reached = scene.reached()
        host.until(lambda: scene.reached() > reached + 5, "steps after it all")
        if lost := scene.events("guest_lost", machine="ann"):
            raise Trouble(f"the honest guest was lost: {lost}")
        campaign.figures["live_steps"] = scene.finish(host)
        guest.succeeds()


def about_the_model() -> bytes:
    """What an honest guest's 'ready' says of the counting job's model."""
    tensors = ModelTensors(Counter(50_000, mark=1.0))
    return packed_model(tensors.fingerprint, {})


def main() -> int:
    decode_all()
    if campaign.options.live and not campaign.time_is_up:
        with tempfile.TemporaryDirectory(prefix="potluck-stress-", ignore_cleanup_errors=True) as folder:
            try:
                live(Path(folder), random.Random(campaign.seed))
            except Trouble as trouble:
                campaign.troubles.append(str(trouble))
    return campaign.end()


if __name__ == "__main__":
    sys.exit(main())
