"""A rig emulated with network namespaces: one for each machine, and one for the switch between them.

Brings a rig up, shares it, takes it down, and starts commands on its machines. `topology.py` describes the network.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import msgspec

from potluck import checked
from potluck.errors import UserError
from potluck.lab import enter, permission, rigs_up
from potluck.lab.box import Box
from potluck.lab.shaping import Fault
from potluck.lab.supervisor import Request, SupervisorAnswer
from potluck.lab.topology import needs_netem, wiring
from potluck.spec.rig import HOST, Rig

if TYPE_CHECKING:
    from potluck.lab.detour import Detours


GRACE_S = 1.5
"""A shared rig stays this long after its last user, so that one `exec` after another finds it up."""
UP_S = 60.0
DOWN_S = 10.0
PATIENCE_S = 3.0
_MOST_NAME = 40
SOURCE = str(Path(__file__).resolve().parents[2])
MODULES = (SOURCE, str(Path(msgspec.__file__).resolve().parents[1]))
"""What the supervisor imports from. It starts without `site`, which would take longer than the rest."""


class NamespaceBox(Box):
    """A rig that is up. A shared one is the same for all commands that name the same rig."""

    kind = "network namespaces"
    peers_connect = True

    def __init__(self, rig: Rig, *, shared: bool = False, detours: bool = False) -> None:
        """With `detours`, a proxy runs on each guest, so that its link can have faults."""
        self._rig = rig
        self._wiring = wiring(rig)
        self._limits = {m.name: m.cpu_limit for m in rig.machines if m.cpu_limit is not None}
        self._addresses = {port.machine: port.address for port in self._wiring.ports}
        self._shared = shared
        self._id = ""
        self._lock: int | None = None
        self._state: rigs_up.State | None = None
        self._supervisor: subprocess.Popen[bytes] | None = None
        self._started: list[subprocess.Popen[bytes]] = []
        self._detours = _detours(self._for_a_proxy) if detours else None

    def __enter__(self) -> Self:
        before = permission.require(netem=needs_netem(self._rig))
        folder = rigs_up.folder()
        self._id = self._make_id()
        try:
            with rigs_up.starting(folder):
                rigs_up.sweep(folder)
                if not self._join(folder):
                    self._bring_up(folder, before)
        except BaseException:
            self._leave()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            _end_groups([process for process in self._started if process.poll() is None])
        finally:
            if self._detours is not None:
                self._detours.close()
            self._leave()

    def address(self, machine: str) -> str:
        self._rig.machine(machine)
        return self._addresses[machine]

    def start(
        self, machine: str, command: Sequence[str], *, env: Mapping[str, str], log: Path
    ) -> subprocess.Popen[bytes]:
        """Start a command with exactly this environment; its output is appended to `log`.

        It has its own session, so that Ctrl-C reaches this process alone. It dies with the calling thread, even by
        kill -9, so call it from a thread that stays.
        """
        with open(log, "ab") as file:
            process = subprocess.Popen(
                self._entering(machine, command, signal.SIGKILL),
                env=dict(env),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._started.append(process)
        return process

    def run(
        self, machine: str, command: Sequence[str], *, env: Mapping[str, str], files: Sequence[int] = ()
    ) -> int:
        """Run a command in the foreground, on this terminal. Returns its exit status, as a shell reports it.

        `files`: open ones that it inherits.
        """
        process: subprocess.Popen[bytes] | None = None

        def pass_on(number: int, frame: object) -> None:
            if process is not None:
                process.send_signal(number)

        # The terminal sends Ctrl-C and Ctrl-\ to the command, too: it decides what they mean. A function, not
        # SIG_IGN: to ignore would be inherited.
        handlers: dict[int, Any] = dict.fromkeys(enter.HELD_BACK, pass_on)
        handlers |= dict.fromkeys((signal.SIGINT, signal.SIGQUIT), lambda number, frame: None)
        # None is lost while the command is not there yet; enter.py lets them through.
        signal.pthread_sigmask(signal.SIG_BLOCK, enter.HELD_BACK)
        before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
        try:
            try:
                entering = self._entering(machine, command, signal.SIGHUP)
                process = subprocess.Popen(entering, env=dict(env), pass_fds=files)
                for number in signal.sigpending() & {signal.SIGINT, signal.SIGQUIT}:
                    process.send_signal(number)  # it may have come before the command was there to get it
            finally:
                signal.pthread_sigmask(signal.SIG_UNBLOCK, enter.HELD_BACK)
            status = process.wait()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        return status if status >= 0 else 128 - status

    def traffic(self, machine: str) -> tuple[int, int]:
        for line in Path(f"/proc/{self._holder(machine).pid}/net/dev").read_text().splitlines():
            name, _, counts = line.partition(":")
            if name.strip() == "eth0":
                numbers = counts.split()
                return int(numbers[8]), int(numbers[0])
        raise self._is_gone(machine)

    def token_file(self, machine: str, host_token: Path) -> Path:
        guest = self._rig.machine(machine)
        if self._detours is None or guest.role == HOST:
            return host_token
        return self._detours.token_file(guest, host_token)

    def add_faults(self, machine: str, faults: Sequence[Fault]) -> None:
        if self._detours is None:
            raise UserError(f"there is no proxy on {machine}", hint="make the box with detours")
        self._detours.add_faults(self._rig.machine(machine), faults)

    def _make_id(self) -> str:
        """The name of its files. For a shared rig it follows from what is emulated, and from the PID namespace."""
        name = "".join(c if c.isascii() and c.isalnum() else "-" for c in self._rig.name)[:_MOST_NAME]
        if not self._shared:
            return f"{name}-{os.getpid()}-{secrets.token_hex(4)}"
        content = msgspec.json.encode(
            [self._rig.name, self._wiring, self._limits, os.readlink("/proc/self/ns/pid")]
        )
        return f"{name}-{hashlib.sha256(content).hexdigest()[:12]}"

    def _join(self, folder: Path) -> bool:
        """Use the running rig, if there is one."""
        path = rigs_up.lock_path(folder, self._id)
        deadline = time.monotonic() + DOWN_S
        while (found := rigs_up.read(folder, self._id)) is not None and not found.supervisor.gone:
            # It may be on its way up, or down, and then it holds the lock for itself until it is gone.
            with contextlib.suppress(FileNotFoundError):
                self._lock = rigs_up.open_lock(path, create=False)
                if found.ready and rigs_up.try_lock(self._lock, alone=False) and rigs_up.is_at(self._lock, path):
                    self._state = found
                    return True
                os.close(self._lock)
            self._lock = None
            if time.monotonic() > deadline:
                raise UserError(
                    f"the rig {self._rig.name} has been starting or stopping for more than {DOWN_S:.0f} s",
                    hint=f"look at the process {found.supervisor.pid}, and end it",
                )
            time.sleep(rigs_up.POLL_S)
        rigs_up.sweep(folder)
        return False

    def _bring_up(self, folder: Path, before: Sequence[str]) -> None:
        self._lock = rigs_up.open_lock(rigs_up.lock_path(folder, self._id), create=True)
        if not rigs_up.try_lock(self._lock, alone=False):
            raise UserError(f"another process holds {rigs_up.lock_path(folder, self._id)}", hint="try again")
        request = Request(
            rig=self._id,
            folder=str(folder),
            wiring=self._wiring,
            limits=self._limits,
            grace_s=GRACE_S if self._shared else 0.0,
        )
        try:
            self._supervisor = subprocess.Popen(
                [*before, sys.executable, "-S", "-m", "potluck.lab.supervisor"],
                env={**permission.environment(), "PYTHONPATH": os.pathsep.join(MODULES)},
                cwd="/",
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            self._state = _ask(self._supervisor, request)
        except BaseException:
            if self._supervisor is not None:
                _end_supervisor(self._supervisor)
            rigs_up.remove(folder, self._id)
            raise

    def _leave(self) -> None:
        """Stop using the rig. A shared one ends by itself when it has no users; ours ends now."""
        lock, self._lock = self._lock, None
        if lock is not None:
            os.close(lock)
        supervisor, self._supervisor = self._supervisor, None
        if supervisor is not None and not self._shared:
            _end_supervisor(supervisor)
        self._state = None

    def _holder(self, machine: str) -> rigs_up.Process:
        self._rig.machine(machine)
        if self._state is None:
            raise UserError(f"the rig {self._rig.name} is not up", hint="use it inside its `with` block")
        holder = self._state.holders[machine]
        if not holder.lives:
            raise self._is_gone(machine)
        return holder

    def _is_gone(self, machine: str) -> UserError:
        return UserError(
            f"the emulated machine {machine} is gone: the process that held it was ended",
            hint=f"exit every shell and command on the rig {self._rig.name}, then start it again",
        )

    def _for_a_proxy(self, machine: str, command: Sequence[str]) -> list[str]:
        """Run in the machine's namespace, but outside its CPU limit."""
        return self._entering(machine, command, signal.SIGKILL, limited=False)

    def _entering(
        self, machine: str, command: Sequence[str], death_signal: int, *, limited: bool = True
    ) -> list[str]:
        holder = self._holder(machine)
        assert self._state is not None
        cgroup = self._state.limited.get(machine, "") if limited else ""
        python = [sys.executable, "-I", "-S", enter.__file__]
        return [*python, str(holder.pid), str(os.getpid()), str(int(death_signal)), cgroup, "--", *command]


def _ask(supervisor: subprocess.Popen[bytes], request: Request) -> rigs_up.State:
    """Tell a supervisor what to bring up, and wait until it has."""
    assert supervisor.stdin is not None
    assert supervisor.stdout is not None
    with contextlib.suppress(BrokenPipeError):  # then it says why
        supervisor.stdin.write(msgspec.json.encode(request))
        supervisor.stdin.close()
    text = b""
    deadline = time.monotonic() + UP_S
    while not text.endswith(b"\n"):
        ready, _, _ = select.select([supervisor.stdout], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            raise UserError(f"the rig is not up after {UP_S:.0f} s", hint="is this box very busy?")
        if not (part := os.read(supervisor.stdout.fileno(), 1 << 16)):
            break
        text += part
    supervisor.stdout.close()
    try:
        answer = checked.decode(text, SupervisorAnswer)
    except msgspec.DecodeError:
        words = " ".join(text.decode(errors="replace").split())[-500:]
        raise UserError(
            f"the rig cannot be brought up: {words or 'its process died'}", hint=permission.hint()
        ) from None
    if answer.state is None:
        raise UserError(answer.error, hint=answer.hint)
    return answer.state


def _end_supervisor(supervisor: subprocess.Popen[bytes]) -> None:
    """It first ends everything that runs on its machines."""
    for pipe in (supervisor.stdin, supervisor.stdout):
        if pipe is not None:
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
    supervisor.terminate()
    try:
        supervisor.wait(DOWN_S)
    except subprocess.TimeoutExpired:
        supervisor.kill()
        supervisor.wait()


def _end_groups(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """End processes and what they started in their sessions: SIGTERM first, then SIGKILL."""
    deadline = time.monotonic() + PATIENCE_S
    try:
        for process in processes:
            _signal_group(process, signal.SIGTERM)
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
    finally:
        for process in processes:
            if process.poll() is None:
                _signal_group(process, signal.SIGKILL)
                process.wait()


def _signal_group(process: subprocess.Popen[bytes], number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)


def _detours(entering: Callable[[str, Sequence[str]], list[str]]) -> Detours:
    from potluck.lab.detour import Detours  # its imports are not needed to hold namespaces

    return Detours(entering)
