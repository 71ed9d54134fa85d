"""Two ranks: large tensors by a stream, encrypted or not; results and ends are those of messages."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest

from potluck.dist.streams import CONNECT_S, Stream
from support.ranks import Ranks

CASES = "support.dist_streams:"
encrypted_or_not = pytest.mark.parametrize("encryption", [True, False], ids=["encrypted", "clear"])


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    pool = Ranks(2)
    yield pool
    pool.close()


@encrypted_or_not
def test_sums_are_exact_and_go_by_the_connection(ranks: Ranks, encryption: bool) -> None:
    assert ranks.call(f"{CASES}sums", 2, {"encryption": encryption}) == [True, True]


def test_a_connection_whose_keys_wear_out_is_renewed(ranks: Ranks) -> None:
    assert ranks.call(f"{CASES}renewed", 2) == [2, 2]


def test_with_checksums_everything_goes_by_messages(ranks: Ranks) -> None:
    assert ranks.call(f"{CASES}sums", 2, {"checksum": True, "encryption": False}) == [False, False]


def test_where_no_connection_can_be_made_everything_goes_by_messages(ranks: Ranks) -> None:
    """And it is tried once, by the one who would connect, not by every group anew."""
    assert ranks.call(f"{CASES}behind_a_firewall", 2) == [(False, 0), (False, 1)]


def test_an_attempt_to_connect_leaves_time_for_messages(ranks: Ranks) -> None:
    assert ranks.call(f"{CASES}behind_a_silent_firewall", 2, CONNECT_S - 0.5) == [False, False]


@encrypted_or_not
def test_packed_sums_have_the_same_bits_on_both(ranks: Ranks, encryption: bool) -> None:
    one, two = ranks.call(f"{CASES}packed", 2, encryption)
    assert one == two


@encrypted_or_not
def test_a_rank_that_dies_in_the_midst_is_named_in_seconds(ranks: Ranks, encryption: bool) -> None:
    with Ranks(2) as mortals:
        (error, text, seconds), _ = mortals.call(f"{CASES}killed", 2, encryption, may_die=[1])
    assert error == "RankGoneError"
    assert "rank 1" in text
    assert seconds < 10


def test_a_rank_that_stops_in_the_midst_is_named_when_time_is_up(ranks: Ranks) -> None:
    (error, text, seconds), _ = ranks.call(f"{CASES}stuck", 2, 1.5)
    assert error == "CollectiveTimeoutError"
    assert "all_reduce" in text
    assert seconds < 10


def test_ranks_that_disagree_are_shown_both_sides(ranks: Ranks) -> None:
    for error, text, _ in ranks.call(f"{CASES}mismatch", 2):
        assert error == "CollectiveError"
        assert "1048653" in text
        assert "1048654" in text


@encrypted_or_not
def test_strangers_at_the_listener_do_not_part_the_ranks(ranks: Ranks, encryption: bool) -> None:
    assert ranks.call(f"{CASES}among_strangers", 2, 40, encryption) == [True, True]


def test_who_sends_a_little_all_the_time_is_not_waited_for_without_end() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        two = socket.create_connection(listener.getsockname())
        stream = Stream(listener.accept()[0])
    stop, began = threading.Event(), time.monotonic()

    def trickle() -> None:
        while not stop.wait(0.03):
            two.send(b"x")

    def late() -> None:
        if time.monotonic() > began + 0.5:
            raise TimeoutError

    sender = threading.Thread(target=trickle)
    sender.start()
    try:
        with pytest.raises(TimeoutError):
            stream.pull(memoryview(bytearray(1 << 20)), late)
        assert time.monotonic() - began < 3
    finally:
        stop.set()
        sender.join()
        two.close()
        stream.close()


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_forked_childs_end_is_not_its_parents(ranks: Ranks, transport: str) -> None:
    assert ranks.call(f"{CASES}forked", 2, transport) == [True, True]
