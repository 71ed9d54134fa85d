"""Ranks with settings: what each logs at which level, and that groups of one process agree on encryption."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields

import pytest

from potluck.dist.config import Config
from support.ranks import Ranks

CASES = "support.dist_logs:"


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    pool = Ranks(2)
    yield pool
    pool.close()


def test_every_rank_logs_all_its_settings_with_who_said_so(ranks: Ranks) -> None:
    environ = {"POTLUCK_DIST_CHECKSUM": "1"}
    for rank, said in enumerate(ranks.call(f"{CASES}logged", 2, {"log_level": "info"}, env=environ)):
        (settings,) = [text for level, text in said if level == "INFO" and text.startswith("settings of rank")]
        title, *lines = settings.splitlines()
        assert title == f"settings of rank {rank}:"
        assert {line.split()[0] for line in lines} == {item.name for item in fields(Config)}
        who = {line.split()[0]: line.rpartition("  ")[2] for line in lines}
        assert who["log_level"] == who["transport"] == "(Config)"
        assert who["checksum"] == "(POTLUCK_DIST_CHECKSUM)"
        assert who["compression"] == who["encryption"] == "(default)"


def test_trace_shows_every_collective_and_off_nothing(ranks: Ranks) -> None:
    for rank, said in enumerate(ranks.call(f"{CASES}logged", 2, {"log_level": "trace"})):
        traced = [text for level, text in said if level == "TRACE"]
        assert any(f"rank {rank}" in text and "all_reduce SUM float32 [3]" in text for text in traced), said
        assert any(text.endswith(" s") and " done " in text for text in traced)
    assert ranks.call(f"{CASES}logged", 2, {"log_level": "OFF"}) == [[], []]


def test_a_group_that_asks_for_encryption_does_not_go_in_the_clear(ranks: Ranks) -> None:
    """Groups of one process share their connections, which are the first group's."""
    tcp = {"POTLUCK_DIST_TRANSPORT": "tcp"}
    for (error, text, _), _ in ranks.call(f"{CASES}second_group", 2, False, True, env=tcp):
        assert error == "ConfigError"
        assert "asks for encryption" in text
    for first, second, said in ((False, None, "TCP without encryption"), (True, False, "encrypted TCP")):
        for (error, _, _), shown in ranks.call(f"{CASES}second_group", 2, first, second, env=tcp):
            assert error == ""
            assert said in shown, (first, second)
