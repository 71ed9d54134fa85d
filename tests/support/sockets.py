"""Which sockets a process and its descendants listen on, for as long as it runs.

It must not know what they are for. Looking takes some milliseconds: a socket that is open for less can be missed.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

import psutil

from support.processes import ids_below

LOOK_EVERY_S = 0.03


@dataclass
class Listening:
    """Looks at a process until the end of the block; what it saw stays.

    Of TCP, sockets that listen; of UDP, those that would take a packet from anybody.
    """

    pid: int
    seen: dict[str, set[tuple[str, int]]] = field(default_factory=dict)
    """By the command that a process runs (`host`, `join` ...), the addresses it listened on."""
    looks: int = 0

    def __post_init__(self) -> None:
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()

    @property
    def all(self) -> set[tuple[str, int]]:
        return {where for found in self.seen.values() for where in found}

    def _watch(self) -> None:
        while not self._over.wait(LOOK_EVERY_S):
            with contextlib.suppress(psutil.Error, OSError):
                for pid in (self.pid, *ids_below(self.pid)):
                    with contextlib.suppress(psutil.Error, OSError):
                        self._look(psutil.Process(pid))
                self.looks += 1

    def _look(self, process: psutil.Process) -> None:
        found = self.seen.setdefault(_verb(process.cmdline()), set())
        for entry in process.net_connections(kind="inet"):
            listens = entry.status == psutil.CONN_LISTEN
            takes_any = entry.type == socket.SOCK_DGRAM and entry.laddr and not entry.raddr
            if listens or takes_any:
                found.add((entry.laddr.ip, entry.laddr.port))


def _verb(words: Iterable[str]) -> str:
    for word in words:
        if word in ("train", "host", "join", "report", "bench", "machines"):
            return word
    return "other"


def still_listening(where: Iterable[tuple[str, int]]) -> list[tuple[str, int]]:
    """Those of the addresses on which somebody still takes connections."""
    found = []
    for address, port in where:
        with socket.socket() as probe:
            probe.settimeout(2.0)
            if probe.connect_ex(("127.0.0.1" if address == "0.0.0.0" else address, port)) == 0:
                found.append((address, port))
    return found
