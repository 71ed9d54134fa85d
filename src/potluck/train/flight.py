"""Micro-batches that the host's device was given and has not finished: how many, and how long each took.

Owns the run-ahead, so that a device which queues its work never waits for Python. It knows no hub and no loop.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from potluck.device import Device, Mark


class Flight:
    """Used by the training thread. On a device that works at once everything lands when it is launched."""

    def __init__(
        self,
        device: Device,
        computed: Callable[[tuple[int, ...], float], None],
        mark: Callable[[], Mark] | None = None,
    ) -> None:
        """`computed` is told each micro-batch's positions and seconds, in order, when it has landed.

        `mark` is what to wait for where that is more than the device.
        """
        self._device = device
        self._computed = computed
        self._mark = mark or device.mark
        self._out: deque[tuple[tuple[int, ...], float, Mark]] = deque()
        self._landed = 0.0

    def launched(self, positions: tuple[int, ...], began: float) -> None:
        """A micro-batch was given to the device, from `began` (monotonic) on; waits for what is too far back."""
        self._out.append((positions, began, self._mark()))
        while len(self._out) > self._device.ahead:
            self._land()

    def finish(self) -> None:
        """Wait for everything."""
        while self._out:
            self._land()

    def _land(self) -> None:
        positions, began, mark = self._out.popleft()
        mark.wait()
        now = time.monotonic()
        # It could not start before the one ahead of it was done: together they make up the time that passed.
        start, self._landed = max(began, self._landed), now
        if self._device.ahead and self._device.trace is not None:
            self._device.trace.interval(start, now, len(positions))
        self._computed(positions, now - start)
