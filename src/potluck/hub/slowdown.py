"""Detects guests that make the run slower, by comparing steps with guests and steps of the host alone. PURE.

The quota weighs a guest's samples against the time of waiting for it. It does not include what a guest costs the
host's own computing: the cores of a shared machine, or the time to code and decode. So whole steps are compared, in
seconds a sample. The rule, and why it does not blame guests for a host whose own speed changes:

1. Steps with guests seem slower than the last steps without. A guest that sat out for this before sits out again.
2. Otherwise all guests sit out for a few steps: a trial. The steps just before it must be slower than the trial.
3. The guests come back, and the steps after the trial must be slower than it as well. Then one guest sits out.

One figure is slower than another if their medians differ by more than 2 %, and by more than three standard errors.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from statistics import median

from potluck.hub.members import CHECKING, COMPUTING, JOINING, LATE, SITTING_OUT, SYNCING, Member

WITH_STEPS, WITH_S = 16, 2.0
"""Steps with guests are judged once there are this many, and they took this long."""
TRIAL_STEPS, TRIAL_S = 8, 0.5
"""A trial without guests has at least this many steps and takes at least this long."""
CLEAR_STEPS, CLEAR_PART = 3, 0.1
"""A trial ends after this many steps if they are slower by more than this part: then the guests clearly help."""
SETTLING = 2
"""Steps after a change that do not count, because unfinished work of earlier steps still takes time."""
MOST_LOST = 16
"""A trial ends without a finding after this many steps that do not count: a guest is joining."""
KEPT_STEPS = 128
LOOK_EVERY = 8
LEAST_PART, ERRORS = 0.02, 3.0
COST = 0.01
"""Trials, and guests that try again, may take this part of the run's time."""
ROUTINE_S, LONGEST_ROUTINE_S = 60.0, 3600.0
"""After a trial that found nothing, the next one without a cause comes after this long, then twice as long, …"""
FEWEST_REST_STEPS = 16
WHOLE = 4.0
"""The whole weights, which guests need after a trial, take about this many times as long as their change."""
TRYING = "a short trial without guests: is the run faster alone?"

ALONE, WITH = "alone", "with guests"


class StepTimes:
    """Seconds per sample in the last steps of one kind."""

    def __init__(self, steps: int, seconds: float) -> None:
        self._least = steps, seconds
        self._kept: deque[float] = deque(maxlen=KEPT_STEPS)
        self.count, self.seconds = 0, 0.0

    def add(self, samples: int, seconds: float) -> None:
        self._kept.append(seconds / samples)
        self.count += 1
        self.seconds += seconds

    @property
    def known(self) -> bool:
        return self.count >= self._least[0] and self.seconds >= self._least[1]

    def suffice(self) -> None:
        """Treat the present figure as known from now on."""
        self._least = self.count, 0.0

    @property
    def sample_s(self) -> float:
        return median(self._kept)

    @property
    def error_s(self) -> float:
        """The median's standard error, computed from the median deviation so that outliers do not count."""
        middle = median(self._kept)
        return 1.86 * median(abs(each - middle) for each in self._kept) / math.sqrt(len(self._kept))

    def slower_than(self, other: StepTimes) -> bool:
        noise_s = ERRORS * math.hypot(self.error_s, other.error_s)
        return self.sample_s - other.sample_s > max(LEAST_PART * other.sample_s, noise_s)


def _alone() -> StepTimes:
    return StepTimes(TRIAL_STEPS, TRIAL_S)


def _with() -> StepTimes:
    return StepTimes(WITH_STEPS, WITH_S)


@dataclass(frozen=True, slots=True)
class Slower:
    """A guest that must sit out, the number of steps, and the run's samples per second with and without it."""

    member: Member
    steps: int
    with_per_s: float
    alone_per_s: float


class Slowdown:
    """Collects every step's time, and says which guest must sit out."""

    def __init__(self, members: Mapping[str, Member]) -> None:
        self._members = members
        self._alone, self._with = _alone(), _with()
        self._alone_at_s = -math.inf
        self._kinds: dict[int, str] = {}
        self._last, self._same = "", 0
        self._seen: set[str] = set()
        self._run_s = 0.0
        self.trying = False
        """Whether guests sit out for a trial."""
        self._tried: StepTimes | None = None
        self._lost_steps = 0
        self._found: Slower | None = None
        self._suspected = False
        """The steps before the trial were slower than it: those after it decide."""
        self._lost_s: float | None = None
        """What the last trial has cost, until the guests are back."""
        self._usual_s = 0.0
        self._next_s = self._routine_at_s = 0.0
        self._routine_s = ROUTINE_S

    def begun(self, step: int) -> None:
        """Record the kind of the step that has begun, after its leases were given out."""
        members = self._members.values()
        kind = ""
        if any(m.state in (JOINING, SYNCING, CHECKING) for m in members):
            pass
        elif any(m.lease is not None and m.lease.step == step for m in members):
            kind = WITH
        elif all(m.state == SITTING_OUT and not m.feed.open for m in members):
            kind = ALONE
        self._same = self._same + 1 if kind == self._last else 0
        self._last = kind
        if kind and self._same >= SETTLING:
            self._kinds[step] = kind
        helping = {m.id for m in members if m.samples and m.state in (COMPUTING, LATE)}
        if not helping <= self._seen or not self._seen <= set(self._members):
            self._seen = (self._seen & set(self._members)) | helping
            self._with = _with()

    def timed(
        self, step: int, samples: int, seconds: float, *, host_sample_s: float | None, here: Collection[str]
    ) -> None:
        """A step took these seconds. `here`: ids of the guests on this machine."""
        kind = self._kinds.pop(step, "")
        if samples < 1 or seconds <= 0:
            return
        self._run_s += seconds
        if self._lost_s is not None:
            self._lost_s += seconds - samples * self._usual_s
        if self.trying:
            self._in_trial(kind, samples, seconds)
        elif kind == ALONE:
            self._alone.add(samples, seconds)
            self._alone_at_s = self._run_s
        elif kind == WITH:
            if self._lost_s is not None:
                self._next_s, self._lost_s = self._run_s + max(0.0, self._lost_s) / COST, None
            self._with.add(samples, seconds)
            if self._with.known and self._with.count % LOOK_EVERY == 0:
                self._look(samples, host_sample_s, here)

    def found(self) -> Slower | None:
        """The guest that must sit out from the next step on; during a trial all guests do."""
        if self.trying:
            for member in self._members.values():
                if member.state in (COMPUTING, LATE):
                    member.state, member.reason, member.feed.open = SITTING_OUT, TRYING, False
        found, self._found = self._found, None
        return found if found is not None and found.member.id in self._members else None

    def _look(self, samples: int, host_sample_s: float | None, here: Collection[str]) -> None:
        slower = self._alone.known and self._with.slower_than(self._alone)
        last = self._last_joined(here)
        if last is None:
            return
        suspected, self._suspected = self._suspected, False
        just_before = self._run_s - self._alone_at_s <= 2 * self._with.seconds
        if slower and (suspected or (last.slowed and just_before)):
            self._found = self._slower(last, samples)
            return
        if not slower and self._alone.known:
            for member in self._members.values():
                member.slowed = 0 if member.state in (COMPUTING, LATE) else member.slowed
        unknown_here = not self._alone.known and any(m.id in here and m.samples for m in self._members.values())
        if unknown_here or (slower and self._run_s >= self._next_s) or self._routine(samples, host_sample_s):
            # Guests sit out from the next step on, and get no weights then: that is the host alone.
            self.trying, self._tried, self._lost_steps = True, _alone(), 0
            self._usual_s, self._lost_s = self._with.sample_s, 0.0

    def _last_joined(self, here: Collection[str]) -> Member | None:
        """The guest that sits out first: one on this machine, else the one that joined last."""
        helping = [m for m in self._members.values() if m.samples and m.state in (COMPUTING, LATE)]
        return max(helping, key=lambda m: (m.id in here, m.joined_at), default=None)

    def _slower(self, member: Member, samples: int) -> Slower:
        with_s, alone_s = self._with.sample_s, self._alone.sample_s
        lost_s = (with_s - alone_s) * samples * self._with.count
        pause = lost_s / COST / (alone_s * samples) * 2 ** min(member.slowed, 4)
        member.slowed += 1
        self._with = _with()
        return Slower(member, max(FEWEST_REST_STEPS, int(pause)), 1 / with_s, 1 / alone_s)

    def _routine(self, samples: int, host_sample_s: float | None) -> bool:
        """Whether a trial without a suspicion is due; it must cost next to nothing."""
        if self._run_s < max(self._routine_at_s, self._next_s):
            return False
        alone_s = max(self._alone.sample_s if self._alone.known else 0.0, host_sample_s or 0.0)
        if not alone_s:
            return False
        trial_s = max(TRIAL_S, (TRIAL_STEPS + SETTLING) * samples * alone_s)
        back_s = max((WHOLE * (m.transfer.value or 0.0) for m in self._members.values()), default=0.0)
        loss_s = (trial_s + back_s) * max(0.0, 1 - self._with.sample_s / alone_s)
        return self._with.seconds * COST >= loss_s

    def _in_trial(self, kind: str, samples: int, seconds: float) -> None:
        assert self._tried is not None
        if kind == ALONE:
            self._tried.add(samples, seconds)
            if self._clear(self._tried):
                self._tried.suffice()
        else:
            self._lost_steps += 1
        if self._tried.known:
            self._suspected = self._with.known and self._with.slower_than(self._tried)
            self._alone, self._alone_at_s = self._tried, self._run_s
            if not self._suspected:
                self._routine_at_s = self._run_s + self._routine_s
                self._routine_s = min(2 * self._routine_s, LONGEST_ROUTINE_S)
        elif self._lost_steps <= MOST_LOST and self._members:
            return
        self.trying, self._tried, self._with = False, None, _with()

    def _clear(self, tried: StepTimes) -> bool:
        """Whether the few steps of a trial already show that guests help."""
        if tried.count < CLEAR_STEPS or not self._with.known:  # a guest that leaves meanwhile makes it unknown
            return False
        much = tried.sample_s > (1 + CLEAR_PART) * self._with.sample_s
        return much and tried.slower_than(self._with)
