"""Measures the machines' links while a strategy runs: when each sends and receives, and the host's bytes.

A thread reads the box's counters, so every strategy is measured alike.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from types import TracebackType

from potluck.lab.box import Box
from potluck.spec.outcome import Interval

EVERY_S = 0.025
LEAST_BYTES = 1_500
"""Less than this in one reading (0.5 Mbit/s) is heartbeats and acknowledgements, not a transfer."""
LEAST_PART = 0.1
"""Share of the bytes of the other direction that counts as acknowledgements, not as a transfer."""


class StageMeter:
    """Watches between `with` and its end; then `intervals` and `host_bytes` are complete."""

    def __init__(self, box: Box, machines: Sequence[str], host: str) -> None:
        self._box, self._machines, self._host = box, machines, host
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="lab-meter", daemon=True)
        self._open: dict[tuple[str, str], Interval] = {}
        self.intervals: list[Interval] = []
        self.host_bytes: list[tuple[float, int]] = []

    def __enter__(self) -> StageMeter:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()
        self.intervals += self._open.values()
        self._open.clear()

    def _watch(self) -> None:
        before = time.monotonic()
        last = {machine: self._box.traffic(machine) for machine in self._machines}
        first = sum(last[self._host])
        while not self._stop.wait(EVERY_S):
            now = time.monotonic()
            for machine in self._machines:
                sent, received = self._box.traffic(machine)
                out, into = sent - last[machine][0], received - last[machine][1]
                last[machine] = (sent, received)
                self._note(machine, "send", _is_transfer(out, into), before, now)
                self._note(machine, "receive", _is_transfer(into, out), before, now)
            self.host_bytes.append((now, sum(last[self._host]) - first))
            before = now

    def _note(self, machine: str, kind: str, active: bool, start: float, end: float) -> None:
        running = self._open.pop((machine, kind), None)
        if active:
            start = running.start if running is not None else start
            self._open[machine, kind] = Interval(machine=machine, kind=kind, start=start, end=end)
        elif running is not None:
            self.intervals.append(running)


def _is_transfer(count: int, other_way: int) -> bool:
    return count >= LEAST_BYTES and count >= LEAST_PART * other_way
