"""Bits a parameter and direction on the wire: a host and a guest that train a GPT of 10.9 M parameters.

    .venv/bin/python bench/bits.py [--codec thin] [--depth 6] [--steps 60] [--mbit 200] [--json FILE]

Real processes over a shaping proxy on 127.0.0.1, which counts every byte that it carries: gradients, the weights'
changes, samples, leases, heartbeats, and what encryption and framing add; only the headers of TCP and IP are not
seen. Counted over the longest stretch of steps to each of which the guest contributed, without the whole weights
that a newcomer gets. Both are paced (real mathematics, then sleep). Exits with 1 if a bar is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from potluck.lab.detour import read_token, write_token
from potluck.lab.proxy import ProxyProcess
from potluck.lab.shaping import LinkSpec
from potluck.plan import about
from potluck.spec.rig import Workload

MBIT = 125_000.0
HOST_S, GUEST_S, BATCH, SEQUENCE = 0.25, 0.5, 12, 64
MOST_UP, MOST_DOWN = 2.3, 2.1
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


def started(stack: ExitStack, *words: str) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [sys.executable, "-m", "potluck", *words], env=ENVIRONMENT, stdout=subprocess.DEVNULL
    )
    stack.callback(process.wait)
    stack.callback(process.terminate)
    return process


def run(options: argparse.Namespace, folder: Path, stack: ExitStack) -> list[dict[str, Any]]:
    """The steps' events, each with what the link had carried by then, up and down."""
    runs, ours = folder / "runs", folder / "token"
    model = ["--depth", str(options.depth), "--sequence", str(SEQUENCE), "--batch-tokens", str(BATCH * SEQUENCE)]
    common = ["--threads", "1", "--micro-batch", "1", "--view", "quiet"]
    length = ["--steps", str(options.steps), "--checkpoint-every", "0", "--codec", options.codec]
    network = ["--bind", "127.0.0.1", "--wait-for", "1", "--wait-s", "300"]
    device = ["--device", f"paced:{HOST_S}", "--name", "host", "--runs", str(runs)]
    host = started(stack, "host", "gpt", *model, *network, *device, *length, *common)
    while not (theirs := next(runs.glob("*/token"), None)):
        if host.poll() is not None:
            raise SystemExit("the host did not start")
        time.sleep(0.1)
    link = LinkSpec(name="link", rate_bytes_per_s=options.mbit * MBIT)
    proxy = stack.enter_context(ProxyProcess([link], folder=folder))
    token = read_token(theirs)
    port = proxy.open("link", (token.addresses[0], token.port))
    write_token(ours, replace(token, addresses=("127.0.0.1",), port=port))
    device = ["--device", f"paced:{GUEST_S}", "--name", "guest", "--threads", "1", "--micro-batch", "1"]
    started(stack, "join", "--token-file", str(ours), *device)
    steps: list[dict[str, Any]] = []
    log = theirs.with_name("events.jsonl")
    while host.poll() is None:
        time.sleep(0.02)
        carried = proxy.traffic("link")
        lines = log.read_text().splitlines() if log.exists() else []
        events = [json.loads(line) for line in lines if '"event":"step"' in line]
        steps += [{**event, "carried": carried} for event in events[len(steps) :]]
    return steps


def longest(steps: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The longest stretch of steps to each of which the guest contributed."""
    stretches: list[list[dict[str, Any]]] = [[]]
    for step in steps:
        if step["samples"].get("guest"):
            stretches[-1].append(step)
        else:
            stretches.append([])
    found = max(stretches, key=len)
    if len(found) < 2:
        raise SystemExit("the guest did not contribute to two steps in a row: this machine is too busy")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--codec", default="thin")
    parser.add_argument("--depth", type=int, default=6)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--mbit", type=float, default=200.0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        steps = run(options, Path(folder), stack)
    parameters = about.parameters(Workload(depth=options.depth, sequence=SEQUENCE))
    first, *counted = longest(steps)
    began, ended = first["carried"], counted[-1]["carried"]
    bits = [8 * (ended[way] - began[way]) / parameters / len(counted) for way in (0, 1)]
    print(
        f"{parameters:,} parameters, codec {options.codec}, {len(counted)} steps of {len(steps)}: "
        f"{bits[0]:.3f} bits up (bar {MOST_UP}), {bits[1]:.3f} down (bar {MOST_DOWN}) a parameter and step"
    )
    if options.json:
        options.json.write_text(json.dumps({"parameters": parameters, "bits": bits, "steps": len(counted)}))
    return 0 if bits[0] <= MOST_UP and bits[1] <= MOST_DOWN else 1


if __name__ == "__main__":
    sys.exit(main())
