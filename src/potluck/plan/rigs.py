"""Predictions for a rig: its machines and links as a fleet, step by step where the fleet changes. PURE."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from potluck.errors import ConfigError
from potluck.plan import about
from potluck.plan.predict import predict
from potluck.plan.rank_strategies import balanced_shares, ddp, equal_shares
from potluck.spec.fleet import DDP, DDP_OVERLAP, FSDP, POTLUCK, SOLO, STRATEGIES, ZERO, Fleet, FleetMachine, Job
from potluck.spec.rig import Machine, Rig

PAYLOAD_PART = 1448 / 1514
"""The share of a shaped link's rate that is payload; the rest are Ethernet, IP and TCP headers."""
UPDATE_S_PER_PARAMETER = 11e-9
"""Cost of clipping, AdamW and encoding the change, on one core (measured in the lab, 3.3 M parameters)."""
DEFAULT_MICRO_BATCH = 4


def job_of(rig: Rig) -> Job:
    workload = rig.workload
    return Job(
        name=f"{workload.recipe} depth {workload.depth}" if workload.depth else workload.recipe,
        parameters=about.parameters(workload),
        batch=workload.global_batch,
        tokens_per_sample=(workload.sequence or about.GPT_SEQUENCE) if workload.recipe == "gpt" else 1,
        codec=workload.codec,
    )


def fleet_of(rig: Rig, step: int = 1, alone: Mapping[str, float] | None = None) -> Fleet:
    """The machines present in a step. If the rig gives no speed, the one measured alone (samples/s)."""
    here = [rig.host, *(m for m in rig.guests if m.present_at(step))]
    return Fleet(machines=tuple(_machine(rig, m, step, (alone or {}).get(m.name)) for m in here))


def _machine(rig: Rig, machine: Machine, step: int, alone_rate: float | None) -> FleetMachine:
    seconds = machine.seconds_per_sample_at(step)
    if seconds is None and alone_rate:
        seconds = 1 / alone_rate
    if seconds is None:
        raise ConfigError(
            f"the rig {rig.name} does not say how fast {machine.name} is",
            hint="give it seconds_per_sample; `potluck probe` measures it",
        )
    rate = machine.slower_mbit
    return FleetMachine(
        name=machine.name,
        samples_per_s=1 / seconds,
        update_s=UPDATE_S_PER_PARAMETER * about.parameters(rig.workload),
        link_bytes_per_s=None if rate is None else rate * 1e6 / 8 * PAYLOAD_PART,
        latency_s=machine.latency_ms / 1000,
        micro_batch=machine.micro_batch or DEFAULT_MICRO_BATCH,
        largest_micro_batch=machine.micro_batch or 256,
        device=f"{seconds:g} s/sample",
        link="" if rate is None else f"{rate:g} Mbit/s",
    )


def step_times(
    rig: Rig, strategies: Sequence[str], warm_up: int = 0, alone: Mapping[str, float] | None = None
) -> dict[str, float]:
    """Mean step time by strategy, over the steps after the warm-up."""
    steps = range(1, 2) if rig.steady else range(warm_up + 1, rig.workload.steps + 1) or range(1, 2)
    known = [name for name in strategies if name in STRATEGIES]
    return {name: math.fsum(_step_s(rig, name, step, alone) for step in steps) / len(steps) for name in known}


def _step_s(rig: Rig, strategy: str, step: int, alone: Mapping[str, float] | None) -> float:
    job, fleet = job_of(rig), fleet_of(rig, step, alone)
    if strategy in (SOLO, POTLUCK):
        return predict(job, fleet, strategy).step_s
    # Ranks cannot come and go, and their shares were set for the speeds of the first step.
    staying = [m.name for m in rig.machines if m.leave_at_step is None and m.join_at_step == 1]
    fleet = Fleet(machines=tuple(m for m in fleet.machines if m.name in staying))
    if strategy in (ZERO, FSDP) or rig.steady:
        return predict(job, fleet, strategy).step_s
    first = Fleet(machines=tuple(m for m in fleet_of(rig, 1, alone).machines if m.name in staying))
    shares = equal_shares(job, first) if strategy in (DDP, DDP_OVERLAP) else balanced_shares(job, first)
    return ddp(job, fleet, strategy, shares).step_s
