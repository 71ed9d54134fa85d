"""Detects that this machine itself stood still for a while: asleep, stopped, or overloaded.

Code that judges another machine by its silence checks this first, because a machine that stood still heard nobody.
PURE: the caller passes the time.
"""

from __future__ import annotations

STOOD_STILL_S = 2.0
"""A thread that checks several times a second and did not for this long was prevented from running."""


class Standstill:
    """Checked regularly by one thread, or by several threads under one lock."""

    def __init__(self, now: float) -> None:
        self._looked = now

    def seconds(self, now: float) -> float:
        """For how long this machine stood still before `now`: 0.0 where it did not."""
        still_s, self._looked = now - self._looked, now
        return still_s if still_s > STOOD_STILL_S else 0.0

    def ongoing(self, now: float) -> float:
        """The same for a caller that does not check regularly: it counts a standstill once, but does not prove that
        the machine was awake."""
        return self.seconds(now) if now - self._looked > STOOD_STILL_S else 0.0
