"""A run's life without the command line: what is opened is closed, and what nothing happened in is removed."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import multiprocessing.util
import os
import signal
import stat
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

import potluck
from potluck.env import Environment
from potluck.errors import ConfigError, LoopError, RunFolderError
from potluck.fleet.local import LocalGuests
from potluck.report.view import QuietView
from potluck.spec.config import RunConfig
from potluck.spec.events import RunEnded, RunEvent, RunNote
from potluck.spec.messages import Source
from potluck.train.context import ALONE, HOST
from potluck.train.ending import Interrupted
from potluck.train.launch import current, launched
from potluck.train.run import Run
from potluck.train.run_specs import RunSpec
from potluck.train.session import Session
from support.fleet import port_is_open

posix = pytest.mark.skipif(os.name != "posix", reason="signals and modes of POSIX")
SAMPLES = [torch.ones(2)] * 8


class Seen(QuietView):
    def __init__(self) -> None:
        self.events: list[RunEvent] = []
        self.closed = False

    def event(self, event: RunEvent) -> None:
        self.events.append(event)

    def close(self) -> None:
        self.closed = True

    @property
    def ends(self) -> list[tuple[str, int]]:
        return [(event.reason, event.step) for event in self.events if isinstance(event, RunEnded)]


def session(runs: Path, view: Seen | None = None, role: str = HOST, **more: Any) -> Session:
    config = RunConfig(device="cpu", bind="127.0.0.1", checkpoint_every=0)
    spec = RunSpec(role=role, config=config, what="job.py", runs=runs, **more)
    return Session(spec, Environment(), view or Seen(), guests=LocalGuests)


@pytest.mark.parametrize("codecs", [{"codec": "int9"}, {"codec_down": "int9"}, {"codec_down": "auto"}])
def test_a_run_needs_codecs_that_exist(codecs: dict[str, str], tmp_path: Path) -> None:
    """Whoever starts it: a resumed run of a recipe found out only when its folder was open."""
    with pytest.raises(ConfigError, match="unknown codec"):
        RunSpec(role=HOST, config=RunConfig(**codecs), what="job.py", runs=tmp_path)


def trained(opened: Session, at: Any = lambda step: None, steps: int = 2, **more: Any) -> nn.Module:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    given = {"global_batch": 4, "micro_batch": 2, "steps": steps, **more}
    for step in Run(opened.context).steps(model, optimizer, SAMPLES, **given):
        for batch in step:
            step.backward(model(batch).mean())
        at(step.index)
    return model


@pytest.fixture
def handlers() -> Iterator[list[Any]]:
    """Before and after, the handlers are the same."""
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.getsignal(n) for n in numbers]
    yield before
    assert [signal.getsignal(n) for n in numbers] == before


@posix
@pytest.mark.usefixtures("handlers")
def test_a_run_is_opened_trained_and_closed(tmp_path: Path) -> None:
    view = Seen()
    with session(tmp_path, view) as opened:
        folder = opened.folder
        assert opened.token is not None
        assert folder.token.read_text().strip() == opened.token
        assert stat.S_IMODE(folder.token.stat().st_mode) == 0o600
        port = folder.read_manifest().port
        assert port_is_open(port)
        with pytest.raises(RunFolderError, match="is in use by process"):
            session(tmp_path, resume=folder.path).__enter__()
        trained(opened)
    assert not port_is_open(port)
    assert view.closed
    assert view.ends == [("finished", 2)]
    with session(tmp_path, resume=folder.path) as again:
        assert again.token == opened.token, "a resumed run has the same keys and port"
        assert again.folder == folder


@pytest.mark.usefixtures("handlers")
def test_a_resumed_run_says_where_the_scripts_arguments_differ(tmp_path: Path) -> None:
    def said(*arguments: str, **more: Any) -> list[str]:
        view, source = Seen(), Source(files=("job.py",), arguments=arguments, sha256="0")
        with session(tmp_path, view, source=source, **more) as opened:
            trained(opened)
        folders.append(opened.folder.path)
        return [event.text for event in view.events if isinstance(event, RunNote) and "argum" in event.text]

    folders: list[Path] = []
    first = ("--name", "two words")
    assert said(*first) == []
    assert said(*first, resume=folders[0]) == []
    differ = "the script's arguments differ from those of the saved run: "
    assert said(resume=folders[0]) == [f"{differ}--name 'two words' there, none now"]
    assert said("--name", "b", resume=folders[0]) == [f"{differ}none there, --name b now"]


@pytest.mark.usefixtures("handlers")
def test_a_refused_resume_leaves_the_run_as_it_was(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def source(*arguments: str) -> Source:
        return Source(files=("job.py",), arguments=arguments, sha256="0")

    with session(tmp_path, source=source("--batch", "4")) as opened:
        trained(opened)
    folder = opened.folder
    before = folder.path / "manifest.json", folder.events
    contents = [file.read_bytes() for file in before]
    refused = session(tmp_path, source=source("--batch", "8"), resume=folder.path)
    with pytest.raises(ConfigError, match="started with global_batch 4, now it is 8"), refused as again:
        trained(again, global_batch=8)
    assert [file.read_bytes() for file in before] == contents
    said = capsys.readouterr().err
    assert "arguments differ from those of the saved run: --batch 4 there, --batch 8 now" in said
    assert "resume from" not in said, "that command would be refused again"
    with session(tmp_path, source=source("--batch", "4", "--log"), resume=folder.path) as again:
        assert folder.read_manifest().source == source("--batch", "4")
        trained(again, steps=4)
    assert folder.read_manifest().source == source("--batch", "4", "--log")


@pytest.mark.usefixtures("handlers")
def test_a_folder_in_which_nothing_happened_is_removed_on_an_error_only(tmp_path: Path) -> None:
    with pytest.raises(LoopError, match="without reaching"), session(tmp_path) as opened:
        opened.check_began()
    assert not opened.folder.path.exists()
    with pytest.raises(ValueError, match="in the script"), session(tmp_path) as opened:  # noqa: PT012
        trained(opened)
        raise ValueError("in the script")
    assert opened.folder.events.exists()


@pytest.mark.usefixtures("handlers")
def test_the_folder_of_a_run_that_failed_in_its_first_step_is_removed(tmp_path: Path) -> None:
    def fail(model: nn.Module) -> None:
        raise ValueError("in the first step")

    view = Seen()
    with pytest.raises(ValueError, match="in the first step"), session(tmp_path, view) as opened:
        trained(opened, before_update=fail)
    (end,) = [event for event in view.events if isinstance(event, RunEnded)]
    assert (end.reason, end.step, end.folder) == ("failed", 0, "")
    assert not opened.folder.path.exists()
    with pytest.raises(ValueError, match="in the first step"), session(tmp_path) as opened:  # noqa: PT012
        opened.context.log.emit(RunNote(text="something that a person may want to read"))
        trained(opened, before_update=fail)
    assert opened.folder.events.exists()


@pytest.mark.usefixtures("handlers")
def test_a_failure_says_how_to_resume_where_there_is_a_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for end in (ValueError("in the script"), None):
        with contextlib.suppress(ValueError), session(tmp_path) as opened:
            trained(opened)
            opened.context.loop.finish()  # left by itself: it is saved
            if end is not None:
                raise end
        words = f"resume from the last checkpoint with: --resume {opened.folder.path}"
        assert (words in capsys.readouterr().err) == (end is not None)
    with contextlib.suppress(ValueError), session(tmp_path) as opened:
        raise ValueError("before the loop")
    assert "resume" not in capsys.readouterr().err


def test_whoever_closes_second_finds_nothing_to_do(tmp_path: Path) -> None:
    view = Seen()
    opened = session(tmp_path, view, role=ALONE).__enter__()
    trained(opened)
    opened.close(ValueError("late"))
    opened.close()
    assert view.ends == [("finished", 2)]


@posix
@pytest.mark.usefixtures("handlers")
def test_the_first_signal_stops_the_training_in_order(tmp_path: Path) -> None:
    view = Seen()
    with session(tmp_path, view, role=ALONE) as opened:
        with pytest.raises(KeyboardInterrupt):  # before the loop as Python does it
            os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(Interrupted):
            trained(opened, at=lambda step: os.kill(os.getpid(), signal.SIGINT), steps=10)
    assert view.ends == [("interrupted", 1)]
    assert list(opened.folder.checkpoints.glob("step-00000001"))
    line = opened.stopped_line()
    assert line is not None
    assert line.startswith(f"stopped, saved in {opened.folder.path} after step 1; resume with: ")


class Stalling(IterableDataset[Any]):
    """A stream that asks for an end, and gives nothing more until it comes."""

    def __iter__(self) -> Iterator[Any]:
        yield from SAMPLES[:6]
        torch.rand(1)
        ask_and_hang()


class StallingSampler(Sampler[list[int]]):
    def __iter__(self) -> Iterator[list[int]]:
        yield from ([0, 1], [2, 3], [4, 5])
        ask_and_hang()


class StallingWorker(Dataset[Any]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        if index == 6:
            time.sleep(0.3)  # by then the steps before it are done, unless the machine is very busy
            ask_and_hang(os.getppid())
        return SAMPLES[index]


def ask_and_hang(whom: int | None = None) -> None:
    os.kill(whom or os.getpid(), signal.SIGINT)
    for _ in range(2000):
        time.sleep(0.01)


@posix
@pytest.mark.usefixtures("handlers")
@pytest.mark.parametrize("streamed", [True, False], ids=["stream", "sampler"])
def test_the_first_signal_stops_a_training_that_waits_for_samples(tmp_path: Path, streamed: bool) -> None:
    stream = DataLoader(Stalling(), batch_size=2)
    loader = stream if streamed else DataLoader(SAMPLES, batch_sampler=StallingSampler())  # type: ignore[arg-type]
    view, model = Seen(), nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    numbers: list[Any] = []
    began = time.monotonic()
    with session(tmp_path, view, role=ALONE) as opened, pytest.raises(Interrupted):  # noqa: PT012
        for step in Run(opened.context).steps(model, optimizer, loader, epochs=1, micro_batch=2):
            for batch in step:
                step.backward(model(batch).mean())
            numbers.append(torch.get_rng_state())
    assert time.monotonic() - began < 15, "it waited for the samples"
    assert view.ends == [("interrupted", 3)]
    assert torch.equal(torch.get_rng_state(), numbers[-1]), "what was drawn for samples that never came is undone"
    found = json.loads((opened.folder.checkpoints / "step-00000003" / "manifest.json").read_text())
    assert '"position": 6' in json.dumps(found), "the next sample is the one that did not come"


@posix
@pytest.mark.usefixtures("handlers")
def test_the_first_signal_stops_a_training_that_waits_for_a_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL", 0.2)  # so long torch waits for one
    multiprocessing.util.get_temp_dir()  # the worker, which is killed, would leave one of its own
    loader = DataLoader(StallingWorker(), batch_size=2, num_workers=1)
    view, model = Seen(), nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    began = time.monotonic()
    with session(tmp_path, view, role=ALONE) as opened, pytest.raises(Interrupted):  # noqa: PT012
        for step in Run(opened.context).steps(model, optimizer, loader, epochs=1, micro_batch=2):
            for batch in step:
                step.backward(model(batch).mean())
    assert time.monotonic() - began < 15, "it waited for the samples"
    (end,) = view.ends
    assert end[0] == "interrupted"
    assert (opened.folder.checkpoints / f"step-{end[1]:08}").exists()


@posix
@pytest.mark.filterwarnings("ignore:.*use of fork")
def test_a_process_that_the_loop_forks_can_be_ended(tmp_path: Path) -> None:
    """As torch ends the workers of a loader: they are not meant by what this process does about signals."""
    codes = []

    def fork(step: int) -> None:
        child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(30,))
        child.start()
        assert child.pid is not None
        os.kill(child.pid, signal.SIGINT)  # Ctrl-C reaches the whole group; the parent decides
        child.join(0.2)
        codes.append(child.exitcode)
        child.terminate()
        child.join(10)
        codes.append(child.exitcode)
        child.kill()

    with session(tmp_path, role=ALONE) as opened:
        trained(opened, at=fork, steps=1)
    assert codes == [None, -signal.SIGTERM]


@posix
@pytest.mark.usefixtures("handlers")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_past_the_loop_the_first_signal_interrupts(tmp_path: Path, number: int) -> None:
    with session(tmp_path, role=ALONE) as opened:
        trained(opened)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), number)


def test_another_thread_has_no_signals_and_needs_none(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGINT)
    found: list[Any] = []

    def life() -> None:
        with session(tmp_path, role=ALONE) as opened:
            found.append(signal.getsignal(signal.SIGINT))
            trained(opened)

    thread = threading.Thread(target=life)
    thread.start()
    thread.join(30)
    assert found == [before]


def test_a_handler_that_somebody_set_meanwhile_stays(tmp_path: Path) -> None:
    def theirs(number: int, frame: Any) -> None: ...

    before = signal.getsignal(signal.SIGTERM)
    try:
        with session(tmp_path, role=ALONE):
            signal.signal(signal.SIGTERM, theirs)
        assert signal.getsignal(signal.SIGTERM) is theirs
    finally:
        signal.signal(signal.SIGTERM, before)


def test_how_the_process_was_started_is_set_for_a_while(tmp_path: Path) -> None:
    with session(tmp_path, role=ALONE) as opened:
        with launched(opened.context):
            assert potluck.start()._context is opened.context
            assert current() is opened.context
            with pytest.raises(AttributeError):
                opened.context.role = HOST  # type: ignore[misc]
        assert current() is None
