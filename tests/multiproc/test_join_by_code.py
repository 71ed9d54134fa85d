"""`potluck host --lan` and `potluck join` without a token: real processes, real multicast on this machine."""

from __future__ import annotations

import contextlib
import re
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("spake2", reason="needs the extra lan")
pytest.importorskip("zeroconf", reason="needs the extra lan")

from potluck.cli import _by_code
from potluck.cli._sharing import Sharing, qr_code, shared
from potluck.errors import MissingModuleError, NetworkError, TokenError
from potluck.spec.events import RunEvent, StrangerRefused, to_json
from potluck.wire import code as code_module
from potluck.wire import discovery
from potluck.wire.discovery import AnnouncedRun, Announcement, look
from potluck.wire.frames import PROTOCOL
from potluck.wire.token import Token, encode
from support.fleet import JOB, TORCH_STARTS_S, Fleet
from support.leaks import leaks
from support.processes import _environment

CODE = r"(?m)^  (\d\d-[a-z]+-[a-z]+)$"


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")
def test_a_person_types_the_code_and_the_machine_joins(tmp_path: Path) -> None:
    pexpect = pytest.importorskip("pexpect")
    with Fleet(tmp_path / "fleet") as fleet:
        words = ["--lan", "--qr", "--wait-for", "1", "--device", "paced:0.01"]
        host = fleet.host(JOB, *words, arguments=["--steps", "5"])
        code = host.wait_for_text(CODE, TORCH_STARTS_S)[1]
        assert "█▀▀▀▀▀█" in host.stdout() or "▄▄▄▄▄" in host.stdout()
        with pytest.raises(TokenError, match="does not know this code"):
            _by_code.token_by_code(re.sub("-.*", "-yak-yak", code))
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
    monkeypatch.setattr(_by_code, "look", lambda number=None: found)
    with pytest.raises(NetworkError, match="run 12 was not seen in this network within 5 s") as unseen:
        _by_code.token_by_code("12-maple-otter")
    assert "UDP port 5353" in (unseen.value.hint or "")
    assert "The token always works" in (unseen.value.hint or "")
    found[:] = [announced(12), announced(12, addresses=("10.0.0.9",))]
    with pytest.raises(TokenError, match=r"several machines announce run 12: 127.0.0.1, 10.0.0.9"):
        _by_code.token_by_code("12-maple-otter")
    found[:] = [announced(12, protocol=PROTOCOL + 1)]
    with pytest.raises(TokenError, match=f"of protocol {PROTOCOL + 1}"):
        _by_code.token_by_code("12-maple-otter")
    found[:] = [announced(12)]
    with pytest.raises(NetworkError, match="did not send the token"):
        _by_code.token_by_code("12-maple-otter")


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
    monkeypatch.setattr(_by_code, "redeem", lambda address, port, code: f"the token for {code}")
    person = Person(monkeypatch, "12-mapel-otter", "56-maple-otter", "12 maple otter")
    assert _by_code.asked() == "the token for 12-maple-otter"
    said = capsys.readouterr().err
    assert "run 12 at 127.0.0.1" in said
    assert "run 34 at 127.0.0.1 (of another version of Potluck)" in said
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
    view: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(discovery, "Announcement", Announced)
    monkeypatch.setattr(code_module, "PAUSE_S", 0.0)
    port = free_port()
    emitted: list[RunEvent] = []
    shown: list[str] = []
    log = SimpleNamespace(emit=emitted.append)
    keys = {"host_public": bytes(32), "guest_secret": bytes(range(32))}
    token = encode(Token(addresses=("127.0.0.1",), port=port, **keys))
    run: Any = SimpleNamespace(
        token=token,
        spec=SimpleNamespace(config=SimpleNamespace(port=port)),
        context=SimpleNamespace(log=log),
        show=shown.append,
    )
    with shared(run, Sharing(lan=True), view, tell=False):
        assert Announced.last.port == port + 1
        codes = re.findall(CODE, capsys.readouterr()[view == "json"])
        assert len(codes) == 1
        assert code_module.redeem("127.0.0.1", port + 1, codes[0]) == token
        for number in range(1, 10):
            with pytest.raises(code_module.WrongCode):
                code_module.redeem("127.0.0.1", port + 1, "12-yak-yak")
            wait_until(lambda number=number: len([e for e in emitted if isinstance(e, StrangerRefused)]) == number)
        wait_until(lambda: len(emitted) == 11)
    said = capsys.readouterr().err if view == "json" else "\n".join(shown)
    codes += re.findall(r"that code is gone, the new one is (12-\w+-\w+)", said)
    assert len(set(codes)) == 3
    logged = [to_json(event).decode() for event in emitted]
    assert "got the token by the code" in logged[0]
    assert "joining by a code is off" in logged[-1]
    assert not [line for line in logged if any(code in line for code in codes)]


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
