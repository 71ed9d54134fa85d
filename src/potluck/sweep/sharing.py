"""Which idle machine helps which trial. PURE: what a sweep does when fewer trials are left than machines."""

from __future__ import annotations

from collections.abc import Collection, Mapping


def helping(
    machines: Collection[str],
    hosts: Mapping[str, str],
    remaining_s: Mapping[str, float | None],
    now: Mapping[str, str],
    *,
    waiting: int,
) -> dict[str, str]:
    """The trial that each idle machine should join.

    Args:
        machines: all of them.
        hosts: the machine of each running trial.
        remaining_s: of each trial that can be joined, at its present speed; None if not known yet.
        now: the trial that each guest is with.
        waiting: trials that have no machine yet. As many idle machines are left alone, for these trials.
    """
    idle = [machine for machine in machines if machine not in hosts.values()][waiting:]
    known = [seconds for seconds in remaining_s.values() if seconds is not None]
    unknown = 2 * max(known, default=1.0)  # it has just begun
    left = {trial: unknown if s is None else s for trial, s in remaining_s.items() if trial in hosts}
    if not left:
        return {}
    chosen = {machine: now[machine] for machine in idle if now.get(machine) in left}
    for machine in idle:
        if machine not in chosen:
            trial = max(left, key=lambda t: left[t])
            chosen[machine] = trial
            left[trial] /= 2  # as if it were as fast as all that the trial has: the next one goes to another trial
    return chosen
