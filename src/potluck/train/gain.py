"""The speed-up of a whole run over the host alone: one formula for the run's last line and for the report. PURE."""

from __future__ import annotations


class Gain:
    """Mean of the steps' speed-ups, weighted by their seconds: host's time alone ÷ time with guests."""

    def __init__(self) -> None:
        self._alone_s = self._step_s = 0.0

    def add(self, speedup: float | None, step_s: float) -> None:
        """Count a step; one whose speed-up is not known does not count."""
        if speedup is not None and step_s > 0:
            self._alone_s += speedup * step_s
            self._step_s += step_s

    @property
    def value(self) -> float | None:
        """None if no step's speed-up was known."""
        return self._alone_s / self._step_s if self._step_s else None
