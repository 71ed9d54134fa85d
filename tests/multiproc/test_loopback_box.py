"""A rig on 127.0.0.1 behind the shaping proxy: tokens, processes and their ends, and a real run."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from potluck.errors import ConfigError, PotluckError, TokenError
from potluck.lab import loopback, warden
from potluck.lab.box import Box
from potluck.lab.loopback import LoopbackBox
from potluck.spec.rig import parse
from potluck.wire.keys import new_keys
from potluck.wire.token import Token, decode, encode
from support.processes import SOURCE, Processes

RIG: dict[str, Any] = {
    "name": "pair",
    "machine": [
        {"name": "desk", "role": "host", "seconds_per_sample": 0.05},
        {"name": "laptop", "seconds_per_sample": 0.1, "link_mbit": 20, "latency_ms": 2},
        {"name": "old", "seconds_per_sample": 0.1, "link_mbit": 5},
    ],
}
START_S = 60.0


@pytest.fixture(autouse=True)
def _private_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is left lying about is then seen, and only by this test."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", None)


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


def until(found: Callable[[], Any], what: str, deadline_s: float = START_S) -> Any:
    deadline = time.monotonic() + deadline_s
    while not (result := found()):
        assert time.monotonic() < deadline, f"no {what} after {deadline_s:.0f} s"
        time.sleep(0.05)
    return result


def left_over(tmp_path: Path) -> list[str]:
    return [path.name for path in (tmp_path / "temporary").glob(f"{loopback.PREFIX}*")]


def host_token(folder: Path, port: int) -> tuple[Path, Token]:
    keys = new_keys()
    token = Token(addresses=("127.0.0.1",), port=port, host_public=keys.public, guest_secret=keys.guest_secret)
    path = folder / "token"
    path.write_text(encode(token) + "\n")
    return path, token


def test_a_token_leads_through_the_machines_own_proxy(tmp_path: Path) -> None:
    path, token = host_token(tmp_path, 45_678)
    with LoopbackBox(parse(RIG)) as box:
        assert box.token_file("desk", path) == path
        files = [box.token_file(name, path) for name in ("laptop", "old", "laptop")]
        found = [decode(file.read_text()) for file in files]
        assert all(f.addresses == ("127.0.0.1",) and f.host_public == token.host_public for f in found)
        assert all(f.guest_secret == token.guest_secret for f in found)
        assert found[0] == found[2]
        assert len({f.port for f in found} | {token.port}) == 3
        assert all(stat.S_IMODE(file.stat().st_mode) == 0o600 for file in files)
        assert stat.S_IMODE(files[0].parent.stat().st_mode) == 0o700
        with pytest.raises(TokenError, match="host's token"):
            box.token_file("laptop", tmp_path / "none")
        with pytest.raises(ConfigError, match="no machine 'lapto'"):
            box.token_file("lapto", path)
    assert not left_over(tmp_path)


def test_a_token_that_is_still_being_written_is_waited_for(tmp_path: Path) -> None:
    path, token = host_token(tmp_path, 45_678)
    text = path.read_text()
    path.write_text(text[:40])
    writer = threading.Timer(0.2, path.write_text, [text])
    writer.start()
    with LoopbackBox(parse(RIG)) as box:
        assert decode(box.token_file("laptop", path).read_text()).host_public == token.host_public
    writer.join()


def test_it_is_a_box_and_counts_nothing_before_anything_crossed() -> None:
    box: Box
    with LoopbackBox(parse(RIG)) as box:
        assert (box.kind, box.peers_connect) == ("loopback", False)
        assert {box.address(m) for m in ("desk", "laptop", "old")} == {"127.0.0.1"}
        assert box.traffic("desk") == box.traffic("old") == (0, 0)


SHOW = "import os; print(os.environ.get('MARK'), os.environ.get('OTHER'), os.getpid() == os.getsid(0))"
PARENT = """
import os, pathlib, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
pathlib.Path(sys.argv[1]).write_text(f"{os.getpid()} {child.pid}")
time.sleep(100)
"""


def processes_named_in(file: Path) -> list[psutil.Process]:
    text = until(lambda: file.read_text() if file.exists() and " " in file.read_text() else "", "process ids")
    return [psutil.Process(int(word)) for word in text.split()]


def test_commands_have_their_environment_and_their_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTHER", "from outside")
    log = tmp_path / "log"
    with LoopbackBox(parse(RIG)) as box:
        for mark in "ab":
            command = [sys.executable, "-c", SHOW]
            assert box.start("laptop", command, env={"MARK": mark}, log=log).wait(20) == 0
        assert log.read_text().splitlines() == ["a None True", "b None True"]
        with pytest.raises(PotluckError, match="cannot start"):
            box.start("laptop", [str(tmp_path / "none")], env={}, log=log)


@pytest.mark.skipif(os.name != "posix", reason="ends with a signal of POSIX")
def test_a_command_is_the_process_that_was_returned(tmp_path: Path) -> None:
    """So that signals reach it: kill() is how a guest leaves a rig."""
    with LoopbackBox(parse(RIG)) as box:
        command = [sys.executable, "-c", PARENT, str(tmp_path / "ids")]
        process = box.start("laptop", command, env=environment(), log=tmp_path / "log")
        assert processes_named_in(tmp_path / "ids")[0].pid == process.pid
        process.kill()
        assert process.wait(10) == -signal.SIGKILL


@pytest.mark.skipif(os.name != "posix", reason="ends with a signal of POSIX")
def test_leaving_the_box_ends_everything_that_runs_on_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loopback, "GRACE_S", 0.3)
    with LoopbackBox(parse(RIG)) as box:
        command = [sys.executable, "-c", PARENT, str(tmp_path / "ids")]
        process = box.start("laptop", command, env=environment(), log=tmp_path / "log")
        found = processes_named_in(tmp_path / "ids")
    assert process.returncode == -signal.SIGKILL  # it does not heed SIGTERM
    assert not psutil.wait_procs(found, 3.0)[1]
    assert not left_over(tmp_path)


OWNER = """
import json, os, subprocess, sys, time
from pathlib import Path
from potluck.lab import loopback
from potluck.spec.rig import parse
loopback.GRACE_S = 0.3
folder = Path(sys.argv[1])
with loopback.LoopbackBox(parse(json.loads(sys.argv[2]))) as box:
    token = box.token_file("laptop", folder / "token")
    for number in range(2):
        command = [sys.executable, "-c", sys.argv[3], str(folder / f"ids{number}")]
        box.start("laptop", command, env=os.environ, log=folder / "log")
    while not all((folder / f"ids{number}").exists() for number in range(2)):
        time.sleep(0.05)
    print(token, flush=True)
    if sys.argv[4] == "fails":
        raise RuntimeError("as planned")
    time.sleep(100)
"""


@pytest.mark.parametrize("end", ["SIGKILL", "SIGINT", "fails"])
@pytest.mark.skipif(os.name != "posix", reason="ends with a signal of POSIX")
def test_nothing_is_left_however_its_owner_ends(tmp_path: Path, end: str) -> None:
    host_token(tmp_path, 45_678)
    with Processes(tmp_path / "owner") as processes:
        arguments = [str(tmp_path), json.dumps(RIG), PARENT, end]
        owner = processes.python("-c", OWNER, *arguments, name="owner")
        owner.wait_for_text(r"/\S+\.token", START_S)
        ids = [int(word) for number in range(2) for word in (tmp_path / f"ids{number}").read_text().split()]
        below = [p for p in psutil.process_iter() if owner.pid in _ancestors(p)]
        if end != "fails":
            # The warden, the proxy, two commands and their children.
            assert len(below) >= 6, below
            assert {*ids} <= {p.pid for p in below}
            assert left_over(tmp_path)
            owner.signal(getattr(signal, end))
        owner.wait(15.0)
        assert until(lambda: not any(map(_runs, (*ids, *(p.pid for p in below)))), "end of all", 5.0)
    assert until(lambda: not left_over(tmp_path), "removal of the folder", 5.0)


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _ancestors(process: psutil.Process) -> list[int]:
    try:
        return [parent.pid for parent in process.parents()]
    except psutil.Error:
        return []


@pytest.mark.skipif(os.name != "posix", reason="ends with a signal of POSIX")
def test_a_process_that_only_has_an_old_ones_id_is_spared() -> None:
    innocent = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"], start_new_session=True)
    try:
        named = psutil.Process(innocent.pid)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(named, "is_running", lambda: False)  # what psutil says when the start times differ
            warden.end(named)
            assert innocent.poll() is None
        warden.end(named)
        assert innocent.wait(10) == -signal.SIGKILL
    finally:
        innocent.kill()
        innocent.wait(10)


def test_without_its_warden_a_box_starts_nothing(tmp_path: Path) -> None:
    with LoopbackBox(parse(RIG)) as box:
        (found,) = [p for p in psutil.Process().children() if "potluck.lab.warden" in p.cmdline()]
        found.kill()
        found.wait(10)
        with pytest.raises(PotluckError, match="is gone"):
            box.start("laptop", [sys.executable, "-c", ""], env={}, log=tmp_path / "log")
    assert not left_over(tmp_path)


def test_folders_of_dead_owners_are_removed_and_no_others(tmp_path: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait(20)
    temporary = tmp_path / "temporary"
    (dead, alive, other) = (
        temporary / name
        for name in (f"{loopback.PREFIX}{ended.pid}-x", f"{loopback.PREFIX}{os.getpid()}-x", "somebody's")
    )
    for folder in (dead, alive, other):
        folder.mkdir()
        (folder / "file").touch()
    with LoopbackBox(parse(RIG)):
        assert [folder.exists() for folder in (dead, alive, other)] == [False, True, True]


BATCH, STEPS, SEQUENCE = 8, 6, 32
IN_A_BOX = """
import json, os, sys, time
from pathlib import Path
from potluck.lab.loopback import LoopbackBox
from potluck.spec.rig import parse

folder, (rig, host_words, join_words) = Path(sys.argv[1]), json.loads(sys.argv[2])
potluck = [sys.executable, "-m", "potluck"]
with LoopbackBox(parse(rig)) as box:
    words = [*potluck, *host_words, "--bind", box.address("desk")]
    host = box.start("desk", words, env=os.environ, log=folder / "host.log")
    while not (tokens := [*folder.glob("runs/*/token")]):
        assert host.poll() is None, (folder / "host.log").read_text()
        time.sleep(0.05)
    through = box.token_file("laptop", tokens[0])
    words = [*potluck, *join_words, "--token-file", str(through)]
    guest = box.start("laptop", words, env=os.environ, log=folder / "guest.log")
    assert host.wait(100) == 0, (folder / "host.log").read_text()
    assert guest.wait(20) == 0, (folder / "guest.log").read_text()
    print(json.dumps([box.traffic("laptop"), box.traffic("desk")]))
"""


@pytest.mark.slow
@pytest.mark.timeout(150)
def test_a_run_through_the_proxy(tmp_path: Path) -> None:
    rig = {**RIG, "machine": RIG["machine"][:2]}
    common = ["--device", "paced:0.1", "--threads", "1", "--micro-batch", "1"]
    host = ["host", "--depth", "1", "--sequence", str(SEQUENCE), "--steps", str(STEPS), "--name", "desk", *common]
    host += ["--batch-tokens", str(BATCH * SEQUENCE), "--set", "warmup=1", "--wait-for", "1"]
    host += ["--runs", str(tmp_path / "runs"), "--view", "plain", "--checkpoint-every", "0"]
    (tmp_path / "in_a_box.py").write_text(IN_A_BOX)
    with Processes(tmp_path) as processes:
        words = [str(tmp_path), json.dumps([rig, host, ["join", "--name", "laptop", *common]])]
        box = processes.python(str(tmp_path / "in_a_box.py"), *words, children=2)
        (sent, received), desk = json.loads(box.succeeds(deadline_s=140))
    assert desk == [received, sent]
    (file,) = tmp_path.glob("runs/*/events.jsonl")
    events = [json.loads(line) for line in file.read_text().splitlines()]
    steps = [event for event in events if event["event"] == "step"]
    assert [sum(step["samples"].values()) for step in steps] == [BATCH] * STEPS
    assert sum(step["samples"].get("laptop", 0) for step in steps) >= STEPS
    # All of it came through the proxy: what the host counted, and more for encryption and heartbeats.
    assert sent >= sum(step["bytes_up"] for step in steps) > 0
    assert received >= sum(step["bytes_down"] for step in steps) > 0
    assert not left_over(tmp_path)
