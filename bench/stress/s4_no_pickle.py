"""S4: nothing is unpickled: the source is searched, and every command runs under an audit hook.

    .venv/bin/python bench/stress/s4_no_pickle.py [--times 1] [--minutes 10] [--json]

train with its local guest, host and join, a kill, a resume and a report: every Python process among them counts the
calls of pickle and marshal and listens to the audit events of Python (see tests/support/pickle_watch.py); reading
.pyc files is not counted. That the counting works is shown first, with a process that does unpickle something.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

from _campaign import begin
from _forks import ROOT, Trouble

from support.fleet import JOB, Fleet
from support.pickle_watch import seen, suspicions, watched

DEADLINE_S = 240.0
campaign = begin("S4", "no pickle, statically and by an audit hook over train, join, resume", times=1, minutes=10)


def attempt(number: int, folder: Path, chance: random.Random) -> None:
    found = list(suspicions(ROOT / "src" / "potluck"))
    campaign.figures |= {"suspicious_lines": len(found)}
    campaign.figures["files_searched"] = len(list((ROOT / "src" / "potluck").rglob("*.py")))
    if found:
        raise Trouble("; ".join(found))
    control(folder / "control")
    environment = watched(folder)
    before = dict(os.environ)
    os.environ |= environment
    try:
        runs = train_and_resume(folder / "train") + host_join_and_resume(folder / "host")
    finally:
        os.environ.clear()
        os.environ |= before
    processes, loads = seen(folder)
    campaign.add(commands=runs, processes_watched=processes, loads=len(loads))
    if loads:
        raise Trouble("\n".join(loads[:10]))
    if processes < runs:
        raise Trouble(f"only {processes} processes of {runs} commands were watched")


def control(folder: Path) -> None:
    """The counting counts."""
    folder.mkdir()
    words = "import pickle, collections; pickle.loads(pickle.dumps(collections.OrderedDict()))"
    subprocess.run([sys.executable, "-c", words], env={**os.environ, **watched(folder)}, check=True, timeout=60)
    processes, loads = seen(folder)
    campaign.figures["loads_seen_in_the_control"] = len(loads)
    if processes != 1 or len(loads) != 2:
        raise Trouble(f"the control saw {loads}")


def train_and_resume(folder: Path) -> int:
    """`potluck train` with its local guest; again, resumed; and its report."""
    with Fleet(folder) as fleet:
        fleet.train("--steps", "6", "--view", "plain", "--checkpoint-every", "2", guests=1).succeeds(DEADLINE_S)
        fleet.train("--resume", str(fleet.folder), "--steps", "10", "--view", "plain", guests=1).succeeds(
            DEADLINE_S
        )
        fleet.potluck("report", str(fleet.folder), name="report").succeeds(DEADLINE_S)
    return 5


def host_join_and_resume(folder: Path) -> int:
    """A script with two guests, stopped, resumed by its host; its guests come back by themselves."""
    with Fleet(folder) as fleet:
        words = ["--steps", 60, "--out", folder / "weights.safetensors"]
        host = fleet.host(
            JOB, "--wait-for", "2", "--checkpoint-every", "5", "--device", "paced:0.002", arguments=words
        )
        guests = [fleet.guest(name, "--device", "paced:0.002") for name in ("ann", "bob")]
        fleet.wait_for_step(host, 15, DEADLINE_S)
        host.kill()
        again = fleet.host(JOB, "--resume", str(fleet.folder), "--device", "paced:0.002", arguments=words)
        again.succeeds(DEADLINE_S)
        for guest in guests:
            guest.succeeds(DEADLINE_S)
    return 4


if __name__ == "__main__":
    campaign.run(attempt)
    sys.exit(campaign.end())
