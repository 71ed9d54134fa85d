"""Files of faults: their keys, what is said about a wrong one, the schedule, and what a run's faults came to."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import cast

import msgspec
import pytest

from potluck.checked import to_json
from potluck.cli import _app
from potluck.errors import ConfigError
from potluck.lab import detour
from potluck.lab import faults as built_in
from potluck.lab.aftermath import aftermath
from potluck.lab.box import Box
from potluck.lab.figures import results
from potluck.lab.shaping import Fault
from potluck.lab.stage import Actor
from potluck.lab.striker import Striker
from potluck.report.lab_table import results_lines
from potluck.report.lab_timeline import draw_timeline, window_start
from potluck.spec import events as ev
from potluck.spec.faults import LINK_KINDS, FaultPlan, PlannedFault, loads
from potluck.spec.outcome import FaultDone, Incident, Outcome
from potluck.spec.results import Aftermath, Results
from potluck.spec.rig import Rig, parse
from support import lab_outcomes
from support import sample_events as sample
from support.rigs import wait_until

RIG = parse(
    {
        "name": "pair",
        "workload": {"steps": 12},
        "machine": [
            {"name": "desk", "role": "host", "seconds_per_sample": 0.1},
            {"name": "laptop", "seconds_per_sample": 0.2, "link_mbit": 100},
        ],
    }
)


def plan(text: str, rig: Rig = RIG) -> FaultPlan:
    return loads(text, "f.toml").on(rig)


# -- the file -------------------------------------------------------------------------------------------


def test_a_file_with_everything() -> None:
    found = plan(
        """
        about = "an evening"
        [[fault]]
        machine = "laptop"
        kind = "limit"
        at_step = 5
        for-s = 8
        mbit = 2
        direction = "up"
        [[fault]]
        kind = "delay"
        at_s = 12.5
        for_s = 1
        delay_ms = 300
        [[fault]]
        kind = "kill"
        at_step = 1
        return_after_s = 0
        """
    )
    limit, delay, kill = found.faults
    assert (limit.at_step, limit.for_s, limit.amount, limit.direction) == (5, 8.0, 250_000.0, "up")
    assert (delay.machine, delay.at_s, delay.amount) == ("laptop", 12.5, 0.3)
    assert kill.return_after_s == 0
    assert [f.text for f in found.faults] == [
        "link at 2 Mbit/s for 8 s, upwards only",
        "link 300 ms later for 1 s",
        "killed, started again after 0 s",
    ]


@pytest.mark.parametrize(
    ("text", "what", "hint"),
    [
        ("", "no faults", "[[fault]]"),
        ("[[fault]", "not a TOML file", "[[fault]]"),
        ("[fault]\nkind='stop'", "f.toml:1: fault is {", "two brackets"),
        ("[[faults]]\nkind='stop'", "no key 'faults'", "did you mean fault"),
        ("about = 3\n[[fault]]", "f.toml:1: about is 3", "text"),
        ("[[fault]]\nat_step = 1", "f.toml:1: fault number 1: kind is missing", "blackhole"),
        (
            "[[fault]]\nkind='blackhol'\nat_step=1\nfor_s=1",
            "f.toml:2: fault number 1: kind is",
            "mean blackhole?",
        ),
        (
            "[[fault]]\nkind='stop'\nat_stepp=1\nfor_s=1",
            "f.toml:3: fault number 1: there is no key 'at_stepp'",
            "did you mean at_step",
        ),
        ("[[fault]]\nkind='stop'\nfor_s=1", "neither at_step nor at_s", "at_step = 6"),
        ("[[fault]]\nkind='stop'\nat_s=1\nat_step=1\nfor_s=1", "both", "once"),
        ("[[fault]]\nkind='stop'\nat_step=1", "for_s is missing", "for_s"),
        ("[[fault]]\nkind='limit'\nat_step=1\nfor_s=1", "mbit is missing", "mbit = "),
        ("[[fault]]\nkind='stop'\nat_step=1\nfor_s=1\nmbit=3", "mbit does not apply", "limit"),
        ("[[fault]]\nkind='stop'\nat_step=1\nfor_s=1\ndirection='up'", "direction does not apply", "delay"),
        ("[[fault]]\nkind='kill'\nat_step=1\nfor_s=1", "for_s does not apply", "return_after_s"),
        ("[[fault]]\nkind='stop'\nat_step=0\nfor_s=1", "at_step is 0", "from 1"),
        (
            "[[fault]]\nkind='stop'\nat_s=inf\nfor_s=1",
            "f.toml:3: fault number 1: at_s",
            "from 0 to 1e+06 (seconds)",
        ),
        ("[[fault]]\nkind='stop'\nat_s='soon'\nfor_s=1", "at_s is 'soon'", "a number"),
        ("[[fault]]\nmachine='desk'\nkind='stop'\nat_s=1\nfor_s=1", "which is the host", "laptop"),
        ("[[fault]]\nmachine='labtop'\nkind='stop'\nat_s=1\nfor_s=1", "no machine 'labtop'", "mean laptop?"),
        ("[[fault]]\nkind='stop'\nat_step=13\nfor_s=1", "makes 12 steps", "--steps"),
    ],
)
def test_what_is_said_about_a_wrong_one(text: str, what: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        plan(text)
    assert what in caught.value.what
    assert hint in caught.value.hint


@pytest.mark.parametrize("name", built_in.NAMES)
def test_the_built_in_ones_fit_a_rig(name: str) -> None:
    found = built_in.load(name).on(RIG)
    assert found.about
    assert found.faults


def test_one_that_does_not_exist_or_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="bad-wfi") as caught:
        built_in.load("bad-wfi")
    assert "did you mean bad-wifi" in caught.value.hint
    with pytest.raises(ConfigError, match="cannot read"):
        built_in.load(str(tmp_path / "none.toml"))
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe\0")
    with pytest.raises(ConfigError, match="not a text file"):
        built_in.load(str(tmp_path / "bytes.toml"))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--faults", "sleepy"], "did you mean sleepy-laptop"),
        (["--faults", "bad-wifi", "--strategy", "ddp"], "affects only potluck"),
        (["--faults", "bad-wifi", "--steps", "4"], "bad-wifi: a fault at step 5, but the run makes 4 steps"),
    ],
)
def test_the_command_says_it_before_anything_runs(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    assert _app.run(["lab", "bench", "home-pair", "--loopback", "--out", str(out), *words]) == 2
    assert said in capsys.readouterr().err
    assert not out.exists()


# -- the schedule ---------------------------------------------------------------------------------------


class FakeBox:
    def __init__(self) -> None:
        self.faults: list[tuple[str, Fault]] = []

    def add_faults(self, machine: str, faults: Sequence[Fault]) -> None:
        self.faults += [(machine, fault) for fault in faults]


class Sleepers:
    """Guests that do nothing."""

    def __init__(self) -> None:
        self.actors: dict[str, Actor] = {}
        self.starts = 0
        self.start("laptop")

    def actor(self, machine: str) -> Actor | None:
        return self.actors.get(machine)

    def kill(self, machine: str) -> None:
        actor = self.actors.pop(machine)
        actor.process.kill()
        actor.process.wait()

    def start(self, machine: str) -> None:
        process = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)"])
        self.actors[machine] = Actor(machine, process, Path("none"))
        self.starts += 1

    def state(self) -> str:
        text = Path(f"/proc/{self.actors['laptop'].process.pid}/stat").read_text()
        return text.rpartition(")")[2].split()[0]


class Scene:
    def __init__(self, text: str) -> None:
        self.now = 100.0
        self.box, self.guests = FakeBox(), Sleepers()
        self.striker = Striker(plan(text).faults, cast(Box, self.box), self.guests, lambda: self.now)

    def event(self, event: ev.RunEvent) -> None:
        self.striker.saw(msgspec.structs.replace(event, t_s=self.now - 90.0))


@pytest.fixture(name="scene")
def _scene(request: pytest.FixtureRequest) -> Iterator[Scene]:
    scene = Scene(request.param)
    yield scene
    scene.striker.close()
    for machine in list(scene.guests.actors):
        scene.guests.kill(machine)


LINKS = "\n".join(
    f"[[fault]]\nkind='{kind}'\nat_s={number}\nfor_s=1\n"
    + {"delay": "delay_ms=5\n", "limit": "mbit=1\n"}.get(kind, "")
    for number, kind in enumerate(LINK_KINDS)
)


@pytest.mark.parametrize("scene", [LINKS], indirect=True)
def test_faults_of_links_go_to_the_box_at_their_time(scene: Scene) -> None:
    scene.striker.tick()
    assert scene.box.faults == []  # the run has not begun
    scene.event(sample.run_start(clock_s=90.0))
    for number in range(len(LINK_KINDS)):
        assert [fault.kind for _, fault in scene.box.faults] == list(LINK_KINDS[: number + 1])
        scene.now += 1.0
        scene.striker.tick()
    assert scene.striker.missed == 0
    assert [(f.start, f.end) for f in scene.striker.done][:2] == [(100.0, 101.0), (101.0, 102.0)]
    assert scene.guests.actors["laptop"].expendable


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc (Linux)")
@pytest.mark.parametrize("scene", ["[[fault]]\nkind='stop'\nat_step=3\nfor_s=5"], indirect=True)
def test_a_stopped_guest_goes_on_when_its_time_is_over_and_at_the_end(scene: Scene) -> None:
    scene.event(sample.run_start(clock_s=90.0))
    scene.event(sample.step(1))
    assert scene.striker.done == []
    scene.event(sample.step(2))
    assert wait_until(lambda: scene.guests.state() == "T")
    scene.now += 4.9
    scene.striker.tick()
    assert scene.guests.state() == "T"
    scene.now += 0.2
    scene.striker.tick()
    assert wait_until(lambda: scene.guests.state() != "T")
    assert [(f.step, f.kind) for f in scene.striker.done] == [(3, "stop")]


@pytest.mark.parametrize("scene", ["[[fault]]\nkind='kill'\nat_step=2\nreturn_after_s=3"], indirect=True)
def test_a_killed_guest_is_started_again_and_what_the_host_says_is_kept(scene: Scene) -> None:
    first = scene.guests.actors["laptop"]
    scene.event(sample.run_start(clock_s=90.0))
    scene.event(sample.joined())
    scene.event(sample.step(1))
    assert first.process.returncode is not None
    scene.now += 1.0
    scene.event(ev.GuestLost(**sample.LAPTOP, reason="is gone", step=2, samples_taken_back=7))
    scene.now += 2.0
    scene.striker.tick()
    assert scene.guests.starts == 2
    scene.event(sample.joined())
    told = [(i.kind, i.at, i.samples) for i in scene.striker.incidents]
    assert told == [("guest_lost", 101.0, 7), ("guest_joined", 103.0, 0)]


@pytest.mark.parametrize("scene", ["[[fault]]\nkind='stop'\nat_step=9\nfor_s=5"], indirect=True)
def test_a_fault_whose_time_never_came_is_told(scene: Scene) -> None:
    scene.event(sample.run_start(clock_s=90.0))
    assert scene.striker.missed == 1


# -- what is shown --------------------------------------------------------------------------------------


def struck() -> Outcome:
    """A made-up run of potluck with a fault in its third step."""
    outcome = lab_outcomes.potluck(RIG)
    at = outcome.steps[1].ended_at + 0.1
    outcome.faults.append(
        FaultDone(machine="laptop", kind="stop", step=3, start=at, end=at + 4.0, text="stopped (SIGSTOP) for 4 s")
    )
    outcome.incidents.extend(
        [
            Incident(machine="laptop", kind="lease_taken_back", at=at + 1, step=3, samples=5),
            Incident(machine="laptop", kind="guest_lost", at=at + 2, step=3, samples=2),
            Incident(machine="laptop", kind="guest_joined", at=at + 4.5, step=4),
        ]
    )
    return outcome


def results_of(outcomes: Sequence[Outcome]) -> Results:
    return results(RIG, outcomes, {"desk": 10.0, "laptop": 5.0}, 3.2, 2, "loopback")


def test_what_a_run_with_faults_came_to() -> None:
    found = aftermath(struck(), warm_up=2)
    assert found is not None
    assert (found.taken_back_samples, found.lost, found.rejoined) == (7, {"laptop": 1}, {"laptop": 1})
    assert found.longest_absence_s == pytest.approx(2.5)
    assert found.applied[0].start == pytest.approx(struck().steps[1].ended_at + 0.1 - struck().started_at, abs=1e-3)
    assert msgspec.json.decode(to_json(found), type=Aftermath) == found
    assert aftermath(lab_outcomes.potluck(RIG), warm_up=2) is None


def test_the_table_the_json_and_the_timeline_tell_of_it() -> None:
    outcomes = [lab_outcomes.solo(RIG), struck()]
    found = results_of(outcomes)
    text = "\n".join(line.plain for line in results_lines(found, 80))
    assert "step 3: laptop stopped (SIGSTOP) for 4 s" in text
    assert "laptop lost 1×, back 1×; away for 2.5 s at the longest" in text
    assert "7 samples" in text
    assert json.loads(to_json(found))["faults"]["applied"][0]["kind"] == "stop"
    assert json.loads(to_json(results_of([lab_outcomes.solo(RIG)])))["faults"] is None
    start = window_start(outcomes[1], 5.0, 2)
    assert start == outcomes[1].steps[1].ended_at
    figure = draw_timeline(found, outcomes)
    assert figure is not None
    assert " stop" in [text.get_text() for text in figure.axes[0].texts]


def test_a_planned_fault_names_what_it_does() -> None:
    assert PlannedFault(kind="reset", at_step=1).text == "connections reset"
    assert PlannedFault(kind="kill", at_step=1).text == "killed"


def test_the_folders_of_owners_that_were_killed_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    gone = subprocess.Popen([sys.executable, "-S", "-c", ""])
    gone.wait()
    dead, ours, other = (
        tmp_path / f"{detour.PREFIX}{name}" for name in (f"{gone.pid}-x", f"{os.getpid()}-x", "me-x")
    )
    for folder in (dead, ours, other):
        folder.mkdir()
    detour.remove_leftovers(detour.PREFIX)
    assert not dead.exists()
    assert ours.exists()
    assert other.exists()
