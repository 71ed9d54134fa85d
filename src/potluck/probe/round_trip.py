"""Measures how long opening a TCP connection takes: the round trip to a machine without Potluck."""

from __future__ import annotations

import time
from collections.abc import Callable

from potluck.doctor.facts.interfaces import route_to
from potluck.doctor.facts.system import System
from potluck.errors import NetworkError
from potluck.probe.stream import round_trips
from potluck.probe.tcp_attempts import COMMON_PORTS, tried, tried_all
from potluck.spec.facts import CONNECTED, REFUSED
from potluck.spec.probed import ProbedPath

ANSWERS = (CONNECTED, REFUSED)
PAUSE_S = 0.02
_TRY_S = 2.0


def measure(
    name: str, address: str, port: int | None, seconds: float, progress: Callable[[str], None]
) -> ProbedPath:
    """The round trip to an address, measured from one side. A refusal is also an answer."""
    progress(f"looking for {address}")
    system = System()
    ports = (port,) if port is not None else COMMON_PORTS
    reaches = tried_all(system, name, [(address, number, True) for number in ports])
    answered = next((reach for reach in reaches if reach.outcome in ANSWERS), None)
    if answered is None:
        outcomes = ", ".join(dict.fromkeys(reach.outcome for reach in reaches))
        raise NetworkError(
            f"{address} does not answer ({outcomes})",
            hint=f"`potluck doctor {address}` says what blocks",
        )
    progress(f"{answered.address}: opening connections")
    found: list[float] = []
    end = time.monotonic() + seconds
    while time.monotonic() < end or not found:
        reach = tried(name, answered.address, answered.port, timeout_s=_TRY_S)
        if reach.outcome not in ANSWERS:
            break
        found.append(reach.seconds)
        time.sleep(PAUSE_S)
    route = route_to(system, answered.address)
    note = f"only the round trip, by opening TCP connections to port {answered.port}: nothing of ours listens there"
    return ProbedPath(
        address=answered.address,
        source=route.source if route is not None else "",
        interface=(route.interface or "") if route is not None else "",
        used=True,
        idle=round_trips(found),
        notes=(note,),
    )
