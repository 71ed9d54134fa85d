"""The run folder: its log survives half a line and a full disk, and only one process trains in it."""

from __future__ import annotations

import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from potluck._version import __version__
from potluck.errors import RunFolderError
from potluck.failpoints import armed
from potluck.report.summary import read_events, step_events
from potluck.spec.events import HostBack, RunNote, kind_of
from potluck.train.event_log import EventLog
from potluck.train.folder import RunFolder, new_folder
from support import sample_events as sample
from support.processes import Processes


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]


def test_a_line_that_a_kill_cut_does_not_spoil_the_next(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    log.emit(sample.step(1))
    log.close()
    with (tmp_path / "events.jsonl").open("a") as file:
        file.write('{"t_s": 3.2, "event": "st')
    for number in (2, 3):
        log = EventLog(tmp_path / "events.jsonl")
        log.emit(sample.step(number))
        log.close()
    assert [e.step for e in step_events(read_events(tmp_path))] == [1, 2, 3]
    assert len((tmp_path / "events.jsonl").read_text().splitlines()) == 4


def test_a_log_goes_on_without_empty_lines(tmp_path: Path) -> None:
    for number in range(3):
        log = EventLog(tmp_path / "events.jsonl")
        log.emit(sample.step(number, loss=float("nan")))
        log.sync()
        log.close()
        log.sync()
    assert [(e["step"], e["loss"]) for e in lines(tmp_path)] == [(0, None), (1, None), (2, None)]


def test_lines_of_many_threads_are_whole(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    threads = [
        threading.Thread(target=lambda: [log.emit(RunNote(text="x" * 9000)) for _ in range(20)]) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    log.close()
    assert len(lines(tmp_path)) == 80


def test_a_log_that_cannot_be_written_is_one_warning_and_one_that_cannot_be_opened_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    for moment in ("before", "after"):
        with armed(f"events.{moment}-line=raise"):
            log.emit(RunNote(text="x"))
    log.emit(RunNote(text="x"))
    log.close()
    # What came after the line's write did write the line.
    assert [line.get("lines") for line in lines(tmp_path)] == [1, None, 1, None]
    assert capsys.readouterr().err.count("warning: cannot write to") == 1
    with pytest.raises(RunFolderError, match=r"cannot write to .*events\.jsonl"):
        EventLog(tmp_path / "missing" / "events.jsonl")


@pytest.mark.skipif(sys.platform == "win32", reason="needs limits on file sizes")
def test_a_full_disk_leaves_whole_lines_and_half_of_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import resource

    log = EventLog(tmp_path / "events.jsonl")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        while (tmp_path / "events.jsonl").stat().st_size + 60 < 1000:
            log.emit(RunNote(text="a"))
        log.emit(RunNote(text="x" * 100))
        assert "File too large; the run continues" in capsys.readouterr().err
        written = len(read_events(tmp_path))
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        log.emit(HostBack())
        assert [kind_of(e) for e in read_events(tmp_path)] == ["note"] * written + ["log_gap", "host_back"]
        (tmp_path / "events.jsonl").write_bytes((tmp_path / "events.jsonl").read_bytes()[:1000])
        log.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (tmp_path / "events.jsonl").stat().st_size == 1000
    written = len(read_events(tmp_path))
    log = EventLog(tmp_path / "events.jsonl")
    log.emit(HostBack())
    log.close()
    assert [kind_of(e) for e in read_events(tmp_path)] == ["note"] * written + ["host_back"]


HOLDER = """
import os, shutil, subprocess, sys, time
from pathlib import Path
from potluck.train.folder import RunFolder, new_folder
with RunFolder(Path(sys.argv[1])).held():
    if sys.argv[2] == "fork":
        reading, writing = os.pipe()
        if os.fork() == 0:
            os.write(writing, b"x")  # it has given its copy of the lock back
            time.sleep(30)
        os.read(reading, 1)
    if sys.argv[2] == "copy":
        shutil.copytree(sys.argv[1], sys.argv[1] + "-copy")
    if sys.argv[2] == "start":
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(30)"], close_fds=False)
    print("held", flush=True)
    time.sleep(30)
"""


@pytest.mark.skipif(os.name != "posix", reason="needs fork")
@pytest.mark.parametrize("does", ["nothing", "fork", "start", "copy"])
def test_one_process_at_a_time_and_a_killed_one_lets_go(tmp_path: Path, does: str) -> None:
    """Whatever it does meanwhile: forks, starts a program, copies the run's folder."""
    (tmp_path / "run").mkdir()
    folder = RunFolder(tmp_path / "run")
    with Processes(tmp_path) as processes:
        holder = processes.python("-c", HOLDER, str(folder.path), does)
        holder.wait_for_text("held", 30)
        with pytest.raises(RunFolderError, match=f"in use by process {holder.pid}") as caught, folder.held():
            pass
        assert caught.value.hint
        holder.signal(9)  # its child, if it has one, lives on
        holder.wait(10)
        with folder.held():
            assert (folder.path / ".lock").read_text() == str(os.getpid())


def test_a_folder_that_is_not_there_or_not_writable_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match="cannot write to"), RunFolder(tmp_path / "missing").held():
        pass


def test_the_token_and_the_manifest_are_whole_or_as_before(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.write_token("first")
    folder.write_manifest(sample.manifest(guests=1))
    with armed("file.synced=raise"), pytest.raises(RunFolderError, match="cannot write"):
        folder.write_token("second")
    with armed("file.synced=raise"), pytest.raises(RunFolderError, match="cannot write"):
        folder.write_manifest(sample.manifest(guests=2))
    assert folder.token.read_text() == "first\n"
    assert folder.read_manifest() == sample.manifest(guests=1)


def test_a_manifest_of_a_newer_version_is_not_called_damaged(tmp_path: Path) -> None:
    """It may have a setting that this version does not know."""
    folder = new_folder(tmp_path, "gpt")
    folder.write_manifest(sample.manifest())
    path = folder.path / "manifest.json"
    text = json.loads(path.read_text())
    text["config"]["of_tomorrow"] = 1
    path.write_text(json.dumps(text | {"versions": {"potluck": "99.1"}}))
    with pytest.raises(RunFolderError, match=r"was made by Potluck 99\.1, and this is .*`of_tomorrow`") as caught:
        folder.read_manifest()
    assert "resume the run with Potluck 99.1" in caught.value.hint
    path.write_text(json.dumps(text | {"versions": {"potluck": __version__}}))
    with pytest.raises(RunFolderError, match="is damaged"):
        folder.read_manifest()
