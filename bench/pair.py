"""The prototype's rig: a host and a guest four times slower, 60 Mbit/s between them, against each alone.

    sudo .venv/bin/python bench/pair.py [--steps 14] [--json FILE]

Needs root on Linux: each machine is a network namespace, the link is shaped with tc. The devices are paced (real
mathematics, then sleep until the emulated time has passed), so the figures are stable on a small box. Prints, all
measured in this one run: seconds a step, the speed-up over the host alone, efficiency (the fleet's samples/s ÷ the
sum of what each machine reaches alone) and recovery; then the same with guests that cannot help.
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from potluck.lab.netns import Pair, Place, why_not

WARM_UP_STEPS = 4
QUIET = ["--threads", "1", "--view", "quiet", "--checkpoint-every", "0"]
MODEL = ["--depth", "4", "--sequence", "128", "--batch-tokens", "4096"]


@dataclass(frozen=True)
class Case:
    name: str
    guest_s: float
    link_mbit: float
    micro_batch: int = 2


CASES = [
    Case("guest 4x slower, 60 Mbit/s", 0.6, 60),
    Case("hopeless: guest 50x slower", 7.5, 60),
    Case("hopeless: 1 Mbit/s link", 0.6, 1),
]


def potluck(*words: str) -> list[str]:
    return [sys.executable, "-m", "potluck", *words]


def steps_of(folder: Path) -> list[dict[str, Any]]:
    """The run's steps, less those of warming up."""
    (events,) = folder.glob("*/events.jsonl")
    lines = [json.loads(line) for line in events.read_text().splitlines()]
    return [e for e in lines if e["event"] == "step"][WARM_UP_STEPS:]


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1"}


def alone(seconds_per_sample: float, steps: int, out: Path) -> list[dict[str, Any]]:
    command = potluck("train", "--guests", "0", "--device", f"paced:{seconds_per_sample}", *MODEL, *QUIET)
    command += ["--micro-batch", "2", "--steps", str(steps), "--runs", str(out)]
    subprocess.run(command, check=True, env=environment())
    return steps_of(out)


def wait_for_token(runs: Path, host: subprocess.Popen[bytes]) -> Path:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and host.poll() is None:
        if tokens := list(runs.glob("*/token")):
            return tokens[0]
        time.sleep(0.1)
    raise SystemExit(f"the host did not start (status {host.poll()}); see its output above")


def together(case: Case, host_s: float, steps: int, out: Path, number: int) -> list[dict[str, Any]]:
    with Pair(case.link_mbit, number=number) as pair:
        processes = [start_host(pair, pair.host, host_s, steps, out)]
        try:
            token = wait_for_token(out, processes[0])
            join = potluck("join", "--token-file", str(token), "--device", f"paced:{case.guest_s}")
            join += ["--name", "guest", "--threads", "1", "--micro-batch", str(case.micro_batch)]
            with open(out / "guest.log", "wb") as log:
                processes.append(
                    pair.start(pair.guest, join, env=environment(), stdout=log, stderr=subprocess.STDOUT)
                )
            if processes[0].wait(timeout=180 + 3 * steps * host_s * 32) != 0:
                raise SystemExit("the host failed")
            processes[1].wait(timeout=20)
        finally:
            for process in processes:
                if process.poll() is None:
                    process.kill()
                    process.wait()
    return steps_of(out)


def start_host(pair: Pair, place: Place, host_s: float, steps: int, out: Path) -> subprocess.Popen[bytes]:
    command = potluck("host", "--device", f"paced:{host_s}", "--name", "host", *MODEL, *QUIET)
    command += ["--micro-batch", "2", "--steps", str(steps), "--bind", place.address, "--wait-for", "1"]
    command += ["--runs", str(out)]
    return pair.start(place, command, env=environment())


def median_step(steps: list[dict[str, Any]]) -> float:
    return statistics.median(s["step_s"] for s in steps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=14)
    parser.add_argument("--host-s", type=float, default=0.15, help="seconds a sample on the host")
    parser.add_argument("--cases", type=int, default=len(CASES))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--keep", type=Path, help="keep the run folders here")
    options = parser.parse_args()
    if reason := why_not():
        raise SystemExit(f"cannot run here: {reason}")
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        base = options.keep or Path(scratch)
        folders = [base / f"{i}" for i in range(2 + len(CASES))]
        for folder in folders:
            folder.mkdir(parents=True)
        host_alone_s = median_step(alone(options.host_s, options.steps, folders[0]))
        print(f"host alone: {host_alone_s:.3f} s a step", flush=True)
        for number, case in enumerate(CASES[: options.cases]):
            steps = together(case, options.host_s, options.steps, folders[2 + number], number)
            step_s = median_step(steps)
            ratio = options.host_s / case.guest_s
            speedup = host_alone_s / step_s
            rows.append(
                {
                    "case": case.name,
                    "step_s": step_s,
                    "speedup": speedup,
                    "ideal_speedup": 1 + ratio,
                    "efficiency": speedup / (1 + ratio),
                    "recovery": (speedup - 1) / ratio,
                    "samples": [s["samples"] for s in steps],
                    "wait_s": statistics.mean(s["wait_s"] for s in steps),
                    "bytes_up": statistics.mean(s["bytes_up"] for s in steps),
                    "bytes_down": statistics.mean(s["bytes_down"] for s in steps),
                }
            )
            print(json.dumps(rows[-1]), flush=True)
    print(f"\n{'case':30} {'s/step':>7} {'speed-up':>9} {'ideal':>6} {'efficiency':>10} {'recovery':>8}")
    print(f"{'host alone':30} {host_alone_s:7.3f} {1.0:9.3f}")
    for row in rows:
        print(
            f"{row['case']:30} {row['step_s']:7.3f} {row['speedup']:9.3f} {row['ideal_speedup']:6.3f} "
            f"{row['efficiency']:10.3f} {row['recovery']:8.3f}"
        )
    if options.json:
        options.json.write_text(json.dumps({"host_alone_step_s": host_alone_s, "rows": rows}, indent=2))


if __name__ == "__main__":
    main()
