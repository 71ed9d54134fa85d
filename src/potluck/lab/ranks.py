"""Runs one command as a rank on each of two emulated machines."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from potluck.errors import ScriptError
from potluck.lab.namespaces import SOURCE, NamespaceBox
from potluck.lab.stage import log_tail
from potluck.spec.rig import Machine, Rig, Workload

PORT = 29_500
"""Each machine has all ports to itself."""
_POLL_S = 0.05
_TAIL = 30


def pair(link_mbit: float | None) -> Rig:
    """Two machines with a link of `mbit` Mbit/s; None: as fast as this computer allows."""
    machines = (
        Machine(name="one", role="host", link_mbit=link_mbit),
        Machine(name="two", role="guest", link_mbit=link_mbit),
    )
    return Rig(name="pair", about="two machines", workload=Workload(), machines=machines)


def run_on_pair(
    commands: Sequence[Sequence[str]], link_mbit: float | None, folder: Path, *, limit_s: float = 600.0
) -> list[Path]:
    """Run one command on each of the two machines, with their output in files in `folder`.

    Raises:
        ScriptError: one failed or did not end in time; it names the machine and shows the end of its log.
    """
    rig = pair(link_mbit)
    logs = [folder / f"{machine.name}.log" for machine in rig.machines]
    with NamespaceBox(rig) as box:
        variables = {**os.environ, "OMP_NUM_THREADS": "1", "MASTER_ADDR": box.address("one")}
        variables |= {"MASTER_PORT": str(PORT), "WORLD_SIZE": "2", "GLOO_SOCKET_IFNAME": "eth0"}
        variables["PYTHONPATH"] = os.pathsep.join(filter(None, (SOURCE, os.environ.get("PYTHONPATH", ""))))
        processes = [
            box.start(machine.name, command, env={**variables, "RANK": str(rank), "LOCAL_RANK": "0"}, log=log)
            for rank, (machine, command, log) in enumerate(zip(rig.machines, commands, logs))
        ]
        deadline = time.monotonic() + limit_s
        while any(process.poll() is None for process in processes):
            for machine, process, log in zip(rig.machines, processes, logs):
                if process.poll():
                    raise ScriptError(f"the rank on machine {machine.name} failed: {log_tail(log, _TAIL)}")
            if time.monotonic() > deadline:
                raise ScriptError(f"the ranks had not ended after {limit_s:g} s: {log_tail(logs[0], _TAIL)}")
            time.sleep(_POLL_S)
        for machine, process, log in zip(rig.machines, processes, logs):
            if process.returncode:
                raise ScriptError(f"the rank on machine {machine.name} failed: {log_tail(log, _TAIL)}")
    return logs


def potluck_command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "potluck", *arguments]
