"""Two cables between two machines of namespaces, one slow: the doctor measures both and names the slow one."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from potluck.lab.topology import shaping
from support.two_machines import ADDRESSES, COMMAND_S, TwoMachines, why_not

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(why_not() is not None, reason=why_not() or ""),
    pytest.mark.timeout(240),
]
SECOND = {"alpha": "10.78.0.1", "beta": "10.78.0.2"}
TRIES = 3
SLOW_MBIT, FAST_MBIT = 4.0, 40.0
"""Both slow enough that other work on the box does not decide."""


@pytest.fixture(scope="module")
def net(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoMachines]:
    with TwoMachines(tmp_path_factory.mktemp("two")) as machines:
        cable = f"ip link add eth1 netns {machines.alpha.pid} type veth peer name eth1 netns {machines.beta.pid}"
        subprocess.run(cable.split(), check=True, timeout=COMMAND_S)
        for machine in (machines.alpha, machines.beta):
            machine.sh(f"ip addr add {SECOND[machine.name]}/24 dev eth1 && ip link set eth1 up")
        yield machines


def shape(net: TwoMachines, interface: str, mbit: float) -> None:
    for machine in (net.alpha, net.beta):
        machine.sh(f"tc qdisc del dev {interface} root 2>/dev/null || true")
        for line in shaping(interface, mbit, 0.0):
            machine.sh(f"tc {line}")


def met(net: TwoMachines, *, bind: str = "0.0.0.0") -> dict[str, Any]:
    """The diagnosis on alpha; its facts are kept."""
    command = (sys.executable, "-m", "potluck", "doctor", "--listen", "--bind", bind)
    with net.beta.running(*command, until="listening at") as output:
        token = re.search(r"potluck doctor (potluck\S+)", output)
        assert token
        done = net.alpha.potluck("doctor", token[1], "--json", "--save", str(net.alpha.folder / "facts.json"))
        assert done.returncode == 0, done.stdout + done.stderr
    diagnosis: dict[str, Any] = json.loads(done.stdout)
    return diagnosis


def met_until(net: TwoMachines, *, findings: int) -> dict[str, Any]:
    """Where something else on the box held a machine up for the moment of a measurement, once more."""
    for _ in range(TRIES):
        diagnosis = met(net)
        if len(diagnosis["findings"]) == findings and "not known" not in json.dumps(diagnosis["fine"]):
            break
    return diagnosis


def test_the_slow_address_is_named_with_both_speeds(net: TwoMachines) -> None:
    shape(net, "eth0", SLOW_MBIT)
    shape(net, "eth1", FAST_MBIT)
    diagnosis = met_until(net, findings=1)
    (finding,) = diagnosis["findings"]
    assert (finding["code"], finding["machine"], finding["pains"]) == ("slower-address", "beta", [12])
    slow, fast = re.findall(r"carries ([\d.]+) Mbit/s", finding["what"])
    assert 0.5 * SLOW_MBIT < float(slow) <= 1.1 * SLOW_MBIT
    assert 2 * SLOW_MBIT < float(fast) <= 1.1 * FAST_MBIT
    assert finding["what"].index(ADDRESSES["beta"]) < finding["what"].index(SECOND["beta"])
    assert finding["severity"] == ("warning" if "which is used" in finding["what"] else "note")
    ways = finding["fix"].splitlines()
    assert ways[0].startswith(f"potluck host --bind {SECOND['beta']} ")
    assert ways[1].startswith(f"potluck host --bind {SECOND['alpha']} ")
    shown = net.alpha.potluck("doctor", "--facts", str(net.alpha.folder / "facts.json")).stdout
    assert f"eth1 {SECOND['alpha']} → {SECOND['beta']}: " in shown


def test_addresses_that_are_alike_are_no_finding(net: TwoMachines) -> None:
    for interface in ("eth0", "eth1"):
        shape(net, interface, SLOW_MBIT)
    diagnosis = met_until(net, findings=0)
    assert diagnosis["findings"] == []
    measured = [fine["what"] for fine in diagnosis["fine"] if "→" in fine["what"]]
    assert len(measured) == 2
    assert all("Mbit/s there" in what for what in measured)


def test_an_address_at_which_the_other_does_not_listen_is_told(net: TwoMachines) -> None:
    diagnosis = met(net, bind=ADDRESSES["beta"])
    assert diagnosis["findings"] == []
    assert f"not measured: {SECOND['beta']}" in {fine["what"] for fine in diagnosis["fine"]}
