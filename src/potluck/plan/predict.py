"""Predicts a strategy, given by name, on a fleet that does not change. PURE."""

from __future__ import annotations

from potluck.checked import nearest
from potluck.errors import ConfigError
from potluck.plan.hub import potluck
from potluck.plan.strategies import ddp, fsdp, solo, zero
from potluck.spec.fleet import FSDP, POTLUCK, SOLO, STRATEGIES, ZERO, Fleet, Job, Prediction


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
