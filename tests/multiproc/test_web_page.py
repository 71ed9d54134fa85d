"""The page in a real browser: it shows the report's numbers, follows a run, and asks nobody else for anything."""

from __future__ import annotations

import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from potluck.report.summary import read_events, summarize
from potluck.report.summary_text import HEADER, machine_cells, summary_facts
from potluck.spec import events as ev
from potluck.web.document import document, state_of
from potluck.web.opening import WebPage
from potluck.web.serving import Serving
from support import sample_events as sample
from support.browser import CHROMIUM, Browser
from support.fleet import JOB, Fleet

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="needs the Debian package chromium"),
]
EVIL = "<img src=x onerror=window.evil=1>"
DAY_S = 86_400


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as opened:
        yield opened


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


@pytest.mark.alone
def test_a_run_is_followed_and_a_killed_guest_is_shown_as_gone(browser: Browser, tmp_path: Path) -> None:
    stop = tmp_path / "stop"
    with Fleet(tmp_path) as fleet:
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
        assert browser.value("document.querySelector('#lost').hidden")  # it has ended: nobody is missed
        # The server ends with the run.
        assert [fault for fault in browser.faults if "ERR_CONNECTION_REFUSED" not in fault] == []
        assert all(address.startswith((url, "data:")) for address in browser.requests)


def day(folder: Path, step_s: float = 10.0) -> Path:
    """A run of 24 hours, unfinished, with two guests and one high loss."""
    path = sample.write(folder, [sample.run_start(steps=10_000), sample.joined(), sample.joined("pi")])
    machines = [sample.host(24), sample.machine("laptop", 6, link_bytes_per_s=1e7), sample.machine("pi", 2)]
    with (path / "events.jsonl").open("ab") as file:
        for number in range(1, int(DAY_S / step_s) + 1):
            loss = 77.0 if number == 5000 else 3.0 + number % 7 / 10
            changed = {"t_s": step_s * number, "loss": loss, "step_s": step_s, "steps": 10_000}
            file.write(ev.to_json(sample.step(number, machines=machines, **changed)) + b"\n")  # type: ignore[arg-type]
    return path


@pytest.mark.alone
def test_a_day_of_events_is_painted_at_once_and_updates_come_within_a_second(
    browser: Browser, tmp_path: Path
) -> None:
    folder = day(tmp_path / "day")
    log = folder / "events.jsonl"
    page = WebPage(Serving(events=str(log), address="127.0.0.1", port=0, secret="s" * 24, loopback=True))
    try:
        urllib.request.urlopen(page.url, timeout=30).close()  # it has read the log
        paints = [1e9]
        while min(paints) > 300 and len(paints) < 15:  # the best of some: others may use this machine
            browser.open(page.url)
            paints.append(browser.value("performance.getEntriesByName('first-contentful-paint')[0].startTime"))
        assert min(paints) <= 300, paints
        assert_quiet(browser, page.url)
        assert "8640 / 10000" in browser.text("#headlines")
        # The one high loss of the day is drawn: the axis reaches it.
        assert browser.value("data.curves.rows.length") <= 512
        assert browser.value("Math.max(...data.curves.rows.map(r => r[3]))") == 77
        number, took_s = 8641, [1e9]
        while min(took_s) >= 1.0 and len(took_s) < 5:
            with log.open("ab") as file:
                file.write(ev.to_json(sample.step(number, steps=10_000, t_s=DAY_S + 1.0)) + b"\n")
            took_s.append(browser.until(f"document.querySelector('#headlines').innerText.includes('{number} / ')"))
            number += 1
        assert min(took_s) < 1.0
        assert shown_facts(browser) == [list(p) for p in summary_facts(summarize(read_events(folder)))]
        assert browser.faults == []
    finally:
        page.close()
    browser.until("!document.querySelector('#lost').hidden", 15)  # a run that ended without a word
    assert "last state" in browser.text("#lost")


def test_the_report_opens_from_disk_and_is_small(browser: Browser, tmp_path: Path) -> None:
    folder, file = day(tmp_path / "day", 40.0), tmp_path / "run.html"
    command = [sys.executable, "-m", "potluck", "report", str(folder), "--html", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert file.stat().st_size < 300_000
    browser.open(file.as_uri())
    assert_quiet(browser, file.as_uri())
    for label, text in shown_facts(browser):
        assert f"{label:<12}{text}" in done.stdout.splitlines()
    assert browser.text("#status") == "no end in the log"


@pytest.mark.parametrize("width", [380, 1920])
def test_it_fits_and_can_be_used_from_the_keyboard(browser: Browser, tmp_path: Path, width: int) -> None:
    machines = [sample.host(), *(sample.machine(f"a-guest-with-a-rather-long-name-{n}", 1) for n in range(6))]
    steps = [sample.step(n, machines=machines) for n in range(1, 30)]
    events = [sample.run_start(), *(sample.joined(m.name) for m in machines[1:]), *steps]
    file = tmp_path / "run.html"
    file.write_text(document(state_of(events).page()))
    browser.open(file.as_uri(), width=width)
    assert browser.value("document.documentElement.scrollWidth") <= width
    fits = "s => s.hidden || s.scrollWidth <= s.clientWidth + 1"
    assert browser.value(f"[...document.querySelectorAll('section')].every({fits})")
    browser.value("document.querySelector('#curves svg').focus()")
    for key in ("Home", "ArrowRight"):
        browser.call("Input.dispatchKeyEvent", type="keyDown", key=key)
    assert browser.text("#curves output").startswith("step 2: ")
    browser.value("document.querySelector('#axis').click()")
    assert browser.text("#axis") == "over steps"
    assert browser.faults == []
