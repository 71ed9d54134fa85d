"""A rig: a described fleet (machines, speeds, links) and what it trains, read from a TOML file.

Owns the file's keys, their meaning and what to say about a wrong one. It emulates nothing and knows no torch.
The names are a format that other people's files use: keys are added, never renamed.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from potluck.errors import ConfigError
from potluck.spec import toml_file
from potluck.spec.config import build, nearest

HOST = "host"
GUEST = "guest"
MOST_MACHINES = 64
MOST_NAME = 40
RECIPES = ("gpt", "cnn")
_KEYS = ["name", "about", "workload", "machine"]
# What lies outside is a slip of the pen, and would make infinities of its reciprocals.
_LIMITS = {
    "seconds_per_sample": (1e-6, 1e6),
    "link_mbit": (1e-3, 1e6),
    "latency_ms": (0, 60_000),
    "cpu_limit": (0.01, 1024),
    "micro_batch": (1, 1e6),
    "join_at_step": (1, 1e6),
}
_TOML_EXAMPLE = "`potluck lab show home-pair --toml` shows one"
_CHANGE_EXAMPLE = "for example speed_changes = [{ at_step = 9, seconds_per_sample = 0.3 }]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What the fleet trains."""

    recipe: str = "gpt"
    """gpt or cnn."""
    depth: int | None = None
    """gpt: blocks; the width is 64 times as much. The recipe's own default when not given."""
    sequence: int | None = None
    """gpt: bytes in a sample. The recipe's own default (128) when not given."""
    global_batch: int = 32
    """Samples in a step, on all machines together."""
    steps: int = 12
    """Updates that every strategy makes."""
    seed: int = 1
    """Of the initial weights and the order of the samples."""
    codec: str = "int4"
    """How potluck packs weights' changes and gradients."""

    def __post_init__(self) -> None:
        if self.recipe not in RECIPES:
            raise ConfigError(f"recipe is {self.recipe!r}", hint=nearest(self.recipe, list(RECIPES)))
        for name in ("depth", "sequence", "global_batch", "steps"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} is {value}", hint=f"{name} must be 1 or more")
        for name in ("depth", "sequence"):
            if self.recipe != "gpt" and getattr(self, name) is not None:
                raise ConfigError(f"{name} means nothing to the recipe {self.recipe}", hint=f"leave {name} out")
        if self.seed < 0:
            raise ConfigError(f"seed is {self.seed}", hint="seed must be 0 or more")


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedChange:
    """From a step on, a machine has another speed."""

    at_step: int
    """The first step at the new speed, counted from 1."""
    seconds_per_sample: float
    """The new speed."""

    def __post_init__(self) -> None:
        least, most = _LIMITS["seconds_per_sample"]
        if not least <= self.seconds_per_sample <= most:
            raise ConfigError(
                f"speed_changes: seconds_per_sample is {self.seconds_per_sample}",
                hint=f"seconds_per_sample must be from {least:g} to {most:g}",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """One machine of the fleet."""

    name: str
    """What it is called in tables and pictures."""
    role: str = GUEST
    """host (exactly one) or guest."""
    seconds_per_sample: float | None = None
    """The emulated speed; without it the machine computes as fast as this box's CPU does."""
    link_mbit: float | None = None
    """Rate of the machine's own link in Mbit/s, in each direction; unshaped when not given."""
    latency_ms: float = 0.0
    """One-way delay added to what the machine sends and receives (where the kernel has netem, and on loopback)."""
    cpu_limit: float | None = None
    """CPU cores that its processes may use together (a cgroup quota: needs root)."""
    micro_batch: int | None = None
    """Samples computed at once; found by trying when not given."""
    join_at_step: int = 1
    """The step at which a guest is started, counted from 1."""
    leave_at_step: int | None = None
    """The step at whose beginning the guest's process is killed."""
    return_at_step: int | None = None
    """The step at which a guest that left is started again."""
    speed_changes: tuple[SpeedChange, ...] = ()
    """Changes of its speed: { at_step = 9, seconds_per_sample = 0.3 }, as many as you like."""

    def __post_init__(self) -> None:
        where = f"machine {self.name!r}: "
        if not _usable_name(self.name):
            raise ConfigError(
                f"a machine cannot be called {self.name!r}",
                hint=f'for example name = "laptop": letters and digits, then also - _ . ({MOST_NAME} at most)',
            )
        if self.role not in (HOST, GUEST):
            raise ConfigError(f"{where}role is {self.role!r}", hint='role = "host" or role = "guest"')
        for name, (least, most) in _LIMITS.items():
            value = getattr(self, name)
            if value is not None and not least <= value <= most:
                raise ConfigError(f"{where}{name} is {value}", hint=f"{name} must be from {least:g} to {most:g}")
        self._check_steps(where)

    def _check_steps(self, where: str) -> None:
        moves = (self.join_at_step > 1, self.leave_at_step is not None, self.return_at_step is not None)
        if self.role == HOST and any(moves):
            raise ConfigError(f"{where}the host cannot join, leave or return", hint="only guests come and go")
        if self.leave_at_step is not None and self.leave_at_step <= self.join_at_step:
            raise ConfigError(
                f"{where}leaves at step {self.leave_at_step} but joins at step {self.join_at_step}",
                hint="leave_at_step must be after join_at_step",
            )
        if self.return_at_step is not None and self.return_at_step <= (self.leave_at_step or math.inf):
            left = f"leaves at step {self.leave_at_step}" if self.leave_at_step is not None else "never leaves"
            raise ConfigError(
                f"{where}returns at step {self.return_at_step} but {left}",
                hint="return_at_step must be after leave_at_step",
            )
        steps = [change.at_step for change in self.speed_changes]
        if steps != sorted(set(steps)) or any(step < 2 for step in steps):
            raise ConfigError(
                f"{where}speed_changes at steps {steps}",
                hint="at_step must be 2 or more and rise from one to the next",
            )
        if self.speed_changes and self.seconds_per_sample is None:
            raise ConfigError(
                f"{where}speed_changes without seconds_per_sample", hint="give the speed that it starts with"
            )

    def seconds_per_sample_at(self, step: int) -> float | None:
        """Its emulated speed in a step (counted from 1)."""
        speed = self.seconds_per_sample
        for change in self.speed_changes:
            if change.at_step <= step:
                speed = change.seconds_per_sample
        return speed

    def present_at(self, step: int) -> bool:
        """Whether the machine is there in a step (counted from 1)."""
        if step < self.join_at_step:
            return False
        if self.leave_at_step is None or step < self.leave_at_step:
            return True
        return self.return_at_step is not None and step >= self.return_at_step


@dataclass(frozen=True, slots=True, kw_only=True)
class Rig:
    """A fleet and its workload."""

    name: str
    about: str = ""
    workload: Workload
    machines: tuple[Machine, ...]

    def __post_init__(self) -> None:
        if not self.name.strip() or not self.name.isprintable():
            raise ConfigError("the rig has no name", hint='begin with: name = "my-rig"')
        if set(self.name) & set("/\\"):
            raise ConfigError(
                f"the rig's name is {self.name!r}", hint="folders are named after it: leave out / and \\"
            )
        hosts = [m.name for m in self.machines if m.role == HOST]
        if len(hosts) != 1:
            found = f"{len(hosts)} hosts ({', '.join(hosts)})" if hosts else "no host"
            raise ConfigError(f"the rig has {found}", hint='exactly one [[machine]] has role = "host"')
        names = [m.name for m in self.machines]
        double = next((name for name in names if names.count(name) > 1), None)
        if double is not None:
            raise ConfigError(f"two machines are called {double!r}", hint="give each its own name")
        if len(names) > MOST_MACHINES:
            raise ConfigError(f"the rig has {len(names)} machines", hint=f"at most {MOST_MACHINES} fit on one box")

    @property
    def host(self) -> Machine:
        return next(m for m in self.machines if m.role == HOST)

    @property
    def guests(self) -> tuple[Machine, ...]:
        return tuple(m for m in self.machines if m.role == GUEST)

    def machine(self, name: str) -> Machine:
        for machine in self.machines:
            if machine.name == name:
                return machine
        raise ConfigError(
            f"the rig {self.name} has no machine {name!r}", hint=nearest(name, [m.name for m in self.machines])
        )

    @property
    def steady(self) -> bool:
        """Whether the fleet is the same in every step."""
        return all(not m.speed_changes and m.leave_at_step is None and m.join_at_step == 1 for m in self.machines)

    def with_steps(self, steps: int) -> Rig:
        return replace(self, workload=replace(self.workload, steps=steps))


def read_text(path: Path) -> str:
    return toml_file.read_text(path, missing="give a rig file", example=_TOML_EXAMPLE)


def loads(text: str, where: str) -> Rig:
    """The rig of a file's text; `where` it came from begins what is said about its mistakes."""
    return toml_file.loads(text, where, parse, example=_TOML_EXAMPLE)


def parse(table: Mapping[str, Any]) -> Rig:
    """A rig from the tables of its file."""
    for key in table:
        if key not in _KEYS:
            raise ConfigError(f"there is no key {key!r}", hint=nearest(key, _KEYS))
    name, about, workload = table.get("name", ""), table.get("about", ""), table.get("workload", {})
    if not isinstance(name, str) or not isinstance(about, str):
        wrong = "name" if not isinstance(name, str) else "about"
        raise ConfigError(f"{wrong} is {table[wrong]!r}", hint=f"{wrong} must be text, in quotes")
    if not isinstance(workload, Mapping):
        raise ConfigError("workload is not a table", hint="write [workload], and its keys below it")
    tables = table.get("machine", [])
    if not isinstance(tables, list) or not all(isinstance(t, Mapping) for t in tables):
        raise ConfigError("machine is not a list of tables", hint="write [[machine]] (two brackets) for each one")
    machines = tuple(_machine(t, number) for number, t in enumerate(tables, 1))
    try:
        built = build(Workload, workload)
    except ConfigError as error:
        raise ConfigError(f"workload: {error.what}", hint=error.hint) from error
    return Rig(name=name, about=about, workload=built, machines=machines)


def _machine(table: Mapping[str, Any], number: int) -> Machine:
    name = table.get("name")
    if not isinstance(name, str) or not name:
        raise ConfigError(f"machine number {number} has no name", hint='for example name = "laptop"')
    values = {key.replace("-", "_"): value for key, value in table.items()}
    try:
        changes = _changes(values.pop("speed_changes", []))
        return replace(build(Machine, values), speed_changes=changes)
    except ConfigError as error:
        what = error.what if name in error.what else f"machine {name!r}: {error.what}"
        raise ConfigError(what, hint=error.hint) from error


def _changes(tables: Any) -> tuple[SpeedChange, ...]:
    if not isinstance(tables, list) or not all(isinstance(t, Mapping) for t in tables):
        raise ConfigError("speed_changes is not a list of tables", hint=_CHANGE_EXAMPLE)
    return tuple(_change({key.replace("-", "_"): value for key, value in t.items()}) for t in tables)


def _change(values: dict[str, Any]) -> SpeedChange:
    missing = [key for key in ("at_step", "seconds_per_sample") if key not in values]
    if missing and len(missing) + len(values) == 2:  # else there is an unknown key, and `build` names it
        raise ConfigError(f"a speed change has no {' and no '.join(missing)}", hint=_CHANGE_EXAMPLE)
    return build(SpeedChange, values)


def _usable_name(name: str) -> bool:
    """Names stand in tables and pictures, and begin the names of log files."""
    return 0 < len(name) <= MOST_NAME and name[0].isalnum() and all(c.isalnum() or c in "-_." for c in name)


# -- back to a file -------------------------------------------------------------------------------------


def to_table(rig: Rig) -> dict[str, Any]:
    """The tables of the rig's file: `parse` makes the same rig of them. Defaults of machines are left out."""
    table: dict[str, Any] = {"name": rig.name}
    if rig.about:
        table["about"] = rig.about
    workload = dataclasses.asdict(rig.workload)
    table["workload"] = {key: value for key, value in workload.items() if value is not None}
    table["machine"] = [_machine_table(machine) for machine in rig.machines]
    return table


def _machine_table(machine: Machine) -> dict[str, Any]:
    table: dict[str, Any] = {"name": machine.name, "role": machine.role}
    for field in dataclasses.fields(machine):
        value = getattr(machine, field.name)
        if field.name not in table and value != field.default:
            table[field.name] = value
    if machine.speed_changes:
        table["speed_changes"] = [dataclasses.asdict(change) for change in machine.speed_changes]
    return table


def to_toml(rig: Rig) -> str:
    """The rig as the text of a file."""
    table = to_table(rig)
    lines = [f"{key} = {_toml(table[key])}" for key in ("name", "about") if key in table]
    lines += ["", "[workload]", *(f"{key} = {_toml(value)}" for key, value in table["workload"].items())]
    for machine in table["machine"]:
        lines += ["", "[[machine]]", *(f"{key} = {_toml(value)}" for key, value in machine.items())]
    return "\n".join(lines) + "\n"


def _toml(value: Any) -> str:
    if isinstance(value, str):
        # A TOML string has JSON's escapes, and DEL is a control character too.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, float):
        return str(int(value)) if value.is_integer() and abs(value) < 1e15 else repr(value)
    if isinstance(value, Sequence):
        changes = (", ".join(f"{k} = {_toml(v)}" for k, v in change.items()) for change in value)
        return "[" + ", ".join(f"{{ {change} }}" for change in changes) + "]"
    return str(value)
