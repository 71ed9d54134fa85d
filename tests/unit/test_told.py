"""What a host tells: a message that lacks something is a clear error, and its words steer no terminal."""

from __future__ import annotations

import contextlib
import struct
from typing import Any

import pytest
from potluck.hub.told import NEEDED, checked

from potluck.errors import RefusedError, WireError
from potluck.hub.link import GuestLink
from potluck.report.guest_view import GuestView
from potluck.wire.frames import Message, pack
from potluck.wire.token import Token

ESCAPES = "\x1b[2J\x1b]0;owned\x07evil\u202e\nname"
GOOD: dict[str, dict[str, Any]] = {
    "welcome": {
        **dict.fromkeys(("name", "host", "run", "codec", "codec_down"), "x"),
        "versions": {},
        "source": {"files": ["a.py"], "arguments": [], "sha256": "0"},
    },
    "tensor": {"name": "b", "start": 0},
    "whole": {"piece": 0, "version": 3},
    "change": {"piece": 0, "base": -1, "version": 3},
    "check": {"check": 1, "step": 0, "sizes": [4], "seed": 3},
    "lease": {"lease": 1, "step": 0, "sizes": [4, 2], "quota": 5, "within_s": 0.1},
    "samples": {"lease": -1, "batch": 0, "tree": ["l"]},
    "revoke": {"lease": 1},
    "hash": {"version": 0},
    "resync": {"version": 0},
    "note": {"text": "judged by the spread"},
}
GOOD["welcome"]["source"]["imports"] = {"sklearn": "scikit-learn", "model": "./model.py"}  # type: ignore[index]
WRONG_SOURCES = ({"files": "a"}, {"recipe": 3}, {**GOOD["welcome"]["source"], "imports": {"a": 1}})  # type: ignore[dict-item]
WRONG = (None, "x", -(1 << 70), 10**400, 1.5, True, [], [0], [-1], [1.0], {}, *WRONG_SOURCES)


def message(kind: str, fields: dict[str, Any]) -> Message:
    return Message(kind=kind, fields=fields, frames=(b"1234",) if kind in ("tensor", "whole", "change") else ())


def test_what_hosts_say_passes_and_so_do_kinds_that_nobody_knows() -> None:
    assert GOOD.keys() == NEEDED.keys()
    for kind, fields in GOOD.items():
        assert checked(message(kind, fields)) == message(kind, fields)
    for other in ("bye", "dropped", "alive", "of_tomorrow"):
        assert checked(Message(kind=other, fields={"any": 1})).kind == other
    frame = struct.pack("<6q", *range(6))
    assert checked(Message(kind="lease", fields=GOOD["lease"], frames=(frame,))).frames == (frame,)


@pytest.mark.parametrize("kind", GOOD)
def test_a_field_that_is_missing_is_named(kind: str) -> None:
    for name in NEEDED[kind]:
        fields = {key: value for key, value in GOOD[kind].items() if key != name}
        with pytest.raises(WireError, match=f"{kind}.*no '{name}'") as caught:
            checked(message(kind, fields))
        assert caught.value.hint


@pytest.mark.parametrize("kind", GOOD)
def test_whatever_a_field_holds_only_a_wire_error_comes_out(kind: str) -> None:
    refused = 0
    for name in GOOD[kind]:
        for wrong in WRONG:
            try:
                checked(message(kind, {**GOOD[kind], name: wrong}))
            except WireError:
                refused += 1
    assert refused >= len(WRONG) // 2


@pytest.mark.parametrize(("kind", "frames"), [("whole", ()), ("change", (b"", b"")), ("lease", (b"1234567",))])
def test_frames_that_do_not_fit_are_refused(kind: str, frames: tuple[bytes, ...]) -> None:
    with pytest.raises(WireError, match=kind):
        checked(Message(kind=kind, fields=GOOD[kind], frames=frames))


def dispatched(link: GuestLink, kind: str, fields: dict[str, Any]) -> None:
    link._dispatch("control", [memoryview(bytes(part)) for part in pack(Message(kind=kind, fields=fields))])


def test_a_hosts_words_steer_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    token = Token(addresses=("127.0.0.1",), port=1, host_public=b"h" * 32, guest_secret=b"g" * 32)
    link = GuestLink(token, {})
    with pytest.raises(RefusedError) as caught:
        dispatched(link, "refuse", {"reason": ESCAPES, "hint": ESCAPES * 200})
    assert (str(caught.value) + caught.value.hint).isprintable()
    assert "evil" in caught.value.what
    dispatched(link, "welcome", {**GOOD["welcome"], "host": ESCAPES, "run": ESCAPES})
    assert link._welcome is not None
    view = GuestView("plain")
    view.joined(host=ESCAPES, address="::1", run=link._welcome.fields["run"], name="me", device="cpu")
    view.runs(ESCAPES)
    view.ended(ESCAPES)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    assert all(line.isprintable() for line in lines)
    with contextlib.suppress(WireError):
        link.close()


def test_a_welcome_without_fields_ends_the_guest_with_a_clear_error() -> None:
    token = Token(addresses=("127.0.0.1",), port=1, host_public=b"h" * 32, guest_secret=b"g" * 32)
    with pytest.raises(
        WireError, match="the host sent a 'welcome' that cannot be read: it has no 'name'"
    ) as caught:
        dispatched(GuestLink(token, {}), "welcome", {})
    assert caught.value.code == "bad-message"
