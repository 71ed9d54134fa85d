"""Round numbers for an axis."""

from __future__ import annotations

import math
from collections.abc import Sequence


def nice_ticks(low: float, high: float, about: int) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten in [low, high]: roughly `about`, at least one."""
    span = high - low
    if not span > 0:
        return [low]
    raw = span / max(about, 1)
    power = 10.0 ** math.floor(math.log10(raw))
    for factor in (1, 2, 5, 10):
        if factor * power >= raw:
            break
    distance = factor * power
    first, last = math.ceil(low / distance - 1e-9), math.floor(high / distance + 1e-9)
    ticks = [i * distance for i in range(first, last + 1)]
    return ticks or [(low + high) / 2]


def tick_texts(ticks: Sequence[float]) -> list[str]:
    """All with the same number of decimals, as few as keep them apart."""
    for decimals in range(7):
        texts = [f"{tick:.{decimals}f}" for tick in ticks]
        if len(max(texts, key=len)) > 7:
            break
        # Rounded texts that differ may still lie: 0.25 as '0.2'.
        if len(set(texts)) == len(texts) and all(
            math.isclose(float(text), tick, rel_tol=1e-6, abs_tol=1e-9) for text, tick in zip(texts, ticks)
        ):
            return texts
    return [f"{tick:.3g}" for tick in ticks]
