"""Pains made for real, on one machine of namespaces and between two: the doctor names them, and nothing else."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from support.two_machines import ADDRESSES, Machine, TwoMachines, why_not

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(why_not() is not None, reason=why_not() or ""),
    pytest.mark.timeout(240),
]

PORT, BACK_PORT = 7171, 7272
SILENT_SERVER = """
import socket, time
probe = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
probe.bind(("10.77.0.2", 53))
print("silent", flush=True)
time.sleep(1000)
"""
TUNNEL = """
import fcntl, os, struct, time
tunnel = os.open("/dev/net/tun", os.O_RDWR)
fcntl.ioctl(tunnel, 0x400454CA, struct.pack("16sH22x", b"tun0", 0x1001))
print("open", flush=True)
time.sleep(1000)
"""


@pytest.fixture(scope="module")
def net(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoMachines]:
    with TwoMachines(tmp_path_factory.mktemp("two")) as machines:
        yield machines


@pytest.fixture(scope="module")
def listening(net: TwoMachines) -> Iterator[str]:
    """The token of a doctor that listens on beta."""
    with listener(net.beta, "--port", str(PORT)) as token:
        yield token


@contextlib.contextmanager
def listener(machine: Machine, *arguments: str) -> Iterator[str]:
    command = (sys.executable, "-m", "potluck", "doctor", "--listen", *arguments)
    with machine.running(*command, until="listening at") as output:
        match = re.search(r"potluck doctor (potluck\S+)", output)
        assert match
        yield match[1]


def diagnosed(
    machine: Machine, *arguments: str, status: int = 0, env: Mapping[str, str] | None = None
) -> dict[str, dict[str, Any]]:
    """The findings by their code; the exit status must be this one."""
    done = machine.potluck("doctor", "--json", *arguments, env=env)
    assert done.returncode == status, f"status {done.returncode}\n{done.stdout}\n{done.stderr}"
    assert done.stderr == ""
    diagnosis = json.loads(done.stdout)
    assert diagnosis["healthy"] == (status == 0)
    assert diagnosis["fine"]
    for finding in diagnosis["findings"]:
        assert all(finding[part] for part in ("what", "how", "breaks", "fix", "machine"))
    return {finding["code"]: finding for finding in diagnosis["findings"]}


@contextlib.contextmanager
def dropped(machine: Machine, port: int) -> Iterator[None]:
    """TCP to this port is swallowed without a word, as a firewall does; needs no firewall's tools."""
    machine.sh(
        "ip rule add pref 32 lookup local; ip rule del pref 0; "
        f"ip rule add pref 10 iif eth0 ipproto tcp dport {port} blackhole"
    )
    try:
        yield
    finally:
        machine.sh("ip rule del pref 10; ip rule add pref 0 lookup local; ip rule del pref 32")


@contextlib.contextmanager
def changed(machine: Machine, before: str, after: str) -> Iterator[None]:
    machine.sh(before)
    try:
        yield
    finally:
        machine.sh(after)
        machine.reset()


# -- nothing is wrong -------------------------------------------------------------------------------------------


def test_a_healthy_pair_has_no_findings_either_way(net: TwoMachines, listening: str) -> None:
    """Each side's own checks run, too, so this is also two healthy machines."""
    assert diagnosed(net.alpha, listening) == {}
    with listener(net.alpha) as token:
        assert diagnosed(net.beta, token) == {}


def test_a_healthy_pair_is_shown_in_green_lines(net: TwoMachines, listening: str) -> None:
    done = net.alpha.potluck("doctor", listening)
    assert done.returncode == 0
    for words in (
        "TCP to beta",
        "TCP back to alpha",
        "large messages arrive, both ways",
        "versions fit",
        "all is well",
    ):
        assert words in done.stdout
    assert "never compared" in done.stdout  # why clock skew does not matter
    assert listening not in done.stdout


# -- between two machines ---------------------------------------------------------------------------------------


def test_a_firewall_there_is_named_as_the_side_that_blocks(net: TwoMachines, listening: str) -> None:
    with dropped(net.beta, PORT):
        found = diagnosed(net.alpha, listening, status=1)
    assert found.keys() == {"firewall-there"}
    assert found["firewall-there"]["machine"] == ADDRESSES["beta"]
    assert f"allow {PORT}/tcp" in found["firewall-there"]["fix"]


def test_a_firewall_here_is_named_as_the_side_that_blocks(net: TwoMachines, listening: str) -> None:
    with dropped(net.alpha, BACK_PORT):
        found = diagnosed(net.alpha, listening, "--port", str(BACK_PORT))
    assert found.keys() == {"blocked-here"}
    assert found["blocked-here"]["machine"] == "alpha"


def test_an_mtu_black_hole_is_named(net: TwoMachines, listening: str) -> None:
    """The machines believe in 1500 bytes, the switch drops what is above 1200 and tells nobody."""
    with changed(net.switch, "ip link set to-alpha mtu 1200", "ip link set to-alpha mtu 1500"):
        found = diagnosed(net.alpha, listening, status=1)
    assert found.keys() == {"mtu-black-hole"}


def test_machines_kept_apart_by_their_switch_are_named(net: TwoMachines, listening: str) -> None:
    """What a guest Wi-Fi does: both are on the network, and no packet goes from one to the other."""
    switch = (
        "ip link set to-alpha type bridge_slave isolated {0}; ip link set to-beta type bridge_slave isolated {0}"
    )
    with changed(net.switch, switch.format("on"), switch.format("off")):
        net.alpha.sh("ip neigh flush dev eth0")
        found = diagnosed(net.alpha, listening, status=1)
    assert found.keys() == {"apart-on-one-network"}
    assert "Put both on one network" in found["apart-on-one-network"]["fix"]
    net.alpha.sh("ip neigh flush dev eth0")


def test_an_address_without_a_way_to_it(net: TwoMachines) -> None:
    assert diagnosed(net.alpha, "203.0.113.9:7171", status=1).keys() == {"not-on-this-network"}


def test_an_address_where_nothing_listens(net: TwoMachines) -> None:
    assert diagnosed(net.alpha, f"{ADDRESSES['beta']}:7999", status=1).keys() == {"nothing-listens"}
    assert diagnosed(net.alpha, ADDRESSES["beta"]) == {}  # the machine is there: more was not asked


def test_a_host_that_listens_for_itself_only(net: TwoMachines) -> None:
    with listener(net.beta, "--bind", "127.0.0.1") as token:
        assert diagnosed(net.alpha, token, status=1).keys() == {"token-names-loopback"}


# -- on one machine ---------------------------------------------------------------------------------------------


def test_an_interface_of_containers_is_left_out_and_named(net: TwoMachines) -> None:
    up = "ip link add docker0 type bridge && ip addr add 172.17.0.1/16 dev docker0 && ip link set docker0 up"
    with changed(net.alpha, up, "ip link del docker0"):
        found = diagnosed(net.alpha)
        shown = net.alpha.potluck("doctor").stdout
    assert found.keys() == {"container-interface"}
    assert "GLOO_SOCKET_IFNAME=eth0" in found["container-interface"]["fix"]
    assert re.search(r"docker0 .* left out", shown)


def test_a_vpn_that_takes_the_default_route(net: TwoMachines) -> None:
    if not Path("/dev/net/tun").exists():
        pytest.skip("this box has no /dev/net/tun")
    address = "ip addr add 10.8.0.2/24 dev tun0 && ip link set tun0 up && ip route add default dev tun0"
    with net.alpha.running(sys.executable, "-c", TUNNEL, until="open"):
        net.alpha.sh(address)
        found = diagnosed(net.alpha)
    assert found.keys() == {"vpn-before-cable"}
    assert ADDRESSES["alpha"] in found["vpn-before-cable"]["fix"]


def test_the_own_name_on_loopback_and_the_fix_that_is_offered(net: TwoMachines) -> None:
    net.alpha.hosts.write_text("127.0.0.1 localhost\n127.0.1.1 alpha\n")
    found = diagnosed(net.alpha)
    assert found.keys() == {"own-name-is-loopback"}
    # A bind mount cannot be replaced, so the command is tried on a copy.
    copy = net.alpha.folder / "copy"
    shutil.copy(net.alpha.hosts, copy)
    net.alpha.sh(found["own-name-is-loopback"]["fix"].replace("sudo ", "").replace("/etc/hosts", str(copy)))
    net.alpha.hosts.write_text(copy.read_text())
    assert diagnosed(net.alpha) == {}
    net.alpha.reset()


def test_a_slow_resolver(net: TwoMachines) -> None:
    net.alpha.hosts.write_text("127.0.0.1 localhost\n")
    net.alpha.resolv.write_text(f"nameserver {ADDRESSES['beta']}\n")
    try:
        with net.beta.running(sys.executable, "-c", SILENT_SERVER, until="silent"):
            found = diagnosed(net.alpha)
    finally:
        net.alpha.reset()
    assert found.keys() == {"slow-resolver"}


def test_ipv6_half_on(net: TwoMachines) -> None:
    setting = "sysctl -qw net.ipv6.conf.all.disable_ipv6={0} net.ipv6.conf.lo.disable_ipv6={0}"
    net.alpha.hosts.write_text("127.0.0.1 localhost\n::1 localhost ip6-localhost\n10.77.0.1 alpha\n")
    assert diagnosed(net.alpha) == {}  # this much is how every Debian is
    with changed(net.alpha, setting.format(1), setting.format(0)):
        found = diagnosed(net.alpha)
    assert found.keys() == {"ipv6-half-on"}


def test_a_folder_for_runs_on_a_full_and_on_a_read_only_disk(net: TwoMachines, tmp_path: Path) -> None:
    with changed(net.alpha, f"mount -t tmpfs -o size=1m tmpfs {tmp_path}", f"umount {tmp_path}"):
        net.alpha.sh(f"head -c 2000000 /dev/zero > {tmp_path}/x || true")
        assert diagnosed(net.alpha, "--runs", str(tmp_path), status=1).keys() == {"disk-full"}
        net.alpha.sh(f"mount -o remount,ro {tmp_path}")
        found = diagnosed(net.alpha, "--runs", f"{tmp_path}/runs", status=1)
    assert found.keys() == {"runs-not-writable"}
    assert "Read-only" in found["runs-not-writable"]["what"]


def test_ssh_to_a_machine_without_a_server(net: TwoMachines, tmp_path: Path) -> None:
    if shutil.which("ssh") is None:
        pytest.skip("needs ssh")
    cluster = tmp_path / "fleet.toml"
    cluster.write_text(f'[[machine]]\nssh = "{ADDRESSES["beta"]}"\n')
    found = diagnosed(net.alpha, "--cluster", str(cluster), status=1)
    assert found.keys() == {"ssh-refused"}


@pytest.fixture
def nft() -> None:
    """The program, and a kernel that has what it sets up."""
    if shutil.which("nft") is None:
        pytest.skip("needs nft")
    if subprocess.run(["unshare", "--net", "nft", "list", "tables"], capture_output=True).returncode != 0:
        pytest.skip("this kernel has no nftables")


@pytest.mark.usefixtures("nft")
def test_a_firewall_that_rejects_and_one_that_lets_nothing_out(net: TwoMachines, listening: str) -> None:
    chain = "nft add table inet t && nft add chain inet t c '{ type filter hook %s priority 0; }' && "
    chain += "nft add rule inet t c "
    rejects = chain % "input" + f"tcp dport {PORT} reject with icmpx type admin-prohibited"
    with changed(net.beta, rejects, "nft delete table inet t"):
        assert diagnosed(net.alpha, listening, status=1).keys() == {"firewall-there"}
    with changed(net.alpha, chain % "output" + f"tcp dport {PORT} drop", "nft delete table inet t"):
        found = diagnosed(net.alpha, listening, status=1)
    assert found.keys() == {"firewall-here-outgoing"}
    assert found["firewall-here-outgoing"]["machine"] == "alpha"


@pytest.mark.usefixtures("nft")
def test_a_firewall_is_read_and_its_fix_opens_the_port(net: TwoMachines) -> None:
    rules = (
        "nft add table inet filter && nft add chain inet filter input '{ type filter hook input priority 0; %s }'"
    )
    with changed(net.alpha, rules % "policy drop;", "nft delete table inet filter"):
        net.alpha.sh("nft add rule inet filter input iif lo accept")
        found = diagnosed(net.alpha, "--port", str(PORT))
        assert found.keys() == {"firewall-blocks"}
        command = found["firewall-blocks"]["fix"].partition("   ")[0].removeprefix("sudo ")
        net.alpha.sh(command)
        assert diagnosed(net.alpha, "--port", str(PORT)) == {}
