"""What the lab and the workers of DDP and of the peers tell each other: `spec.json`, and a line for every step."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

import msgspec
from msgspec import Struct

from potluck import checked
from potluck.checked import Natural, Positive
from potluck.errors import ConfigError

_WRITE = "write it as the bench does"


class RankSpec(Struct, frozen=True, kw_only=True):
    """One machine, one rank."""

    name: str
    device: str
    micro_batch: Positive
    share: Positive
    """Samples of every step."""
    address: str


class RecipeSpec(Struct, frozen=True, kw_only=True):
    name: str
    config: Mapping[str, int | float | str | None]


class WorkerSpec(Struct, frozen=True, kw_only=True):
    """What all ranks do together: the content of `spec.json`."""

    recipe: RecipeSpec
    members: tuple[RankSpec, ...]
    steps: Positive
    seed: int
    """Random seed for the sample order."""
    master_address: str
    master_port: int
    interface: str
    """The network interface that gloo uses."""
    out: Path
    """File to which rank 0 appends a line for every step."""
    threads: Positive = 1
    bucket_mb: float | None = None
    """DDP's bucket_cap_mb; stock (25, the first one 1) if not given."""
    asynchronous: bool = False
    """Whether ray-ps applies each gradient when it comes."""
    weights: Path | None = None
    """File for the final weights, as safetensors, written by rank 0."""


class WorkerStep(Struct, frozen=True, kw_only=True):
    """A line of `WorkerSpec.out`: one optimizer update."""

    step: Positive
    """Number of the step, counted from 1."""
    ended_at: float
    """On the box's monotonic clock."""
    step_s: float
    loss: float | None
    """None: not a number."""
    samples: dict[str, Natural]
    """Samples counted for each machine."""

    def append_to(self, file: BinaryIO) -> None:
        file.write(msgspec.json.encode(self) + b"\n")


def read_spec(path: Path) -> WorkerSpec:
    """The spec in a file."""
    try:
        table = json.loads(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}", hint="--spec takes a file") from error
    except ValueError as error:
        raise ConfigError(f"{path} is no spec: {error}", hint=_WRITE) from error
    return checked.convert(table, WorkerSpec, where=str(path), hint=_WRITE)
