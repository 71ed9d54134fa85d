"""What goes over ssh: a line that every shell passes on, a complete wheel, findings, lines without tokens."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
import time
import zipfile
from io import BytesIO
from pathlib import Path

import msgspec
import pytest

from potluck.doctor.usable import LOST, NO_PYTHON, unfit, unreached
from potluck.errors import MachineError
from potluck.fleet import agent, bootstrap
from potluck.fleet.bootstrap import FleetNeeds
from potluck.fleet.remote import AgentLink, redacted, words_of
from potluck.fleet.ssh import SshFleet, _shell_line, ssh_command
from potluck.spec.agent_reports import RemoteFacts
from potluck.spec.facts import SshHost
from potluck.spec.finding import BLOCKER
from potluck.spec.fleet_file import NamedMachine
from potluck.wire.token import Token, encode

SHELLS = [shell for shell in ("sh", "dash", "bash", "zsh", "fish", "tcsh", "busybox") if shutil.which(shell)]


@pytest.mark.skipif(os.name != "posix", reason="needs a shell")
@pytest.mark.parametrize("shell", SHELLS)
def test_every_shell_passes_the_agent_on(shell: str, tmp_path: Path) -> None:
    """As sshd does it: the user's shell gets the line with -c. With stdin at its end, the agent ends at once."""
    needs = FleetNeeds(imports={}).of(NamedMachine(cache=str(tmp_path / "it's a cache")))
    line = _shell_line(sys.executable, words_of(agent, needs))
    command = [shell, *(["sh"] if shell == "busybox" else []), "-c", line]
    done = subprocess.run(command, input="", capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    facts = RemoteFacts(**json.loads(done.stdout.removeprefix(agent.HELLO)))
    assert facts.executable == sys.executable
    assert facts.cache == str(tmp_path / "it's a cache")
    assert not facts.lacks
    assert not facts.ready


@pytest.mark.skipif(os.name != "posix", reason="needs a shell")
def test_a_python_in_the_home_folder_is_found(tmp_path: Path) -> None:
    (tmp_path / "own").symlink_to(sys.executable)
    line = _shell_line("~/own", ["-c", "print(12345)"])
    done = subprocess.run(["/bin/sh", "-c", line], env={"HOME": str(tmp_path)}, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "12345\n"), done.stderr


@pytest.mark.skipif(os.name != "posix", reason="needs a shell")
def test_a_machine_without_python_says_what_it_has(tmp_path: Path) -> None:
    (tmp_path / "sh").symlink_to(shutil.which("sh") or "sh")
    old = tmp_path / "python3"
    old.write_text('#!/bin/sh\n[ "$1" = --version ] && echo Python 3.8.10\nexit 1\n')
    old.chmod(0o755)
    env = {"PATH": str(tmp_path), "HOME": str(tmp_path)}
    done = subprocess.run(
        ["/bin/sh", "-c", _shell_line("", ["-c", "pass"])], env=env, capture_output=True, text=True
    )
    assert done.returncode == 127
    assert done.stdout.splitlines() == [NO_PYTHON, "python3: Python 3.8.10"]
    finding = unreached(SshHost(host="old@mac", status=127, said=""), tuple(done.stdout.splitlines()))
    assert finding.code == "no-python"
    assert "Python 3.8.10" in finding.how
    assert "ssh old@mac" in finding.fix


def test_a_python_with_quotes_is_refused() -> None:
    with pytest.raises(MachineError, match="cannot be passed on"):
        _shell_line("/x'; rm -rf ~; '", [])


def test_a_machine_cannot_become_an_option_of_ssh() -> None:
    command = ssh_command(NamedMachine(ssh="desk", name="desk"), ("ssh",), {})
    assert command[command.index("desk") - 1] == "--"
    assert "BatchMode=yes" in command


def test_no_token_is_written_to_a_log() -> None:
    token = encode(Token(addresses=("10.0.0.1",), port=7, host_public=bytes(32), guest_secret=os.urandom(32)))
    line = redacted(f"type: potluck join {token} --device cpu")
    assert token[12:] not in line
    assert line == f"type: potluck join {token.partition('-')[0]}-… --device cpu"


def test_the_wheel_is_this_potluck_and_complete(tmp_path: Path) -> None:
    assert (
        bootstrap.wheel() == bootstrap.wheel.__wrapped__()
    )  # the same files give the same bytes, so the same name
    with zipfile.ZipFile(BytesIO(bootstrap.wheel())) as packed:
        packed.extractall(tmp_path)
    assert not list(tmp_path.rglob("__pycache__"))
    here = bootstrap.PACKAGE
    for path in here.rglob("*"):
        if path.is_file() and "__pycache__" not in path.parts and path.suffix not in (".pyc", ".pyi"):
            assert (tmp_path / "potluck" / path.relative_to(here)).read_bytes() == path.read_bytes(), path
    program = (
        "import importlib.metadata as m, potluck, _potluck_torch; d = m.distribution('potluck'); "
        "print(potluck.__file__, d.version, [e.value for e in d.entry_points if e.group == 'torch.backends'])"
    )
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=60)
    assert str(tmp_path) in done.stdout, done.stderr
    assert "_potluck_torch:watch" in done.stdout


def test_the_environment_is_named_by_what_is_in_it() -> None:
    machine = NamedMachine(ssh="desk", name="desk")
    plain, more = FleetNeeds(imports={}).of(machine), FleetNeeds(extra=("peft",), imports={}).of(machine)
    assert plain["env"] != more["env"]
    assert plain["env"] == FleetNeeds(imports={"torch": "torch"}).of(machine)["env"]
    assert plain["needs"]["torch"] == "2.10"
    assert "peft" in more["needs"]
    assert any(pin.startswith("torch==") and "+" not in pin for pin in FleetNeeds(imports={}).pins)


def test_without_ssh_on_this_machine_that_is_said(tmp_path: Path) -> None:
    fleet = SshFleet([NamedMachine(ssh="d", name="d")], FleetNeeds(imports={}), logs=tmp_path, ssh=("no-such-ssh",))
    with pytest.raises(MachineError, match="no program no-such-ssh"):
        fleet.reach("d")
    fleet.close()


@pytest.mark.skipif(os.name != "posix", reason="needs a shell")
def test_a_fleet_is_closed_at_once_while_a_machine_does_not_answer(tmp_path: Path) -> None:
    silent = ("sh", "-c", "exec sleep 100")
    fleet = SshFleet([NamedMachine(ssh="d", name="d")], FleetNeeds(imports={}), logs=tmp_path, ssh=silent)
    failed: list[MachineError] = []

    def reach() -> None:
        try:
            fleet.reach("d")
        except MachineError as error:
            failed.append(error)

    thread = threading.Thread(target=reach)
    thread.start()
    while not fleet._links:
        time.sleep(0.01)
    began = time.monotonic()
    fleet.close()
    thread.join()
    assert time.monotonic() - began < 4
    assert failed


@pytest.mark.skipif(os.name != "posix", reason="needs a shell")
def test_a_machine_that_vanishes_while_something_is_installed_is_lost_and_not_unfit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So the launcher tries it again; without a connection nobody can say that something cannot be installed."""
    uv = tmp_path / "uv"
    uv.write_text(f"#!/bin/sh\ntouch {tmp_path}/installing\nexec sleep 100\n")
    uv.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    machine = NamedMachine(ssh="d", name="d", python=sys.executable, cache=str(tmp_path / "cache"))
    needs = FleetNeeds(extra=("no-such-package-here",), imports={})
    here = ("sh", "-c", 'for line; do :; done; exec sh -c "$line"', "ssh")  # as ssh to this very machine
    fleet = SshFleet([machine], needs, logs=tmp_path, ssh=here)

    def vanish() -> None:
        while not (tmp_path / "installing").exists():
            time.sleep(0.01)
        (link,) = fleet._links
        link._process.terminate()

    vanishing = threading.Thread(target=vanish)
    vanishing.start()
    try:
        with pytest.raises(MachineError, match="the connection broke") as failed:
            fleet.prepare("d")
        assert [finding.code for finding in failed.value.findings] == [LOST]
        assert "ssh d uptime" in failed.value.findings[0].fix
    finally:
        fleet.close()
        vanishing.join()


def facts(**changed: object) -> RemoteFacts:
    values = {
        "pid": 1, "python": "3.11.7", "executable": "/usr/bin/python3.11", "platform": "linux", "gpus": 0,
        "architecture": "x86_64", "bits": 64, "clock_s": 1000.0, "cores": 4, "uv": "", "venv": True,
        "code": False, "env": "/c/env", "ready": False, "wsl": False, "cache": "/c", "free_bytes": 50 << 30,
        "noexec": False, "lacks": ("torch",),
    }  # fmt: skip
    return RemoteFacts(**{**values, **changed})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changed", "own", "codes"),
    [
        ({}, False, []),
        ({"architecture": "armv7l", "bits": 32}, False, ["no-torch-here"]),
        ({"free_bytes": 1 << 30}, False, ["disk-full"]),
        ({"free_bytes": 5 << 30, "gpus": 1}, False, ["disk-full"]),
        ({"free_bytes": 1 << 30, "ready": True}, False, []),
        ({"free_bytes": 1 << 30, "lacks": ()}, True, []),
        ({"free_bytes": 1 << 30}, True, ["disk-full"]),
        ({"write_error": "Permission denied"}, False, ["cache-not-writable"]),
        ({"write_error": "No space left on device"}, False, ["disk-full"]),
        ({"noexec": True}, False, ["home-noexec"]),
        ({"noexec": True, "ready": True}, False, []),
        ({"venv": False}, False, ["no-venv"]),
        ({"venv": False, "uv": "/x/uv"}, False, []),
        ({"clock_s": 1000.0 + 3600}, False, ["clock-off"]),
        (
            {"architecture": "riscv64", "venv": False, "clock_s": 1e9},
            False,
            ["no-torch-here", "no-venv", "clock-off"],
        ),
    ],
)
def test_what_is_wrong_with_a_machine(changed: dict[str, object], own: bool, codes: list[str]) -> None:
    found = list(unfit("desk", "me@desk.lan", facts(**changed), (), own=own, clock_s=1000.0))
    assert [finding.code for finding in found] == codes
    assert all(finding.severity == BLOCKER for finding in found)
    for finding in found:
        # The command that mends it must work as it stands: "desk" is only a name in our own tables.
        assert finding.machine == "desk"
        assert "ssh desk" not in finding.fix
        assert "the others" not in finding.breaks  # there may be none


def test_a_wrong_clock_does_not_matter_where_nothing_is_installed() -> None:
    off = facts(ready=True, clock_s=1000.0 - 400 * 86_400)
    (finding,) = unfit("desk", "me@desk.lan", off, (), own=False, clock_s=1000.0)
    assert (finding.code, finding.severity) == ("clock-off", "warning")
    assert "400 days behind" in finding.what


def test_what_an_agent_says_is_checked_where_it_enters(tmp_path: Path) -> None:
    """Facts of another type count as none; a line that is no answer may be some program's."""
    lines = ["no JSON", "[]", '{"id": "x"}', '{"id": 1, "status": "ended"}', '{"id": 1, "status": 3}']
    program = (
        "import json, sys\n"
        f"print({agent.HELLO!r} + sys.argv[1], flush=True)\n"
        "for line in sys.stdin:\n"
        "    if 'feed' in line:\n"
        "        print(*json.loads(sys.argv[2]), sep='\\n', flush=True)\n"
    )
    right = msgspec.to_builtins(facts())
    for found, greeted in (({**right, "cores": "four"}, False), (right, True)):
        link = AgentLink("desk", [sys.executable, "-c", program, json.dumps(found), json.dumps(lines)])
        try:
            task = link._task(tmp_path / "log")
            assert (link.greet(30) is not None) == greeted
            if greeted:
                task.feed("answer now")
                ended = task.wait(30)
                assert ended is not None
                assert ended.status == 3
        finally:
            link.close()
