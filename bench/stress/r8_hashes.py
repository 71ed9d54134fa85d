"""R8: the replica's hash is equal on all machines, at every step, whatever the codec; guests come and go meanwhile.

    .venv/bin/python bench/stress/r8_hashes.py [--times 10000] [--minutes 60] [--json]

A real training (AdamW, several pieces, `check_replica_every = 1`) with three guests that are killed or leave now
and then and come back: every comparison that the host makes is counted, and there must be no mismatch.
"""

from __future__ import annotations

import random
import signal
import time
from pathlib import Path

from _campaign import begin
from _forks import ROOT, Process, Trouble, potluck

JOB = ROOT / "tests" / "support" / "job.py"
NAMES = ("ann", "bob", "cai")
CODECS = ("int4", "int8", "none", "bf16", "fp16", "topk:0.05")
AT_MOST = 700
"""Comparisons to a run."""
campaign = begin("R8", "replica hash equal on all machines, joins included", times=10_000, minutes=60)


class Run:
    """A host and its guests over a temporary folder."""

    def __init__(self, folder: Path, codec: str) -> None:
        self.folder, self.until, self.number = folder, folder / "enough", 0
        (folder / "run.toml").write_text("[run]\ncheck_replica_every = 1\n")
        words = ["host", JOB, "--bind", "127.0.0.1", "--threads", 1, "--name", "host", "--view", "quiet"]
        words += ["--device", "paced:0.001", "--micro-batch", 4, "--codec", codec, "--checkpoint-every", 0]
        words += ["--config", folder / "run.toml", "--runs", folder / "runs", "--wait-for", 1]
        self.host = self.start("host", [*words, "--", "--until", self.until, "--batch", 32])
        self.host.until(lambda: list(folder.glob("runs/*/manifest.json")), "run")
        self.run = next((folder / "runs").iterdir())
        self.guests = {name: self.guest(name) for name in NAMES}

    def start(self, name: str, words: list[object]) -> Process:
        self.number += 1
        log = self.folder / f"{self.number:02d}-{name}.log"
        return potluck(words, name=name, log=log, env={"TMPDIR": str(self.folder)})

    def guest(self, name: str) -> Process:
        words = ["join", "--token-file", self.run / "token", "--name", name, "--threads", 1, "--view", "quiet"]
        return self.start(name, [*words, "--device", "paced:0.001", "--micro-batch", 4])

    def count(self, kind: str) -> int:
        file = self.run / "events.jsonl"
        return file.read_bytes().count(f'"event":"{kind}"'.encode()) if file.exists() else 0

    def close(self) -> None:
        for process in (self.host, *self.guests.values()):
            process.kill()


def attempt(number: int, folder: Path, chance: random.Random) -> int:
    codec = CODECS[number % len(CODECS)]
    run = Run(folder, codec)
    try:
        wanted = min(AT_MOST, campaign.times - campaign.done)
        while (checked := run.count("replica_checked")) < wanted and not campaign.time_is_up:
            wait(run, min(wanted, checked + chance.randint(40, 160)))
            change_somebody(run, chance)
        run.until.touch()
        run.host.succeeds()
        checked, bad = run.count("replica_checked"), run.count("replica_mismatch")
        campaign.add(runs=1, joins=run.count("guest_joined"), mismatches=bad, **{codec.partition(":")[0]: checked})
        campaign.add(put_out=(run.run / "events.jsonl").read_bytes().count(b'"put_out":true'))
        if bad:
            raise Trouble(f"{bad} mismatches with {codec}\n{run.host.tail()}")
        return checked
    finally:
        run.close()


def wait(run: Run, checked: int) -> None:
    run.host.until(lambda: run.count("replica_checked") >= checked or campaign.time_is_up, f"{checked} comparisons")


def change_somebody(run: Run, chance: random.Random) -> None:
    """One goes, in one way or another, and comes again."""
    name = chance.choice(NAMES)
    how = chance.choice((signal.SIGKILL, signal.SIGTERM, signal.SIGINT))
    run.guests[name].signal(how)
    run.guests[name].wait()
    time.sleep(chance.uniform(0.0, 0.2))
    run.guests[name] = run.guest(name)


campaign.run(attempt)
raise SystemExit(campaign.end())
