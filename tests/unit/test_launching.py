"""What a launcher decides: who is started again, who is given up, what Ctrl-C does. No processes."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from potluck.errors import MachineError
from potluck.fleet import launching
from potluck.fleet.interface import GuestEnd, GuestSettings
from potluck.fleet.launching import HostWork, Launcher
from potluck.spec.finding import BLOCKER, Finding
from potluck.spec.fleet_file import NamedMachine

RUNS = GuestEnd(0, "")


def finding(machine: str, code: str) -> Finding:
    return Finding(code=code, severity=BLOCKER, machine=machine, what=code, how="x", breaks="x", fix="x")


class Task:
    """A process, as a launcher sees it; it ends when told to, or when asked to."""

    def __init__(self, end: GuestEnd | None = None, token: str = "") -> None:
        self.fed = ""
        self._ended = threading.Event()
        self._end = end
        self.found = threading.Event()
        self.run, self.token = "runs/1", token
        self.signals: list[int] = []
        if token:
            self.found.set()
        if end is not None:
            self._ended.set()

    def finish(self, status: int | None = 0, why: str = "") -> None:
        self._end = self._end or GuestEnd(status, why)
        self._ended.set()

    def wait(self, timeout_s: float) -> GuestEnd | None:
        return self._end if self._ended.wait(timeout_s) else None

    def end(self, patience_s: float = 2.0) -> GuestEnd:
        self.finish(-9, "killed")
        assert self._end is not None
        return self._end

    def feed(self, text: str) -> None:
        self.fed += text

    def signal(self, number: int) -> None:
        self.signals.append(number)


class World:
    """A fleet in which each machine's starts end as `ends` says; a code in place of an end is a finding."""

    def __init__(self, ends: dict[str, list[GuestEnd | str | None]], slots: int = 1, gpus: int = 0) -> None:
        self.ends, self._slots, self._gpus = ends, slots, gpus
        self.host = Task(token="potluck3-x")
        self.guests: dict[str, list[Task]] = {name: [] for name in ends}
        self.settings: list[GuestSettings] = []
        self.told: list[tuple[str, str]] = []
        self.found: list[str] = []
        self.closed = False

    # the fleet
    def machine(self, name: str) -> NamedMachine:
        return NamedMachine(ssh=name, name=name, slots=self._slots)

    def reach(self, name: str) -> Any:
        if name in self.ends and self.ends[name] and isinstance(self.ends[name][0], str):
            error = MachineError(f"{name} is broken")
            error.findings = (finding(name, str(self.ends[name].pop(0))),)
            raise error
        return SimpleNamespace(facts=SimpleNamespace(gpus=self._gpus), findings=())

    def in_place(self, name: str) -> bool:
        return True

    starts_early = in_place
    prepare = reach

    def log(self, name: str) -> Path:
        return Path("/nowhere")

    def run(self, machine: str, words: Sequence[str], log: Path, **more: Any) -> Task:
        return self.host

    def start(self, machine: str, token: str, settings: GuestSettings, log: Path) -> Task:
        self.settings.append(settings)
        end = self.ends[machine].pop(0) if self.ends[machine] else None
        assert not isinstance(end, str)
        self.guests[machine].append(Task(end))
        self.guests[machine][-1].fed = f"{token}\n" if token else ""
        return self.guests[machine][-1]

    def close(self) -> None:
        self.closed = True
        for tasks in self.guests.values():
            for task in tasks:
                task.finish(-15, "closed")

    # the observer
    def problems(self, findings: Sequence[Finding]) -> None:
        self.found += [found.code for found in findings]

    def tell(self, machine: str, words: str) -> None:
        self.told.append((machine, words))

    def run_known(self, run: str) -> None:
        assert run == "runs/1"


@pytest.fixture(autouse=True)
def _quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching, "AGAIN_S", (0.01,))
    monkeypatch.setattr(launching, "GOODBYE_S", 0.2)


def launched(world: World, until: Callable[[], object], *, keep_trying: bool = False) -> tuple[Launcher, int]:
    """Run until this is so, then end the host well."""
    work = HostWork(machine="here", words=[], cwd="", runs="")
    launcher = Launcher(world, list(world.ends), work, world, keep_trying=keep_trying)  # type: ignore[arg-type]
    wait = threading.Thread(target=lambda: (_wait(until), world.host.finish()))
    wait.start()
    try:
        return launcher, launcher.run()
    finally:
        wait.join()
        assert world.closed


def _wait(until: Callable[[], object]) -> None:
    deadline = time.monotonic() + 20
    while not until() and time.monotonic() < deadline:
        time.sleep(0.005)


def test_a_guest_that_loses_its_connection_or_its_life_is_started_again() -> None:
    world = World({"desk": [GuestEnd(None, "the connection was closed"), GuestEnd(-9, "was killed"), None]})
    launcher, status = launched(world, lambda: len(world.guests["desk"]) == 3)
    assert status == 0
    assert launcher.first_error == ("desk", "the connection was closed")
    assert world.told.count(("desk", "is started again")) == 2


@pytest.mark.parametrize("status", [0, 1, 2])
def test_a_guest_that_left_or_made_a_mistake_is_not(status: int) -> None:
    world = World({"desk": [GuestEnd(status, "why")], "mac": [None]})
    launched(world, lambda: world.guests["mac"] and world.guests["desk"] and time.sleep(0.2) is None)
    assert len(world.guests["desk"]) == 1


@pytest.mark.slow
def test_one_that_fails_again_and_again_is_given_up() -> None:
    world = World({"desk": [GuestEnd(-9, "killed")] * 100, "mac": [None]})
    launched(world, lambda: any("given up" in words for _, words in world.told))
    assert len(world.guests["desk"]) == launching.MOST_AGAIN + 1


def test_with_keep_trying_nobody_is_given_up_and_a_machine_that_comes_later_takes_part() -> None:
    world = World({"desk": ["ssh-refused"] * 12 + [GuestEnd(2, "x"), None]})
    _, status = launched(world, lambda: len(world.guests["desk"]) == 2, keep_trying=True)
    assert status == 0
    assert world.found == ["ssh-refused"]  # once, not twelve times


def test_host_and_guests_start_before_they_know_of_each_other() -> None:
    """They import torch meanwhile: the host begins when a machine can be used, a guest gets the token then."""
    world = World({"desk": [None], "mac": []})
    world.host.token = ""
    world.host.found.clear()
    reach, looks = world.reach, threading.Event()

    def slow(name: str) -> Any:
        assert name == "here" or looks.wait(20)
        return reach(name)

    world.reach = world.prepare = slow  # type: ignore[method-assign]

    def then() -> bool:
        if not looks.is_set():
            assert not world.host.fed
            looks.set()
        if world.guests["desk"] and world.host.fed and not world.host.token:
            assert not world.guests["desk"][0].fed
            world.host.token = "potluck3-x"
            world.host.found.set()
        return bool(world.guests["desk"] and world.guests["desk"][0].fed)

    launched(world, then)
    assert world.host.fed == "\n"
    assert world.guests["desk"][0].fed == "potluck3-x\n"


def test_without_it_the_broken_are_named_together_and_the_others_start() -> None:
    world = World({"desk": ["no-python"], "attic": ["disk-full"], "mac": [None]})
    _, status = launched(world, lambda: len(world.found) == 2 and world.guests["mac"])
    assert status == 0
    assert sorted(world.found) == ["disk-full", "no-python"]
    assert not world.guests["desk"] + world.guests["attic"]


def test_without_a_usable_machine_the_host_does_not_start() -> None:
    world = World({"desk": ["no-python"], "attic": ["disk-full"]})
    with pytest.raises(MachineError, match="none of 2 machines"):
        launched(world, lambda: world.closed)
    assert not world.host.fed  # so it has not begun
    assert sorted(world.found) == ["disk-full", "no-python"]


def test_the_first_ctrl_c_lets_the_host_save_and_the_second_ends_all_at_once() -> None:
    world = World({"desk": [None]})
    work = HostWork(machine="here", words=[], cwd="", runs="")
    launcher = Launcher(world, ["desk"], work, world, keep_trying=False)  # type: ignore[arg-type]

    def press() -> None:
        _wait(lambda: world.guests["desk"] and world.guests["desk"][0].fed)
        launcher.interrupt()
        _wait(lambda: world.host.signals)
        assert world.host.wait(0.0) is None
        launcher.interrupt()

    pressing = threading.Thread(target=press)
    pressing.start()
    assert launcher.run() == 130
    pressing.join()
    assert launcher.cut_off  # the host could not say how to go on
    assert world.host.signals == [signal.SIGINT]
    assert [words for name, words in world.told if not name] == [
        "stopping: the host saves first (press Ctrl-C again to stop immediately)",
        "stopping at once",
    ]


def test_a_status_of_the_host_is_the_launchers() -> None:
    world = World({"desk": [None]})
    world.host.finish(5, "ended with status 5: boom")
    launcher, status = launched(world, lambda: True)
    assert status == 5
    assert launcher.first_error == ("here", "ended with status 5: boom")


def test_slots_are_guests_for_gpus() -> None:
    world = World({"desk": [None] * 4}, slots=4, gpus=2)
    launched(world, lambda: len(world.settings) == 2 and time.sleep(0.1) is None)
    found = sorted((settings.name, settings.device) for settings in world.settings)
    assert found == [("desk", "cuda:0"), ("desk-2", "cuda:1")]


def test_a_machine_that_comes_gets_a_guest_and_one_that_goes_is_forgotten() -> None:
    world = World({"desk": [GuestEnd(None, "lost")] * 50, "late": []})
    work = HostWork(machine="here", words=[], cwd="", runs="")
    launcher = Launcher(world, [], work, world, keep_trying=True)  # type: ignore[arg-type]
    running = threading.Thread(target=launcher.run)
    running.start()
    launcher.add("desk")
    _wait(lambda: len(world.guests["desk"]) >= 2)
    launcher.drop("desk")
    launcher.add("late")
    _wait(lambda: world.guests["late"])
    tries = len(world.guests["desk"])
    launcher.add("desk")  # it came back
    _wait(lambda: len(world.guests["desk"]) > tries + 1)
    launcher.drop("desk")
    world.host.finish()
    running.join(10)
    assert not running.is_alive()
    assert world.closed
    assert not any(thread.name.startswith("potluck-tend") for thread in threading.enumerate())


def test_a_machine_that_is_lost_while_something_is_installed_there_is_tried_again() -> None:
    world = World({"desk": [None]})
    world.in_place = lambda name: False  # type: ignore[method-assign]
    reach, lost = world.reach, ["ssh-lost", "ssh-unreachable"]

    def prepare(name: str) -> Any:
        if name == "desk" and lost:
            world.ends["desk"].insert(0, lost.pop(0))
        return reach(name)

    world.prepare = prepare  # type: ignore[method-assign]
    launcher, status = launched(world, lambda: world.guests["desk"])
    assert status == 0
    assert launcher.first_error == ("desk", "desk is broken")
    assert world.found == ["ssh-lost"]


def test_a_guest_whose_token_becomes_known_while_it_starts_is_told() -> None:
    world = World({"desk": [None]})
    world.host.token = ""
    world.host.found.clear()
    start = world.start

    def slowly(*arguments: Any) -> Task:
        guest = start(*arguments)
        world.host.token = "potluck3-x"
        world.host.found.set()
        time.sleep(0.3)  # meanwhile the launcher hears of it
        return guest

    world.start = slowly  # type: ignore[method-assign]
    launched(world, lambda: world.guests["desk"] and world.guests["desk"][0].fed)
    assert world.guests["desk"][0].fed == "potluck3-x\n"


def interrupted(
    world: World, when: Callable[[], object], then: Callable[[], None] = lambda: None
) -> tuple[Launcher, int]:
    """Press Ctrl-C once."""
    work = HostWork(machine="here", words=[], cwd="", runs="")
    launcher = Launcher(world, list(world.ends), work, world, keep_trying=False)  # type: ignore[arg-type]

    def press() -> None:
        _wait(when)
        launcher.interrupt()
        then()

    pressing = threading.Thread(target=press)
    pressing.start()
    try:
        return launcher, launcher.run()
    finally:
        pressing.join()


@pytest.mark.parametrize("phase", ["reach", "prepare"])
def test_ctrl_c_waits_for_no_machine_that_is_being_looked_at_or_installed(
    phase: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launching, "GOODBYE_S", 20.0)
    world, closed = World({"desk": [None]}), threading.Event()
    world.in_place = lambda name: False  # type: ignore[method-assign]
    reach, close = world.reach, world.close
    began: list[str] = []

    def until_closed(name: str) -> Any:
        if name == "desk":
            began.append(name)
            assert closed.wait(30)
            raise MachineError("the launcher is ending")
        return reach(name)

    setattr(world, phase, until_closed)
    world.close = lambda: (closed.set(), close())  # type: ignore[method-assign, assignment]
    clock = time.monotonic()
    _, status = interrupted(world, lambda: began, lambda: (time.sleep(0.1), world.host.finish(130)))
    assert status == 130
    assert time.monotonic() - clock < 10


def test_a_host_that_ctrl_c_meets_after_its_end_has_not_failed() -> None:
    """Python's shutdown takes a moment, in which nothing handles the signal: it dies of it."""
    world = World({"desk": [None]})
    launcher, status = interrupted(
        world,
        lambda: world.guests["desk"] and world.guests["desk"][0].fed,
        lambda: (_wait(lambda: world.host.signals), world.host.finish(-signal.SIGINT, "was ended by signal 2")),
    )
    assert (status, launcher.first_error, launcher.cut_off) == (130, None, False)
