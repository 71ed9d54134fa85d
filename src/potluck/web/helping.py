"""Finds what would help a run most, with the plan's cost model and the run's measured speeds and links. PURE."""

from __future__ import annotations

from collections.abc import Mapping

from potluck.errors import PotluckError
from potluck.plan.advice import levers
from potluck.plan.hub import potluck
from potluck.report.text import clean
from potluck.spec.events import RunStarted, StepEnded
from potluck.spec.fleet import Fleet, FleetMachine, Job
from potluck.units import percent_text

MOST = 3
MOST_TRIED = 4
"""The most guests that are tried one by one, those with the slowest links, to keep the page cheap."""


def helping(start: RunStarted, step: StepEnded, links: Mapping[str, float]) -> list[str]:
    """The best changes as sentences; empty without guests, or while a speed or a link is not known."""
    machines = []
    for machine in step.machines:
        link = links.get(clean(machine.name))
        if not machine.rate or (machine.role == "guest" and not link):
            return []
        machines.append(
            FleetMachine(
                name=clean(machine.name),
                samples_per_s=machine.rate,
                update_s=step.update_s if machine.role == "host" else 0.0,
                link_bytes_per_s=link,
                micro_batch=machine.micro_batch or 4,
                largest_micro_batch=max(machine.micro_batch or 4, 16),
            )
        )
    try:
        host, *guests = machines
        fleet = Fleet(machines=(host, *sorted(guests, key=lambda guest: guest.bytes_per_s)))
        job = Job(
            name=clean(start.recipe),
            parameters=start.trained_parameters,
            batch=start.global_batch,
            tokens_per_sample=max(1, round(start.tokens_per_sample or 1)),
            codec=start.codec,
        )
        found = levers(job, fleet, potluck(job, fleet, in_words=False), MOST_TRIED)
    except (PotluckError, ValueError, ZeroDivisionError):
        return []  # a codec that the plan does not know, or two machines of one name
    best: dict[str, str] = {}  # of changes that bring the same, the first is the simplest
    for lever in sorted(found, key=lambda lever: not lever.same_training):
        change = "" if lever.same_training else " (changes the training)"
        # Only the ratio: the plan's speed-up is against its own prediction of the fastest machine alone.
        best.setdefault(f"{lever.gain:.2f}", f"{lever.what}: {percent_text(lever.gain - 1)} more samples/s{change}")
    return list(best.values())[:MOST]
