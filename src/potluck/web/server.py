"""Serves the page: HTTP and server-sent events, read-only, to every browser that has the address with its secret.

No client can block it or make it use more memory: requests are short and have a deadline, connections are limited,
and a reader that does not read its updates is dropped.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import socket
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass

import msgspec
from msgspec import structs

from potluck.web.content import Curves, Page
from potluck.web.document import document, policy
from potluck.web.follower import Follower
from potluck.web.metrics import Status, metrics_text, status_of
from potluck.web.state import Pulse

REQUEST_S = 5.0
"""Time for a request to arrive, and for an answer or an update to be taken."""
MOST_REQUEST_BYTES = 8192
MOST_CONNECTIONS = 64
"""The most connections of each kind: those that have not shown the secret (the oldest is closed), and open
pages."""
SEND_BUFFER_BYTES = 1 << 17
UPDATE_S = 0.45
"""Seconds between two reads of the log, each followed by an update of the open pages if the log has new events.
Every wake-up costs: with twice as many, and one for each pulse, this process took a quarter more processor time."""
PULSE_S = 0.85
"""Seconds between two updates where the log has none."""
QUIET_S = 15.0
"""After this many seconds without an update an open page gets an empty one."""
ADVICE_PART = 5e-4
"""Part of the time that may be spent on what would help most."""
_HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}
_REASONS = {200: "OK", 301: "Moved Permanently", 400: "Bad Request", 403: "Forbidden", 404: "Not Found"}
_REASONS |= {405: "Method Not Allowed", 503: "Service Unavailable"}


class Refused(Exception):
    """An answer other than the page."""

    def __init__(self, status: int, words: str) -> None:
        super().__init__(words)
        self.status = status


def checked_path(request: str, headers: Mapping[str, str], secret: str, *, loopback: bool) -> str:
    """The requested path below the secret. Raises `Refused`. `loopback`: serve only this machine."""
    method, _, rest = request.partition(" ")
    target, _, version = rest.partition(" ")
    if not version.startswith("HTTP/1."):
        raise Refused(400, "this is a page for a browser")
    host = headers.get("host", "")
    if not _is_own_name(host, loopback=loopback):
        # A name that an attacker's name server points here would make a foreign page the same origin as this.
        raise Refused(403, "open this page with the address that the run printed")
    if headers.get("origin", f"http://{host}") != f"http://{host}":
        raise Refused(403, "a page of another site requested this")
    first, _, path = target.partition("?")[0].removeprefix("/").partition("/")
    if not hmac.compare_digest(first.encode(), secret.encode()):
        raise Refused(403, "open this page with the address that the run printed: it contains a secret")
    if method != "GET":
        raise Refused(405, "this page can only be read")
    if target.partition("?")[0] == f"/{secret}":
        raise Refused(301, f"/{secret}/")
    return path


def _is_own_name(host: str, *, loopback: bool) -> bool:
    """Whether it is an IP address or localhost, with any port, because a tunnel has its own port."""
    name = host[1:].partition("]")[0] if host.startswith("[") else host.rpartition(":")[0] or host
    if name.lower() == "localhost":
        return True
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        return False
    return address.is_loopback or not loopback


@dataclass(slots=True)
class _OpenPage:
    """An open page."""

    transport: asyncio.WriteTransport
    stuck_since: float | None = None
    """Since when it has not read everything that was sent."""


class PageServer:
    """Follows a run and serves its page until `stop`."""

    def __init__(self, follower: Follower, secret: str, *, loopback: bool) -> None:
        self._follower, self._secret, self._loopback = follower, secret, loopback
        self._readers: dict[int, _OpenPage] = {}
        self._strangers: OrderedDict[int, asyncio.StreamWriter] = OrderedDict()
        self._loaded = asyncio.Event()
        self._stopping = False
        self._news = False
        """Whether the log has something that the open pages lack."""
        self._sent_at = 0.0
        self._sent, self._shown = Page(), follower.state
        self._sent_rows = self._sent_merges = self._sent_step = 0
        self._advice: list[str] = []
        self._advice_due = 0.0

    # -- what has happened ------------------------------------------------------------------------------

    async def follow(self) -> None:
        """Read the log and send the open pages what is new, until `stop`; then once more."""
        while self._follower.read():
            await asyncio.sleep(0)
        self._loaded.set()
        updated = 0.0
        while not self._stopping:
            await asyncio.sleep(UPDATE_S)
            while self._follower.read():
                self._news = True
                await asyncio.sleep(0)
            now = time.monotonic()
            if self._stopping:
                self._follower.state.stop()
            if self._stopping or self._news or now - updated >= PULSE_S:
                updated = now
                self._update(now)
        await asyncio.sleep(0.3)  # the last update is on its way

    def hear(self, pulse: Pulse) -> None:
        """Show this with the next update. Callable from any thread."""
        self._follower.state.hear(pulse)

    def stop(self) -> None:
        """The run's process has ended, or closes its page."""
        self._stopping = self._news = True

    def _page(self, *, steps_after: int = 0) -> Page:
        self._advise()
        return self._follower.state.page(live=True, steps_after=steps_after, advice=self._advice)

    def _advise(self) -> None:
        """Compute occasionally what would help most; with several guests this takes 0.1 s."""
        state, now = self._follower.state, time.monotonic()
        if now >= self._advice_due and state.run.step is not None:
            self._advice = state.helping()
            took_s = time.monotonic() - now
            self._advice_due = now + max(10.0, took_s / ADVICE_PART)

    def _update(self, now: float) -> None:
        """Send the open pages the changes since the last update, and drop those that do not read."""
        if not self._readers:
            self._sent = Page()
            return
        if not self._sent.kind or self._news:
            self._news = False
            changed = self._changed()
        else:
            machines = self._follower.state.machines()
            changed = Page(machines=machines) if machines != self._sent.machines else None
            self._sent = structs.replace(self._sent, machines=machines)
        if changed is None and now - self._sent_at < QUIET_S:
            return
        self._sent_at = now
        data = _event(changed) if changed is not None else b": still here\n\n"  # finds out whether the browser is
        for reader in list(self._readers.values()):
            if not reader.transport.get_write_buffer_size():
                reader.stuck_since = None
            elif reader.stuck_since is None:
                reader.stuck_since = now
            elif now - reader.stuck_since > REQUEST_S:
                reader.transport.abort()
                continue
            reader.transport.write(data)

    def _changed(self) -> Page | None:
        """The parts of the page that have changed since they were sent."""
        state = self._follower.state
        if state is not self._shown:  # a resumed run: send everything
            self._sent, self._shown = Page(), state
        page = self._page(steps_after=self._sent_step if self._sent.kind else 0)
        rows, merges = state.curves.rows, state.curves.merges
        start = max(0, self._sent_rows - 1) if merges == self._sent_merges and self._sent.kind else 0
        start = start if start < len(rows) else 0
        curves = Curves(labels=(), rows=rows[start:], start=start, merged=merges > 0)
        last = self._sent
        changed: dict[str, object] = {
            name: value
            for name in page.__struct_fields__
            if name not in ("curves", "steps") and (value := getattr(page, name)) != getattr(last, name)
        }
        if page.steps or not last.kind:
            changed |= {"curves": curves, "steps": page.steps}
        elif len(rows) != self._sent_rows:  # on a guest
            changed |= {"curves": curves}
        self._sent, self._sent_rows, self._sent_merges = page, len(rows), merges
        self._sent_step = state.run.done if state.last_steps else 0
        # A page counts on from the last age that it was sent: with whatever is new, it gets the one of now.
        if not changed.keys() - {"since_step_s"}:
            return None
        return structs.replace(Page(), **{**changed, "since_step_s": page.since_step_s})

    # -- who asks ---------------------------------------------------------------------------------------

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, one request."""
        key = id(writer)
        self._strangers[key] = writer
        while len(self._strangers) > MOST_CONNECTIONS:
            _, oldest = self._strangers.popitem(last=False)
            oldest.transport.abort()
        try:
            sock = writer.get_extra_info("socket")
            if sock is not None:
                with suppress(OSError):
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
            async with asyncio.timeout(REQUEST_S):
                request, headers = await _request(reader)
            await self._answer(request, headers, reader, writer)
        except (Refused, ValueError) as refused:
            status = refused.status if isinstance(refused, Refused) else 400
            with suppress(OSError, TimeoutError):
                await _send(writer, status, str(refused) if isinstance(refused, Refused) else "not a request")
        except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass
        finally:
            self._strangers.pop(key, None)
            self._readers.pop(key, None)
            writer.transport.abort() if writer.transport.get_write_buffer_size() else writer.close()

    async def _answer(
        self, request: str, headers: Mapping[str, str], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        path, key = checked_path(request, headers, self._secret, loopback=self._loopback), id(writer)
        self._strangers.pop(key, None)
        answers: dict[str, tuple[str, Callable[[], str]]] = {
            "": ("text/html", lambda: document(self._page())),
            "metrics": ("text/plain; version=0.0.4", lambda: metrics_text(self._status())),
            "status.json": ("application/json", lambda: msgspec.json.encode(self._status()).decode() + "\n"),
        }
        if path not in answers and path != "events":
            raise Refused(404, "there is no such page")
        await self._loaded.wait()
        if path == "events":
            await self._stream(reader, writer, key)
        else:
            kind, text = answers[path]
            await _send(writer, 200, text(), kind=kind)

    async def _stream(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, key: int) -> None:
        """Send the whole page now. `_update` sends later changes, until the browser closes the connection."""
        if len(self._readers) >= MOST_CONNECTIONS:
            raise Refused(503, "too many pages are open")
        writer.write(_head(200, "text/event-stream") + _event(self._page()))
        self._readers[key] = _OpenPage(writer.transport)
        await reader.read(1)

    def _status(self) -> Status:
        return status_of(self._follower.state)


def _event(page: Page) -> bytes:
    return b"data: " + msgspec.json.encode(page) + b"\n\n"


async def _request(reader: asyncio.StreamReader) -> tuple[str, dict[str, str]]:
    """The request's line, and its headers by lower-case names."""
    head = await reader.readuntil(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").split("\r\n")[:-2]
    headers: dict[str, str] = {}
    for line in lines:
        name, colon, value = line.partition(":")
        if not colon or name.strip().lower() in headers:
            raise ValueError("a header that is invalid or repeated")
        headers[name.strip().lower()] = value.strip()
    return first, headers


def _head(status: int, kind: str, *, length: int | None = None, location: str = "") -> bytes:
    headers = {**_HEADERS, "Content-Type": f"{kind}; charset=utf-8", "Connection": "close"}
    if kind == "text/html":
        headers["Content-Security-Policy"] = policy() + "; frame-ancestors 'none'"
    if length is not None:
        headers["Content-Length"] = str(length)
    if location:
        headers["Location"] = location
    lines = [f"HTTP/1.1 {status} {_REASONS[status]}", *(f"{name}: {value}" for name, value in headers.items())]
    return "\r\n".join([*lines, "", ""]).encode("latin-1")


async def _send(writer: asyncio.StreamWriter, status: int, text: str, *, kind: str = "text/plain") -> None:
    location = text if status == 301 else ""
    body = b"" if location else text.encode() + (b"\n" if status != 200 else b"")
    writer.write(_head(status, kind, length=len(body), location=location) + body)
    writer.transport.set_write_buffer_limits(high=0)  # drain() waits until all of it has been taken
    async with asyncio.timeout(REQUEST_S):
        await writer.drain()
