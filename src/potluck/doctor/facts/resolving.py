"""The hosts file, the resolver and its speed, and ports, each read with a deadline."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable

from potluck.doctor.facts.system import System
from potluck.spec.facts import HostsLine, Lookup, Port
from potluck.wire.reach import who_holds

LOOKUP_S = 3.0
TORCHRUN_PORT = 29500


def hosts_path(system: System) -> str:
    return r"C:\Windows\System32\drivers\etc\hosts" if system.platform == "win32" else "/etc/hosts"


def hosts_lines(text: str) -> tuple[HostsLine, ...]:
    found = []
    for line in text.splitlines():
        address, *names = line.partition("#")[0].split() or [""]
        if address and names:
            found.append(HostsLine(address=address.split("%")[0], names=tuple(names)))
    return tuple(found)


def lookups(name: str, address: str | None, deadline_s: float = LOOKUP_S) -> tuple[Lookup, ...]:
    """The machine's own name and the name of its own address, looked up in parallel, as torchrun does."""
    asked: list[tuple[str, Callable[[], tuple[str, ...]]]] = [(name, lambda: addresses_of(name))]
    if address is not None:
        asked.append((address, lambda: (socket.getnameinfo((address, 0), 0)[0],)))
    results: list[Lookup | None] = [None] * len(asked)

    def ask(index: int) -> None:
        began = time.monotonic()
        answers: tuple[str, ...] = ()
        error = ""
        try:
            answers = asked[index][1]()
        except (OSError, UnicodeError) as failure:
            error = getattr(failure, "strerror", None) or str(failure)
        seconds = time.monotonic() - began
        results[index] = Lookup(asked=asked[index][0], seconds=seconds, answers=answers, error=error)

    # The C library cannot be told to give up: a thread that is left alone can.
    threads = [threading.Thread(target=ask, args=(n,), name="lookup", daemon=True) for n in range(len(asked))]
    end = time.monotonic() + deadline_s
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    return tuple(
        found or Lookup(asked=asked[n][0], seconds=deadline_s, finished=False) for n, found in enumerate(results)
    )


def addresses_of(name: str) -> tuple[str, ...]:
    found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    return tuple(dict.fromkeys(str(entry[4][0]).split("%")[0] for entry in found))


def ports(system: System, wanted: int | None) -> tuple[Port, ...]:
    """Ports that are about to be used: ours if one was named, and torchrun's."""
    master = system.environ.get("MASTER_PORT", "")
    asked = [(wanted, "--port")] if wanted else []
    if master.isdigit() and 0 < int(master) < 65536:
        asked.append((int(master), "MASTER_PORT"))
    else:
        asked.append((TORCHRUN_PORT, "torchrun's default over several machines"))
    found = []
    for number, by in asked:
        free = is_free(number)
        holder = None
        if not free:
            with contextlib.suppress(OSError):
                holder = who_holds(number)
        found.append(Port(number=number, free=free, holder=holder, wanted_by=by))
    return tuple(found)


def is_free(port: int) -> bool:
    """Whether a listening socket can be opened there, as libzmq and torch would."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        if os.name == "posix":
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("0.0.0.0", port))
            probe.listen(1)
        except OSError:
            return False
    return True
