"""The data between the lab and the workers of DDP and of the peers: `spec.json`, and a line for every step."""

from __future__ import annotations

from pathlib import Path
from typing import BinaryIO

import msgspec
from msgspec import Struct

from potluck import checked
from potluck.bounds import Finite, Many, Named, Natural, Positive, Seed, Text
from potluck.spec.manifest import RecipeEntry

START_S = 90.0
"""Time for all processes to start and find each other: importing torch on a busy machine, over a slow link."""
_WRITE = "write it as the bench does"


class RankSpec(Struct, frozen=True, kw_only=True):
    """One machine, one rank."""

    name: Text
    device: Text
    micro_batch: Positive
    share: Positive
    """Samples of every step."""
    address: Text


class WorkerSpec(Struct, frozen=True, kw_only=True):
    """The common settings of all ranks: the content of `spec.json`."""

    recipe: RecipeEntry
    members: Many[RankSpec]
    steps: Positive
    seed: Seed
    """Random seed for the sample order."""
    master_address: Text
    master_port: Natural
    interface: Text
    """The network interface that gloo uses."""
    out: Path
    """File to which rank 0 appends a line for every step."""
    threads: Positive = 1
    bucket_mb: Finite | None = None
    """DDP's bucket_cap_mb; stock (25, the first one 1) if not given."""
    asynchronous: bool = False
    """Whether ray-ps applies each gradient as it arrives."""
    weights: Path | None = None
    """File for the final weights, as safetensors, written by rank 0."""


class WorkerStep(Struct, frozen=True, kw_only=True):
    """A line of `WorkerSpec.out`: one optimizer update."""

    step: Positive
    """Number of the step, counted from 1."""
    ended_at: Finite
    """Time on the computer's monotonic clock."""
    step_s: Finite
    loss: Finite | None
    """Loss; None: not a number."""
    samples: Named[Natural]
    """Samples counted for each machine."""

    def append_to(self, file: BinaryIO) -> None:
        file.write(msgspec.json.encode(self) + b"\n")


def read_spec(path: Path) -> WorkerSpec:
    """The spec in a file."""
    table = checked.read_json(path, what="a spec", hint=_WRITE)
    return checked.convert(table, WorkerSpec, where=str(path), hint=_WRITE)
