"""Pictures of the page: two for the docs, from a real run of paced devices; or of each of its states, to look at.

python docs/pictures.py                       docs/images/page-live.png and page-report.png, 2 minutes
python docs/pictures.py --states FOLDER       each state at 380, 1280 and 1920 pixels, light and dark
"""

from __future__ import annotations

import argparse
import http.server
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from PIL import Image

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from potluck.lab import rigs  # noqa: E402
from potluck.spec import events as ev  # noqa: E402
from potluck.spec.events import RunEvent  # noqa: E402
from potluck.web.content import Page  # noqa: E402
from potluck.web.document import document, state_of  # noqa: E402
from potluck.web.lab_page import lab_page  # noqa: E402
from potluck.web.state import GuestAbout, GuestNow, PageState, Pulse  # noqa: E402
from support import lab_outcomes  # noqa: E402
from support import sample_events as sample  # noqa: E402
from support.browser import Browser  # noqa: E402
from support.fleet import JOB, Fleet  # noqa: E402

IMAGES = ROOT / "docs/images"
GUESTS = {"macbook": 0.16, "old-desktop": 0.32, "thinkpad": 0.64}
"""Seconds a sample; the host needs 0.08."""
WIDTHS = (380, 1280, 1920)
HIGH = 1180
"""Pixels of a picture in the docs: below that, the page goes on."""


def of_a_real_run() -> None:
    with tempfile.TemporaryDirectory() as temporary, Browser() as browser, Fleet(Path(temporary)) as fleet:
        script = Path(temporary) / "my_train.py"
        shutil.copy(JOB, script)
        host = fleet.host(
            script, "--web", "--name", "tower", "--device", "paced:0.08", arguments=["--batch", 64, "--steps", 60]
        )
        url = host.wait_for_text(r"See it in a browser: (\S+)", 60)[1]
        guests = {name: fleet.guest(name, "--device", f"paced:{seconds}") for name, seconds in GUESTS.items()}
        for name in guests:
            fleet.wait_for_event(host, "guest_joined", name)
        fleet.wait_for_step(host, 45, 300)
        guests["thinkpad"].kill()
        fleet.wait_for_event(host, "guest_lost", "thinkpad")
        fleet.wait_for_step(host, fleet.step_reached() + 3)
        browser.open(url, height=HIGH)
        browser.until("document.querySelector('#age').innerText.includes('ago')")
        picture(browser, IMAGES / "page-live.png")
        host.succeeds(120)
        report = Path(temporary) / "report.html"
        command = [sys.executable, "-m", "potluck", "report", str(fleet.folder), "--html", str(report)]
        subprocess.run(command, check=True, capture_output=True)
        browser.open(report.as_uri(), height=HIGH, dark=True)
        picture(browser, IMAGES / "page-report.png")


def picture(browser: Browser, file: Path) -> None:
    """What is seen without scrolling, with 256 colours: a third of the size."""
    browser.picture(file, whole=False)
    with Image.open(file) as image:
        image.convert("RGB").quantize(256, Image.Quantize.MAXCOVERAGE).save(file, optimize=True)


class Silent(http.server.BaseHTTPRequestHandler):
    """A live page without news, or without a connection."""

    page = b""
    lost = False

    def do_GET(self) -> None:
        stream = self.path.endswith("events")
        self.send_response(404 if stream and self.lost else 200)
        self.send_header("Content-Type", "text/event-stream" if stream else "text/html")
        self.end_headers()
        if stream and self.lost:
            return
        self.wfile.write(b": nothing new\n\n" if stream else self.page)
        if stream:
            self.wfile.flush()
            threading.Event().wait(60)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""


def states() -> Iterator[tuple[str, Page]]:
    yield "empty", PageState().page(live=True)
    waiting = state_of([ev.GuestHello(machine="macbook", address="10.0.0.7", device="mps")])
    yield "a-guest-waits-for-the-run", waiting.page(live=True)
    started = sample.run_start(steps=60), ev.GuestHello(machine="macbook", address="10.0.0.7", device="mps")
    yield "first-step", state_of(started).page(live=True)
    yield "alone", state_of(run(30, ())).page(live=True)
    yield "lost", state_after(run(30)).page(live=True)
    yield "slow-data", state_of(slow_data()).page(live=True)
    yield "trouble", state_after([*run(30), *sample.news(), *run(33)[-3:]]).page(live=True)
    yield "long-names", state_of(run(30, ("<script>alert(1)</script>", "W" * 64, "a b " * 16))).page(live=True)
    interrupted = [*run(30), sample.run_end(step=30, seconds=30.5, reason="interrupted", t_s=30.5)]
    yield "interrupted", state_after(interrupted).page(live=True)
    resuming = state_after(interrupted)
    resuming.resume()
    yield "resuming", resuming.page(live=True)
    again = sample.run_start(steps=60, resumed_from=30, t_s=2.0), sample.joined(t_s=2.2)
    yield "resumed", state_after([*interrupted, *again, *run(33)[-3:]]).page(live=True)
    yield "live", state_after(run(30)).page(live=True)
    lost = ev.GuestLost(
        machine="macbook", address="10.0.0.7", reason="sent nothing for 5.1 s", step=30, samples_taken_back=8
    )
    yield "guest-gone", state_after([*run(30), lost, *run(33, ("old-desktop",))[-3:]]).page(live=True)
    idle = sample.machine("thinkpad", 0, state="sitting out", rate=0.4, reason=SLOW, link_bytes_per_s=1e6)
    yield "sitting-out", state_after([*run(30, more=(idle,))], out=True).page(live=True)
    yield "finished", state_after([*run(60), sample.run_end(step=60, seconds=60.5, t_s=60.5)]).page()
    yield "failed", state_after([*run(30), sample.run_end(step=30, seconds=31.0, reason="failed")]).page()
    yield "killed", state_of(run(30)).page()
    crashed = state_after(run(30))
    crashed.stop()
    yield "host-gone", crashed.page(live=True)
    over = sample.run_end(step=8640, seconds=86_400.0, t_s=86_400.0)
    yield "report-of-a-day", state_after([*run(8640, every_s=10.0), over]).page()
    yield "many-guests", state_after(run(30, tuple(f"guest-{n}" for n in range(8)))).page(live=True)
    yield "guest-waits", guest_after(0).page(live=True)
    yield "guest", guest_after(40).page(live=True)
    yield "guest-without-host", guest_after(40, ev.HostGone(seconds=12.0)).page(live=True)
    end = ev.GuestEnded(samples=312, compute_s=20.0)
    yield "guest-over", guest_after(40, end).page(live=True)
    yield "guest-gave-up", guest_after(40, ev.HostGone(seconds=600.0), end).page(live=True)
    yield "notebook", state_after(run(30)).page(live=True, moment="2026-11-18 12:00:00")
    yield "lab", lab_page(*lab_outcomes.all_of(rigs.load("home-pair")))


SLOW = "cannot deliver one sample within a step: 2.50 s to compute it and 120 ms to get its samples and the weights"


def run(
    steps: int,
    names: tuple[str, ...] = ("macbook", "old-desktop"),
    more: tuple[ev.MachineFigures, ...] = (),
    every_s: float = 1.0,
) -> list[RunEvent]:
    events: list[RunEvent] = [
        sample.run_start(steps=max(steps, 60)),
        *(sample.joined(name, t_s=0.2) for name in names),
    ]
    timing: dict[str, Any] = {"receive_s": 0.1 * every_s, "send_s": 0.08 * every_s, "link_bytes_per_s": 1.1e8}
    for number in range(1, steps + 1):
        guests = []
        for i, name in enumerate(names):
            samples, answered_s = (8 if len(names) < 4 else 3) - i % 3, (0.93 - 0.05 * i) * every_s
            own: dict[str, Any] = {"rate": samples / 0.7 / every_s, "answered_s": answered_s, "micro_batch": 4}
            guests.append(sample.machine(name, samples, busy=0.7, **own, **timing))
        left = 32 - sum(guest.samples for guest in guests)
        machines = (sample.host(left, rate=left / 0.95 / every_s, micro_batch=8), *guests, *more)
        changed: dict[str, Any] = {"loss": 2 + 3 / number**0.5 + number * 7 % 5 / 20, "steps": max(steps, 60)}
        changed |= {
            "samples_per_s": 32 / every_s,
            "predicted_s": 0.93 * every_s,
            "eta_s": 30.0,
            "step_s": every_s,
            "update_s": 0.04 * every_s,
        }
        changed["speedup"] = 1.4 + number * 3 % 7 / 50 if guests else None
        events.append(sample.step(number, machines=machines, t_s=every_s * number, **changed))
        if number % 1000 == 20:
            path = f"runs/1115-gpt/checkpoints/step-{number:08}"
            events.append(ev.CheckpointSaved(step=number, path=path, seconds=0.4, t_s=every_s * number))
    return events


def slow_data() -> list[RunEvent]:
    """A run whose host waits for its samples most of the time."""
    waits: dict[str, Any] = {"data_s": 0.5, "read_s": 0.1, "speedup": 1.05, "predicted_s": 0.93, "eta_s": 30.0}
    timing: dict[str, Any] = {"receive_s": 0.01, "send_s": 0.1, "answered_s": 0.5, "link_bytes_per_s": 1.1e8}
    machines = (sample.host(24, busy=0.3, rate=80.0), sample.machine("macbook", 8, busy=0.3, rate=26.0, **timing))
    steps = [
        sample.step(n, machines=machines, t_s=float(n), steps=60, loss=2 + 3 / n, **waits) for n in range(1, 31)
    ]
    return [sample.run_start(steps=60, workers=0), sample.joined("macbook"), *steps]


def guest_after(leases: int, *more: RunEvent) -> PageState:
    guest = PageState(GuestAbout(host="tower (10.0.0.2)", run="1115-gpt", name="macbook", device="mps"))
    for n in range(1, leases):
        guest.fold(
            ev.Delivered(step=n, samples=8, loss=2 + 3 / n, compute_s=0.5, total_samples=8 * n, t_s=float(n))
        )
    for event in more:
        guest.fold(event)
    return guest


def state_after(events: list[RunEvent], *, out: bool = False) -> PageState:
    state = state_of(events)
    now = {"macbook": GuestNow(state="computing", doing="has 8 samples to compute", heard_s=0.3)}
    now |= {"thinkpad": GuestNow(state="sitting out", doing=SLOW, heard_s=0.8)} if out else {}
    state.hear(Pulse(guests=now))
    return state


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--states", type=Path, metavar="FOLDER")
    folder = parser.parse_args().states
    if folder is None:
        of_a_real_run()
        return
    folder.mkdir(parents=True, exist_ok=True)
    with Browser() as browser, http.server.ThreadingHTTPServer(("127.0.0.1", 0), Silent) as server:
        server.daemon_threads, server.block_on_close = True, False
        threading.Thread(target=server.serve_forever, daemon=True).start()
        for name, page in states():
            Silent.page = document(page, compact=name == "notebook").encode()
            Silent.lost = name == "lost"
            for width in WIDTHS:
                for dark in (False, True):
                    browser.open(f"http://127.0.0.1:{server.server_port}/", width=width, dark=dark)
                    browser.picture(folder / f"{name}-{width}-{'dark' if dark else 'light'}.png")
        server.shutdown()


if __name__ == "__main__":
    main()
