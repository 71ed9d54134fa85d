"""The end of a training: once, and with the right reason."""

from __future__ import annotations

import threading

import pytest

from potluck.train.ending import Ending


def test_a_loop_left_open_ends_while_the_interpreter_shuts_down(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_more_threads(thread: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Timer, "start", no_more_threads)
    reasons: list[str] = []
    ending = Ending(reasons.append)
    ending.soon("finished")
    ending.now("failed")
    assert reasons == ["finished"]
