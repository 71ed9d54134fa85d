"""The life of a launched run: starts a host and a guest on each machine, restarts guests, and ends all together.

Every machine has its own thread that connects, installs, starts its guest and supervises it. The main thread runs
the host. The caller prints.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, Unpack

from potluck.doctor import usable as checks
from potluck.errors import INTERRUPTED, MachineError
from potluck.fleet.agent import CommandOptions
from potluck.fleet.interface import GuestEnd, GuestSettings, StartedGuest
from potluck.fleet.remote import RemoteTask
from potluck.spec.finding import Finding
from potluck.spec.fleet_file import NamedMachine

RAY = "ray://"
"""Prefix of a Ray cluster's address among the names of machines."""
HOST_PATIENCE_S = 60.0
"""Time for a host to save and end when its launcher is gone."""
GOODBYE_S = 5.0
"""Time for guests to leave after the host has ended."""
LOST = 3
"""Exit status if the machine of the host was lost; that of a NetworkError."""
AGAIN_S = (1.0, 2.0, 4.0, 8.0, 15.0, 30.0)
"""Seconds before a guest is started again: after the first failure, the second …"""
MOST_AGAIN = 5
"""After this many failures without having run for STEADY_S a guest is not started again, unless told otherwise."""
STEADY_S = 60.0
_FOR_GOOD = (1, 2)
"""Exit statuses after which another try would fail in the same way: a mistake in the script, the input, a
setting."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostWork:
    """The command for the host's machine."""

    machine: str
    words: Sequence[str]
    """Arguments for `python`."""
    cwd: str
    runs: str
    """Folder for run folders on that machine."""
    files: dict[str, bytes] = field(default_factory=dict)
    """Files to write there first, by path."""


class LaunchObserver(Protocol):
    """Gets the launcher's messages; any thread may call it."""

    def problems(self, findings: Sequence[Finding]) -> None:
        """Findings of all machines that were checked together, or of one that failed later."""

    def tell(self, machine: str, words: str) -> None:
        """One line about a machine; empty: about all."""

    def run_known(self, run: str) -> None:
        """The host has its run folder, at this path on its machine."""


class ReadyMachine(Protocol):
    """A machine that can be used; see `ReachedMachine`."""

    @property
    def facts(self) -> Any: ...
    @property
    def findings(self) -> Sequence[Finding]: ...
    @property
    def link(self) -> Any: ...


class LaunchFleet(Protocol):
    """The part of a fleet that a launcher needs; `SshFleet` describes each method."""

    def machine(self, name: str) -> NamedMachine: ...
    def log(self, name: str) -> Path: ...
    def reach(self, name: str) -> ReadyMachine: ...
    def in_place(self, name: str) -> bool: ...
    def prepare(self, name: str) -> ReadyMachine: ...
    def run(self, machine: str, words: Sequence[str], log: Path, **more: Unpack[CommandOptions]) -> RemoteTask: ...
    def start(self, machine: str, token: str, settings: GuestSettings, log: Path) -> StartedGuest: ...
    def close(self) -> None: ...


class Launcher:
    """One launched run. `run` is called once; `interrupt` from a signal handler or any thread.

    `add` and `drop` are for machines that come and go during the run.
    """

    def __init__(
        self,
        fleet: LaunchFleet,
        guests: Sequence[str],
        work: HostWork,
        observer: LaunchObserver,
        *,
        keep_trying: bool,
    ) -> None:
        self._fleet, self._guests, self._work, self._observer = fleet, guests, work, observer
        self._keep_trying = keep_trying
        self._tended: dict[str, object] = {}
        """The machines in use. The stored value is different each time that a machine is added."""
        self._threads: list[threading.Thread] = []
        self._news = threading.Condition()
        self._findings: dict[str, Sequence[Finding]] = {}
        """Findings of each machine from its first check."""
        self._usable: set[str] = set()
        self._told = False
        self._members: set[object] = set()
        """The handle of each guest that has its token and has not ended."""
        self._token = ""
        self._over = threading.Event()
        self._interrupts = 0
        self._prepared = threading.Event()
        """Set when the host's machine is ready, or cannot be made ready."""
        self._unprepared: MachineError | None = None
        self.run_folder = ""
        """Path of the run folder on the host's machine; empty until it is known."""
        self.cut_off = False
        """Whether the host was killed or lost, so that it could not say how to resume."""
        self.first_error: tuple[str, str] | None = None
        """Machine and message of the first failure, if any."""

    def interrupt(self) -> None:
        """The first call saves and ends the host. The second ends everything immediately."""
        self._interrupts += 1

    def run(self) -> int:
        """Run until the host has ended. Returns its exit status. Raises MachineError if no guest can be started
        anywhere."""
        for name in self._guests:
            self.add(name)
        preparing = threading.Thread(target=self._prepare, name="potluck-prepare-host")
        preparing.start()
        try:
            return self._host()
        finally:
            self._over.set()
            with self._news:
                self._news.notify_all()
                threads = [*self._threads, preparing]
                # Machines that are being looked at or installed need no goodbye.
                self._news.wait_for(lambda: not self._members or self._interrupts > 1, GOODBYE_S)
            self._fleet.close()
            for thread in threads:
                thread.join()

    def add(self, name: str) -> None:
        """Keep guests on this machine from now on, one for each slot. Call it again after the machine was
        restarted."""
        with self._news:
            if self._over.is_set():
                return
            self._news.notify_all()
            self._tended[name] = stay = object()
            for slot in range(self._fleet.machine(name).slots):
                thread = threading.Thread(
                    target=self._tend, args=(name, slot, stay), name=f"potluck-tend-{name}-{slot}"
                )
                self._threads.append(thread)
                thread.start()

    def drop(self, name: str) -> None:
        """This machine is gone: no more guests there, until it is added again."""
        with self._news:
            self._tended.pop(name, None)
            self._news.notify_all()

    # -- the host ---------------------------------------------------------------------------------------

    def _host(self) -> int:
        """Start the host immediately: it imports torch while the machines are checked, and waits for a line."""
        self._wait_for(lambda: self._prepared.is_set() or self._hopeless() or self._interrupts)
        if self._interrupts:
            return INTERRUPTED
        self._check(None)
        work = self._work
        for path, content in work.files.items():
            if (put := self._fleet.prepare(work.machine).link.put(path, content, self._log)).status != 0:
                raise MachineError(f"{work.machine}: cannot write {path}: {put.why}", hint="is its disk full?")
        task = self._fleet.run(
            work.machine,
            work.words,
            self._log,
            cwd=work.cwd,
            runs=work.runs,
            patience_s=HOST_PATIENCE_S,
        )
        sent, began = 0, False
        while (ended := task.wait(0.02)) is None:
            looked = len(self._findings) == len(self._guests)
            if not began:
                self._check(task)
                if self._usable or looked:
                    began = True
                    task.feed("\n")
            if not self._told and looked:
                self._tell_problems()
            if not self._token and task.found.is_set() and task.token:
                self.run_folder = task.run
                self._observer.run_known(task.run)
                with self._news:
                    self._token = task.token
                    self._news.notify_all()
            if self._interrupts and not began:
                task.end(0.0)
                return INTERRUPTED
            if self._interrupts > sent:
                sent = self._stop(task)
        return self._status(ended)

    def _hopeless(self) -> bool:
        """Whether all machines have been checked and none can be used."""
        looked = len(self._findings) == len(self._guests)
        return bool(self._guests) and looked and not self._usable and not self._keep_trying

    def _check(self, task: RemoteTask | None) -> None:
        """Raises if the run cannot begin; `task` is the host that waits."""
        if not self._hopeless() and self._unprepared is None:
            return
        if task is not None:
            task.end(0.0)
        self._tell_problems()
        if self._hopeless():
            count = len(self._guests)
            raise MachineError(
                f"none of {count} machines can be used" if count > 1 else f"{self._guests[0]} cannot be used",
                hint="fix what is named above; `potluck up … --check` looks again",
            )
        assert self._unprepared is not None
        self._observer.problems(self._unprepared.findings)
        raise self._unprepared

    def _prepare(self) -> None:
        """Connect to the host's machine and install there, in a thread, so that Ctrl-C works during it."""
        try:
            self._fleet.prepare(self._work.machine)
        except MachineError as error:
            self._unprepared = error
        finally:
            self._prepared.set()

    @property
    def _log(self) -> Path:
        return self._fleet.log(self._work.machine)

    def _stop(self, task: RemoteTask) -> int:
        if self._interrupts == 1:
            self._observer.tell("", "stopping: the host saves first (press Ctrl-C again to stop immediately)")
            task.signal(signal.SIGINT)
            return 1
        self._observer.tell("", "stopping at once")
        self._over.set()
        task.end(0.0)
        return self._interrupts

    def _status(self, ended: GuestEnd) -> int:
        if self._interrupts > 1 or (self._interrupts and ended.status == -signal.SIGINT):
            # By the first signal it dies only where it has no handler: before its run begins, and after its end.
            self.cut_off = self._interrupts > 1
            return INTERRUPTED
        if ended.status is None:
            self.cut_off = True
            self._failed(self._work.machine, f"{ended.why}; the host there saves and ends")
            return LOST
        if ended.status and ended.status != INTERRUPTED:
            self.cut_off = ended.status < 0
            self._failed(self._work.machine, ended.why)
        return ended.status if ended.status >= 0 else 128 - ended.status

    def _wait_for(self, reached: Callable[[], object]) -> None:
        with self._news:
            while not reached():
                self._news.wait(0.1)

    def _tell_problems(self) -> None:
        self._told = True
        self._observer.problems([finding for found in self._findings.values() for finding in found])

    # -- a guest ----------------------------------------------------------------------------------------

    def _tend(self, name: str, slot: int, stay: object) -> None:
        try:
            self._keep_guest(name, slot, lambda: not self._over.is_set() and self._tended.get(name) is stay)
        except Exception as error:
            # A bug: the others must not wait for this machine.
            self._failed(name, f"internal error: {type(error).__name__}: {error}")
            self._looked(name, (), usable=False)

    def _keep_guest(self, name: str, slot: int, wanted: Callable[[], bool]) -> None:
        """Keep a guest on this machine while it is wanted, or until it has failed too often."""
        failures = 0
        while wanted():
            try:
                facts = self._fleet.reach(name).facts
                if slot >= max(1, facts.gpus):
                    return
                if not self._fleet.in_place(name):
                    self._looked(name, self._fleet.reach(name).findings, usable=True)
                reached = self._fleet.prepare(name)
                self._looked(name, reached.findings, usable=True)
                began = time.monotonic()
                ended = self._guest(name, slot, several=facts.gpus > 1)
                if ended is None or not self._again(name, ended):
                    return
                failures = 0 if time.monotonic() - began > STEADY_S else failures + 1
            except MachineError as error:
                first = name not in self._findings
                self._looked(name, error.findings, usable=False)
                if not wanted():
                    return
                failures += 1
                if not first:
                    self._failed(name, error.what)
                    if failures == 1:
                        self._observer.problems(error.findings)
                codes = [finding.code for finding in error.findings]
                lost = any(code == checks.LOST or (not first and code.startswith("ssh-")) for code in codes)
                if not lost and not self._keep_trying:
                    return
            if failures > MOST_AGAIN and not self._keep_trying:
                self._observer.tell(name, f"no longer tried after {failures} failures (--keep-trying continues)")
                return
            pause_s = AGAIN_S[min(failures, len(AGAIN_S)) - 1] if failures else 0.2
            with self._news:
                self._news.wait_for(lambda: not wanted(), pause_s)

    def _looked(self, name: str, findings: Sequence[Finding], *, usable: bool) -> None:
        with self._news:
            if name not in self._findings:
                self._findings[name] = findings
            if usable:
                self._usable.add(name)
            self._news.notify_all()

    def _guest(self, name: str, slot: int, *, several: bool) -> GuestEnd | None:
        """Start a guest, send it the token once that is known, and wait for its end. Returns None if the run is
        over."""
        machine = self._fleet.machine(name)
        settings = GuestSettings(
            name=name if not slot else f"{name}-{slot + 1}",
            device=f"cuda:{slot}" if several and machine.slots > 1 else machine.device,
            threads=machine.threads,
            micro_batch=machine.micro_batch,
        )
        token = self._token  # it may become known while the guest starts
        guest = self._fleet.start(name, token, settings, self._fleet.log(name))
        try:
            while (ended := guest.wait(0.05)) is None:
                if self._over.is_set():
                    # The host says goodbye itself; a guest that did not hear it ends now.
                    return guest.wait(GOODBYE_S / 2) if token and self._interrupts < 2 else None
                if self._token and not token:
                    token = self._token
                    guest.feed(token + "\n")
                if token:
                    self._members.add(guest)
            return ended
        finally:
            with self._news:
                self._members.discard(guest)
                self._news.notify_all()

    def _again(self, name: str, ended: GuestEnd) -> bool:
        """Whether a guest that ended while the host runs is to be started again."""
        if ended.status == 0 or self._over.is_set():
            return False
        self._failed(name, ended.why)
        if ended.status in _FOR_GOOD and not self._keep_trying:
            self._observer.tell(name, "left the run: it would fail in the same way again")
            return False
        self._observer.tell(name, "is started again")
        return True

    def _failed(self, name: str, words: str) -> None:
        if self.first_error is None:
            self.first_error = (name, words)
        self._observer.tell(name, words)
