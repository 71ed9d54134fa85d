"""Reads the machines of a fleet from names on the command line, fleet.toml, and the host files of other launchers.

`spec/fleet_file.py` has the keys of fleet.toml. Also read as they are: the JSON of mlx.launch, `host slots=N` of
DeepSpeed and MPI, accelerate's YAML.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from potluck import checked
from potluck.bounds import Many, Text
from potluck.errors import ConfigError, UserError
from potluck.fleet.local import HERE
from potluck.spec.config import MOST_GUESTS
from potluck.spec.fleet_file import EXAMPLE, FleetFile, NamedMachine

_SLOTS = re.compile(r"(\S+?)(?::(\d+))?(?:\s+(?:slots|max[-_]slots)\s*=\s*(\d+))*\s*")


def read_fleet(words: Sequence[str]) -> FleetFile:
    """The fleet of machine names and files, in any mixture. Every machine has a unique name."""
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
    if len(machines) > MOST_GUESTS:
        raise ConfigError(f"{len(machines)} machines are too many", hint=f"at most {MOST_GUESTS} guests take part")
    named = _with_names(machines)
    if host and host not in [m.name for m in named]:
        raise _no_host(host, named)
    return FleetFile(machine=named, host=host)


def check_together(
    fleet: FleetFile, clusters: Sequence[str], host: str, *, only: Sequence[str], check: bool
) -> None:
    """Refuse machines that are not there or do not go together.

    `clusters` are addresses of Ray clusters, `only` the machines whose lines are shown. With `check`, nothing is
    started.
    """
    names = [machine.name for machine in fleet.machine]
    there = bool(clusters and host and host not in names)
    if there and fleet.machine:
        raise UserError(
            "a host on a Ray node takes only Ray nodes as guests",
            hint="leave out the ssh machines, or leave out --host",
        )
    if host and not there and host not in names:
        raise _no_host(host, fleet.machine)
    for name in only if not clusters else ():
        if name not in [*names, HERE]:
            raise ConfigError(f"--only {name!r} is not one of the machines", hint=f"this one is called {HERE}")
    if len(clusters) > 1 or (clusters and check):
        raise UserError(
            "potluck up takes one Ray cluster, and checks only machines of ssh", hint="`ray status` shows its nodes"
        )


def _no_host(host: str, machines: Sequence[NamedMachine]) -> ConfigError:
    names = ", ".join(m.name for m in machines)
    return ConfigError(f"there is no machine {host!r} to be the host", hint=f"the machines are: {names}")


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
    text = checked.read_text(path, missing="give machines by name, or the path of a file", example=EXAMPLE)
    if path.suffix == ".toml":
        table = checked.toml_table(text, str(path), example=EXAMPLE)
        file = checked.convert(table, FleetFile, where=str(path), toml=text)
    elif path.suffix == ".json":
        file = FleetFile(machine=tuple(_of_mlx(text, path)))
    elif path.suffix in (".yaml", ".yml"):
        return _of_accelerate(text, path)
    else:
        file = FleetFile(machine=tuple(_of_mpi(text, path)))
    if not file.machine:
        raise ConfigError(f"{path} names no machine", hint=EXAMPLE)
    return file


class _MlxHost(Struct, frozen=True):
    ssh: Text


class _MlxHosts(Struct, frozen=True):
    hosts: Many[_MlxHost]


_MLX: msgspec.json.Decoder[tuple[_MlxHost, ...] | _MlxHosts] = checked.decoder(Many[_MlxHost] | _MlxHosts)


def _of_mlx(text: str, path: Path) -> list[NamedMachine]:
    """[{"ssh": "host1", "ips": […]}, …], or the same below "hosts"."""
    try:
        hosts = _MLX.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        hint = 'mlx.launch writes it like this: [{"ssh": "host1", "ips": ["192.168.1.7"]}]'
        raise ConfigError(f"{path} is not a host file of mlx.launch: {error}", hint=hint) from None
    return [NamedMachine(ssh=host.ssh) for host in (hosts.hosts if isinstance(hosts, _MlxHosts) else hosts)]


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
    """accelerate lists its machines only in a DeepSpeed host file, or gives only the address of the first."""
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
