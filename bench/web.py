"""What the page in the browser costs the host: processor time of the process that serves it, 8 guests and 5 pages.

    python bench/web.py [--steps-per-s 1] [--seconds 30] [--guests 8] [--pages 5] [--json FILE]

A log grows as that of a run does, and readers take every update as browsers do. The processor time of the serving
process and of the host's own thread is compared with what the machine's cores have. A host that computes on all of
them loses at most that part. The claim: at most 0.2 %.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import re
import socket
import sys
import tempfile
import time
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from potluck.hub.feed import Feed  # noqa: E402
from potluck.hub.members import COMPUTING, Member  # noqa: E402
from potluck.spec import events as ev  # noqa: E402
from potluck.web.opening import PULSE_S, WebPage, _pulse  # noqa: E402
from potluck.web.serving import Serving  # noqa: E402
from support import sample_events as sample  # noqa: E402

CLAIM = 0.002


def take_updates(url: str, stop: Event) -> None:
    """An open page, but for the drawing."""
    found = re.fullmatch(r"http://([^:]+):(\d+)(/.*)", url)
    assert found is not None
    with socket.create_connection((found[1], int(found[2])), 10) as connection:
        request = f"GET {found[3]}events HTTP/1.1\r\nHost: {found[1]}:{found[2]}\r\n\r\n"
        connection.sendall(request.encode())
        connection.settimeout(0.5)
        while not stop.is_set():
            try:
                if not connection.recv(1 << 16):
                    raise SystemExit("the server dropped a page")
            except TimeoutError:
                pass


def member(number: int) -> Member:
    return Member(
        id=str(number),
        name=f"guest-{number}",
        address="",
        device="cpu",
        about={},
        last_heard=time.monotonic(),
        joined_at=0.0,
        feed=Feed(pieces=1, window_bytes=1),
        state=COMPUTING,
    )


def pulse_s(guests: int) -> float:
    """Seconds of the host's own thread for one pulse."""
    members = [member(n) for n in range(guests)]
    times = []
    for _ in range(200):
        began = time.perf_counter()
        _pulse(members)
        times.append(time.perf_counter() - began)
    return sorted(times)[len(times) // 2]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps-per-s", type=float, default=1.0)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--guests", type=int, default=8)
    parser.add_argument("--pages", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    timing: dict[str, Any] = {"link_bytes_per_s": 1e7, "receive_s": 0.1, "send_s": 0.1, "answered_s": 0.9}
    guests = [sample.machine(f"guest-{n}", 4, **timing) for n in range(options.guests)]
    with tempfile.TemporaryDirectory() as folder:
        joined = [sample.joined(guest.name) for guest in guests]
        log = sample.write(Path(folder), [sample.run_start(steps=None), *joined]) / "events.jsonl"
        serving = Serving(events=str(log), address="127.0.0.1", port=0, secret="s" * 24, loopback=True)
        members = [member(n) for n in range(options.guests)]
        page = WebPage(serving, lambda: _pulse(members))
        spawned = multiprocessing.get_context("spawn")
        stop = spawned.Event()
        readers = [spawned.Process(target=take_updates, args=(page.url, stop)) for _ in range(options.pages)]
        for reader in readers:
            reader.start()
        process = psutil.Process(page._process.pid)
        step, began, before = 0, 0.0, 0.0
        warm_until = time.monotonic() + 5.0
        while True:
            now = time.monotonic()
            if now > warm_until and not began:
                began, before = now, sum(process.cpu_times()[:2])
            if began and now - began >= options.seconds:
                break
            step += 1
            event = sample.step(step, t_s=float(step), steps=None, eta_s=None, machines=[sample.host(), *guests])
            with log.open("ab") as file:
                file.write(ev.to_json(event) + b"\n")
            time.sleep(1 / options.steps_per_s)
        used_s, wall_s = sum(process.cpu_times()[:2]) - before, time.monotonic() - began
        alive = sum(reader.is_alive() for reader in readers)
        memory = process.memory_info().rss
        stop.set()
        for reader in readers:
            reader.join(10)
        page.close()
    cores = psutil.cpu_count() or 1
    own_s = pulse_s(options.guests) / PULSE_S
    part = used_s / wall_s / cores + own_s
    print(f"{options.guests} guests, {options.pages} pages ({alive} still open), {options.steps_per_s:g} steps/s")
    print(f"serving process: {used_s:.2f} s of processor time in {wall_s:.0f} s, {memory / 1e6:.0f} MB")
    print(f"host's thread: {own_s * 1e6:.0f} µs a second")
    print(f"part of this machine's {cores} cores: {part:.3%} (claim: at most {CLAIM:.1%})")
    if options.json:
        found = {"part": part, "used_s": used_s, "wall_s": wall_s, "cores": cores}
        options.json.write_text(json.dumps(found) + "\n")
    return 0 if part <= CLAIM and alive == options.pages else 1


if __name__ == "__main__":
    sys.exit(main())
