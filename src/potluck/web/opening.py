"""Opens a run's page: starts the process that serves it, sends it the guests' state every second, and ends it."""

from __future__ import annotations

import ipaddress
import os
import re
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

import msgspec

from potluck import checked, durable
from potluck.errors import ConfigError, NetworkError, PortTakenError, UserError
from potluck.hub.members import COMPUTING, Member
from potluck.report.planned import planned_step_s
from potluck.report.text import clean
from potluck.train.folder import RunFolder
from potluck.web.serving import Opened, Serving
from potluck.web.state import GuestAbout, GuestNow, Pulse

PULSE_S = 1.0
OPEN_S = 30.0
"""A busy machine may take this long to start a process."""
CLOSE_S = 5.0
URL_FILE = "web"


class WebPage:
    """A page that is being served, until `close`."""

    def __init__(self, serving: Serving, pulse: Callable[[], Pulse] | None = None) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "potluck.web.serving"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=os.name == "posix",
        )
        assert self._process.stdin is not None
        self._pipe = self._process.stdin.fileno()
        self._process.stdin.write(msgspec.json.encode(serving) + b"\n")
        self._process.stdin.flush()
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        try:
            port = self._port(serving)
        except BaseException:
            self.close()
            raise
        shown = f"[{serving.address}]" if ":" in serving.address else serving.address
        self.url = f"http://{shown}:{port}/{serving.secret}/"
        if pulse is not None:
            with suppress(OSError, AttributeError):  # on Windows only from Python 3.12 on
                os.set_blocking(self._pipe, False)
            self._thread = threading.Thread(target=self._beat, args=(pulse,), name="potluck-web", daemon=True)
            self._thread.start()

    def _port(self, serving: Serving) -> int:
        assert self._process.stdout is not None
        timer = threading.Timer(OPEN_S, self._process.kill)
        timer.start()
        try:
            line = self._process.stdout.readline()
        finally:
            timer.cancel()
        where = f"{serving.address}:{serving.port}" if serving.port else serving.address
        if not line:
            raise NetworkError(f"the page's process ended before it listened on {where}", hint="try without --web")
        opened = checked.decode(line, Opened)
        if not opened.error:
            return opened.port
        kind = PortTakenError if opened.taken else UserError
        raise kind(
            f"the page cannot listen on {where}: {opened.error}",
            hint="give another address or port: --web-address 127.0.0.1:8080 (without a port: a free one)",
        )

    def _beat(self, pulse: Callable[[], Pulse]) -> None:
        while not self._closing.wait(PULSE_S):
            # A full pipe loses the line: the process that does not read must not stop this one.
            with suppress(OSError, RuntimeError):
                os.write(self._pipe, msgspec.json.encode(pulse()) + b"\n")

    def close(self) -> None:
        """Send the open pages the last update, and end the process."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join(PULSE_S)
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            with suppress(OSError):
                stream.close()
        try:
            self._process.wait(CLOSE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def place_of(text: str) -> tuple[str, int]:
    """'127.0.0.1:8080' as address and port; 0: a free one."""
    found = re.fullmatch(r"(?:\[([^]]+)\]|([^:\[\]]+)|([^\[\]]*:[^\[\]]*:[^\[\]]*))(?::(\d{1,5}))?", text.strip())
    name = next(filter(None, found.groups()[:3]), "") if found is not None else ""
    port = int(found[4] or 0) if found is not None else 0
    with suppress(ValueError):
        address = str(ipaddress.ip_address("127.0.0.1" if name == "localhost" else name))
        if port <= 65535:
            return address, port
    raise ConfigError(
        f"{text!r} is not an address for the page",
        hint="give an IP address, and a port if you like: 127.0.0.1:8080",
    )


def open_page(folder: RunFolder, where: str, members: Callable[[], Iterable[Member]]) -> WebPage:
    """The page of a host's run, or of a run alone, at this address. A resumed run keeps its port if possible."""
    address, port = place_of(where)
    file = folder.path / URL_FILE
    secret, before = _last(file)
    planned_s = planned_alone_s = None
    with suppress(UserError):  # the report tells of a damaged plan
        planned_s = planned_step_s(None, folder.path, alone=False)
        planned_alone_s = planned_step_s(None, folder.path, alone=True)
    log = folder.events.resolve()
    serving = Serving(
        events=str(log),
        address=address,
        port=port or before,
        secret=secret,
        loopback=ipaddress.ip_address(address).is_loopback,
        before=log.stat().st_size if log.exists() else 0,
        planned_s=planned_s,
        planned_alone_s=planned_alone_s,
    )

    def pulse() -> Pulse:
        return pulse_of(members())

    try:
        page = WebPage(serving, pulse)
    except PortTakenError:
        if port:
            raise
        page = WebPage(msgspec.structs.replace(serving, port=0), pulse)
    with suppress(OSError):  # the run prints the address as well
        durable.replace(file, page.url + "\n", what="web", private=True)
    return page


def open_guest_page(events: Path, about: GuestAbout, where: str) -> WebPage:
    """A guest's page: its own log, written for this."""
    address, port = place_of(where)
    return WebPage(
        Serving(
            events=str(events),
            address=address,
            port=port,
            secret=secrets.token_urlsafe(18),
            loopback=ipaddress.ip_address(address).is_loopback,
            guest=about,
        )
    )


def _last(file: Path) -> tuple[str, int]:
    """Secret and port of the page before this run was resumed; else a new secret and no port."""
    with suppress(OSError, UnicodeDecodeError):
        found = re.search(r":(\d+)/([\w-]{20,})/\s*$", file.read_text(encoding="utf-8"))
        if found is not None:
            return found[2], int(found[1])
    return secrets.token_urlsafe(18), 0


def pulse_of(members: Iterable[Member]) -> Pulse:
    """The present state of the guests."""
    now = time.monotonic()
    return Pulse(guests={clean(m.name): _now(m, now) for m in members})


def _now(member: Member, now: float) -> GuestNow:
    doing, lease = clean(member.reason), member.lease
    if member.state == COMPUTING:
        doing = "waits for its next lease"
        if lease is not None:
            doing = "its gradient has arrived" if lease.arrived else f"has {lease.count} samples to compute"
    return GuestNow(state=member.state, doing=doing, heard_s=round(max(0.0, now - member.last_heard), 2))
