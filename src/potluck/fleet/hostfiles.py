"""Reads which machines a fleet has: names on the command line, fleet.toml, and the host files of other launchers.

    host = "desk"                          # optional: where the host runs (default: here)
    [[machine]]
    ssh = "old@laptop"                     # as for `ssh`: a name of ~/.ssh/config, or user@address
    name = "laptop"                        # optional, as the rest
    python = "/home/old/.venv/bin/python"

Also read as they are: the JSON of mlx.launch, `host slots=N` of DeepSpeed and MPI, accelerate's YAML.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from potluck import checked
from potluck.checked import Positive
from potluck.errors import ConfigError

CACHE = "~/.cache/potluck"
MOST_MACHINES = 64
_EXAMPLE = 'write it like this: [[machine]] and below it ssh = "you@192.168.1.7"'
_SLOTS = re.compile(r"(\S+?)(?::(\d+))?(?:\s+(?:slots|max[-_]slots)\s*=\s*(\d+))*\s*")


class NamedMachine(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One machine and how to get there."""

    ssh: str = ""
    """As for `ssh`; empty for this machine."""
    name: str = ""
    """Name in logs and tables; made from `ssh` if not given."""
    python: str = ""
    """The interpreter to use there; if it has all that Potluck needs, nothing is installed."""
    cache: str = CACHE
    """Folder there for Potluck and its environments."""
    folder: str = ""
    """Working folder there, if the host runs there."""
    device: str | None = None
    threads: Positive | None = None
    micro_batch: Positive | None = None
    slots: Positive = 1
    """Guests to start, one per GPU; at most as many as there are GPUs."""

    def __post_init__(self) -> None:
        # ssh takes what begins with a dash for an option.
        if self.ssh.startswith("-") or any(c.isspace() for c in self.ssh):
            raise ConfigError(f"ssh = {self.ssh!r} is not the name of a machine", hint=_EXAMPLE)


class FleetFile(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The machines, and which one is the host."""

    machine: tuple[NamedMachine, ...] = ()
    host: str = ""
    """Name of the machine that hosts; empty: this machine, which is not in the list."""


def read_fleet(words: Sequence[str]) -> FleetFile:
    """The fleet of machine names and of files, in any mixture; every machine has a name of its own."""
    machines: list[NamedMachine] = []
    host = ""
    for word in words:
        path = Path(word)
        if word.startswith("ssh://"):
            machines.append(NamedMachine(ssh=word))
        elif path.suffix in (".toml", ".json", ".yaml", ".yml") or "/" in word or path.is_file():
            file = _read_file(path)
            machines += file.machine
            host = file.host or host
        else:
            machines.append(NamedMachine(ssh=word))
    if len(machines) > MOST_MACHINES:
        raise ConfigError(
            f"{len(machines)} machines are too many", hint=f"at most {MOST_MACHINES} guests take part"
        )
    named = _with_names(machines)
    if host and host not in [m.name for m in named]:
        raise ConfigError(f"there is no machine {host!r} to be the host", hint=_of(named))
    return FleetFile(machine=named, host=host)


def _of(machines: Sequence[NamedMachine]) -> str:
    return f"the machines are: {', '.join(m.name for m in machines)}"


def _with_names(machines: Sequence[NamedMachine]) -> tuple[NamedMachine, ...]:
    found: dict[str, NamedMachine] = {}
    for machine in machines:
        short = machine.ssh.rpartition("@")[2].removeprefix("ssh://")
        # An address is a name as a whole; of a host name the first part is enough.
        short = short if re.fullmatch(r"[\d.:\[\]]+", short) else short.partition(".")[0].partition(":")[0]
        name = machine.name or short or "here"
        if machine.name and name in found:
            raise ConfigError(f"two machines are called {name!r}", hint="give each its own name")
        number = 2
        while name in found:
            name, number = f"{machine.name or short}-{number}", number + 1
        found[name] = replace(machine, name=name)
    return tuple(found.values())


def _read_file(path: Path) -> FleetFile:
    text = checked.read_text(path, missing="give machines by name, or the path of a file", example=_EXAMPLE)
    if path.suffix == ".toml":
        table = checked.toml_table(text, str(path), example=_EXAMPLE)
        file = checked.convert(table, FleetFile, where=str(path), toml=text)
    elif path.suffix == ".json":
        file = FleetFile(machine=tuple(_of_mlx(text, path)))
    elif path.suffix in (".yaml", ".yml"):
        return _of_accelerate(text, path)
    else:
        file = FleetFile(machine=tuple(_of_mpi(text, path)))
    if not file.machine:
        raise ConfigError(f"{path} names no machine", hint=_EXAMPLE)
    return file


def _of_mlx(text: str, path: Path) -> list[NamedMachine]:
    """[{"ssh": "host1", "ips": […]}, …], or the same below "hosts"."""
    try:
        content: Any = json.loads(text)
        hosts = content["hosts"] if isinstance(content, dict) else content
        return [NamedMachine(ssh=host["ssh"]) for host in hosts]
    except (ValueError, TypeError, KeyError) as error:
        hint = 'mlx.launch writes it like this: [{"ssh": "host1", "ips": ["192.168.1.7"]}]'
        raise ConfigError(f"{path} is not a host file of mlx.launch: {error!r}", hint=hint) from None


def _of_mpi(text: str, path: Path) -> list[NamedMachine]:
    """Lines of `host slots=N` (DeepSpeed, Open MPI) or `host:N` (MPICH)."""
    found = []
    for number, raw in enumerate(text.splitlines(), 1):
        line = raw.partition("#")[0].strip()
        if not line:
            continue
        match = _SLOTS.fullmatch(line)
        if match is None:
            script = path.suffix == ".py"
            hint = (
                f"a script goes after --: potluck up MACHINES -- {path}"
                if script
                else "lines are: worker-1 slots=4"
            )
            raise ConfigError(f"{path}, line {number}: {line[:60]!r}", hint=hint)
        found.append(NamedMachine(ssh=match[1], slots=max(1, int(match[3] or match[2] or 1))))
    return found


def _of_accelerate(text: str, path: Path) -> FleetFile:
    """accelerate names its machines only by a DeepSpeed host file, or the first of them by its address."""
    values = {key: value.strip("'\"") for key, value in re.findall(r"^\s*(\w+):[ \t]*(\S+)", text, re.MULTILINE)}
    if hostfile := values.get("deepspeed_hostfile"):
        return _read_file(path.parent / Path(hostfile).expanduser())
    first = values.get("main_process_ip")
    if not first or first == "null":
        raise ConfigError(
            f"{path} names no machine: accelerate knows only its own rank",
            hint="name the machines: potluck up desk mac.local -- train.py",
        )
    machine = NamedMachine(ssh=first)
    return FleetFile(machine=(machine,), host=_with_names([machine])[0].name)
