"""Checks of two connected machines: lost messages, versions, kind of link. PURE."""

from __future__ import annotations

from collections.abc import Iterator

from potluck.doctor.network import ipv4
from potluck.spec.facts import ETHERNET, THUNDERBOLT, WIFI, Case, Interface
from potluck.spec.finding import BLOCKER, NOTE, WARNING, Finding, Fine
from potluck.units import bytes_text, seconds_text

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
            what=f"full-size packets are lost {' and '.join(ways)}: the MTU is too large for something in between",
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
    """The versions on both sides (pain 22)."""
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
    """Wi-Fi although there is a cable, or a slow cable (pains 12, 13)."""
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
                fix="a Cat 5e cable and a gigabit port (many cables lose a pair); potluck plan says how much it "
                "gains",
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
