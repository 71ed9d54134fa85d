"""What a run's faults came to: who was lost and came back, what was taken back, and what it cost the host.

PURE: an outcome in, figures out. It does not know how anything was struck, nor how it is shown.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from potluck.spec.outcome import FaultDone, Incident, Outcome

LOST = ("guest_lost", "guest_left", "guest_refused")
BACK = "guest_joined"


@dataclass(frozen=True, slots=True, kw_only=True)
class Aftermath:
    """All that went wrong in one run, and what became of it. The names are a format: programs read them."""

    applied: tuple[FaultDone, ...]
    """Their times are seconds since the first step began."""
    missed: int
    """Planned ones whose time never came."""
    taken_back_samples: int
    """Of guests that were late or lost, computed by the host or by another guest."""
    lost: dict[str, int]
    """How often, by guest."""
    rejoined: dict[str, int]
    longest_absence_s: float | None
    """From a loss to the same guest's return."""
    slowest_step_s: float | None
    """From the first fault on."""
    slowest_step: int | None
    median_step_s: float | None
    """Of the steps after the warm-up."""

    def to_dict(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "applied": [dataclasses.asdict(fault) for fault in self.applied]}

    @classmethod
    def from_dict(cls, table: Mapping[str, Any]) -> Aftermath:
        return cls(**{**table, "applied": tuple(FaultDone(**fault) for fault in table["applied"])})


def aftermath(outcome: Outcome, warm_up: int) -> Aftermath | None:
    """None for a run with which nobody meddled."""
    if not outcome.faults and not outcome.faults_missed:
        return None
    first_step = min((fault.step for fault in outcome.faults), default=None)
    struck = [s for s in outcome.steps if first_step is not None and s.step >= first_step]
    slowest = max(struck, key=lambda s: s.step_s, default=None)
    usual = [s.step_s for s in outcome.steps[warm_up:]]
    return Aftermath(
        applied=tuple(
            dataclasses.replace(
                fault,
                start=round(fault.start - outcome.started_at, 3),
                end=round(fault.end - outcome.started_at, 3),
            )
            for fault in outcome.faults
        ),
        missed=outcome.faults_missed,
        taken_back_samples=sum(incident.samples for incident in outcome.incidents),
        lost=_count(outcome.incidents, LOST),
        rejoined=_count(outcome.incidents, (BACK,)),
        longest_absence_s=_longest_absence_s(outcome.incidents),
        slowest_step_s=slowest.step_s if slowest is not None else None,
        slowest_step=slowest.step if slowest is not None else None,
        median_step_s=statistics.median(usual) if usual else None,
    )


def _count(incidents: list[Incident], kinds: tuple[str, ...]) -> dict[str, int]:
    found: dict[str, int] = {}
    for incident in incidents:
        if incident.kind in kinds:
            found[incident.machine] = found.get(incident.machine, 0) + 1
    return found


def _longest_absence_s(incidents: list[Incident]) -> float | None:
    lost_at: dict[str, float] = {}
    absences = []
    for incident in incidents:
        if incident.kind in LOST:
            lost_at.setdefault(incident.machine, incident.at)
        elif incident.kind == BACK and incident.machine in lost_at:
            absences.append(incident.at - lost_at.pop(incident.machine))
    return max(absences, default=None)
