"""The page's server: what it refuses, whom it drops, and that nobody can make it wait or grow."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

import potluck
from potluck.errors import ConfigError, PortTakenError
from potluck.spec import events as ev
from potluck.web import opening, server
from potluck.web.follower import Follower
from potluck.web.guest_page import GuestPage
from potluck.web.opening import WebPage, place_of
from potluck.web.server import PageServer, Refused, checked_path
from potluck.web.serving import Serving
from potluck.web.state import GuestNow, PageState, Pulse
from support import sample_events as sample

SECRET = "s" * 24
GOOD = {"host": "127.0.0.1:80"}


@pytest.mark.parametrize(
    ("request_line", "headers", "status"),
    [
        ("GET / HTTP/1.1", GOOD, 403),
        (f"GET /{SECRET[:-1]}/ HTTP/1.1", GOOD, 403),
        (f"GET /{SECRET}x/ HTTP/1.1", GOOD, 403),
        ("GET /metrics HTTP/1.1", GOOD, 403),
        ("GET /é/ HTTP/1.1", GOOD, 403),
        (f"GET /{SECRET}/ HTTP/1.1", {}, 403),
        (f"GET /{SECRET}/ HTTP/1.1", {"host": "evil.example"}, 403),
        (f"GET /{SECRET}/ HTTP/1.1", {"host": "127.0.0.1.evil.example:80"}, 403),
        (f"GET /{SECRET}/ HTTP/1.1", {"host": "10.0.0.7"}, 403),
        (f"GET /{SECRET}/events HTTP/1.1", {**GOOD, "origin": "http://evil.example"}, 403),
        (f"GET /{SECRET}/events HTTP/1.1", {**GOOD, "origin": "null"}, 403),
        (f"POST /{SECRET}/ HTTP/1.1", GOOD, 405),
        (f"GET /{SECRET} HTTP/1.1", GOOD, 301),
        (f"GET /{SECRET}/", GOOD, 400),
        ("", GOOD, 400),
    ],
)
def test_refused(request_line: str, headers: dict[str, str], status: int) -> None:
    with pytest.raises(Refused) as refused:
        checked_path(request_line, headers, SECRET, loopback=True)
    assert refused.value.status == status
    assert status == 301 or SECRET not in str(refused.value)


@pytest.mark.parametrize("host", ["127.0.0.1:80", "localhost:9000", "LOCALHOST", "[::1]:80", "127.0.0.1"])
def test_this_machine_is_served_under_its_names_and_through_a_tunnel(host: str) -> None:
    own = {"host": host, "origin": f"http://{host}"}
    assert checked_path(f"GET /{SECRET}/metrics?x=1 HTTP/1.1", own, SECRET, loopback=True) == "metrics"


def test_at_another_address_only_addresses_are_its_names() -> None:
    assert checked_path(f"GET /{SECRET}/ HTTP/1.1", {"host": "10.0.0.7:80"}, SECRET, loopback=False) == ""
    with pytest.raises(Refused):
        checked_path(f"GET /{SECRET}/ HTTP/1.1", {"host": "evil.example:80"}, SECRET, loopback=False)


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("127.0.0.1", ("127.0.0.1", 0)),
        ("localhost:8080", ("127.0.0.1", 8080)),
        ("0.0.0.0:1", ("0.0.0.0", 1)),
        ("::1", ("::1", 0)),
        ("[::1]:80", ("::1", 80)),
    ],
)
def test_where_the_page_is_served(text: str, place: tuple[str, int]) -> None:
    assert place_of(text) == place


@pytest.mark.parametrize("text", ["", "True", "8080", "my-laptop", "127.0.0.1:99999", "127.0.0.1:x"])
def test_what_is_no_place_for_the_page(text: str) -> None:
    with pytest.raises(ConfigError):
        place_of(text)


# -- a real server --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sample.write(tmp_path_factory.mktemp("run"), [sample.run_start(), sample.joined(), sample.step(1)])


@pytest.fixture(scope="module")
def page(folder: Path) -> Iterator[WebPage]:
    serving = Serving(
        events=str(folder / "events.jsonl"), address="127.0.0.1", port=0, secret=SECRET, loopback=True
    )
    opened = WebPage(serving)
    yield opened
    opened.close()
    assert opened._process.returncode == 0


def port_of(page: WebPage) -> int:
    found = re.search(r":(\d+)/", page.url)
    assert found is not None
    return int(found[1])


def raw(port: int, request: bytes, *, deadline_s: float = 10.0) -> bytes:
    """Everything that the server answers."""
    with socket.create_connection(("127.0.0.1", port), deadline_s) as connection:
        connection.sendall(request)
        answer = b""
        with contextlib.suppress(ConnectionResetError):
            while data := connection.recv(1 << 16):
                answer += data
        return answer


def get(port: int, path: str, **headers: str) -> tuple[int, dict[str, str], bytes]:
    given = {"Host": f"127.0.0.1:{port}", **headers}
    lines = "".join(f"{name}: {value}\r\n" for name, value in given.items())
    head, _, body = raw(port, f"GET {path} HTTP/1.1\r\n{lines}\r\n".encode()).partition(b"\r\n\r\n")
    first, *rest = head.decode().split("\r\n")
    return int(first.split()[1]), dict(line.split(": ", 1) for line in rest), body


def test_the_page_status_and_metrics(page: WebPage) -> None:
    port = port_of(page)
    status, headers, body = get(port, f"/{SECRET}/")
    assert (status, headers["Content-Type"]) == (200, "text/html; charset=utf-8")
    assert b'id="data"' in body
    assert "default-src 'none'" in headers["Content-Security-Policy"]
    assert headers["X-Frame-Options"] == "DENY"
    assert "Access-Control-Allow-Origin" not in headers
    _, headers, body = get(port, f"/{SECRET}/status.json")
    found = json.loads(body)
    assert (found["version"], found["step"], found["machines"][1]["name"]) == (1, 1, "laptop")
    _, headers, body = get(port, f"/{SECRET}/metrics")
    assert headers["Content-Type"].startswith("text/plain; version=0.0.4")
    assert b"potluck_step 1.0" in body


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/wrong/",
        f"/{SECRET}/../{SECRET}/status.json",
        f"/{SECRET}/../../../../etc/passwd",
        f"/{SECRET}/%2e%2e/%2e%2e/etc/passwd",
        f"/{SECRET}//etc/passwd",
        f"/{SECRET}/static/page.js",
        f"/{SECRET}/events.jsonl",
        "/..%2f..%2fetc/passwd",
    ],
)
def test_nothing_else_is_served(page: WebPage, path: str) -> None:
    status, _, body = get(port_of(page), path)
    assert status in (403, 404)
    assert len(body) < 100
    assert SECRET.encode() not in body


def test_what_is_no_request_is_ended(page: WebPage) -> None:
    port = port_of(page)
    for request in (b"\0" * 64 + b"\r\n\r\n", b"GET / HTTP/1.1\r\nno header\r\n\r\n", b"x" * 20_000):
        answer = raw(port, request)
        assert not answer or answer.startswith(b"HTTP/1.1 4")
    assert get(port, f"/{SECRET}/")[0] == 200


@pytest.mark.slow
def test_a_thousand_connections_are_closed_and_the_page_is_still_served(page: WebPage) -> None:
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2048 if hard == resource.RLIM_INFINITY else min(2048, hard)
    if wanted < 1500:
        pytest.skip("this process may not open so many files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))
    port = port_of(page)
    with contextlib.ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        opened = [stack.enter_context(socket.create_connection(("127.0.0.1", port), 10)) for _ in range(1000)]
        assert get(port, f"/{SECRET}/")[0] == 200
        server_files = psutil.Process(page._process.pid).num_fds()
        assert server_files < server.MOST_CONNECTIONS + 40
        assert len(opened) == 1000


def test_updates_are_sent_to_a_page_that_is_open(page: WebPage, folder: Path) -> None:
    port = port_of(page)
    with socket.create_connection(("127.0.0.1", port), 10) as connection:
        connection.sendall(f"GET /{SECRET}/events HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n\r\n".encode())
        stream = connection.makefile("rb")
        assert b"200 OK" in stream.readline()
        first = next(line for line in stream if line.startswith(b"data: "))
        assert json.loads(first[6:])["title"] == "1115-gpt"
        for number in (2, 3):
            with (folder / "events.jsonl").open("ab") as file:
                file.write(ev.to_json(sample.step(number)) + b"\n")
            for news in map(data_of, stream):  # within the socket's 10 s
                if any(step["step"] == number for step in news.get("steps", ())):
                    break
            assert news["curves"]["rows"][-1][0] == number
        assert "title" not in news  # only what has changed


def data_of(line: bytes) -> dict[str, Any]:
    """An update in a line of the stream; empty in other lines."""
    return dict(json.loads(line[6:])) if line.startswith(b"data: ") else {}


def test_pulses_that_cannot_be_read_are_passed_over(page: WebPage) -> None:
    now = GuestNow(state="late", doing="has 8 samples to compute", heard_s=1.5)
    good = msgspec.json.encode(Pulse(guests={"laptop": now, "a guest that is not there": now}))
    bad = [
        b"",
        b"\xff\xfe\x00",
        good[:40],
        b"null",
        b'{"guests": 5}',
        b'{"guests": {"laptop": {"state": 1}}}',
        b"x" * 10**6,
    ]
    assert page._process.stdin is not None
    for line in (*bad, good):
        page._process.stdin.write(line + b"\n")
    page._process.stdin.flush()
    deadline = time.monotonic() + 10
    while (laptop := json.loads(get(port_of(page), f"/{SECRET}/status.json")[2])["machines"][1])["heard_s"] is None:
        assert time.monotonic() < deadline
    assert (laptop["name"], laptop["state"], laptop["reason"]) == ("laptop", "late", "has 8 samples to compute")


def test_the_first_page_says_what_would_help(tmp_path: Path) -> None:
    slow = sample.machine("laptop", 2, rate=20.0, link_bytes_per_s=2e6)
    folder = sample.write(tmp_path, [sample.run_start(), sample.step(1, machines=[sample.host(30), slow])])
    follower = Follower(folder / "events.jsonl", PageState)
    assert follower.read()
    assert PageServer(follower, SECRET, loopback=True)._page().advice
    follower.close()


def test_with_each_step_a_page_is_sent_its_age(tmp_path: Path) -> None:
    folder = sample.write(tmp_path, [sample.run_start()])
    follower = Follower(folder / "events.jsonl", lambda: PageState(clock=lambda: 1.0))  # each age is 0
    made = PageServer(follower, SECRET, loopback=True)
    for number in (1, 2, 3):
        with (folder / "events.jsonl").open("ab") as file:
            file.write(ev.to_json(sample.step(number)) + b"\n")
        assert follower.read()
        changed = made._changed()
        assert changed is not None
        assert changed.since_step_s == 0.0
    follower.close()


def test_the_port_of_somebody_else_is_an_error_that_says_so(folder: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        serving = Serving(events="", address="127.0.0.1", port=port, secret=SECRET, loopback=True)
        with pytest.raises(PortTakenError, match=f"127.0.0.1:{port}"):
            WebPage(serving)


# -- a slow reader --------------------------------------------------------------------------------------


def test_a_reader_that_does_not_read_is_dropped_and_others_are_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("UPDATE_S", 0.005), ("REQUEST_S", 0.3)):
        monkeypatch.setattr(server, name, value)
    folder = sample.write(tmp_path, [sample.run_start()])
    path = folder / "events.jsonl"
    port, dropped, ended = [0], threading.Event(), threading.Event()

    async def serve() -> None:
        made = PageServer(Follower(path, PageState), SECRET, loopback=True)
        listening = await asyncio.start_server(made.serve, "127.0.0.1", 0)
        port[0] = listening.sockets[0].getsockname()[1]
        following = asyncio.create_task(made.follow())
        most = 0
        while not ended.is_set():
            await asyncio.sleep(0.01)
            most = max(most, len(made._readers))
            if len(made._readers) < most == 2:
                dropped.set()
        made.stop()
        await following
        listening.close()

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    try:
        while not port[0]:
            time.sleep(0.01)
        request = f"GET /{SECRET}/events HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()
        with socket.socket() as slow, socket.socket() as good, path.open("ab") as file:
            slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            for reader in (slow, good):
                reader.connect(("127.0.0.1", port[0]))
                reader.sendall(request)
            good.settimeout(0.02)
            deadline = time.monotonic() + 20
            number, taken = 0, b""
            while not dropped.is_set():
                assert time.monotonic() < deadline
                for _ in range(50):
                    number += 1
                    file.write(ev.to_json(ev.RunNote(text=f"{number} " + "x" * 280)) + b"\n")
                file.flush()
                with contextlib.suppress(TimeoutError):
                    while data := good.recv(1 << 20):
                        taken += data
                    assert data, "the reader that reads was dropped"
            taken = b""
            file.write(ev.to_json(ev.RunNote(text="the last word")) + b"\n")
            file.flush()
            good.settimeout(10)
            while b"the last word" not in taken:
                taken += good.recv(1 << 20)
    finally:
        ended.set()
        thread.join(10)


# -- in a run -------------------------------------------------------------------------------------------


def serving_processes() -> set[psutil.Process]:
    return {child for child in psutil.Process().children() if "potluck.web.serving" in child.cmdline()}


@pytest.mark.slow
def test_nothing_listens_unless_asked_for_and_nothing_is_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = serving_processes()
    script = tmp_path / "job.py"
    script.write_text("import potluck\n")
    keywords: dict[str, Any] = {"host": True, "view": "plain", "script": script, "bind": "127.0.0.1"}
    with potluck.start(runs=tmp_path / "a", **keywords) as run:
        assert run.page_url is None
        shown = run._repr_html_()  # type: ignore[attr-defined]
        assert shown.startswith('<iframe sandbox="allow-scripts"')  # what a notebook shows
        assert serving_processes() == before
    with potluck.start(runs=tmp_path / "b", web=True, **keywords) as run:
        url = run.page_url
        assert url is not None
        assert url in capsys.readouterr().out
        port, secret = re.fullmatch(r"http://127\.0\.0\.1:(\d+)/([\w-]{24})/", url).groups()  # type: ignore[union-attr]
        file = next((tmp_path / "b").glob("*/web"))
        assert file.read_text() == url + "\n"
        assert file.stat().st_mode & 0o077 == 0
        assert get(int(port), f"/{secret}/")[0] == 200
        (child,) = serving_processes() - before
        assert secret not in " ".join(child.cmdline())
        assert secret not in " ".join(child.environ().values())
        if sys.platform == "linux":
            assert "torch" not in " ".join(m.path for m in child.memory_maps())
    assert not child.is_running()
    with pytest.raises(OSError):
        get(int(port), f"/{secret}/")


def test_a_resumed_run_has_its_page_where_it_was(tmp_path: Path) -> None:
    file = tmp_path / "web"
    assert opening._last(file)[1] == 0
    file.write_text(f"http://127.0.0.1:1234/{SECRET}/\n")
    assert opening._last(file) == (SECRET, 1234)


def test_a_guest_that_asks_for_it_has_a_page(tmp_path: Path) -> None:
    told: list[str] = []
    heard: list[str] = []

    class View:
        def __getattr__(self, name: str) -> Any:
            return lambda *args, **more: heard.append(name)

    page = GuestPage(View(), "127.0.0.1", told.append)  # type: ignore[arg-type]
    page.joined(host="tower", address="10.0.0.2", run="r1", name="laptop", device="cpu")
    page.event(ev.Delivered(step=3, samples=8, loss=1.0, compute_s=0.5, total_samples=16))
    page.missing(2.0, 600.0)
    try:
        port, secret = re.fullmatch(r"http://127\.0\.0\.1:(\d+)/([\w-]+)/", told[0]).groups()  # type: ignore[union-attr]
        deadline = time.monotonic() + 10  # it reads its log several times a second
        while b"host gone for 2.00 s" not in (body := get(int(port), f"/{secret}/")[2]):
            assert time.monotonic() < deadline
        assert b"laptop helps tower (10.0.0.2)" in body
    finally:
        page.close()
    assert heard == ["joined", "event", "missing", "close"]
    with pytest.raises(OSError):
        get(int(port), f"/{secret}/")
