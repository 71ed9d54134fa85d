"""Checks whether a guest can run on a machine that a launcher reaches over ssh; if not, why and how to fix it.
PURE."""

from __future__ import annotations

from collections.abc import Iterator

from potluck.doctor.machine import ssh_trouble
from potluck.spec.agent_reports import RemoteFacts
from potluck.spec.facts import SshHost
from potluck.spec.finding import BLOCKER, NOTE, WARNING, Finding
from potluck.units import bytes_text

NO_PYTHON = "potluck-no-python"
LOST = "ssh-lost"
"""The code for a machine that answered and then stopped answering."""
ENV_BYTES = 3 << 30
"""Disk space for torch and the other requirements, including pip's temporary files. CUDA builds need 8 GB."""
ENV_BYTES_CUDA = 9 << 30
CLOCK_OFF_S = 300.0
ARCHITECTURES = {"x86_64", "amd64", "arm64", "aarch64"}
"""Processors with wheels of torch."""


def unreached(host: SshHost, noise: tuple[str, ...] = ()) -> Finding:
    """Why no agent answered on a machine; `noise` is the output before the agent's first line."""
    told = [line for line in noise if line.strip()]
    if NO_PYTHON in told:
        return _no_python(host, told[told.index(NO_PYTHON) + 1 :])
    code, what, fix = ssh_trouble(host)
    if code in ("ssh-path", "ssh-failed") and told:
        code, what = "ssh-shell", "its shell prints text and does not run the command"
        fix = f"ssh {host.host} true   (must print nothing; look into ~/.bashrc and ~/.profile there)"
    said = " ".join((host.said or " ".join(told)).split())
    return _finding(
        host.host,
        code,
        what,
        how=f"ssh -o BatchMode=yes {host.host}: "
        + (f"status {host.status}, " if host.status is not None else "")
        + (said[-160:] or "nothing was said"),
        fix=fix,
    )


def _no_python(host: SshHost, found: list[str]) -> Finding:
    return _finding(
        host.host,
        "no-python",
        "no Python 3.11 or newer there",
        how=f"looked on its PATH and in the usual folders; found: {', '.join(found)[:160] or 'none'}",
        fix=f"ssh {host.host} 'curl -LsSf https://astral.sh/uv/install.sh | sh'   (no root needed); "
        f"ssh {host.host} .local/bin/uv python install 3.12\n"
        f'python = "/path/to/python3.12" for {host.host} in fleet.toml, or --python',
    )


def lost(name: str, ssh: str, said: str) -> Finding:
    """The connection to a machine broke during work there; `said` is ssh's output."""
    return _finding(
        name,
        LOST,
        "the connection broke before a guest could be started there",
        how=said.rpartition("\n")[2][-160:] or "ssh ended, or nothing came for some seconds",
        fix=f"ssh {ssh} uptime   (is it on and awake, and its network steady?)",
        breaks="what was done there has ended; it is done again when the machine answers",
    )


def unfit(
    name: str, ssh: str, facts: RemoteFacts, noise: tuple[str, ...], *, own: bool, clock_s: float
) -> Iterator[Finding]:
    """The problems of a machine that was reached by `ssh SSH`.

    `own`: its interpreter was named; `clock_s`: the time here.
    """
    installs = not facts.ready and not (own and not facts.lacks)
    # The platform decides more than the rest, so it comes first.
    if facts.architecture.lower() not in ARCHITECTURES or facts.bits != 64:
        yield _finding(
            name,
            "no-torch-here",
            f"there is no torch for {facts.architecture} with a {facts.bits}-bit Python",
            how=f"{facts.executable} says {facts.architecture}, {facts.bits} bit",
            fix=f"{name} cannot take part; on an Intel or ARM processor, install a 64-bit system and Python",
        )
    if facts.write_error:
        full = "space" in facts.write_error.lower() or "quota" in facts.write_error.lower()
        yield _finding(
            name,
            "disk-full" if full else "cache-not-writable",
            f"{facts.cache} cannot be written: {facts.write_error}",
            how=f"wrote 64 kB to {facts.cache}",
            fix=f"ssh {ssh} df -h {facts.cache}   (then free some space)\n" + _elsewhere(name),
        )
    elif facts.noexec and installs:
        yield _finding(
            name,
            "home-noexec",
            f"nothing in {facts.cache} may be executed: its file system is mounted with noexec",
            how="its mount flags; torch's libraries would fail with 'failed to map segment from shared object'",
            fix=_elsewhere(name),
        )
    elif installs and facts.free_bytes < (ENV_BYTES_CUDA if facts.gpus else ENV_BYTES):
        need = bytes_text(ENV_BYTES_CUDA if facts.gpus else ENV_BYTES)
        yield _finding(
            name,
            "disk-full",
            f"only {bytes_text(facts.free_bytes)} are free for {facts.cache}; torch needs {need}",
            how=f"statvfs of {facts.cache}",
            fix=f"ssh {ssh} df -h {facts.cache}   (then free some space)\n" + _elsewhere(name),
        )
    if installs and not facts.uv and not facts.venv:
        yield _finding(
            name,
            "no-venv",
            f"{facts.executable} cannot make environments: it lacks venv or ensurepip, and there is no uv",
            how="looked for the modules venv and ensurepip, and for the program uv",
            fix=f"ssh {ssh} 'curl -LsSf https://astral.sh/uv/install.sh | sh'   (no root needed)\n"
            f"ssh {ssh} sudo apt install python3-venv   (Debian, Ubuntu)",
        )
    if abs(facts.clock_s - clock_s) > CLOCK_OFF_S:
        yield _finding(
            name,
            "clock-off",
            f"its clock is {_span(facts.clock_s - clock_s)}",
            how=f"asked it for its time; a connection takes less than {CLOCK_OFF_S:.0f} s",
            fix=f"ssh {ssh} sudo timedatectl set-ntp true   (macOS: sudo sntp -sS time.apple.com)",
            severity=BLOCKER if installs else WARNING,
            breaks="pip and uv refuse certificates that are not valid at that time; training needs no clock",
        )
    if told := [line for line in noise if line.strip()]:
        yield _finding(
            name,
            "shell-banner",
            f"its shell prints {len(told)} line{'s' if len(told) > 1 else ''} to every command: {told[0][:60]!r}",
            how="read what came before the agent's first word; it was skipped",
            fix="there, in ~/.bashrc and the like: print only below  case $- in *i*) … ;; esac",
            severity=NOTE,
            breaks="scp, rsync and git over ssh fail with such a shell. Potluck does not",
        )


def _finding(
    name: str,
    code: str,
    what: str,
    *,
    how: str,
    fix: str,
    severity: str = BLOCKER,
    breaks: str = "no guest can be started there",
) -> Finding:
    return Finding(
        code=code, severity=severity, machine=name, what=what, how=how, breaks=breaks, fix=fix, pains=(21,)
    )


def _elsewhere(name: str) -> str:
    return f'cache = "/another/folder" for {name} in fleet.toml, or --cache'


def _span(seconds: float) -> str:
    size = abs(seconds)
    words = f"{size / 86_400:.0f} days" if size > 2 * 86_400 else f"{size / 60:.0f} minutes"
    return f"{words} {'ahead' if seconds > 0 else 'behind'}"
