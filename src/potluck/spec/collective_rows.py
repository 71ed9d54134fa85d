"""The result rows of a benchmark of collectives, with their bandwidths. PURE."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from msgspec import Struct
from msgspec.structs import force_setattr

from potluck.bounds import Finite, Natural, Positive, Text
from potluck.errors import PotluckError

BUS: Mapping[str, str] = {
    "all_reduce": "2(N-1)/N",
    "reduce_scatter": "(N-1)/N",
    "all_gather": "(N-1)/N",
    "broadcast": "1",
    "reduce": "1",
}
"""The least share of the tensor's bytes that each rank must send in each collective, as nccl-tests counts it."""


class CollectiveRow(Struct, frozen=True, kw_only=True):
    """One size on one backend."""

    backend: Text
    op: Text
    size_bytes: Natural
    count: Natural
    dtype: Text
    redop: Text
    """The reduction, such as sum; empty for collectives without one."""
    world: Positive
    time_s: Finite
    """Median over the repetitions of the slowest rank's time."""
    wrong: Natural
    """Number of wrong elements, over all ranks."""
    link_bytes_per_s: Finite | None = None
    """Rate of the slowest link between two ranks, if known."""

    algbw: Finite = 0.0
    """Bytes of the tensor per second. This and the next two follow from the fields above."""
    busbw: Finite = 0.0
    """The least bytes per second that each rank must have sent; compare it with the rate of a link."""
    bound_s: Finite | None = None
    """Time of a perfect ring over this link."""

    def __post_init__(self) -> None:
        factor = bus_factor(self.op, self.world)
        algbw = self.size_bytes / self.time_s if self.time_s > 0 else 0.0
        force_setattr(self, "algbw", algbw)
        force_setattr(self, "busbw", algbw * factor)
        bound_s = self.size_bytes * factor / self.link_bytes_per_s if self.link_bytes_per_s else None
        force_setattr(self, "bound_s", bound_s)


def check_results(rows: Iterable[CollectiveRow]) -> None:
    """Raises PotluckError if a result was wrong."""
    if wrong := sum(row.wrong for row in rows):
        raise PotluckError(f"{wrong} elements of the results are wrong", hint="please report it, with the table")


def bus_factor(op: str, world: int) -> float:
    """Bytes on the busiest link over bytes of the tensor."""
    share = (world - 1) / world
    return {"2(N-1)/N": 2 * share, "(N-1)/N": share, "1": 1.0}[BUS[op]]
