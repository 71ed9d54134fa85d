"""Messages: every kind comes back as it was sent, and what a kind must not hold is refused by name."""

from __future__ import annotations

import contextlib
import struct
from typing import Any, get_args

import msgspec
import pytest

from potluck.errors import RefusedError, WireError
from potluck.hub.link import GuestLink
from potluck.report.guest_view import GuestView
from potluck.spec import events as ev
from potluck.spec import messages
from potluck.spec.messages import (
    LARGEST,
    SHORTEST_S,
    DoneMessage,
    FromGuest,
    FromHost,
    HelloMessage,
    LeaseMessage,
    Message,
    RefuseMessage,
    SketchMessage,
)
from potluck.spec.probe_messages import FromListener, ToListener
from potluck.wire.frames import (
    FROM_GUEST,
    FROM_HOST,
    MAX_HEADER_BYTES,
    MalformedError,
    Reader,
    UnknownKindError,
    pack,
)
from potluck.wire.token import Token
from support.fuzz import examples
from support.plain import Plain, header, packed

ESCAPES = "\x1b[2J\x1b]0;owned\x07evil\u202e\nname"
TOKEN = Token(addresses=("127.0.0.1",), port=1, host_public=b"h" * 32, guest_secret=b"g" * 32)
HONEST = {message.kind: message for message in examples()}
CASES = [(kind, name) for kind, message in HONEST.items() for name in message.fields]
WRONG = (
    None,
    "x",
    "NaN",
    "Infinity",
    -(1 << 70),
    10**400,
    1.5,
    -1.5,
    True,
    [],
    [0],
    [-1],
    [1.0],
    {},
    {"files": "a"},
)
RAW = (
    "NaN",
    "-Infinity",
    "1e400",
    "-1e400",
    "9" * 5000,
    "[" * 70 + "]" * 70,
    "[" * 5000,
    '"\\ud800"',
    '"\xff"',
    "01",
)


def reader_of(kind: str) -> Reader[Any]:
    return FROM_GUEST if kind in {k.kind for k in get_args(FromGuest)} else FROM_HOST


def read(message: Plain) -> Message:
    read: Message = reader_of(message.kind).read(packed(message)).message
    return read


def changed(kind: str, **fields: Any) -> Plain:
    return Plain(kind=kind, fields={**HONEST[kind].fields, **fields}, frames=HONEST[kind].frames)


def lacking(kind: str, name: str) -> Plain:
    fields = {key: value for key, value in HONEST[kind].fields.items() if key != name}
    return Plain(kind=kind, fields=fields, frames=HONEST[kind].frames)


def test_every_kind_comes_back_as_it_was_sent() -> None:
    assert HONEST.keys() == {kind.kind for kind in (*get_args(FromGuest), *get_args(FromHost))}
    for message in examples():
        found = read(message)
        assert {name: getattr(found, name) for name in found.__struct_fields__}.keys() == message.fields.keys()
        frames = tuple(message.frames)
        assert reader_of(message.kind).read(pack(found, frames)) == (found, frames)


def test_the_kinds_of_one_direction_differ() -> None:
    for union in (FromGuest, FromHost, ToListener, FromListener):
        kinds = [kind.kind for kind in get_args(union)]
        assert len(set(kinds)) == len(kinds)
        assert all(kinds)


def test_a_kind_that_nobody_knows_is_told_apart_and_unknown_fields_are_ignored() -> None:
    for kind in ("of_tomorrow", "lease"):  # the second one is a host's to say
        with pytest.raises(UnknownKindError) as unknown:
            FROM_GUEST.read([header(kind, {})])
        assert (unknown.value.code, unknown.value.kind) == ("bad-message", kind)
    assert read(changed("grad", of_tomorrow=[1, {"a": None}])) == messages.GradMessage(lease=1, piece=1)


@pytest.mark.parametrize("kind", HONEST)
def test_a_field_that_is_missing_is_named(kind: str) -> None:
    fields = msgspec.structs.fields(type(read(HONEST[kind])))
    for field in fields:
        if field.required:
            with pytest.raises(MalformedError) as caught:
                read(lacking(kind, field.name))
            assert (caught.value.kind, repr(field.name) in caught.value.why) == (kind, True)
        else:
            read(lacking(kind, field.name))


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_what_a_field_cannot_hold_is_refused_by_name(kind: str, name: str) -> None:
    errors: list[str] = []
    for wrong in WRONG:
        try:
            read(changed(kind, **{name: wrong}))
        except MalformedError as error:
            errors.append(str(error))
    assert len(errors) >= len(WRONG) // 2 or name == "tree"
    for text in errors:
        assert f"its {name!r} is wrong: " in text
        assert len(text) < 300
        assert text.isprintable()


@pytest.mark.parametrize("raw", RAW)
@pytest.mark.parametrize("name", ["lease", "loss_sum", "finite"])
def test_whatever_the_json_holds_only_a_wire_error_comes_out(name: str, raw: str) -> None:
    honest = header("done", {**HONEST["done"].fields, name: 1234.5})
    assert honest.count(b"1234.5") == 1
    with pytest.raises(WireError):
        FROM_GUEST.read([honest.replace(b"1234.5", raw.encode("latin-1"))])


def test_of_a_key_that_comes_twice_the_last_one_counts_and_is_checked() -> None:
    twice = header("grad", {"lease": 1, "piece": 2}).replace(b'"lease":1', b'"lease":1,"lease":7')
    assert FROM_GUEST.read([twice, b"x"]).message == messages.GradMessage(lease=7, piece=2)
    with pytest.raises(MalformedError) as malformed:
        FROM_GUEST.read([twice.replace(b'"lease":7', b'"lease":true'), b"x"])
    assert (malformed.value.kind, "'lease'" in malformed.value.why) == ("grad", True)


def test_a_whole_number_is_one_and_a_number_may_be_whole() -> None:
    with pytest.raises(MalformedError) as caught:
        read(changed("done", count=3.0))
    assert (caught.value.kind, "count" in caught.value.why) == ("done", True)
    found = read(changed("done", loss_sum=3, compute_s=1))
    assert isinstance(found, DoneMessage)
    assert (type(found.loss_sum), found.compute_s) == (float, 1.0)
    assert read(changed("grad", lease=LARGEST)) == messages.GradMessage(lease=LARGEST, piece=1)


def test_a_duration_too_short_for_a_rate_is_raised_and_none_is_none() -> None:
    for seconds, found in ((5e-324, SHORTEST_S), (0.0, 0.0), (0.25, 0.25)):
        for kind in ("done", "sketch", "stopped"):
            assert read(changed(kind, compute_s=seconds)).compute_s == found


@pytest.mark.parametrize(
    ("kind", "frames", "why"),
    [
        ("whole", (), "it has 0 frames, not 1"),
        ("change", (b"", b""), "it has 2 frames, not 1"),
        ("grad", (), "it has 0 frames, not 1"),
        ("alive", (b"",), "it has 1 frames, not 0"),
        ("lease", (b"", b""), "it has 2 frames, not 0 to 1"),
        ("lease", (b"1234567",), "it has 7 bytes of indices for 8 samples"),
        ("check", (b"1234567",), "it has 7 bytes of indices for 2 samples"),
    ],
)
def test_frames_that_do_not_fit_are_refused(kind: str, frames: tuple[bytes, ...], why: str) -> None:
    with pytest.raises(MalformedError) as caught:
        read(Plain(kind=kind, fields=HONEST[kind].fields, frames=frames))
    assert (caught.value.kind, caught.value.why) == (kind, why)


def test_a_lease_may_bring_the_indices_of_its_samples() -> None:
    frame = struct.pack("<8q", *range(8))
    found = FROM_HOST.read(packed(Plain(kind="lease", fields=HONEST["lease"].fields, frames=(frame,))))
    assert isinstance(found.message, LeaseMessage)
    assert (found.message.sizes, found.frames) == ((4, 4), (frame,))


@pytest.mark.parametrize(
    "source",
    [
        {},
        {"recipe": "gpt", "files": ["a"], "sha256": "0"},
        {"files": ["a"]},
        {"files": []},
        {"files": ["a"], "imports": [1]},
    ],
)
def test_a_source_that_names_nothing_to_run_or_two_things_is_refused(source: dict[str, Any]) -> None:
    with pytest.raises(MalformedError) as malformed:
        read(changed("welcome", source=source))
    assert (malformed.value.kind, "'source'" in malformed.value.why) == ("welcome", True)


def test_words_for_a_person_are_cut_and_steer_no_terminal() -> None:
    for kind, name, limit in (("hello", "name", 40), ("leave", "reason", 200), ("bye", "reason", 500)):
        found = getattr(read(changed(kind, **{name: ESCAPES * 300})), name)
        assert len(found) == limit
        assert found.isprintable()
        assert "evil" in found


def test_a_number_that_is_not_finite_is_not_sent() -> None:
    for wrong in (float("nan"), float("inf")):
        with pytest.raises(WireError, match="'lease' that cannot be sent: its 'within_s'"):
            pack(LeaseMessage(lease=1, step=0, sizes=(1,), within_s=wrong))
    sketch = SketchMessage(check=1, count=1, loss=None, compute_s=0.1, micro_batch=1, largest_micro_batch=1)
    assert FROM_GUEST.read(pack(sketch, (b"",))).message == sketch


@pytest.mark.parametrize(
    "message",
    [
        messages.TensorMessage(name="x" * MAX_HEADER_BYTES, start=0),
        messages.TensorMessage(name="\ud800", start=0),
        messages.SamplesMessage(lease=1, batch=0, tree=object()),
    ],
)
def test_what_cannot_travel_is_refused_before_it_is_sent(message: Message) -> None:
    with pytest.raises(WireError):
        pack(message, (b"",))


def dispatched(link: GuestLink, message: Plain) -> None:
    link._dispatch([memoryview(bytes(part)) for part in packed(message)])


def test_a_hosts_words_steer_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    link = GuestLink(TOKEN, HelloMessage())
    with pytest.raises(RefusedError) as caught:
        dispatched(link, changed("refuse", reason=ESCAPES, hint=ESCAPES * 200))
    assert (str(caught.value) + (caught.value.hint or "")).isprintable()
    assert "evil" in caught.value.what
    dispatched(link, changed("welcome", host=ESCAPES, run=ESCAPES))
    assert link._welcome is not None
    view = GuestView("plain")
    view.joined(host=ESCAPES, address="::1", run=link._welcome.message.run, name="me", device="cpu")
    view.runs(ESCAPES)
    view.ended(ESCAPES)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    assert all(line.isprintable() for line in lines)
    with contextlib.suppress(WireError):
        link.close()


def test_a_guest_ends_with_a_clear_error_when_the_host_sends_what_cannot_be_read() -> None:
    link = GuestLink(TOKEN, HelloMessage())
    dispatched(link, Plain(kind="of_tomorrow", fields={"any": 1}))  # a newer host: it can do without
    for message, why in (
        (Plain(kind="welcome", fields={}), "it has no 'name'"),
        (changed("lease", within_s="soon"), "its 'within_s' is wrong: expected `float`, got `str`"),
    ):
        with pytest.raises(WireError) as caught:
            dispatched(link, message)
        assert caught.value.what == f"the host sent a {message.kind!r} that cannot be read: {why}"
        assert caught.value.code == "bad-message"
        assert caught.value.hint


def test_what_a_host_says_of_itself_is_cleaned_too() -> None:
    assert RefuseMessage(reason="a\nb").reason == "a b"


def test_a_guest_says_what_it_brought_without_what_did_not_count(capsys: pytest.CaptureFixture[str]) -> None:
    view = GuestView("plain")
    view.event(ev.Delivered(step=3, samples=8, loss=1.0, compute_s=0.1, total_samples=24))
    view.event(ev.GuestEnded(samples=16, compute_s=0.3, dropped=8))
    view.ended("the run is over: finished")
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.endswith("this machine computed 16 samples (8 more came too late or did not count)")
