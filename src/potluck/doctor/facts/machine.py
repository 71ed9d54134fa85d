"""Collects all facts about this machine, within a deadline."""

from __future__ import annotations

import errno
import platform
import shutil
import socket
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from potluck._version import __version__
from potluck.doctor.facts import firewalls, interfaces, leftovers, resolving, software, ssh
from potluck.doctor.facts.system import System
from potluck.limits import cpu_name, usable_cores, usable_memory
from potluck.spec.facts import Cpu, Disk, Facts
from potluck.wire.frames import PROTOCOL
from potluck.wire.token import local_addresses

_FAR_AWAY = "192.0.2.1"
"""An address that nobody has (RFC 5737): only the default route leads there."""

VARIABLES = (
    "NCCL_SOCKET_IFNAME",
    "GLOO_SOCKET_IFNAME",
    "TP_SOCKET_IFNAME",
    "MASTER_ADDR",
    "MASTER_PORT",
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "CUDA_VISIBLE_DEVICES",
    "PYTORCH_MPS_HIGH_WATERMARK_RATIO",
    "PYTORCH_ENABLE_MPS_FALLBACK",
    "POTLUCK_THREADS",
    "POTLUCK_DEVICE",
)
"""The variables that are looked at; none is a secret."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What is planned on this machine, so that the right things are looked at."""

    runs: Path = Path("runs")
    port: int | None = None
    run: Path | None = None
    """A run folder whose checkpoints are looked at."""
    cluster: Path | None = None
    parameters: int | None = None


def collect(
    wanted: Wanted, system: System | None = None, progress: Callable[[str], None] = lambda words: None
) -> Facts:
    """All facts; what takes time is done at once. A few seconds, 12 at most."""
    system = system or System()
    hosts = ssh.read_cluster(wanted.cluster) if wanted.cluster is not None else []
    name = socket.gethostname() or "machine"
    address: str | None = local_addresses()[0]
    if address is not None and address.startswith("127."):
        address = None
    tasks: dict[str, Callable[[], Any]] = {
        "interfaces": lambda: interfaces.interfaces(system),
        "lookups": lambda: resolving.lookups(name, address),
        "ports": lambda: resolving.ports(system, wanted.port),
        "firewalls": lambda: firewalls.firewalls(system),
        "ipv6": lambda: interfaces.ipv6_state(system),
        "power": lambda: software.power(system),
        "graphics": lambda: _graphics(system),
        "orphans": leftovers.orphans,
        "checkpoints": lambda: leftovers.checkpoints(wanted.run) if wanted.run is not None else (),
        "ssh": lambda: ssh.ssh_hosts(system, hosts),
        "disk": lambda: disk_of(wanted.runs),
    }
    found: dict[str, Any] = {}
    with ThreadPoolExecutor(max_workers=len(tasks), thread_name_prefix="facts") as pool:
        started = {part: pool.submit(task) for part, task in tasks.items()}
        for part, future in started.items():
            progress(f"looking at this machine: {part}")
            found[part] = future.result()
    return _facts(system, wanted, name, address, found)


def _graphics(system: System) -> Any:
    gpus = software.gpus(system)
    return gpus, software.torch_facts(system, gpus)


def _facts(system: System, wanted: Wanted, name: str, address: str | None, found: dict[str, Any]) -> Facts:
    total, free = usable_memory()
    path = resolving.hosts_path(system)
    gpus, torch = found["graphics"]
    parts = (
        "interfaces",
        "lookups",
        "ports",
        "firewalls",
        "ipv6",
        "power",
        "orphans",
        "checkpoints",
        "ssh",
        "disk",
    )
    return Facts(
        name=name,
        platform=system.platform,
        system=software.system_words(system),
        architecture=platform.machine(),
        translated=software.is_translated(system),
        wsl=software.is_wsl(system),
        python=platform.python_version(),
        potluck=__version__,
        protocol=PROTOCOL,
        torch=torch,
        default_address=address,
        default_route=interfaces.route_to(system, _FAR_AWAY) is not None,
        hosts=resolving.hosts_lines(system.read(path) or ""),
        hosts_path=path,
        environment={key: system.environ[key] for key in VARIABLES if key in system.environ},
        cpu=Cpu(
            name=cpu_name(),
            physical=psutil.cpu_count(logical=False) or psutil.cpu_count() or 1,
            logical=psutil.cpu_count() or 1,
            usable=usable_cores(),
        ),
        memory_bytes=total,
        memory_free_bytes=free,
        model_parameters=wanted.parameters,
        gpus=gpus,
        **{part: found[part] for part in parts},
    )


def disk_of(folder: Path) -> Disk:
    """The file system of a folder that need not exist yet; a small file is written and removed."""
    here = folder.expanduser().absolute()
    while not here.is_dir() and here != here.parent:
        here = here.parent
    free = None
    try:
        free = shutil.disk_usage(here).free
        with tempfile.TemporaryFile(dir=here) as file:
            file.write(bytes(4096))
            file.flush()
    except OSError as error:
        if error.errno in (errno.ENOSPC, getattr(errno, "EDQUOT", -1)):
            return Disk(path=str(here), free_bytes=0)
        return Disk(path=str(here), free_bytes=free, writable=False, error=error.strerror or str(error))
    return Disk(path=str(here), free_bytes=free)
