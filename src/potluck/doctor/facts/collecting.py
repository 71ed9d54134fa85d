"""Collects all facts about this machine, within a deadline."""

from __future__ import annotations

import errno
import platform
import shutil
import socket
import tempfile
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import psutil

from potluck._version import __version__
from potluck.doctor.facts import firewalls, installed, interfaces, leftovers, resolving, ssh_login
from potluck.doctor.facts.system import System
from potluck.limits import cpu_name, usable_cores, usable_memory
from potluck.spec.facts import Cpu, Disk, Facts, Gpu, Torch
from potluck.wire.frames import PROTOCOL
from potluck.wire.token import local_addresses

T = TypeVar("T")

_FAR_AWAY = "192.0.2.1"
"""An address that no machine has (RFC 5737), so only the default route leads there."""

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
"""The variables that are read; none is a secret."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What is planned on this machine, which decides what to check."""

    runs: Path = Path("runs")
    port: int | None = None
    run: Path | None = None
    """A run folder whose checkpoints are checked."""
    cluster: Path | None = None
    parameters: int | None = None


def collect(
    wanted: Wanted, system: System | None = None, progress: Callable[[str], None] = lambda words: None
) -> Facts:
    """All facts; slow lookups run in parallel. Takes a few seconds, 12 at most."""
    system = system or System()
    hosts = ssh_login.read_cluster(wanted.cluster) if wanted.cluster is not None else []
    name = socket.gethostname() or "machine"
    address: str | None = local_addresses()[0]
    if address is not None and address.startswith("127."):
        address = None

    def part(what: str, found: Future[T]) -> T:
        progress(f"looking at this machine: {what}")
        return found.result()

    path = resolving.hosts_path(system)
    total, free = usable_memory()
    with ThreadPoolExecutor(max_workers=11, thread_name_prefix="facts") as pool:
        seen = pool.submit(interfaces.interfaces, system)
        lookups = pool.submit(resolving.lookups, name, address)
        ports = pool.submit(resolving.ports, system, wanted.port)
        walls = pool.submit(firewalls.firewalls, system)
        ipv6 = pool.submit(interfaces.ipv6_state, system)
        power = pool.submit(installed.power, system)
        graphics = pool.submit(_graphics, system)
        orphans = pool.submit(leftovers.orphans)
        checkpoints = pool.submit(lambda: leftovers.checkpoints(wanted.run) if wanted.run is not None else ())
        logins = pool.submit(ssh_login.ssh_hosts, system, hosts)
        disk = pool.submit(disk_of, wanted.runs)
        gpus, torch = part("graphics", graphics)
        return Facts(
            name=name,
            platform=system.platform,
            system=installed.system_words(system),
            architecture=platform.machine(),
            translated=installed.is_translated(system),
            wsl=installed.is_wsl(system),
            python=platform.python_version(),
            potluck=__version__,
            protocol=PROTOCOL,
            torch=torch,
            interfaces=part("interfaces", seen),
            default_address=address,
            default_route=interfaces.route_to(system, _FAR_AWAY) is not None,
            hosts=resolving.hosts_lines(system.read(path) or ""),
            hosts_path=path,
            lookups=part("lookups", lookups),
            environment={key: system.environ[key] for key in VARIABLES if key in system.environ},
            ports=part("ports", ports),
            firewalls=part("firewalls", walls),
            ipv6=part("ipv6", ipv6),
            cpu=Cpu(
                name=cpu_name(),
                physical=psutil.cpu_count(logical=False) or psutil.cpu_count() or 1,
                logical=psutil.cpu_count() or 1,
                usable=usable_cores(),
            ),
            memory_bytes=total,
            memory_free_bytes=free,
            model_parameters=wanted.parameters,
            disk=part("disk", disk),
            power=part("power", power),
            gpus=gpus,
            orphans=part("orphans", orphans),
            checkpoints=part("checkpoints", checkpoints),
            ssh=part("ssh", logins),
        )


def _graphics(system: System) -> tuple[tuple[Gpu, ...], Torch]:
    gpus = installed.gpus(system)
    return gpus, installed.torch_facts(system, gpus)


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
