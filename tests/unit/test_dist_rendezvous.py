"""The cards of ranks in the store: nobody can turn encryption off, and versions of torch are compared."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from typing import Any

import pytest
import zmq
from torch.distributed import HashStore

from potluck.dist.links import Endpoint, Links, LinkSettings
from potluck.dist.rendezvous import Card, Meeting, meet
from potluck.errors import CollectiveError, WireError

SHARED = {"encryption": True}


def card(rank: int, *, key: str | None = None, **changed: Any) -> Card:
    own = zmq.curve_keypair()[0].decode() if key is None else key
    endpoint = Endpoint(name=f"{rank:016x}", address="127.0.0.1", port=4000 + rank, key=own, host="here")
    return replace(Card(endpoint=endpoint, machine="m", shared=SHARED), **changed)


def met(rank: int, *others: Card | str) -> Meeting:
    """What `rank` finds in a store where the others' cards are."""
    store: Any = HashStore()
    store.set("potluck/group", "7")
    for other, theirs in enumerate(others):
        if other != rank:
            store.set(f"potluck/card/{other}", theirs if isinstance(theirs, str) else theirs.to_json())
    mine = others[rank]
    assert isinstance(mine, Card)
    return meet(store, rank, len(others), mine, 5.0)


@pytest.mark.parametrize("key", ["", " ", "short", "x" * 41, "\u00fc" * 40, "\0" * 40])
def test_a_rank_without_a_key_is_refused_by_its_number_where_encryption_is_on(key: str) -> None:
    with pytest.raises(CollectiveError, match="rank 2 came without a key, and encryption is on") as caught:
        met(1, card(0), card(1), card(2, key=key))
    assert "POTLUCK_DIST_ENCRYPTION=0" in caught.value.hint


def test_ranks_that_all_are_in_the_clear_meet() -> None:
    cards = [card(rank, key="", shared={"encryption": False}) for rank in range(2)]
    assert met(1, *cards).cards == cards


def test_a_process_that_encrypts_has_no_link_in_the_clear() -> None:
    """Even if a card without a key came through."""
    links = Links(LinkSettings(), "here")
    try:
        with pytest.raises(WireError, match="has no key"):
            links.admit([card(1, key="").endpoint])
        with pytest.raises(WireError, match="has no key"):
            links.reach(card(1, key="").endpoint)
    finally:
        links.close()


@pytest.mark.parametrize(
    "change",
    [
        {"endpoint": "{}"},
        {"endpoint": 3},
        {"endpoint": "[" * 9999},
        {"machine": None},
        {"torch": None},
        {"torch": "\x1b[2J"},
        {"version": 3},
        {"protocol": "4"},
        {"shared": 1},
        {"shared": {"encryption": []}},
        {"shared": {"transport": "\x1b[2J"}},
    ],
)
def test_what_is_no_card_is_told_in_words(change: dict[str, Any]) -> None:
    values = json.loads(card(0).to_json())
    for name, value in change.items():
        if value is None:
            del values[name]
        else:
            values[name] = value
    with pytest.raises(WireError, match="not the card of rank 0"):
        met(1, json.dumps(values), card(1))


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
    values = json.loads(card(0).endpoint.to_json())
    with pytest.raises(WireError, match="not a rank's address"):
        Endpoint.from_json(json.dumps({**values, name: wrong}))


def test_a_rank_with_another_protocol_is_named() -> None:
    with pytest.raises(CollectiveError, match=r"rank 0 runs potluck .* \(protocol 3\), this one"):
        met(1, card(0, protocol=3), card(1))


def test_a_number_of_the_group_that_is_none_is_told_in_words() -> None:
    store: Any = HashStore()
    store.set("potluck/group", "x" * 9)
    store.set("potluck/card/0", card(0).to_json())
    with pytest.raises(WireError, match="no number for the group"):
        meet(store, 1, 2, card(1), 5.0)


# -- torch


def told(caplog: pytest.LogCaptureFixture, rank: int, *versions: str) -> list[tuple[int, str]]:
    caplog.clear()
    with caplog.at_level(logging.INFO, "potluck.dist"):
        met(rank, *(card(other, torch=version) for other, version in enumerate(versions)))
    return [(record.levelno, record.getMessage()) for record in caplog.records]


def test_ranks_with_another_torch_are_named(caplog: pytest.LogCaptureFixture) -> None:
    ((level, text),) = told(caplog, 0, "2.13.0+cpu", "2.13.1", "2.10.0+cu128", "2.10.1")
    assert level == logging.WARNING
    assert "2.13 on ranks 0-1; 2.10 on ranks 2-3" in text
    ((level, _),) = told(caplog, 1, "2.13.0", "2.10.0")
    assert level == logging.INFO, "rank 0 warns for all"


def test_builds_of_one_torch_are_no_news(caplog: pytest.LogCaptureFixture) -> None:
    assert told(caplog, 0, "2.13.0+cpu", "2.13.1+cu128", "2.13.0a0+git1") == []
