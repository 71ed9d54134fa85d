"""The speed-up of a whole run over the host alone: one formula for the run's last line and for the report. PURE."""

from __future__ import annotations

import math

_BLOCK = 8
_MOST_BLOCKS = 64
_FEWEST_BLOCKS = 4


class Gain:
    """Mean of the steps' speed-ups, weighted by their seconds: host's time alone ÷ time with guests."""

    def __init__(self) -> None:
        self._alone_s = self._step_s = 0.0
        # A step's speed-up is a mean over several steps, so neighbours are alike: their blocks are compared.
        self._blocks: list[tuple[float, float]] = []
        self._block, self._in_block, self._block_size = (0.0, 0.0), 0, _BLOCK

    def add(self, speedup: float | None, step_s: float) -> None:
        """Count a step; one whose speed-up is not known does not count."""
        if speedup is None or step_s <= 0:
            return
        self._alone_s += speedup * step_s
        self._step_s += step_s
        self._block = (self._block[0] + speedup * step_s, self._block[1] + step_s)
        self._in_block += 1
        if self._in_block < self._block_size:
            return
        self._blocks.append(self._block)
        self._block, self._in_block = (0.0, 0.0), 0
        if len(self._blocks) >= _MOST_BLOCKS:
            self._blocks = [(a + c, b + d) for (a, b), (c, d) in zip(self._blocks[::2], self._blocks[1::2])]
            self._block_size *= 2

    @property
    def value(self) -> float | None:
        """None if no step's speed-up was known."""
        return self._alone_s / self._step_s if self._step_s else None

    @property
    def margin(self) -> float | None:
        """Half of the mean's 95 % interval, from the scatter of blocks of steps; None below 32 steps."""
        count = len(self._blocks)
        if count < _FEWEST_BLOCKS:
            return None
        weight_s = sum(step_s for _, step_s in self._blocks)
        mean = sum(alone_s for alone_s, _ in self._blocks) / weight_s
        scatter = sum((alone_s - mean * step_s) ** 2 for alone_s, step_s in self._blocks)
        free = count - 1
        # Student's t for 95 %, within 1 % from 3 degrees of freedom on.
        student = 1.96 + 2.4 / free + 3.6 / free**2
        return student * math.sqrt(scatter * count / free) / weight_s
