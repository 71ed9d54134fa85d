"""Checks of the addresses of another machine: the rate of each, and whether the fastest is used. PURE."""

from __future__ import annotations

from collections.abc import Iterator

from potluck.doctor.network import ipv4, same_network
from potluck.doctor.pair import other_name
from potluck.spec.facts import CONTAINER, LOOPBACK, Case
from potluck.spec.finding import NOTE, WARNING, Finding, Fine
from potluck.spec.probed import ProbedPath
from potluck.units import bits_text

MUCH_SLOWER = 0.5


def speeds(case: Case) -> Iterator[Finding | Fine]:
    """The speed of each path between the two machines (pain 12)."""
    assert case.between is not None
    paths, who = case.between.paths, other_name(case)
    for path in paths:
        told = "used: the first address that answers is" if path.used and len(paths) > 1 else ""
        if path.slower_bytes_per_s is None:
            note = path.notes[0] if path.notes else "too little arrived in the time"
            yield Fine(machine=case.here.name, what=f"{_way(path)}: speed not known", details=note)
        else:
            yield Fine(machine=case.here.name, what=f"{_way(path)}: {_rates(path)}", details=told)
    known = [path for path in paths if path.slower_bytes_per_s is not None]
    used = next((path for path in known if path.used), None)
    if used is not None and len(known) > 1:
        fastest = max(known, key=_rate)
        slowest = used if _rate(used) < MUCH_SLOWER * _rate(fastest) else min(known, key=_rate)
        if _rate(slowest) < MUCH_SLOWER * _rate(fastest):
            yield _slower(case, who, slowest, fastest)
    yield from _not_measured(case, who)


def _slower(case: Case, who: str, slow: ProbedPath, fast: ProbedPath) -> Finding:
    here = f"\npotluck host --bind {fast.source}   (here, if this machine is the host)" if fast.source else ""
    now = "which is used" if slow.used else "which may be used another time"
    return Finding(
        code="slower-address",
        severity=WARNING if slow.used else NOTE,
        machine=who,
        what=f"{slow.address} of {who}, {now}, carries {bits_text(_rate(slow))}; {fast.address} carries "
        f"{bits_text(_rate(fast))}",
        how=f"measured just now, encrypted, twice: {_way(slow)}: {_rates(slow)}; {_way(fast)}: {_rates(fast)}",
        breaks="a guest that delivers later gets smaller shares. A run takes the first address that answers, not "
        "the fastest",
        fix=f"potluck host --bind {fast.address}   (on {who}, if it is the host){here}",
        pains=(12,),
    )


def _not_measured(case: Case, who: str) -> Iterator[Fine]:
    """Addresses on a common network at which the other machine does not listen."""
    assert case.between is not None
    if not case.between.paths or case.there is None:
        return
    tried = {reach.address for reach in case.between.reaches}
    left_out = (CONTAINER, LOOPBACK)
    theirs = [
        a for i in case.there.interfaces if i.up and i.kind not in left_out for a in ipv4(i) if a not in tried
    ]
    mine = [i for i in case.here.interfaces if i.up and i.kind not in left_out]
    if near := [address for address in theirs if any(same_network(i, address) for i in mine)]:
        yield Fine(
            machine=who,
            what=f"not measured: {', '.join(near[:4])}",
            details=f"{who} does not listen there; `potluck doctor --listen --bind 0.0.0.0` there measures every "
            "address",
        )


def leaving(case: Case) -> Iterator[Finding | Fine]:
    """Problems of other tools that need no check here (pains 15 to 18)."""
    assert case.between is not None
    if case.between.used is not None:
        yield Fine(
            machine=case.here.name,
            what="a guest that dies, is late or has other data never stops a run",
            details="its samples are computed by the others; with the log of another tool's run that did stop: "
            "potluck doctor --error FILE",
        )


def _way(path: ProbedPath) -> str:
    source = " ".join(filter(None, (path.interface, path.source)))
    return f"{source} → {path.address}" if source else path.address


def _rates(path: ProbedPath) -> str:
    out, back = (bits_text(way.ours.bytes_per_s if way.ours else None) for way in (path.out, path.back))
    return f"{out} there, {back} back"


def _rate(path: ProbedPath) -> float:
    return path.slower_bytes_per_s or 0.0
