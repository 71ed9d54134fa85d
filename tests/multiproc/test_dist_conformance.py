"""Every collective, operation, dtype, memory layout and number of ranks against values computed in one process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.ranks import Ranks

MOST = 5
SMALL_PIECES = {"chunk_bytes": 4096, "small_bytes": 256}
"""So that tensors of a few kilobytes go the ways of large ones."""


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    pool = Ranks(MOST)
    yield pool
    pool.close()


@pytest.mark.parametrize("which", ["reductions", "movements"])
@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("world", [1, 2, 3, 4, 5])
def test_every_collective(ranks: Ranks, world: int, transport: str, which: str) -> None:
    """Every case with every number of ranks through shared memory, and with two of them (or one rank) by TCP."""
    share = (world % 2, 2) if transport == "tcp" and world > 1 else (0, 1)
    options = {"transport": transport, "share": share, **SMALL_PIECES}
    failed = ranks.call("support.dist_cases:run_all", world, which, (), options, deadline_s=55)
    assert failed == [[]] * world


@pytest.mark.parametrize("which", ["reductions", "movements"])
@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_through_a_device_that_is_not_the_cpu(ranks: Ranks, transport: str, which: str) -> None:
    options = {"transport": transport, "share": (int(transport == "tcp"), 2), **SMALL_PIECES}
    with Ranks(2) as changed:
        failed = changed.call("support.dist_cases:run_all", 2, which, ("fake", "cpu"), options, deadline_s=55)
    assert failed == [[]] * 2


@pytest.mark.parametrize("which", ["reductions", "movements"])
@pytest.mark.parametrize(("world", "machines"), [(3, 2), (4, 2), (5, 3)])
def test_ranks_on_several_machines_that_share_memory_at_home(
    ranks: Ranks, world: int, machines: int, which: str
) -> None:
    options = {"machines": machines, "share": (world % 3, 3), **SMALL_PIECES}
    failed = ranks.call("support.dist_cases:run_all", world, which, (), options, deadline_s=55)
    assert failed == [[]] * world


@pytest.mark.parametrize("world", [3, 5])
def test_every_kind_of_reduction_round_the_ring(ranks: Ranks, world: int) -> None:
    options = {"transport": "tcp", "algorithm": "ring", "share": (world % 4, 4), **SMALL_PIECES, "small_bytes": 0}
    failed = ranks.call("support.dist_cases:run_all", world, "reductions", (), options, deadline_s=55)
    assert failed == [[]] * world


@pytest.mark.parametrize(
    ("algorithm", "world"), [("ring", 1), ("ring", 2), ("ring", 5), ("owners", 3), ("direct", 3)]
)
def test_all_ranks_get_the_same_bits_whichever_way_it_goes(ranks: Ranks, algorithm: str, world: int) -> None:
    by_rank = ranks.call("support.dist_algorithms:sums", world, algorithm)
    assert all(found == by_rank[0] for found in by_rank)
    assert all(off < 1e-2 for _, off in by_rank[0])


def test_a_compressed_all_reduce_loses_little_and_makes_up_for_it(ranks: Ranks) -> None:
    for once, over_many in ranks.call("support.dist_cases:compressed", 2):
        assert 0 < once < 0.02
        assert over_many < once / 4


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_the_time_of_a_collective_is_told_by_what_it_was_spent_on(ranks: Ranks, transport: str) -> None:
    for figures in ranks.call("support.dist_cases:measured", 2, transport):
        parts = [figures[f"{phase}_s"] for phase in ("queue", "staging", "network", "reduction")]
        assert min(parts) > 0
        assert figures["ops"] == 10
        # All of it, but for the moments between one clock and the next.
        whole = figures["avg_s"] * 10
        assert 0.5 * whole < sum(parts) <= whole * 1.01
        # By owners: half of the tensor to the other rank, and the sum of the own half.
        assert figures["sent_bytes"] == (0 if transport == "shm" else figures["bytes"])
