"""Measures each address of another machine briefly, for the doctor."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from msgspec import structs

from potluck.doctor.facts.system import System
from potluck.errors import PotluckError
from potluck.probe.link_client import LinkClient
from potluck.spec.probed import ProbedPath, Way
from potluck.wire.token import Token

WAY_S = 0.4
"""Seconds for each direction."""
MOST_WAYS = 6
ALL_S = 7.0
_NEEDS_S = 3 * WAY_S
"""A path is not measured if it cannot finish in time."""
_APART = 0.5


def compared(
    token: Token, name: str, addresses: Sequence[str], used: str, progress: Callable[[str], None], *, end: float
) -> tuple[ProbedPath, ...]:
    """The rates to each of the addresses, the used one first. It ends by `end`, or after ALL_S.

    If one seems much slower than another, both are measured again, because a machine may have been briefly busy.
    """
    end = min(end, time.monotonic() + ALL_S)
    paths: dict[str, ProbedPath] = {}
    for address in sorted(dict.fromkeys(addresses), key=lambda a: a != used)[:MOST_WAYS]:
        paths[address] = _measured(replace(token, addresses=(address,)), name, address == used, progress, end)
    known = {address: path.slower_bytes_per_s or 0.0 for address, path in paths.items()}
    fastest = max(known, key=lambda a: known[a], default=None)
    slow = [a for a, rate in known.items() if fastest is not None and rate < _APART * known[fastest]]
    for address in (*slow, fastest) if slow and fastest is not None else ():
        again = _measured(replace(token, addresses=(address,)), name, address == used, progress, end)
        paths[address] = _faster(paths[address], again)
    return tuple(paths.values())


def _measured(token: Token, name: str, used: bool, progress: Callable[[str], None], end: float) -> ProbedPath:
    (address,) = token.addresses
    if end - time.monotonic() < _NEEDS_S:
        return ProbedPath(address=address, used=used, notes=("there was no time to measure it",))
    try:
        client = LinkClient(token, name, progress, end=end)
    except PotluckError as error:
        return ProbedPath(address=address, used=used, notes=(error.what,))
    try:
        return client.in_a_moment(System(), WAY_S, used=used)
    except PotluckError as error:
        return ProbedPath(address=address, used=used, notes=(error.what,))
    finally:
        client.close()


def _faster(one: ProbedPath, other: ProbedPath) -> ProbedPath:
    """The better of two measurements, direction by direction."""

    def better(a: Way, b: Way) -> Way:
        rates = [way for way in (a, b) if way.ours is not None]
        return max(rates, key=lambda way: way.ours.bytes_per_s if way.ours else 0.0, default=a)

    return structs.replace(one, out=better(one.out, other.out), back=better(one.back, other.back))
