"""The arithmetic of a link's measurement: how much to send, the receiving rate, round trips.

PURE: sizes and times are given.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean, pstdev

from potluck.spec.probed import Rate, RoundTrips

LEAST_PIECE, MOST_PIECE = 16 * 1024, 1024 * 1024
PIECE_S = 0.004
"""Duration of a piece, within bounds, so that a slow link is measured finely and a fast one at full speed."""
FIRST_WINDOW, MOST_WINDOW = 128 * 1024, 32 * 1024 * 1024
WINDOW_S = 0.4
"""The most data in flight, in seconds of the rate. A link with a longer round trip is not filled, and a process
that is delayed for longer leaves a gap."""
SENDING_S, FULL_S = 0.05, 0.002
"""The longest wait for messages while this side sends, and after a piece for which the socket had no room."""
_SETTLED_S = 0.1
"""A rate over less time than this is meaningless, because the first packets pass any shaper immediately."""

SKIPPED_PART, MOST_SKIPPED_S = 0.25, 1.0
"""The part at the beginning that does not count, while TCP grows its window."""
LATE_S = 0.3
_BIN_S = 0.1
_GRAIN_S = 0.005
MOST_SECONDS = 120.0


class Window:
    """How much a sender may have in flight."""

    def __init__(self, began: float) -> None:
        self._began = began
        self.sent = 0
        self.acked = 0

    def piece(self, now: float) -> int:
        """Bytes that may be sent now; 0: wait for the other side."""
        rate = self.acked / max(now - self._began, _SETTLED_S)
        window = min(FIRST_WINDOW + rate * WINDOW_S, MOST_WINDOW)
        piece = int(min(max(rate * PIECE_S, LEAST_PIECE), MOST_PIECE))
        return piece if self.sent - self.acked + piece <= window else 0

    def arrived(self, total: int) -> None:
        """The other side has received this many bytes in total. More than was sent does not count."""
        self.acked = max(self.acked, min(total, self.sent))


class Meter:
    """Counts received data for some seconds from the first bytes."""

    def __init__(self, seconds: float) -> None:
        self._seconds = min(seconds, MOST_SECONDS)
        self.total = 0
        self._marks: list[tuple[float, int]] = []
        """(time, total bytes), one every few milliseconds."""
        self._ended = False

    def add(self, count: int, now: float) -> None:
        self.total += count
        if self._ended:
            return
        if self._marks and now > self._marks[0][0] + self._seconds:
            # The first that comes too late still counts, up to its own time: where this process was held up at the
            # end, it is what had arrived meanwhile.
            self._ended = True
            if now <= self._marks[0][0] + self._seconds + LATE_S:
                self._marks.append((now, self.total))
        elif not self._marks or now - self._marks[-1][0] >= _GRAIN_S:
            self._marks.append((now, self.total))
        else:
            self._marks[-1] = (self._marks[-1][0], self.total)

    def over(self, now: float) -> bool:
        return self._ended or (bool(self._marks) and now > self._marks[0][0] + self._seconds + LATE_S)

    def rate(self) -> Rate | None:
        """The rate; None if too little data arrived."""
        if len(self._marks) < 3:
            return None
        first, end = self._marks[0][0], self._marks[0][0] + self._seconds
        begin = first + min(SKIPPED_PART * self._seconds, MOST_SKIPPED_S)
        marks = [mark for mark in self._marks if mark[0] >= begin]
        if len(marks) < 3:
            marks = self._marks
        # The last mark is in the middle of a stream, unless the stream has stopped long before the end.
        gap = max(after[0] - before[0] for before, after in pairwise(marks))
        last = end if end - marks[-1][0] > 2 * gap + _BIN_S else marks[-1][0]
        took = last - marks[0][0]
        if took <= 0:
            return None
        return Rate(bytes_per_s=(marks[-1][1] - marks[0][1]) / took, variation=_variation(marks))


def _variation(marks: Sequence[tuple[float, int]]) -> float | None:
    """Variation over bins of a tenth of a second; data between two readings is spread evenly."""
    count = int((marks[-1][0] - marks[0][0]) / _BIN_S)
    if count < 3:
        return None
    edges = [_amount_at(marks, marks[0][0] + number * _BIN_S) for number in range(count + 1)]
    amounts = [after - before for before, after in pairwise(edges)]
    mean = fmean(amounts)
    return pstdev(amounts) / mean if mean > 0 else None


def _amount_at(marks: Sequence[tuple[float, int]], when: float) -> float:
    after = bisect_left(marks, when, key=lambda mark: mark[0])
    if not 0 < after < len(marks):
        return marks[min(after, len(marks) - 1)][1]
    (t0, a0), (t1, a1) = marks[after - 1], marks[after]
    return a0 + (a1 - a0) * (when - t0) / (t1 - t0)


def round_trips(seconds: Sequence[float]) -> RoundTrips | None:
    """Statistics of round trips, given in their order."""
    if not seconds:
        return None
    ordered = sorted(seconds)
    steps = [abs(after - before) for before, after in pairwise(seconds)]
    return RoundTrips(
        count=len(ordered),
        p50_s=quantile(ordered, 0.5),
        p99_s=quantile(ordered, 0.99),
        jitter_s=fmean(steps) if steps else 0.0,
    )


def quantile(ordered: Sequence[float], part: float) -> float:
    """The quantile of this share, by the nearest rank."""
    return ordered[max(0, math.ceil(part * len(ordered)) - 1)]


class Shares:
    """Seconds for each part of a path's measurement."""

    PARTS = (("idle", 1.5), ("ours", 2.0), ("bare", 1.0))
    DIRECTIONS = 3
    """Seconds for out, back, and both at once."""
    LEAST_S = 0.3

    def __init__(self, seconds: float, paths: int) -> None:
        """The used path gets twice the time of each other one."""
        self._one = seconds / (paths + 1)

    def of(self, part: str, *, used: bool) -> float:
        """Seconds for all idle pings, or for one direction."""
        weights = dict(self.PARTS)
        whole = weights["idle"] + self.DIRECTIONS * (weights["ours"] + weights["bare"])
        return max(self.LEAST_S, self._one * (2 if used else 1) * weights[part] / whole)
