"""Real Ray nodes for tests: `ray start`, each node a process tree of its own, on this machine or on those of a rig.

    with RayNodes() as nodes:
        nodes.add("head", cpus=1)
        ... potluck.fleet.ray.RayFleet(nodes.address)

It knows how they are started and taken down, nothing of what is tested.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

from potluck.lab.namespaces import NamespaceBox

SOURCE = Path(__file__).resolve().parents[2] / "src"
QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DISABLE_DOCKER_CPU_WARNING": "1",
    "RAY_enable_worker_prestart": "0",
    "RAY_enable_metrics_collection": "0",
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    # Ray starts its workers with nice 15: beside other programs they would get no time at all.
    "RAY_worker_niceness": "0",
    # On a busy machine.
    "RAY_raylet_start_wait_time_s": "200",
    "PYTHONPATH": str(SOURCE),
}


def why_not() -> str | None:
    """Why this cannot be done here, or None."""
    if sys.platform != "linux":
        return "needs Linux"
    if importlib.util.find_spec("ray") is None:
        return "needs Ray: pip install -e '.[ray]'"
    return None


def free_port(address: str = "") -> int:
    with socket.socket() as free:
        free.bind((address, 0))
        return int(free.getsockname()[1])


class RayNodes:
    """The nodes of one cluster, by their names; the first is its head."""

    def __init__(self, box: NamespaceBox | None = None, *, dashboard: bool = False) -> None:
        self._box, self._dashboard = box, dashboard
        self.folder = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))  # Ray's sockets need a short path
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.address = ""
        self.dashboard_port = 0
        self.environment = {**os.environ, **QUIET}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for name in list(self.processes):
            self.remove(name)
        shutil.rmtree(self.folder, ignore_errors=True)

    def add(
        self,
        name: str,
        *,
        cpus: int = 1,
        labels: Mapping[str, str] | None = None,
        resources: Mapping[str, float] | None = None,
    ) -> None:
        """Start a node; with a rig, on its machine of this name. Returns when it is up."""
        ip = self._box.address(name) if self._box else "127.0.0.1"
        words = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats"]
        words += [f"--node-ip-address={ip}", f"--num-cpus={cpus}", "--num-gpus=0", f"--node-name={name}"]
        words += [f"--labels={','.join(f'{k}={v}' for k, v in (labels or {}).items())}"] if labels else []
        words += [f"--resources={json.dumps(dict(resources))}"] if resources else []
        words += ["--object-store-memory=80000000", f"--include-log-monitor={str(self._dashboard).lower()}"]
        if not self.address:
            port = 6379 if self._box else free_port(ip)
            self.address = f"{ip}:{port}"
            self.dashboard_port = 8265 if self._box else free_port(ip)
            words += ["--head", f"--port={port}", f"--temp-dir={self.folder}"]
            words += [f"--include-dashboard={str(self._dashboard).lower()}"]
            words += [f"--dashboard-port={self.dashboard_port}", f"--dashboard-host={ip}"]
        else:
            words += [f"--address={self.address}"]
        log = self.folder.with_name(f"{self.folder.name}-{name}.log")
        environment = {**self.environment, "HOME": str(self.folder)}
        if self._box:
            process = self._box.start(name, words, env=environment, log=log)
        else:
            with open(log, "ab") as output:
                process = subprocess.Popen(
                    words, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                    start_new_session=True,
                )  # fmt: skip
        self.processes[name] = process
        deadline = time.monotonic() + 240
        while b"Ray runtime started" not in log.read_bytes():
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)

    def tree(self, name: str) -> list[psutil.Process]:
        """The processes of a node that run now."""
        with contextlib.suppress(psutil.NoSuchProcess):
            whole = psutil.Process(self.processes[name].pid)
            return [whole, *whole.children(recursive=True)]
        return []

    def raylet(self, name: str) -> psutil.Process:
        return next(process for process in self.tree(name) if process.name() == "raylet")

    def remove(self, name: str, *, gently: bool = True) -> None:
        """End a node, with all of its processes."""
        tree = self.tree(name)
        process = self.processes.pop(name)
        process.send_signal(signal.SIGTERM if gently else signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(5)
        for each in tree:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
        process.wait()
        self.folder.with_name(f"{self.folder.name}-{name}.log").unlink(missing_ok=True)
