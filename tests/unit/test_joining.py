"""A guest that joins with a token file: which token it takes, and what becomes of it when the file is replaced."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from potluck.errors import NetworkError, RefusedError
from potluck.fleet import joining
from potluck.fleet.joining import join_as_replaced
from potluck.wire.token import Token, encode


def token(port: int) -> str:
    return encode(Token(addresses=("127.0.0.1",), port=port, host_public=bytes(32), guest_secret=bytes(32)))


class Part:
    """What a guest does with each token: fails as it is told, and at last finds its run over."""

    def __init__(self, *ends: Callable[[], None]) -> None:
        self.ports: list[int] = []
        self.left_s: list[float | None] = []
        self._ends = list(ends)

    def __call__(self, given: Token, left_s: float | None, before_again: Callable[[], None]) -> str:
        self.ports.append(given.port)
        self.left_s.append(left_s)
        if self._ends:
            self._ends.pop(0)()
            before_again()
            raise NetworkError("no answer")
        return "finished"


def refuse() -> None:
    raise RefusedError("the host does not know this token")


def join(part: Part, file: Path | None, *, wait_s: float | None = None) -> list[str]:
    told: list[str] = []
    ended = join_as_replaced(token(1), part, file=file, wait_s=wait_s, began=time.monotonic(), tell=told.append)
    assert ended == "finished"
    return told


def test_a_token_that_replaces_another_in_the_file_is_taken(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(token(1) + "\n")
    part = Part(lambda: file.write_text(token(2)) and None, lambda: file.write_text(token(3)) and None)
    assert join(part, file) == [f"{file} has a new token: joining that run"] * 2
    assert part.ports == [1, 2, 3]


def test_a_refused_token_is_tried_again_only_with_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joining, "SETTLES_S", 0.05)
    file = tmp_path / "token"
    file.write_text(token(2))
    part = Part(refuse)
    assert join(part, file)[0] == "the host does not know this token"
    assert part.ports == [1, 2]
    file.write_text(token(1))
    for place in (file, None):
        with pytest.raises(RefusedError):
            join(Part(refuse), place)


def test_a_host_that_does_not_answer_is_no_reason_to_look_for_another_token_without_a_file() -> None:
    with pytest.raises(NetworkError):
        join(Part(lambda: None), None)


def test_the_wait_is_for_the_file_and_the_host_together_but_the_host_has_its_time() -> None:
    for wait_s, waited_s, left_s in ((None, 9.0, None), (600.0, 200.0, 400.0), (60.0, 50.0, 30.0), (5.0, 4.0, 5.0)):
        part = Part()
        began = time.monotonic() - waited_s
        join_as_replaced(token(1), part, file=None, wait_s=wait_s, began=began, tell=print)
        assert part.left_s == [left_s if left_s is None else pytest.approx(left_s, abs=1.0)]
