"""Figures of a rig before anything runs: sizes, step times, ideal speed-up, cost of the links.

PURE. A machine without an emulated speed has an unknown speed; figures that need it are None.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from msgspec import Struct

from potluck.balance.codecs import codec_bytes
from potluck.balance.shares import whole_shares
from potluck.spec.fleet import FP32_BYTES
from potluck.spec.rig import Machine, Rig, Workload

GPT_DEPTH = 2
GPT_SEQUENCE = 128
_GPT_VOCABULARY = 256
_GPT_HEAD_SIZE = 64
_CNN_WIDTH = 32


class MachineFacts(Struct, frozen=True, kw_only=True):
    """One machine of a rig, at its first speed."""

    name: str
    role: str
    samples_per_s: float | None
    relative_speed: float | None
    """Its speed ÷ the host's."""
    link_mbit: float | None
    """Rate of the slower of its own link and the host's; None: unshaped."""
    gradient_ratio: float | None
    """Time to send fp32 gradients over that link ÷ step time of the host alone; None for the host."""
    coded_ratio: float | None
    """The same with the rig's codec, for one of the two directions."""


class RigFacts(Struct, frozen=True, kw_only=True):
    """A rig, in numbers."""

    parameters: int
    gradient_bytes: int
    """Bytes of all gradients in fp32."""
    host_step_s: float | None
    """Step time of the host alone, the mean over the steps."""
    ideal_speedup: float | None
    whole_sample_speedup: float | None
    """The best possible speed-up if every machine computes whole samples."""
    rounding_cost: float | None
    """1 − whole_sample_speedup ÷ ideal_speedup."""
    shares: dict[str, int] | None
    """Samples of each machine in the first step, for whole_sample_speedup."""
    machines: tuple[MachineFacts, ...]


def parameters(workload: Workload) -> int:
    """How many parameters the workload trains."""
    if workload.recipe == "cnn":
        w = _CNN_WIDTH
        convolutions = (9 * w + w) + (9 * w * 2 * w + 2 * w) + (9 * 4 * w * w + 2 * w)
        norms = 2 * (w + 2 * w + 2 * w)
        return convolutions + norms + (32 * w * 4 * w + 4 * w) + (4 * w * 10 + 10)
    depth, sequence = workload.depth or GPT_DEPTH, workload.sequence or GPT_SEQUENCE
    width = _GPT_HEAD_SIZE * depth
    # A block: qkv 3, output 1 and perceptron 8 times width², nine rows of biases and two norms of two rows each.
    block = 12 * width * width + 13 * width
    return depth * block + width * (2 * _GPT_VOCABULARY + sequence + 2)


def gradient_bytes(workload: Workload) -> int:
    """Bytes of all gradients in fp32."""
    return FP32_BYTES * parameters(workload)


def link_mbit(rig: Rig, machine: Machine) -> float | None:
    """The rate between a guest and the host, of the slower link and direction; None where neither is shaped."""
    rates = [m.slower_mbit for m in (machine, rig.host) if m.slower_mbit is not None]
    return min(rates) if rates else None


def host_step_s(rig: Rig) -> float | None:
    """Step time of the host alone, the mean over the steps."""
    speeds = [rig.host.seconds_per_sample_at(step) for step in _steps(rig)]
    known = [s for s in speeds if s is not None]
    return rig.workload.global_batch * math.fsum(known) / len(known) if known else None


def gradient_ratio(rig: Rig, machine: Machine | str) -> float | None:
    """Time to send fp32 gradients over the machine's link ÷ step time of the host alone; None if unknown."""
    guest = rig.machine(machine) if isinstance(machine, str) else machine
    rate, step_s = link_mbit(rig, guest), host_step_s(rig)
    if guest.name == rig.host.name or rate is None or step_s is None:
        return None
    return gradient_bytes(rig.workload) * 8 / (rate * 1e6) / step_s


def ideal_speedup(rig: Rig, steps: Iterable[int] | None = None) -> float | None:
    """The host's time alone for these steps (all when not given) ÷ the time of all machines at their full speeds.

    Every step has the same samples, so times are averaged, not speeds.
    """
    alone, together = [], []
    for step in _steps(rig) if steps is None else steps:
        speeds = speeds_at(rig, step)
        if speeds is None:
            return None
        alone.append(1 / speeds[rig.host.name])
        together.append(1 / math.fsum(speeds.values()))
    return math.fsum(alone) / math.fsum(together) if together else None


def speeds_at(rig: Rig, step: int) -> dict[str, float] | None:
    """Samples/s of the machines present in a step (counted from 1); None if one is not known."""
    speeds = {}
    for machine in rig.machines:
        seconds = machine.seconds_per_sample_at(step)
        if seconds is None:
            return None
        if machine.present_at(step):
            speeds[machine.name] = 1 / seconds
    return speeds


def whole_sample_speedup(rig: Rig) -> float | None:
    """The best speed-up when every machine computes whole samples, over all the steps."""
    batch = rig.workload.global_batch
    alone, together = [], []
    for step in _steps(rig):
        speeds = speeds_at(rig, step)
        if speeds is None:
            return None
        shares = whole_shares(batch, [1 / speed for speed in speeds.values()])
        alone.append(batch / speeds[rig.host.name])
        together.append(max(n / speed for n, speed in zip(shares, speeds.values())))
    return math.fsum(alone) / math.fsum(together)


def facts(rig: Rig) -> RigFacts:
    """All figures of a rig."""
    ideal, whole, speeds = ideal_speedup(rig), whole_sample_speedup(rig), speeds_at(rig, 1)
    shares = None
    if speeds is not None:
        seconds = [1 / speed for speed in speeds.values()]
        shares = dict(zip(speeds, whole_shares(rig.workload.global_batch, seconds)))
    return RigFacts(
        parameters=parameters(rig.workload),
        gradient_bytes=gradient_bytes(rig.workload),
        host_step_s=host_step_s(rig),
        ideal_speedup=ideal,
        whole_sample_speedup=whole,
        rounding_cost=1 - whole / ideal if whole is not None and ideal is not None else None,
        shares=shares,
        machines=tuple(_machine_facts(rig, machine) for machine in rig.machines),
    )


def _machine_facts(rig: Rig, machine: Machine) -> MachineFacts:
    seconds, host_s = machine.seconds_per_sample, rig.host.seconds_per_sample
    ratio = gradient_ratio(rig, machine)
    return MachineFacts(
        name=machine.name,
        role=machine.role,
        samples_per_s=None if seconds is None else 1 / seconds,
        relative_speed=None if seconds is None or host_s is None else host_s / seconds,
        link_mbit=link_mbit(rig, machine) if machine.name != rig.host.name else machine.slower_mbit,
        gradient_ratio=ratio,
        coded_ratio=None if ratio is None else ratio * codec_bytes(rig.workload.codec) / FP32_BYTES,
    )


def _steps(rig: Rig) -> range:
    # A steady fleet is the same in every step: one step is enough.
    return range(1, 2 if rig.steady else rig.workload.steps + 1)
