"""A rig on 127.0.0.1: every machine is this computer, and each guest reaches the host through a shaping proxy.

Needs no rights and works on every system, but only connections made with a token are shaped: machines can still
connect to each other directly, and a machine's cpu_limit has no effect.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil

from potluck.errors import PotluckError
from potluck.lab import detour
from potluck.lab.detour import ADDRESS, read_token, write_token
from potluck.lab.proxy import ProxyProcess
from potluck.lab.shaping import Fault, LinkSpec
from potluck.lab.warden import end
from potluck.spec.rig import HOST, Machine, Rig

PREFIX = "potluck-loopback-"
"""Prefix of the private folder; the owner's process id follows."""
GRACE_S = 3.0
"""Time for a process to end in order before it is killed."""


class LoopbackBox:
    """A rig that is up, on this computer; see `Box`."""

    kind = "loopback"
    peers_connect = False

    def __init__(self, rig: Rig) -> None:
        self._rig = rig
        self._links = {machine.name: link_of(machine) for machine in rig.guests}
        self._processes: list[subprocess.Popen[bytes]] = []
        self._ports: dict[tuple[str, str, int], int] = {}
        self._exit = contextlib.ExitStack()

    def __enter__(self) -> Self:
        remove_leftovers()
        with contextlib.ExitStack() as stack:
            folder = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-"))
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
            self._warden = subprocess.Popen(
                [sys.executable, "-m", "potluck.lab.warden", str(folder)],
                stdin=subprocess.PIPE,
                bufsize=0,
                start_new_session=True,  # Ctrl-C is for the owner
            )
            stack.callback(self._dismiss_warden)
            shared = link_of(self._rig.host)
            self._proxy = stack.enter_context(
                ProxyProcess(list(self._links.values()), shared=shared, folder=folder)
            )
            stack.callback(self._end_processes)
            self._folder = folder
            self._exit = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._exit.close()

    def address(self, machine: str) -> str:
        self._rig.machine(machine)
        return ADDRESS

    def start(
        self, machine: str, command: Sequence[str], *, env: Mapping[str, str], log: Path
    ) -> subprocess.Popen[bytes]:
        """Start a command, with exactly this environment, in its own session; its output is appended to `log`."""
        self._rig.machine(machine)
        if self._warden.poll() is not None:
            raise PotluckError("the process that would end the rig's commands is gone", hint="start the rig anew")
        assert self._warden.stdin is not None
        tell = functools.partial(_tell, self._warden.stdin.fileno())
        with open(log, "ab") as file:
            try:
                process = subprocess.Popen(
                    list(command),
                    env=dict(env),
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    **_detached(tell),
                )
            except OSError as error:
                raise PotluckError(
                    f"cannot start {command[0]}: {error.strerror or error}", machine=machine
                ) from error
        if os.name != "posix":
            tell(process.pid)
        self._processes.append(process)
        return process

    def traffic(self, machine: str) -> tuple[int, int]:
        """Bytes that crossed the machine's proxy, without packet headers; for the host, the sum of all guests."""
        if self._rig.machine(machine).role != HOST:
            return self._proxy.traffic(machine)
        up, down = zip(*(self._proxy.traffic(name) for name in self._links)) if self._links else ((), ())
        return sum(down), sum(up)

    def token_file(self, machine: str, host_token: Path) -> Path:
        if self._rig.machine(machine).role == HOST:
            return host_token
        token = read_token(host_token)
        route = (machine, token.addresses[0], token.port)
        if route not in self._ports:
            self._ports[route] = self._proxy.open(machine, (token.addresses[0], token.port))
        path = self._folder / f"{machine}-{token.port}.token"
        through = replace(token, addresses=(ADDRESS,), port=self._ports[route])
        return write_token(path, through)

    def add_faults(self, machine: str, faults: Sequence[Fault]) -> None:
        self._proxy.add_faults(machine, faults)

    def _end_processes(self) -> None:
        running = [process for process in self._processes if process.poll() is None]
        for process in running:
            process.terminate()
        deadline = time.monotonic() + GRACE_S
        for process in running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))

    def _dismiss_warden(self) -> None:
        """Let the warden kill the remaining processes, and reap them."""
        assert self._warden.stdin is not None
        self._warden.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._warden.wait(10.0)
        if self._warden.poll() is None:
            self._warden.kill()
            self._warden.wait()
        for process in self._processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                if process.poll() is None:
                    end(psutil.Process(process.pid))
            process.wait()


def link_of(machine: Machine) -> LinkSpec:
    """A machine's own link, as the proxy's parameters."""
    down, up = (None if mbit is None else mbit * 1e6 / 8 for mbit in (machine.link_mbit, machine.link_up_mbit))
    return LinkSpec(
        name=machine.name, rate_bytes_per_s=down, up_rate_bytes_per_s=up, latency_s=machine.latency_ms / 1e3
    )


def remove_leftovers() -> None:
    """Remove the folders of boxes whose owner and warden were both killed."""
    detour.remove_leftovers(PREFIX)


def _detached(tell: Callable[[int], None]) -> dict[str, Any]:
    if os.name != "posix":
        return {"creationflags": getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0)}
    # The new process names itself to the warden before it becomes the command: there is no moment in which
    # it runs and the owner could die without the warden's knowing it.
    return {"start_new_session": True, "preexec_fn": lambda: tell(os.getpid())}


def _tell(warden: int, process: int) -> None:
    with contextlib.suppress(OSError):
        os.write(warden, b"%d\n" % process)
