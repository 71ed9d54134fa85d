"""Reports how much a run waits for its data, and what to do about it. PURE."""

from __future__ import annotations

from potluck.report.summary import Summary
from potluck.units import percent_text

MUCH, LEAST_S = 0.2, 0.002
"""A wait for data is reported if it takes this part of the time, and this long per step; less is not worth a
change."""
RESTARTS = 0.5
"""Restarting worker processes is the cause if it takes this part of the waiting."""


def data_share(s: Summary) -> float:
    """The part of the steps' time in which the host waited for its samples, or read them itself."""
    return min(1.0, (s.data_s + s.read_s) / s.seconds) if s.seconds else 0.0


def data_text(s: Summary) -> str | None:
    """One line for a report; None if there is nothing to report."""
    return f"waiting for data {percent_text(data_share(s))} of the time; {data_hint(s)}" if waits(s) else None


def waits(s: Summary) -> bool:
    share = data_share(s)
    return share >= MUCH and share * (s.mean_step_s or 0.0) >= LEAST_S


def data_hint(s: Summary) -> str:
    """What would help a run that waits for its data."""
    if s.workers and s.restart_s > RESTARTS * (s.data_s + s.read_s):
        again = f"the {s.workers} worker processes start again in each epoch"
        return f"{again}: give the DataLoader persistent_workers=True"
    if s.workers is None:
        return "give run.steps() a DataLoader with num_workers=4, or a faster data set"
    more = f"more than num_workers={s.workers}, for example {2 * s.workers}" if s.workers else "num_workers=4"
    return f"give the DataLoader {more}, with persistent_workers=True; or a faster data set"
