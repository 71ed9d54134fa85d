"""The command line's frame: help, errors, exit statuses; and `potluck report`."""

from __future__ import annotations

import errno
import io
import json
import os
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path

import click
import pytest

from potluck import errors
from potluck.checked import to_json
from potluck.cli import _app
from potluck.cli.train import show_end
from potluck.spec.facts import Case, Disk
from support import sample_events as sample
from support.healthy import linux
from support.processes import SOURCE


@pytest.fixture
def verb(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], object]], None]:
    """Puts a command `try` into the table whose body is the given function."""

    def install(body: Callable[[], object]) -> None:
        module = types.ModuleType("verb_for_a_test")

        @click.command()
        def command() -> object:
            return body()

        module.command = command  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, module.__name__, module)
        monkeypatch.setitem(_app.VERBS, "try", _app.Verb("verb_for_a_test:command", "For a test."))

    return install


def raises(error: BaseException) -> Callable[[], object]:
    def body() -> object:
        raise error

    return body


Verb = Callable[[Callable[[], object]], None]


def test_a_persons_error_is_three_lines_and_its_own_status(verb: Verb, capsys: pytest.CaptureFixture[str]) -> None:
    verb(raises(errors.DataError("there is no file x", hint="give another", machine="tower", step=3)))
    assert _app.run(["try"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == [
        "error: there is no file x [tower] [step 3]",
        "hint: give another",
        "see: potluck explain bad-data",
    ]


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (errors.UserError("x"), 2),
        (errors.NetworkError("x"), 3),
        (errors.PortTakenError("x"), 2),
        (errors.CheckpointError("x"), 2),
        (errors.WireError("x"), 1),
        (KeyboardInterrupt(), 130),
        (ZeroDivisionError("x"), 1),
        (click.UsageError("x"), 2),
    ],
)
def test_exit_statuses(verb: Verb, error: BaseException, status: int, capsys: pytest.CaptureFixture[str]) -> None:
    verb(raises(error))
    assert _app.run(["try"]) == status
    assert "Traceback" not in capsys.readouterr().err


def test_a_fault_of_ours_is_one_line(verb: Verb, capsys: pytest.CaptureFixture[str]) -> None:
    verb(raises(RuntimeError("first line\nsecond line")))
    assert _app.run(["try"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("internal error: RuntimeError: first line second line")
    assert "--debug" in line


@pytest.mark.parametrize("arguments", [["--debug", "try"], ["try", "--debug"]])
@pytest.mark.parametrize("error", [RuntimeError("x"), errors.UserError("x")])
def test_debug_shows_the_traceback_wherever_it_stands(
    verb: Verb, arguments: list[str], error: Exception, capsys: pytest.CaptureFixture[str]
) -> None:
    verb(raises(error))
    assert _app.run(arguments) == (2 if isinstance(error, errors.UserError) else 1)
    assert "Traceback" in capsys.readouterr().err


def test_debug_by_variable(verb: Verb, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POTLUCK_DEBUG", "1")
    verb(raises(RuntimeError("x")))
    _app.run(["try"])
    assert "Traceback" in capsys.readouterr().err


def test_a_verb_ends_with_0_or_the_status_it_returns(verb: Verb) -> None:
    verb(lambda: None)
    assert _app.run(["try"]) == 0
    verb(lambda: 7)
    assert _app.run(["try"]) == 7
    verb(lambda: click.get_current_context().exit(5))
    assert _app.run(["try"]) == 5


CLOSED_PIPES: dict[str, list[str]] = {
    "help": ["--help"],
    "help of a verb": ["plan", "--help"],
    "plan": ["plan", "home-pair"],
    "lab list": ["lab", "list"],
    "lab show": ["lab", "show", "home-pair"],
    "doctor": ["doctor", "--facts", "facts.json"],
    "doctor --json": ["doctor", "--facts", "facts.json", "--json"],
    "report": ["report", "run"],
}


@pytest.mark.skipif(os.name != "posix", reason="pipes of POSIX")
@pytest.mark.parametrize("what", CLOSED_PIPES)
def test_a_reader_that_has_seen_enough_ends_it_without_a_word(what: str, tmp_path: Path) -> None:
    """As `potluck plan home-pair | head -1`, with the status that a shell knows from other programs."""
    here = linux(disk=Disk(path="/x", writable=False))  # a blocker, whose status is another
    (tmp_path / "facts.json").write_text(to_json(Case(here=here)), encoding="utf-8")
    sample.write(tmp_path / "run", sample.whole_run())
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "potluck", *CLOSED_PIPES[what]],
            stdout=writer,
            stderr=subprocess.PIPE,
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(SOURCE)},
            timeout=60,
        )
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (_app.READER_GONE, b"")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="/dev/full, of Linux")
@pytest.mark.parametrize(
    "words", [["--help"], ["plan", "home-pair"], ["lab", "list", "--json"]], ids=lambda w: w[0]
)
def test_output_that_cannot_be_written_is_one_clear_line(words: list[str]) -> None:
    """As on a full disk."""
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [sys.executable, "-m", "potluck", *words],
            stdout=full,
            stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(SOURCE)},
            timeout=60,
        )
    assert done.returncode == 1
    assert done.stderr.decode().splitlines() == ["error: cannot write the output: No space left on device"]


def test_an_option_of_a_script_is_told_where_it_goes(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "s.py").touch()
    assert _app.run(["host", "s.py", "--epochs", "5"]) == 2
    assert (
        "hint: options of s.py go after --, for example: potluck host s.py -- --epochs" in capsys.readouterr().err
    )
    assert _app.run(["up", "desk", "s.py", "--epochs", "5"]) == 2
    assert "for example: potluck up desk -- s.py --epochs" in capsys.readouterr().err
    assert _app.run(["host", "--epochs", "5"]) == 2
    assert "hint:" not in capsys.readouterr().err


@pytest.mark.skipif(sys.platform == "win32", reason="a shell closes the stream")
@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_stream_that_was_closed_before_the_start_is_no_fault(closed: str) -> None:
    done = subprocess.run(
        ["sh", "-c", f'"$0" -m potluck --version {closed}', sys.executable],
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_another_pipe_that_breaks_is_no_reader_that_left(verb: Verb, capsys: pytest.CaptureFixture[str]) -> None:
    verb(raises(BrokenPipeError(errno.EPIPE, "Broken pipe")))
    assert _app.run(["try"]) == 1
    assert "internal error: RuntimeError: BrokenPipeError: [Errno 32] Broken pipe" in capsys.readouterr().err


def test_a_misspelt_variable_stops_every_verb(
    verb: Verb, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = []
    verb(lambda: ran.append(1))
    monkeypatch.setenv("POTLUCK_DEVIC", "cpu")
    assert _app.run(["try"]) == 2
    assert "POTLUCK_DEVICE" in capsys.readouterr().err
    assert not ran


def test_a_misspelt_verb_gets_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert _app.run(["trian"]) == 2
    assert "Did you mean 'train'?" in capsys.readouterr().err
    assert _app.run(["xyzzy"]) == 2
    assert "There are: train, host, join, " in capsys.readouterr().err


def test_help_lists_the_verbs_in_order_without_importing_them(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(_app.VERBS, "broken", _app.Verb("no_such_module:x", "Cannot be imported."))
    assert _app.run(["--help"]) == 0
    out = capsys.readouterr().out
    places = [out.index(f"\n  {name} ") for name in _app.VERBS]
    assert places == sorted(places)
    assert "Cannot be imported." in out


def test_every_command_shows_examples_of_itself() -> None:
    def look(group: click.Group, path: str) -> Iterator[str]:
        for name in group.list_commands(context):
            command = group.get_command(context, name)
            assert command is not None
            assert f"potluck{path} {name}" in (command.help or "").partition("Examples:")[2], name
            yield name
            if isinstance(command, click.Group):
                yield from look(command, f"{path} {name}")

    context = click.Context(_app.app)
    assert len(list(look(_app.app, ""))) > 15


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["host", "gpt", "--send", "model.py"], "--send works only with a script"),
        (["doctor", "--facts", "f.json", "--parameters", "124M"], "--parameters cannot be combined with --facts"),
        (["plan", "home-pair", "--precision", "fp32"], "--precision cannot be combined with a RIG"),
        (["plan", "home-pair", "--guests", "4", "--strategy", "ddp"], "--strategy cannot be combined with"),
    ],
)
def test_an_option_without_effect_is_refused(
    words: list[str],
    error: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "f.json").write_text("{}")
    assert _app.run(words) == 2
    assert f"error: {error}" in capsys.readouterr().err
    assert [file.name for file in tmp_path.iterdir()] == ["f.json"]


@pytest.mark.parametrize("rate", ["0", "-5", "nan", "inf"])
def test_a_link_of_the_lab_has_a_rate(rate: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A rate below 0 was measured as a link without a limit."""
    assert _app.run(["bench", "ddp", "--merge", "--lab", rate, "rows.json"]) == 2
    assert "Invalid value for '--lab'" in capsys.readouterr().err


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert _app.run(["--version"]) == 0
    assert capsys.readouterr().out.startswith("potluck ")


@pytest.mark.parametrize("command", [["train"], ["host"], ["host", "job.py"]])
class TestResume:
    @pytest.fixture(autouse=True)
    def folder(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        monkeypatch.chdir(tmp_path)
        Path("job.py").write_text("")
        (tmp_path / "runs" / "monday").mkdir(parents=True)
        return tmp_path / "runs" / "monday"

    def test_a_run_that_nobody_knows(self, command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
        assert _app.run([*command, "--resume", "nosuch"]) == 2
        assert "no run folder 'nosuch', neither here nor in runs" in capsys.readouterr().err

    @pytest.mark.parametrize("text", ['{"config": {"codec": "in', "[]", '{"config": 3}', "\xff"])
    def test_a_damaged_manifest(
        self, command: list[str], text: str, folder: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        (folder / "manifest.json").write_bytes(text.encode("latin-1"))
        assert _app.run([*command, "--resume", "monday"]) == 2
        error = capsys.readouterr().err
        assert "error: runs/monday/manifest.json is damaged: " in error
        assert "hint: restore the file from a copy" in error


class TestReport:
    @pytest.fixture
    def run(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        monkeypatch.chdir(tmp_path)
        folder = tmp_path / "runs" / "1115-gpt"
        return sample.write(folder, sample.whole_run())

    @pytest.mark.parametrize("by", ["path", "id", "newest"])
    def test_text(self, run: Path, by: str, capsys: pytest.CaptureFixture[str]) -> None:
        named = {"path": [str(run)], "id": [run.name], "newest": []}[by]
        assert _app.run(["report", *named]) == 0
        out = capsys.readouterr().out
        assert "4 of 4, finished" in out
        assert "1.25×" in out
        assert "laptop" in out
        assert "step 4" in out  # the curve's axis

    def test_json(self, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert _app.run(["report", str(run), "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["steps"] == 4

    def test_a_page_and_a_row_to_share(self, run: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        page = tmp_path / "run.html"
        assert _app.run(["report", str(run), "--html", str(page)]) == 0
        assert "1115-gpt" in page.read_text(encoding="utf-8")
        assert _app.run(["report", str(run), "--html", str(tmp_path)]) == 2
        capsys.readouterr()
        assert _app.run(["report", str(run), "--html"]) == 0  # named after the run, here
        said = capsys.readouterr()
        assert (said.out, f"wrote {run.name}.html" in said.err) == ("", True)  # the report is in the file
        assert "tower" in Path(f"{run.name}.html").read_text(encoding="utf-8")
        capsys.readouterr()
        (run / "manifest.json").write_text(to_json(sample.manifest(versions={"potluck": "9.9"})))
        assert _app.run(["report", str(run), "--row"]) == 0
        header, _, row = capsys.readouterr().out.splitlines()
        assert header.startswith("| host | guests | links |")
        assert "| potluck 9.9 |" in row
        assert "tower" not in row  # nothing that names a machine

    def test_png(self, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
        pytest.importorskip("matplotlib")
        assert _app.run(["report", str(run), "--png", "curve.png"]) == 0
        assert Path("curve.png").read_bytes().startswith(b"\x89PNG")

    def test_another_place_for_runs(self, run: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        (tmp_path / "elsewhere").mkdir()
        monkeypatch.chdir(tmp_path / "elsewhere")
        monkeypatch.setenv("POTLUCK_RUNS", str(run.parent))
        assert _app.run(["report", run.name]) == 0

    @pytest.mark.parametrize("arguments", [["nope"], ["."], [], ["runs/1115-gpt", "--png", "no/such/dir.png"]])
    def test_mistakes(
        self,
        tmp_path: Path,
        arguments: list[str],
        capsys: pytest.CaptureFixture[str],
        request: pytest.FixtureRequest,
    ) -> None:
        if "--png" in arguments:
            request.getfixturevalue("run")
            pytest.importorskip("matplotlib")
        else:
            request.getfixturevalue("monkeypatch").chdir(tmp_path)
        assert _app.run(["report", *arguments]) == 2
        err = capsys.readouterr().err
        assert err.startswith("error: ")
        assert "\nhint: " in err


def test_the_end_of_a_run_is_shown_on_a_terminal_of_any_encoding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a model writes has characters that Latin-1 lacks: the run would end with an error after all its work."""
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="latin-1", write_through=True))
    folder = tmp_path / "läufe → alle"
    sample.write(folder, [sample.run_start(), sample.step(1)])
    show_end(folder, [1, 2], [3.0, 2.0], "\ufffdle ×", 1.5, runs=tmp_path)
    text = written.getvalue().decode("latin-1")
    assert "?le x" in text
    assert "läufe -> alle" in text


def test_a_path_that_the_system_refuses_is_the_users_error(capfd: pytest.CaptureFixture[str]) -> None:
    assert _app.run(["report", "x" * 5000]) == 2
    said = capfd.readouterr().err
    assert said.startswith("error: cannot use xxx")
    assert "File name too long\nhint: " in said
    assert len(said) < 400


@pytest.mark.parametrize(
    "words",
    [
        ["doctor", "--listen", "--for", "nan"],
        ["probe", "--seconds", "nan"],
        ["plan", "home-pair", "--bytes", "nan"],
        ["bench", "collectives", "--tolerance", "nan"],
        ["bench", "ddp", "--lab", "nan"],
    ],
    ids=lambda words: words[-2],
)
def test_nan_is_no_number(words: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    """With --tolerance nan every wrong result would pass."""
    assert _app.run(words) == 2
    assert f"Invalid value for '{words[-2]}': 'nan' is not a number" in capfd.readouterr().err
