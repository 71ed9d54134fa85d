"""The process of a running rig: it runs in the switch's namespace and holds the machines' namespaces.

    python -m potluck.lab.supervisor    (a request as JSON on stdin; the state, or what is wrong, as JSON on stdout)

It has one small child for each machine, and takes everything down when the rig has no users left.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NoReturn

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from potluck import checked
from potluck.bounds import Finite, Named, Text
from potluck.errors import UserError
from potluck.lab import cgroup, rigs_up
from potluck.lab.enter import CLONE_NEWNET, call, die_with
from potluck.lab.topology import HOLDER, Wiring

POLL_S = 0.5
COMMAND_S = 30.0
TERM_S = 1.0
KILL_S = 3.0
MOST_FILES = 256
"""More descriptors than this process ever has open."""


class Request(Struct, frozen=True, kw_only=True):
    """What to bring up."""

    rig: Text
    """The name of its files."""
    folder: Text
    wiring: Wiring
    limits: Named[Finite]
    """CPU cores, by machine."""
    grace_s: Finite
    """Seconds that it stays up without users."""


class SupervisorAnswer(Struct, frozen=True, kw_only=True):
    """The supervisor's answer: the state of the running rig, or the failure."""

    state: rigs_up.State | None = None
    error: Text = ""
    hint: Text = ""


class _EndAsked(Exception):
    """The supervisor was asked to end."""


class Supervisor:
    def __init__(self, request: Request) -> None:
        self._request = request
        self._folder = Path(request.folder)
        # Not made here: who wants the rig has made it and holds it. Without them there is nothing to do.
        self._lock = rigs_up.open_lock(rigs_up.lock_path(self._folder, request.rig), create=False)
        own = rigs_up.identify(os.getpid())
        assert own is not None
        self._state = rigs_up.State(supervisor=own)

    def bring_up(self) -> rigs_up.State:
        """Make every machine and the switch between them. The state's file exists before the things that it
        names."""
        wiring = self._request.wiring
        self._write()
        self._limit()
        for port in wiring.ports:
            holder = rigs_up.identify(_start_holder())
            assert holder is not None
            self._state = replace(self._state, holders={**self._state.holders, port.machine: holder})
        pids = {machine: holder.pid for machine, holder in self._state.holders.items()}
        lines = [line.replace(HOLDER, str(pids[p.machine])) for p in wiring.ports for line in p.switch_ip]
        _batch("ip", (*wiring.switch, *lines))
        _batch("tc", [line for port in wiring.ports for line in port.switch_tc])
        for port in wiring.ports:
            with _inside(pids[port.machine]):
                _batch("ip", port.machine_ip)
                _batch("tc", port.machine_tc)
        self._state = replace(self._state, ready=True)
        self._write()
        return self._state

    def watch(self) -> None:
        """Return after the rig had no users for the grace time; from then on it accepts none."""
        free_since: float | None = None
        while True:
            if not rigs_up.try_lock(self._lock, alone=True):
                free_since = None
            else:
                now = time.monotonic()
                free_since = now if free_since is None else free_since
                if now - free_since >= self._request.grace_s:
                    return
                rigs_up.unlock(self._lock)
            time.sleep(POLL_S)

    def take_down(self) -> None:
        """End all processes on the machines, then the machines. The switch ends with this process."""
        holders = {holder.pid for holder in self._state.holders.values()}
        _end_inhabitants(holders, term_s=TERM_S)
        for pid in holders:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
        if self._state.cgroup is not None:
            cgroup.remove(Path(self._state.cgroup))
        if rigs_up.is_at(self._lock, rigs_up.lock_path(self._folder, self._request.rig)):
            rigs_up.remove(self._folder, self._request.rig)

    def _limit(self) -> None:
        if not self._request.limits:
            return
        mount = cgroup.find_mount()
        if mount is None:
            raise cgroup.nowhere()
        # Another supervisor of the same rig may have left its own, so the process's id makes it unique.
        name = f"{self._request.rig}-{os.getpid()}"
        self._state = replace(self._state, cgroup=str(cgroup.group(mount, name)))
        self._write()
        made = cgroup.make(mount, name, self._request.limits)
        self._state = replace(self._state, limited={machine: str(path) for machine, path in made.items()})

    def _write(self) -> None:
        if not rigs_up.is_at(self._lock, rigs_up.lock_path(self._folder, self._request.rig)):
            raise _EndAsked  # who wanted the rig is gone, and it was tidied up after them
        rigs_up.write(self._folder, self._request.rig, self._state)


def _start_holder() -> int:
    """A child with a network namespace of its own, which dies with this process."""
    parent = os.getpid()
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        _hold(parent, writing)
    os.close(writing)
    try:
        said = os.read(reading, 1000)
    finally:
        os.close(reading)
    if said != b"ready":
        raise UserError(
            f"a network namespace cannot be made: {said.decode(errors='replace') or 'its process died'}"
        )
    return pid


def _hold(parent: int, writing: int) -> NoReturn:
    """The child waits until the supervisor is gone, then ends everything in its namespace."""
    try:
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
        call("unshare", CLONE_NEWNET)
        die_with(parent, signal.SIGTERM)
        os.write(writing, b"ready")
        # Neither the lock nor the pipes of who started the rig may stay open here.
        os.closerange(0, MOST_FILES)
        signal.sigwait([signal.SIGTERM])
        _end_inhabitants({os.getpid()}, term_s=0.0)
    except OSError as error:
        os.write(writing, str(error).encode())
    finally:
        os._exit(1)


@contextlib.contextmanager
def _inside(pid: int) -> Iterator[None]:
    """Enter another process's network namespace within this context."""
    own, other = (os.open(f"/proc/{who}/ns/net", os.O_RDONLY | os.O_CLOEXEC) for who in ("self", pid))
    try:
        call("setns", other, CLONE_NEWNET)
        try:
            yield
        finally:
            call("setns", own, CLONE_NEWNET)
    finally:
        os.close(own)
        os.close(other)


def _batch(tool: str, lines: Sequence[str]) -> None:
    """Many commands of ip or tc in one process."""
    if not lines:
        return
    try:
        done = subprocess.run(
            [tool, "-batch", "-"],
            input="\n".join(lines) + "\n",
            capture_output=True,
            text=True,
            timeout=COMMAND_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UserError(f"{tool} cannot be run: {error}", hint="Debian: apt install iproute2") from error
    if done.returncode:
        raise UserError(f"{tool} failed: {' '.join(done.stderr.split())} (in: {'; '.join(lines)[:300]})")


def _end_inhabitants(holders: set[int], *, term_s: float) -> None:
    """End all processes in the holders' namespaces except the holders: SIGTERM first, then SIGKILL."""
    homes = {home for pid in holders if (home := _home(pid)) is not None}
    begun = time.monotonic()
    asked: set[int] = set()
    while left := {pid for pid in _processes() if pid not in holders and _home(pid) in homes}:
        waited_s = time.monotonic() - begun
        if waited_s > KILL_S:
            return
        for pid in left if waited_s >= term_s else left - asked:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL if waited_s >= term_s else signal.SIGTERM)
                os.kill(pid, signal.SIGCONT)  # one that is stopped hears nothing
        asked |= left
        time.sleep(0.05)


def _processes() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _home(pid: int) -> int | None:
    """The network namespace of a process; None if it cannot be read."""
    try:
        return os.stat(f"/proc/{pid}/ns/net").st_ino
    except OSError:
        return None


def _end(number: int, frame: object) -> NoReturn:
    raise _EndAsked


def _answer(answer: SupervisorAnswer) -> None:
    """Answer the process that started the rig, then close its pipes: an open one would keep its readers waiting."""
    with contextlib.suppress(OSError):  # they may be gone
        os.write(1, msgspec.json.encode(answer) + b"\n")
    nothing = os.open(os.devnull, os.O_RDWR)
    for file in (0, 1, 2):
        os.dup2(nothing, file)


def main() -> int:
    signal.signal(signal.SIGTERM, _end)
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    supervisor = None
    try:
        text = sys.stdin.read()
        if not text.endswith("}"):
            return 1  # who wanted the rig was interrupted while asking for it
        supervisor = Supervisor(checked.decode(text, Request))
        _answer(SupervisorAnswer(state=supervisor.bring_up()))
        supervisor.watch()
    except UserError as error:
        _answer(SupervisorAnswer(error=error.what, hint=error.hint))
        return error.exit_status
    except (_EndAsked, FileNotFoundError):
        return 1
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if supervisor is not None:
            supervisor.take_down()
    return 0


if __name__ == "__main__":
    sys.exit(main())
