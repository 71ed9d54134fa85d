"""Facts of machines and pairs on which all is well: where tests of the doctor begin. It checks nothing."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from potluck.spec.facts import (
    CONNECTED,
    ETHERNET,
    LOOPBACK,
    Between,
    Case,
    Cpu,
    Disk,
    Facts,
    Firewall,
    HostsLine,
    Interface,
    Ipv6,
    Lookup,
    Port,
    Power,
    Reach,
    Route,
    Torch,
    Transfer,
)

LAN = "192.168.1."


def linux(name: str = "tower", number: int = 5, **changes: Any) -> Facts:
    """A Debian with a GPU-less torch, a cable, and nothing wrong."""
    address = f"{LAN}{number}"
    facts = Facts(
        name=name,
        platform="linux",
        system="Debian GNU/Linux 12",
        architecture="x86_64",
        python="3.12.1",
        potluck="0.1.0",
        protocol=2,
        torch=Torch(version="2.10.0+cpu"),
        interfaces=(
            Interface(name="lo", kind=LOOPBACK, addresses=("127.0.0.1/8", "::1/128"), mtu=65536),
            Interface(name="eth0", kind=ETHERNET, addresses=(f"{address}/24",), mtu=1500, speed_mbit=1000),
        ),
        default_address=address,
        hosts=(
            HostsLine(address="127.0.0.1", names=("localhost",)),
            HostsLine(address="::1", names=("localhost", "ip6-localhost")),
        ),
        lookups=(Lookup(asked=name, seconds=0.002, answers=(address,)),),
        ports=(Port(number=29500, free=True, wanted_by="torchrun's default"),),
        firewalls=(Firewall(tool="iptables", blocks=False, how="iptables -S INPUT"),),
        ipv6=Ipv6(),
        cpu=Cpu(name="Some CPU", physical=8, logical=16, usable=8),
        memory_bytes=32 * 10**9,
        memory_free_bytes=20 * 10**9,
        disk=Disk(path="/home/you/runs", free_bytes=100 * 10**9),
        power=Power(on_battery=False, percent=100.0, sleeps_after_s=0.0, how="the battery's own word"),
    )
    return replace(facts, **changes)


def mac(name: str = "mac", number: int = 7, **changes: Any) -> Facts:
    """An Apple silicon Mac with MPS, on the cable."""
    facts = linux(name, number)
    changed = replace(
        facts,
        platform="darwin",
        system="macOS 15.1",
        architecture="arm64",
        torch=Torch(version="2.10.0", mps_built=True, mps_available=True),
        interfaces=(
            Interface(name="lo0", kind=LOOPBACK, addresses=("127.0.0.1/8", "::1/128"), mtu=16384),
            Interface(name="en0", kind=ETHERNET, addresses=(f"{LAN}{number}/24",), mtu=1500, speed_mbit=1000),
        ),
        firewalls=(Firewall(tool="macos", blocks=False, how="socketfilterfw --getglobalstate"),),
    )
    return replace(changed, **changes)


def reach(here: Facts, there: Facts, **changes: Any) -> Reach:
    assert there.default_address is not None
    assert here.default_address is not None
    tried = Reach(
        machine=here.name,
        address=there.default_address,
        port=7171,
        outcome=CONNECTED,
        seconds=0.0004,
        route=Route(
            to=there.default_address,
            interface=here.interfaces[1].name,
            source=here.default_address,
            neighbour="reachable",
        ),
    )
    return replace(tried, **changes)


def pair(here: Facts | None = None, there: Facts | None = None, **changes: Any) -> Case:
    """Two machines that met."""
    here, there = here or linux(), there or linux("laptop", 6)
    between = Between(
        target="a token",
        reaches=(reach(here, there),),
        back=(reach(there, here),),
        handshake="ok",
        partner="doctor",
        partner_versions={"name": there.name, "platform": there.platform},
        transfers=(
            Transfer(direction="out", size_bytes=400, arrived=True, seconds=0.001),
            Transfer(direction="out", size_bytes=65536, arrived=True, seconds=0.003),
            Transfer(direction="in", size_bytes=65536, arrived=True, seconds=0.003),
        ),
    )
    return Case(here=here, there=there, between=replace(between, **changes))


def unreached(here: Facts | None = None, *tries: dict[str, Any]) -> Case:
    """A token whose host could not be connected to; each try is what differs from a good one."""
    here = here or linux()
    reaches = tuple(reach(here, linux("laptop", 6), **{"outcome": "timeout", **changes}) for changes in tries)
    return Case(here=here, between=Between(target="a token", reaches=reaches))
