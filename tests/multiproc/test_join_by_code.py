"""`potluck host --lan` and `potluck join` without a token: real processes, real multicast on this machine."""

from __future__ import annotations

import contextlib
import re
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("spake2", reason="needs the extra lan")
pytest.importorskip("zeroconf", reason="needs the extra lan")

import torch
from torch import nn

import potluck
from potluck import run_session
from potluck.cli import _by_code
from potluck.cli._qr import qr_code
from potluck.env import Environment
from potluck.errors import MissingModuleError, NetworkError, TokenError
from potluck.report.summary import read_events
from potluck.report.view import Mode
from potluck.spec.config import RunConfig
from potluck.spec.events import StrangerRefused
from potluck.train import handing_out
from potluck.train.context import HOST
from potluck.train.handing_out import Sharing
from potluck.train.run_specs import RunSpec
from potluck.wire import by_code, discovery
from potluck.wire import code as code_module
from potluck.wire.discovery import AnnouncedRun, Announcement, look
from potluck.wire.frames import PROTOCOL
from support.fleet import JOB, TORCH_STARTS_S, Fleet
from support.leaks import leaks
from support.processes import _environment

CODE = r"(?m)^  (\d\d-[a-z]+-[a-z]+)$"


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")
def test_a_person_types_the_code_and_the_machine_joins(tmp_path: Path) -> None:
    pexpect = pytest.importorskip("pexpect", reason="needs pexpect")
    with Fleet(tmp_path / "fleet") as fleet:
        words = ["--lan", "--qr", "--wait-for", "1", "--device", "paced:0.01"]
        host = fleet.host(JOB, *words, arguments=["--steps", "5"])
        code = host.wait_for_text(CODE, TORCH_STARTS_S)[1]
        assert "█▀▀▀▀▀█" in host.stdout() or "▄▄▄▄▄" in host.stdout()
        with pytest.raises(TokenError, match="does not know this code"):
            by_code.token_by_code(re.sub("-.*", "-yak-yak", code), print)
        terminal = pexpect.spawn(
            sys.executable,
            ["-c", "from potluck.cli._by_code import asked; print('got', asked())"],
            env=_environment(fleet._environment()),
            timeout=TORCH_STARTS_S,
            encoding="utf-8",
        )
        try:
            terminal.expect(rf"run {code[:2]} at 127\.0\.0\.1")
            terminal.expect("code .*: ")
            terminal.sendline(code.replace("-", " ").upper())
            terminal.expect("got (potluck[^ ]*)\r\n")
            assert terminal.match[1] == (fleet.folder / "token").read_text().strip()
            terminal.expect(pexpect.EOF)
        finally:
            terminal.close(force=True)
        words = ["join", code, "--name", "typed", "--threads", "1", "--view", "plain"]
        guest = fleet.potluck(*words, name="typed", env=fleet._environment())
        guest.succeeds(TORCH_STARTS_S)
        host.succeeds(TORCH_STARTS_S)
        assert fleet.events("guest_joined", "typed")
        assert [e["reason"] for e in fleet.events("refused_stranger")] == ["wrong code"]
        assert "got the token by the code" in " ".join(e["text"] for e in fleet.events("note"))
        # The code is shown to the person, and kept nowhere.
        assert code in host.stdout()
        assert not [p for p in fleet.folder.rglob("*") if p.is_file() and code.encode() in p.read_bytes()]
        assert leaks(fleet.folder, [host.out, host.err]) == []
    assert run_numbers() & {int(code[:2])} == set()


def run_numbers() -> set[int]:
    return {run.number for run in look(for_s=1.0)}


def test_two_runs_have_two_numbers_and_only_what_is_public_is_announced(monkeypatch: pytest.MonkeyPatch) -> None:
    from zeroconf import ServiceInfo, Zeroconf

    told: list[ServiceInfo] = []
    register = Zeroconf.register_service
    monkeypatch.setattr(Zeroconf, "register_service", lambda self, info, **more: told.append(info))
    monkeypatch.setattr(discovery, "NUMBERS", range(10, 12))
    monkeypatch.setattr(discovery, "look", lambda for_s: [announced(10)])
    Announcement(["127.0.0.1"], 40001).close()
    (info,) = told
    assert info.properties == {b"protocol": str(PROTOCOL).encode(), b"run": b"11"}
    assert re.fullmatch(r"([0-9a-f]{16})\._potluck\._tcp\.local\. \1\.local\.", f"{info.name} {info.server}")
    monkeypatch.setattr(Zeroconf, "register_service", register)
    with pytest.raises(NetworkError, match="announces IPv4 addresses"):
        Announcement(["::1"], 40001)


def test_strangers_announcements_are_not_believed() -> None:
    good = {b"run": b"12", b"protocol": str(PROTOCOL).encode()}
    assert discovery._parse(good, ["10.0.0.1", "fe80::1"], 99) == AnnouncedRun(
        number=12, protocol=PROTOCOL, addresses=("10.0.0.1",), port=99
    )
    for properties, addresses, port in (
        ({}, ["10.0.0.1"], 99),
        ({**good, b"run": b"7"}, ["10.0.0.1"], 99),
        ({**good, b"run": None}, ["10.0.0.1"], 99),
        ({**good, b"run": b"\x1b[2J"}, ["10.0.0.1"], 99),
        ({**good, b"protocol": b"9" * 200}, ["10.0.0.1"], 99),
        (good, ["evil.example"], 99),
        (good, [], 99),
        (good, ["10.0.0.1"], None),
        (good, ["10.0.0.1"], 0),
    ):
        assert discovery._parse(properties, addresses, port) is None


def announced(number: int, **changes: object) -> AnnouncedRun:
    fields: dict[str, object] = {"protocol": PROTOCOL, "addresses": ("127.0.0.1",), "port": 1, **changes}
    return AnnouncedRun(number=number, **fields)  # type: ignore[arg-type]


def test_what_is_said_when_a_code_cannot_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[AnnouncedRun] = []
    monkeypatch.setattr(by_code, "look", lambda number=None: found)
    with pytest.raises(NetworkError, match="run 12 was not seen in this network within 5 s") as unseen:
        by_code.token_by_code("12-maple-otter", print)
    assert "UDP port 5353" in (unseen.value.hint or "")
    assert "The token always works" in (unseen.value.hint or "")
    found[:] = [announced(12), announced(12, addresses=("10.0.0.9",))]
    with pytest.raises(TokenError, match=r"several machines announce run 12: 127.0.0.1, 10.0.0.9"):
        by_code.token_by_code("12-maple-otter", print)
    found[:] = [announced(12, protocol=PROTOCOL + 1)]
    with pytest.raises(TokenError, match=f"uses protocol {PROTOCOL + 1}"):
        by_code.token_by_code("12-maple-otter", print)
    found[:] = [announced(12)]
    with pytest.raises(NetworkError, match="did not send the token"):
        by_code.token_by_code("12-maple-otter", print)


class Person:
    """Answers prompts, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *answers: str) -> None:
        self.asked: list[str] = []
        self._answers = iter(answers)
        monkeypatch.setattr("click.prompt", self.prompt)

    def prompt(self, text: str, **options: object) -> str:
        self.asked.append(text)
        return next(self._answers)


def test_a_person_is_asked_again_and_can_always_give_the_token(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(_by_code, "look", lambda number=None: [announced(12), announced(34, protocol=99)])
    monkeypatch.setattr(by_code, "redeem", lambda address, port, code: f"the token for {code}")
    person = Person(monkeypatch, "12-mapel-otter", "56-maple-otter", "12 maple otter")
    assert _by_code.asked() == "the token for 12-maple-otter"
    said = capsys.readouterr().err
    assert "run 12 at 127.0.0.1" in said
    assert "run 34 at 127.0.0.1 (another version of Potluck)" in said
    assert "did you mean maple?" in said
    assert "no run 56 was seen" in said
    assert len(person.asked) == 3

    Person(monkeypatch, "potluck3-abc")
    assert _by_code.asked() == "potluck3-abc"
    Person(monkeypatch, "", "potluck3-def")
    assert _by_code.asked() == "potluck3-def"
    Person(monkeypatch, "12-a-b", "12-a-b", "12-a-b")
    with pytest.raises(TokenError, match="is not a word"):
        _by_code.asked()

    monkeypatch.setattr(_by_code, "look", lambda number=None: [])
    Person(monkeypatch, "potluck3-ghi")
    assert _by_code.asked() == "potluck3-ghi"
    assert "no run was seen within 5 s" in capsys.readouterr().err

    def missing(what: str) -> None:
        raise MissingModuleError("x", hint="pip install -e '.[lan]'")

    monkeypatch.setattr(_by_code, "need_libraries", missing)
    Person(monkeypatch, "potluck3-jkl")
    assert _by_code.asked() == "potluck3-jkl"
    assert "pip install -e '.[lan]'" in capsys.readouterr().err


class Announced:
    """Announces nothing, as run 12."""

    number = 12

    def __init__(self, addresses: tuple[str, ...], port: int) -> None:
        self.addresses, self.port = addresses, port
        Announced.last = self

    def close(self) -> None:
        pass


@pytest.mark.parametrize("view", ["plain", "json"])
def test_the_host_shows_each_new_code_and_logs_none(
    view: Mode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(handing_out, "Announcement", Announced)
    monkeypatch.setattr(code_module, "PAUSE_S", 0.0)
    port = free_port()
    config = RunConfig(device="cpu", bind="127.0.0.1", port=port)
    spec = RunSpec(role=HOST, config=config, what="job.py", runs=tmp_path, sharing=Sharing(lan=True))
    with run_session.session_of(spec, Environment(), view) as session:
        assert Announced.last.port == port + 1
        assert session.code is not None
        run_session.tell_code(session.code, view)
        codes = re.findall(CODE, capsys.readouterr()[view == "json"])
        assert codes == [session.code]
        assert code_module.redeem("127.0.0.1", port + 1, codes[0]) == session.token
        folder = session.folder.path
        for number in range(1, 10):
            with pytest.raises(code_module.WrongCode):
                code_module.redeem("127.0.0.1", port + 1, "12-yak-yak")
            wait_until(lambda number=number: wrong_codes(folder) == number)
        wait_until(lambda: "joining by a code is off" in (folder / "events.jsonl").read_text())
    said = capsys.readouterr()[view == "json"]
    codes += re.findall(r"that code is no longer valid, the new one is (12-\w+-\w+)", said)
    assert len(set(codes)) == 3
    logged = (folder / "events.jsonl").read_text()
    assert "got the token by the code" in logged
    assert not [code for code in codes if code in logged]


def test_each_run_of_a_script_that_hosts_has_a_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(handing_out, "Announcement", Announced)
    script = tmp_path / "train.py"
    script.write_text("import potluck")
    codes: list[str] = []
    loopback: Any = {"bind": "127.0.0.1", "device": "cpu", "view": "plain"}
    with potluck.start(host=True, lan=True, script=script, runs=tmp_path / "runs", **loopback) as run:
        for number in (1, 2):
            model = nn.Linear(2, 1)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for step in run.steps(model, optimizer, [torch.ones(2)] * 8, global_batch=4, steps=1, micro_batch=4):
                for batch in step:
                    step.backward(model(batch).mean())
                codes += re.findall(CODE, capsys.readouterr().out)
                assert code_module.redeem("127.0.0.1", Announced.last.port, codes[-1]) == run.token
            assert len(codes) == number


def wrong_codes(folder: Path) -> int:
    return sum(isinstance(event, StrangerRefused) for event in read_events(folder))


def free_port() -> int:
    """With a free one after it."""
    for port in range(42000, 43000, 2):
        with contextlib.suppress(OSError):
            for number in (port, port + 1):
                socket.create_server(("127.0.0.1", number)).close()
            return port
    raise AssertionError


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_a_qr_code_holds_the_line_and_fits_a_terminal() -> None:
    class Stream:
        encoding = "utf-8"

    line = "potluck join potluck3-" + "A" * 110
    drawn = qr_code(line, Stream()).splitlines()
    assert max(map(len, drawn)) < 80
    assert len(drawn) < 40
    Stream.encoding = "latin-1"
    assert qr_code(line, Stream()).isascii()
