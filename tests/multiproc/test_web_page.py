"""The page in a real browser: it shows the report's numbers, follows a run, and asks nobody else for anything."""

from __future__ import annotations

import contextlib
import http.server
import socket
import statistics
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import msgspec
import pytest

from potluck.lab import rigs
from potluck.report.summary import read_events, summarize
from potluck.report.summary_text import HEADER, machine_cells, summary_facts
from potluck.spec import events as ev
from potluck.web.document import document, state_of
from potluck.web.lab_page import lab_page
from potluck.web.opening import WebPage
from potluck.web.serving import Serving
from potluck.web.state import GuestAbout, PageState
from support import lab_outcomes
from support import sample_events as sample
from support.browser import CHROMIUM, Browser
from support.fleet import JOB, Fleet

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="needs the Debian package chromium"),
]
EVIL = "<img src=x onerror=window.evil=1>"
DAY_S = 86_400
PAINT_MS = "performance.getEntriesByName('first-contentful-paint')[0].startTime"
SHOWN_AT = """
window.shownAt = {};
new MutationObserver(() => {
  const step = parseInt(document.querySelector('#headlines b')?.innerText);
  window.shownAt[step] ??= performance.timeOrigin + performance.now();
}).observe(document.body, {childList: true, subtree: true})
"""
"""Notes when the page showed a step first, by the clock of this machine."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as opened:
        yield opened


@pytest.fixture(scope="module")
def day(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 24 hours, unfinished, with two guests and one high loss."""
    start = [sample.run_start(steps=10_000), sample.joined(), sample.joined("pi")]
    path = sample.write(tmp_path_factory.mktemp("day"), list(start))
    machines = [sample.host(24), sample.machine("laptop", 6, link_bytes_per_s=1e7), sample.machine("pi", 2)]
    with (path / "events.jsonl").open("ab") as file:
        for number in range(1, DAY_S // 10 + 1):
            loss = 77.0 if number == 5000 else 3.0 + number % 7 / 10
            step = sample.step(number, machines=machines, t_s=10.0 * number, loss=loss, step_s=10.0, steps=10_000)
            file.write(ev.to_json(step) + b"\n")
    return path


def slowed() -> float:
    """How much longer work takes here now than on a machine that does nothing else."""
    began, used = time.perf_counter(), time.thread_time()
    while time.thread_time() - used < 0.02:
        pass
    return max(1.0, (time.perf_counter() - began) / 0.02)


def shown_facts(browser: Browser) -> list[list[str]]:
    """Labels and texts of the page's figures."""
    pair = "[e.innerText, e.nextSibling.innerText]"
    return list(browser.value(f"[...document.querySelectorAll('#figures dt')].map(e => {pair})"))


def shown_table(browser: Browser) -> list[list[str]]:
    cells = "[...row.cells].map(cell => cell.innerText)"
    return list(browser.value(f"[...document.querySelectorAll('#figures tr')].map(row => {cells})"))


def assert_quiet(browser: Browser, origin: str) -> None:
    """No error in the console, and no request to anybody else."""
    assert browser.faults == []
    assert browser.requests
    assert all(url.startswith((origin, "data:")) for url in browser.requests), browser.requests


def state_of_machine(name: str) -> str:
    card = f"[...document.querySelectorAll('.card')].find(c => c.innerText.includes('{name}'))"
    return f"({card}?.querySelector('.chip').innerText || '')"


def open_many(port: int, count: int, stack: contextlib.ExitStack) -> None:
    """Connections that ask for nothing."""
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = max(soft, 2048 if hard == resource.RLIM_INFINITY else min(2048, hard))
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
    for _ in range(min(count, wanted - 512)):
        stack.enter_context(socket.create_connection(("127.0.0.1", port), 10))


@pytest.mark.alone
@pytest.mark.timeout(120)  # three processes with torch start
def test_a_run_is_followed_and_a_killed_guest_is_shown_as_gone(browser: Browser, tmp_path: Path) -> None:
    stop = tmp_path / "stop"
    with Fleet(tmp_path) as fleet, contextlib.ExitStack() as stack:
        host = fleet.host(JOB, "--web", "--device", "paced:0.01", arguments=["--until", stop])
        url = host.wait_for_text(r"See it in a browser: (\S+)", 60)[1]
        ann = fleet.guest("ann", "--device", "paced:0.02", "--web")
        fleet.guest(EVIL, "--device", "paced:0.02")
        browser.open(url)
        for name in ("ann", "img src=x"):
            browser.until(f"{state_of_machine(name)}.includes('computing')", 60)
        assert browser.value("window.evil") is None
        assert EVIL in browser.text("#fleet")
        guest_url = ann.wait_for_text(r"See it in a browser: (\S+)", 30)[1]
        with urllib.request.urlopen(guest_url, timeout=10) as answer:
            assert b"ann helps host" in answer.read()
        # What the host knows right now, once a second.
        browser.until("/heard \\d+\\.\\d s ago/.test(document.querySelector('#fleet').innerText)")
        # The page is as new as the log.
        browser.until(f"parseInt(document.querySelector('#headlines b').innerText) >= {fleet.step_reached()}", 5)
        # Neither the run nor the page minds a thousand connections.
        before = fleet.step_reached()
        open_many(int(url.split(":")[2].split("/")[0]), 1000, stack)
        fleet.wait_for_step(host, before + 10)
        browser.until(f"parseInt(document.querySelector('#headlines b').innerText) >= {before + 10}", 5)
        assert fleet.events("guest_lost") == []
        took = [step["step_s"] for step in fleet.steps()[3:]]
        assert statistics.median(took[before:]) < 2 * statistics.median(took)
        ann.kill()
        killed = time.monotonic()
        browser.until(f"{state_of_machine('ann')}.includes('gone')", 10)
        assert time.monotonic() - killed < 6.0
        events = browser.text("#notices")
        assert "ann" in events
        browser.open(url)  # a reload
        assert "gone" in browser.value(state_of_machine("ann"))
        assert all(line in browser.text("#notices") for line in events.splitlines()[-3:])
        stop.touch()
        host.succeeds(30)
        browser.until("document.querySelector('#status').innerText === 'finished'", 5)
        summary = summarize(read_events(fleet.folder))
        assert shown_facts(browser) == [list(pair) for pair in summary_facts(summary)]
        assert shown_table(browser)[0] == list(HEADER)
        assert shown_table(browser)[1:] == [list(row) for row in machine_cells(summary.machines)]
        assert "ago" not in browser.text("#state") + browser.text("#fleet")
        assert browser.value("document.querySelector('#lost').hidden")  # it has ended: nobody is missed
        assert browser.faults == []
        assert all(address.startswith((url, "data:")) for address in browser.requests)


@pytest.mark.alone
def test_a_day_of_events_is_painted_at_once_and_updates_come_within_a_second(browser: Browser, day: Path) -> None:
    log = day / "events.jsonl"
    page = WebPage(Serving(events=str(log), address="127.0.0.1", port=0, secret="s" * 24, loopback=True))
    try:
        browser.open(page.url)  # it has read the log
        paints = []
        for _ in range(5):
            browser.open(page.url)
            paints.append(browser.value(PAINT_MS) / slowed())
        assert statistics.median(paints) <= 300, paints
        assert_quiet(browser, page.url)
        assert "8640 / 10000" in browser.text("#headlines")
        # The one high loss of the day is drawn: the axis reaches it.
        assert browser.value("data.curves.rows.length") <= 512
        assert browser.value("Math.max(...data.curves.rows.map(r => r[3]))") == 77
        browser.value(SHOWN_AT)
        took_s = []
        for number in range(8641, 8646):
            written = time.time()
            with log.open("ab") as file:
                file.write(ev.to_json(sample.step(number, steps=10_000, t_s=DAY_S + 1.0)) + b"\n")
            browser.until(f"window.shownAt[{number}]")
            took_s.append((browser.value(f"window.shownAt[{number}]") / 1000 - written) / slowed())
        assert statistics.median(took_s) < 1.0, took_s
        # What the host says of its guests does not make the last step younger.
        browser.value("came.since_step_s -= 60_000; update({machines: data.machines})")
        assert "1 min" in browser.text("#age")
        shown, summary = dict(shown_facts(browser)), summarize(read_events(day))
        assert shown == dict(summary_facts(msgspec.structs.replace(summary, ended="still going")))
        assert browser.faults == []
    finally:
        page.close()
    browser.until("document.querySelector('#status').innerText === 'host gone'", 15)  # without a word
    assert "host gone" in dict(shown_facts(browser))["steps"]
    assert "was computing" in browser.text("#fleet")


def test_the_report_opens_from_disk_and_is_small(browser: Browser, day: Path, tmp_path: Path) -> None:
    file = tmp_path / "run.html"
    command = [sys.executable, "-m", "potluck", "report", str(day), "--html", str(file)]
    subprocess.run(command, capture_output=True, timeout=60, check=True)
    done = subprocess.run(command[:-2], capture_output=True, text=True, timeout=60, check=True)
    assert file.stat().st_size < 300_000
    browser.open(file.as_uri())
    assert_quiet(browser, file.as_uri())
    for label, text in shown_facts(browser):
        assert f"{label:<12}{text}" in done.stdout.splitlines()
    assert browser.text("#status") == "still going or killed"


class Liar(http.server.BaseHTTPRequestHandler):
    """A page whose first updates are not what the page can read; the next stream is a good one."""

    events = (sample.run_start(), sample.joined(), sample.step(1))
    bad: ClassVar[list[bytes]] = [b"not JSON", b'{"machines": 5}', b'{"curves": {"rows": null}}', b"null"]
    page = document(state_of(events).page(live=True))

    def do_GET(self) -> None:
        stream = self.path.endswith("events")
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream" if stream else "text/html")
        self.end_headers()
        if not stream:
            self.wfile.write(self.page.encode())
            return
        good = msgspec.json.encode(state_of([*self.events, sample.step(2)]).page(live=True))
        self.wfile.write(b"data: " + (self.bad.pop() if self.bad else good) + b"\n\n")
        self.wfile.flush()
        self.close_connection = True
        while not self.bad and not self.server.done.wait(0.1):  # type: ignore[attr-defined]
            pass

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""


def test_updates_that_cannot_be_read_are_told_and_survived(browser: Browser) -> None:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Liar) as server:
        server.done = threading.Event()  # type: ignore[attr-defined]
        threading.Thread(target=server.serve_forever, daemon=True).start()
        browser.open(f"http://127.0.0.1:{server.server_port}/")
        browser.value("setTimeout = ((later) => (what) => later(what, 50))(setTimeout)")
        browser.until("document.querySelector('#lost').innerText.includes('could not be read')")
        browser.until("document.querySelector('#headlines b').innerText.startsWith('2')")
        browser.until("document.querySelector('#lost').hidden")
        assert browser.text("#status") == "training"
        assert "laptop" in browser.text("#fleet")
        assert browser.faults == []
        server.done.set()  # type: ignore[attr-defined]
        server.shutdown()


def test_it_fits_and_can_be_used_from_the_keyboard(browser: Browser, tmp_path: Path) -> None:
    machines = [sample.host(), *(sample.machine(f"a-guest-with-a-rather-long-name-{n}", 1) for n in range(6))]
    steps = [sample.step(n, machines=machines) for n in range(1, 30)]
    lost = ev.GuestLost(machine=machines[1].name, address="", reason="is gone", step=9, samples_taken_back=1000)
    events = [sample.run_start(), *(sample.joined(m.name) for m in machines[1:]), *steps[:9], lost, *steps[9:]]
    file = tmp_path / "run.html"
    file.write_text(document(state_of(events).page()))
    for width in (380, 1280, 1920):
        browser.open(file.as_uri(), width=width, dark=width == 1920)
        assert browser.value("document.documentElement.scrollWidth") <= width
        fits = "s => s.hidden || s.scrollWidth <= s.clientWidth + 1"
        assert browser.value(f"[...document.querySelectorAll('section, .scroll')].every({fits})")
        assert browser.value(PALE) == []
        assert browser.value(OVERLAPS) == []
        assert browser.value(LOOSE) == []
    browser.value("document.querySelector('#curves svg').focus()")
    for key in ("Home", "ArrowRight"):
        browser.call("Input.dispatchKeyEvent", type="keyDown", key=key)
    assert browser.text("#curves output").startswith("step 2: ")
    browser.value("document.querySelector('#axis').click()")
    assert browser.text("#axis") == "show over steps"
    assert browser.text("#curves-h").startswith("Curves over time")
    assert browser.faults == []


def test_the_labs_page_fits(browser: Browser, tmp_path: Path) -> None:
    file = tmp_path / "lab.html"
    file.write_text(document(lab_page(*lab_outcomes.all_of(rigs.load("home-pair")))))
    for width in (380, 1920):
        browser.open(file.as_uri(), width=width, dark=width == 1920)
        assert browser.value("document.documentElement.scrollWidth") <= width
        assert browser.value(OVERLAPS) == []
        assert browser.value(PALE) == []
        assert "computes 99 %" in browser.text("#timeline")
    assert browser.faults == []


def test_a_guest_without_a_host_shows_no_line_to_it(browser: Browser, tmp_path: Path) -> None:
    guest = PageState(GuestAbout(host="tower", run="r1", name="laptop", device="cpu"))
    file = tmp_path / "guest.html"
    for event, style in ((ev.HostBack(), "solid"), (ev.HostGone(seconds=3.0), "dotted")):
        guest.fold(event)
        file.write_text(document(guest.page()))
        browser.open(file.as_uri())
        assert browser.value("getComputedStyle(document.querySelector('.wire')).borderBottomStyle") == style
        assert browser.value(LOOSE) == []
    assert browser.faults == []


OVERLAPS = """
[...document.querySelectorAll('svg')].flatMap((svg) => {
  const boxes = [...svg.querySelectorAll('text')].map((e) => [e.textContent, e.getBoundingClientRect()]);
  const both = (p, q, from, to) => Math.min(p[to], q[to]) - Math.max(p[from], q[from]);
  return boxes.flatMap(([a, p], i) => boxes.slice(i + 1).filter(
    ([, q]) => both(p, q, 'left', 'right') > 1 && both(p, q, 'top', 'bottom') > 3
  ).map(([b]) => `${a} | ${b}`));
})
"""
"""Texts of a drawing that lie on each other."""
LOOSE = """
(() => {
  const guests = [...document.querySelectorAll('.guests li')];
  const wires = guests.map((li) => [li, li.querySelector('.wire').getBoundingClientRect()]);
  return wires.filter(([li, wire]) => {
    const line = getComputedStyle(li, '::before'), box = li.getBoundingClientRect();
    const end = box.bottom - parseFloat(line.bottom);
    return li.classList.contains('last') ? Math.abs(end - wire.bottom) > 1.5 : Math.abs(end - box.bottom) > 1.5;
  }).map(([li]) => li.innerText);
})()
"""
"""Guests at which the line from the host ends elsewhere than at the last of them."""
PALE = """
(() => {
  const parts = (colour) => colour.match(/[\\d.]+/g).map(Number);
  const light = (colour) => parts(colour).slice(0, 3).map((c) => c / 255)
    .map((c) => (c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4))
    .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = (e) => {
    const colour = getComputedStyle(e).backgroundColor;
    return (parts(colour)[3] ?? 1) ? colour : behind(e.parentElement);
  };
  return [...document.querySelectorAll('h1, h2, p, small, span, b, dt, dd, td, th, text, time, button')]
    .filter((e) => e.textContent.trim() && e.getClientRects().length)
    .filter((e) => {
      const style = getComputedStyle(e), ink = light(e.namespaceURI.endsWith('svg') ? style.fill : style.color);
      const ground = light(behind(e));
      return (Math.max(ink, ground) + 0.05) / (Math.min(ink, ground) + 0.05) < 4.5;
    }).map((e) => e.outerHTML.slice(0, 80));
})()
"""
"""Texts whose contrast is below what WCAG asks for."""
