"""Reads this machine's addresses and its route to MASTER_ADDR, for `config.resolve`."""

from __future__ import annotations

import socket

import psutil

from potluck.dist.config import ConfigContext, LocalAddress

_ANY_PORT = 9  # "discard": nothing is sent


def gather(
    rank: int, world: int, master_address: str | None = None, master_port: int | None = None
) -> ConfigContext:
    """The facts at this moment."""
    return ConfigContext(
        rank=rank,
        world=world,
        interfaces=interfaces(),
        master_address=master_address,
        master_port=master_port,
        source_address=source_address(master_address) if master_address else None,
    )


def interfaces() -> tuple[LocalAddress, ...]:
    """Every IPv4 and IPv6 address of this machine."""
    states = psutil.net_if_stats()
    found = []
    for name, addresses in psutil.net_if_addrs().items():
        for item in addresses:
            if item.family not in (socket.AF_INET, socket.AF_INET6):
                continue
            address = item.address.partition("%")[0]
            state = states.get(name)
            loopback = address == "::1" or address.startswith("127.")
            found.append(
                LocalAddress(name=name, address=address, up=state is None or state.isup, loopback=loopback)
            )
    return tuple(found)


def source_address(target: str) -> str | None:
    """The source address of this machine's packets to `target`; None if there is no route."""
    try:
        choices = socket.getaddrinfo(target, _ANY_PORT, type=socket.SOCK_DGRAM)
    except OSError:
        return None
    for family, kind, protocol, _, where in choices:
        try:
            # Connecting a datagram socket sends nothing: it only asks the routing table.
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(where)
                return str(probe.getsockname()[0]).partition("%")[0]
        except OSError:
            continue
    return None
