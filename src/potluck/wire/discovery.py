"""Finds runs in the local network: a host announces its run by multicast DNS, and `potluck join` looks for them.

An announcement is public. It contains the protocol's version, the run's number, an address and the port of the code
exchange, but no key and no name of a machine, a person or a script. It is also unverified: anybody can announce
anything.
"""

from __future__ import annotations

import ipaddress
import logging
import secrets
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from potluck.errors import NetworkError
from potluck.wire.frames import PROTOCOL

SERVICE = "_potluck._tcp.local."
NUMBERS = range(10, 100)
TAKEN_S = 0.5
"""How long a host looks for other runs' numbers."""
LOOK_S = 5.0
MORE_S = 1.0
"""After the first run was found, others have this long to answer."""
MOST_RUNS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class AnnouncedRun:
    """A run that a machine announced."""

    number: int
    protocol: int
    addresses: tuple[str, ...]
    port: int
    """Port of the code exchange."""


class Announcement:
    """Announces a run, under a free number, until it is closed."""

    def __init__(self, addresses: Sequence[str], port: int) -> None:
        from zeroconf import IPVersion, ServiceInfo, Zeroconf

        numeric = [address for address in addresses if _is_ipv4(address)]
        if not numeric:
            raise NetworkError(
                "--lan announces IPv4 addresses, and this run has none", hint="start with --bind 0.0.0.0"
            )
        # Two runs that start at the same moment may take the same one. A guest sees that, since both have names of
        # their own, and asks for the token.
        taken = {run.number for run in look(for_s=TAKEN_S)}
        self.number = secrets.choice([number for number in NUMBERS if number not in taken] or NUMBERS)
        name = secrets.token_hex(8)
        info = ServiceInfo(
            SERVICE,
            f"{name}.{SERVICE}",
            server=f"{name}.local.",
            addresses=[socket.inet_aton(address) for address in numeric],
            port=port,
            properties={"protocol": str(PROTOCOL), "run": str(self.number)},
        )
        try:
            self._zeroconf = Zeroconf(interfaces=numeric, ip_version=IPVersion.V4Only)
        except OSError as error:
            raise _unannounced(error) from None
        try:
            self._zeroconf.register_service(info, cooperating_responders=True)
        except BaseException:
            self._zeroconf.close()
            raise

    def close(self) -> None:
        """Withdraw the announcement, and stop."""
        self._zeroconf.close()


def look(number: int | None = None, *, for_s: float = LOOK_S) -> list[AnnouncedRun]:
    """The runs announced in this network, sorted by number; only those with one number if it is given.

    If multicast is blocked, as in many networks, this returns an empty list after `for_s`.
    """
    from zeroconf import IPVersion, ServiceBrowser, ServiceStateChange, Zeroconf

    _quiet()
    found: dict[str, AnnouncedRun] = {}
    news = threading.Event()

    def on_change(zeroconf: Zeroconf, service_type: str, name: str, state_change: ServiceStateChange) -> None:
        if state_change is ServiceStateChange.Removed:
            found.pop(name, None)
        elif name in found or len(found) < MOST_RUNS:
            info = zeroconf.get_service_info(service_type, name, timeout=int(1000 * for_s))
            run = _parse(info.properties, info.parsed_addresses(), info.port) if info is not None else None
            if run is not None and number in (None, run.number):
                found[name] = run
                news.set()

    try:
        with Zeroconf(ip_version=IPVersion.V4Only) as zeroconf:
            ServiceBrowser(zeroconf, SERVICE, handlers=[on_change])
            deadline = time.monotonic() + for_s
            if news.wait(for_s):
                time.sleep(max(0.0, min(MORE_S, deadline - time.monotonic())))
    except OSError:  # no network, or none with multicast
        return []
    return sorted(found.values(), key=lambda run: run.number)


def _parse(
    properties: dict[bytes, bytes | None], addresses: Sequence[str], port: int | None
) -> AnnouncedRun | None:
    """A stranger's announcement, if it is well formed."""
    try:
        number, protocol = int(properties[b"run"] or b""), int(properties[b"protocol"] or b"")
    except (KeyError, ValueError):
        return None
    usable = tuple(address for address in addresses[:8] if _is_ipv4(address))
    if number not in NUMBERS or not 0 < protocol < 1000 or not usable or not port or not 0 < port < 65536:
        return None
    return AnnouncedRun(number=number, protocol=protocol, addresses=usable, port=port)


def _quiet() -> None:
    """Give the library's logger a handler; otherwise logging would write its warnings over the view."""
    library = logging.getLogger("zeroconf")
    if not library.handlers:
        library.addHandler(logging.NullHandler())


def _is_ipv4(address: str) -> bool:
    try:
        return bool(ipaddress.IPv4Address(address))
    except ValueError:
        return False


def _unannounced(error: OSError) -> NetworkError:
    return NetworkError(
        f"this run cannot be announced in the network: {error.strerror or error}",
        hint="start without --lan; the token always works",
    )
