"""Checks of the connection between two machines, in both directions, and of what blocks it. PURE."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator

from potluck.doctor.network import covers, describe, same_network
from potluck.doctor.pair import other_name
from potluck.spec.facts import CONNECTED, DENIED, NO_ROUTE, REFUSED, TIMEOUT, UNKNOWN_NAME, Between, Case, Reach
from potluck.spec.finding import BLOCKER, WARNING, Finding, Fine
from potluck.units import seconds_text

MACOS_NO_ROUTE = 65


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
    """No port was given: check whether the machine answers at all."""
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
            what=f"this machine's own firewall blocks connections to {at}",
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
            what=f"{who} blocks connections to port {first.port}: its firewall does not admit them",
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
    """The machine is off, or the two are on different networks, or something isolates them on one network."""
    if any(same_network(i, address) for i in case.here.interfaces if i.up):
        code, what = "apart-on-one-network", f"{address} does not answer on this network at all"
        fix = "is that machine on? Is it a guest Wi-Fi, whose router keeps machines apart (AP isolation)? "
        fix += "Put both on one network or cable, or a VPN such as Tailscale on both"
    else:
        code, what = "not-on-this-network", f"no network of this machine leads to {address}"
        fix = "put both machines on one network, or a VPN such as Tailscale on both"
    nobody = "this machine cannot join that host"
    return Finding(code=code, machine=who, what=what, breaks=nobody, fix=fix, pains=(11,), **base)


def _kept_in(case: Case, port: int) -> bool:
    """Whether a firewall of this machine drops outgoing packets to that port, so that nothing is known about the
    other machine."""
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
            between.partner, "a peer that does not answer yet"
        )
        yield Fine(
            machine=case.here.name, what=f"the token fits, the connection is encrypted; {whom} answers there"
        )
        if between.partner == "silent":
            yield Finding(
                code="host-silent",
                severity=WARNING,
                machine=other_name(case),
                what="the host admitted this machine but does not answer",
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
                what="this token is of `potluck probe --listen`, which does not answer the doctor's questions",
                how="the program that answered says so",
                breaks="nothing: only the connection to that machine was checked, not the opposite direction and "
                "not that machine itself",
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
        what=f"{case.here.name} blocks incoming connections: the firewall is on this side",
        how=f"{other_name(case)} tried {first.address}:{first.port}: {first.outcome}; the other direction works",
        breaks="this machine cannot be the host for that one (as its guest it is fine); torchrun and gloo need "
        "both ways",
        fix=f"run the host on {other_name(case)}; or here: sudo ufw allow 7171/tcp, then potluck host --port 7171",
        pains=(6,),
    )
