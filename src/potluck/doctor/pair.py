"""Checks of the way between two machines: who blocks, what is lost, which versions, which link.

PURE, each a function of a case. It must not know how the connections were tried.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator

from potluck.doctor.network import covers, describe, ipv4, same_network
from potluck.spec.facts import (
    CONNECTED,
    DENIED,
    ETHERNET,
    NO_ROUTE,
    REFUSED,
    THUNDERBOLT,
    TIMEOUT,
    UNKNOWN_NAME,
    WIFI,
    Between,
    Case,
    Interface,
    Reach,
)
from potluck.spec.finding import BLOCKER, NOTE, WARNING, Finding, Fine
from potluck.units import bytes_text, seconds_text

MACOS_NO_ROUTE = 65
SLOW_LINK_MBIT = 100
SMALL_BYTES = 1000
"""A message that fits into one packet everywhere."""
READ_FROM = "read from PyTorch's wheels, from source and from reports (pytorch#144851, gloo#383), not run by us"


def other_name(case: Case) -> str:
    if case.there is not None:
        return case.there.name
    between = case.between
    if between is not None and between.partner_versions.get("name"):
        return between.partner_versions["name"]
    used = between.used or next(iter(between.reaches), None) if between is not None else None
    return used.address if used is not None else "the other machine"


def reach(case: Case) -> Iterator[Finding | Fine]:
    """TCP from here to there (pains 6, 7, 11)."""
    between = case.between
    assert between is not None
    wanted = [r for r in between.reaches if r.wanted]
    if not between.reaches:
        return
    if (used := between.used) is not None:
        if used.route is not None and used.route.interface is not None:
            interface = case.here.interface(used.route.interface)
            words = describe(interface) if interface is not None else used.route.interface
            why = f"by {words}: the route to {used.address} leaves there"
        else:
            why = ""
        yield Fine(
            machine=case.here.name,
            what=f"TCP to {other_name(case)} ({used.address}:{used.port}) in {seconds_text(used.seconds)}",
            details=why,
        )
        silent = [r.address for r in wanted if r.outcome != CONNECTED]
        if silent:
            yield Fine(
                machine=case.here.name,
                what=f"not needed: {', '.join(silent)}",
                details="other addresses of that machine, which this one cannot reach",
            )
        return
    if not wanted:
        yield from _bare_address(case, between)
    else:
        yield _unreached(case, between, wanted)


def _bare_address(case: Case, between: Between) -> Iterator[Finding | Fine]:
    """No port was given: whether the machine answers at all."""
    answered = [r for r in between.reaches if r.outcome in (CONNECTED, REFUSED)]
    if answered:
        first = min(answered, key=lambda r: r.seconds)
        yield Fine(
            machine=case.here.name,
            what=f"{first.address} answers, in {seconds_text(first.seconds)}",
            details="for both directions and a port of ours, run `potluck doctor --listen` there and give its "
            "token here",
        )
        return
    yield _unreached(case, between, list(between.reaches))


def _unreached(case: Case, between: Between, tries: list[Reach]) -> Finding:
    outcomes = {r.outcome for r in tries}
    told = "; ".join(f"{r.address} port {r.port}: {r.outcome}" for r in tries[:6])
    at = f"{tries[0].address}:{tries[0].port}"
    base = {"severity": BLOCKER, "how": f"tried to connect from {case.here.name}: {told}"}
    nobody = "this machine cannot join that host"
    if outcomes == {UNKNOWN_NAME}:
        return Finding(
            code="unknown-name",
            machine=case.here.name,
            what=f"no machine called {tries[0].address} is known here",
            breaks=nobody,
            fix="give its address: on that machine `potluck doctor` shows it",
            pains=(8, 11),
            **base,
        )
    if all(_loopback(r.address) for r in tries) and between.target == "a token":
        return Finding(
            code="token-names-loopback",
            machine=case.here.name,
            what="the token holds 127.0.0.1 only: that host listens for guests on its own machine",
            breaks=nobody,
            fix="there: potluck host --bind ADDRESS   (of its network, not 127.0.0.1)",
            pains=(3,),
            **base,
        )
    answered = any(r.outcome in (CONNECTED, REFUSED) for r in between.reaches)
    if case.here.platform == "darwin" and not answered and any(_privacy(case, r) for r in tries):
        return Finding(
            code="macos-local-network-privacy",
            machine=case.here.name,
            what="macOS does not let this terminal app reach machines on the local network",
            breaks="every connection to this network from this app, though ping works",
            fix="System Settings → Privacy & Security → Local Network: allow your terminal app, then open it anew "
            "(open 'x-apple.systempreferences:com.apple.preference.security?Privacy_LocalNetwork')",
            pains=(7,),
            severity=BLOCKER,
            how=f"{told} (errno 65), and the address is on this machine's own network, so there is a route",
        )
    if DENIED in outcomes or _kept_in(case, tries[0].port):
        return Finding(
            code="firewall-here-outgoing",
            machine=case.here.name,
            what=f"this machine's own firewall does not let connections to {at} out",
            breaks=nobody,
            fix=f"sudo iptables -I OUTPUT -p tcp --dport {tries[0].port} -j ACCEPT   (nft: an output chain)",
            pains=(6,),
            **base,
        )
    return _silent_or_refused(case, between, tries, base)


def _silent_or_refused(case: Case, between: Between, tries: list[Reach], base: dict[str, str]) -> Finding:
    outcomes = {r.outcome for r in tries}
    first = next((r for r in tries if r.outcome in (TIMEOUT, NO_ROUTE)), tries[0])
    at, who = f"{first.address}:{first.port}", other_name(case)
    nobody = "this machine cannot join that host"
    # A machine that answers elsewhere, or whose network card answers, is there and on: what is missing was dropped.
    alive = [r for r in between.reaches if r.outcome in (CONNECTED, REFUSED) and r not in tries]
    near = next((r.route.neighbour for r in tries if r.route is not None and r.route.neighbour), None)
    if outcomes == {REFUSED}:
        return Finding(
            code="nothing-listens",
            machine=who,
            what=f"{who} is there, but nothing listens at {at}",
            breaks=nobody,
            fix="there: potluck doctor --listen   (or potluck host), and use the token that it prints now; "
            f"if one runs, its firewall rejects: sudo ufw allow {first.port}/tcp",
            pains=(6,),
            **base,
        )
    # Some firewalls drop, some (firewalld) answer that there is no route.
    if outcomes & {TIMEOUT, NO_ROUTE} and (alive or near == "reachable"):
        proof = f"port {alive[0].port} answers ({alive[0].outcome})" if alive else "its network card answers (ARP)"
        return Finding(
            code="firewall-there",
            severity=BLOCKER,
            machine=who,
            what=f"{who} lets no connection to port {first.port} in: the firewall of that side blocks",
            how=f"{base['how']}; but {proof}",
            breaks=nobody,
            fix=f"on {who}: sudo ufw allow {first.port}/tcp   (macOS: System Settings → Network → Firewall)",
            pains=(6,),
        )
    if near == "failed" or NO_ROUTE in outcomes:
        return _apart(case, first.address, who, base)
    return Finding(
        code="no-answer",
        machine=who,
        what=f"nothing comes back from {at}",
        breaks=nobody,
        fix=f"on that machine: sudo ufw allow {first.port}/tcp; are both on one network? Try the other way round: "
        "`potluck doctor --listen` here, and its token there",
        pains=(6, 11),
        **base,
    )


def _apart(case: Case, address: str, who: str, base: dict[str, str]) -> Finding:
    """The machine is off, or the two are on different networks, or something keeps them apart on one."""
    if any(same_network(i, address) for i in case.here.interfaces if i.up):
        code, what = "apart-on-one-network", f"{address} does not answer on this network at all"
        fix = "is that machine on? Is it a guest Wi-Fi, whose router keeps machines apart (AP isolation)? "
        fix += "Put both on one network or cable, or a VPN such as Tailscale on both"
    else:
        code, what = "not-on-this-network", f"there is no way from this machine's networks to {address}"
        fix = "put both machines on one network, or a VPN such as Tailscale on both"
    nobody = "this machine cannot join that host"
    return Finding(code=code, machine=who, what=what, breaks=nobody, fix=fix, pains=(11,), **base)


def _kept_in(case: Case, port: int) -> bool:
    """Whether a firewall of this machine drops what leaves for that port: then nothing can be said of the other."""
    return any(
        covers(wall.out_denied, port) or (wall.out_blocks and not covers(wall.out_allowed, port))
        for wall in case.here.firewalls
    )


def _privacy(case: Case, tried: Reach) -> bool:
    near = any(same_network(i, tried.address) for i in case.here.interfaces if i.up)
    return tried.errno == MACOS_NO_ROUTE and near


def _loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"


def handshake(case: Case) -> Iterator[Finding | Fine]:
    between = case.between
    assert between is not None
    if between.handshake == "ok":
        whom = {"doctor": "a doctor", "host": "a running host", "probe": "a probe"}.get(
            between.partner, "somebody who does not speak yet"
        )
        yield Fine(
            machine=case.here.name, what=f"the token fits, the connection is encrypted; {whom} answers there"
        )
        if between.partner == "silent":
            yield Finding(
                code="host-silent",
                severity=WARNING,
                machine=other_name(case),
                what="the host let this machine in but says nothing",
                how="no answer to a message within the deadline",
                breaks="a guest that joins now waits",
                fix="wait until the host's script reaches its training loop; is that machine asleep or overloaded?",
                pains=(6,),
            )
        if between.partner == "probe":
            yield Finding(
                code="probe-answers",
                severity=WARNING,
                machine=other_name(case),
                what="this token is of `potluck probe --listen`, which tells a doctor nothing",
                how="what answered there said so",
                breaks="nothing: only the way there was looked at, not the way back nor that machine",
                fix="potluck doctor --listen   (on that machine; then its line here)",
            )
    elif between.handshake:
        yield Finding(
            code="handshake-failed",
            severity=BLOCKER,
            machine=other_name(case),
            what=between.handshake,
            how="the TCP connection opened, the encrypted handshake did not succeed",
            breaks="this machine cannot join that host",
            fix="use the token that the other machine shows now",
            pains=(6, 22),
        )


def way_back(case: Case) -> Iterator[Finding | Fine]:
    """TCP from there to here: Potluck needs one direction only, others need both (pain 6)."""
    between = case.between
    assert between is not None
    if not between.back:
        return
    reached = next((r for r in between.back if r.outcome == CONNECTED), None)
    if reached is not None:
        yield Fine(
            machine=other_name(case),
            what=f"TCP back to {case.here.name} ({reached.address}) in {seconds_text(reached.seconds)}",
            details="either machine can be the host",
        )
        return
    first = between.back[0]
    yield Finding(
        code="blocked-here",
        severity=WARNING,
        machine=case.here.name,
        what=f"{case.here.name} does not let connections in: this side blocks",
        how=f"{other_name(case)} tried {first.address}:{first.port}: {first.outcome}; the other direction works",
        breaks="this machine cannot be the host for that one (as its guest it is fine); torchrun and gloo need "
        "both ways",
        fix=f"run the host on {other_name(case)}; or here: sudo ufw allow 7171/tcp, then potluck host --port 7171",
        pains=(6,),
    )


def big_messages(case: Case) -> Iterator[Finding | Fine]:
    """Small packets pass and full ones vanish: an MTU black hole (pain 6)."""
    between = case.between
    assert between is not None
    small = [t for t in between.transfers if t.size_bytes <= SMALL_BYTES]
    large = [t for t in between.transfers if t.size_bytes > SMALL_BYTES]
    lost = [t for t in large if not t.arrived]
    if lost and any(t.arrived for t in small):
        here, there = case.here.name, other_name(case)
        ways = [f"from {here} to {there}" if t.direction == "out" else f"from {there} to {here}" for t in lost]
        route = between.used.route if between.used is not None else None
        name = (route.interface if route is not None else None) or "eth0"
        address = between.used.address if between.used is not None else "ADDRESS"
        yield Finding(
            code="mtu-black-hole",
            severity=BLOCKER,
            machine=case.here.name,
            what=f"full packets vanish {' and '.join(ways)}: the MTU is too large for something in between",
            how=f"a message of {small[0].size_bytes} bytes arrived, one of {bytes_text(lost[0].size_bytes)} did "
            f"not within {seconds_text(lost[0].seconds)}, on the same kind of connection",
            breaks="the connection opens and then hangs, here as everywhere",
            fix=f"on both machines: sudo ip link set dev {name} mtu 1280   (the largest that passes: "
            f"ping -M do -s 1372 {address})",
            pains=(6,),
        )
    elif large and not lost:
        ways_text = "both ways" if {t.direction for t in large} == {"in", "out"} else "to the other machine"
        yield Fine(machine=case.here.name, what=f"large messages arrive, {ways_text}: no MTU trouble")


def mtu(case: Case) -> Iterator[Finding | Fine]:
    mine, theirs = _ends(case)
    if mine is None or theirs is None or not mine.mtu or not theirs.mtu or mine.mtu == theirs.mtu:
        return
    if max(mine.mtu, theirs.mtu) <= 1500:
        return
    large, name = (mine, case.here.name) if mine.mtu > theirs.mtu else (theirs, other_name(case))
    yield Finding(
        code="mtu-differs",
        severity=WARNING,
        machine=name,
        what=f"jumbo frames on one side only: MTU {mine.mtu} here ({mine.name}), {theirs.mtu} there "
        f"({theirs.name})",
        how="read from both interfaces",
        breaks="full packets can vanish, and then connections hang",
        fix=f"on {name}: sudo ip link set dev {large.name} mtu {min(mine.mtu, theirs.mtu)}",
        pains=(6,),
    )


def versions(case: Case) -> Iterator[Finding | Fine]:
    """What both sides run (pain 22)."""
    between = case.between
    assert between is not None
    theirs = dict(between.partner_versions)
    if case.there is not None:
        there = case.there
        theirs |= {"potluck": there.potluck, "python": there.python, "torch": there.torch.version or ""}
        theirs |= {"protocol": str(there.protocol)}
    mine = {
        "potluck": case.here.potluck,
        "torch": case.here.torch.version or "",
        "python": case.here.python,
        "protocol": str(case.here.protocol),
    }
    who = other_name(case)
    differ = {k: (mine[k], theirs[k]) for k in mine if theirs.get(k) and mine[k] and mine[k] != theirs[k]}
    if "protocol" in differ or "potluck" in differ:
        hard = "protocol" in differ
        here, there_version = differ["protocol"] if hard else differ["potluck"]
        yield Finding(
            code="protocols-differ" if hard else "potluck-versions-differ",
            severity=BLOCKER if hard else WARNING,
            machine=who,
            what=f"{'protocol' if hard else 'potluck'} {here} here, {there_version} on {who}",
            how="each side said its own",
            breaks="the host refuses this guest"
            if hard
            else "it works while the protocol is the same; faults are hard to find",
            fix="the same version on both: pip install --upgrade potluck",
            pains=(22,),
        )
    if "torch" in differ and _minor(differ["torch"][0]) != _minor(differ["torch"][1]):
        yield Finding(
            code="torch-versions-differ",
            severity=NOTE,
            machine=who,
            what=f"torch {differ['torch'][0]} here, {differ['torch'][1]} on {who}",
            how="each side said its own",
            breaks="nothing by itself: a guest's gradients are compared with the host's on one batch before "
            "they count",
            fix=f"if they do not agree: pip install torch=={differ['torch'][0].split('+')[0]} on {who}",
            pains=(22,),
        )
    known = [k for k in ("potluck", "torch", "python") if theirs.get(k)]
    if known and not ({"protocol", "potluck"} & differ.keys()):
        yield Fine(machine=who, what=f"versions fit: {', '.join(f'{k} {theirs[k]}' for k in known)}")


def _minor(version: str) -> tuple[str, ...]:
    return tuple(version.split("+")[0].split(".")[:2])


def gloo(case: Case) -> Iterator[Finding | Fine]:
    """A Mac and a Linux machine never connect with gloo (pain 1)."""
    assert case.between is not None
    theirs = case.there.platform if case.there is not None else case.between.partner_versions.get("platform", "")
    platforms = {case.here.platform, theirs}
    if "" in platforms or len(platforms & {"linux"}) != 1 or len(platforms) != 2:
        return
    names = {"darwin": "macOS", "win32": "Windows", "linux": "Linux"}
    yield Finding(
        code="gloo-cannot-join-these",
        severity=NOTE,
        machine=other_name(case),
        what=f"gloo cannot join {' and '.join(sorted(names.get(p, p) for p in platforms))}: its builds speak "
        "different transports (tcp in the Linux wheels, uv in the others)",
        how=READ_FROM,
        breaks="DDP or torchrun with gloo between these two: both hang until the timeout, without an error. "
        "Potluck has its own transport",
        fix="potluck host on the faster one, potluck join on the other",
        pains=(1,),
    )


def link(case: Case) -> Iterator[Finding | Fine]:
    """Wi-Fi where there is a cable, or a slow cable (pains 12, 13)."""
    assert case.between is not None
    mine, theirs = _ends(case)
    for end, facts in ((mine, case.here), (theirs, case.there)):
        if end is None or facts is None:
            continue
        if end.kind == WIFI:
            yield _wifi(case, facts.name, end, [i for i in facts.interfaces if _wired(i)])
        elif end.kind in (ETHERNET, THUNDERBOLT) and end.speed_mbit and end.speed_mbit <= SLOW_LINK_MBIT:
            yield Finding(
                code="slow-link",
                severity=WARNING,
                machine=facts.name,
                what=f"{end.name} runs at {end.speed_mbit} Mbit/s",
                how="the interface says so",
                breaks="a guest delivers little over it, and other tools get slower than one machine alone",
                fix="a Cat 5e cable and a gigabit port (many cables lose a pair); potluck plan says what it is "
                "worth",
                pains=(13,),
            )


def _wifi(case: Case, name: str, end: Interface, wired: list[Interface]) -> Finding:
    cable = f"; {wired[0].name} ({ipv4(wired[0])[0]}) is wired and up" if wired else ""
    return Finding(
        code="wifi-in-use",
        severity=WARNING if wired else NOTE,
        machine=name,
        what=f"{name} uses its Wi-Fi ({end.name}){cable}",
        how="the route to the other machine leaves there",
        breaks="Wi-Fi is slower and less steady than any cable; guests get smaller shares",
        fix=f"potluck host --bind {ipv4(wired[0])[0]}   on {name}, if it is the host; else unplug the Wi-Fi"
        if wired
        else "a cable, if there is one",
        pains=(12,),
    )


def clocks(case: Case) -> Iterator[Finding | Fine]:
    assert case.between is not None
    if case.between.used is None:
        return
    yield Fine(
        machine=case.here.name,
        what="clocks need not agree",
        details="every duration is measured by one machine's own monotonic clock; two machines' clocks are "
        "never compared",
    )


def _wired(interface: Interface) -> bool:
    return interface.up and interface.kind in (ETHERNET, THUNDERBOLT) and bool(ipv4(interface))


def _ends(case: Case) -> tuple[Interface | None, Interface | None]:
    """The interfaces that the connection uses, here and there."""
    assert case.between is not None
    used = case.between.used
    if used is None:
        return None, None
    mine = case.here.interface(used.route.interface) if used.route is not None else None
    theirs = None
    if case.there is not None:
        theirs = next((i for i in case.there.interfaces if used.address in ipv4(i)), None)
    return mine, theirs
