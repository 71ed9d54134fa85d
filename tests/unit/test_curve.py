"""The loss curve, as text and as a picture."""

from __future__ import annotations

import builtins
import math
import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from potluck.report.curve import loss_curve_png, loss_curve_text, sparkline
from potluck.report.ticks import nice_ticks, tick_texts

STEPS = list(range(1, 201))
FALLING = [1.0 + 4.0 * math.exp(-step / 40) for step in STEPS]


def test_the_chart_has_the_size_that_was_asked_for() -> None:
    for width, height in ((78, 14), (40, 8), (120, 30)):
        lines = loss_curve_text(STEPS, FALLING, width, height).splitlines()
        assert len(lines) == height
        assert max(len(line) for line in lines) == width


def test_the_axes_say_where_it_is() -> None:
    *plot, axis, labels = loss_curve_text(STEPS, FALLING, 78, 14).splitlines()
    assert axis.strip().startswith("└──")
    assert labels.split() == ["1", "100", "step", "200"]
    ticks = [float(line.split("┤")[0]) for line in plot if "┤" in line]
    assert ticks == [4.0, 3.0, 2.0]


def test_a_falling_loss_falls_and_stands_at_its_ticks() -> None:
    lines = loss_curve_text(STEPS, FALLING, 60, 24, ascii_only=True).splitlines()[:-2]
    left = lines[0].index("|") + 1
    rows = {line_number: line.rstrip().rfind("*") for line_number, line in enumerate(lines) if "*" in line}
    assert list(rows.values()) == sorted(rows.values())
    row_of_3 = next(n for n, line in enumerate(lines) if line.startswith("3"))
    # exp(-step / 40) is one half at step 28.
    expected = left + (28 - 1) / (200 - 1) * (60 - left)
    assert rows[row_of_3] == pytest.approx(expected, abs=3)


def test_ascii_only_is_ascii() -> None:
    assert loss_curve_text(STEPS, FALLING, 60, 12, ascii_only=True).isascii()


@pytest.mark.parametrize(
    ("steps", "losses"), [([], []), ([1], [2.0]), ([1, 2], [math.nan, math.inf]), ([3, 3], [1, 2])]
)
def test_nothing_to_draw_is_an_empty_text(steps: list[int], losses: list[float]) -> None:
    assert loss_curve_text(steps, losses, 60, 12) == ""


def test_losses_that_are_not_numbers_leave_the_rest_readable() -> None:
    holes = [math.nan if step % 7 == 0 else loss for step, loss in zip(STEPS, FALLING)]
    chart = loss_curve_text(STEPS, holes, 60, 12)
    assert "nan" not in chart
    assert chart.count("\n") == 11


@given(
    st.lists(st.floats(allow_nan=True, allow_infinity=True, width=32), min_size=0, max_size=80),
    st.integers(1, 130),
    st.integers(1, 40),
    st.booleans(),
)
def test_any_losses_on_any_terminal(losses: list[float], width: int, height: int, ascii_only: bool) -> None:
    chart = loss_curve_text(list(range(len(losses))), losses, width, height, ascii_only=ascii_only)
    if chart:
        assert len(chart.splitlines()) == max(height, 5)
    line = sparkline(losses, width)
    assert len(line) <= width


def test_the_sparkline_goes_from_high_to_low() -> None:
    assert sparkline([8.0, 7.0, 1.0], 3) == "█▇▁"
    assert sparkline(FALLING, 10)[0] == "█"
    assert sparkline(FALLING, 10)[-1] == "▁"
    assert len(sparkline(FALLING, 10)) == 10
    assert sparkline([1.0, math.nan, 2.0], 3) == "▁ █"
    assert sparkline([2.0, 2.0], 8) == "▁▁"


@given(st.floats(-1e6, 1e6), st.floats(1e-6, 1e6), st.integers(1, 12))
def test_ticks_are_inside_in_order_and_told_apart(low: float, span: float, about: int) -> None:
    high = low + span
    if not high > low:
        return
    ticks = nice_ticks(low, high, about)
    assert ticks == sorted(set(ticks))
    assert 1 <= len(ticks) <= about + 1
    slack = span * 1e-6 + 16 * math.ulp(abs(low) + span)
    assert all(low - slack <= tick <= high + slack for tick in ticks)
    assert len(tick_texts(ticks)) == len(ticks)


def test_tick_texts_do_not_lie() -> None:
    assert tick_texts([0.25, 0.5, 0.75]) == ["0.25", "0.50", "0.75"]
    assert tick_texts([1.0, 2.0]) == ["1", "2"]
    assert tick_texts([5e8]) == ["5e+08"]


def test_the_png_is_a_png(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "curve.png"
    assert loss_curve_png(path, STEPS, FALLING, title="a run") is True
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", data[16:24]) == (1200, 675)


def test_without_matplotlib_there_is_no_png(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real_import = builtins.__import__

    def no_matplotlib(name: str, *args: object, **kwargs: object) -> object:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real_import(name, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(builtins, "__import__", no_matplotlib)
    path = tmp_path / "curve.png"
    assert loss_curve_png(path, STEPS, FALLING) is False
    assert not path.exists()
