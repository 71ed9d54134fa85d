"""Quantities as text."""

from __future__ import annotations

import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from potluck import units


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1 kB"),
        (1234567, "1.2 MB"),
        (99_949, "99.9 kB"),
        (999_499, "999 kB"),
        (999_960, "1.0 MB"),
        (60_000_000, "60 MB"),
        (123_456_789, "123 MB"),
        (2.5e15, "2.5 PB"),
        (-1500, "-1.5 kB"),
    ],
)
def test_bytes(count: float, text: str) -> None:
    assert units.bytes_text(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (25e-6, "25 µs"),
        (0.0016, "1.6 ms"),
        (0.34, "340 ms"),
        (0.9996, "1.00 s"),
        (2.5, "2.50 s"),
        (9.996, "10.0 s"),
        (34.21, "34.2 s"),
        (59.96, "1 min 00 s"),
        (123, "2 min 03 s"),
        (3599.7, "1 h 00 min"),
        (11_100, "3 h 05 min"),
        (86_399, "1 d 00 h"),
        (90_000, "1 d 01 h"),
        (-2.5, "-2.50 s"),
    ],
)
def test_seconds(seconds: float, text: str) -> None:
    assert units.seconds_text(seconds) == text


@pytest.mark.parametrize(
    ("per_s", "of", "text"),
    [
        (0.614, "", "0.61 /s"),
        (26.04, "", "26.0 /s"),
        (310.4, "", "310 /s"),
        (12_345, "", "12.3 k/s"),
        (26.04, "samples", "26.0 samples/s"),
        (106_214, "tokens", "106 k tokens/s"),
        (99.96, "", "100 /s"),
    ],
)
def test_rates(per_s: float, of: str, text: str) -> None:
    assert units.rate_text(per_s, of) == text


def test_counts_percents_factors_and_bits() -> None:
    assert units.count_text(10_900_000) == "10.9 M"
    assert units.count_text(512) == "512"
    assert units.percent_text(0.253) == "25 %"
    assert units.factor_text(1.163) == "1.16×"
    assert units.bits_text(7_500_000) == "60 Mbit/s"


@pytest.mark.parametrize("value", [None, math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    "function",
    [
        units.bytes_text,
        units.seconds_text,
        units.rate_text,
        units.count_text,
        units.percent_text,
        units.factor_text,
        units.bits_text,
    ],
)
def test_what_is_not_known_is_a_dash(function: object, value: float | None) -> None:
    assert callable(function)
    assert function(value) == units.UNKNOWN


@given(st.floats(min_value=0, max_value=1e17))
def test_scaled_texts_stay_true_and_never_reach_the_next_unit(value: float) -> None:
    number, _, unit = units.bytes_text(value).partition(" ")
    scale = 1000.0 ** ("B", "kB", "MB", "GB", "TB", "PB").index(unit)
    assert float(number) * scale == pytest.approx(value, rel=0.05, abs=0.5)
    if unit != "PB":
        assert float(number) < 1000


@given(st.floats(min_value=0, max_value=1e8))
def test_seconds_texts_stay_true_and_never_carry(seconds: float) -> None:
    text = units.seconds_text(seconds)
    size = {"µs": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
    parts = re.findall(r"([\d.]+) (\S+)", text)
    total = sum(float(number) * size[unit] for number, unit in parts)
    assert total == pytest.approx(seconds, rel=0.05, abs=1e-6)
    for number, unit in parts:
        assert float(number) < {"µs": 1000, "ms": 1000, "s": 60, "min": 60, "h": 24, "d": math.inf}[unit]
