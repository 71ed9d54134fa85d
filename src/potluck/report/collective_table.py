"""The rows of a benchmark of collectives as text, in the columns of nccl-tests. PURE."""

from __future__ import annotations

from collections.abc import Sequence

from potluck.spec.collective_rows import CollectiveRow


def header() -> list[str]:
    """The header of the columns of `line`."""
    columns = "{:<10} {:>9} {:>7} {:>5} |{:>9} {:>7} {:>7} {:>6} |{:>9} {:>6} | {}"
    names = ("#size", "count", "type", "redop", "time", "algbw", "busbw", "#wrong", "bound", "share", "backend")
    units = ("#(B)", "(elem.)", "", "", "(us)", "(GB/s)", "(GB/s)", "", "(us)", "(%)", "")
    return [columns.format(*names), columns.format(*units).rstrip()]


def line(row: CollectiveRow) -> str:
    """A row in the columns of nccl-tests, followed by the time of a perfect ring."""
    bound = (
        f"{row.bound_s * 1e6:9.1f} {100 * row.bound_s / row.time_s:6.0f}" if row.bound_s else f"{'-':>9} {'-':>6}"
    )
    numbers = f"{row.time_s * 1e6:9.1f} {row.algbw / 1e9:7.2f} {row.busbw / 1e9:7.2f} {row.wrong:6d}"
    what = f"{row.size_bytes:10d} {row.count:9d} {row.dtype:>7} {row.redop or 'none':>5}"
    return f"{what} |{numbers} |{bound} | {row.backend}"


def table(rows: Sequence[CollectiveRow], width: int = 120) -> list[str]:
    """The whole table; if there is not enough room, without the columns that are the same in every row."""
    if width >= len(header()[0]) or not rows:
        return [*header(), *(line(row) for row in rows)]
    columns = "{:<10} {:>9} {:>7} {:>7} {:>6} {:>8} {:>5}"
    names = ("#size", "time", "algbw", "busbw", "#wrong", "bound", "share")
    units = ("#(B)", "(us)", "(GB/s)", "(GB/s)", "", "(us)", "(%)")
    found = [columns.format(*names), columns.format(*units)]
    for row in rows:
        bound = (_us(row.bound_s), f"{100 * row.bound_s / row.time_s:.0f}") if row.bound_s else ("-", "-")
        rates = (
            *(f"{b / 1e9:.2f}" if b >= 1e8 else f"{b / 1e9:.4f}" for b in (row.algbw, row.busbw)),
            str(row.wrong),
        )
        found.append(columns.format(f"{row.size_bytes:10d}", _us(row.time_s), *rates, *bound))
    return found


def _us(seconds: float) -> str:
    return f"{seconds * 1e6:.1f}" if seconds < 0.1 else f"{seconds * 1e6:.0f}"


def comparison(rows: Sequence[CollectiveRow], backend: str, against: str) -> list[str]:
    """How much faster one backend was than another, size by size."""
    times = {(row.backend, row.size_bytes): row.time_s for row in rows}
    found = []
    for size in sorted({row.size_bytes for row in rows}):
        mine, theirs = times.get((backend, size)), times.get((against, size))
        if mine and theirs:
            found.append(f"# {size:>10} B: {backend} is {theirs / mine:.2f} times as fast as {against}")
    return found
