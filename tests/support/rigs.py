"""Rigs for tests: what they are made of, and what is still there of their processes and files."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from potluck.lab import cgroup, rigs, rigs_up
from potluck.spec.rig import Rig, parse

SOURCE = Path(__file__).resolve().parents[2] / "src"
GONE_S = 5.0


def rig(*machines: Mapping[str, Any], name: str = "test") -> Rig:
    return parse({"name": name, "machine": list(machines)})


def short(name: str, steps: int, faster: float = 5) -> Rig:
    """A built-in rig with a model a seventh as large, `faster` times the speed, and a link that fits both."""
    rig = rigs.load(name)
    machines = tuple(
        replace(
            m,
            seconds_per_sample=(m.seconds_per_sample or 1.0) / faster,
            link_mbit=None if m.link_mbit is None else m.link_mbit * faster * 0.48 / 3.3,
        )
        for m in rig.machines
    )
    return replace(rig, workload=replace(rig.workload, depth=2, sequence=32, steps=steps), machines=machines)


def to_toml(rig: Rig) -> str:
    """The rig as the text of a file."""
    table = msgspec.to_builtins(rig)
    lines = [f"{key} = {_toml(table[key])}" for key in ("name", "about")]
    lines += ["", "[workload]", *_assigned(table["workload"])]
    for machine in table["machine"]:
        lines += ["", "[[machine]]", *_assigned(machine)]
    return "\n".join(lines) + "\n"


def _assigned(table: Mapping[str, Any]) -> list[str]:
    return [f"{key} = {_toml(value)}" for key, value in table.items() if value is not None]


def _toml(value: Any) -> str:
    if isinstance(value, str):
        # A TOML string has JSON's escapes, and DEL is a control character too.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, tuple):
        return "[" + ", ".join(f"{{ {', '.join(_assigned(change))} }}" for change in value) + "]"
    return str(value)


def processes(runtime: Path) -> list[str]:
    """Those that have inherited the test's mark."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if int(folder.name) != os.getpid() and f"={runtime}\0".encode() in (folder / "environ").read_bytes():
                found.append(f"{folder.name} {(folder / 'cmdline').read_bytes().decode()!r}")
    return found


def files(runtime: Path) -> list[str]:
    return sorted(path.name for path in runtime.glob("*/*") if path.name != rigs_up.START_LOCK)


def cgroups(*names: str) -> set[str]:
    """Those of the rigs with these names."""
    mount = cgroup.find_mount()
    if mount is None:
        return set()
    return {path.name for name in names for path in mount.root.glob(f"{cgroup.PREFIX}{name}-*")}


def wait_until(question: Callable[[], Any], seconds: float = GONE_S) -> bool:
    deadline = time.monotonic() + seconds
    while not question():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def assert_nothing_is_left(runtime: Path) -> None:
    wait_until(lambda: not processes(runtime) and not files(runtime))
    assert processes(runtime) == []
    assert files(runtime) == []


def the_state(runtime: Path, name: str) -> rigs_up.State:
    (file,) = runtime.glob(f"*/{name}-*.json")
    return msgspec.json.decode(file.read_bytes(), type=rigs_up.State)
