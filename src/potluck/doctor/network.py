"""Checks of one machine's network: interfaces, names, variables, ports, firewall, IPv6. PURE."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator

from potluck.spec.facts import (
    CONNECTED,
    CONTAINER,
    ETHERNET,
    LOOPBACK,
    THUNDERBOLT,
    VPN,
    WIFI,
    Case,
    Facts,
    Firewall,
    HostsLine,
    Interface,
)
from potluck.spec.finding import BLOCKER, NOTE, WARNING, Finding, Fine

SLOW_LOOKUP_S = 1.0
LEAST_MTU = 1280
EXAMPLE_PORT = 7171
"""The port in suggested commands if none was given."""


def interface_in_use(case: Case, facts: Facts) -> Iterator[Finding | Fine]:
    """Which interface a host on this machine listens on, and why (pains 3, 11, 12)."""
    outer = [i for i in facts.interfaces if i.up and i.kind not in (LOOPBACK, CONTAINER) and ipv4(i)]
    chosen = next((i for i in facts.interfaces if facts.default_address in ipv4(i)), None)
    if not outer and (chosen is None or chosen.kind == LOOPBACK):
        yield Finding(
            code="no-network",
            severity=BLOCKER,
            machine=facts.name,
            what="this machine has no address that another machine could reach",
            how=_list_of(facts.interfaces) or "there is no interface but loopback",
            breaks="no other machine can join, and none can be joined; training alone works",
            fix="connect the cable or the Wi-Fi, then look again: potluck doctor",
            pains=(3,),
        )
        return
    reason = "the default route leaves there"
    if chosen is None or not facts.default_route:
        chosen = chosen or (outer[0] if outer else facts.interfaces[0])
        reason = "there is no default route, and it is the first that is up"
    wired = [i for i in outer if i.kind in (ETHERNET, THUNDERBOLT) and i is not chosen]
    address = next(iter(ipv4(chosen)), "")
    if chosen.kind in (WIFI, VPN, CONTAINER) and wired:
        other = wired[0]
        words = {WIFI: "Wi-Fi", VPN: "a VPN", CONTAINER: "an interface of containers"}[chosen.kind]
        yield Finding(
            code={WIFI: "wifi-before-cable", VPN: "vpn-before-cable"}.get(chosen.kind, "container-before-cable"),
            severity=WARNING,
            machine=facts.name,
            what=f"{words} ({chosen.name}, {address}) would be used, though {other.name} is wired and up",
            how=f"{reason}; {other.name} has {ipv4(other)[0]}",
            breaks="a host here would listen on the slower network, or where the others are not",
            fix=f"potluck host --bind {ipv4(other)[0]}",
            pains=(12,) if chosen.kind == WIFI else (3,),
        )
        return
    yield Fine(machine=facts.name, what=f"network: {describe(chosen)}", details=f"used because {reason}")


def interfaces_of_containers(case: Case, facts: Facts) -> Iterator[Finding | Fine]:
    """docker0 and similar interfaces have addresses that no other machine reaches (pain 3)."""
    inner = [i for i in facts.interfaces if i.kind == CONTAINER and i.up and ipv4(i)]
    if not inner:
        return
    names = ", ".join(i.name for i in inner)
    right = next((i.name for i in facts.interfaces if facts.default_address in ipv4(i)), "eth0")
    if "GLOO_SOCKET_IFNAME" in facts.environment and "NCCL_SOCKET_IFNAME" in facts.environment:
        yield Fine(machine=facts.name, what=f"{names}: left out (containers), and the variables name others")
        return
    yield Finding(
        code="container-interface",
        severity=NOTE,
        machine=facts.name,
        what=f"{names}: an interface of containers, which no other machine can reach",
        how=_list_of(inner),
        breaks="Potluck leaves it out; gloo and NCCL may choose it and then wait forever",
        fix=f"only for torchrun: export GLOO_SOCKET_IFNAME={right} NCCL_SOCKET_IFNAME={right}",
        pains=(3,),
    )


def socket_variables(case: Case, facts: Facts) -> Iterator[Finding | Fine]:
    """GLOO_SOCKET_IFNAME takes names; NCCL_SOCKET_IFNAME takes beginnings of names, ^ and = (pains 3, 4)."""
    right = next((i.name for i in facts.interfaces if facts.default_address in ipv4(i)), "eth0")
    for variable in ("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        value = facts.environment.get(variable)
        if value is None:
            continue
        wrong = _wrong_value(variable, value, facts)
        if wrong is None:
            yield Fine(machine=facts.name, what=f"{variable}={value} names an interface that is up")
            continue
        code, what = wrong
        yield Finding(
            code=code,
            severity=WARNING,
            machine=facts.name,
            what=f"{variable}={value}: {what}",
            how=f"the variable is set here; interfaces: {', '.join(i.name for i in facts.interfaces)}",
            breaks="torchrun with gloo or NCCL fails or hangs (`Unable to find address for`); Potluck does not "
            "read it",
            fix=f"export {variable}={right}",
            pains=(3, 4) if code == "socket-variable-syntax" else (3,),
        )


def _wrong_value(variable: str, value: str, facts: Facts) -> tuple[str, str] | None:
    names = {i.name: i for i in facts.interfaces}
    parts = [part.strip() for part in value.lstrip("^=").split(",")]
    if not value.strip() or not all(parts):
        return "socket-variable-syntax", "it holds an empty name"
    if variable != "NCCL_SOCKET_IFNAME":
        if value[0] in "^=" or any(part.startswith(("^", "=")) for part in parts):
            return "socket-variable-syntax", "^ and = are NCCL's syntax; gloo takes whole names only"
        missing = [part for part in parts if part not in names]
        chosen = [names[part] for part in parts if part in names]
    elif value[0] == "^":
        missing, chosen = [], [i for i in facts.interfaces if not i.name.startswith(tuple(parts))]
    elif value[0] == "=":
        missing, chosen = [p for p in parts if p not in names], [names[p] for p in parts if p in names]
    else:
        chosen = [i for i in facts.interfaces if i.name.startswith(tuple(parts))]
        missing = [] if chosen else parts
    if missing:
        return "socket-variable-unknown", f"there is no interface {', '.join(missing)} here"
    usable = [i for i in chosen if i.up and i.kind not in (LOOPBACK, CONTAINER)]
    if not usable:
        return "socket-variable-unusable", "all that it names are down, loopback or containers'"
    return None


def master_address(case: Case, facts: Facts) -> Iterator[Finding | Fine]:
    """MASTER_ADDR=localhost is right on one machine and wrong on two (pain 3)."""
    value = facts.environment.get("MASTER_ADDR")
    if value is None or not (value == "localhost" or value.startswith("127.") or value == "::1"):
        return
    yield Finding(
        code="master-addr-is-loopback",
        severity=NOTE,
        machine=facts.name,
        what=f"MASTER_ADDR={value}: every machine would look for the first one in itself",
        how="the variable is set here",
        breaks="torchrun over two machines (`Connection refused, remote=[127.0.0.1]`); Potluck does not read it",
        fix=f"export MASTER_ADDR={facts.default_address or 'ADDRESS'}   (the first machine's), or: unset "
        "MASTER_ADDR",
        pains=(3,),
    )


def own_name(case: Case, facts: Facts) -> Iterator[Finding | Fine]:
    """The hosts file gives the machine's own name to loopback, as Debian and Ubuntu do (pains 3, 5)."""
    short = facts.name.split(".")[0].lower()
    lines = [
        line
        for line in facts.hosts
        if line.address.startswith("127.") and any(n.lower().split(".")[0] == short for n in line.names)
    ]
    if not lines or short == "localhost":
        return
    line = lines[0]
    address = facts.default_address or "ADDRESS"
    yield Finding(
        code="own-name-is-loopback",
        severity=NOTE,
        machine=facts.name,
        what=f"{facts.hosts_path} says that {facts.name} is {line.address}, which every machine takes for itself",
        how=f"its line: {line.address} {' '.join(line.names)}",
        breaks="gloo and torchrun tell the others 127.x and nobody connects; Potluck uses addresses, not this name",
        fix=_without_name(line, facts, address),
        pains=(3, 5),
    )


def _without_name(line: HostsLine, facts: Facts, address: str) -> str:
    """The command for the fix. localhost may be in the same line, and must stay there."""
    start = line.address.replace(".", "\\.")
    if "localhost" not in line.names:
        return f"sudo sed -i.bak -E 's/^{start}([[:space:]].*{facts.name})/{address}\\1/' {facts.hosts_path}"
    return (
        f"sudo sed -i.bak -E '/^{start}/s/[[:space:]]{facts.name}([[:space:]]|$)/\\1/' {facts.hosts_path} && "
        f"echo '{address} {facts.name}' | sudo tee -a {facts.hosts_path}"
    )


def resolver(case: Case, facts: Facts) -> Iterator[Finding | Fine]:
    """Names cost torchrun seconds for each connection (pain 8)."""
    slow = [lookup for lookup in facts.lookups if not lookup.finished or lookup.seconds >= SLOW_LOOKUP_S]
    if slow:
        worst = max(slow, key=lambda lookup: lookup.seconds)
        than = "no answer within" if not worst.finished else "an answer only after"
        yield Finding(
            code="slow-resolver",
            severity=NOTE,
            machine=facts.name,
            what=f"looking up names is slow: {than} {worst.seconds:.1f} s for {worst.asked}",
            how="timed a query to the system's resolver",
            breaks="torchrun asks for every connection, some 10 s each; Potluck uses addresses only",
            fix=f"echo '{facts.default_address or 'ADDRESS'} {facts.name}' | sudo tee -a {facts.hosts_path}"
            "   (or repair the name server: resolvectl status)",
            pains=(8,),
        )
        return
    unknown = [lookup for lookup in facts.lookups if lookup.error and lookup.asked == facts.name]
    if unknown:
        yield Finding(
            code="own-name-unknown",
            severity=NOTE,
            machine=facts.name,
            what=f"this machine's own name, {facts.name}, has no address",
            how=f"the resolver says: {unknown[0].error}",
            breaks="gloo and torchrun stop (`gai error`, `err=-3`); Potluck uses addresses only",
            fix=f"echo '{facts.default_address or 'ADDRESS'} {facts.name}' | sudo tee -a {facts.hosts_path}",
            pains=(8,),
        )
    elif facts.lookups:
        slowest = max(lookup.seconds for lookup in facts.lookups)
        yield Fine(machine=facts.name, what=f"names are looked up in {slowest * 1000:.0f} ms at most")


def ports(case: Case, facts: Facts) -> Iterator[Finding | Fine]:
    """Another process uses the port (pain 9)."""
    for port in facts.ports:
        if port.free:
            yield Fine(machine=facts.name, what=f"port {port.number} ({port.wanted_by}) is free")
            continue
        ours = port.wanted_by == "--port"
        holder = port.holder or "a process that this user may not see"
        process = re.search(r"process (\d+)", holder)
        yield Finding(
            code="port-taken",
            severity=BLOCKER if ours else NOTE,
            machine=facts.name,
            what=f"port {port.number} ({port.wanted_by}) is taken by {holder}",
            how="tried to listen on it",
            breaks="a host with this --port cannot start"
            if ours
            else "torchrun over several machines or with this --master-port, and scripts with this MASTER_PORT "
            "(EADDRINUSE). On one machine, told no port, torchrun takes a free one, and so does Potluck",
            fix=(f"kill {process[1]}   (if it is an old run), or " if process else "")
            + ("leave --port out: a free one is used" if ours else f"torchrun --master-port {port.number + 1} …"),
            pains=(9,),
        )


def firewall(case: Case, facts: Facts) -> Iterator[Finding | Fine]:
    """A firewall that admits no connection stops a host, not a guest (pain 6)."""
    port = _port_of_interest(case, facts)
    if _was_reached(case, facts):
        yield Fine(machine=facts.name, what="firewall: a connection from the other machine came in")
        return
    closed = [f for f in facts.firewalls if covers(f.denied, port) or (f.blocks and not covers(f.allowed, port))]
    if not closed:
        if facts.firewalls and all(f.blocks is False for f in facts.firewalls):
            tools = ", ".join(f.tool for f in facts.firewalls)
            yield Fine(machine=facts.name, what=f"firewall: connections may come in ({tools})")
        return
    wall = closed[0]
    yield Finding(
        code="firewall-blocks",
        severity=WARNING,
        machine=facts.name,
        what=f"the firewall ({wall.tool}) blocks incoming connections to port {port}",
        how=f"{wall.how}: {_policy(wall)}",
        breaks="nobody can join a host on this machine; as a guest it is fine",
        fix=allow_command(wall, port) + f"   and then: potluck host --port {port}",
        pains=(6,),
    )


def allow_command(wall: Firewall, port: int) -> str:
    return {
        "ufw": f"sudo ufw allow {port}/tcp",
        "firewalld": f"sudo firewall-cmd --add-port={port}/tcp",
        "nftables": f"sudo nft insert rule {_chain_of(wall)} tcp dport {port} accept",
        "iptables": f"sudo iptables -I INPUT -p tcp --dport {port} -j ACCEPT",
        "macos": 'sudo /usr/libexec/ApplicationFirewall/socketfilterfw --add "$(which python3)" '
        '--unblockapp "$(which python3)"',
        "windows": "netsh advfirewall firewall add rule name=potluck dir=in action=allow protocol=TCP "
        f"localport={port}",
    }.get(wall.tool, f"allow TCP port {port} in {wall.tool}")


def covers(ports: tuple[str, ...], port: int) -> bool:
    """Whether the port is among ports and ranges, such as 22 or 6000-6010."""
    for text in ports:
        first, _, last = text.replace(":", "-").partition("-")
        if first.isdigit() and int(first) <= port <= int(last if last.isdigit() else first):
            return True
    return False


def _policy(wall: Firewall) -> str:
    if not wall.blocks:
        return f"ports {', '.join(wall.denied[:6])} are denied"
    return "incoming is denied" + (f" except ports {', '.join(wall.allowed[:6])}" if wall.allowed else "")


def _chain_of(wall: Firewall) -> str:
    """nft needs the chain's name; it follows the command in `how`."""
    return wall.how.partition("chain ")[2] or "inet filter input"


def _port_of_interest(case: Case, facts: Facts) -> int:
    if case.between is not None and facts is case.there:
        return next((r.port for r in case.between.reaches if r.wanted), EXAMPLE_PORT)
    return next((p.number for p in facts.ports if p.wanted_by == "--port"), EXAMPLE_PORT)


def _was_reached(case: Case, facts: Facts) -> bool:
    if case.between is None:
        return False
    tries = case.between.back if facts is case.here else case.between.reaches
    return any(r.outcome == CONNECTED and r.wanted for r in tries)


def ipv6(case: Case, facts: Facts) -> Iterator[Finding | Fine]:
    """Names lead to IPv6 addresses, but IPv6 works only partly or not at all (pain 10)."""
    state = facts.ipv6
    if state.sockets and state.loopback and not state.switched_off:
        return
    named = [line for line in facts.hosts if line.address == "::1" and "localhost" in line.names]
    looked = [lookup for lookup in facts.lookups if any(":" in answer for answer in lookup.answers)]
    have = [i for i in facts.interfaces if i.up and any(":" in a for a in i.addresses)]
    if not (named or looked or have):
        yield Fine(machine=facts.name, what="IPv6 is off, everywhere; IPv4 is used")
        return
    off = "is switched off (disable_ipv6)" if state.switched_off else "does not work (::1 cannot be listened on)"
    but = f"{facts.hosts_path} says localhost is ::1" if named else ""
    but = but or (
        f"{looked[0].asked} is {looked[0].answers[0]}" if looked else f"{have[0].name} has an IPv6 address"
    )
    yield Finding(
        code="ipv6-half-on",
        severity=NOTE,
        machine=facts.name,
        what=f"IPv6 is half on: it {off}, but {but}",
        how="tried to listen on ::1; read the setting, the hosts file and the interfaces",
        breaks="torchrun (`errno: 97 - Address family not supported by protocol`); Potluck uses IPv4 only",
        fix=f"sudo sed -i.bak '/^::1[[:space:]]/d' {facts.hosts_path}"
        if named
        else "sudo sysctl -w net.ipv6.conf.all.disable_ipv6=0 net.ipv6.conf.lo.disable_ipv6=0",
        pains=(10,),
    )


def small_mtu(case: Case, facts: Facts) -> Iterator[Finding | Fine]:
    for interface in facts.interfaces:
        if interface.up and interface.mtu is not None and interface.mtu < LEAST_MTU and ipv4(interface):
            yield Finding(
                code="small-mtu",
                severity=WARNING,
                machine=facts.name,
                what=f"{interface.name} has an MTU of {interface.mtu}, less than {LEAST_MTU}",
                how="read from the interface",
                breaks="more packets than needed, and IPv6 does not work at all",
                fix=f"sudo ip link set dev {interface.name} mtu 1500",
                pains=(6,),
            )


def ipv4(interface: Interface) -> list[str]:
    """Its IPv4 addresses, without their prefix."""
    return [a.split("/")[0] for a in interface.addresses if ":" not in a]


def same_network(interface: Interface, address: str) -> bool:
    """Whether the address is on the interface's own network."""
    try:
        there = ipaddress.ip_address(address)
        return any(there in ipaddress.ip_interface(a).network for a in interface.addresses if "/" in a)
    except ValueError:
        return False


def describe(interface: Interface) -> str:
    speed = f", {interface.speed_mbit} Mbit/s" if interface.speed_mbit else ""
    mtu = f", MTU {interface.mtu}" if interface.mtu else ""
    return f"{interface.name} ({interface.kind}{speed}{mtu}) {', '.join(ipv4(interface))}".rstrip()


def _list_of(interfaces: list[Interface] | tuple[Interface, ...]) -> str:
    return "; ".join(describe(i) + ("" if i.up else " (down)") for i in interfaces)
