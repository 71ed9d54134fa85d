"""Curves of any length in bounded memory: neighbours are merged, their lowest and highest values are kept. PURE."""

from __future__ import annotations

from collections.abc import Sequence

MOST_ROWS = 512


class Series:
    """Rows of several values over the steps.

    A row is the step and time of its last step, then for each value its lowest, highest and mean. When there are
    too many rows, each two neighbours become one.
    """

    def __init__(self, values: int, most: int = MOST_ROWS) -> None:
        self.rows: list[list[float | None]] = []
        self.merges = 0
        """How often rows were merged. While it stays the same, rows are only added or changed at the end."""
        self._values, self._most = values, most
        self._counts: list[list[int]] = []
        self._steps_each = 1
        self._in_last = 0

    def add(self, step: int, t_s: float, values: Sequence[float | None]) -> None:
        row: list[float | None] = [step, round(t_s, 1)]
        for value in values:
            row += [_short(value)] * 3
        counts = [int(value is not None) for value in values]
        if self.rows and self._in_last < self._steps_each:
            self._merge(self.rows[-1], self._counts[-1], row, counts)
            self._in_last += 1
            return
        self.rows.append(row)
        self._counts.append(counts)
        self._in_last = 1
        if len(self.rows) > self._most:
            self._halve()

    def _halve(self) -> None:
        for first, second, counts, more in zip(
            self.rows[::2], self.rows[1::2], self._counts[::2], self._counts[1::2]
        ):
            self._merge(first, counts, second, more)
        full = len(self.rows) % 2 == 0
        self.rows, self._counts = self.rows[::2], self._counts[::2]
        self._in_last += self._steps_each if full else 0
        self._steps_each *= 2
        self.merges += 1

    def _merge(
        self, row: list[float | None], counts: list[int], other: Sequence[float | None], more: Sequence[int]
    ) -> None:
        """Merge `other` into `row`."""
        row[:2] = other[:2]
        for index in range(self._values):
            at, n, m = 2 + 3 * index, counts[index], more[index]
            low, high, mean = other[at : at + 3]
            if low is None or high is None or mean is None:
                continue
            old_low, old_high, old_mean = row[at : at + 3]
            if old_low is not None and old_high is not None and old_mean is not None:
                low, high = min(low, old_low), max(high, old_high)
                mean = (mean * m + old_mean * n) / (m + n)
            row[at : at + 3] = [low, high, _short(mean)]
            counts[index] = n + m


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.5g}")
