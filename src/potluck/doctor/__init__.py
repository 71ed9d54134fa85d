"""The doctor's list of checks, and how their findings become a diagnosis. PURE."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from potluck.doctor import addresses, connecting, machine, network, pair, software
from potluck.spec.facts import Case, Facts
from potluck.spec.finding import Diagnosis, Finding, Fine, ordered

Found = Iterable[Finding | Fine]
MachineCheck = Callable[[Case, Facts], Found]
PairCheck = Callable[[Case], Found]

MACHINE_CHECKS: tuple[MachineCheck, ...] = (
    network.interface_in_use,
    network.interfaces_of_containers,
    network.socket_variables,
    network.master_address,
    network.own_name,
    network.resolver,
    network.ports,
    network.firewall,
    network.ipv6,
    network.small_mtu,
    software.versions,
    software.gpu,
    software.mps,
    software.mps_settings,
    software.windows,
    machine.threads,
    machine.memory,
    machine.disk,
    machine.power,
    machine.orphans,
    machine.checkpoints,
    machine.ssh,
)
PAIR_CHECKS: tuple[PairCheck, ...] = (
    connecting.reach,
    connecting.handshake,
    connecting.way_back,
    pair.big_messages,
    pair.mtu,
    pair.versions,
    pair.gloo,
    pair.link,
    addresses.speeds,
    pair.clocks,
    addresses.leaving,
)


def examine(case: Case) -> Diagnosis:
    """Run every check on every machine with facts."""
    found: list[Finding | Fine] = []
    for check in PAIR_CHECKS if case.between is not None else ():
        found += check(case)
    for facts in (case.here, case.there):
        for machine_check in MACHINE_CHECKS if facts is not None else ():
            assert facts is not None
            found += machine_check(case, facts)
    return ordered(found)
