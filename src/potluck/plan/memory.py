"""What a strategy needs of each machine's memory: weights, gradients, optimizer state, copies, activations.

PURE. It knows AdamW (two moments a parameter) and fp32 weights, no device and no allocator.

Bytes a parameter, N machines:

    alone            4 weights + 4 gradient + 8 moments = 16
    DDP              16 + 4 buckets
    ZeRO-2           4 weights + (4 + 8)/N + 4 buckets
    FSDP             16/N + 8/L: two of L layers gathered at once
    potluck, host    16 + 8.78 (replica, sum, one coded message: measured)
    potluck, guest   8 + 4.26 (residual: measured); no optimizer state

and the activations of one micro-batch on top, where the job says how much those are.
"""

from __future__ import annotations

from collections.abc import Mapping

from potluck.spec.fleet import FSDP, POTLUCK, SOLO, ZERO, Fleet, FleetMachine, Job

TRAINING_BYTES = 16.0
"""For each parameter: weights, gradients and AdamW's two moments in fp32; activations come on top."""
BUCKET_BYTES = 4.0
HOST_MORE_BYTES = 8.78
GUEST_BYTES = 8 + 4.26
GATHERED_LAYERS = 2
LAYERS = 12
"""Of a model that does not say."""


def memory_of(strategy: str, job: Job, fleet: Fleet, shares: Mapping[str, int]) -> dict[str, float]:
    """Bytes by machine; 0 for one that is not used."""
    return {
        m.name: _bytes_per_parameter(strategy, m, fleet) * job.parameters + _activations(job, m, shares[m.name])
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


def _activations(job: Job, machine: FleetMachine, share: int) -> float:
    return (job.activation_bytes_per_sample or 0.0) * min(machine.micro_batch, share)
