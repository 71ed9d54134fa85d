"""Which address of a token is taken, where several answer."""

from __future__ import annotations

import selectors
import socket
import sys
import time
from collections.abc import Iterator

import pytest

from potluck.errors import NetworkError
from potluck.wire import reach

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="other systems have no 127.0.0.2")
FIRST, SECOND = "127.0.0.1", "127.0.0.2"


@pytest.fixture
def port() -> Iterator[int]:
    """A port at which both addresses listen."""
    with socket.create_server((FIRST, 0)) as one, socket.create_server((SECOND, one.getsockname()[1])):
        yield int(one.getsockname()[1])


class SecondSooner(selectors.DefaultSelector):
    """The first address' answer is seen 20 ms after the second's."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = False

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        found = super().select(timeout)
        later = [item for item in found if item[0].data[0] == FIRST]
        if self.seen or not later:
            return found
        time.sleep(0.02)
        self.seen = len(found) > len(later)
        return [item for item in found if item not in later]


def test_the_likelier_address_is_taken_though_another_answers_sooner(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reach.selectors, "DefaultSelector", SecondSooner)
    assert reach.first_answering((FIRST, SECOND), port, 5.0) == (FIRST, FIRST)
    assert reach.first_answering((SECOND, FIRST), port, 5.0) == (SECOND, SECOND)


def test_one_that_does_not_answer_is_waited_for_a_moment_only() -> None:
    """A full queue drops what arrives, as a firewall does."""
    with socket.create_server((SECOND, 0)) as there, socket.socket() as silent, socket.socket() as queued:
        port = there.getsockname()[1]
        silent.bind((FIRST, port))
        silent.listen(0)
        queued.connect((FIRST, port))
        began = time.monotonic()
        assert reach.first_answering((FIRST, SECOND), port, 20.0) == (SECOND, SECOND)
        assert 0.05 < time.monotonic() - began < 10


def test_one_that_refuses_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reach, "_BEFORE_S", 1000.0)
    with socket.create_server((SECOND, 0)) as there:
        assert reach.first_answering((FIRST, SECOND), there.getsockname()[1], 20.0) == (SECOND, SECOND)


def test_none_that_answers_is_an_error_that_names_all() -> None:
    with socket.socket() as closed:
        closed.bind((FIRST, 0))
        with pytest.raises(NetworkError, match=rf"{FIRST} port \d+: refused.*{SECOND} port \d+: refused"):
            reach.first_answering((FIRST, SECOND), closed.getsockname()[1], 5.0)
