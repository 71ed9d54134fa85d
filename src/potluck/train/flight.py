"""Tracks micro-batches that were queued on the host's device: how many are unfinished, and how long each took.

Owns the run-ahead, so that a device which queues its work never waits for Python, neither between two micro-batches
nor between two steps.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from potluck.device import Device, Mark

LEAD, LONGEST_LEAD_S = 0.8, 0.1
"""Guests should finish this part of a micro-batch, and at most this long, before a host whose device queues its
work. Then the next step is queued before the device runs out of work, and a contribution that is late by less costs
no waiting. Guests are idle for that time, so it is little more than what Python needs between two steps."""


@dataclass(slots=True)  # not frozen: that takes three times as long to make
class _InFlight:
    """Work that was queued on the device, with its start `began` (monotonic)."""

    samples: int
    began: float
    given_at: float
    mark: Mark
    landed: Callable[[float, float], None]
    """Called with the time of its end (monotonic) and its seconds."""


class Flight:
    """On a device that does not queue, work is finished when it is launched.

    Used by the training thread, and by any thread that reads a loss or ends the run. The callbacks may take the
    hub's lock, so do not call this while holding that lock.
    """

    def __init__(
        self, device: Device, computed: Callable[[int, float], None], mark: Callable[[], Mark] | None = None
    ) -> None:
        """`computed` is called with each micro-batch's samples and seconds, in order, when it is finished.

        `mark` is what to wait for, if that is more than the device.
        """
        self._device = device
        self._computed = computed
        self._mark = mark or device.mark
        self._at_once = mark is None and not device.ahead and type(device).mark is Device.mark
        """Whether there is never anything to wait for."""
        self._lock = threading.RLock()
        self._out: deque[_InFlight] = deque()
        self._landed_at = 0.0
        self._last: Mark | None = None

    def launched(self, samples: int, began: float) -> None:
        """A micro-batch was queued, beginning at `began`. Waits until not too many are unfinished."""
        if self._at_once:
            self._computed(samples, self._since(began)[1])
            return
        with self._lock:
            self._add(samples, began, self._mark(), lambda now, seconds: self._computed(samples, seconds))
            while len(self._out) > self._device.ahead:
                self._land()

    def follows(self, began: float, landed: Callable[[float, float], None]) -> None:
        """Other work (an update) was queued on the device. Does not wait."""
        if self._at_once:
            landed(*self._since(began))
            return
        with self._lock:
            self._add(0, began, self._device.mark(), landed)

    def _since(self, began: float) -> tuple[float, float]:
        """The present time, and the seconds of work that is finished now."""
        now = time.monotonic()
        start, self._landed_at = max(began, self._landed_at), now
        return now, max(0.0, now - start)

    def _add(self, samples: int, began: float, mark: Mark, landed: Callable[[float, float], None]) -> None:
        self._out.append(_InFlight(samples, began, time.monotonic(), mark, landed))

    @property
    def busy(self) -> bool:
        """Whether the device has unfinished work. Reports finished work and does not wait."""
        with self._lock:
            while self._out and self._out[0].mark.passed():
                self._land()
            return bool(self._out)

    def behind_s(self, sample_s: float) -> float:
        """About how long the device needs for its queued micro-batches, at this many seconds per sample."""
        with self._lock:
            if not self._out:
                return 0.0
            samples = sum(given.samples for given in self._out)
            return max(0.0, max(self._out[0].began, self._landed_at) + samples * sample_s - time.monotonic())

    def ahead_of_s(self, micro_batch: int, sample_s: float) -> float:
        """How long after a step begins the device needs the next one; negative if it waits."""
        return self.behind_s(sample_s) - min(LEAD * micro_batch * sample_s, LONGEST_LEAD_S)

    def finish(self) -> None:
        """Wait for everything."""
        with self._lock:
            while self._out:
                self._land()

    def _land(self) -> None:
        given = self._out[0]
        done_before = given.mark.passed()
        given.mark.wait()
        self._out.popleft()  # only now: one whose device failed is still out
        ended = time.monotonic()
        since_last_s = given.mark.seconds_since(self._last) if done_before and self._last is not None else None
        if since_last_s is not None:
            # Nobody looked when it was done; the device knows. Its clock is not ours, but it passes no mark before
            # that is made.
            ended = min(ended, max(given.given_at, self._landed_at + since_last_s))
        # It could not start before the one ahead of it was done: together they make up the time that passed.
        start, self._landed_at, self._last = max(given.began, self._landed_at), ended, given.mark
        if given.samples and self._device.ahead and self._device.trace is not None:
            self._device.trace.interval(start, ended, given.samples)
        given.landed(ended, max(0.0, ended - start))
