"""The effect of injected faults on a run: guests lost and rejoined, samples taken back, slowest step. PURE."""

from __future__ import annotations

import statistics

from msgspec.structs import replace

from potluck.spec.outcome import Incident, Outcome
from potluck.spec.results import Aftermath

LOST = ("guest_lost", "guest_left", "guest_refused")
BACK = "guest_joined"


def aftermath(outcome: Outcome, warm_up: int) -> Aftermath | None:
    """The effect of the run's faults; None for a run without faults."""
    if not outcome.faults and not outcome.faults_missed:
        return None
    first_step = min((fault.step for fault in outcome.faults), default=None)
    struck = [s for s in outcome.steps if first_step is not None and s.step >= first_step]
    slowest = max(struck, key=lambda s: s.step_s, default=None)
    usual = [s.step_s for s in outcome.steps[warm_up:]]
    return Aftermath(
        applied=tuple(
            replace(
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
