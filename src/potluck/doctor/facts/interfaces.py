"""Interfaces, routes and neighbours of this machine, on each operating system."""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Mapping

import psutil

from potluck.doctor.facts.system import System
from potluck.spec.facts import CONTAINER, ETHERNET, LOOPBACK, OTHER, THUNDERBOLT, VPN, WIFI, Interface, Ipv6, Route
from potluck.wire.token import is_inner, source_address

_VPN = re.compile(r"tun|tap|wg|tailscale|utun|zt|ppp|ipsec|nordlynx|proton", re.IGNORECASE)
_CARRIER_NAT = ipaddress.ip_network("100.64.0.0/10")
_TUNNEL_TYPE = "65534"
"""ARPHRD_NONE: an interface without link addresses."""
_RESOLVED = 0x2


def interfaces(system: System) -> tuple[Interface, ...]:
    states = psutil.net_if_stats()
    ports = hardware_ports(system) if system.platform == "darwin" else {}
    found = []
    for name, entries in psutil.net_if_addrs().items():
        addresses = tuple(
            address for entry in entries if (address := _with_prefix(entry.address, entry.netmask)) is not None
        )
        state = states.get(name)
        found.append(
            Interface(
                name=name,
                kind=kind_of(system, name, addresses, ports),
                up=bool(state and state.isup),
                addresses=addresses,
                mtu=state.mtu or None if state else None,
                speed_mbit=state.speed or None if state else None,
            )
        )
    return tuple(found)


def kind_of(system: System, name: str, addresses: tuple[str, ...], ports: Mapping[str, str]) -> str:
    if name == "lo" or re.fullmatch(r"lo\d*|Loopback.*", name):
        return LOOPBACK
    if is_inner(name):
        return CONTAINER
    if _VPN.match(name) or any(_is_carrier_nat(a) for a in addresses):
        return VPN
    if system.platform == "darwin":
        port = ports.get(name, "").lower()
        if "thunderbolt" in port:
            return THUNDERBOLT
        return WIFI if "wi-fi" in port or "airport" in port else ETHERNET if port else OTHER
    if system.platform == "win32":
        return WIFI if re.match(r"wi-?fi|wlan|wireless", name, re.IGNORECASE) else ETHERNET
    device = f"/sys/class/net/{name}"
    if system.exists(f"{device}/wireless") or system.exists(f"{device}/phy80211"):
        return WIFI
    if (system.read(f"{device}/type") or "").strip() == _TUNNEL_TYPE:
        return VPN
    if name.startswith("thunderbolt"):
        return THUNDERBOLT
    return ETHERNET if (system.read(f"{device}/type") or "").strip() == "1" else OTHER


def hardware_ports(system: System) -> dict[str, str]:
    """macOS: the kind of each device, from `networksetup -listallhardwareports`."""
    said = system.run("networksetup", "-listallhardwareports")
    found: dict[str, str] = {}
    port = ""
    for line in (said.out if said else "").splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "Hardware Port":
            port = value.strip()
        elif key.strip() == "Device":
            found[value.strip()] = port
    return found


def family_of(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def route_to(system: System, address: str) -> Route | None:
    source = source_address(address)
    if source is None:
        return None
    name = next(
        (n for n, entries in psutil.net_if_addrs().items() if any(e.address == source for e in entries)), None
    )
    return Route(to=address, interface=name, source=source, neighbour=neighbour(system, address))


def neighbour(system: System, address: str) -> str | None:
    """The state of an address on this machine's own network: reachable, failed, or None."""
    if system.platform == "darwin":
        said = system.run("arp", "-n", address)
        if said is None or "no entry" in said.out + said.err:
            return None
        return "failed" if "incomplete" in said.out else "reachable"
    for line in (system.read("/proc/net/arp") or "").splitlines()[1:]:
        fields = line.split()
        if len(fields) >= 4 and fields[0] == address:
            return "reachable" if int(fields[2], 16) & _RESOLVED else "failed"
    return None


def ipv6_state(system: System) -> Ipv6:
    switch = (system.read("/proc/sys/net/ipv6/conf/lo/disable_ipv6") or "").strip() == "1"
    everywhere = (system.read("/proc/sys/net/ipv6/conf/all/disable_ipv6") or "").strip() == "1"
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as probe:
            try:
                probe.bind(("::1", 0))
                loopback = True
            except OSError:
                loopback = False
    except OSError:
        return Ipv6(sockets=False, loopback=False, switched_off=switch or everywhere)
    return Ipv6(sockets=True, loopback=loopback, switched_off=switch or everywhere)


def _with_prefix(address: str, netmask: str | None) -> str | None:
    plain = address.split("%")[0]
    try:
        ip = ipaddress.ip_address(plain)
        if netmask is None:
            return plain
        bits = bin(int(ipaddress.ip_address(netmask))).count("1")
        return f"{ip}/{bits}"
    except ValueError:
        return plain if _is_address(plain) else None


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def _is_carrier_nat(address: str) -> bool:
    ip = ipaddress.ip_interface(address).ip
    return ip.version == 4 and ip in _CARRIER_NAT
