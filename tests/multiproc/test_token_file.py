"""The token in a file: the host writes it for a batch system, and a guest may be there before the file is."""

from __future__ import annotations

import os
import socket
import stat
import threading
from pathlib import Path

import click
import pytest

from potluck import durable
from potluck.cli import join
from potluck.cli._options import duration
from potluck.errors import ConfigError, TokenError
from potluck.fleet.joining import token_in
from potluck.train.handing_out import in_file
from potluck.wire.token import Token, encode
from support.fleet import JOB, Fleet
from support.processes import Processes

DEADLINE_S = 60.0


@pytest.mark.slow
def test_a_guest_waits_for_the_file_that_the_host_writes(tmp_path: Path) -> None:
    file = tmp_path / "handed-on"
    with Fleet(tmp_path / "fleet") as fleet:
        early = fleet.guest("early", "--wait", "2m", token=file)
        early.wait_for_text("waiting for .*handed-on", DEADLINE_S)
        words = ["--token-file", str(file), "--wait-for", "1", "--device", "paced:0.01"]
        host = fleet.host(JOB, *words, arguments=["--steps", "5"])
        host.wait_until(file.exists, DEADLINE_S, "token file")
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        assert file.read_text() == (fleet.folder / "token").read_text()
        host.succeeds(DEADLINE_S)
        early.succeeds(DEADLINE_S)
        assert fleet.events("guest_joined", "early")
        assert not file.exists()
        # Its temporary name is gone, too.
        assert [path.name for path in tmp_path.iterdir()] == ["fleet"]


@pytest.mark.slow
def test_the_file_of_a_killed_host_does_not_hold_a_waiting_guest(tmp_path: Path) -> None:
    """The guest tries the host that is gone; once the next one has replaced the file, it takes that token."""
    file = tmp_path / "token"
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # and does not listen
        gone = Token(
            addresses=("127.0.0.1",), port=closed.getsockname()[1], host_public=bytes(32), guest_secret=bytes(32)
        )
        file.write_text(encode(gone))
        with Processes(tmp_path) as processes:
            guest = processes.potluck("join", "--token-file", str(file), "--wait", "10m", "--view", "plain")
            guest.wait_for_text("no answer yet", DEADLINE_S)
            durable.replace(file, "potluck3-of-the-next-run", what="token", private=True)
            guest.exits_with(2, DEADLINE_S)
            assert "has a new token: joining that run" in guest.stderr()


def test_the_file_is_gone_after_an_error_but_not_another_runs(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("of a run that was killed")
    file.chmod(0o644)

    def fail() -> None:
        with in_file(file, "mine"):
            assert file.read_text() == "mine\n"
            assert stat.S_IMODE(file.stat().st_mode) == 0o600
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert not file.exists()
    with in_file(file, "mine"):
        file.write_text("of another run")
    assert file.read_text() == "of another run"


@pytest.mark.skipif(os.name != "posix", reason="makes a pipe with a name")
def test_a_file_that_cannot_be_written_is_an_error_before_the_run(tmp_path: Path) -> None:
    for path, why in ((tmp_path / "none" / "token", "No such file"), (tmp_path, "not a regular file")):
        with (
            pytest.raises(ConfigError, match=why),
            in_file(path, "t"),
        ):
            pass
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with (
        pytest.raises(ConfigError, match="not a regular file"),
        in_file(pipe, "t"),
    ):
        pass
    assert stat.S_ISFIFO(pipe.stat().st_mode)


def test_an_empty_file_is_waited_for_and_a_missing_one_only_when_asked(tmp_path: Path) -> None:
    file = tmp_path / "token"
    with pytest.raises(TokenError, match="No such file") as missing:
        token_in(file, 0.0, print)
    assert "--wait 10m" in (missing.value.hint or "")
    file.write_text("")
    with pytest.raises(TokenError, match="it is empty"):
        token_in(file, 0.01, print)
    later = threading.Timer(0.05, file.write_text, ["the token\n"])
    later.start()
    assert token_in(file, 30.0, print) == "the token"
    later.join()
    with pytest.raises(TokenError, match="directory"):
        token_in(tmp_path, 30.0, print)  # waiting would not help


@pytest.mark.parametrize(
    ("text", "seconds"), [("90", 90.0), ("1.5", 1.5), ("30s", 30.0), ("10m", 600.0), ("2 h", 7200.0), (None, None)]
)
def test_durations(text: str | None, seconds: float | None) -> None:
    assert duration(click.Context(join.join), join.join.params[0], text) == seconds


@pytest.mark.parametrize("text", ["", "m", "-3", "10 miles", "1e3", "nan", "1m30"])
def test_what_is_no_duration(text: str) -> None:
    with pytest.raises(click.BadParameter, match="is not a duration"):
        duration(click.Context(join.join), join.join.params[0], text)
