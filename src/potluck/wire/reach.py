"""Finds the address of a host that answers, over plain TCP, and what kind of program answers there."""

from __future__ import annotations

import errno
import selectors
import socket
import time
from collections.abc import Sequence
from enum import Enum
from typing import Any

import psutil

from potluck.errors import NetworkError

_GREETING = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x00" + b"CURVE".ljust(20, b"\0") + bytes(32)
"""The first bytes of a ZMTP 3.0 CURVE client: signature, version, mechanism, as-server, filler; 64 bytes."""

_REFUSED = {errno.ECONNREFUSED, getattr(errno, "WSAECONNREFUSED", -1)}
_NO_ROUTE = {errno.EHOSTUNREACH, errno.ENETUNREACH, getattr(errno, "WSAEHOSTUNREACH", -1)}
UNDER_WAY = {0, errno.EINPROGRESS, errno.EWOULDBLOCK, getattr(errno, "WSAEWOULDBLOCK", -1)}


_BEFORE_S = 0.1
"""How long an address that answers waits for those before it in the token. Home networks answer within this
time."""


class NobodyListensError(NetworkError):
    """The machine answers, and its port is closed: the run has ended, or the host is about to start."""


class PortAnswer(Enum):
    """The kind of program that answers at a port."""

    CURVE = "a ZeroMQ socket that requires CURVE keys, like a potluck host"
    OTHER = "something that is not a potluck host"
    SILENT = "something that accepts connections and sends nothing"
    NOTHING = "nothing"


def first_answering(addresses: Sequence[str], port: int, timeout_s: float) -> tuple[str, str]:
    """The address that accepts a TCP connection, as given and as a number; all are tried at once.

    The most likely addresses come first: one of them is preferred even if it answers a moment later. NetworkError
    lists each address and its result.
    """
    outcomes: dict[str, str] = {}
    answered: dict[str, str] = {}
    deadline = time.monotonic() + timeout_s
    selector = selectors.DefaultSelector()
    try:
        for address in addresses:
            _begin(selector, address, port, outcomes)
        while selector.get_map() and (left := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(left):
                address, number = key.data
                probe = key.fileobj
                assert isinstance(probe, socket.socket)
                code = probe.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                selector.unregister(probe)
                probe.close()
                if code == 0:
                    deadline = min(deadline, time.monotonic() + _BEFORE_S)
                    answered[address] = number
                else:
                    outcomes[address] = _say(code)
            best = next((address for address in addresses if address not in outcomes), None)
            if best in answered:
                break
        if answered:
            return min(answered.items(), key=lambda found: addresses.index(found[0]))
        for key in selector.get_map().values():
            outcomes[key.data[0]] = f"no answer within {timeout_s:g} s"
    finally:
        for key in list(selector.get_map().values()):
            assert isinstance(key.fileobj, socket.socket)
            key.fileobj.close()
        selector.close()
    told = "; ".join(f"{address} port {port}: {outcomes[address]}" for address in addresses)
    refused = all(text.startswith("refused") for text in outcomes.values())
    kind = NobodyListensError if refused else NetworkError
    raise kind(f"the host cannot be reached ({told})", hint=_hint(port, refused=refused))


def _begin(selector: selectors.BaseSelector, address: str, port: int, outcomes: dict[str, str]) -> None:
    try:
        found = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        outcomes[address] = "no machine of that name is known"
        return
    # IPv4 first: a host listens there unless it was told otherwise.
    family, kind, protocol, _, where = min(found, key=lambda entry: entry[0] != socket.AF_INET)
    probe = socket.socket(family, kind, protocol)
    probe.setblocking(False)
    code = probe.connect_ex(where)
    if code in UNDER_WAY:
        selector.register(probe, selectors.EVENT_WRITE, (address, str(where[0])))
    else:
        probe.close()
        outcomes[address] = _say(code)


def _say(code: int) -> str:
    if code in _REFUSED:
        return "refused, nothing listens there"
    if code in _NO_ROUTE:
        return "no route to it"
    if code == errno.ETIMEDOUT:
        return "no answer"
    return errno.errorcode.get(code, f"error {code}")


def _hint(port: int, *, refused: bool) -> str:
    if refused:
        return (
            "its run has probably ended. A host started again without --resume prints a new token; for one that is "
            "about to start, --wait 60 waits 60 seconds"
        )
    return (
        f"are both machines on the same network, and does the host's firewall let TCP port {port} in? "
        "Guest networks of Wi-Fi routers often keep machines apart"
    )


def who_answers(number: str, port: int, timeout_s: float) -> PortAnswer:
    """Send a CURVE client's greeting and identify the program by its reply."""
    deadline = time.monotonic() + timeout_s
    received = b""
    try:
        with socket.create_connection((number, port), timeout=timeout_s) as probe:
            probe.sendall(_GREETING)
            while len(received) < len(_GREETING):
                probe.settimeout(max(deadline - time.monotonic(), 0.01))
                part = probe.recv(len(_GREETING) - len(received))
                received += part
                if not part or received[:1] != _GREETING[:1]:
                    break
    except TimeoutError:
        if not received:
            return PortAnswer.SILENT
    except OSError:
        if not received:
            return PortAnswer.NOTHING
    curve = received[:1] == b"\xff" and received[9:10] == b"\x7f" and received[12:18] == b"CURVE\0"
    return PortAnswer.CURVE if curve else PortAnswer.OTHER


def who_holds(port: int) -> str | None:
    """A description of the process that listens on a port of this machine, if the system shows it."""
    try:
        connections = psutil.net_connections(kind="tcp")
        entries = [(entry.laddr, entry.status, entry.pid) for entry in connections]
    except (psutil.Error, OSError):
        entries = _own_connections()
    for local, status, pid in entries:
        if status == psutil.CONN_LISTEN and local and local.port == port and pid:
            try:
                return f"{psutil.Process(pid).name()} (process {pid})"
            except psutil.Error:
                return f"process {pid}"
    return None


def _own_connections() -> list[tuple[Any, str, int | None]]:
    """Asks for one process at a time, because macOS refuses the whole list, which contains other users'
    connections."""
    entries: list[tuple[Any, str, int | None]] = []
    for process in psutil.process_iter():
        try:
            found = process.net_connections(kind="tcp")
        except (psutil.Error, OSError, AttributeError):
            continue
        entries.extend((entry.laddr, entry.status, process.pid) for entry in found)
    return entries
