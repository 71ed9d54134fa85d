"""The fleet of machines reached by ssh: with the user's own ssh, one connection to each, and nothing installed
there before.

The first use of a machine connects, checks it, and installs what is missing.
"""

from __future__ import annotations

import shlex
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Unpack

import msgspec

from potluck.doctor import usable as checks
from potluck.errors import MachineError
from potluck.fleet import agent, bootstrap
from potluck.fleet.agent import AgentWants, CommandOptions
from potluck.fleet.interface import GuestSettings
from potluck.fleet.remote import AgentLink, RemoteTask, words_of
from potluck.spec.agent_reports import RemoteFacts
from potluck.spec.facts import SshHost
from potluck.spec.finding import BLOCKER, Finding
from potluck.spec.fleet_file import NamedMachine

CONNECT_S = 5
GREET_S = 25.0
INSTALL_S = 3600.0
OPTIONS = (
    *("-T", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={CONNECT_S}"),
    # A machine that does not answer for 6 s is gone: ssh ends, as the agent does there.
    *("-o", "ServerAliveInterval=2", "-o", "ServerAliveCountMax=3"),
    # A connection that you have open is used (it may have asked you for a second factor), but none is kept open.
    *("-o", "ControlMaster=no"),
    *("-o", "ForwardX11=no", "-o", "ForwardAgent=no", "-o", "ClearAllForwardings=yes"),
)
_PLACES = ("$HOME/.local/bin/python3", "/opt/homebrew/bin/python3", "/usr/local/bin/python3")
_NEW_ENOUGH = "import sys;sys.exit(sys.version_info<(3,11))"


def ssh_command(machine: NamedMachine, ssh: Sequence[str], wanted: AgentWants) -> list[str]:
    """The command that starts the agent on a machine; on this one, without ssh."""
    if not machine.ssh:
        return [machine.python or sys.executable, *words_of(agent, wanted)]
    return [*ssh, *OPTIONS, "--", machine.ssh, _shell_line(machine.python, words_of(agent, wanted))]


def _shell_line(python: str, words: Sequence[str]) -> str:
    """One line that every login shell (sh, bash, zsh, fish, csh) passes to sh unchanged: no quotes, no backslashes.

    It uses the first Python that is new enough: one of this machine's minor version, any other, or one of uv.
    """
    if any(c in python for c in "'\\\n\""):
        raise MachineError(f"python = {python!r} cannot be passed on to a shell", hint="use a path without quotes")
    if python.startswith("~/"):
        python = "$HOME" + python[1:]  # between double quotes a shell leaves a tilde as it is
    minors = sorted(range(11, 16), key=lambda minor: (minor != sys.version_info[1], -minor))
    names = [f'"{python}"'] if python else [*(f"python3.{m}" for m in minors), "python3", "python", *_PLACES]
    run = " ".join(f'"{word}"' for word in words)
    found = '"$(uv python find 2>/dev/null || $HOME/.local/bin/uv python find 2>/dev/null)"'
    return (
        f"exec sh -c 'for p in {' '.join(names)} {found if not python else ''}; do "
        f'if "$p" -c "{_NEW_ENOUGH}" >/dev/null 2>&1; then exec "$p" {run}; fi; done; '
        f"echo {checks.NO_PYTHON}; for p in {' '.join(names)}; do "
        'if command -v "$p" >/dev/null 2>&1; then echo "$p: $("$p" --version 2>&1)"; fi; done; exit 127\''
    )


@dataclass(slots=True)
class ReachedMachine:
    """A machine that answered, and its facts."""

    link: AgentLink
    facts: RemoteFacts
    findings: tuple[Finding, ...]
    own: bool
    """Whether its own interpreter has all requirements."""
    prepared: bool = False


class SshFleet:
    """Machines over ssh, and this machine without ssh. Safe to use from any thread."""

    def __init__(
        self,
        machines: Sequence[NamedMachine],
        wanted: bootstrap.FleetNeeds,
        *,
        logs: Path,
        ssh: Sequence[str] = ("ssh",),
    ) -> None:
        """`logs`: folder for the output of installations, a file for each machine."""
        self._machines = {machine.name: machine for machine in machines}
        self._wanted, self.logs, self._ssh = wanted, logs, tuple(ssh)
        self._reached: dict[str, ReachedMachine] = {}
        self._links: set[AgentLink] = set()
        """All opened connections, also those without an answer yet."""
        self._locks = {name: threading.Lock() for name in self._machines}
        self._closed = False

    def machines(self) -> Sequence[str]:
        return tuple(self._machines)

    def machine(self, name: str) -> NamedMachine:
        return self._machines[name]

    def log(self, name: str) -> Path:
        return self.logs / f"{name}.log"

    def start(self, machine: str, token: str, settings: GuestSettings, log: Path) -> RemoteTask:
        """As in the interface. Without a token the guest imports torch and waits for it, by `feed`."""
        words = [*settings.words(), "--parent", agent.AGENT_PID]
        return self.run(machine, words, log, feed=f"{token}\n" if token else "")

    def run(self, machine: str, words: Sequence[str], log: Path, **more: Unpack[CommandOptions]) -> RemoteTask:
        """Start `python WORDS` there, with this Potluck."""
        reached = self.prepare(machine)
        here = not self._machines[machine].ssh
        variables = bootstrap.variables_here() if here else bootstrap.variables(reached.facts, own=reached.own)
        task = reached.link.run([self._python(reached), *words], log, env=variables, **more)
        if task.pid is None:
            self._check_connection(machine, reached)
            ended = task.wait(0.0)
            raise MachineError(f"{machine}: nothing could be started: {ended.why if ended else 'no answer'}")
        return task

    def close(self) -> None:
        self._closed = True
        links = tuple(self._links)
        closing = [threading.Thread(target=link.close, name=f"potluck-close-{link.name}") for link in links]
        for thread in closing:
            thread.start()
        for thread in closing:
            thread.join()
        self._reached.clear()
        self._links.clear()

    # -- reaching a machine -----------------------------------------------------------------------------

    def reach(self, name: str) -> ReachedMachine:
        """Connect, if there is no connection, and check the machine.

        Raises:
            MachineError: it cannot be reached or used, with all findings.
        """
        with self._locks[name]:
            reached = self._reached.get(name)
            if reached is not None and not reached.link.lost.is_set():
                return reached
            if reached is not None:
                reached.link.close()
                del self._reached[name]
            self._reached[name] = found = self._look(self._machines[name])
            return found

    def _look(self, machine: NamedMachine) -> ReachedMachine:
        try:
            link = AgentLink(machine.name, ssh_command(machine, self._ssh, self._wanted.of(machine)))
        except FileNotFoundError as error:
            raise _unusable(machine.name, [_no_program(machine.name, error.filename)]) from None
        self._links.add(link)
        if self._closed:
            link.close()
            raise MachineError(f"{machine.name}: the launcher is ending")
        facts = link.greet(GREET_S)
        if facts is None:
            status = link.status if link.status is not None and link.status >= 0 else None
            host = SshHost(host=machine.ssh or machine.name, status=status, said=link.said)
            finding = msgspec.structs.replace(checks.unreached(host, tuple(link.noise)), machine=machine.name)
            link.close()
            raise _unusable(machine.name, [finding])
        own = bool(machine.python or not machine.ssh)
        findings = tuple(
            checks.unfit(machine.name, machine.ssh, facts, tuple(link.noise), own=own, clock_s=time.time())
        )
        if any(finding.severity == BLOCKER for finding in findings):
            link.close()
            raise _unusable(machine.name, findings)
        return ReachedMachine(link, facts, findings, own and not facts.lacks)

    def in_place(self, name: str) -> bool:
        """Whether all but Potluck itself is installed there, so that `prepare` takes no time."""
        reached = self.reach(name)
        return reached.own or reached.facts.ready

    def prepare(self, name: str) -> ReachedMachine:
        """Connect and install what is missing; MachineError if either fails."""
        reached = self.reach(name)
        with self._locks[name]:
            if not reached.prepared:
                if self._machines[name].ssh and not (reached.facts.code and (reached.own or reached.facts.ready)):
                    self._install(name, reached)
                self._check_imports(name, reached)
                reached.prepared = True
        return reached

    def _install(self, name: str, reached: ReachedMachine) -> None:
        log = self.log(name)
        if not reached.facts.code:
            wheel = f"{reached.facts.cache}/{bootstrap.code_name()}.whl"
            if (put := reached.link.put(wheel, bootstrap.wheel(), log)).status != 0:
                self._check_connection(name, reached)
                raise MachineError(
                    f"{name}: cannot write {wheel}: {put.why}", hint=f"ssh {self._machines[name].ssh} df -h"
                )
        words = bootstrap.install_words(reached.facts, self._wanted, make_env=not reached.own)
        ended = reached.link.run(words, log).wait(INSTALL_S)
        if ended is None or ended.status != 0:
            self._check_connection(name, reached)
            why = ended.why if ended is not None else f"not finished after {INSTALL_S:.0f} s"
            raise _unusable(name, [_not_installed(self._machines[name], reached.facts, why)])

    def _check_imports(self, name: str, reached: ReachedMachine) -> None:
        """Check that the machine has the script's imports, before anything starts."""
        if not self._wanted.imports:
            return
        log = self.logs / f".{name}.imports"
        python = self._python(reached)
        task = reached.link.run(bootstrap.missing_words(python, list(self._wanted.imports)), log)
        ended = task.wait(60.0)
        text = log.read_text(encoding="utf-8") if log.exists() else ""
        log.unlink(missing_ok=True)
        self._check_connection(name, reached)
        missing = [line.split()[1] for line in text.splitlines() if line.startswith("missing ")]
        if missing or ended is None:
            packages = ",".join(self._wanted.imports[module] or module for module in missing)
            raise _unusable(name, [_lacks(self._machines[name], missing, packages, python, own=reached.own)])

    def _check_connection(self, name: str, reached: ReachedMachine) -> None:
        """Raise an error if the connection failed, so that the machine can be tried again."""
        if reached.link.lost.is_set():
            raise _unusable(name, [checks.lost(name, self._machines[name].ssh, reached.link.said)])

    def _python(self, reached: ReachedMachine) -> str:
        """The interpreter that runs Potluck there."""
        return reached.facts.executable if reached.own else f"{reached.facts.env}/bin/python"

    def problems(self, report: Callable[[str, Sequence[Finding]], None]) -> list[str]:
        """Check all machines in parallel; `report` gets each one's findings. Returns the names of the usable
        ones."""
        usable: list[str] = []

        def look(name: str) -> None:
            try:
                report(name, self.reach(name).findings)
                usable.append(name)
            except MachineError as error:
                report(name, error.findings)

        with ThreadPoolExecutor(max(1, len(self._machines)), thread_name_prefix="potluck-look") as pool:
            list(pool.map(look, self._machines))
        return [name for name in self._machines if name in usable]


def _unusable(name: str, findings: Sequence[Finding]) -> MachineError:
    worst = next((f for f in findings if f.severity == BLOCKER), findings[0])
    error = MachineError(f"{name}: {worst.what}", hint=worst.fix)
    error.findings = tuple(findings)
    return error


def _no_program(name: str, program: str) -> Finding:
    return Finding(
        code="ssh-missing",
        severity=BLOCKER,
        machine=name,
        what=f"this machine has no program {program}",
        how="tried to start it",
        breaks="no other machine can be reached",
        fix="sudo apt install openssh-client   (macOS has it)",
    )


def _not_installed(machine: NamedMachine, facts: RemoteFacts, why: str) -> Finding:
    return Finding(
        code="not-installed",
        severity=BLOCKER,
        machine=machine.name,
        what="what Potluck needs could not be installed there",
        how=why[-300:],
        breaks="no guest can be started there",
        fix=f"ssh {machine.ssh} {shlex.quote(facts.executable)} -m pip download --no-deps -d /tmp torch\n"
        f'python = "/path/to/python" for {machine.name} in fleet.toml: one that has torch already',
    )


def _lacks(machine: NamedMachine, missing: Sequence[str], packages: str, python: str, *, own: bool) -> Finding:
    fix = f"potluck up … --with {packages} -- …"
    if own:
        fix = f"ssh {machine.ssh} {shlex.quote(python)} -m pip install {packages.replace(',', ' ')}\n{fix}"
    return Finding(
        code="missing-module",
        severity=BLOCKER,
        machine=machine.name,
        what=f"it lacks what the script imports: {', '.join(missing) or 'it did not answer'}",
        how=f"asked {python} for each module that the script imports at its top",
        breaks="the script would fail there at its first lines",
        fix=fix,
    )
