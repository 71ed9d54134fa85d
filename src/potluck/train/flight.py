"""Micro-batches that the host's device was given and has not finished: how many, and how long each took.

Owns the run-ahead, so that a device which queues its work never waits for Python: not between two micro-batches,
and not between two steps. It knows no hub and no loop.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from potluck.device import Device, Mark

LEAD, LONGEST_LEAD_S = 0.8, 0.1
"""Of a micro-batch, and at most so long: by so much guests should be done before a host whose device queues its
work. Then the next step is there before the device has nothing left to do, and what comes late within that time is
not waited for. Guests stand idle for as long: it is what Python needs between two steps, and some more."""


@dataclass(slots=True)  # not frozen: that takes three times as long to make
class _Given:
    """Something that the device was given, from `began` (monotonic) on."""

    samples: int
    began: float
    given_at: float
    mark: Mark
    landed: Callable[[float, float], None]
    """Told when it was done (monotonic), and the seconds it took."""


class Flight:
    """On a device that works at once everything lands when it is launched.

    Used by the training thread, and by any thread that reads a loss or ends the run. What is told of a landing may
    take the hub's lock, so nobody calls this while holding it.
    """

    def __init__(
        self, device: Device, computed: Callable[[int, float], None], mark: Callable[[], Mark] | None = None
    ) -> None:
        """`computed` is told each micro-batch's samples and seconds, in order, when it has landed.

        `mark` is what to wait for where that is more than the device.
        """
        self._device = device
        self._computed = computed
        self._mark = mark or device.mark
        self._at_once = mark is None and not device.ahead and type(device).mark is Device.mark
        """Whether there is never anything to wait for."""
        self._lock = threading.RLock()
        self._out: deque[_Given] = deque()
        self._landed_at = 0.0
        self._last: Mark | None = None

    def launched(self, samples: int, began: float) -> None:
        """A micro-batch was given to the device, from `began` on; waits for what is too far back."""
        if self._at_once:
            self._computed(samples, self._since(began)[1])
            return
        with self._lock:
            self._add(samples, began, self._mark(), lambda now, seconds: self._computed(samples, seconds))
            while len(self._out) > self._device.ahead:
                self._land()

    def follows(self, began: float, landed: Callable[[float, float], None]) -> None:
        """Something that is no micro-batch was given to the device (an update); waits for nothing."""
        if self._at_once:
            landed(*self._since(began))
            return
        with self._lock:
            self._add(0, began, self._device.mark(), landed)

    def _since(self, began: float) -> tuple[float, float]:
        """Now, and the seconds that something took that is done now."""
        now = time.monotonic()
        start, self._landed_at = max(began, self._landed_at), now
        return now, max(0.0, now - start)

    def _add(self, samples: int, began: float, mark: Mark, landed: Callable[[float, float], None]) -> None:
        self._out.append(_Given(samples, began, time.monotonic(), mark, landed))

    @property
    def busy(self) -> bool:
        """Whether the device still has something to do. What it has done lands; nobody waits."""
        with self._lock:
            while self._out and self._out[0].mark.passed():
                self._land()
            return bool(self._out)

    def behind_s(self, sample_s: float) -> float:
        """About how long the device will need for the micro-batches it has, at so many seconds a sample."""
        with self._lock:
            if not self._out:
                return 0.0
            samples = sum(given.samples for given in self._out)
            return max(0.0, max(self._out[0].began, self._landed_at) + samples * sample_s - time.monotonic())

    def ahead_of_s(self, micro_batch: int, sample_s: float) -> float:
        """How much later than a step begins the device needs the next one; less than nothing where it waits."""
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
