"""Which idle machine hosts the next trial of a sweep, and which helps a running one. PURE."""

from __future__ import annotations

import heapq
from collections.abc import Collection, Mapping


def hosts_next(machine: str, takes_s: Mapping[str, float], busy_s: Mapping[str, float], *, waiting: int) -> bool:
    """Whether an idle machine should host the next trial, and not help another one.

    Not if the other machines, each with one trial after the other, would be done with all that wait before this
    machine is done with one. As a host it would be the last; as a guest it shortens a trial that is running. Of
    three-friends' 12 trials the machine 4 times slower than the host would begin its second when 151 s of 403 are
    left, and take 252 s. The fastest machine always hosts, so every trial is begun.

    Args:
        takes_s: seconds that a trial takes each machine alone, where known.
        busy_s: seconds until each machine that hosts a trial is done with it, where known.
        waiting: trials that have no machine yet, at least one.
    """
    own_s = takes_s.get(machine)
    others = [(busy_s.get(name, 0.0) + s, s) for name, s in takes_s.items() if name != machine]
    if own_s is None or not others:
        return True
    heapq.heapify(others)
    ended_s = 0.0
    for _ in range(waiting):
        ended_s, each_s = others[0]
        heapq.heapreplace(others, (ended_s + each_s, each_s))
    return own_s <= ended_s


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
