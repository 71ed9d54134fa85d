"""Collectives as torch's profiler shows them, beside gloo's."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.dist_profiled import LATE_S, Seen
from support.ranks import Ranks

PROFILED = "support.dist_profiled:"
SHAPE = [[30, 1000]]


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    pool = Ranks(3)
    yield pool
    pool.close()


def seconds(seen: Seen) -> dict[str, float]:
    assert len({name for name, _, _ in seen}) == len(seen), seen
    return {name: length for name, length, _ in seen}


@pytest.mark.parametrize("later", [False, True], ids=["at once", "async"])
@pytest.mark.parametrize("way", ["shm", "tcp", "both"])
def test_a_straggler_is_seen_as_the_others_see_it(ranks: Ranks, way: str, later: bool) -> None:
    """The wait of a rank that came in time is as long as the other was late, which itself waits for nobody."""
    found = ranks.call(f"{PROFILED}straggler", 3 if way == "both" else 2, "potluck", later, way)
    for seen in found:
        assert [shapes for name, _, shapes in seen if name == "potluck:all_reduce"] == [SHAPE]
    early, late, *third = [seconds(seen) for seen in found]
    for one in (early, *third):
        assert one["potluck:all_reduce.queue"] < one["potluck:all_reduce.wait"] < one["potluck:all_reduce"]
        assert one["potluck:all_reduce"] > LATE_S * 0.9
    assert early["potluck:all_reduce.wait"] > LATE_S * 0.9
    # It meets the first rank of its machine, who then waits for the other machine.
    assert all(one["potluck:all_reduce.wait"] < LATE_S * 0.9 for one in (late, *third))


def test_gloo_shows_the_same_name_and_sizes(ranks: Ranks) -> None:
    theirs = ranks.call(f"{PROFILED}straggler", 2, "gloo", True, "")
    ours = ranks.call(f"{PROFILED}straggler", 2, "potluck", True, "shm")
    for mine, gloos in zip(ours, theirs, strict=True):
        (name, length, shapes), *_ = mine
        ((gloos_name, gloos_length, gloos_shapes),) = gloos
        assert (name, shapes) == (gloos_name.replace("gloo:", "potluck:"), gloos_shapes)
        assert (length > LATE_S * 0.9) == (gloos_length > LATE_S * 0.9)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_every_collective_and_those_of_ddp(ranks: Ranks, transport: str) -> None:
    for seen in ranks.call(f"{PROFILED}everything", 2, transport):
        buckets = [(shapes, length) for name, length, shapes in seen.pop("ddp") if name == "potluck:all_reduce"]
        assert len(buckets) > 1
        assert sum(shapes[0][0] for shapes, _ in buckets) == 2 * (8 * 8 + 8)
        assert seen.pop("unseen") == []
        for op, events in seen.items():
            parts = [""] if op in ("send", "recv") else ["", ".queue", ".wait"]
            assert sorted(seconds(events)) == [f"potluck:{op}{part}" for part in parts]
            assert all(0 < length < 20 for length in seconds(events).values())


def test_a_profiler_that_stops_early_and_a_collective_that_fails(ranks: Ranks) -> None:
    for seen in ranks.call(f"{PROFILED}outlived", 2):
        assert sorted(seconds(seen)) == [f"potluck:all_reduce{part}" for part in ("", ".queue", ".wait")]


def test_a_profiler_of_all_threads_sees_them_where_they_run(ranks: Ranks) -> None:
    for seen in ranks.call(f"{PROFILED}all_threads", 2):
        one = [("potluck:all_reduce", ""), ("potluck:all_reduce.wait", "potluck:all_reduce")]
        assert sorted(seen) == sorted(one * 3)
