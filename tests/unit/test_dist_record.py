"""The record of collectives: what a rank says it is doing, and the words for one that never ends."""

from __future__ import annotations

import time

from potluck.dist.record import Call, Header, Record
from potluck.errors import CollectiveTimeoutError

SUM = Header(op="all_reduce", dtype="float32", shape=(1024, 8), nbytes=32_768, reduction="SUM")


def test_a_timeout_names_who_never_came_and_to_what() -> None:
    now = time.monotonic()
    error = Call(SUM, 17, now - 30.0, now).timeout_error({5: "does not answer", 2: "in barrier #3"})
    assert isinstance(error, CollectiveTimeoutError)
    text = str(error)
    for part in ("all_reduce #17", "SUM float32 [1024, 8]", "32.8 kB", "30.0 s", "ranks 2, 5 never came"):
        assert part in text
    assert "rank 2: in barrier #3" in text
    assert "ranks 2, 5" in error.hint


def test_a_timeout_with_nobody_missing_says_so() -> None:
    assert "every rank came" in str(Call(SUM, 17, 0.0, 1.0).timeout_error({}))


def test_a_record_says_what_its_rank_does_or_did_last() -> None:
    record = Record("default", 1)
    assert record.where() == "before its first collective"
    for seq in (17, 18):
        record.add(seq, SUM)
    record.start(17)
    assert record.where() == "in all_reduce #17"
    record.end(17, 0.1)
    assert record.where() == "in all_reduce #18"
    record.end(18, 0.1, failed=True)
    assert record.where() == "after all_reduce #17"
