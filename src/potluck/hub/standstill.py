"""Whether this machine itself did nothing for a while: asleep, stopped, or overloaded.

Whoever judges another machine by its silence looks here directly before: a machine that stood still heard nobody.
Pure: the caller brings the time.
"""

from __future__ import annotations

STOOD_STILL_S = 2.0
"""A thread that looks several times a second and did not for this long was not let."""


class Standstill:
    """Looked at regularly by one thread, or by several under one lock."""

    def __init__(self, now: float) -> None:
        self._looked = now

    def seconds(self, now: float) -> float:
        """For how long this machine stood still before `now`: 0.0 where it did not."""
        still_s, self._looked = now - self._looked, now
        return still_s if still_s > STOOD_STILL_S else 0.0

    def ongoing(self, now: float) -> float:
        """The same for one who does not look regularly: it counts a standstill once, but proves nobody awake."""
        return self.seconds(now) if now - self._looked > STOOD_STILL_S else 0.0
