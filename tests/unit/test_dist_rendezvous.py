"""What ranks write to the store: nobody can turn encryption off, and versions of torch are compared."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest
import zmq
from msgspec.structs import replace
from torch.distributed import HashStore

from potluck.dist.connections import Connections, Endpoint
from potluck.dist.rendezvous import Membership, RankInfo, meet
from potluck.errors import CollectiveError, WireError
from support.dist_settings import loopback

SHARED = {"encryption": True}


def info(rank: int, *, key: str | None = None, **changed: Any) -> RankInfo:
    own = zmq.curve_keypair()[0].decode() if key is None else key
    endpoint = Endpoint(name=f"{rank:016x}", address="127.0.0.1", port=4000 + rank, key=own, host="here")
    return replace(RankInfo.own(endpoint, SHARED), **changed)


def met(rank: int, *others: RankInfo | str) -> Membership:
    """What `rank` finds in a store where the others are."""
    store: Any = HashStore()
    store.set("potluck/group", "7")
    for other, theirs in enumerate(others):
        if other != rank:
            store.set(f"potluck/rank/{other}", theirs if isinstance(theirs, str) else theirs.to_json())
    mine = others[rank]
    assert isinstance(mine, RankInfo)
    return meet(store, rank, len(others), mine, 5.0)


@pytest.mark.parametrize("key", ["", " ", "short", "x" * 41, "\u00fc" * 40, "\0" * 40])
def test_a_rank_without_a_key_is_refused_by_its_number_where_encryption_is_on(key: str) -> None:
    with pytest.raises(CollectiveError, match="rank 2 sent no key, and encryption is on") as caught:
        met(1, info(0), info(1), info(2, key=key))
    assert "POTLUCK_DIST_ENCRYPTION=0" in caught.value.hint


def test_ranks_that_all_are_in_the_clear_meet() -> None:
    ranks = [info(rank, key="", shared={"encryption": False}) for rank in range(2)]
    assert met(1, *ranks).ranks == ranks


def test_a_process_that_encrypts_has_no_connection_in_the_clear() -> None:
    """Even if a rank without a key came through."""
    connections = Connections(loopback(), "here")
    try:
        with pytest.raises(WireError, match="has no key"):
            connections.admit([info(1, key="").endpoint])
        with pytest.raises(WireError, match="has no key"):
            connections.to(info(1, key="").endpoint)
    finally:
        connections.close()


@pytest.mark.parametrize(
    "change",
    [
        {"endpoint": {}},
        {"endpoint": 3},
        {"endpoint": "[" * 9999},
        {"machine": None},
        {"torch": None},
        {"torch": "\x1b[2J"},
        {"version": 3},
        {"version": None},
        {"protocol": None},
        {"protocol": "4"},
        {"shared": 1},
        {"shared": {"encryption": []}},
        {"shared": {"transport": "\x1b[2J"}},
    ],
)
def test_what_is_no_rank_is_told_in_words(change: dict[str, Any]) -> None:
    values = json.loads(info(0).to_json())
    for name, value in change.items():
        if value is None:
            del values[name]
        else:
            values[name] = value
    with pytest.raises(WireError, match="rank 0") as refused:
        met(1, json.dumps(values), info(1))
    assert refused.value.code == "bad-message"


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("port", "80"),
        ("port", 0),
        ("port", 1 << 40),
        ("key", 5),
        ("name", None),
        ("name", "/" * 16),
        ("name", "0" * 300),
        ("address", "somewhere/else"),
        ("address", "lo;127.0.0.1"),
        ("host", "\x1b]0;owned\x07"),
        ("host", "h" * 1000),
    ],
)
def test_what_is_no_address_of_a_rank_is_refused(name: str, wrong: Any) -> None:
    values = json.loads(info(0).to_json())
    values["endpoint"][name] = wrong
    with pytest.raises(WireError, match="rank 0") as refused:
        met(1, json.dumps(values), info(1))
    assert refused.value.code == "bad-message"


def test_a_rank_with_another_protocol_is_named() -> None:
    with pytest.raises(CollectiveError, match=r"rank 0 runs potluck .* \(protocol 3\), this one"):
        met(1, info(0, protocol=3), info(1))


def test_a_number_of_the_group_that_is_none_is_told_in_words() -> None:
    store: Any = HashStore()
    store.set("potluck/group", "x" * 9)
    store.set("potluck/rank/0", info(0).to_json())
    with pytest.raises(WireError, match="no number for the group"):
        meet(store, 1, 2, info(1), 5.0)


# -- torch


def told(caplog: pytest.LogCaptureFixture, rank: int, *versions: str) -> list[tuple[int, str]]:
    caplog.clear()
    with caplog.at_level(logging.INFO, "potluck.dist"):
        met(rank, *(info(other, torch=version) for other, version in enumerate(versions)))
    return [(record.levelno, record.getMessage()) for record in caplog.records]


def test_ranks_with_another_torch_are_named(caplog: pytest.LogCaptureFixture) -> None:
    ((level, text),) = told(caplog, 0, "2.13.0+cpu", "2.13.1", "2.10.0+cu128", "2.10.1")
    assert level == logging.WARNING
    assert "2.13 on ranks 0-1; 2.10 on ranks 2-3" in text
    ((level, _),) = told(caplog, 1, "2.13.0", "2.10.0")
    assert level == logging.INFO, "rank 0 warns for all"


def test_builds_of_one_torch_are_no_news(caplog: pytest.LogCaptureFixture) -> None:
    assert told(caplog, 0, "2.13.0+cpu", "2.13.1+cu128", "2.13.0a0+git1") == []
