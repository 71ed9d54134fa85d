"""The record of collectives: what is kept, and the words for ranks that disagree or never come."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from potluck.dist.record import Header, Record, compare, timeout_error
from potluck.errors import CollectiveError, CollectiveTimeoutError, WireError

SUM = Header(seq=17, op="all_reduce", dtype="float32", shape=(1024, 8), nbytes=32_768, reduction="SUM")


class Clock:
    now = 50.0

    def __call__(self) -> float:
        return self.now


# -- comparison


def test_ranks_in_the_same_collective_agree() -> None:
    assert compare({rank: replace(SUM) for rank in range(5)}) is None
    assert compare({0: SUM}) is None


def test_a_shape_that_need_not_match_is_not_compared() -> None:
    sent = Header(seq=3, op="all_to_all", dtype="int64", nbytes=10)
    assert compare({0: sent, 1: replace(sent, nbytes=9000)}) is None


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"op": "broadcast", "reduction": "", "root": 0}, "collective"),
        ({"dtype": "bfloat16"}, "dtype"),
        ({"shape": (8, 1024)}, "shape"),
        ({"shape": None}, "shape"),
        ({"reduction": "MAX"}, "reduction"),
        ({"root": 2}, "root"),
        ({"seq": 16}, "sequence number"),
    ],
)
def test_a_mismatch_shows_both_sides_and_what_differs(change: dict[str, object], word: str) -> None:
    odd = replace(SUM, **change)  # type: ignore[arg-type]
    error = compare({0: SUM, 1: SUM, 2: odd, 3: SUM})
    assert isinstance(error, CollectiveError)
    first, *sides = str(error).splitlines()
    assert word in first
    assert sides[0].startswith("  ranks 0-1, 3: ")
    assert SUM.text() in sides[0]
    assert sides[1].startswith("  rank 2: ")
    assert odd.text() in sides[1]
    assert error.hint


def test_the_text_is_the_same_on_every_rank_and_bounded() -> None:
    many = {rank: replace(SUM, shape=(rank,)) for rank in range(100)}
    error, again = compare(many), compare(dict(reversed(list(many.items()))))
    assert error is not None
    assert again is not None
    assert str(error) == str(again)
    assert len(str(error).splitlines()) <= 18
    assert "and 84 more" in str(error)


def test_sequence_numbers_are_shown_where_they_differ() -> None:
    error = compare({0: SUM, 1: replace(SUM, seq=18)})
    assert error is not None
    assert "#17 all_reduce" in str(error)
    assert "#18 all_reduce" in str(error)


# -- on the wire


shapes = st.none() | st.lists(st.integers(0, 10**12), max_size=6).map(tuple)
words = st.text(st.characters(codec="ascii", exclude_categories=["Cc"]), max_size=20)


@given(
    st.builds(
        Header,
        seq=st.integers(0, 2**60),
        op=words,
        dtype=words,
        shape=shapes,
        nbytes=st.integers(0, 2**50),
        reduction=words,
        root=st.none() | st.integers(0, 1000),
    )
)
def test_a_header_comes_out_as_it_went_in(header: Header) -> None:
    assert Header.unpack(header.pack()) == header


@given(st.binary(max_size=100))
def test_bytes_that_are_no_header_are_refused(raw: bytes) -> None:
    with pytest.raises(WireError):
        Header.unpack(raw)


@pytest.mark.parametrize(
    "raw",
    [
        SUM.pack().replace(b"17", b"-1"),
        SUM.pack().replace(b"17", b"1.5"),
        SUM.pack().replace(b"17", b"true"),
        SUM.pack().replace(b"[1024,8]", b"[[1]]"),
        SUM.pack().replace(b"[1024,8]", b"7"),
        SUM.pack().replace(b'"all_reduce"', b"[]"),
        SUM.pack().replace(b'"seq"', b'"sequel"'),
        SUM.pack().replace(b"float32", b"f" * 5000),
        b"[" * 4000,
        b"null",
    ],
)
def test_headers_that_lie_are_refused(raw: bytes) -> None:
    with pytest.raises(WireError):
        Header.unpack(raw)


# -- timeouts


def test_a_timeout_names_who_never_came_and_to_what() -> None:
    error = timeout_error(SUM, missing=[5, 2], waited_s=30.0, group="tensor", last_seen={2: "in barrier #3"})
    assert isinstance(error, CollectiveTimeoutError)
    text = str(error)
    for part in (
        "all_reduce #17",
        "group tensor",
        "SUM float32 [1024, 8]",
        "32.8 kB",
        "30.0 s",
        "ranks 2, 5 never came",
    ):
        assert part in text
    assert "rank 2: in barrier #3" in text
    assert "ranks 2, 5" in error.hint


def test_a_timeout_with_nobody_missing_says_so() -> None:
    assert "every rank came" in str(timeout_error(SUM, missing=[], waited_s=1.0))


# -- the record


def test_an_entry_goes_through_its_states() -> None:
    clock = Clock()
    record = Record("default", 1, clock=clock)
    assert record.where() == "before its first collective"
    clock.now += 1
    entry = record.add(SUM)
    clock.now += 1
    entry.start()
    assert record.unfinished() == [SUM]
    assert record.where() == "in all_reduce #17"
    clock.now += 2
    entry.finish()
    entry.fail("too late to fail")
    assert record.entries() == [
        {
            "seq": 17,
            "op": "all_reduce",
            "dtype": "float32",
            "shape": (1024, 8),
            "nbytes": 32_768,
            "reduction": "SUM",
            "root": None,
            "state": "done",
            "queued_s": 1.0,
            "started_s": 2.0,
            "ended_s": 4.0,
        }
    ]
    assert record.unfinished() == []
    assert record.last_done() == SUM
    assert record.where() == "after all_reduce #17"


def test_failures_and_aborts_are_kept_with_their_reason() -> None:
    record = Record("default", 0)
    record.add(SUM).fail(OSError("cable"))
    record.add(SUM).fail(TimeoutError())
    record.add(SUM).abort()
    rows = record.entries()
    assert [(row["state"], row.get("error")) for row in rows] == [
        ("failed", "cable"),
        ("failed", "TimeoutError"),
        ("aborted", None),
    ]
    assert record.last_done() is None


def test_the_record_is_bounded_and_dumps_json_lines(tmp_path: Path) -> None:
    record = Record("dp", 3, keep=10)
    for seq in range(25):
        record.add(replace(SUM, seq=seq)).finish()
    record.dump(tmp_path / "record.jsonl")
    head, *rows = [json.loads(line) for line in (tmp_path / "record.jsonl").read_text().splitlines()]
    assert (head["group"], head["rank"], head["forgotten"]) == ("dp", 3, 15)
    assert [row["seq"] for row in rows] == list(range(15, 25))
