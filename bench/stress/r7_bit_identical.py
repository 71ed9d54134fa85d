"""R7: a run that is killed or stopped, and resumed, against one that is not: host alone, CPU, fp32, to the bit.

    .venv/bin/python bench/stress/r7_bit_identical.py [--times 20] [--minutes 20] [--json]

Each time another length, batch and checkpoint interval, with dropout (so that the random numbers must go on
where they were), AdamW, a schedule and clipping; and one to three ends by kill -9 or Ctrl-C at random moments.
All weights must be the same bits as those of the run that nobody disturbed, and so must every step's loss.
"""

from __future__ import annotations

import contextlib
import json
import random
import signal
import time
from pathlib import Path
from typing import Any

from _campaign import begin
from _forks import ROOT, Process, Trouble, potluck

JOB = ROOT / "tests" / "support" / "job.py"
INTERRUPTED = 130
campaign = begin("R7", "a resumed run against an uninterrupted one", times=20, minutes=20)


def start(folder: Path, job: list[object], *, every: int, resume: bool = False) -> Process:
    words = ["host", JOB, "--bind", "127.0.0.1", "--threads", 1, "--name", "host", "--view", "plain"]
    words += ["--device", "paced:0.0005", "--micro-batch", 4, "--checkpoint-every", every]
    (runs := folder / "runs").mkdir(parents=True, exist_ok=True)
    words += ["--resume", next(runs.iterdir())] if resume else ["--runs", runs]
    return potluck([*words, "--", *job, "--out", folder / "out.safetensors"], name="host", log=folder / "log")


def losses(folder: Path) -> dict[int, float]:
    """Of every step; where it was computed again, the last time."""
    found: dict[int, float] = {}
    for file in folder.glob("runs/*/events.jsonl"):
        for line in file.read_text().splitlines():
            event: dict[str, Any] = json.loads(line)
            if event["event"] == "step":
                found[event["step"]] = event["loss"]
    return found


def step_events(folder: Path) -> int:
    return sum(file.read_text().count('"event":"step"') for file in folder.glob("runs/*/events.jsonl"))


def attempt(number: int, folder: Path, chance: random.Random) -> None:
    steps, batch, every = chance.randint(15, 30), chance.choice([8, 12, 20]), chance.randint(2, 7)
    job: list[object] = ["--steps", steps, "--batch", batch, "--dropout", 0.2, "--width", 64]
    whole, parted = folder / "whole", folder / "parted"
    uninterrupted = start(whole, job, every=every)
    uninterrupted.succeeds()
    run = start(parted, job, every=every)
    for _ in range(chance.randint(1, 3)):
        wanted, before = chance.randrange(1, steps // 2), step_events(parted)
        with contextlib.suppress(Trouble):  # it may end before
            run.until(lambda at=before + wanted: step_events(parted) >= at, "a step")  # type: ignore[misc]
        time.sleep(chance.uniform(0, 0.02))
        if not run.running():
            break
        end(run, chance)
        run = start(parted, job, every=every, resume=True)
    run.succeeds()
    same(whole, parted, steps)


def end(run: Process, chance: random.Random) -> None:
    if chance.random() < 0.6:
        run.kill()
        campaign.add(kills=1)
    else:
        run.signal(signal.SIGINT)
        if run.wait() not in (0, INTERRUPTED):
            raise Trouble(f"Ctrl-C ended it with {run.status}\n{run.tail()}")
        campaign.add(interrupts=1)


def same(whole: Path, parted: Path, steps: int) -> None:
    from safetensors.numpy import load_file

    expected, found = (load_file(folder / "out.safetensors") for folder in (whole, parted))
    differing = [name for name in expected if expected[name].tobytes() != found[name].tobytes()]
    if differing or expected.keys() != found.keys():
        raise Trouble(f"the weights differ: {differing}")
    one, other = losses(whole), losses(parted)
    if len(one) != steps or one != other:
        raise Trouble(f"the losses differ at steps {[n for n in one if one[n] != other.get(n)]}")
    campaign.add(steps=steps, tensors=len(expected))


campaign.run(attempt)
raise SystemExit(campaign.end())
