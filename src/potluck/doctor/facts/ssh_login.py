"""Tries to log in to the machines of a cluster file without a password. Runs one harmless command there.

[[machine]]
ssh = "you@192.168.1.7"
python = "/home/you/.venv/bin/python"    # optional
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from potluck.checked import read_text, toml_table
from potluck.doctor.facts.system import System
from potluck.errors import ConfigError
from potluck.spec.facts import SshHost

CONNECT_S = 4
ANSWER_S = 7.0
MOST_HOSTS = 64


def read_cluster(path: Path) -> list[tuple[str, str]]:
    """(host, interpreter) of every machine in the file that has `ssh`."""
    content = toml_table(read_text(path, missing=EXAMPLE, example=EXAMPLE), str(path), example=EXAMPLE)
    machines = content.get("machine", [])
    if not isinstance(machines, list) or not all(isinstance(m, dict) for m in machines):
        raise ConfigError(f"{path}: machine is not a list of tables", hint=EXAMPLE)
    found = []
    for machine in machines:
        host, python = machine.get("ssh"), machine.get("python", "python3")
        if host is None:
            continue
        # A host that begins with a dash would be an option of ssh's.
        if not isinstance(host, str) or not host or host[0] == "-" or not isinstance(python, str) or not python:
            raise ConfigError(f"{path}: ssh = {host!r}, python = {python!r} are not valid", hint=EXAMPLE)
        found.append((host, python))
    if not found:
        raise ConfigError(f"{path} names no machine with ssh = …", hint=EXAMPLE)
    return found[:MOST_HOSTS]


EXAMPLE = 'write it like this: [[machine]] and below it ssh = "you@192.168.1.7"'


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
