"""What the page in the browser costs the host: steps of one run with 5 open pages and without, in turns.

    python bench/web.py [--blocks 64] [--block-steps 6] [--guests 8] [--pages 5] [--json FILE]

A host and its guests are paced devices on this machine. Readers take every update as browsers do, but draw nothing.
For every second block of steps the process that serves the page is stopped (SIGSTOP), which is as if there were no
page; so both kinds of steps see the same load of this machine. Three figures, for each the claim is at most 0.2 %:

- what steps take longer with the pages. A lease is whole samples, so steps of one run differ by some per cent that
  no page causes. Compared is therefore what a step takes the host beyond its own samples (whose time is fixed: it
  is paced) and beyond waiting for guests; its 95 % interval is bootstrapped over the pairs of blocks.
- the processor time of the serving process while it runs, as a part of the machine's cores: what a host loses whose
  own mathematics keeps all cores busy. Such a host is not run here: its guests' mathematics has the same cores.
- the time of a pulse, which the host's own process sends once a second, in both kinds of blocks.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import socket
import statistics
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import psutil

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from potluck.hub.feed import Feed  # noqa: E402
from potluck.hub.members import COMPUTING, Member  # noqa: E402
from potluck.web.opening import pulse_of  # noqa: E402
from support.fleet import JOB, Fleet  # noqa: E402

CLAIM = 0.002
HOST_S, GUEST_S, BATCH = 0.016, 0.128, 96
"""Seconds a sample, and samples a step: with 8 guests a step takes some 0.8 s."""
WARM_UP = 24
NICE = 10
"""By so much the guests yield to the host: on real machines their mathematics does not run on its cores."""


class Readers:
    """Open pages, but for the drawing. As browsers do, they open a stream again that was closed."""

    def __init__(self, url: str, count: int) -> None:
        found = re.fullmatch(r"http://([^:]+):(\d+)(/.*)", url.strip())
        assert found is not None
        self._where = found[1], int(found[2])
        self._request = f"GET {found[3]}events HTTP/1.1\r\nHost: {found[1]}:{found[2]}\r\n\r\n".encode()
        self.opened = 0
        for _ in range(count):
            threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        while True:
            with suppress(OSError), socket.create_connection(self._where) as connection:
                self.opened += 1
                connection.sendall(self._request)
                while connection.recv(1 << 16):
                    pass
            time.sleep(1.0)


def steps_in(log: Path) -> int:
    return log.read_bytes().count(b'"event":"step"')


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    blocks: dict[bool, list[tuple[int, int]]] = {True: [], False: []}
    used_s = wall_s = 0.0
    with Fleet(folder) as fleet:
        steps = WARM_UP + options.blocks * (options.block_steps + 4) + 50
        words = [
            "--web",
            "--device",
            f"paced:{HOST_S}",
            "--wait-for",
            str(options.guests),
            "--checkpoint-every",
            "0",
        ]
        host = fleet.host(JOB, *words, arguments=["--batch", BATCH, "--steps", steps])
        for number in range(options.guests):
            guest = fleet.guest(f"guest-{number}", "--device", f"paced:{GUEST_S}")
            psutil.Process(guest.pid).nice(min(19, os.nice(0) + NICE))
        url = host.wait_for_text(r"See it in a browser: (\S+)", 60)[1]
        children = psutil.Process(host.pid).children(recursive=True)
        (server,) = (child for child in children if "potluck.web.serving" in child.cmdline())
        fleet.wait_for_step(host, WARM_UP, 300)
        readers, log = Readers(url, options.pages), fleet.folder / "events.jsonl"
        for block in range(options.blocks):
            on = block % 4 in (0, 3)  # on off off on: what grows over the run falls on both
            server.send_signal(signal.SIGCONT if on else signal.SIGSTOP)
            first = steps_in(log) + 2  # the step in which it changed belongs to neither
            began, before = time.monotonic(), sum(server.cpu_times()[:2])
            while steps_in(log) < first + options.block_steps - 1:
                if host.returncode is not None:
                    sys.exit("the run has ended before the last block")
                time.sleep(0.2)  # and little work: it would disturb what is measured
            if on:
                used_s += sum(server.cpu_times()[:2]) - before
                wall_s += time.monotonic() - began
            blocks[on].append((first, first + options.block_steps))
        server.send_signal(signal.SIGCONT)
        steps_s = {step["step"]: (step["step_s"], own_s(step)) for step in fleet.steps()}
        memory = server.memory_info().rss
        again = readers.opened - options.pages
        host.kill()
    times = {on: [[steps_s[step] for step in range(*block)] for block in blocks[on]] for on in blocks}
    return {"blocks": times, "used_s": used_s, "wall_s": wall_s, "memory": memory, "again": again}


def own_s(step: dict[str, Any]) -> float:
    """What a step took the host beyond its own samples and beyond waiting for guests."""
    (samples,) = (machine["samples"] for machine in step["machines"] if machine["role"] == "host")
    return float(step["step_s"] - samples * HOST_S - step["wait_s"])


def interval(values: list[float]) -> tuple[float, float]:
    """The 95 % interval of the median, bootstrapped."""
    draw = random.Random(0)
    found = sorted(statistics.median(draw.choices(values, k=len(values))) for _ in range(4000))
    return found[100], found[-101]


def pulse_s(guests: int) -> float:
    """What a pulse takes the host's process."""
    feed = Feed(pieces=1, window_bytes=1)
    about: Any = {"address": "", "device": "", "about": {}, "last_heard": 0.0, "joined_at": 0.0, "feed": feed}
    members = [Member(id=str(n), name=f"guest-{n}", state=COMPUTING, **about) for n in range(guests)]
    reader, writer = os.pipe()
    took = []
    for _ in range(500):
        began = time.perf_counter()
        os.write(writer, msgspec.json.encode(pulse_of(members)) + b"\n")
        took.append(time.perf_counter() - began)
        os.read(reader, 1 << 16)
    os.close(reader)
    os.close(writer)
    return statistics.median(took)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--blocks", type=int, default=64)
    parser.add_argument("--block-steps", type=int, default=6)
    parser.add_argument("--guests", type=int, default=8)
    parser.add_argument("--pages", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        found = measure(options, Path(folder))
    with_s, without_s = (
        statistics.median(took for block in found["blocks"][on] for took, _ in block) for on in (True, False)
    )
    with_own_s, without_own_s = (
        [statistics.median(own for _, own in block) for block in found["blocks"][on]] for on in (True, False)
    )
    pairs = [(a - b) / without_s for a, b in zip(with_own_s, without_own_s)]
    slower, (low, high) = statistics.median(pairs), interval(pairs)
    part = found["used_s"] / found["wall_s"] / (psutil.cpu_count() or 1)
    pulse = pulse_s(options.guests)
    print(f"{options.guests} guests, {options.pages} open pages ({found['again']} of them opened again)")
    print(f"median step: {with_s * 1e3:.2f} ms with the pages, {without_s * 1e3:.2f} ms without")
    own = statistics.median(without_own_s)
    print(f"of it the host's beyond its samples and waiting: {own * 1e3:.2f} ms without the pages")
    print(f"steps are {slower:+.3%} longer with them, 95 % interval {low:+.3%} to {high:+.3%}, {len(pairs)} pairs")
    print(f"serving process: {part:.3%} of this machine's cores, {found['memory'] >> 20} MiB")
    print(f"a pulse, once a second: {pulse * 1e6:.0f} µs, {pulse:.4%}")
    print(f"(claim for each: at most {CLAIM:.1%})")
    if high - low > 2 * CLAIM:
        print("this machine is too busy to tell a difference of that size by the steps' times")
    if options.json:
        figures = {"with_s": with_s, "without_s": without_s, "slower": slower, "low": low, "high": high}
        figures |= {"part": part, "pulse_s": pulse}
        options.json.write_text(json.dumps({**figures, "pairs": pairs}) + "\n")
    return 0 if part <= CLAIM and pulse <= CLAIM and low <= CLAIM else 1


if __name__ == "__main__":
    sys.exit(main())
