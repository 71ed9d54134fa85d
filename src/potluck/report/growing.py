"""Figures of a growing list of numbers, exact at any time: its median and its sum. PURE."""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left, insort

_CHUNK = 2048


class Median:
    """The median of all finite numbers so far, in 8 bytes a number. Each costs the same, however many there are."""

    def __init__(self) -> None:
        self._chunks: list[array[float]] = []
        self._largest: list[float] = []
        """The last number of each chunk."""
        self._count = 0

    def add(self, value: float | None) -> None:
        if value is None or not math.isfinite(value):
            return
        self._count += 1
        if not self._chunks:
            self._chunks.append(array("d"))
            self._largest.append(value)
        at = min(bisect_left(self._largest, value), len(self._chunks) - 1)
        chunk = self._chunks[at]
        insort(chunk, value)
        self._largest[at] = chunk[-1]
        if len(chunk) > 2 * _CHUNK:
            self._chunks[at : at + 1] = [chunk[:_CHUNK], chunk[_CHUNK:]]
            self._largest.insert(at, chunk[_CHUNK - 1])

    @property
    def value(self) -> float | None:
        if not self._count:
            return None
        low, high = self._at((self._count - 1) // 2), self._at(self._count // 2)
        return (low + high) / 2

    def _at(self, index: int) -> float:
        for chunk in self._chunks:
            if index < len(chunk):
                return chunk[index]
            index -= len(chunk)
        raise IndexError(index)


class Sum:
    """A sum that is rounded once, as by math.fsum: the rounding errors are kept separately."""

    def __init__(self) -> None:
        self._parts: list[float] = []

    def add(self, value: float) -> None:
        kept = []
        for part in self._parts:
            if abs(value) < abs(part):
                value, part = part, value
            total = value + part
            if rest := part - (total - value):
                kept.append(rest)
            value = total
        self._parts = [*kept, value]

    @property
    def value(self) -> float:
        return math.fsum(self._parts)
