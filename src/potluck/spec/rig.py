"""A rig: the description of a fleet (machines, speeds, links) and of what it trains, read from a TOML file.

Users' files use these keys: add keys, never rename one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct
from msgspec.structs import replace

from potluck import checked
from potluck.bounds import Many, Positive, Seed, Text, Whole
from potluck.checked import nearest
from potluck.errors import ConfigError

HOST: Literal["host"] = "host"
GUEST: Literal["guest"] = "guest"
MOST_MACHINES = 64
MOST_NAME = 40
_TOML_EXAMPLE = "`potluck lab show home-pair --toml` shows one"

# Values outside are mistakes, and their reciprocals could become infinite.
SecondsPerSample = Annotated[float, Meta(ge=1e-6, le=1e6)]
LEAST_MBIT, MOST_MBIT = 1e-3, 1e6
Mbit = Annotated[float, Meta(ge=LEAST_MBIT, le=MOST_MBIT)]
StepNumber = Annotated[int, Meta(ge=1, le=10**6)]


class Workload(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the fleet trains."""

    recipe: Literal["gpt", "cnn"] = "gpt"
    depth: Positive | None = None
    """gpt: number of blocks; the width is 64 times the depth. The recipe's default if not given."""
    sequence: Positive | None = None
    """gpt: bytes per sample. The recipe's default (128) if not given."""
    enlarge: Annotated[int, Meta(ge=1, le=256)] | None = None
    """cnn: repeat every pixel this many times in both directions, to make samples large: 49 gives 154 kB."""
    global_batch: Positive = 32
    """Samples per step, over all machines."""
    steps: Positive = 12
    """Steps that every strategy trains."""
    seed: Seed = 1
    """Random seed for the weights and the sample order."""
    codec: Text = "auto"
    """Compression that potluck uses for weight changes and gradients."""

    def __post_init__(self) -> None:
        for name in ("depth", "sequence"):
            if self.recipe != "gpt" and getattr(self, name) is not None:
                raise ConfigError(f"{name} does not apply to the recipe {self.recipe}", hint=f"leave {name} out")
        if self.recipe != "cnn" and self.enlarge is not None:
            raise ConfigError(f"enlarge does not apply to the recipe {self.recipe}", hint="leave enlarge out")


class SpeedChange(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A change of a machine's speed from a step on."""

    at_step: Annotated[int, Meta(ge=2, le=10**6)]
    """The first step at the new speed, counted from 1."""
    seconds_per_sample: SecondsPerSample
    """Emulated time per sample from then on."""


class Machine(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One machine of the fleet."""

    name: Text
    """Name of the machine in tables and plots."""
    role: Literal["host", "guest"] = GUEST
    """Exactly one machine is the host."""
    seconds_per_sample: SecondsPerSample | None = None
    """The emulated speed; if not given, the speed of this computer's CPU."""
    link_mbit: Mbit | None = None
    """Rate of the machine's own link in Mbit/s, in each direction; unshaped if not given."""
    link_up_mbit: Mbit | None = None
    """Rate at which the machine sends, if it differs from `link_mbit`, as in most homes."""
    latency_ms: Annotated[float, Meta(ge=0, le=60_000)] = 0.0
    """One-way delay added to what the machine sends and receives (where the kernel has netem, and on loopback)."""
    cpu_limit: Annotated[float, Meta(ge=0.01, le=1024)] | None = None
    """CPU cores that its processes may use together (a cgroup quota: needs root)."""
    micro_batch: Annotated[int, Meta(ge=1, le=10**6)] | None = None
    """Samples computed at once; found by measuring if not given."""
    join_at_step: StepNumber = 1
    """The step at which a guest is started, counted from 1."""
    leave_at_step: Whole | None = None
    """The step at whose beginning a guest's process is killed."""
    return_at_step: Whole | None = None
    """The step at which a guest that left is started again."""
    speed_changes: Many[SpeedChange] = ()
    """Changes of its speed, such as { at_step = 9, seconds_per_sample = 0.3 }."""

    def __post_init__(self) -> None:
        if not _usable_name(self.name):
            raise ConfigError(
                f"a machine cannot be called {self.name!r}",
                hint=f'for example name = "laptop": letters and digits, then also - _ . ({MOST_NAME} at most)',
            )
        moves = (self.join_at_step > 1, self.leave_at_step is not None, self.return_at_step is not None)
        if self.role == HOST and any(moves):
            raise ConfigError("the host cannot join, leave or return", hint="only guests come and go")
        if self.leave_at_step is not None and self.leave_at_step <= self.join_at_step:
            raise ConfigError(
                f"leaves at step {self.leave_at_step} but joins at step {self.join_at_step}",
                hint="leave_at_step must be after join_at_step",
            )
        if self.return_at_step is not None and self.return_at_step <= (self.leave_at_step or math.inf):
            left = f"leaves at step {self.leave_at_step}" if self.leave_at_step is not None else "never leaves"
            raise ConfigError(
                f"returns at step {self.return_at_step} but {left}",
                hint="return_at_step must be after leave_at_step",
            )
        if self.link_up_mbit is not None and self.link_mbit is None:
            raise ConfigError(
                "link_up_mbit without link_mbit", hint="give the rate at which it receives as link_mbit"
            )
        steps = [change.at_step for change in self.speed_changes]
        if steps != sorted(set(steps)):
            raise ConfigError(f"speed_changes at steps {steps}", hint="at_step must rise from one to the next")
        if self.speed_changes and self.seconds_per_sample is None:
            raise ConfigError("speed_changes without seconds_per_sample", hint="give the speed that it starts with")

    @property
    def slower_mbit(self) -> float | None:
        """The rate of the slower direction of its link."""
        return min(self.link_up_mbit or math.inf, self.link_mbit) if self.link_mbit is not None else None

    def seconds_per_sample_at(self, step: int) -> float | None:
        """Its emulated speed in a step (counted from 1)."""
        speed = self.seconds_per_sample
        for change in self.speed_changes:
            if change.at_step <= step:
                speed = change.seconds_per_sample
        return speed

    def present_at(self, step: int) -> bool:
        """Whether the machine is present in a step (counted from 1)."""
        if step < self.join_at_step:
            return False
        if self.leave_at_step is None or step < self.leave_at_step:
            return True
        return self.return_at_step is not None and step >= self.return_at_step


class Rig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename={"machines": "machine"}):
    """A fleet and its workload."""

    name: Text = ""
    about: Text = ""
    workload: Workload = Workload()
    machines: Many[Machine] = ()

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
    return checked.read_text(path, missing="give a rig file", example=_TOML_EXAMPLE)


def loads(text: str, where: str) -> Rig:
    """The rig in a TOML text. Errors begin with `where` and the line."""
    return checked.from_toml(text, Rig, where, example=_TOML_EXAMPLE)


def parse(table: Mapping[str, Any]) -> Rig:
    """The rig from parsed TOML or JSON."""
    return checked.build(Rig, table)


def _usable_name(name: str) -> bool:
    """Whether a name is usable in tables, in plots and at the start of file names."""
    return 0 < len(name) <= MOST_NAME and name[0].isalnum() and all(c.isalnum() or c in "-_." for c in name)
