"""A cable that is pulled between a launcher and its machine: no guest outlives it, and the launcher notices too."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from support import sshd
from support.two_machines import ADDRESSES, Machine, TwoMachines, environment, why_not

WHY_NOT = sshd.why_not() or why_not()
pytestmark = [pytest.mark.root, pytest.mark.skipif(WHY_NOT is not None, reason=WHY_NOT or "")]

LAUNCHER = """
import sys, time
from pathlib import Path
from potluck.fleet.bootstrap import FleetNeeds
from potluck.spec.fleet_file import NamedMachine
from potluck.fleet.ssh import SshFleet
folder, config, python = Path(sys.argv[1]), *sys.argv[2:4]
machine = NamedMachine(ssh="beta", name="beta", python=python)
fleet = SshFleet([machine], FleetNeeds(imports={}), logs=folder, ssh=("ssh", "-F", config))
stubborn = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
)
task = fleet.run("beta", ["-c", stubborn, "a-stubborn-guest"], folder / "guest.log")
print("started", task.pid, flush=True)
ended = task.wait(60)
print("ended", ended.status, ended.why, flush=True)
fleet.close()
"""


@pytest.fixture
def net(tmp_path: Path) -> Iterator[tuple[TwoMachines, sshd.SshMachines]]:
    with TwoMachines(tmp_path / "two") as machines, sshd.SshMachines(tmp_path / "ssh") as servers:
        before = tuple(machines.beta.inside([]))
        servers.add("beta", address=ADDRESSES["beta"], before=before, reachable=False)
        yield machines, servers


def alive(machine: Machine) -> bool:
    words = machine.sh("cat /proc/[0-9]*/cmdline 2>/dev/null | tr '\\0' ' ' || true")
    return "a-stubborn-guest" in words


def test_no_guest_outlives_a_pulled_cable_even_one_that_ignores_signals(
    net: tuple[TwoMachines, sshd.SshMachines], tmp_path: Path
) -> None:
    machines, servers = net
    port = servers.machines[0].port
    machines.alpha.sh(f"until ssh-keyscan -T 1 -p {port} {ADDRESSES['beta']} 2>/dev/null | grep -q ssh; do :; done")
    config = servers.ssh[2]
    command = machines.alpha.inside([sys.executable, "-c", LAUNCHER, str(tmp_path), config, sys.executable])
    launcher = subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, text=True)
    assert launcher.stdout is not None
    try:
        assert launcher.stdout.readline().startswith("started ")
        deadline = time.monotonic() + 20
        while "up" not in (tmp_path / "guest.log").read_text():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert alive(machines.beta)
        machines.beta.sh("ip link set eth0 down")
        pulled = time.monotonic()
        while alive(machines.beta):
            assert time.monotonic() - pulled < 10, "the guest outlived the connection by 10 s"
            time.sleep(0.1)
        assert launcher.stdout.readline().startswith("ended None the connection to beta was closed")
        assert time.monotonic() - pulled < 12
        assert launcher.wait(20) == 0
    finally:
        launcher.kill()
        launcher.wait()
        launcher.stdout.close()
