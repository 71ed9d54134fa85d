"""What the doctor reads from NCCL_DEBUG=INFO: interfaces, cards, transports, variables. Lines as in public reports."""

# ruff: noqa: E501 -- messages stand here as they were written

from __future__ import annotations

import io

import pytest

from potluck.cli._doctor_view import lines_of
from potluck.doctor.log import read_log
from potluck.doctor.log_text import Part
from potluck.doctor.transport import VARIABLES, kind_of
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
        "channels: 1 via NET/IB, 1 via P2P",
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
        ("a:1:1 [0] NCCL INFO Bootstrap : Using [0]eth0:172.17.0.3<0>", [("nccl-container", WARNING)]),
        ("a:1:1 [0] NCCL INFO Bootstrap : Using eth1:fe80::215:5dff:fe33:ff6d%eth1<0>", []),
        ("a:1:1 [0] NCCL INFO Bootstrap: Using bond0:10.1.2.3<0>", []),
        ("my script: Using eth0:10.0.0.1<0>", []),
    ],
)
def test_containers_vpns_and_loopback(line: str, found: list[tuple[str, str]]) -> None:
    assert codes(line) == found


def test_loopback_is_a_warning_where_the_log_has_two_machines() -> None:
    log = "\n".join(f"{host}:1:1 [0] NCCL INFO Bootstrap : Using lo:127.0.0.1<0>" for host in ("a", "b"))
    assert codes(log) == [("nccl-loopback", WARNING)]


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
