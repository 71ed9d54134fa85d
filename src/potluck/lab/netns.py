"""Emulated machines: one network namespace each, joined by a veth pair shaped to a link's rate.

Owns namespaces, addresses and shaping, and removes what it made. It needs root on Linux and runs commands; it
knows nothing of what they do.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from potluck.errors import UserError

PREFIX = "plk"
"""All namespaces and devices of ours begin so; the process id follows, so that leftovers can be told apart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """One emulated machine."""

    name: str
    namespace: str
    address: str


def why_not() -> str | None:
    """Why namespaces cannot be made here, or None if they can."""
    if sys.platform != "linux":
        return "network namespaces need Linux"
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None or shutil.which("tc") is None:
        return "the commands ip and tc are missing (Debian: apt install iproute2)"
    return None


class Pair:
    """Two machines, a host and a guest, with one link between them; usable in a `with` block."""

    def __init__(self, link_mbit: float | None, *, number: int = 0) -> None:
        reason = why_not()
        if reason is not None:
            raise UserError(reason)
        tag = f"{PREFIX}{os.getpid()}-{number}"
        subnet = f"10.{77 + number // 250}.{number % 250}"
        self.host = Place(name="host", namespace=f"{tag}-h", address=f"{subnet}.1")
        self.guest = Place(name="guest", namespace=f"{tag}-g", address=f"{subnet}.2")
        self._link_mbit = link_mbit

    def __enter__(self) -> Pair:
        try:
            for place in (self.host, self.guest):
                _ip("netns", "add", place.namespace)
            _ip(
                *("link", "add", "eth0", "netns", self.host.namespace, "type", "veth"),
                *("peer", "name", "eth0", "netns", self.guest.namespace),
            )
            for place in (self.host, self.guest):
                _ip("-n", place.namespace, "addr", "add", f"{place.address}/24", "dev", "eth0")
                _ip("-n", place.namespace, "link", "set", "eth0", "up")
                _ip("-n", place.namespace, "link", "set", "lo", "up")
                if self._link_mbit is not None:
                    shape(place, self._link_mbit)
        except BaseException:
            self.remove()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()

    def start(self, place: Place, command: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
        """Start a command on one of the machines."""
        return subprocess.Popen(["ip", "netns", "exec", place.namespace, *command], **options)

    def remove(self) -> None:
        for place in (self.host, self.guest):
            subprocess.run(["ip", "netns", "del", place.namespace], capture_output=True, check=False)


def shape(place: Place, mbit: float) -> None:
    """Limit what a machine sends to a rate, with a short queue as a switch has."""
    burst = max(16_000, int(mbit * 1e6 / 8 / 250))
    _run(
        *("tc", "-n", place.namespace, "qdisc", "replace", "dev", "eth0", "root", "tbf"),
        *("rate", f"{mbit:g}mbit", "burst", str(burst), "latency", "100ms"),
    )


def _ip(*words: str) -> None:
    _run("ip", *words)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise UserError(f"{' '.join(command)} failed: {done.stderr.strip()}")
