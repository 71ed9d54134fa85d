"""Measured figures of machines, which a plan reads from the list `measured` in `facts.json`. None: not measured."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from potluck.errors import UserError

_HINT = "make the file again with: potluck probe TOKEN --save FILE"


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One machine. The first in a list is the host, unless another has `host`."""

    name: str
    device: str = ""
    samples_per_s: float | None = None
    """Samples per second of the model in `model`, while computing."""
    model: str = ""
    """Name of the model as in `potluck plan --model`: gpt:4, gpt2-124m."""
    sequence: int | None = None
    """Tokens per sample."""
    flops_per_s: float | None = None
    """Effective FLOP/s while training, used to plan for another model."""
    memory_bytes: float | None = None
    link_bytes_per_s: float | None = None
    """Payload rate between this machine and the host, in the slower direction."""
    latency_s: float | None = None
    """One-way latency: half of the round trip."""
    micro_batch: int | None = None
    host: bool = False

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def from_list(value: Any, where: str) -> tuple[Measured, ...]:
    """The machines in a file's list; unknown keys are ignored, so that newer files can be read."""
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise UserError(f"{where}: measured is not a list", hint=_HINT)
    return tuple(_one(table, f"{where}: measured[{number}]") for number, table in enumerate(value))


def _one(table: Any, where: str) -> Measured:
    if not isinstance(table, Mapping) or not isinstance(table.get("name"), str) or not table["name"]:
        raise UserError(f"{where} has no name", hint=_HINT)
    known = {f.name: f for f in dataclasses.fields(Measured)}
    values = {key: value for key, value in table.items() if key in known}
    for key, value in values.items():
        if value is None or key in ("name", "device", "model"):
            continue
        if key == "host":
            values[key] = bool(value)
        elif isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
            raise UserError(f"{where}.{key} is {value!r}", hint=f"it must be a number; {_HINT}")
        elif not value and key != "latency_s":
            raise UserError(f"{where}.{key} is 0", hint=f"it must be above 0; {_HINT}")
    return Measured(**values)
