"""The flight recorder keeps the end of the story and no secret, and the terminal names who failed and how."""

from __future__ import annotations

import json
import os
import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest

from potluck.device import pick
from potluck.errors import NetworkError
from potluck.hub import inputs
from potluck.hub import recorder as recorders
from potluck.hub.recorder import ENTRIES, MOST_FILES, PAUSE_S, Recorder, remove_old
from potluck.report.guest_view import GuestView
from potluck.report.sentences import describe
from potluck.spec import events as ev
from potluck.spec.config import RunConfig
from potluck.spec.messages import (
    ChangeMessage,
    DoneMessage,
    GradMessage,
    HelloMessage,
    LeaveMessage,
    SamplesMessage,
    SketchMessage,
)
from potluck.train.guest_session import connect
from potluck.units import seconds_text
from potluck.wire.token import Token
from support.protocol_world import World, joined, of_kind


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def done(lease: int, count: int = 1) -> DoneMessage:
    return DoneMessage(
        lease=lease,
        count=count,
        loss_sum=1.0,
        compute_s=0.1,
        finite=True,
        receive_s=0.0,
        micro_batch=1,
        largest_micro_batch=1,
    )


def lines(path: Path | None) -> list[dict[str, Any]]:
    assert path is not None
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_last_entries_are_kept_and_time_and_sizes_are_right(tmp_path: Path, clock: Clock) -> None:
    recorder = Recorder("tower", tmp_path, clock=clock)
    for number in range(3 * ENTRIES):
        clock.now += 0.5
        recorder.message("in", "laptop", done(number, count=4), 10)
    recorder.fault("laptop failed")
    head, *entries = lines(recorder.write())
    assert head["flight"] == "tower"
    assert head["why"] == "laptop failed"
    assert len(entries) == ENTRIES
    assert entries[-1] == {
        "t_s": 1.5 * ENTRIES,
        "dir": "in",
        "machine": "laptop",
        "kind": "done",
        "lease": 3 * ENTRIES - 1,
        "count": 4,
        "bytes": 10,
    }


def test_the_pieces_of_one_gradient_are_one_entry(tmp_path: Path, clock: Clock) -> None:
    recorder = Recorder("tower", tmp_path, clock=clock)
    for piece in range(10_000):
        clock.now += 1e-5
        recorder.message("in", "laptop", GradMessage(lease=7, piece=piece), 100)
        recorder.message("out", "laptop", ChangeMessage(version=3, base=2, piece=piece), 50)
    recorder.message("in", "laptop", GradMessage(lease=8, piece=0), 100)
    clock.now += 5.0
    recorder.message("in", "laptop", GradMessage(lease=8, piece=1), 100)
    recorder.fault("x")
    _, first, change, second, third = lines(recorder.write())
    assert (first["times"], first["bytes"], first["piece"]) == (10_000, 1_000_000, 9_999)
    assert (change["dir"], change["times"]) == ("out", 10_000)
    assert (second["lease"], "times" in second) == (8, False)
    assert third["t_s"] > second["t_s"] + 4, "long after is no longer the same moment"


def test_of_what_others_say_only_numbers_are_kept(tmp_path: Path, clock: Clock) -> None:
    recorder = Recorder("../../etc/tower", tmp_path, clock=clock)
    sketch = SketchMessage(
        check=4, count=2, loss=1.0, compute_s=0.1, random={"s3cret": "s3cret"}, micro_batch=1, largest_micro_batch=1
    )
    for message in (sketch, SamplesMessage(lease=7, batch=1, tree=["s3cret"]), LeaveMessage(reason="s3cret")):
        recorder.message("in", "laptop", message, 0)
    recorder.fault("x")
    path = recorder.write()
    _, *entries = lines(path)
    about = {"t_s": 0.0, "dir": "in", "machine": "laptop"}
    assert entries == [
        {**about, "kind": "sketch", "check": 4, "count": 2},
        {**about, "kind": "samples", "lease": 7, "batch": 1},
        {**about, "kind": "leave"},
    ]
    assert path is not None
    assert path.parent == tmp_path
    assert path.stat().st_mode & 0o077 == 0
    assert "s3cret" not in path.read_text()


def test_a_few_files_and_not_too_often(tmp_path: Path, clock: Clock) -> None:
    told: list[Path] = []
    recorder = Recorder("tower", tmp_path, clock=clock, tell=lambda path, why: told.append(path))
    assert recorder.write() is None, "nothing has failed"
    for number in range(3 * MOST_FILES):
        recorder.fault(f"fault {number}")
        assert recorder.write() is not None
        recorder.fault("one more at once")
        assert recorder.write() is None
        clock.now += PAUSE_S
        assert lines(recorder.write())[0]["why"] == "one more at once", "it is not forgotten"
        clock.now += PAUSE_S
    assert len(told) == recorder.files == 6 * MOST_FILES
    names = sorted(p.name for p in tmp_path.iterdir())
    assert len(names) == MOST_FILES
    assert f"flight-tower-{6 * MOST_FILES}.jsonl" in names
    again = Recorder("tower", tmp_path, clock=clock)
    again.fault("after a resume")
    assert again.write() == tmp_path / f"flight-tower-{6 * MOST_FILES + 1}.jsonl"


def test_records_of_a_run_that_ended_well_are_removed_and_nobody_elses(tmp_path: Path, clock: Clock) -> None:
    (tmp_path / "flight-tower-7.jsonl").write_text("of another time")
    recorder = Recorder("tower", tmp_path, clock=clock)
    for why in ("the host was gone", "and once more"):
        recorder.fault(why)
        assert recorder.write(now=True) is not None
    recorder.fault("not written yet")
    recorder.discard()
    assert recorder.write(now=True) is None
    assert [p.name for p in tmp_path.iterdir()] == ["flight-tower-7.jsonl"]


def test_a_guest_removes_old_records_of_earlier_guests_of_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = [tmp_path / f"flight-ann-{pid}-1.jsonl" for pid in range(100, 100 + 2 * MOST_FILES)]
    others = [tmp_path / name for name in ("flight-ann-1.jsonl", "flight-ann-b-7-1.jsonl", "flight-bob-7-1.jsonl")]
    for age, path in enumerate([*reversed(own), *others]):
        path.write_text("")
        os.utime(path, (1e9 - age, 1e9 - age))
    if os.name == "posix":
        with monkeypatch.context() as patched:
            patched.setattr(os, "getuid", lambda: -1)
            remove_old("ann", tmp_path)
            assert len(list(tmp_path.iterdir())) == len(own) + len(others), "they are another user's"
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    token = Token(addresses=("127.0.0.1",), port=1, host_public=b"h" * 32, guest_secret=b"g" * 32)
    view = GuestView("quiet")
    with pytest.raises(NetworkError):
        connect(token, config=RunConfig(), device=pick("cpu"), name="ann", view=view, wait_s=0.1, give_up_s=1.0)
    assert sorted(tmp_path.iterdir()) == sorted([*own[-MOST_FILES:], *others])


def test_a_guest_says_what_a_record_is_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    GuestView("plain").recorded(tmp_path / "flight-ann-1.jsonl", "the host closed the connection")
    said = capsys.readouterr().out
    assert said.startswith("the host closed the connection; for a bug report the last messages are in ")
    assert said.rstrip().endswith("flight-ann-1.jsonl (removed if the run ends well)")


def test_a_folder_that_takes_nothing_ends_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", None):
        recorder = Recorder("tower", folder)
        recorder.fault("x")
        assert recorder.write(now=True) is None


def test_any_thread_may_write_while_the_record_is_made(tmp_path: Path) -> None:
    recorder, stop = Recorder("tower", tmp_path), threading.Event()

    def talk(machine: str) -> None:
        number = 0
        while not stop.is_set():
            number += 1
            recorder.message("in", machine, done(number), 1)

    threads = [threading.Thread(target=talk, args=(f"guest-{n}",)) for n in range(4)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(20):
            recorder.fault("x")
            assert len(lines(recorder.write(now=True))) <= ENTRIES + 1
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def test_machines_that_come_and_go_cost_no_memory() -> None:
    recorder = Recorder("tower", None)
    for number in range(10 * recorders.MOST_MACHINES):
        recorder.message("in", f"stranger-{number}", HelloMessage(), 0)
    assert len(recorder._last) <= recorders.MOST_MACHINES


ABOUT: Any = {"machine": "laptop", "address": "10.0.0.7", "reason": "because", "step": 3}
FAULTS = [
    (ev.GuestLost(**ABOUT, samples_taken_back=4), True),
    (ev.ReplicaMismatch(**ABOUT, samples=4, pieces=1), True),
    (ev.LeaseTakenBack(**ABOUT, samples=4, silent=True), True),
    (ev.LeaseTakenBack(**ABOUT, samples=4, silent=False), False),
    (ev.GuestLeft(**ABOUT, samples_taken_back=4), False),
    (ev.GuestLeft(**ABOUT, samples_taken_back=4, failed=True), True),
    (ev.GuestSitsOut(machine="laptop", step=3, reason="because"), False),
]


@pytest.mark.parametrize(("event", "written"), FAULTS)
def test_which_events_are_faults(event: ev.RunEvent, written: bool, tmp_path: Path) -> None:
    recorder = Recorder("tower", tmp_path)
    recorder.event(event)
    path = recorder.write()
    assert (path is not None) == written
    if written:
        head, entry = lines(path)
        assert head["why"] == f"{ev.kind_of(event)} laptop: because"
        assert (entry["machine"], entry["step"]) == ("laptop", 3)
        assert entry.get("samples") == getattr(event, "samples", None)


# -- the line in the terminal


def sentence(world: World, kind: str) -> str:
    message = describe(of_kind(world, kind)[-1])
    assert message is not None
    return message.text


def working() -> World:
    """A host and a guest that holds a lease."""
    world = joined("laptop", batch=12)
    world.begin()
    world.take_all("laptop")
    assert world.members["laptop"].lease is not None
    return world


def its_samples(world: World) -> str:
    lease = world.members["laptop"].lease
    assert lease is not None
    return f"its {lease.count} samples were taken back"


def test_one_that_falls_silent() -> None:
    world = working()
    words = its_samples(world)
    world.now += 5.04
    world.tick()
    assert sentence(world, "guest_lost") == f"laptop (1.2.3.4) sent nothing for 5.0 s during step 2; {words}"


def test_one_that_is_silent_at_the_end_of_the_step() -> None:
    world = working()
    words = its_samples(world)
    while world.take() is None:
        world.compute()
    world.now = world.members["laptop"].last_heard + 2.6
    world.take()
    assert sentence(world, "lease_taken_back") == f"laptop (1.2.3.4) sent nothing for 2.6 s during step 2; {words}"
    assert of_kind(world, "lease_taken_back")[-1].silent


def test_one_that_is_late() -> None:
    world = working()
    words = its_samples(world)
    started = world.now
    while (until := world.take()) is None:
        world.compute()
    world.now = until
    world.say("laptop", "alive")
    world.take()
    late = f"laptop (1.2.3.4) did not deliver within {seconds_text(until - started)} during step 2; {words}"
    assert sentence(world, "lease_taken_back") == late
    assert not of_kind(world, "lease_taken_back")[-1].silent


def test_one_whose_connection_is_gone() -> None:
    world = working()
    words = its_samples(world)
    world.handle(inputs.PeerUnreachable(guest="laptop"))
    assert sentence(world, "guest_lost") == f"laptop (1.2.3.4) lost its connection during step 2; {words}"


def test_one_that_is_put_out() -> None:
    world = working()
    words = its_samples(world)
    world.say("laptop", "grad", b"", lease=1, piece=99)
    assert sentence(world, "guest_lost") == (
        "laptop (1.2.3.4) was removed during step 2: it sent a gradient for piece 99, which does not exist; "
        + words
    )


def test_one_that_goes_without_a_lease_has_no_samples_to_give_back() -> None:
    world = joined("laptop")
    world.handle(inputs.PeerUnreachable(guest="laptop"))
    assert sentence(world, "guest_lost").endswith("during step 2; it is out of the run until it reconnects")
