"""The cores and memory of the machine that this process may use, within its affinity and its cgroups.

Reads what the operating system reports, and falls back to psutil. Imports no torch.
"""

from __future__ import annotations

import math
import os
import platform
import subprocess
import sys
from pathlib import Path

import psutil

_CGROUPS = Path("/sys/fs/cgroup")
_OWN_CGROUPS = Path("/proc/self/cgroup")
_CPUS = Path("/sys/devices/system/cpu")


def usable_cores() -> int:
    """Physical cores this process may keep busy: two threads of one core count once, and a quota counts."""
    limits = [_allowed_physical_cores()]
    quota = _cpu_quota()
    if quota is not None:
        limits.append(math.ceil(quota))
    return max(1, min(limits))


def logical_cores() -> int:
    """Processors this process may run on; two threads of one core count twice."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def usable_memory() -> tuple[int, int]:
    """(total, free) bytes of memory: the machine's, or the container's where that is less."""
    machine = psutil.virtual_memory()
    total, free = int(machine.total), int(machine.available)
    for group in _groups("memory"):
        limit = _read_int(group / "memory.max", group / "memory.limit_in_bytes")
        if limit is None or limit >= machine.total:
            continue
        used = _read_int(group / "memory.current", group / "memory.usage_in_bytes") or 0
        total = min(total, limit)
        free = min(free, max(0, limit - used + _reclaimable(group)))
    return total, free


def cpu_name() -> str:
    """The processor's name as its maker writes it, or the architecture if that is unknown."""
    if sys.platform == "darwin":
        name = sysctl("machdep.cpu.brand_string")
    elif sys.platform == "linux":
        name = _cpuinfo_name(_read(Path("/proc/cpuinfo")) or "")
    else:
        name = platform.processor()
    name = (name or platform.machine() or "CPU").replace("(R)", "").replace("(TM)", "")
    return " ".join(name.split())


def sysctl(name: str) -> str | None:
    """One value of macOS's sysctl, or None."""
    try:
        done = subprocess.run(["sysctl", "-n", name], capture_output=True, text=True, timeout=5, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None


def _allowed_physical_cores() -> int:
    physical = psutil.cpu_count(logical=False) or psutil.cpu_count() or 1
    if sys.platform == "darwin":
        # Work is split evenly between threads, so that one on an efficiency core would hold up the others.
        fast = sysctl("hw.perflevel0.physicalcpu")
        return int(fast) if fast and fast.isdigit() else physical
    if sys.platform != "linux":
        return physical
    allowed = os.sched_getaffinity(0)
    cores = {_read(_CPUS / f"cpu{cpu}/topology/thread_siblings_list") or str(cpu) for cpu in allowed}
    return min(physical, len(cores))


def _cpu_quota() -> float | None:
    """CPUs' worth of time that the tightest cgroup above this process grants; None without one."""
    quotas = []
    for group in _groups("cpu"):
        version_2 = (_read(group / "cpu.max") or "").split()
        if len(version_2) == 2 and version_2[0] != "max":
            quotas.append(int(version_2[0]) / int(version_2[1]))
        quota, period = _read_int(group / "cpu.cfs_quota_us"), _read_int(group / "cpu.cfs_period_us")
        if quota is not None and quota > 0 and period:
            quotas.append(quota / period)
    return min(quotas, default=None)


def _groups(controller: str) -> list[Path]:
    """This process's cgroup of that controller and all above it, of version 1 or 2."""
    groups: list[Path] = []
    for line in (_read(_OWN_CGROUPS) or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        root = _CGROUPS / controllers if controllers else _CGROUPS
        here = root / path.lstrip("/")
        groups += [here, *(parent for parent in here.parents if parent == root or root in parent.parents)]
    return groups


def _reclaimable(group: Path) -> int:
    """Bytes that a cgroup counts as used but frees when memory is needed: the cache of files."""
    for line in (_read(group / "memory.stat") or "").splitlines():
        key, _, value = line.partition(" ")
        if key in ("inactive_file", "total_inactive_file") and value.isdigit():
            return int(value)
    return 0


def _cpuinfo_name(cpuinfo: str) -> str | None:
    for line in cpuinfo.splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return value.strip()
    return None


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None


def _read_int(*paths: Path) -> int | None:
    """The first of these files that holds a number."""
    for path in paths:
        text = _read(path)
        if text is not None and text.lstrip("-").isdigit():
            return int(text)
    return None
