"""CPU limits of machines: one cgroup each, with a quota. Version 1 and version 2.

Only touches folders below the cgroup mount whose names begin with its prefix.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from potluck.errors import UserError

PREFIX = "potluck-lab-"
PERIOD_US = 100_000
LEAST_QUOTA_US = 1_000
"""The least quota that the kernel accepts."""
EMPTY_S = 1.0
"""A process that has just died stays in its cgroup for a moment."""

_HINT = "run the lab as root, or leave cpu_limit out of the rig"


@dataclass(frozen=True, slots=True)
class Mount:
    """The folder in which cgroups with a CPU quota are made."""

    root: Path
    version: int


def find_mount(mounts: str | None = None) -> Mount | None:
    """The mount with the cpu controller; a box with both versions has it in one of them."""
    text = Path("/proc/mounts").read_text(encoding="utf-8") if mounts is None else mounts
    lines = [[_unescaped(word) for word in line.split()] for line in text.splitlines()]
    for _, where, kind, options, *_ in lines:
        if kind == "cgroup" and "cpu" in options.split(","):
            return Mount(Path(where), 1)
    for _, where, kind, *_ in lines:
        with contextlib.suppress(OSError):
            if kind == "cgroup2" and "cpu" in Path(where, "cgroup.controllers").read_text().split():
                return Mount(Path(where), 2)
    return None


def _unescaped(word: str) -> str:
    """The kernel writes a space in a path as \\040, and so on."""
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), word)


def group(mount: Mount, rig: str) -> Path:
    """The folder that holds the cgroups of a rig's machines."""
    return mount.root / (PREFIX + rig)


def make(mount: Mount, rig: str, limits: Mapping[str, float]) -> dict[str, Path]:
    """A cgroup for each machine with a limit, in CPU cores."""
    folder = group(mount, rig)
    made = {}
    try:
        if mount.version == 2:
            _enable_cpu(mount.root)
        folder.mkdir()
        if mount.version == 2:
            _enable_cpu(folder)
        for machine, cores in limits.items():
            place = folder / f"machine-{machine}"  # "tasks" is a name, too
            place.mkdir()
            quota_us = max(LEAST_QUOTA_US, round(cores * PERIOD_US))
            if mount.version == 2:
                (place / "cpu.max").write_text(f"{quota_us} {PERIOD_US}")
            else:
                (place / "cpu.cfs_period_us").write_text(str(PERIOD_US))
                (place / "cpu.cfs_quota_us").write_text(str(quota_us))
            made[machine] = place
    except OSError as error:
        remove(folder)
        raise UserError(
            f"cpu_limit needs a cgroup, and {folder} cannot be made: {error.strerror}", hint=_HINT
        ) from error
    return made


def nowhere() -> UserError:
    return UserError("cpu_limit needs the cpu controller of cgroups, which is not mounted here", hint=_HINT)


def remove(folder: Path) -> None:
    """Remove a rig's cgroups. Processes that are still in one continue without a limit."""
    if not folder.name.startswith(PREFIX) or not folder.is_dir():
        return
    deadline = time.monotonic() + EMPTY_S
    for place in (*(path for path in folder.iterdir() if path.is_dir()), folder):
        while place.exists():
            _empty(place, folder.parent)
            try:
                place.rmdir()
            except OSError:
                if time.monotonic() > deadline:
                    break
                time.sleep(0.02)


def _enable_cpu(folder: Path) -> None:
    control = folder / "cgroup.subtree_control"
    if "cpu" not in control.read_text().split():
        control.write_text("+cpu")


def _empty(place: Path, into: Path) -> None:
    with contextlib.suppress(OSError):
        for pid in (place / "cgroup.procs").read_text().split():
            with contextlib.suppress(OSError):  # one a write, and it may just have died
                (into / "cgroup.procs").write_text(pid)
