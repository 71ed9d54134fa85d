"""Guests that come before the script's training loop does: they are told to wait, and hear if it never comes."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from potluck.errors import HostGoneError, LoopError, ScriptError
from potluck.hub.link import GuestLink
from potluck.hub.waiting import WaitingRoom
from potluck.report.sentences import describe
from potluck.spec.events import LoopAwaited, RunEvent
from potluck.spec.messages import HelloMessage, Source, WelcomeMessage
from potluck.train.admitting import send_away
from potluck.wire.frames import FROM_GUEST, pack
from potluck.wire.keys import new_keys
from potluck.wire.token import Token
from potluck.wire.transport import HostSocket
from support.fleet import JOB, Fleet

DEADLINE_S = 20.0


class House:
    """A host's socket with a waiting room, and guests' links to it."""

    def __init__(self, say_after_s: float = 60.0) -> None:
        keys = new_keys()
        self.socket = HostSocket(bind="127.0.0.1", port=0, keys=keys)
        self.events: list[RunEvent] = []
        self.told = threading.Event()
        self.room = WaitingRoom(self.socket, what="job.py", emit=self.emit, say_after_s=say_after_s)
        self.room.start()
        self.token = Token(
            addresses=("127.0.0.1",), port=self.socket.port, host_public=keys.public, guest_secret=keys.guest_secret
        )
        self.preparing: list[str] = []
        self.waits = threading.Event()

    def emit(self, event: RunEvent) -> None:
        self.events.append(event)
        self.told.set()

    def guest(self) -> GuestLink:
        link = GuestLink(self.token, HelloMessage(name="ann"))
        link.preparing = lambda reason: (self.preparing.append(reason), self.waits.set())[0]
        return link

    def close(self) -> None:
        self.room.close("over")
        self.socket.close()


@pytest.fixture
def house() -> Iterator[House]:
    made = House()
    yield made
    made.close()


def connected(link: GuestLink, timeout_s: float) -> tuple[threading.Thread, list[Any]]:
    """Its connect() in a thread, and what that returned or raised."""
    outcome: list[Any] = []

    def connect() -> None:
        try:
            outcome.append(link.connect(timeout_s))
        except Exception as error:
            outcome.append(error)

    thread = threading.Thread(target=connect)
    thread.start()
    return thread, outcome


def test_a_guest_that_is_asked_to_wait_does_so_as_long_as_the_host_speaks(house: House) -> None:
    link = house.guest()
    thread, outcome = connected(link, timeout_s=DEADLINE_S)
    assert house.waits.wait(DEADLINE_S)
    until, deadline = link._answer_by, time.monotonic() + DEADLINE_S
    while link._answer_by <= until:  # its patience with a silent host begins anew with each word
        assert thread.is_alive()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    ((peer, frames),) = house.room.hand_over()
    assert FROM_GUEST.read(frames).message.kind == "hello"
    words = dict.fromkeys(("name", "host", "run", "codec", "codec_down"), "x")
    welcome = WelcomeMessage(**words, versions={}, source=Source(recipe="gpt"))
    house.socket.send(peer, pack(welcome))
    while thread.is_alive() and time.monotonic() < deadline:
        house.socket.receive(0.05)  # as the hub does
    assert [type(o).__name__ for o in outcome] == ["Received"]
    assert house.preparing == ["job.py has not reached its training loop yet"]
    link.close()
    thread.join()


def test_one_that_waits_hears_that_there_will_be_no_training(house: House) -> None:
    thread, outcome = connected(house.guest(), timeout_s=DEADLINE_S)
    assert house.waits.wait(DEADLINE_S)
    house.room.close("job.py\x1b[2J ended without reaching run.steps()")
    thread.join(DEADLINE_S)
    (error,) = outcome
    assert isinstance(error, HostGoneError)
    assert "the run ended before its training began: job.py [2J ended without reaching" in error.what


def test_after_a_while_the_person_at_the_host_is_told() -> None:
    house = House(say_after_s=0.0)
    try:
        assert house.told.wait(DEADLINE_S)
    finally:
        house.close()
    (event,) = house.events
    assert isinstance(event, LoopAwaited)
    assert (event.what, event.guests) == ("job.py", 0)
    message = describe(LoopAwaited(what=event.what, seconds=61.0, guests=2))
    assert message is not None
    assert message.text == "job.py has not reached run.steps() after 1 min 01 s: 2 guests wait until it does"


@pytest.mark.parametrize(
    ("error", "began", "reason"),
    [
        (None, False, "job.py ended without reaching run.steps()"),
        (SystemExit(0), False, "job.py ended without reaching run.steps()"),
        (LoopError("ended"), False, "job.py ended without reaching run.steps()"),
        (LoopError("two optimizers"), True, "job.py failed before its first step"),
        (ScriptError("a bug"), False, "job.py failed before its first step"),
        (KeyboardInterrupt(), False, "it was stopped there"),
    ],
)
def test_the_reason_is_that_of_its_end(error: BaseException | None, began: bool, reason: str) -> None:
    said: list[str] = []
    waiting: Any = SimpleNamespace(close=said.append)
    send_away(waiting, "job.py", error, began=began)
    assert said == [reason]


def test_a_script_without_a_training_loop_says_so_and_tells_its_guests(tmp_path: Path) -> None:
    script, end = tmp_path / "alone.py", tmp_path / "end"
    script.write_text(
        "import pathlib, sys, time\n"
        f"while not pathlib.Path({str(end)!r}).exists(): time.sleep(0.02)\n"
        "print('trained')\n"
        "sys.exit(0)\n"
    )
    with Fleet(tmp_path / "fleet") as fleet:
        host = fleet.host(script)
        ann = fleet.guest("ann")
        ann.wait_for_text(r"connected; alone\.py has not reached its training loop yet: waiting", 40)
        end.touch()
        host.exits_with(2, deadline_s=30)
        ann.exits_with(3, deadline_s=30)
        assert "error: alone.py ended without reaching run.steps(): if it trained" in host.stderr()
        assert "see: potluck explain bad-loop" in host.stderr()
        assert "the run ended before its training began: alone.py ended without reaching" in ann.stderr()


def test_a_guest_that_came_early_takes_part(tmp_path: Path) -> None:
    script, go = tmp_path / "slow.py", tmp_path / "go"
    script.write_text(
        "import pathlib, time, potluck\n"
        "if potluck.start().is_host:\n"
        f"    while not pathlib.Path({str(go)!r}).exists(): time.sleep(0.02)\n" + JOB.read_text().split('"""', 2)[2]
    )
    text = script.read_text().replace("from __future__ import annotations\n", "")
    script.write_text("from __future__ import annotations\n" + text)
    with Fleet(tmp_path / "fleet") as fleet:
        host = fleet.host(script, "--wait-for", "1", arguments=["--steps", "3"])
        ann = fleet.guest("ann")
        ann.wait_for_text("has not reached its training loop yet", 40)
        go.touch()
        host.succeeds(deadline_s=40)
        ann.succeeds(deadline_s=20)
        assert fleet.events("guest_hello", "ann")
