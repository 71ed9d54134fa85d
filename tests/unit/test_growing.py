"""Figures that grow with a run equal those of the whole list."""

from __future__ import annotations

import math
import random
from statistics import mean, median, stdev

import pytest
from hypothesis import given
from hypothesis import strategies as st

from potluck.report import growing
from potluck.report.growing import Median, Sum
from potluck.train.gain import Gain

NUMBERS = st.lists(st.floats(allow_nan=False, allow_infinity=False, width=32), min_size=1, max_size=60)


@given(NUMBERS)
def test_the_median_is_exact_at_every_moment(numbers: list[float]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(growing, "_CHUNK", 3)  # so that chunks are split
        found = Median()
        for count, number in enumerate(numbers, 1):
            found.add(number)
            assert found.value == median(numbers[:count])


def test_the_median_leaves_out_what_is_not_a_number() -> None:
    found = Median()
    for value in (None, math.nan, math.inf, 2.0):
        found.add(value)
    assert found.value == 2.0
    assert Median().value is None


@given(NUMBERS)
def test_the_sum_is_rounded_once(numbers: list[float]) -> None:
    found = Sum()
    for number in numbers:
        found.add(number)
    assert found.value == math.fsum(numbers)


def test_the_margin_of_a_gain_covers_it_and_shrinks_with_the_run() -> None:
    draws = random.Random(1)
    hits, margins = 0, []
    for _ in range(200):
        gain = Gain()
        for _ in range(400):
            gain.add(draws.gauss(1.2, 0.1), 1.0)
        assert gain.value is not None
        assert gain.margin is not None
        hits += abs(gain.value - 1.2) <= gain.margin
        margins.append(gain.margin)
    assert 0.88 < hits / 200 < 0.99
    assert mean(margins) == pytest.approx(2 * 0.1 / math.sqrt(400), rel=0.15)
    assert stdev(margins) < mean(margins) / 2


def test_few_steps_have_no_margin() -> None:
    gain = Gain()
    for _ in range(31):
        gain.add(1.2, 1.0)
    assert gain.margin is None
    gain.add(1.2, 1.0)
    assert gain.margin == pytest.approx(0.0, abs=1e-12)
