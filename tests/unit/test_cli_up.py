"""The command line of `potluck up`, and how many machines' lines become one log."""

from __future__ import annotations

import io
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from potluck.cli import _app
from potluck.cli.host import host
from potluck.cli.up import _FOR_HOST, _resumed_by, _work
from potluck.fleet.checking import FleetCheck
from potluck.report.merged_log import MergedLog
from potluck.spec.fleet_file import NamedMachine


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (["up"], 2, "MACHINES"),
        (["up", "desk"], 2, "no script was given"),
        (["up", "desk", "--host", "mac", "--", "x.py"], 2, "the machines are: desk"),
        (["up", "desk", "--only", "mac", "--", "x.py"], 2, "--only 'mac'"),
        (["up", "no-such.toml", "--", "x.py"], 2, "cannot read no-such.toml"),
        (["up", "desk", "--", "no_such.py"], 2, "cannot read no_such.py"),
        (["up", "deep.json", "--", "x.py"], 2, "deep.json is not a host file"),
        (["up", "desk", "--with", ";rm", "--", "gpt"], 2, "--with"),
        (["up", "desk", "--send", "m.py", "--", "gpt"], 2, "--send works only with a script"),
        (["up", "desk", "--fleet", "ray", "--host", "node", "--", "x.py"], 2, "takes only Ray nodes as guests"),
        (["up", "--fleet", "ray", "--check"], 2, "checks only machines of ssh"),
    ],
)
def test_mistakes_are_said_before_anything_starts(
    words: list[str], status: int, said: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "deep.json").write_text("[" * 100_000)
    assert _app.run(words) == status
    assert said in capsys.readouterr().err
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("silent", [set(), {"desk"}])
def test_a_check_without_an_answer_is_no_success(silent: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def look(checking: FleetCheck, *given: object) -> list[str]:
        checking.silent |= silent
        return ["desk"]

    monkeypatch.setattr(FleetCheck, "look", look)
    assert _app.run(["up", "desk", "--check"]) == len(silent)


def work(machine: NamedMachine, *after: str, **flags: Any) -> Any:
    fleet: Any = SimpleNamespace(machine=lambda name: machine)
    return _work(
        fleet, machine.name, Path("runs"), after, "again", {**dict.fromkeys(_FOR_HOST), "send": (), **flags}
    )


def test_what_follows_the_dashes_is_the_scripts_and_the_other_options_are_the_hosts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    here = NamedMachine(name="here")
    found = work(here, "t.py", "--steps", "5", codec="int8", log=("wandb", "mlflow"), send=(Path("m.py"),))
    head = ["-m", "potluck", "host", "--view", "plain", "--launched", "again"]
    assert found.words == [
        *head,
        *("--codec", "int8", "--log", "wandb", "--log", "mlflow"),
        *("--runs", str(tmp_path / "runs"), "--send", "m.py", "t.py", "--", "--steps", "5"),
    ]
    assert (found.cwd, found.runs, found.files) == (str(tmp_path), str(tmp_path / "runs"), {})
    words = work(here, "t.py", web="127.0.0.1").words[3:]
    assert host.make_context("host", words).params["web"] == "127.0.0.1"  # as the host's own command reads it
    assert work(here, "gpt", "--steps", "5").words[-3:] == ["gpt", "--steps", "5"]  # a recipe has no --


def test_a_host_elsewhere_gets_the_script_and_what_goes_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = tmp_path / "project"
    (project / "layers").mkdir(parents=True)
    (project / "t.py").write_text("1")
    (project / "layers" / "a.py").write_text("2")
    monkeypatch.chdir(project)
    found = work(NamedMachine(ssh="d", name="desk"), "t.py", "-x", send=(Path("layers/a.py"),))
    assert found.files == {"~/potluck/project/t.py": b"1", "~/potluck/project/layers/a.py": b"2"}
    assert (found.cwd, found.runs) == ("~/potluck/project", "~/potluck/project/runs")
    assert found.words[7:] == ["--name", "desk", "--send", "layers/a.py", "./t.py", "--", "-x"]


def test_the_command_that_resumes_is_the_same_one() -> None:
    before = ["desk", "me@mac", "--resume", "runs/1", "--codec", "int8", "--resume=runs/2"]
    assert (
        _resumed_by(before, ["my train.py", "-x"])
        == "potluck up desk me@mac --codec int8 --resume {run} -- 'my train.py' -x"
    )
    # A recipe's settings are in the run folder, and cannot be given again.
    assert _resumed_by(["desk"], ["gpt", "--depth", "3"]) == "potluck up desk --resume {run} -- gpt"


def wait_for(stream: io.StringIO, text: str) -> None:
    deadline = time.monotonic() + 10
    while text not in stream.getvalue():
        assert time.monotonic() < deadline, stream.getvalue()
        time.sleep(0.01)


def test_lines_of_many_machines_are_one_log_and_its_files_are_complete(tmp_path: Path) -> None:
    stream = io.StringIO()
    log = MergedLog(tmp_path / "first", ["mac", "laptop"], stream)
    mac, laptop = tmp_path / "first" / "mac.log", tmp_path / "first" / "laptop.log"
    mac.write_bytes(b"one\n  two \x1b[31m\xff\nhal")
    wait_for(stream, "two")
    log.keep_in(tmp_path / "run" / "logs")
    with mac.open("ab") as file:
        file.write(b"f\n")
    laptop.write_bytes(b"three")  # its last line has no end
    wait_for(stream, "half")
    log.show("laptop", "is started again")
    assert log.close() == tmp_path / "run" / "logs"
    assert stream.getvalue().splitlines() == [
        "mac    | one",
        "mac    |   two  [31m?",
        "mac    | half",
        "laptop | is started again",
        "laptop | three",
    ]
    assert not (tmp_path / "first").exists()
    assert (tmp_path / "run" / "logs" / "mac.log").read_bytes() == b"one\n  two \x1b[31m\xff\nhalf\n"
    assert (tmp_path / "run" / "logs" / "laptop.log").read_bytes() == b"three"


def test_only_some_machines_are_shown_and_all_are_kept(tmp_path: Path) -> None:
    stream = io.StringIO()
    log = MergedLog(tmp_path / "logs", ["mac", "laptop"], stream, only=("mac",))
    (tmp_path / "logs" / "laptop.log").write_text("hidden\n")
    (tmp_path / "logs" / "mac.log").write_text("shown\n")
    assert log.close() == tmp_path / "logs"
    assert stream.getvalue() == "mac    | shown\n"
    assert (tmp_path / "logs" / "laptop.log").read_text() == "hidden\n"
