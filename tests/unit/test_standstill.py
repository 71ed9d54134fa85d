"""A machine that stood still says so, once, and only when it did."""

from __future__ import annotations

from potluck.hub.standstill import STOOD_STILL_S, Standstill


def test_a_thread_that_looks_regularly_never_stood_still() -> None:
    standstill = Standstill(10.0)
    assert [standstill.seconds(10.0 + 0.2 * turn) for turn in range(50)] == [0.0] * 50


def test_a_pause_is_counted_once() -> None:
    standstill = Standstill(10.0)
    assert standstill.seconds(310.0) == 300.0
    assert standstill.seconds(310.1) == 0.0
    assert standstill.ongoing(320.1) == 10.0
    assert standstill.seconds(320.2) == 0.0


def test_who_looks_in_passing_does_not_hide_that_the_other_stands_still() -> None:
    standstill = Standstill(10.0)
    assert standstill.ongoing(10.0 + 0.75 * STOOD_STILL_S) == 0.0
    assert standstill.seconds(10.0 + 1.5 * STOOD_STILL_S) == 1.5 * STOOD_STILL_S
