"""Guests and runs on a cluster engine, as the driver sees them: what needs no engine."""

from __future__ import annotations

import io
import threading
from pathlib import Path
from typing import Any

import pytest

from potluck._version import __version__
from potluck.errors import MachineError
from potluck.fleet import kept, sealed
from potluck.fleet.cluster import ClusterState, FleetRun
from potluck.fleet.interface import GuestSettings
from potluck.fleet.polled import PolledGuests

pytest.importorskip("cryptography", reason="needs the extra dask or ray")


def test_another_version_is_refused_before_the_token_is_sent(tmp_path: Path) -> None:
    asked = []

    def ask(what: Any, *more: Any) -> Any:
        asked.append(what)
        return "0.0.1", b""

    with pytest.raises(MachineError, match=r"mac has Potluck 0\.0\.1") as caught:
        PolledGuests().start(ask, "mac", "token", GuestSettings(name="mac"), tmp_path / "log", "pip install it")
    assert (caught.value.hint, asked) == ("pip install it", [kept.hello])


def test_the_token_is_sealed_and_all_guests_end_at_the_same_time(tmp_path: Path) -> None:
    keys, opened, ended, together = sealed.KeyPair(), [], [], threading.Barrier(3)

    def ask(what: Any, *more: Any) -> Any:
        if what is kept.hello:
            return __version__, keys.public
        if what is kept.start:
            opened.append(keys.open(more[1]))
        if what is kept.end:
            together.wait(20)
            ended.append(more[0])
        return (b"", 0) if what is kept.poll else None

    guests = PolledGuests()
    for name in ("ann", "ben", "cat"):
        guests.start(ask, name, "the token", GuestSettings(name=name), tmp_path / name, "")
    guests.end()
    assert opened == ["the token"] * 3
    assert len(ended) == 3
    guests.end()  # harmless
    assert len(ended) == 3


def test_the_hosts_output_is_copied_to_its_end() -> None:
    output = b"step 1\nstep 2\n"
    states = iter([ClusterState(), ClusterState(folder="runs/1"), *[ClusterState(folder="runs/1", status=7)] * 9])

    def ask(what: str, *more: Any) -> Any:
        return next(states) if what == "state" else output[more[0] : more[0] + 9]

    stream = io.BytesIO()
    assert FleetRun(ask).follow(stream).status == 7
    assert stream.getvalue() == output
