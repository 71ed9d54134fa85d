"""The doctor's checks over facts: every pain is named, and healthy machines and pairs have no finding at all."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from potluck.doctor import examine
from potluck.spec.facts import (
    CONTAINER,
    DENIED,
    ETHERNET,
    NO_ROUTE,
    REFUSED,
    THUNDERBOLT,
    TIMEOUT,
    UNKNOWN_NAME,
    VPN,
    WIFI,
    Case,
    Checkpoint,
    Disk,
    Facts,
    Firewall,
    Gpu,
    HostsLine,
    Interface,
    Ipv6,
    Lookup,
    Orphan,
    Port,
    Power,
    Route,
    SshHost,
    Torch,
    Transfer,
)
from potluck.spec.finding import BLOCKER, NOTE, SEVERITIES, WARNING, Finding
from support import healthy
from support.healthy import linux, mac, pair, reach, unreached

WIRED = Interface(name="eth1", kind=ETHERNET, addresses=("192.168.1.9/24",), mtu=1500, speed_mbit=1000)
LO = linux().interfaces[0]


def alone(facts: Facts) -> Case:
    return Case(here=facts)


def interfaces(*more: Interface, chosen: str = ETHERNET, **changes: Any) -> Facts:
    """A machine whose default route leaves by an interface of that kind."""
    first = replace(linux().interfaces[1], kind=chosen, **changes)
    return linux(interfaces=(LO, first, *more))


def environment(**variables: str) -> Case:
    return alone(linux(environment=variables))


def there(**changes: Any) -> Facts:
    return linux("laptop", 6, **changes)


def ssh(status: int | None, said: str, python: str = "") -> Case:
    return alone(linux(ssh=(SshHost(host="you@mac", status=status, said=said, python=python),)))


HEALTHY: dict[str, Callable[[], Case]] = {
    "a Linux machine": lambda: alone(linux()),
    "a Mac": lambda: alone(mac()),
    "a machine of which little is known": lambda: alone(
        Facts(name="x", platform="linux", torch=Torch(version="2.10"), interfaces=(LO, WIRED), default_route=False)
    ),
    "a GPU that torch can use": lambda: alone(
        linux(
            gpus=(Gpu(vendor="nvidia", name="RTX 4070", driver="560.1"),),
            torch=Torch(version="2.10", cuda_build="12.8", cuda_available=True),
        )
    ),
    "variables that are right": lambda: environment(
        GLOO_SOCKET_IFNAME="eth0", NCCL_SOCKET_IFNAME="^docker,lo", OMP_NUM_THREADS="8", MASTER_ADDR="192.168.1.5"
    ),
    "a firewall that lets the port in": lambda: alone(
        linux(
            ports=(Port(number=7171, free=True, wanted_by="--port"),),
            firewalls=(Firewall(tool="ufw", blocks=True, allowed=("22", "7000-7200"), how="ufw status"),),
        )
    ),
    "IPv6 off everywhere": lambda: alone(
        linux(
            ipv6=Ipv6(sockets=False, loopback=False),
            hosts=(HostsLine(address="127.0.0.1", names=("localhost",)),),
            interfaces=(replace(LO, addresses=("127.0.0.1/8",)), linux().interfaces[1]),
        )
    ),
    "a VPN that is not in the way": lambda: alone(
        interfaces(Interface(name="tailscale0", kind=VPN, addresses=("100.101.1.2/32",), mtu=1280))
    ),
    "only Tailscale": lambda: alone(interfaces(chosen=VPN)),
    "a whole checkpoint": lambda: alone(linux(checkpoints=(Checkpoint(path="step-1", whole=True),))),
    "ssh without a password": lambda: ssh(0, "", "Python 3.12.1"),
    "a model that fits": lambda: alone(linux(model_parameters=124_000_000)),
    "a pair": pair,
    "a pair whose firewalls were passed": lambda: pair(
        linux(firewalls=(Firewall(tool="ufw", blocks=True, how="ufw status"),)),
        there(firewalls=(Firewall(tool="ufw", blocks=True, how="ufw status"),)),
    ),
    "a pair of Macs": lambda: pair(mac("a", 5), mac("b", 6)),
    "torch's patch versions differ": lambda: pair(None, there(torch=Torch(version="2.10.1"))),
    "a running host": lambda: replace(pair(partner="host", back=(), transfers=()), there=None),
    "one of several addresses answers": lambda: pair(
        reaches=(reach(linux(), there(), outcome=TIMEOUT, address="10.0.0.9"), reach(linux(), there()))
    ),
}


@pytest.mark.parametrize("name", HEALTHY)
def test_no_false_alarm(name: str) -> None:
    diagnosis = examine(HEALTHY[name]())
    assert diagnosis.findings == ()
    assert diagnosis.healthy
    assert diagnosis.fine


near = Route(to="192.168.1.6", interface="eth0", source="192.168.1.5", neighbour="reachable")
gone = replace(near, neighbour="failed")
unknown = replace(near, neighbour=None)
lost = Transfer(direction="in", size_bytes=65536, arrived=False, seconds=2.5)
small = Transfer(direction="out", size_bytes=400, arrived=True, seconds=0.01)
docker = Interface(name="docker0", kind=CONTAINER, addresses=("172.17.0.1/16",), mtu=1500)
nvidia = Gpu(vendor="nvidia", name="RTX 4070", driver="560.1", how="nvidia-smi")
wifi = Interface(name="wlan0", kind=WIFI, addresses=("192.168.1.5/24",), mtu=1500)

# (pain, code, severity, case)
PAINS: list[tuple[int, str, str, Callable[[], Case]]] = [
    (1, "gloo-cannot-join-these", NOTE, lambda: pair(linux(), mac())),
    (1, "gloo-cannot-join-these", NOTE, lambda: pair(mac(), linux())),
    (2, "mps-not-usable", WARNING, lambda: alone(mac(torch=Torch(version="2.10", mps_built=False)))),
    (
        2,
        "mps-not-usable",
        WARNING,
        lambda: alone(mac(torch=Torch(version="2", mps_built=True, mps_available=False))),
    ),
    (2, "intel-python", WARNING, lambda: alone(mac(translated=True))),
    (3, "no-network", BLOCKER, lambda: alone(linux(interfaces=(LO,), default_address=None))),
    (3, "container-interface", NOTE, lambda: alone(interfaces(docker))),
    (3, "vpn-before-cable", WARNING, lambda: alone(interfaces(WIRED, chosen=VPN))),
    (3, "socket-variable-unknown", WARNING, lambda: environment(GLOO_SOCKET_IFNAME="enp3s0")),
    (3, "socket-variable-unknown", WARNING, lambda: environment(NCCL_SOCKET_IFNAME="=eth")),
    (3, "socket-variable-unusable", WARNING, lambda: environment(NCCL_SOCKET_IFNAME="lo")),
    (3, "master-addr-is-loopback", NOTE, lambda: environment(MASTER_ADDR="127.0.0.1")),
    (3, "token-names-loopback", BLOCKER, lambda: unreached(None, {"address": "127.0.0.1", "outcome": REFUSED})),
    (4, "socket-variable-syntax", WARNING, lambda: environment(GLOO_SOCKET_IFNAME="^lo")),
    (4, "socket-variable-syntax", WARNING, lambda: environment(GLOO_SOCKET_IFNAME="=eth0")),
    (4, "socket-variable-syntax", WARNING, lambda: environment(NCCL_SOCKET_IFNAME="eth0,")),
    (
        5,
        "own-name-is-loopback",
        NOTE,
        lambda: alone(linux(hosts=(HostsLine(address="127.0.1.1", names=("tower",)),))),
    ),
    (6, "firewall-there", BLOCKER, lambda: unreached(None, {"route": near})),
    (6, "firewall-there", BLOCKER, lambda: unreached(None, {}, {"port": 22, "outcome": REFUSED, "wanted": False})),
    (6, "firewall-there", BLOCKER, lambda: unreached(None, {"outcome": NO_ROUTE, "errno": 113, "route": near})),
    (
        6,
        "firewall-there",
        BLOCKER,
        lambda: unreached(
            mac(), {"outcome": NO_ROUTE, "errno": 65}, {"port": 22, "outcome": REFUSED, "wanted": False}
        ),
    ),
    (6, "firewall-here-outgoing", BLOCKER, lambda: unreached(None, {"outcome": DENIED, "errno": 1})),
    (
        6,
        "firewall-here-outgoing",
        BLOCKER,
        lambda: unreached(linux(firewalls=(Firewall(tool="nftables", blocks=False, out_denied=("7171",)),)), {}),
    ),
    (6, "nothing-listens", BLOCKER, lambda: unreached(None, {"outcome": REFUSED})),
    (6, "no-answer", BLOCKER, lambda: unreached(None, {"route": unknown})),
    (6, "blocked-here", WARNING, lambda: pair(back=(reach(there(), linux(), outcome=TIMEOUT),))),
    (6, "handshake-failed", BLOCKER, lambda: pair(handshake="the host refused this token")),
    (6, "host-silent", WARNING, lambda: pair(partner="silent")),
    (6, "mtu-black-hole", BLOCKER, lambda: pair(transfers=(small, lost))),
    (6, "firewall-blocks", WARNING, lambda: alone(linux(firewalls=(Firewall(tool="ufw", blocks=True, how="x"),)))),
    (
        6,
        "firewall-blocks",
        WARNING,
        lambda: alone(linux(firewalls=(Firewall(tool="nftables", blocks=False, denied=("7100-7180",), how="x"),))),
    ),
    (7, "macos-local-network-privacy", BLOCKER, lambda: unreached(mac(), {"outcome": NO_ROUTE, "errno": 65})),
    (8, "slow-resolver", NOTE, lambda: alone(linux(lookups=(Lookup(asked="tower", seconds=3, finished=False),)))),
    (8, "own-name-unknown", NOTE, lambda: alone(linux(lookups=(Lookup(asked="tower", seconds=0, error="gai 8"),)))),
    (8, "unknown-name", BLOCKER, lambda: unreached(None, {"outcome": UNKNOWN_NAME, "address": "towr"})),
    (9, "port-taken", BLOCKER, lambda: alone(linux(ports=(Port(number=7171, free=False, wanted_by="--port"),)))),
    (9, "port-taken", NOTE, lambda: alone(linux(ports=(Port(number=29500, free=False, wanted_by="torchrun"),)))),
    (10, "ipv6-half-on", NOTE, lambda: alone(linux(ipv6=Ipv6(loopback=False, switched_off=True)))),
    (11, "apart-on-one-network", BLOCKER, lambda: unreached(None, {"route": gone})),
    (
        11,
        "not-on-this-network",
        BLOCKER,
        lambda: unreached(None, {"outcome": NO_ROUTE, "address": "10.1.1.1", "route": None}),
    ),
    (12, "wifi-before-cable", WARNING, lambda: alone(interfaces(WIRED, chosen=WIFI))),
    (12, "wifi-in-use", NOTE, lambda: pair(linux(interfaces=(LO, wifi)))),
    (13, "slow-link", WARNING, lambda: pair(interfaces(speed_mbit=100))),
    (14, "model-does-not-fit", BLOCKER, lambda: alone(linux(model_parameters=2_500_000_000))),
    (14, "model-does-not-fit", WARNING, lambda: alone(linux(model_parameters=1_500_000_000))),
    (14, "little-memory", WARNING, lambda: alone(linux(memory_free_bytes=10**8))),
    (
        19,
        "orphan",
        WARNING,
        lambda: alone(linux(orphans=(Orphan(pid=9, command="x", age_s=9, why="y", surely=True),))),
    ),
    (
        20,
        "torn-checkpoint",
        BLOCKER,
        lambda: alone(linux(checkpoints=(Checkpoint(path="a", whole=False, why="x"),))),
    ),
    (
        20,
        "torn-checkpoint",
        WARNING,
        lambda: alone(linux(checkpoints=(Checkpoint(path="b", whole=False), Checkpoint(path="a", whole=True)))),
    ),
    (20, "runs-not-writable", BLOCKER, lambda: alone(linux(disk=Disk(path="/x", writable=False)))),
    (20, "disk-full", BLOCKER, lambda: alone(linux(disk=Disk(path="/x", free_bytes=10**6)))),
    (20, "disk-full", WARNING, lambda: alone(linux(disk=Disk(path="/x", free_bytes=10**9)))),
    (21, "ssh-password", BLOCKER, lambda: ssh(255, "you@mac: Permission denied (publickey,password).")),
    (21, "ssh-unknown-host", BLOCKER, lambda: ssh(255, "Host key verification failed.")),
    (21, "ssh-unknown-name", BLOCKER, lambda: ssh(255, "ssh: Could not resolve hostname mac: Name or service")),
    (21, "ssh-refused", BLOCKER, lambda: ssh(255, "connect to host mac port 22: Connection refused")),
    (21, "ssh-unreachable", BLOCKER, lambda: ssh(255, "connect to host mac port 22: Connection timed out")),
    (21, "ssh-path", BLOCKER, lambda: ssh(127, "bash: line 1: python3: command not found")),
    (21, "ssh-silent", BLOCKER, lambda: ssh(None, "")),
    (22, "protocols-differ", BLOCKER, lambda: pair(None, there(protocol=3))),
    (22, "potluck-versions-differ", WARNING, lambda: pair(None, there(potluck="0.2.0"))),
    (22, "torch-versions-differ", NOTE, lambda: pair(None, there(torch=Torch(version="2.9.1")))),
    (22, "no-torch", BLOCKER, lambda: alone(linux(torch=Torch(error="it is not installed")))),
    (23, "windows", NOTE, lambda: alone(linux(platform="win32"))),
    (
        23,
        "wsl-behind-nat",
        WARNING,
        lambda: alone(
            linux(
                wsl=True,
                default_address="172.20.1.2",
                interfaces=(LO, replace(linux().interfaces[1], addresses=("172.20.1.2/20",))),
            )
        ),
    ),
    (24, "mps-without-limit", WARNING, lambda: alone(mac(environment={"PYTORCH_MPS_HIGH_WATERMARK_RATIO": "0.0"}))),
    (24, "mps-fallback", NOTE, lambda: alone(mac(environment={"PYTORCH_ENABLE_MPS_FALLBACK": "1"}))),
    (25, "on-battery", WARNING, lambda: alone(linux(power=Power(on_battery=True, percent=40.0, how="battery")))),
    (25, "sleeps-when-idle", WARNING, lambda: alone(mac(power=Power(sleeps_after_s=60.0, how="pmset -g")))),
    (25, "thread-variable", NOTE, lambda: environment(OMP_NUM_THREADS="1")),
    (25, "too-many-threads", WARNING, lambda: environment(POTLUCK_THREADS="16")),
]
OTHERS: list[tuple[str, str, Callable[[], Case]]] = [
    ("torch-without-gpu", WARNING, lambda: alone(linux(gpus=(nvidia,)))),
    (
        "gpu-not-usable",
        WARNING,
        lambda: alone(linux(gpus=(nvidia,), torch=Torch(version="2", cuda_build="13.0", cuda_available=False))),
    ),
    ("gpu-hidden", WARNING, lambda: alone(linux(gpus=(nvidia,), environment={"CUDA_VISIBLE_DEVICES": "-1"}))),
    ("small-mtu", WARNING, lambda: alone(interfaces(mtu=576))),
    ("mtu-differs", WARNING, lambda: pair(interfaces(mtu=9000))),
]


def only(case: Case) -> Finding:
    findings = examine(case).findings
    assert len(findings) == 1, [f.code for f in findings]
    return findings[0]


@pytest.mark.parametrize(("pain", "code", "severity", "case"), PAINS, ids=[f"{p}-{c}" for p, c, *_ in PAINS])
def test_a_pain_is_named_and_nothing_else(pain: int, code: str, severity: str, case: Callable[[], Case]) -> None:
    finding = only(case())
    assert (finding.code, finding.severity) == (code, severity)
    assert pain in finding.pains
    assert all((finding.what, finding.how, finding.breaks, finding.fix, finding.machine))
    assert examine(case()).healthy == (severity != BLOCKER)


@pytest.mark.parametrize(("code", "severity", "case"), OTHERS, ids=[code for code, *_ in OTHERS])
def test_what_is_not_among_the_pains_is_named_too(code: str, severity: str, case: Callable[[], Case]) -> None:
    finding = only(case())
    assert (finding.code, finding.severity) == (code, severity)


CANNOT_HAPPEN = {15, 16, 17, 18}


def test_every_pain_has_a_finding_or_cannot_happen_with_us() -> None:
    named = {pain for pain, *_ in PAINS}
    assert not named & CANNOT_HAPPEN
    assert named | CANNOT_HAPPEN == set(range(1, 26))


def test_the_docs_list_every_finding_and_no_other() -> None:
    root = Path(__file__).resolve().parents[2]
    page = (root / "src" / "potluck" / "troubleshooting" / "doctor.md").read_text()
    listed = set(re.findall(r"`([a-z0-9]+(?:-[a-z0-9]+)+|orphan|windows)`", page))
    source = "".join(path.read_text() for path in (root / "src" / "potluck" / "doctor").glob("*.py"))
    tested = {code for _, code, *_ in PAINS} | {code for code, *_ in OTHERS}
    assert tested <= listed
    assert {code for code in listed if f'"{code}"' not in source} == set()


def test_both_ends_are_told_apart_where_large_messages_are_lost() -> None:
    finding = only(pair(transfers=(small, replace(lost, direction="out"), lost)))
    assert "from tower to laptop and from laptop to tower" in finding.what
    assert "mtu" in finding.fix


def test_a_wired_alternative_makes_wifi_a_warning() -> None:
    case = pair(linux(interfaces=(LO, wifi, replace(WIRED, kind=THUNDERBOLT))))
    found = {f.code: f for f in examine(case).findings}
    assert found["wifi-in-use"].severity == WARNING
    assert "192.168.1.9" in found["wifi-in-use"].fix


def test_findings_come_by_severity_and_the_machine_is_named() -> None:
    here = linux(
        environment={"OMP_NUM_THREADS": "1"}, memory_free_bytes=10**8, disk=Disk(path="/x", writable=False)
    )
    findings = examine(pair(here, there(power=Power(on_battery=True, how="x")))).findings
    ranks = [SEVERITIES.index(f.severity) for f in findings]
    assert ranks == sorted(ranks)
    assert len(set(ranks)) == 3
    assert {f.code: f.machine for f in findings}["on-battery"] == "laptop"


def test_localhost_stays_where_it_is_when_the_own_name_is_taken_from_loopback() -> None:
    case = alone(linux(hosts=(HostsLine(address="127.0.0.1", names=("localhost", "tower")),)))
    fix = only(case).fix
    assert "192.168.1.5 tower" in fix
    assert "s/[[:space:]]tower" in fix  # only the name goes, not the line's address


@pytest.mark.parametrize(
    ("tool", "words"),
    [
        ("ufw", "sudo ufw allow 7171/tcp"),
        ("firewalld", "firewall-cmd --add-port=7171/tcp"),
        ("nftables", "nft insert rule inet filter input tcp dport 7171 accept"),
        ("iptables", "iptables -I INPUT -p tcp --dport 7171 -j ACCEPT"),
        ("macos", "socketfilterfw --add"),
        ("windows", "localport=7171"),
    ],
)
def test_every_firewall_has_its_command(tool: str, words: str) -> None:
    wall = Firewall(tool=tool, blocks=True, how="nft list ruleset, chain inet filter input")
    assert words in only(alone(linux(firewalls=(wall,)))).fix


def test_clocks_are_said_to_be_irrelevant_and_why() -> None:
    (line,) = [fine for fine in examine(pair()).fine if "clocks" in fine.what]
    assert "never compared" in line.details


def test_gloo_is_not_said_to_have_been_tried() -> None:
    assert "not run by us" in only(pair(linux(), mac())).how
    assert healthy.LAN not in only(pair(linux(), mac())).how
