"""Sizes, result rows and bandwidth arithmetic of a benchmark of collectives. PURE."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from msgspec import Struct
from msgspec.structs import force_setattr

from potluck.errors import UserError

BUS: Mapping[str, str] = {
    "all_reduce": "2(N-1)/N",
    "reduce_scatter": "(N-1)/N",
    "all_gather": "(N-1)/N",
    "broadcast": "1",
    "reduce": "1",
}
"""What of the tensor's bytes has to leave each rank, at the least, in each collective; as nccl-tests counts it."""
MAX_BYTES = 4 << 30
_SIZE = re.compile(r"(\d+)\s*([kmg]?)(i?b)?", re.IGNORECASE)
_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}


class CollectiveRow(Struct, frozen=True, kw_only=True):
    """One size on one backend."""

    backend: str
    op: str
    size_bytes: int
    count: int
    dtype: str
    redop: str
    """The reduction, such as sum; empty for collectives without one."""
    world: int
    time_s: float
    """Median over the repetitions of the slowest rank's time."""
    wrong: int
    """Number of wrong elements, over all ranks."""
    link_bytes_per_s: float | None = None
    """Rate of the slowest link between two ranks, if known."""

    algbw: float = 0.0
    """Bytes of the tensor per second. This and the next two follow from the fields above."""
    busbw: float = 0.0
    """The least bytes per second that each rank must have sent; compare it with the rate of a link."""
    bound_s: float | None = None
    """Time of a perfect ring over this link."""

    def __post_init__(self) -> None:
        factor = bus_factor(self.op, self.world)
        algbw = self.size_bytes / self.time_s if self.time_s > 0 else 0.0
        force_setattr(self, "algbw", algbw)
        force_setattr(self, "busbw", algbw * factor)
        bound_s = self.size_bytes * factor / self.link_bytes_per_s if self.link_bytes_per_s else None
        force_setattr(self, "bound_s", bound_s)


def bus_factor(op: str, world: int) -> float:
    """Bytes on the busiest link over bytes of the tensor."""
    share = (world - 1) / world
    return {"2(N-1)/N": 2 * share, "(N-1)/N": share, "1": 1.0}[BUS[op]]


def parse_sizes(text: str) -> list[int]:
    """'4K:256M' (each four times the one before) or '4K,1M,64M', in bytes."""
    first, colon, last = text.partition(":")
    if colon:
        size, stop = _bytes(first, text), _bytes(last, text)
        if stop < size:
            raise UserError(f"--sizes {text}: the second is less than the first", hint="for example 4K:256M")
        found = []
        while size <= stop:
            found.append(size)
            size *= 4
        return found if found[-1] == stop else [*found, stop]
    return [_bytes(part, text) for part in text.split(",")]


def _bytes(text: str, whole: str) -> int:
    match = _SIZE.fullmatch(text.strip())
    size = int(match[1]) * _UNITS[match[2].lower()] if match else 0
    if not 4 <= size <= MAX_BYTES:
        raise UserError(
            f"--sizes {whole}: {text!r} is not a size from 4 bytes to 4G", hint="for example 4K:256M, or 4K,1M,64M"
        )
    return size


def header() -> list[str]:
    """The header of the columns of `line`."""
    columns = "{:<10} {:>9} {:>7} {:>5} |{:>9} {:>7} {:>7} {:>6} |{:>9} {:>6} | {}"
    names = ("#size", "count", "type", "redop", "time", "algbw", "busbw", "#wrong", "bound", "share", "backend")
    units = ("#(B)", "(elem.)", "", "", "(us)", "(GB/s)", "(GB/s)", "", "(us)", "(%)", "")
    return [columns.format(*names), columns.format(*units).rstrip()]


def line(row: CollectiveRow) -> str:
    """A row in the columns of nccl-tests, and beside it how long a perfect ring would take."""
    bound = (
        f"{row.bound_s * 1e6:9.1f} {100 * row.bound_s / row.time_s:6.0f}" if row.bound_s else f"{'-':>9} {'-':>6}"
    )
    numbers = f"{row.time_s * 1e6:9.1f} {row.algbw / 1e9:7.2f} {row.busbw / 1e9:7.2f} {row.wrong:6d}"
    what = f"{row.size_bytes:10d} {row.count:9d} {row.dtype:>7} {row.redop or 'none':>5}"
    return f"{what} |{numbers} |{bound} | {row.backend}"


def table(rows: Sequence[CollectiveRow], width: int = 120) -> list[str]:
    """All of it; where there is no room for everything, without what is the same in every row."""
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
