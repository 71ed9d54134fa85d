"""The memory that a strategy needs on each machine: weights, gradients, optimizer state, copies, activations.

PURE. It assumes AdamW (two moments per parameter) and fp32 weights.

Bytes a parameter, N machines:

    alone            4 weights + 4 gradient + 8 moments = 16
    DDP              16 + 4 buckets
    ZeRO-2           4 weights + (4 + 8)/N + 4 buckets
    FSDP             16/N + 8/L: two of L layers gathered at once
    potluck, host    16 + 8.78 (replica, sum, one coded message: measured)
    potluck, guest   8 + 4.26 (residual: measured); no optimizer state

and the activations of one micro-batch on top, where the job says how much those are. FSDP leaves more memory than
the others, so its micro-batch may be larger.
"""

from __future__ import annotations

from collections.abc import Mapping

from potluck.spec.config import MEMORY_PART
from potluck.spec.fleet import FSDP, POTLUCK, SOLO, ZERO, Fleet, FleetMachine, Job

TRAINING_BYTES = 16.0
"""For each parameter: weights, gradients and AdamW's two moments in fp32; activations come on top."""
BUCKET_BYTES = 4.0
HOST_MORE_BYTES = 8.78
GUEST_BYTES = 8 + 4.26
GATHERED_LAYERS = 2
LAYERS = 12
"""Assumed for a model that does not give it."""
USUAL_MICRO_BATCH = 8
"""Samples computed at once where the memory suffices."""


def memory_of(strategy: str, job: Job, fleet: Fleet, shares: Mapping[str, int]) -> dict[str, float]:
    """Bytes by machine; 0 for an unused one."""
    return {
        m.name: _bytes_per_parameter(strategy, m, fleet) * job.parameters
        + (job.activation_bytes_per_sample or 0.0) * min(micro_batch_of(strategy, job, m, fleet), shares[m.name])
        if shares[m.name] or m is fleet.host
        else 0.0
        for m in fleet.machines
    }


def _bytes_per_parameter(strategy: str, machine: FleetMachine, fleet: Fleet) -> float:
    count = len(fleet.machines)
    if strategy == SOLO or count == 1:
        return TRAINING_BYTES
    if strategy == POTLUCK:
        return TRAINING_BYTES + HOST_MORE_BYTES if machine is fleet.host else GUEST_BYTES
    if strategy == ZERO:
        return 4 + 12 / count + BUCKET_BYTES
    if strategy == FSDP:
        return TRAINING_BYTES / count + 4 * GATHERED_LAYERS / LAYERS
    return TRAINING_BYTES + BUCKET_BYTES


def micro_batch_of(strategy: str, job: Job, machine: FleetMachine, fleet: Fleet) -> int:
    """The samples that the machine computes at once with this strategy."""
    if strategy != FSDP or not machine.by_memory or machine.memory_bytes is None:
        return machine.micro_batch
    state_bytes = _bytes_per_parameter(strategy, machine, fleet) * job.parameters
    return fitting(machine.memory_bytes, state_bytes, job.activation_bytes_per_sample or 0.0, USUAL_MICRO_BATCH)


def fitting(memory_bytes: float, state_bytes: float, sample_bytes: float, most: int) -> int:
    """Samples whose activations fit beside the weights and what belongs to them; at least one."""
    room = MEMORY_PART * max(0.0, memory_bytes - state_bytes)
    return int(min(most, max(1, room // sample_bytes))) if sample_bytes else most
