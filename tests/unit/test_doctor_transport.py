"""What the doctor reads from NCCL_DEBUG=INFO: interfaces, cards, transports, variables. Lines as in public "
"reports."""

# ruff: noqa: E501 -- messages stand here as they were written

from __future__ import annotations

import io

import pytest

from potluck.cli._doctor_view import lines_of
from potluck.doctor.chosen_transport import VARIABLES, kind_of
from potluck.doctor.log import read_log
from potluck.doctor.log_text import Part
from potluck.spec.facts import Case
from potluck.spec.finding import NOTE, WARNING, Diagnosis, LogReading
from support.healthy import linux

TWO_ROCE = """\
dgxh100-4:460770:460770 [0] NCCL INFO Bootstrap : Using enp220s0np0:11.1.128.136<0>
dgxh100-4:460770:460770 [0] NCCL INFO NET/Plugin : No plugin found, using internal implementation
dgxh100-4:460770:460842 [0] NCCL INFO NET/IB : Using [0]mlx5_10:1/RoCE [1]mlx5_11:1/RoCE [RO]; OOB enp220s0np0:11.1.128.136<0>
dgxh100-4:460770:460842 [0] NCCL INFO Using network IB
dgxh100-3:2152176:2152176 [0] NCCL INFO Bootstrap : Using enp220s0np0:11.1.128.128<0>
dgxh100-4:460770:460842 [0] NCCL INFO Channel 00/0 : 1[0] -> 0[0] [receive] via NET/IB/0/GDRDMA
dgxh100-4:460770:460842 [0] NCCL INFO Channel 00/0 : 0[0] -> 2[0] via P2P/CUMEM
"""
DOCKER = """\
gpu01:98911:98911 [0] NCCL INFO Bootstrap : Using [0]docker0:172.17.0.1<0>
gpu01:98911:98911 [0] NCCL INFO NCCL_SOCKET_IFNAME set by environment to docker0
gpu01:98911:98911 [0] NCCL INFO NCCL_IB_DISABLE set by environment to 1.
gpu01:98911:98911 [0] NCCL INFO NET/Socket : Using [0]docker0:172.17.0.1<0>
gpu01:98911:98911 [0] NCCL INFO Using network Socket
gpu01:98911:98923 [3] NCCL INFO Ring 00 : 3[b01000] -> 4[201000] [send] via NET/Socket/0
"""


def read(text: str) -> LogReading:
    return read_log([Part(1, text)], "run.log")


def said(text: str) -> list[str]:
    return [f"{fine.machine}: {fine.what}" if fine.machine else fine.what for fine in read(text).network]


def codes(text: str) -> list[tuple[str, str]]:
    return [(finding.code, finding.severity) for finding in read(text).findings]


def test_interfaces_cards_network_and_channels() -> None:
    assert said(TWO_ROCE) == [
        "dgxh100-4: the start (bootstrap): enp220s0np0 (11.1.128.136)",
        "dgxh100-3: the start (bootstrap): enp220s0np0 (11.1.128.128)",
        "dgxh100-4: InfiniBand or RoCE cards (NET/IB): mlx5_10:1 (RoCE), mlx5_11:1 (RoCE)",
        "network between machines: IB",
        "channels: 1 via NET/IB with GPUDirect RDMA, 1 via P2P",
    ]
    assert codes(TWO_ROCE) == []
    assert not read(TWO_ROCE).failed


def test_docker_is_a_warning_and_no_failure_and_variables_are_explained() -> None:
    assert codes(DOCKER) == [("nccl-container", WARNING)]
    assert not read(DOCKER).failed
    details = {fine.what: fine.details for fine in read(DOCKER).network}
    assert "data goes over TCP" in details["NCCL_IB_DISABLE=1"]
    assert VARIABLES["NCCL_SOCKET_IFNAME"] in details["NCCL_SOCKET_IFNAME=docker0"]
    diagnosis = Diagnosis(findings=(), fine=(), log=read(DOCKER))
    shown = "\n".join(line.plain for line in lines_of(Case(here=linux()), diagnosis, 100, io.StringIO()))
    assert "  network   gpu01: the start (bootstrap): docker0 (172.17.0.1) (line 1)" in shown
    assert "network between machines: Socket (line 5)" in shown


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("a:1:1 [0] NCCL INFO Bootstrap : Using tailscale0:100.64.0.24<0>", [("nccl-vpn", WARNING)]),
        ("a:1:1 [0] NCCL INFO NET/Socket : Using [0]eth0:10.0.0.1<0> [1]wg0:10.8.0.2<0>", [("nccl-vpn", WARNING)]),
        ("a:1:1 [0] NCCL INFO NET : Using interface lo:127.0.0.1<0>", [("nccl-loopback", NOTE)]),
        ("a:1:1 [0] NCCL INFO Bootstrap : Using [0]docker0:172.17.0.1<0>", [("nccl-container", WARNING)]),
        ("a:1:1 [0] NCCL INFO Bootstrap : Using [0]eth0:172.17.0.3<0>", [("nccl-container", NOTE)]),
        ("a:1:1 [0] NCCL INFO Bootstrap : Using [0]ibs102:172.17.1.141<0>", []),
        ("a:1:1 [0] NCCL INFO NET : Using interface enp1s0f0:100.97.70.134<0>", []),
        ("a:1:1 [0] NCCL INFO Bootstrap : Using [0]ip6tnl0:fe80::e866:1%ip6tnl0<0>", [("nccl-vpn", WARNING)]),
        ("a:1:1 [0] NCCL INFO Bootstrap : Using eth1:fe80::215:5dff:fe33:ff6d%eth1<0>", []),
        ("a:1:1 [0] NCCL INFO Bootstrap: Using bond0:10.1.2.3<0>", []),
        ("my script: Using eth0:10.0.0.1<0>", []),
    ],
)
def test_containers_vpns_and_loopback(line: str, found: list[tuple[str, str]]) -> None:
    assert codes(line) == found


def of_lines(*lines: str) -> list[tuple[str, str]]:
    return codes("\n".join(lines))


@pytest.mark.parametrize(
    ("line", "code", "left_out"),
    [
        ("b:7839:7911 [0] NCCL INFO NET/Socket : Using [0]ens5f0np0:10.220.178.201<0> [2]virbr0:192.168.122.1<0>", "nccl-container", "virbr"),
        ("[1,3]<stdout>:gpu6:1410:1605 [3] NCCL INFO NET/Socket : Using [0]enp1s0f0:172.16.0.166<0> [2]flannel.1:10.244.3.0<0>", "nccl-overlay", "flannel"),
        ("n:1:1 [0] NCCL INFO NET/Socket : Using [0]eno1:10.0.0.1<0> [1]cni0:10.244.1.1<0>", "nccl-container", "cni"),
        ("n:1:1 [0] NCCL INFO NET/Socket : Using [0]eno1:10.0.0.1<0> [1]cali3f1:fe80::ecee:eeff:feee:eeee%cali3f1<0>", "nccl-overlay", "cali"),
        ("n:1:1 [0] NCCL INFO Bootstrap : Using cilium_host:10.0.1.7<0>", "nccl-overlay", "cilium"),
        ("oneflow-15:3907318:3907604 [1] NCCL INFO NET/Socket : Using [0]eno1:192.168.1.15<0> [1]veth2ea2288:fe80::78d8:4eff:fe15:8fed%veth2ea2288<0>", "nccl-container", "veth"),
        ("(RayTrainWorker pid=123) n3:1:1 [0] NCCL INFO Bootstrap: Using wg0:10.8.0.2<0>", "nccl-vpn", "wg"),
        ("n:1:1 [0] NCCL INFO Bootstrap: Using ztbto5x7mi:10.147.17.5<0>", "nccl-vpn", "zt"),
        ("[default0]:n4:12:12 [0] NCCL INFO Bootstrap : Using br-1234abcd5678:172.19.0.1<0>", "nccl-container", "br-"),
        ("a:1:1 [0] NCCL INFO Bootstrap: Using tailscale0:100.64.0.24<0>", "nccl-vpn", "tailscale"),
    ],
)  # fmt: skip
def test_the_list_of_names_leaves_out_the_interface_that_was_found(line: str, code: str, left_out: str) -> None:
    (finding,) = read(line).findings
    assert (finding.code, finding.severity) == (code, WARNING)
    assert f"export NCCL_SOCKET_IFNAME=^lo,docker,{left_out}   (all but these)" in finding.fix


def test_an_overlay_between_nodes_is_slow_and_not_unreachable() -> None:
    (finding,) = read("n:1:1 [0] NCCL INFO NET/Socket : Using [0]flannel.1:10.244.3.0<0>").findings
    assert "other nodes are reached there" in finding.breaks
    assert "slower than the network beneath" in finding.breaks


def test_a_network_that_compose_made_is_of_containers() -> None:
    """Its name follows from the containers: a host name of twelve hexadecimal digits, 172.16.0.0/12, eth0."""
    line = "{}:20:20 [0] NCCL INFO Bootstrap : Using eth0:{}<0>"
    (finding,) = read(
        "\n".join(line.format(*one) for one in (("a1b2c3d4e5f6", "172.18.0.2"), ("f6e5d4c3b2a1", "172.18.0.3")))
    ).findings
    assert (finding.code, finding.severity) == ("nccl-container", WARNING)
    assert finding.fix.startswith("docker run --network=host")
    assert "=^" not in finding.fix  # there is nothing but eth0
    assert of_lines(line.format("ad5b8ae33076", "10.0.1.2")) == []
    assert of_lines(line.format("ip-172-31-12-21", "172.31.12.21")) == []


NO_GDR = """\
hostname1:25668:27396 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/RoCE [1]mlx5_1:1/RoCE [RO]; OOB primaryip:10.10.10.10<0>
hostname1:25668:27396 [0] NCCL INFO NET/IB : GPU Direct RDMA Disabled for HCA 0 'mlx5_0'
hostname1:25668:27396 [0] NCCL INFO NET/IB : GPU Direct RDMA Disabled for HCA 1 'mlx5_1'
"""


def test_cards_without_gpudirect_are_named() -> None:
    (finding,) = read(NO_GDR).findings
    assert (finding.code, finding.severity, finding.machine) == ("nccl-no-gpudirect", WARNING, "hostname1")
    assert "(mlx5_0, mlx5_1)" in finding.what
    assert "modprobe nvidia-peermem" in finding.fix
    (old,) = read(
        "21346d5cefce:5325:5337 [0] NCCL INFO NET/IB : GPU Direct RDMA Disabled for HCA 1 'mlx5_1' (no module)"
    ).findings
    assert "(mlx5_1)" in old.what
    assert of_lines("n:1:1 [0] NCCL INFO NET/Socket : GPU Direct RDMA Disabled for HCA 0 'lo'") == []


def test_tcp_on_the_interface_of_an_infiniband_card_is_told() -> None:
    start = "n1:924:924 [5] NCCL INFO Bootstrap : Using ibp12s0:10.149.0.32<0>"
    none = "n1:924:1152 [5] NCCL INFO NET/IB : No device found."
    data = "n1:924:1152 [5] NCCL INFO NET/Socket : Using [0]ibp12s0:10.149.0.32<0>"
    (finding,) = read("\n".join((start, none, data))).findings
    assert (finding.code, finding.pains) == ("nccl-tcp-over-infiniband", (13,))
    assert "TCP on ibp12s0 (10.149.0.32)" in finding.what
    assert of_lines(start) == []
    # NCCL 2.4 names the interface of the start so, and takes the card
    old = "master_node:11715:11984 [0] NCCL INFO NET/Socket : Using [0]ib0:192.168.11.1<0>"
    card = "master_node:11715:11984 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB ; OOB ib0:192.168.11.1<0>"
    assert of_lines(old, card) == []
    wrong = "n1:1:2 [0] NCCL INFO NCCL_IB_HCA set to mlx4_9"
    assert [code for code, _ in of_lines(start, wrong, none, data)] == ["nccl-no-card", "nccl-tcp-over-infiniband"]


NEIGHBOURS = """\
cl4-gpu03-vm:1134070:1134070 [0] NCCL INFO NCCL_SOCKET_IFNAME set by environment to enp9s0np0
cl4-gpu03-vm:1134070:1134070 [0] NCCL INFO Bootstrap: Using enp9s0np0:10.99.0.2<0>
cl4-gpu04-vm:67905:67905 [0] NCCL INFO Bootstrap: Using tailscale0:100.64.0.27<0>
"""


def test_machines_on_two_networks_are_told_and_who_has_the_variable() -> None:
    vpn, other = read(NEIGHBOURS).findings
    assert (vpn.code, other.code) == ("nccl-vpn", "nccl-other-networks")
    assert "cl4-gpu03-vm took enp9s0np0 (10.99.0.2), and cl4-gpu04-vm tailscale0 (100.64.0.27)" in other.what
    assert "NCCL_SOCKET_IFNAME is set on cl4-gpu03-vm only" in other.breaks


@pytest.mark.parametrize("addresses", [("10.1.118.3", "10.200.102.5"), ("192.168.1.5", "192.168.7.5"), ("11.1.2.3", "52.1.2.3"), ("172.16.0.1", "172.31.255.1"), ("fe80::1%eno1", "10.0.0.1")])  # fmt: skip
def test_what_may_be_one_network_is_not_two(addresses: tuple[str, str]) -> None:
    assert (
        of_lines(*(f"n{i}:1:1 [0] NCCL INFO Bootstrap : Using eno1:{one}<0>" for i, one in enumerate(addresses)))
        == []
    )


def test_cards_with_two_ports_are_read() -> None:
    line = "bigo:1884:2298 [0] NCCL INFO NET/IB : Using [0]={[0] mlx5_2:1/RoCE, [1] mlx5_3:1/RoCE} [1]={[2] mlx5_0:1/RoCE, [3] mlx5_1:1/RoCE} [RO]; OOB bond0.526:169.136.106.9<0>"
    cards = "mlx5_2:1 (RoCE), mlx5_3:1 (RoCE), mlx5_0:1 (RoCE), mlx5_1:1 (RoCE)"
    assert f"bigo: InfiniBand or RoCE cards (NET/IB): {cards}" in said(line)
    sharp = "a:1:1 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB/SHARP [1]mlx5_1:1/IB/SHARP ; OOB eth0:10.0.1.2<0>"
    assert "a: InfiniBand or RoCE cards (NET/IB): mlx5_0:1 (IB), mlx5_1:1 (IB)" in said(sharp)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("NCCL_CROSS_NIC set by environment to 1.", "it may change cards"),
        ("NCCL_IB_TC set by environment to 106.", "traffic class"),
        ("NCCL_IB_SL set by environment to 3.", "service level"),
        ("NCCL_IB_QPS_PER_CONNECTION set by environment to 4.", "queue pairs"),
        ("NCCL_SOCKET_NTHREADS set by environment to 2.", "threads that send over TCP"),
        ("NCCL_NSOCKS_PERTHREAD set by environment to 2.", "sockets of each"),
    ],
)
def test_variables_are_explained(line: str, words: str) -> None:
    (fine,) = read(f"n2:1:9 [0] NCCL INFO {line}").network
    assert words in fine.details


def test_loopback_is_a_warning_where_the_log_has_two_machines() -> None:
    log = "\n".join(f"{host}:1:1 [0] NCCL INFO Bootstrap : Using lo:127.0.0.1<0>" for host in ("a", "b"))
    assert codes(log) == [("nccl-loopback", WARNING)]


def test_loopback_is_a_warning_where_another_machine_is_only_heard_of() -> None:
    log = "a:1:1 [0] NCCL INFO comm 0x7 rank 0 nranks 4\nb:1:1 [0] NCCL INFO NET : Using interface lo:127.0.0.1<0>"
    assert codes(log) == [("nccl-loopback", WARNING)]


def test_two_containers_with_one_address_are_told_apart_from_one() -> None:
    line = "{}:1:1 [0] NCCL INFO Bootstrap : Using [0]eth0:172.17.0.2<0>"
    (finding,) = read("\n".join(line.format(host) for host in ("26a46eb2b1d3", "c6ad99331184"))).findings
    assert (finding.code, finding.severity) == ("nccl-same-address", WARNING)
    assert "26a46eb2b1d3 and c6ad99331184 took the same address: eth0 (172.17.0.2)" in finding.what
    assert finding.fix.startswith("docker run --network=host")


EFA = """\
p5-2:68:40 [0] NCCL INFO Bootstrap: Using eth0:10.36.29.253<0>
p5-2:68:40 [0] NCCL INFO NET/Plugin: Using internal network plugin.
p5-2:68:40 [0] NCCL INFO NET/OFI Selected Provider is efa (found 16 nics)
p5-2:68:40 [0] NCCL INFO Using network Libfabric
p5-2:68:40 [7] NCCL INFO Channel 00 : 7 -> 8 [send] via NET/AWS Libfabric/0
"""


def test_docker0_of_two_machines_is_no_matter_of_containers() -> None:
    """Each machine has a docker0, and all of them 172.17.0.1. NCCL 2.27 writes no space before the colon."""
    (finding,) = read(
        "tower:139901:139901 [0] NCCL INFO Bootstrap: Using docker0:172.17.0.1<0>\n"
        "box:88123:88123 [0] NCCL INFO Bootstrap: Using docker0:172.17.0.1<0>\n"
    ).findings
    assert finding.code == "nccl-same-address"
    assert "tower and box took the same address: docker0" in finding.what
    assert "inside each machine" in finding.breaks
    assert "docker run" not in finding.fix
    (inside,) = read("a1b2:1:1 [0] NCCL INFO Bootstrap : Using eth0:172.17.0.2<0>\n").findings
    assert inside.fix.startswith("docker run --network=host")


def test_a_plugin_of_libfabric_is_read_and_the_words_internal_plugin_are_no_network() -> None:
    assert said(EFA) == [
        "p5-2: the start (bootstrap): eth0 (10.36.29.253)",
        "p5-2: libfabric (NET/OFI, as for AWS's EFA): provider efa, 16 cards",
        "network between machines: Libfabric",
        "channels: 1 via NET/AWS Libfabric",
    ]
    assert codes(EFA) == []
    none = EFA + "libfabric:85:174::core:core:fi_getinfo_():1392<warn> fi_getinfo: provider efa output empty list\n"
    assert codes(none) == [("nccl-no-efa", WARNING)]


def test_cards_of_old_logs_a_missing_library_and_a_variable_of_zero() -> None:
    old = "a:1:1 [0] NCCL INFO NET/IB: [0] mlx5_1:1/IB\na:1:1 [0] NCCL INFO Using internal Network IB\n"
    assert said(old) == ["a: InfiniBand or RoCE card (NET/IB): mlx5_1:1 (IB)", "network between machines: IB"]
    missing = "a:1:1 [0] misc/ibvwrap.cc:63 NCCL WARN Failed to open libibverbs.so[.1]\n"
    assert said(missing) == ["a: InfiniBand and RoCE were not tried: libibverbs is not installed here"]
    assert codes(missing) == []
    (fine,) = read("a:1:1 [0] NCCL INFO NCCL_IB_DISABLE set by environment to 0.\n").network
    assert fine.details.startswith("0 is as if it were not set. 1: ")


def test_no_card_is_told_only_if_one_was_named() -> None:
    none = "a:1:1 [0] NCCL INFO NET/IB : No device found.\n"
    assert codes(none) == []
    named = "a:1:1 [0] NCCL INFO NCCL_IB_HCA set to mlx5_9\n" + none
    (finding,) = read(named).findings
    assert finding.code == "nccl-no-card"
    assert "NCCL_IB_HCA=mlx5_9 was set" in finding.what
    assert "the log does not say which" in finding.breaks


def test_gloo_names_no_interface_and_that_is_said() -> None:
    (fine,) = read(
        "[Gloo] Rank 0 is connected to 3 peer ranks. Expected number of connected peer ranks is : 3"
    ).network
    assert fine.what == "gloo connected its ranks: each to 3"
    assert "does not write which interface" in fine.details


@pytest.mark.parametrize(
    "text", ["", "Using \n", ": Using <0>", "NET/IB : Using [0]\x00:1/", "NCCL INFO x via \n" * 50]
)
def test_nothing_is_made_of_nothing(text: str) -> None:
    assert read(text).network == ()


def test_kinds() -> None:
    assert [kind_of(name, "10.0.0.1") for name in ("lo", "lo0", "br-0a1b2c3d", "utun3", "enp3s0", "long0")] == [
        "loopback", "loopback", "container", "VPN", "", "",
    ]  # fmt: skip
    assert kind_of("eth0", "no address") == ""
