"""Numbers in what guests say: owns which of them a host believes. A WireError for all others.

PURE: no clock, no socket, no tensor.
"""

from __future__ import annotations

import math
from typing import Any

from potluck.errors import WireError
from potluck.hub.members import Member

LARGEST_NUMBER = 1 << 62
SHORTEST_S, LONGEST_S = 1e-6, 1e7
"""Durations that a guest may tell of, apart from 0; rates come out of them."""


def real(fields: dict[str, Any], key: str) -> float:
    """A finite number that a guest sent; a string such as "Infinity" is none."""
    value = fields[key]
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise WireError(f"{key} {value!r:.40}, which is no finite number")
    return float(value)


def whole(fields: dict[str, Any], key: str, *, least: int = 0) -> int:
    """A whole number that a guest sent, of a size that something can have."""
    value = fields[key]
    if type(value) is not int or not least <= value <= LARGEST_NUMBER:
        raise WireError(f"{key} {value!r:.40}, which is no number from {least} on")
    return value


def seconds(fields: dict[str, Any], key: str, *, least: float = 0.0) -> float:
    """A duration that a guest sent; negative ones, where they are allowed, mean that it does not know."""
    value = real(fields, key)
    if not least <= value <= LONGEST_S:
        raise WireError(f"{key} {value!r:.40}, which is no duration")
    return max(value, SHORTEST_S) if value > 0.0 else 0.0


def micro_batches(member: Member, fields: dict[str, Any]) -> None:
    member.computes(whole(fields, "micro_batch"), whole(fields, "largest_micro_batch"))
