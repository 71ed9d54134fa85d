"""Tries to log in to the machines of a fleet.toml without a password. Runs one harmless command there."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from potluck import checked
from potluck.doctor.facts.system import System
from potluck.errors import ConfigError
from potluck.spec.facts import SshHost
from potluck.spec.fleet_file import EXAMPLE, FleetFile

CONNECT_S = 4
ANSWER_S = 7.0
MOST_HOSTS = 64


def read_cluster(path: Path) -> list[tuple[str, str]]:
    """(host, interpreter) of every machine in a fleet.toml that has `ssh`."""
    text = checked.read_text(path, missing="--cluster takes the path of a fleet.toml", example=EXAMPLE)
    machines = checked.from_toml(text, FleetFile, str(path), example=EXAMPLE).machine
    found = [(machine.ssh, machine.python or "python3") for machine in machines if machine.ssh]
    if not found:
        raise ConfigError(f"{path} names no machine with ssh = …", hint=EXAMPLE)
    return found[:MOST_HOSTS]


def ssh_hosts(system: System, hosts: list[tuple[str, str]]) -> tuple[SshHost, ...]:
    """Try all machines in parallel."""
    if not hosts:
        return ()
    with ThreadPoolExecutor(max_workers=len(hosts)) as pool:
        return tuple(pool.map(lambda pair: _try(system, *pair), hosts))


def _try(system: System, host: str, python: str) -> SshHost:
    options = ("-o", "BatchMode=yes", "-o", f"ConnectTimeout={CONNECT_S}", "-o", "StrictHostKeyChecking=yes")
    said = system.run("ssh", *options, host, python, "--version", timeout_s=ANSWER_S)
    if said is None:
        return SshHost(host=host, status=None)
    words = " ".join((said.err or said.out).split())
    python_says = said.out.strip() if said.out.startswith("Python ") else ""
    return SshHost(host=host, status=said.status, said=words[:300], python=python_says)
