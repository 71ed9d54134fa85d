"""The record of collectives: what a rank says it is doing, and the words for one that never ends."""

from __future__ import annotations

from dataclasses import replace

from potluck.dist.record import Header, Record, timeout_error
from potluck.errors import CollectiveTimeoutError

SUM = Header(seq=17, op="all_reduce", dtype="float32", shape=(1024, 8), nbytes=32_768, reduction="SUM")


def test_a_timeout_names_who_never_came_and_to_what() -> None:
    error = timeout_error(SUM, missing=[5, 2], waited_s=30.0, last_seen={2: "in barrier #3"})
    assert isinstance(error, CollectiveTimeoutError)
    text = str(error)
    for part in ("all_reduce #17", "SUM float32 [1024, 8]", "32.8 kB", "30.0 s", "ranks 2, 5 never came"):
        assert part in text
    assert "rank 2: in barrier #3" in text
    assert "ranks 2, 5" in error.hint


def test_a_timeout_with_nobody_missing_says_so() -> None:
    assert "every rank came" in str(timeout_error(SUM, missing=[], waited_s=1.0))


def test_a_record_says_what_its_rank_does_or_did_last() -> None:
    record = Record("default", 1)
    assert record.where() == "before its first collective"
    first, second = record.add(SUM), record.add(replace(SUM, seq=18))
    first.start()
    assert record.where() == "in all_reduce #17"
    first.end()
    assert record.where() == "in all_reduce #18"
    second.start()
    second.end(failed=True)
    assert record.where() == "after all_reduce #17"
