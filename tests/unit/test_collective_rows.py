"""Sizes as people type them, and the arithmetic of bandwidths."""

from __future__ import annotations

import pytest

from potluck.cli.bench import parse_sizes
from potluck.errors import UserError
from potluck.report.collective_table import comparison, header, line
from potluck.spec.collective_rows import CollectiveRow, bus_factor


def row(**changes: object) -> CollectiveRow:
    fields: dict[str, object] = {
        "backend": "potluck",
        "op": "all_reduce",
        "size_bytes": 1 << 20,
        "count": 1 << 18,
        "dtype": "float",
        "redop": "sum",
        "world": 4,
        "time_s": 0.001,
        "wrong": 0,
    }
    return CollectiveRow(**(fields | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("4K:64K", [4096, 16384, 65536]),
        ("4K:100K", [4096, 16384, 65536, 102400]),
        ("64", [64]),
        ("4k, 1MiB,2G", [4096, 1 << 20, 2 << 30]),
        ("1M:1M", [1 << 20]),
    ],
)
def test_sizes(text: str, sizes: list[int]) -> None:
    assert parse_sizes(text) == sizes


@pytest.mark.parametrize("text", ["", "x", "4K:", ":4K", "1M:4K", "3", "8G", "4K,,1M", "-4K", "1e6"])
def test_what_is_no_size_is_said_with_an_example(text: str) -> None:
    with pytest.raises(UserError, match="--sizes") as caught:
        parse_sizes(text)
    assert "4K:256M" in caught.value.hint


def test_bandwidths_are_those_of_nccl_tests() -> None:
    found = row(link_bytes_per_s=1e9)
    assert found.algbw == pytest.approx((1 << 20) / 0.001)
    assert found.busbw == pytest.approx(found.algbw * 1.5)
    assert found.bound_s == pytest.approx((1 << 20) * 1.5 / 1e9)
    assert bus_factor("all_gather", 4) == 0.75
    assert bus_factor("broadcast", 4) == 1
    assert row().bound_s is None


def test_a_line_fits_under_its_header() -> None:
    bars = [at for at, c in enumerate(line(row(link_bytes_per_s=1e9))) if c == "|"]
    for above in (header()[0], header()[1], line(row())):
        assert [at for at, c in enumerate(above) if c == "|"] == bars
    cells = line(row(wrong=3, redop="")).split()
    assert cells[:4] == ["1048576", "262144", "float", "none"]
    assert cells[5:9] == ["1000.0", "1.05", "1.57", "3"]


def test_the_comparison_is_of_what_both_have() -> None:
    rows = [row(), row(backend="gloo", time_s=0.003), row(size_bytes=4096)]
    assert comparison(rows, "potluck", "gloo") == ["#    1048576 B: potluck is 3.00 times as fast as gloo"]
