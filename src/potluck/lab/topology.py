"""The emulated network of a rig, as data: addresses, and the ip and tc commands that make and shape it. PURE.

It is a star. Every machine has one link, eth0, to a switch. A machine's link is shaped in both directions: what it
sends by a queue on its own end, what it receives by a queue on the switch's end. So a host with a `link_mbit`
shares it between all of its guests, as it would share its one cable.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import Struct

from potluck.bounds import Many, Text

if TYPE_CHECKING:  # the supervisor reads a wiring, and need not import what a rig is made of
    from potluck.spec.rig import Machine, Rig

SUBNET = "10.77.0"
BITS = 24
LEAST_BURST_BYTES = 16_000
BURSTS_PER_S = 250
QUEUE_MS = 100
"""What a shaped link keeps before it drops: a short queue, as a switch has."""
NETEM_PACKETS = 50_000
"""netem drops packets above this many delayed ones: enough for 100 ms at 5 Gbit/s."""
HOLDER = "{pid}"
"""Stands for the id of the process that holds the machine's namespace, which is not known here."""


class SwitchPort(Struct, frozen=True, kw_only=True):
    """A machine's link and its place in the switch."""

    machine: Text
    address: Text
    switch_ip: Many[Text]
    """Lines for `ip -batch` in the switch's namespace; `{pid}` is the machine's holder."""
    machine_ip: Many[Text]
    """Lines for `ip -batch` in the machine's namespace, after those of the switch."""
    switch_tc: Many[Text]
    """Lines for `tc -batch` that shape what the machine receives."""
    machine_tc: Many[Text]
    """Lines for `tc -batch` that shape what the machine sends."""


class Wiring(Struct, frozen=True, kw_only=True):
    """All of a rig's network."""

    switch: Many[Text]
    """Lines for `ip -batch` that make the switch."""
    ports: Many[SwitchPort]


def wiring(rig: Rig) -> Wiring:
    """The network of a rig."""
    return Wiring(
        switch=("link add name switch type bridge", "link set dev switch up", "link set dev lo up"),
        ports=tuple(_port(machine, number) for number, machine in enumerate(rig.machines, 1)),
    )


def needs_netem(rig: Rig) -> bool:
    """Whether a link of the rig has a latency, which not every kernel can emulate."""
    return any(machine.latency_ms for machine in rig.machines)


def shaping(device: str, mbit: float | None, latency_ms: float) -> tuple[str, ...]:
    """Lines for `tc -batch` that limit a device's sending to a rate, and delay it."""
    rate = ""
    if mbit is not None:
        burst = max(LEAST_BURST_BYTES, int(mbit * 1e6 / 8 / BURSTS_PER_S))
        rate = f"tbf rate {mbit * 1e6:.0f}bit burst {burst} latency {QUEUE_MS}ms"
    if not latency_ms:
        return (f"qdisc replace dev {device} root {rate}",) if rate else ()
    delay = f"qdisc replace dev {device} root handle 1: netem delay {latency_ms * 1e3:.0f}us limit {NETEM_PACKETS}"
    return (delay, f"qdisc replace dev {device} parent 1:1 handle 10: {rate}") if rate else (delay,)


def _port(machine: Machine, number: int) -> SwitchPort:
    port, address = f"port{number}", f"{SUBNET}.{number}"
    return SwitchPort(
        machine=machine.name,
        address=address,
        switch_ip=(
            f"link add name {port} type veth peer name eth0 netns {HOLDER}",
            f"link set dev {port} master switch",
            f"link set dev {port} up",
        ),
        machine_ip=(
            "link set dev lo up",
            f"address add {address}/{BITS} dev eth0",
            "link set dev eth0 up",
        ),
        switch_tc=shaping(port, machine.link_mbit, machine.latency_ms),
        machine_tc=shaping("eth0", machine.link_up_mbit or machine.link_mbit, machine.latency_ms),
    )
