"""`potluck doctor` as a person uses it, without root: alone, with a listener, with a running host, with slips."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from zmq.utils import garbage

from potluck.checked import to_json
from potluck.cli._app import READER_GONE
from potluck.doctor import examine
from potluck.doctor.facts import resolving
from potluck.doctor.facts.system import System
from potluck.errors import RefusedError
from potluck.hub.link import GuestLink
from potluck.probe import address_rates
from potluck.probe.link_server import LinkServer
from potluck.probe.meeting import meet
from potluck.spec.facts import Case, Facts, Torch
from potluck.spec.messages import HelloMessage
from potluck.spec.probed import DeviceSpeed, Probed
from potluck.train import checkpoint_folder
from potluck.wire.frames import PROTOCOL
from potluck.wire.keys import new_keys
from potluck.wire.token import Token, encode
from potluck.wire.transport import HostSocket
from support.healthy import linux
from support.probing import listening, serving
from support.processes import Processes

pytestmark = pytest.mark.timeout(150)
LIMIT_S = 80.0


@pytest.fixture(autouse=True, scope="module")
def _one_collector() -> None:
    """pyzmq's own thread for large frames lives as long as the process: it is there before anybody looks."""
    if not garbage.gc.is_alive():
        garbage.gc.start()


def doctor(folder: Path, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "LANG", "PYTHONPATH") if name in os.environ}
    source = str(Path(__file__).resolve().parents[2] / "src")
    return subprocess.run(
        [sys.executable, "-m", "potluck", "doctor", *arguments],
        env={**kept, "PYTHONPATH": source, "PYTHONUTF8": "1", **env},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )


def codes(done: subprocess.CompletedProcess[str]) -> set[str]:
    assert "Traceback" not in done.stderr
    return {finding["code"] for finding in json.loads(done.stdout)["findings"]}


# -- two sides, in this process ---------------------------------------------------------------------------------


def met(token: Token, facts: Facts) -> Case:
    between, there = meet(facts, token, System(), lambda words: None)
    return Case(here=facts, there=there, between=between)


def test_tokens_of_the_wrong_kind_are_told() -> None:
    with serving(DeviceSpeed(name="there")) as (token, _):
        case = met(token, linux("here"))
        assert case.between is not None
        assert case.between.partner == "probe"
        assert [f.code for f in examine(case).findings] == ["probe-answers"]
        assert "potluck probe --listen" in refusal(token)
    with listening(linux("there")) as another:
        assert "potluck doctor --listen" in refusal(another)


def refusal(token: Token) -> str:
    """What a guest hears that wants to join there."""
    link = GuestLink(token, HelloMessage(name="guest"))
    with pytest.raises(RefusedError) as caught:
        link.connect(20.0)
    assert "potluck host" in (caught.value.hint or "")
    return caught.value.what


def test_two_sides_exchange_facts_and_try_both_ways() -> None:
    here, there = linux("here", protocol=PROTOCOL), linux("there", 6, protocol=PROTOCOL)
    with listening(there) as token:
        case = met(token, here)
    assert case.there == there
    between = case.between
    assert between is not None
    assert (between.handshake, between.partner) == ("ok", "doctor")
    assert [r.outcome for r in (*between.reaches, *between.back)] == ["connected", "connected"]
    assert [t.arrived for t in between.transfers] == [True, True, True]
    (path,) = between.paths
    assert (path.address, path.used, path.notes) == ("127.0.0.1", True, ())
    assert path.slower_bytes_per_s
    assert path.slower_bytes_per_s > 1e5
    assert examine(case).findings == ()


def test_a_measurement_that_nobody_answers_is_over_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """All else that was found stays."""
    monkeypatch.setattr(address_rates, "ALL_S", 1.5)
    monkeypatch.setattr(LinkServer, "answer", lambda *_: None)
    there = linux("there", 6, protocol=PROTOCOL)
    with listening(there) as token:
        began = time.monotonic()
        case = met(token, linux("here", protocol=PROTOCOL))
        took_s = time.monotonic() - began
    assert case.there == there
    assert case.between is not None
    (path,) = case.between.paths
    assert path.slower_bytes_per_s is None
    assert "did not answer" in path.notes[0]
    assert examine(case).findings == ()
    assert took_s < 4.5  # a question by itself has 5 s


def test_versions_that_differ_are_named() -> None:
    there = linux("there", 6, protocol=PROTOCOL, potluck="9.9.9", torch=Torch(version="1.13.0"))
    with listening(there) as token:
        case = met(token, linux("here", protocol=PROTOCOL))
    found = {f.code: f for f in examine(case).findings}
    assert found.keys() == {"potluck-versions-differ", "torch-versions-differ"}
    assert "9.9.9" in found["potluck-versions-differ"].what


def test_a_token_of_another_run_is_named() -> None:
    with listening(linux("there")) as token, listening(linux("other")) as other:
        case = met(replace(token, guest_secret=other.guest_secret), linux("here"))
    assert [f.code for f in examine(case).findings] == ["handshake-failed"]


def test_something_else_that_listens_there_is_named() -> None:
    def close_at_once(server: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                with server.accept()[0] as client:
                    client.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    with socket.create_server(("127.0.0.1", 0)) as web:
        thread = threading.Thread(target=close_at_once, args=(web,), daemon=True)
        thread.start()
        keys = new_keys()
        token = Token(
            addresses=("127.0.0.1",),
            port=web.getsockname()[1],
            host_public=keys.public,
            guest_secret=keys.guest_secret,
        )
        case = met(token, linux("here"))
        web.shutdown(socket.SHUT_RDWR)
        thread.join(5)
    (finding,) = examine(case).findings
    assert finding.code == "handshake-failed"
    assert "no potluck host" in finding.what


def test_a_slow_resolver_is_left_alone_after_its_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    wake = threading.Event()

    def slow(*_: Any, **__: Any) -> Any:
        wake.wait(20)
        raise socket.gaierror(-3, "Temporary failure in name resolution")

    monkeypatch.setattr(socket, "getaddrinfo", slow)
    (lookup,) = resolving.lookups("tower", None, deadline_s=0.1)
    wake.set()
    assert not lookup.finished


# -- the command ------------------------------------------------------------------------------------------------


def test_with_a_running_host_it_learns_the_versions_and_takes_no_part(tmp_path: Path) -> None:
    with Processes(tmp_path) as processes:
        host = processes.potluck(
            *("host", "--bind", "127.0.0.1", "--steps", "100000", "--device", "cpu", "--threads", "1"),
            *("--depth", "1", "--sequence", "16", "--batch-tokens", "64", "--view", "plain"),
            *("--runs", str(tmp_path / "runs")),
            name="host",
        )
        host.wait_for_text("potluck join", deadline_s=LIMIT_S)
        (token,) = (tmp_path / "runs").glob("*/token")
        events = token.parent / "events.jsonl"
        deadline = time.monotonic() + LIMIT_S
        while '"step"' not in (events.read_text() if events.exists() else ""):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        done = doctor(tmp_path, "--token-file", str(token), "--save", "facts.json")
        host.kill()
    assert done.returncode == 0, done.stdout + done.stderr
    assert "a running host answers there" in done.stdout
    assert "versions fit" in done.stdout
    lines = [line for line in events.read_text().splitlines(keepends=True) if line.endswith("\n")]  # it was killed
    assert "guest" not in {json.loads(line)["event"].split("_")[0] for line in lines}
    saved = (tmp_path / "facts.json").read_text()
    assert json.loads(saved)["between"]["partner"] == "host"
    assert token.read_text().strip() not in saved + done.stdout + done.stderr


def test_listen_prints_a_token_and_answers_the_other_side(tmp_path: Path) -> None:
    with Processes(tmp_path) as processes:
        other = processes.potluck("doctor", "--listen", "--bind", "127.0.0.1", name="listener")
        token = other.wait_for_text(r"potluck doctor (potluck\d+-\S+)\n", deadline_s=LIMIT_S)[1]
        done = doctor(tmp_path, token, "--json")
        other.wait_for_text("connected to check the link", deadline_s=LIMIT_S)
        other.kill()
    assert done.returncode == 0, done.stdout + done.stderr
    assert not codes(done) & {"blocked-here", "mtu-black-hole", "handshake-failed"}


def test_pains_of_one_machine_made_for_real(tmp_path: Path) -> None:
    """All at once, to be quick: a busy port, wrong variables, an orphan, a torn checkpoint, too large a model."""
    run = tmp_path / "runs" / "x"

    def write(folder: Path) -> checkpoint_folder.FolderManifest:
        (folder / "model.bin").write_bytes(bytes(1000))
        step = int(folder.name.removeprefix(".tmp-").partition("-")[0])
        files = {"model.bin": checkpoint_folder.fingerprint(folder / "model.bin")}
        return checkpoint_folder.FolderManifest(format=checkpoint_folder.FORMAT, step=step, files=files)

    whole = checkpoint_folder.publish(run / "checkpoints", 10, write, keep=2)
    torn = checkpoint_folder.publish(run / "checkpoints", 20, write, keep=2)
    (torn / "model.bin").write_bytes(bytes(600))
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    sleep = "import time; time.sleep(60)"
    orphan = subprocess.Popen([sys.executable, "-c", sleep, "potluck", "join", "--parent", str(gone.pid), "secret"])
    try:
        with socket.create_server(("0.0.0.0", 0)) as busy:
            port = str(busy.getsockname()[1])
            done = doctor(
                tmp_path,
                *("--json", "--port", port, "--run", str(run), "--parameters", "900B"),
                GLOO_SOCKET_IFNAME="^lo",
                NCCL_SOCKET_IFNAME="nowhere0",
                MASTER_ADDR="localhost",
                OMP_NUM_THREADS="77",
                POTLUCK_THREADS="4000",
            )
    finally:
        orphan.kill()
        orphan.wait()
    assert done.returncode == 1
    found = {f["code"]: f for f in json.loads(done.stdout)["findings"]}
    assert found.keys() >= {
        "port-taken",
        "socket-variable-syntax",
        "socket-variable-unknown",
        "master-addr-is-loopback",
        "thread-variable",
        "too-many-threads",
        "orphan",
        "torn-checkpoint",
        "model-does-not-fit",
    }
    assert str(os.getpid()) in found["port-taken"]["what"]
    assert found["torn-checkpoint"]["severity"] == "warning"
    assert str(whole) in found["torn-checkpoint"]["breaks"]
    assert any(f"kill {orphan.pid}" in f["fix"] for f in json.loads(done.stdout)["findings"])
    assert "secret" not in done.stdout


def test_facts_are_collected_without_importing_torch(tmp_path: Path) -> None:
    """It must work where torch is broken, and be quick."""
    code = "import sys\nfrom potluck.doctor.facts.collecting import *\ncollect(Wanted())\n"
    code += "print('torch' in sys.modules)"
    source = str(Path(__file__).resolve().parents[2] / "src")
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": source, "PATH": os.environ["PATH"]},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.stdout == "False\n", done.stderr


def test_an_unknown_name_is_named(tmp_path: Path) -> None:
    done = doctor(tmp_path, "no-such-machine.invalid:7171", "--json")
    assert done.returncode == 1
    assert "unknown-name" in codes(done)


def test_recorded_facts_are_looked_at_again(tmp_path: Path) -> None:
    first = doctor(tmp_path, "--save", "facts.json", "--json", OMP_NUM_THREADS="77")
    again = doctor(tmp_path, "--facts", "facts.json", "--json")
    assert again.stdout == first.stdout
    assert "thread-variable" in codes(again)
    assert first.stderr == "wrote facts.json\n"


def test_bad_input_is_an_error_without_a_traceback(tmp_path: Path) -> None:
    (tmp_path / "bad.json").write_text("{}")
    keys = new_keys()
    token = encode(Token(addresses=("127.0.0.1",), port=9, host_public=keys.public, guest_secret=keys.guest_secret))
    (tmp_path / "run.log").write_text("step 1\n")
    speed = Probed(here=DeviceSpeed(name="tower"))
    (tmp_path / "probe.json").write_text(to_json(speed))
    (tmp_path / "runs" / "b").mkdir(parents=True)
    (tmp_path / "runs" / "b" / "manifest.json").write_text("{}")
    for arguments, words in (
        (["--facts", "bad.json"], "format None"),
        (["--facts", "none.json"], "cannot read"),
        (["--facts", "bad.json", "tower"], "takes no address"),
        (["--listen", token], "takes no address"),
        ([token[:-4] + "AAAA"], "damaged"),
        ([token.replace(f"potluck{PROTOCOL}-", "potluck99-")], "protocol 99"),
        (["--bind", "127.0.0.1"], "needs --listen"),
        (["--listen", "--bind", "nowhere"], "IPv4"),
        (["--for", "5"], "--for needs --listen"),
        (["a b"], "neither an address nor a token"),
        (["300.1.2.3"], "neither an address nor a token"),
        (["10.0.0.256:7171"], "neither an address nor a token"),
        (["tower:99999"], "not a port"),
        (["--parameters", "many"], "not a number of parameters"),
        (["--run", "none"], "no run folder"),
        (["--run", "."], "is not a run folder: it has none of manifest.json"),
        (["--run", "runs"], "potluck doctor --run runs/b"),
        (["--facts", "probe.json"], "this file was saved by potluck probe"),
        (["run.log"], "potluck doctor --error run.log"),
        (["--error", "run.log", "bad.json"], "--error takes one log"),
        ([""], "the address is empty"),
        (["--cluster", "none.toml"], "cannot read none.toml"),
        (["--token-file", "none"], "cannot read a token"),
    ):
        from potluck.cli import _app

        with contextlib.redirect_stderr(Collected()) as said, contextlib.chdir(tmp_path):
            assert _app.run(["doctor", *arguments]) == 2, arguments
        assert words in said.text, (arguments, said.text)
        assert "hint:" in said.text
        assert "Traceback" not in said.text


def test_a_listener_whose_token_nobody_reads_ends() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "potluck", "doctor", "--listen", "--bind", "127.0.0.1", "--for", "600"]
    try:
        done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, timeout=LIMIT_S)
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (READER_GONE, b"")


class Collected:
    """A stream that keeps what is written."""

    def __init__(self) -> None:
        self.text = ""

    def write(self, text: str) -> int:
        self.text += text
        return len(text)

    def flush(self) -> None:
        pass

    def isatty(self) -> bool:
        return False


def test_a_session_is_over_at_its_limit_even_where_nobody_answers() -> None:
    """A listener that admits everybody and says nothing would otherwise be waited for question by question."""
    keys = new_keys()
    host = HostSocket(bind="127.0.0.1", port=0, keys=keys)
    token = Token(addresses=("127.0.0.1",), port=host.port, host_public=keys.public, guest_secret=keys.guest_secret)
    stop = threading.Event()

    def say_nothing() -> None:
        while not stop.is_set():
            host.receive(0.05)
        host.close()

    thread = threading.Thread(target=say_nothing)
    thread.start()
    try:
        began = time.monotonic()
        between, there = meet(linux("here"), token, System(), lambda words: None, limit_s=0.7)
        took_s = time.monotonic() - began
    finally:
        stop.set()
        thread.join(10)
    assert (between.handshake, between.partner, there) == ("ok", "silent", None)
    assert took_s < 2.5  # a question by itself has 3 s
