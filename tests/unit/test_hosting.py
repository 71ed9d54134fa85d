"""`potluck.start()` from Python: what it refuses, and that a hosted run is closed however its loop ends."""

from __future__ import annotations

import html
import inspect
import json
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import potluck
from potluck import hosting
from potluck.errors import ConfigError, LoopError
from potluck.hosting import HostedRun
from potluck.train import session
from support.fleet import port_is_open

ROOT = Path(__file__).parents[2]
SAMPLES = [torch.ones(2)] * 8


@pytest.fixture
def hosted(tmp_path: Path) -> Iterator[Callable[..., HostedRun]]:
    """Start a run that this process hosts; closed at the end, and nothing in Python is changed by it."""
    script = tmp_path / "job.py"
    script.write_text("import potluck\n")
    before = sys.excepthook, threading.excepthook
    opened: list[HostedRun] = []

    def begin(**more: Any) -> HostedRun:
        keywords = {"script": script, "runs": tmp_path / "runs", "bind": "127.0.0.1", "device": "cpu", **more}
        run = potluck.start(host=True, view="plain", **keywords)
        assert isinstance(run, HostedRun)
        opened.append(run)
        return run

    yield begin
    for run in opened:
        run.close()
    assert (sys.excepthook, threading.excepthook) == before


def trained(run: potluck.Run, at: Callable[[int], Any] = lambda index: None, steps: int | None = 2) -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in run.steps(model, optimizer, SAMPLES, global_batch=4, steps=steps, micro_batch=2):
        for batch in step:
            step.backward(model(batch).mean())
        if at(step.index):
            break


def ends(folder: Path) -> list[tuple[str, int]]:
    lines = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    return [(e["reason"], e["step"]) for e in lines if e["event"] == "run_end"]


def port_of(run: HostedRun) -> int:
    assert run._context.admission is not None
    return run._context.admission.socket.port


def test_the_run_ends_with_its_loop_and_a_second_loop_is_a_new_run(
    hosted: Callable[..., HostedRun], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = hosted()
    port, token = port_of(run), run.token
    assert token is not None
    assert f"\n  {run.join_line}\n" in capsys.readouterr().out
    assert port_is_open(port)
    trained(run)
    assert not port_is_open(port)
    assert not [t.name for t in threading.enumerate() if t.name.startswith("potluck")]
    trained(run, at=lambda index: (run.token, port_of(run)) != (token, port))
    assert run.token == token, "the same line joins it"
    first, second = sorted((tmp_path / "runs").iterdir())
    assert ends(first) == ends(second) == [("finished", 2)]
    assert "a new run; guests join it with the same line as before" in capsys.readouterr().err


def test_a_hosted_run_keeps_the_machine_awake_until_it_is_closed(
    hosted: Callable[..., HostedRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    locks: list[str] = []

    @contextmanager
    def lock() -> Iterator[None]:
        locks.append("taken")
        yield
        locks.append("released")

    monkeypatch.setattr(session, "awake", lock)
    run = hosted()
    assert locks == ["taken"]
    trained(run, at=lambda index: locks != ["taken"])
    assert locks == ["taken", "released"]
    assert ends(run._session.folder.path) == [("finished", 2)]
    trained(run)
    assert locks == ["taken", "released"] * 2
    potluck.start(device="cpu").close()
    assert len(locks) == 4, "a plain loop alone holds no lock"


def test_the_token_is_in_the_requested_file_until_each_run_ends(
    hosted: Callable[..., HostedRun], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "token"
    run = hosted(token_file=file)
    assert file.read_text().strip() == run.token
    assert f"\n  potluck join --token-file {file}\n" in capsys.readouterr().out
    for _ in range(2):
        trained(run, at=lambda index: not file.exists())
        assert ends(run._session.folder.path) == [("finished", 2)]
        assert not file.exists()


def test_left_by_break_it_is_closed_a_moment_later_or_when_asked(hosted: Callable[..., HostedRun]) -> None:
    run = hosted()
    port = port_of(run)
    trained(run, at=lambda index: index == 1, steps=None)
    run.close()
    assert not port_is_open(port)
    assert ends(run._session.folder.path) == [("finished", 2)]
    closed = threading.Event()
    trained(run, at=lambda index: run._session.on_close(closed.set) or index == 0, steps=None)
    assert closed.wait(10), "nobody asked"


def test_an_exception_in_a_with_block_fails_the_run(hosted: Callable[..., HostedRun]) -> None:
    def fail(index: int) -> None:
        raise ValueError("boom")

    with pytest.raises(ValueError, match="boom"), hosted() as run:
        trained(run, at=fail)
    assert isinstance(run, HostedRun)
    assert ends(run._session.folder.path) == [("failed", 1)]
    assert not port_is_open(port_of(run))


def test_an_exception_that_ends_the_script_fails_the_run(
    hosted: Callable[..., HostedRun], capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(index: int) -> None:
        raise ValueError("boom")

    run = hosted()
    try:
        trained(run, at=fail)
    except ValueError as error:
        sys.excepthook(type(error), error, error.__traceback__)  # as Python does
    assert ends(run._session.folder.path) == [("failed", 1)]
    assert "ValueError: boom" in capsys.readouterr().err


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize(("whose", "end"), [("the loop's", "failed"), ("another", "finished")])
def test_an_exception_that_ends_the_loops_thread_fails_the_run(
    hosted: Callable[..., HostedRun], whose: str, end: str
) -> None:
    def fail(index: int = 0) -> None:
        raise ValueError("boom")

    def fail_elsewhere(index: int) -> bool:
        in_thread(fail)
        return True

    run = hosted()
    in_thread(trained, run, fail if whose == "the loop's" else fail_elsewhere)
    run.close()
    assert ends(run._session.folder.path) == [(end, 1)]


def in_thread(call: Callable[..., Any], *given: Any) -> None:
    thread = threading.Thread(target=call, args=given)
    thread.start()
    thread.join(30)
    assert not thread.is_alive()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork")
def test_a_process_that_the_loop_forks_leaves_the_run_to_its_parent(hosted: Callable[..., HostedRun]) -> None:
    run = hosted(micro_batch=2)
    model = nn.Linear(2, 1)
    steps = run.steps(model, torch.optim.SGD(model.parameters(), lr=0.1), SAMPLES, global_batch=4, steps=2)
    folder = run._session.folder
    for step in steps:
        for batch in step:
            step.backward(model(batch).mean())
        if (child := os.fork()) == 0:
            signal.alarm(20)
            steps.close()  # type: ignore[attr-defined]
            sys.excepthook(ValueError, ValueError("boom"), None)
            run.close()
            run._context.loop.end("failed")
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert ends(folder.path) == []
        assert not list(folder.checkpoints.iterdir())
    assert ends(folder.path) == [("finished", 2)]


def test_one_that_never_trains_leaves_no_folder(hosted: Callable[..., HostedRun], tmp_path: Path) -> None:
    run = hosted()
    port = port_of(run)
    run.close()
    assert not port_is_open(port)
    assert list((tmp_path / "runs").iterdir()) == []


def test_the_next_run_takes_the_place_of_one_that_does_not_train(hosted: Callable[..., HostedRun]) -> None:
    run = hosted()
    port = port_of(run)
    again = hosted()
    assert not port_is_open(port), "as where a notebook's cell is run again"

    def begin_another(index: int) -> bool:
        with pytest.raises(LoopError, match="still training"):
            hosted()
        return True

    trained(again, at=begin_another)
    hosted()


def test_a_mistake_in_the_call_of_steps_can_be_mended(hosted: Callable[..., HostedRun], tmp_path: Path) -> None:
    run = hosted()
    with pytest.raises(ConfigError, match="global_batch"):
        for _ in run.steps(nn.Linear(2, 1), None, SAMPLES, global_batch=0):  # type: ignore[arg-type]
            pass
    hosted().close()  # or the cell that starts it is run again
    trained(run)
    (folder,) = (tmp_path / "runs").iterdir()
    assert ends(folder) == [("finished", 2)]


def test_a_run_is_resumed_by_its_id(hosted: Callable[..., HostedRun]) -> None:
    run = hosted(codec="int8")
    trained(run)
    folder = run._session.folder
    again = hosted(resume=folder.id)
    assert again.token == run.token
    assert again._context.config.codec == "int8"
    trained(again, steps=3)
    assert ends(folder.path) == [("finished", 2), ("finished", 3)]


def test_alone_a_cell_can_be_run_twice_also_after_an_error() -> None:
    run = potluck.start(device="cpu", micro_batch=2)
    assert (run.token, run.join_line, run.page_url) == (None, None, None)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = []
    kept: Any = None
    for attempt in range(3):
        kept = run.steps(model, optimizer, SAMPLES, global_batch=4, steps=3)
        for step in kept:
            for batch in step:
                step.backward(model(batch).mean())
            seen.append((attempt, step.index))
            if attempt == 0 and step.index == 1:
                break  # and `kept` stays open, as after an error in a notebook
    assert seen == [(0, 0), (0, 1), (1, 0), (1, 1), (1, 2), (2, 0), (2, 1), (2, 2)]
    run.close()


def test_what_only_a_host_has_needs_host_true() -> None:
    for keywords in ({"port": 5599}, {"resume": "x"}, {"send": ["a.py"]}, {"wait_for": 1}):
        with pytest.raises(ConfigError, match="only with host=True"):
            potluck.start(**keywords)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        potluck.start(hots=True)  # type: ignore[call-arg]


def test_a_run_alone_can_have_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="port only with host=True"):
        potluck.start(web=True, port=5599)
    shown = []
    run = potluck.start(web=True, runs=tmp_path, device="cpu", view="plain")
    assert isinstance(run, HostedRun)
    assert (run.role, run.join_line) == ("alone", None)
    assert run.page_url is not None
    trained(run, at=lambda index: shown.append(run._repr_html_()))
    said = capsys.readouterr()
    assert run.page_url in said.out
    assert "join" not in said.out + said.err
    (folder,) = tmp_path.iterdir()
    assert ends(folder) == [("finished", 2)]
    page = json.loads(html.unescape(shown[-1] or "").partition('id="data">')[2].partition("</script>")[0])
    assert page["status"] == "training", "it goes on, and this process knows it"
    assert page["moment"]
    assert page["over"], "but the page in a cell stays as it is"
    assert {machine["state"] for machine in page["machines"]} == {"computing"}
    assert "no_guests" not in page
    assert "codec" not in page["about"]
    assert '"status":"finished"' in html.unescape(run._repr_html_() or "")


@pytest.mark.parametrize("file", [None, "<stdin>", "app.pyz/__main__.py"])
def test_a_python_prompt_has_no_script_for_guests(file: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["__main__"], "__file__", file, raising=False)
    with pytest.raises(ConfigError, match="typed at a Python prompt") as caught:
        potluck.start(host=True)
    assert "script=" in caught.value.hint


def test_a_worker_process_hosts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosting.multiprocessing.current_process(), "_inheriting", True, raising=False)
    with pytest.raises(LoopError, match="worker process"):
        potluck.start(host=True)


def test_every_keyword_is_documented() -> None:
    names = list(inspect.signature(potluck.start).parameters)
    docstring = inspect.getdoc(potluck.start) or ""
    assert re.findall(r"^    (\w+): ", docstring, re.M) == names
    page = (ROOT / "docs" / "reference" / "python.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| `(\w+)` \|", page.split("## ")[1], re.M) == names
