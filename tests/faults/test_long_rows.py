"""The rows of the campaign that take long, in small: short forms of R8, R9 and R11."""

from __future__ import annotations

import sys

import pytest

from support.campaign import campaign

pytestmark = [
    pytest.mark.skipif(sys.platform == "win32", reason="the campaign forks"),
    pytest.mark.timeout(60),
]


def test_hashes_are_equal_while_guests_come_and_go() -> None:
    assert campaign("r8_hashes.py", "--times", "30")["times"] >= 30


def test_churn_wedges_nobody() -> None:
    figures = campaign("r9_churn.py", "--minutes", "0.07", "--pause", "0.3")
    assert figures["times"] >= 3
    assert figures["steps"] > 0


def test_a_soak_gains_no_descriptor() -> None:
    """Memory is not judged in so short a time: the first minutes fill caches."""
    figures = campaign("r11_soak.py", "--minutes", "0.05", "--look", "0.2", "--growth", "1.0")
    assert figures["compared"] > 0
    assert figures["host_grew"] < 1.0
