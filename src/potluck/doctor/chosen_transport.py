"""Reads from the log of a run which interface and transport NCCL, RCCL or gloo chose.

PURE. NCCL writes it with NCCL_DEBUG=INFO; RCCL writes the same lines. It reports only what a line says: an
interface's kind follows from its name and address, and a log does not say what other machines can reach.
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
_CARD = re.compile(r"\[\d{1,3}\] ?(?P<name>[\w.-]{1,40}):(?P<port>\d{1,3})/(?P<kind>\w{1,12})")
_NETWORK = re.compile(r"Using (?:internal )?[Nn]etwork (?!plugin\b)(?P<name>[\w/ .-]{1,40})")
_OLD_CARD = re.compile(r"NET/IB: \[\d{1,3}\] (?P<name>[\w.-]{1,40}):(?P<port>\d{1,3})/(?P<kind>\w{1,12})")
_PROVIDER = re.compile(
    r"NET/OFI Selected [Pp]rovider is (?P<name>[\w;-]{1,40})(?:.{0,60}\(found (?P<cards>\d{1,4}) nics)?"
)
_VIA = re.compile(
    r"\bvia (?P<way>NET/\w{1,20}(?: \w{1,20}(?=/))?|P2P|SHM|direct shared memory|CollNet|C2C)(?P<rest>\S*)"
)
_SET = re.compile(r"(?P<name>NCCL_\w{1,40}) set (?:by environment )?to (?P<value>\S{1,120})")
_PEERS = re.compile(r"\[Gloo\] Rank \d{1,6} is connected to (?P<count>\d{1,6}) peer ranks")
_LOOPBACK = re.compile(r"lo\d*$")
_NO_GDR = re.compile(r"NET/IB\w{0,12} ?: GPU Direct RDMA Disabled for HCA \d{1,3} '(?P<card>[\w.-]{1,40})'")
_CONTAINER = re.compile(r"docker|br-[0-9a-f]{6}|veth|cni|virbr|vmnet|podman|lxc|lxdbr")
_OVERLAY = re.compile(r"flannel|cali|cilium|weave|antrea")
_VPN = re.compile(r"u?tun|ip6tnl|ip6?gre|sit\d|tap|wg|tailscale|zt|ppp|ipsec|nordlynx|proton")
_INFINIBAND = re.compile(r"ib[ops]?\d")
_INSIDE = re.compile(r"eth\d$")
"""The name of an interface inside a container, and of a cable's on a machine."""
_DOCKERS = ipaddress.ip_network("172.17.0.0/16")
_COMPOSED = ipaddress.ip_network("172.16.0.0/12")
"""Docker gives a part of it to each network that somebody makes for containers."""
_CONTAINER_ID = re.compile(r"[0-9a-f]{12}$")
_BLOCKS = [
    ipaddress.ip_network(block)
    for block in ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10", "169.254.0.0/16", "0.0.0.0/0")
]
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
    "NCCL_IB_TC": "the traffic class of RoCE's packets, which chooses their queue in the switches",
    "NCCL_IB_SL": "the service level of InfiniBand's packets, which chooses their queue in the switches",
    "NCCL_IB_QPS_PER_CONNECTION": "queue pairs of each connection: several may take different ways through the "
    "switches",
    "NCCL_CROSS_NIC": "0: a ring or tree uses the same card on every machine (each card has a network of its own); "
    "1: it may change cards; 2: NCCL avoids it where it can",
    "NCCL_SOCKET_NTHREADS": "threads that send over TCP, for each connection",
    "NCCL_NSOCKS_PERTHREAD": "sockets of each of those threads: a fast network over TCP may need several",
    "NCCL_NET": "the network by name: Socket, IB, or a plugin's",
    "NCCL_NET_GDR_LEVEL": "how far a GPU may be from the card to send from its memory directly (GPUDirect RDMA)",
    "NCCL_P2P_DISABLE": "1: GPUs of one machine do not copy to each other directly (NVLink, xGMI, PCIe)",
    "NCCL_P2P_LEVEL": "how far apart GPUs of one machine may be to copy directly (NVL, PIX, PXB, PHB, SYS)",
    "NCCL_SHM_DISABLE": "1: processes of one machine do not share memory, but use the network",
    "NCCL_COMM_ID": "the address at which all ranks meet, instead of one that rank 0 chooses",
    "NCCL_ALGO": "only these algorithms (Ring, Tree, …)",
    "NCCL_PROTO": "only these protocols (LL, LL128, Simple)",
}
"""The effect of a variable that a log reports as set."""


class ChosenInterface(Struct, frozen=True, kw_only=True):
    """An interface that a line of the log names."""

    host: str
    part: str
    name: str
    address: str
    line: int
    text: str


def network(log: LogText) -> tuple[tuple[Fine, ...], tuple[tuple[int, int, Finding], ...]]:
    """The log's lines about the network, and warnings about them."""
    chosen = list(dict.fromkeys(_chosen(log)))
    cards, sets = _cards(log), _sets(log)
    said = [*_interfaces(chosen), *cards, *_without_library(log), *_transports(log), *sets, *_gloo(log)]
    twice = list(_same_address(chosen))
    about = [*twice, *_suspects(chosen, len(_hosts(log)), bool(twice)), *_other_networks(log, chosen)]
    about += [*_no_card(log, sets), *_tcp_over_infiniband(log, chosen), *_no_gdr(log), *_no_efa(log)]
    return tuple(said[: 3 * _MOST]), tuple(about)


def _host(text: str) -> str:
    found = _WHO.search(text)
    return found["host"] if found else ""


def _hosts(log: LogText) -> set[str]:
    """The machines that wrote into this log."""
    return {host for _, text, _ in log.hits("NCCL INFO") if (host := _host(text))}


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
    for line, text, at in log.hits("NET/IB: ["):  # NCCL 2.3: a line for each card
        if card := _OLD_CARD.match(text, at):
            what = f"InfiniBand or RoCE card (NET/IB): {card['name']}:{card['port']} ({card['kind']})"
            found.setdefault((_host(text), what), Fine(machine=_host(text), what=what, details=f"line {line}"))
    for line, text, _ in log.hits("NET/OFI Selected "):
        if provider := _PROVIDER.search(text):
            cards_of = f", {provider['cards']} cards" if provider["cards"] else ""
            what = f"libfabric (NET/OFI, as for AWS's EFA): provider {provider['name']}{cards_of}"
            found.setdefault((_host(text), what), Fine(machine=_host(text), what=what, details=f"line {line}"))
    return list(found.values())[:_MOST]


def _without_library(log: LogText) -> Iterator[Fine]:
    hit = next(log.hits("Failed to open libibverbs.so"), None)
    if hit is not None:
        yield Fine(
            machine=_host(hit[1]),
            what="InfiniBand and RoCE were not tried: libibverbs is not installed here",
            details=f"line {hit[0]}; no fault where there is no such card",
        )


def _transports(log: LogText) -> Iterator[Fine]:
    """The chosen network, and the transports of the channels."""
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
            way = f"{found['way']} with GPUDirect RDMA" if found["rest"].endswith("/GDRDMA") else found["way"]
            ways[way] = ways.get(way, 0) + 1
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
        off = "0 is as if it were not set. " if value == "0" and VARIABLES[name].startswith("1: ") else ""
        fine = Fine(machine="", what=f"{name}={value}", details=f"{off}{VARIABLES[name]} (line {line})")
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


def kind_of(name: str, address: str, host: str = "") -> str:
    """The kind of an interface, by its name or address; empty for an ordinary one, as far as a log shows."""
    ip = _ip(address)
    if _LOOPBACK.match(name) or (ip is not None and ip.is_loopback):
        return "loopback"
    dockers = _COMPOSED if _CONTAINER_ID.match(host) else _DOCKERS
    docker = _INSIDE.match(name) and ip is not None and ip.version == 4 and ip in dockers
    if _CONTAINER.match(name) or docker:
        return "container"
    return "overlay" if _OVERLAY.match(name) else "VPN" if _VPN.match(name) else ""


def _ip(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return None


def _by_name(chosen: list[ChosenInterface]) -> str:
    """The two ways to choose an interface: its name, or how the names of all wrong ones that were found begin."""
    kinds = (_LOOPBACK, _CONTAINER, _OVERLAY, _VPN)
    found = [match[0] for one in chosen for kind in kinds if (match := kind.match(one.name))]
    wrong = dict.fromkeys(("lo", "docker", *(name if name[:3] != "br-" else "br-" for name in found)))
    name = "export NCCL_SOCKET_IFNAME=NAME   (the one that potluck doctor marks as used, on each machine)"
    return f"{name}\nexport NCCL_SOCKET_IFNAME=^{','.join(wrong)}   (all but these)" if found else name


_HOSTS_OWN = "docker run --network=host …   (the container then sees the machine's own interfaces)\n"
_ITSELF = "each finds only itself there"
_TAKES = "takes the interface that the route to the other machine leaves by"
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
    "overlay": (
        "nccl-overlay",
        "an interface of an overlay network between nodes (Kubernetes)",
        "other nodes are reached there, but the processor wraps every packet: slower than the network beneath",
    ),
    "VPN": (
        "nccl-vpn",
        "an interface of a VPN or a tunnel",
        "everything goes through that program, which usually encrypts: other machines may be reachable there, and "
        "slower than by the cable beside it",
    ),
}


_SLOW = ("nccl-tcp-over-infiniband", "nccl-no-gpudirect")


def _finding(
    code: str, severity: str, machine: str, what: str, how: str, breaks: str, fix: str, by: str
) -> Finding:
    return Finding(
        code=code,
        severity=severity,
        machine=machine,
        what=what,
        how=how,
        breaks=breaks,
        fix=fix,
        potluck=by,
        pains=(13 if code in _SLOW else 3,),
    )


def _suspects(chosen: list[ChosenInterface], hosts: int, same_address: bool) -> Iterator[tuple[int, int, Finding]]:
    """The first interface of each suspicious kind."""
    told = {"container"} if same_address else set[str]()
    for one in chosen:
        kind = kind_of(one.name, one.address, one.host)
        if not kind or kind in told:
            continue
        told.add(kind)
        code, what, breaks = _WHAT[kind]
        fix = _by_name(chosen)
        if kind == "container" and not _CONTAINER.match(one.name):
            fix = _HOSTS_OWN + fix
        alone = hosts <= 1 and (kind == "loopback" or _INSIDE.match(one.name) is not None)
        what = f"NCCL took {what}: {one.name} ({one.address}){' on ' + one.host if one.host else ''}"
        how = f"line {one.line}: {one.text}"
        severity = NOTE if alone else WARNING
        yield ASIDE, one.line, _finding(code, severity, one.host, what, how, breaks, fix, _TAKES)


def _same_address(chosen: list[ChosenInterface]) -> Iterator[tuple[int, int, Finding]]:
    """Two machines at one address."""
    first: dict[str, ChosenInterface] = {}
    for one in chosen:
        if not one.host or kind_of(one.name, one.address) == "loopback" or one.address.startswith("fe80"):
            continue
        other = first.setdefault(one.address, one)
        if other.host != one.host:
            bridge = _CONTAINER.match(one.name)
            yield (
                ASIDE,
                one.line,
                _finding(
                    "nccl-same-address",
                    WARNING,
                    one.host,
                    f"{other.host} and {one.host} took the same address: {one.name} ({one.address})",
                    f"line {other.line}: {other.text}; line {one.line}: {one.text}",
                    f"{_ITSELF}: such a network is inside each machine, often with the same addresses"
                    if bridge
                    else f"{_ITSELF}, if these are two machines: every container has a network of its own. (Two "
                    "containers that share one machine's network look the same, and work)",
                    _by_name(chosen) if bridge else _HOSTS_OWN + _by_name(chosen),
                    _TAKES,
                ),
            )
            return


def _other_networks(log: LogText, chosen: list[ChosenInterface]) -> Iterator[tuple[int, int, Finding]]:
    """Two machines whose addresses cannot be of one network: a private one each, or a private and a public one."""
    first: dict[str, tuple[ChosenInterface, object]] = {}
    for one in chosen:
        ip = _ip(one.address)
        usual = kind_of(one.name, one.address, one.host) in ("", "VPN")
        if one.host and one.part == "Bootstrap" and usual and ip is not None and ip.version == 4:
            first.setdefault(one.host, (one, next(block for block in _BLOCKS if ip in block)))
    (mine, block), *others = first.values() or [(None, None)]
    theirs = next((one for one, other in others if other != block), None)
    if mine is None or theirs is None:
        return
    named = sorted({_host(text) for _, text, _ in log.hits("NCCL_SOCKET_IFNAME set ")} & set(first))
    partly = f"; NCCL_SOCKET_IFNAME is set on {', '.join(named)} only" if 0 < len(named) < len(first) else ""
    yield (
        ASIDE,
        theirs.line,
        _finding(
            "nccl-other-networks",
            WARNING,
            theirs.host,
            f"{mine.host} took {mine.name} ({mine.address}), and {theirs.host} {theirs.name} ({theirs.address}): "
            "addresses of two networks",
            f"line {mine.line}: {mine.text}; line {theirs.line}: {theirs.text}",
            f"without a route between the two networks they hang until the timeout, or are refused{partly}",
            f"{_by_name(chosen)}\nmpirun -x NCCL_SOCKET_IFNAME …   (a launcher may pass no variables on)",
            _TAKES,
        ),
    )


def _tcp_over_infiniband(log: LogText, chosen: list[ChosenInterface]) -> Iterator[tuple[int, int, Finding]]:
    """Data over TCP on an InfiniBand card's interface. Old versions name it before they find the card."""
    with_cards = {_host(text) for _, text, at in log.hits("NET/IB : Using ") if _CARD.search(text, at)}
    one = next(
        (
            one
            for one in chosen
            if one.part == "NET/Socket" and _INFINIBAND.match(one.name) and one.host not in with_cards
        ),
        None,
    )
    if one is not None:
        yield (
            ASIDE,
            one.line,
            _finding(
                "nccl-tcp-over-infiniband",
                WARNING,
                one.host,
                f"data goes over TCP on {one.name} ({one.address}), which is an InfiniBand card's",
                f"line {one.line}: {one.text}",
                "it works, much slower than the card itself: NCCL did not find the card, or was told not to use it",
                "grep -E 'NET/IB|NCCL_IB|NCCL_NET |libibverbs' LOG   (why?)\n"
                "ibv_devinfo   (is the port's state PORT_ACTIVE?)\n"
                "ls /dev/infiniband   (a container needs it: docker run --device=/dev/infiniband …)",
                "uses TCP only, on this interface too: it offers no RDMA",
            ),
        )


def _no_gdr(log: LogText) -> Iterator[tuple[int, int, Finding]]:
    """Cards that cannot read the memory of GPUs."""
    hits = [(line, text, at, card) for line, text, at in log.hits("NET/IB") if (card := _NO_GDR.match(text, at))]
    if not hits:
        return
    line, text, at, _ = hits[0]
    cards = ", ".join(dict.fromkeys(card["card"] for *_, card in hits[:_MOST]))
    yield (
        ASIDE,
        line,
        _finding(
            "nccl-no-gpudirect",
            WARNING,
            _host(text),
            f"InfiniBand or RoCE without GPUDirect RDMA ({cards})",
            f"line {line}: {quoted(text, at)}",
            "it works, slower: the cards do not read the GPUs' memory, so all data passes through the machine's. "
            "No kernel module that lets them is loaded, or NCCL does not see it (before 2.23 not every "
            "nvidia-peermem). GeForce cards cannot do it",
            "lsmod | grep peermem   (is it loaded? it must be built for the network card's driver)\n"
            "sudo modprobe nvidia-peermem",
            "uses TCP only: it offers no RDMA",
        ),
    )


def _no_card(log: LogText, sets: list[Fine]) -> Iterator[tuple[int, int, Finding]]:
    """No card was found, although one was configured."""
    named = next((fine.what for fine in sets if fine.what.startswith("NCCL_IB_HCA=")), None)
    hit = next(log.hits("NET/IB : No device found"), None)
    if named is None or hit is None:
        return
    line, text, at = hit
    yield (
        ASIDE,
        line,
        _finding(
            "nccl-no-card",
            WARNING,
            _host(text),
            f"NCCL found no InfiniBand or RoCE card, though {named} was set",
            f"line {line}: {quoted(text, at)}",
            "data goes over TCP instead, if NCCL_NET does not forbid it. Either there is no active card, or "
            "none has that name: the log does not say which",
            "ibv_devinfo   (names and states of the cards)\nunset NCCL_IB_HCA   (NCCL takes every active card)",
            "uses TCP only: it offers no RDMA",
        ),
    )


def _no_efa(log: LogText) -> Iterator[tuple[int, int, Finding]]:
    """The plugin for AWS's cards is there, and it found none, or could not use it."""
    words = (
        "find any optimal provider",
        "Couldn't open AV",
        "provider efa output empty list",
        "Creating new endpoint",
    )
    hits = [hit for word in words if (hit := next(log.hits(word), None)) is not None]
    if not hits:
        return
    line, text, at = min(hits)
    finding = _finding(
        "nccl-no-efa",
        WARNING,
        _host(text),
        "the libfabric plugin (aws-ofi-nccl) could not use an EFA card",
        f"line {line}: {quoted(text, at)}",
        "data goes over TCP instead, much slower; or the start fails, where the plugin is wanted or a card was "
        "found and did not open",
        "fi_info -p efa   (does this machine, or this container, see one?)\n"
        "ls /dev/infiniband   (a container needs it: docker run --device=/dev/infiniband/uverbs0 …)",
        "uses TCP only: it offers no RDMA",
    )
    yield ASIDE, line, finding
