"""Computes the host's speed alone and the speed-up of a whole run, with one formula for all displays. PURE."""

from __future__ import annotations

import math
from collections import deque

RECENT_STEPS = 8
"""Rates and speed-ups of a step are over this many steps."""
ENOUGH = 0.25
"""A size counts only if this part of all samples was computed at it, which leaves out remainders and single
trials."""
SAME = 1.03
"""A smaller size must be faster by more than this, so that noise is not mistaken for a better size."""
_BLOCK = 8
_MOST_BLOCKS = 64
_FEWEST_BLOCKS = 4
"""Initial steps per block, and number of blocks, for the margin of a gain."""


class AloneRate:
    """Seconds that a sample takes this machine at the best of the sizes that it computes at once.

    During the search for that size, and for the samples that guests leave, micro-batches are small. Alone they
    would not be.
    """

    def __init__(self) -> None:
        self._steps: deque[dict[int, tuple[int, float]]] = deque([{}], maxlen=RECENT_STEPS)

    def add(self, samples: int, seconds: float) -> None:
        """Count a micro-batch. Sizes up to the same power of two are one group."""
        size, now = 1 << (samples - 1).bit_length(), self._steps[-1]
        count, total_s = now.get(size, (0, 0.0))
        now[size] = count + samples, total_s + seconds

    def step_ended(self) -> None:
        self._steps.append({})

    @property
    def sample_s(self) -> float | None:
        """Seconds per sample over the last steps; None if nothing was computed."""
        counts: dict[int, int] = {}
        seconds: dict[int, float] = {}
        for step in self._steps:
            for size, (count, total_s) in step.items():
                counts[size] = counts.get(size, 0) + count
                seconds[size] = seconds.get(size, 0.0) + total_s
        everything = sum(counts.values())
        each = {size: seconds[size] / count for size, count in counts.items() if count >= ENOUGH * everything}
        if not each:
            return sum(seconds.values()) / everything if everything else None
        fastest = min(each.values())
        return next(each[size] for size in sorted(each, reverse=True) if each[size] <= SAME * fastest)


class Gain:
    """Mean of the steps' speed-ups, weighted by their seconds: host's time alone ÷ time with guests."""

    def __init__(self) -> None:
        self._alone_s = self._step_s = 0.0
        # A step's speed-up is a mean over several steps, so neighbours are alike: their blocks are compared.
        self._blocks: list[tuple[float, float]] = []
        self._block, self._in_block, self._block_size = (0.0, 0.0), 0, _BLOCK

    def add(self, speedup: float | None, step_s: float) -> None:
        """Count a step, if its speed-up is known."""
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
