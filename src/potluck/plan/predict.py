"""Predicts a strategy, given by name, on a fleet that does not change, and finds the fastest. PURE."""

from __future__ import annotations

from collections.abc import Sequence

from potluck.checked import nearest
from potluck.errors import ConfigError
from potluck.plan.hub import potluck
from potluck.plan.rank_strategies import ddp, fsdp, solo, zero
from potluck.spec.fleet import FSDP, POTLUCK, SOLO, STRATEGIES, ZERO, Fleet, Job, Prediction

WORTH = 1.02
"""A smaller speed-up is not worth it."""


def check_strategies(names: tuple[str, ...]) -> tuple[str, ...]:
    """The strategies in the order of the table; all if none is named. The host alone is always included."""
    for name in names:
        if name not in STRATEGIES:
            raise ConfigError(f"there is no strategy {name!r}", hint=nearest(name, list(STRATEGIES)))
    return tuple(name for name in STRATEGIES if not names or name in names or name == SOLO)


def predict(job: Job, fleet: Fleet, strategy: str) -> Prediction:
    """The prediction of one strategy on a fleet that does not change."""
    if strategy == SOLO:
        return solo(job, fleet)
    if strategy == POTLUCK:
        return potluck(job, fleet)
    if strategy == ZERO:
        return zero(job, fleet)
    return fsdp(job, fleet) if strategy == FSDP else ddp(job, fleet, strategy)


def fastest(rows: Sequence[Prediction]) -> Prediction:
    """The fastest of the rows, or an earlier and so simpler one if the fastest is hardly worth more."""
    least = min(row.step_s for row in rows)
    return next(row for row in rows if row.step_s <= WORTH * least)
