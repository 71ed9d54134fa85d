"""How the host's cost grows with its guests: 0, 1, 2, 4, 8 and 16 of them on loopback.

    .venv/bin/python bench/guests.py [--guests 1,2,4,8,16] [--steps 14] [--json FILE]

The host is paced (real mathematics, then sleep), so that what guests cost it shows as time beyond its own
computing: own_s = the step's time − what its samples and its update take it alone. Guests are paced sixteen times
slower than the host; each delivers a few samples a step, encrypted. They yield to the host (nice): on real machines
their mathematics does not run on its cores. Prints for each number of guests the extra time
per guest as a part of the host's step alone (bar: 1 %), and the host's memory. The runs follow one another.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

WARM_UP = 4
HOST_S, GUEST_S, BATCH, SEQUENCE = 0.08, 1.28, 64, 32
# 3.3 M parameters; short samples, so that 17 machines' real mathematics fits on a small box.
MODEL = ["--depth", "4", "--sequence", str(SEQUENCE), "--batch-tokens", str(BATCH * SEQUENCE)]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
NICE = 10
BAR = 0.01


def potluck(*words: str) -> list[str]:
    return [sys.executable, "-m", "potluck", *words]


def host_command(guests: int, steps: int, runs: Path) -> list[str]:
    common = ["--device", f"paced:{HOST_S}", "--name", "host", "--threads", "1", "--micro-batch", "2"]
    common += ["--checkpoint-every", "0", "--view", "quiet", "--steps", str(steps), "--runs", str(runs), *MODEL]
    if not guests:
        return potluck("train", "--guests", "0", *common)
    return potluck("host", "--bind", "127.0.0.1", "--wait-for", str(guests), "--wait-s", "300", *common)


def run(guests: int, steps: int, runs: Path) -> tuple[list[dict[str, Any]], int]:
    """The measured steps' events, and the host's largest resident memory while they went on."""
    host = subprocess.Popen(host_command(guests, steps, runs), env=ENVIRONMENT)
    children = [host]
    try:
        children += join(guests, host, runs)
        largest, events = 0, runs / "none"
        while host.poll() is None:
            events = next(runs.glob("*/events.jsonl"), events)
            # While guests join, each is sent the replica: that is not what a step needs.
            if events.exists() and events.read_text().count('"event":"step"') >= WARM_UP:
                largest = max(largest, resident(host.pid))
            time.sleep(0.2)
        if host.returncode:
            raise SystemExit(f"the host failed with status {host.returncode}")
    finally:
        for child in children:
            if child.poll() is None:
                child.terminate()
            child.wait()
    lines = [json.loads(line) for line in events.read_text().splitlines()]
    return [e for e in lines if e["event"] == "step"][WARM_UP:], largest


def join(guests: int, host: subprocess.Popen[bytes], runs: Path) -> list[subprocess.Popen[bytes]]:
    if not guests:
        return []
    while not (token := next(runs.glob("*/token"), None)):
        if host.poll() is not None:
            raise SystemExit("the host did not start")
        time.sleep(0.1)
    started = []
    for number in range(guests):
        command = potluck("join", "--token-file", str(token), "--device", f"paced:{GUEST_S}")
        command += ["--name", f"guest-{number + 1}", "--threads", "1", "--micro-batch", "1"]
        guest = subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        psutil.Process(guest.pid).nice(NICE)
        started.append(guest)
    return started


def resident(pid: int) -> int:
    try:
        return int(psutil.Process(pid).memory_info().rss)
    except psutil.Error:
        return 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--guests", default="1,2,4,8,16")
    parser.add_argument("--steps", type=int, default=14)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    counts = [0, *(int(n) for n in options.guests.split(","))]
    rows: list[dict[str, Any]] = []
    alone_s = sample_s = update_s = 0.0
    print(f"{'guests':>6} {'s/step':>7} {'host samples':>12} {'own extra':>10} {'per guest':>9} {'memory':>9}")
    for guests in counts:
        with tempfile.TemporaryDirectory() as scratch:
            steps, memory = run(guests, options.steps, Path(scratch))
        step_s = statistics.median(e["step_s"] for e in steps)
        if not guests:
            alone_s, update_s = step_s, statistics.median(e["update_s"] for e in steps)
            sample_s = (alone_s - update_s) / BATCH
        extra = [e["step_s"] - e["samples"]["host"] * sample_s - update_s for e in steps]
        extra_s = statistics.median(extra)
        row = {
            "guests": guests,
            "step_s": step_s,
            "host_samples": statistics.mean(e["samples"]["host"] for e in steps),
            "wait_s": statistics.mean(e["wait_s"] for e in steps),
            "extra_s": extra_s,
            "extra_part_per_guest": extra_s / alone_s / guests if guests else 0.0,
            "memory_mb": memory / 1e6,
        }
        rows.append(row)
        print(
            f"{guests:6} {step_s:7.3f} {row['host_samples']:12.1f} {extra_s * 1e3:7.0f} ms "
            f"{row['extra_part_per_guest']:8.2%} {row['memory_mb']:6.0f} MB",
            flush=True,
        )
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))
    worst = max(row["extra_part_per_guest"] for row in rows)
    print(f"largest extra per guest: {worst:.2%} of the host's step alone (bar {BAR:.0%})")
    sys.exit(worst > BAR)


if __name__ == "__main__":
    main()
