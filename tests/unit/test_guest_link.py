"""A guest's link: which refusals it believes at once, and which only when they come again and again."""

from __future__ import annotations

import dataclasses
import socket
import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest

from potluck.errors import NetworkError, RefusedError
from potluck.hub import link as links
from potluck.hub.link import CLOSURES_BELIEVED, GuestLink, LinkTimes
from potluck.spec.messages import HelloMessage, RefuseMessage, Source, WelcomeMessage
from potluck.wire.frames import pack
from potluck.wire.reach import NobodyListensError
from potluck.wire.token import Token
from potluck.wire.transport import ClosedAtOnceError

TOKEN = Token(addresses=("127.0.0.1",), port=1, host_public=b"h" * 32, guest_secret=b"g" * 32)
NAMES = dict.fromkeys(("name", "host", "run", "codec", "codec_down"), "x")
SENT = WelcomeMessage(**NAMES, versions={}, source=Source(recipe="gpt"))
WELCOME = [memoryview(bytes(part)) for part in pack(SENT)]


class Sockets:
    """Makes sockets whose handshakes end as it is told, the last of it for ever (None: it is let in)."""

    def __init__(self, *outcomes: Exception | None) -> None:
        self.outcomes = list(outcomes)
        self.made = 0

    def __call__(self, token: Token, *, connect_timeout_s: float) -> Any:
        self.made += 1
        return _Socket(self.outcomes.pop(0) if len(self.outcomes) > 1 else self.outcomes[0])


class _Socket:
    address, guest_id, connected = "127.0.0.1", b"12345678", True

    def __init__(self, outcome: Exception | None) -> None:
        self._outcome = outcome
        self._welcomes = [("control", WELCOME)]

    def handshake(self, timeout_s: float) -> None:
        if self._outcome is not None:
            raise self._outcome

    def receive(self, timeout_s: float) -> Sequence[tuple[str, list[memoryview]]]:
        time.sleep(0.01)
        received, self._welcomes = self._welcomes, []
        return received

    def send_control(self, frames: Any) -> bool:
        return True

    def wake(self) -> None:
        pass

    def close(self, *, linger_s: float) -> None:
        pass


@pytest.fixture
def sockets(monkeypatch: pytest.MonkeyPatch) -> Sockets:
    made = Sockets()
    monkeypatch.setattr(links, "GuestSocket", made)
    monkeypatch.setattr(links, "FIRST_BACKOFF_S", 0.01)
    return made


def test_a_closed_connection_is_not_believed_at_once(sockets: Sockets) -> None:
    closures = [ClosedAtOnceError("closed")] * (CLOSURES_BELIEVED - 1)
    sockets.outcomes = [*closures, NetworkError("silent"), *closures, None]
    link = GuestLink(TOKEN, HelloMessage())
    assert link.connect(timeout_s=10).message.host == "x"
    assert sockets.made == 2 * CLOSURES_BELIEVED
    link.close()


def test_closed_connections_in_a_row_are_believed(sockets: Sockets) -> None:
    sockets.outcomes = [ClosedAtOnceError("the host is another one")]
    with pytest.raises(RefusedError, match="another one"):
        GuestLink(TOKEN, HelloMessage()).connect(timeout_s=10)
    assert sockets.made == CLOSURES_BELIEVED


def test_what_the_host_says_of_the_key_is_believed_at_once(sockets: Sockets) -> None:
    sockets.outcomes = [RefusedError("this key is unknown")]
    with pytest.raises(RefusedError, match="unknown"):
        GuestLink(TOKEN, HelloMessage()).connect(timeout_s=10)
    assert sockets.made == 1


def test_a_guest_of_the_run_that_is_disconnected_comes_back(sockets: Sockets) -> None:
    """Its host was restarted in a crowd of strangers: the link must not end for one hang-up."""
    sockets.outcomes = [None]
    link = GuestLink(TOKEN, HelloMessage())
    link.connect(timeout_s=10)
    sockets.outcomes = [ClosedAtOnceError("closed"), None]
    assert link._socket is not None
    link._socket.connected = False  # type: ignore[misc]
    deadline = time.monotonic() + 10
    while sockets.made < 3 and link.failure is None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert (sockets.made, link.failure) == (3, None)
    link.close()


def test_a_host_that_says_nothing_is_told_of_and_then_looked_for_again(sockets: Sockets) -> None:
    sockets.outcomes = [None]
    link = GuestLink(TOKEN, HelloMessage(), times=LinkTimes(notice_s=0.05, silence_s=0.2))
    heard: list[str] = []
    back = threading.Event()
    link.missing = lambda seconds: heard.append("missing")
    link.lost = lambda: heard.append("lost")
    link.found = lambda: heard.append("found")
    link.back = back.set
    link.connect(timeout_s=10)
    assert back.wait(10)
    link.close()
    assert heard[:3] == ["missing", "lost", "found"]
    assert (LinkTimes().notice_s, LinkTimes().silence_s) == (5.0, 10.0)  # as docs/reference/protocol.md says


@pytest.mark.parametrize("took_part", [True, False])
def test_the_model_is_no_reason_to_put_one_out_that_took_part(sockets: Sockets, took_part: bool) -> None:
    sockets.outcomes = [None]
    link = GuestLink(TOKEN, HelloMessage())
    link.connect(timeout_s=10)
    refuse = RefuseMessage(reason="did not read what it was sent", joined=took_part)
    with pytest.raises(RefusedError) as refused:
        link._dispatch(pack(refuse))
    assert ("same model" in (refused.value.hint or "")) == (not took_part)
    link.close()


def closed_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_a_closed_port_is_told_within_seconds_and_a_host_that_is_about_to_start_is_waited_for() -> None:
    token = dataclasses.replace(TOKEN, port=closed_port())
    asked: list[NetworkError] = []
    for timeout_s, closed_s in ((20.0, 0.7), (0.7, None)):
        link = GuestLink(token, HelloMessage())
        link.waiting = asked.append
        began = time.monotonic()
        with pytest.raises(NobodyListensError, match="refused, nothing listens there") as caught:
            link.connect(timeout_s, closed_s)
        assert time.monotonic() - began < 10.0
        assert "its run has probably ended" in caught.value.hint
    assert len(asked) >= 2  # each was asked again before it was given up


def test_a_host_that_does_not_answer_is_waited_for_longer_than_a_closed_port(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(links, "FIRST_BACKOFF_S", 0.01)
    sockets = Sockets(NetworkError("no answer"), NetworkError("no answer"), None)
    monkeypatch.setattr(links, "GuestSocket", sockets)
    link = GuestLink(TOKEN, HelloMessage())
    link.connect(10.0, closed_s=0.0)
    link.close()
    assert sockets.made == 3
