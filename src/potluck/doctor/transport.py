"""Which interface and transport NCCL, RCCL or gloo chose, as the log of a run says.

PURE. NCCL writes it with NCCL_DEBUG=INFO; RCCL writes the same lines. Only what a line says is told: an interface's
kind is told from its name and address, and a log has no word about what the other machines reach.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator

from msgspec import Struct

from potluck.doctor.log_text import LogText, quoted
from potluck.doctor.signatures import ASIDE
from potluck.spec.finding import NOTE, WARNING, Finding, Fine

_WHO = re.compile(r"(?:^|[\s\]:>])(?P<host>[\w.-]{1,64}):\d{1,9}:\d{1,9} \[\d{1,4}\]")
_USING = re.compile(r"(?P<part>Bootstrap|NET/Socket|NET/IB|NET) ?: Using (?:interface )?(?P<rest>.{1,1500})")
_INTERFACE = re.compile(r"(?P<name>[\w.@-]{1,15}):(?P<address>[0-9a-fA-F][^\s<]{1,79})<\d{1,5}>")
_CARD = re.compile(r"\[\d{1,3}\](?P<name>[\w.-]{1,40}):(?P<port>\d{1,3})/(?P<kind>\w{1,12})")
_NETWORK = re.compile(r"Using (?:internal )?[Nn]etwork (?P<name>[\w/ .-]{1,40})")
_VIA = re.compile(r"\bvia (?P<way>NET/\w{1,20}|P2P|SHM|direct shared memory|CollNet|C2C)")
_SET = re.compile(r"(?P<name>NCCL_\w{1,40}) set (?:by environment )?to (?P<value>\S{1,120})")
_PEERS = re.compile(r"\[Gloo\] Rank \d{1,6} is connected to (?P<count>\d{1,6}) peer ranks")
_LOOPBACK = re.compile(r"lo\d*$")
_CONTAINER = re.compile(r"docker|br-[0-9a-f]{6}|veth|cni|flannel|cali|virbr|vmnet|podman|lxcbr|lxdbr")
_VPN = re.compile(r"u?tun|tap|wg|tailscale|zt|ppp|ipsec|nordlynx|proton")
_DOCKERS, _SHARED = ipaddress.ip_network("172.17.0.0/16"), ipaddress.ip_network("100.64.0.0/10")
_PARTS = {"Bootstrap": "the start (bootstrap)", "NET/Socket": "data over TCP (NET/Socket)", "NET": "data over TCP"}
_MOST = 12

VARIABLES = {
    "NCCL_SOCKET_IFNAME": "only interfaces whose names begin so, for the start and for data over TCP. ^ before it: "
    "all others; = before it: exactly this name",
    "NCCL_SOCKET_FAMILY": "only IPv4 (AF_INET) or only IPv6 (AF_INET6) addresses",
    "NCCL_IB_HCA": "only these InfiniBand or RoCE cards (mlx5_0 or mlx5_0:1, by beginning; ^: all others; =: "
    "exactly). It does not choose the interface of the start: that is NCCL_SOCKET_IFNAME",
    "NCCL_IB_DISABLE": "1: InfiniBand and RoCE are not used, data goes over TCP",
    "NCCL_IB_GID_INDEX": "which address (GID) of the card RoCE uses; a wrong one ends in an error or a timeout",
    "NCCL_IB_TIMEOUT": "how long a card waits for an answer: 4.096 µs · 2^value",
    "NCCL_NET": "the network by name: Socket, IB, or a plugin's",
    "NCCL_NET_GDR_LEVEL": "how far a GPU may be from the card to send from its memory directly (GPUDirect RDMA)",
    "NCCL_P2P_DISABLE": "1: GPUs of one machine do not copy to each other directly (NVLink, xGMI, PCIe)",
    "NCCL_P2P_LEVEL": "how far apart GPUs of one machine may be to copy directly (NVL, PIX, PXB, PHB, SYS)",
    "NCCL_SHM_DISABLE": "1: processes of one machine do not share memory, but use the network",
    "NCCL_COMM_ID": "the address at which all ranks meet, instead of one that rank 0 chooses",
    "NCCL_ALGO": "only these algorithms (Ring, Tree, …)",
    "NCCL_PROTO": "only these protocols (LL, LL128, Simple)",
}
"""What a variable does that a log says was set."""


class ChosenInterface(Struct, frozen=True, kw_only=True):
    """An interface that a line of the log names."""

    host: str
    part: str
    name: str
    address: str
    line: int
    text: str


def network(log: LogText) -> tuple[tuple[Fine, ...], tuple[tuple[int, int, Finding], ...]]:
    """What the log says of the network, and warnings about it."""
    chosen = list(dict.fromkeys(_chosen(log)))
    cards, sets = _cards(log), _sets(log)
    said = [*_interfaces(chosen), *cards, *_transports(log), *sets, *_gloo(log)]
    hosts = {one.host for one in chosen if one.host}
    return tuple(said[: 3 * _MOST]), (*_suspects(chosen, len(hosts)), *_no_card(log, sets))


def _host(text: str) -> str:
    found = _WHO.search(text)
    return found["host"] if found else ""


def _chosen(log: LogText) -> Iterator[ChosenInterface]:
    seen: set[tuple[str, ...]] = set()
    for line, text, _ in log.hits(": Using "):
        using = _USING.search(text)
        if using is None or "INFO" not in text:
            continue
        rest = using["rest"].partition("OOB ")[2] if using["part"] == "NET/IB" else using["rest"]
        part = "Bootstrap" if using["part"] == "NET/IB" else using["part"]
        for found in _INTERFACE.finditer(rest):
            key = (_host(text), part, found["name"], found["address"])
            if key not in seen:
                seen.add(key)
                yield ChosenInterface(
                    host=key[0], part=part, name=key[2], address=key[3], line=line, text=quoted(text, using.start())
                )


def _interfaces(chosen: list[ChosenInterface]) -> Iterator[Fine]:
    for one in chosen[:_MOST]:
        what = f"{_PARTS[one.part]}: {one.name} ({one.address})"
        yield Fine(machine=one.host, what=what, details=f"line {one.line}")


def _cards(log: LogText) -> list[Fine]:
    found: dict[tuple[str, str], Fine] = {}
    for line, text, at in log.hits("NET/IB : Using "):
        cards = [f"{card['name']}:{card['port']} ({card['kind']})" for card in _CARD.finditer(text[at:])]
        if cards:
            more = f" and {len(cards) - 4} more" if len(cards) > 4 else ""
            what = f"InfiniBand or RoCE cards (NET/IB): {', '.join(cards[:4])}{more}"
            found.setdefault((_host(text), what), Fine(machine=_host(text), what=what, details=f"line {line}"))
    return list(found.values())[:_MOST]


def _transports(log: LogText) -> Iterator[Fine]:
    """The network that was taken, and by which ways the channels go."""
    taken: dict[str, int] = {}
    for word in ("Using network ", "Using internal Network ", "Using internal network "):
        for line, text, at in log.hits(word):
            if found := _NETWORK.match(text, at):
                taken.setdefault(found["name"].strip(), line)
    for name, line in taken.items():
        yield Fine(machine="", what=f"network between machines: {name}", details=f"line {line}")
    ways: dict[str, int] = {}
    for _, text, _ in log.hits(" via "):
        if "INFO" in text and (found := _VIA.search(text)):
            ways[found["way"]] = ways.get(found["way"], 0) + 1
    if ways:
        counted = ", ".join(f"{count} via {way}" for way, count in sorted(ways.items(), key=lambda w: -w[1]))
        yield Fine(machine="", what=f"channels: {counted}", details="SHM and P2P stay inside a machine")


def _sets(log: LogText) -> list[Fine]:
    found: dict[tuple[str, str], Fine] = {}
    for line, text, _ in log.hits(" set "):
        match = _SET.search(text)
        if match is None or match["name"] not in VARIABLES:
            continue
        name, value = match["name"], match["value"].rstrip(".,")
        fine = Fine(machine="", what=f"{name}={value}", details=f"{VARIABLES[name]} (line {line})")
        found.setdefault((name, value), fine)
    return list(found.values())[:_MOST]


def _gloo(log: LogText) -> Iterator[Fine]:
    for line, text, at in log.hits("[Gloo] Rank "):
        if found := _PEERS.match(text, at):
            yield Fine(
                machine="",
                what=f"gloo connected its ranks: each to {found['count']}",
                details=f"line {line}; gloo does not write which interface it took",
            )
            return


# -- warnings -------------------------------------------------------------------------------------------


def kind_of(name: str, address: str) -> str:
    """What an interface looks like by its name or address; empty: an ordinary one, as far as a log shows."""
    try:
        ip = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        ip = None
    if _LOOPBACK.match(name) or (ip is not None and ip.is_loopback):
        return "loopback"
    if _CONTAINER.match(name) or (ip is not None and ip.version == 4 and ip in _DOCKERS):
        return "container"
    if _VPN.match(name) or (ip is not None and ip.version == 4 and ip in _SHARED):
        return "VPN"
    return ""


_WHAT = {
    "loopback": (
        "nccl-loopback",
        "the loopback interface",
        "no other machine reaches this one there; ranks of one machine do",
    ),
    "container": (
        "nccl-container",
        "an interface or an address of containers",
        "that network is usually inside one machine: ranks elsewhere hang until the timeout, or are refused",
    ),
    "VPN": (
        "nccl-vpn",
        "an interface or an address of a VPN",
        "everything goes encrypted through that program: it may be reachable, and slower than the cable beside it",
    ),
}


def _suspects(chosen: list[ChosenInterface], hosts: int) -> Iterator[tuple[int, int, Finding]]:
    told: set[str] = set()
    for one in chosen:
        kind = kind_of(one.name, one.address)
        if not kind or kind in told:
            continue
        told.add(kind)
        code, what, breaks = _WHAT[kind]
        severity = WARNING if hosts > 1 or kind != "loopback" else NOTE
        finding = Finding(
            code=code,
            severity=severity,
            machine=one.host,
            what=f"NCCL took {what}: {one.name} ({one.address}){' on ' + one.host if one.host else ''}",
            how=f"line {one.line}: {one.text}",
            breaks=breaks,
            fix="export NCCL_SOCKET_IFNAME=eth0   (the one that potluck doctor marks as used, on each machine)\n"
            "export NCCL_SOCKET_IFNAME=^lo,docker,br-,veth,tun,tailscale   (all but these)",
            potluck="takes the interface that the route to the other machine leaves by",
            pains=(3,),
        )
        yield ASIDE, one.line, finding


def _no_card(log: LogText, sets: list[Fine]) -> Iterator[tuple[int, int, Finding]]:
    """No card, though one was named."""
    named = next((fine.what for fine in sets if fine.what.startswith("NCCL_IB_HCA=")), None)
    hit = next(log.hits("NET/IB : No device found"), None)
    if named is None or hit is None:
        return
    line, text, at = hit
    finding = Finding(
        code="nccl-no-card",
        severity=WARNING,
        machine=_host(text),
        what=f"NCCL found no InfiniBand or RoCE card, though {named} was set",
        how=f"line {line}: {quoted(text, at)}",
        breaks="data goes over TCP instead, if NCCL_NET does not forbid it. Either there is no active card, or "
        "none has that name: the log does not say which",
        fix="ibv_devinfo   (names and states of the cards)\nunset NCCL_IB_HCA   (NCCL takes every active card)",
        potluck="uses TCP only: it offers no RDMA",
        pains=(3,),
    )
    yield ASIDE, line, finding
