"""Reads this machine's firewalls from the output of their own commands.

It leaves out what this user may not read.
"""

from __future__ import annotations

import re

from potluck.doctor.facts.system import System
from potluck.spec.facts import Firewall

COMMAND_S = 2.0
"""Several are asked one after the other."""
_PORTS = r"(?:\{\s*([^}]*)\}|(\d[\d\-:]*))"


def firewalls(system: System) -> tuple[Firewall, ...]:
    """The firewall that decides. If a manager (ufw, firewalld) writes the rules, its settings count."""
    if system.platform == "darwin":
        candidates = [macos(system)]
    elif system.platform == "win32":
        candidates = [windows(system)]
    else:
        candidates = [ufw(system) or firewalld(system)]
        if candidates == [None]:
            candidates = [nftables(system) or iptables(system)]
    return tuple(wall for wall in candidates if wall is not None)


def ufw(system: System) -> Firewall | None:
    """None if it is not installed or not active."""
    said = system.run("ufw", "status", "verbose", timeout_s=COMMAND_S)
    if said is not None and said.status == 0:
        if "Status: active" not in said.out:
            return None
        blocks = re.search(r"Default:\s*(deny|reject) \(incoming\)", said.out) is not None
        allowed: list[str] = []
        denied: list[str] = []
        for line in said.out.splitlines():
            match = re.match(r"(\d[\d:]*)(?:/tcp)?\s+(ALLOW|DENY|REJECT)(?: IN)?\s+Anywhere", line)
            if match:
                (allowed if match[2] == "ALLOW" else denied).append(match[1].replace(":", "-"))
        return Firewall(
            tool="ufw", blocks=blocks, allowed=tuple(allowed), denied=tuple(denied), how="ufw status verbose"
        )
    # Without root, its files say whether it is on, not which ports it lets in.
    if re.search(r"^ENABLED=yes", system.read("/etc/ufw/ufw.conf") or "", re.M) is None:
        return None
    policy = re.search(r'^DEFAULT_INPUT_POLICY="?(\w+)', system.read("/etc/default/ufw") or "", re.M)
    blocks = policy is None or policy[1] != "ACCEPT"
    return Firewall(tool="ufw", blocks=blocks, how="/etc/ufw/ufw.conf")


def firewalld(system: System) -> Firewall | None:
    said = system.run("firewall-cmd", "--state", timeout_s=COMMAND_S)
    if said is None or said.out.strip() != "running":
        return None
    ports = system.run("firewall-cmd", "--list-ports", timeout_s=COMMAND_S)
    allowed = tuple(p.removesuffix("/tcp") for p in (ports.out if ports else "").split() if p.endswith("/tcp"))
    return Firewall(tool="firewalld", blocks=True, allowed=allowed, how="firewall-cmd --state, --list-ports")


def nftables(system: System) -> Firewall | None:
    """From `nft list ruleset`: the chains at input and output. None without chains or without rights."""
    said = system.run("nft", "list", "ruleset", timeout_s=COMMAND_S)
    if said is None or said.status != 0:
        return None
    inward, outward = _chains(said.out, "input"), _chains(said.out, "output")
    if not inward and not outward:
        return None
    where = next((name for name, body in inward if _closed(body) or _denied(body)), "")
    return Firewall(
        tool="nftables",
        blocks=any(_closed(body) for _, body in inward),
        allowed=tuple(port for _, body in inward for port in _nft_ports(body, "accept")),
        denied=tuple(port for _, body in inward for port in _denied(body)),
        out_blocks=any(_closed(body) for _, body in outward),
        out_allowed=tuple(port for _, body in outward for port in _nft_ports(body, "accept")),
        out_denied=tuple(port for _, body in outward for port in _denied(body)),
        how=f"nft list ruleset, chain {where}" if where else "nft list ruleset",
    )


def _chains(ruleset: str, hook: str) -> list[tuple[str, str]]:
    """(family, table and name; its rules) of the chains at a hook."""
    found = []
    for table in re.finditer(r"^table (\S+) (\S+) \{(.*?)^\}", ruleset, re.M | re.S):
        for chain in re.finditer(r"^\tchain (\S+) \{(.*?)^\t\}", table[3], re.M | re.S):
            if f"hook {hook} " in chain[2]:
                found.append((f"{table[1]} {table[2]} {chain[1]}", chain[2]))
    return found


def _closed(body: str) -> bool:
    """Whether packets that no rule allows are dropped."""
    rules = [line.strip() for line in body.splitlines()]
    return "policy drop" in body or any(re.match(r"(counter .*)?(drop|reject)\b", rule) for rule in rules)


def _denied(body: str) -> list[str]:
    return _nft_ports(body, "drop") + _nft_ports(body, "reject")


def _nft_ports(body: str, verdict: str) -> list[str]:
    ports: list[str] = []
    for line in body.splitlines():
        match = re.search(rf"tcp dport {_PORTS}.*\b{verdict}\b", line)
        if match:
            ports += [p.strip() for p in (match[1] or match[2]).split(",")]
    return ports


def iptables(system: System) -> Firewall | None:
    """From `iptables -S INPUT`. None without rules or without rights."""
    said = system.run("iptables", "-S", "INPUT", timeout_s=COMMAND_S)
    if said is None or said.status != 0 or not said.out.strip():
        return None
    lines = said.out.splitlines()
    closing = any(re.fullmatch(r"-A INPUT -j (DROP|REJECT).*", line) for line in lines)
    ports: dict[str, list[str]] = {"ACCEPT": [], "DROP": [], "REJECT": []}
    for line in lines:
        match = re.search(r"-p tcp .*--dports? ([\d:,]+) .*-j (ACCEPT|DROP|REJECT)", line)
        if match:
            ports[match[2]] += match[1].replace(":", "-").split(",")
    return Firewall(
        tool="iptables",
        blocks="-P INPUT DROP" in lines or closing,
        allowed=tuple(ports["ACCEPT"]),
        denied=(*ports["DROP"], *ports["REJECT"]),
        how="iptables -S INPUT",
    )


def macos(system: System) -> Firewall | None:
    said = system.run("socketfilterfw", "--getglobalstate", timeout_s=COMMAND_S)
    if said is None:
        return None
    match = re.search(r"State = (\d)", said.out)
    on = match is not None and match[1] != "0"
    return Firewall(tool="macos", blocks=on, how="socketfilterfw --getglobalstate")


def windows(system: System) -> Firewall | None:
    said = system.run("netsh", "advfirewall", "show", "currentprofile", timeout_s=COMMAND_S)
    if said is None or said.status != 0:
        return None
    on = re.search(r"^State\s+ON", said.out, re.M) is not None
    blocks = on and "BlockInbound" in said.out
    return Firewall(tool="windows", blocks=blocks, how="netsh advfirewall show currentprofile")
