"""Tries to open TCP connections, all at once, and reports the outcome of each. Sends nothing."""

from __future__ import annotations

import errno
import ipaddress
import socket
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from msgspec.structs import replace

from potluck.doctor.facts.interfaces import route_to
from potluck.doctor.facts.resolving import lookups
from potluck.doctor.facts.system import System
from potluck.spec.facts import CONNECTED, DENIED, FAILED, NO_ROUTE, REFUSED, TIMEOUT, UNKNOWN_NAME, Reach

TRY_S = 3.0
COMMON_PORTS = (22, 80, 445, 5000, 29500)
"""Ports on which many machines listen or at least refuse: any answer shows that the machine is there."""

_OUTCOMES = {
    errno.ECONNREFUSED: REFUSED,
    errno.EHOSTUNREACH: NO_ROUTE,
    errno.ENETUNREACH: NO_ROUTE,
    errno.ETIMEDOUT: TIMEOUT,
    errno.EACCES: DENIED,
    errno.EPERM: DENIED,
    10061: REFUSED,  # Windows
    10065: NO_ROUTE,
    10060: TIMEOUT,
    10013: DENIED,
}


def outcome_of(code: int | None) -> str:
    return FAILED if code is None else _OUTCOMES.get(code, FAILED)


def tried(machine: str, address: str, port: int, *, timeout_s: float = TRY_S, wanted: bool = True) -> Reach:
    """One connection, closed as soon as it is open."""
    base = Reach(machine=machine, address=address, port=port, outcome=FAILED, wanted=wanted)
    began = time.monotonic()
    try:
        with socket.create_connection((address, port), timeout=timeout_s):
            return replace(base, outcome=CONNECTED, seconds=time.monotonic() - began)
    except TimeoutError:
        return replace(base, outcome=TIMEOUT, seconds=time.monotonic() - began)
    except (socket.gaierror, UnicodeError):
        return replace(base, outcome=UNKNOWN_NAME, seconds=time.monotonic() - began)
    except OSError as error:
        return replace(base, outcome=outcome_of(error.errno), errno=error.errno, seconds=time.monotonic() - began)


def tried_all(
    system: System, machine: str, targets: Sequence[tuple[str, int, bool]], *, timeout_s: float = TRY_S
) -> tuple[Reach, ...]:
    """Try all of (address, port, whether it is wanted) in parallel, each with its route."""
    numbers = {address: number_of(address) for address in dict.fromkeys(t[0] for t in targets)}
    unknown = tuple(
        Reach(machine=machine, address=address, port=port, outcome=UNKNOWN_NAME, wanted=wanted)
        for address, port, wanted in targets
        if numbers[address] is None
    )
    targets = [(number, port, wanted) for a, port, wanted in targets if (number := numbers[a]) is not None]
    if not targets:
        return unknown
    with ThreadPoolExecutor(max_workers=len(targets), thread_name_prefix="reach") as pool:
        found = list(pool.map(lambda t: tried(machine, t[0], t[1], timeout_s=timeout_s, wanted=t[2]), targets))
    # Only now: the attempt is what fills the table of neighbours.
    return (*(replace(r, route=route_to(system, r.address)) for r in found), *unknown)


def number_of(address: str) -> str | None:
    """An address as a number. The resolver gets at most a few seconds."""
    try:
        return str(ipaddress.ip_address(address))
    except ValueError:
        (lookup,) = lookups(address, None)
    # IPv4 first: a host listens there unless it was told otherwise.
    return min(lookup.answers, key=lambda answer: ":" in answer, default=None)
