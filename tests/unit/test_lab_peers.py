"""The extra `peers`: reasons in words where it is missing, whose samples count, and what a row says."""

from __future__ import annotations

import importlib.util
import json
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from potluck import checked
from potluck.errors import ConfigError
from potluck.lab import peer_strategies
from potluck.lab.hivemind_worker import granule
from potluck.lab.peer_run import Orders, StepPart, StepRecord, read_orders

SOURCE = Path(__file__).resolve().parents[2] / "src"


def on_linux(monkeypatch: pytest.MonkeyPatch, *installed: str) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if name in installed else None)


def test_what_is_not_installed_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    on_linux(monkeypatch, "torchft")
    missing = dict.fromkeys(("ray-ps-sync", "ray-ps-async"), "ray is not installed")
    assert peer_strategies.available() == {"hivemind": "hivemind is not installed", "torchft": None, **missing}


def test_elsewhere_the_reason_is_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    on_linux(monkeypatch)
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    assert peer_strategies.available() == {
        "hivemind": "hivemind is not installed",
        "torchft": "torchft is published for x86-64 only, this is aarch64",
        "ray-ps-sync": "ray is not installed",
        "ray-ps-async": "ray is not installed",
    }
    on_linux(monkeypatch, "hivemind", "torchft")
    monkeypatch.setattr(sys, "platform", "darwin")
    assert set(peer_strategies.available().values()) == {"it runs in network namespaces, which need Linux"}


def test_a_command_names_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    on_linux(monkeypatch, "hivemind", "torchft", "ray")
    for name in peer_strategies.NAMES:
        words = peer_strategies.command(name, Path("spec.json"), 1)
        module = "ray_ps" if name.startswith("ray") else name
        assert words == ["-m", f"potluck.lab.{module}_worker", "--spec", "spec.json", "--rank", "1"]
        assert (SOURCE / "potluck" / "lab" / f"{module}_worker.py").exists()
        assert peer_strategies.note(name)


def test_no_command_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    on_linux(monkeypatch)
    with pytest.raises(ConfigError, match="torchft cannot run here: torchft is not installed") as caught:
        peer_strategies.command("torchft", Path("spec.json"), 0)
    assert ".[peers]" in caught.value.hint
    with pytest.raises(ConfigError, match="no peer strategy 'horovod'"):
        peer_strategies.command("horovod", Path("spec.json"), 0)


def test_asking_imports_nothing_heavy() -> None:
    code = (
        "import sys; from potluck.lab import peer_strategies; peer_strategies.available(); "
        "print('heavy:', *[m for m in ('torch', 'hivemind', 'torchft', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": str(SOURCE)}, capture_output=True, text=True, timeout=30
    )
    assert done.stdout.split() == ["heavy:"], done.stderr


# -- orders ---------------------------------------------------------------------------------------------


def orders(folder: Path, rank: int = 0, *, devices: tuple[str, str] = ("paced:0.15", "paced:0.6")) -> Orders:
    machines = [
        {"name": name, "device": device, "micro_batch": 4, "share": share, "address": f"10.0.0.{number}"}
        for number, (name, device, share) in enumerate(zip(("desk", "laptop"), devices, (38, 10)), 1)
    ]
    spec = {
        "recipe": {"name": "gpt", "config": {}},
        "members": machines,
        "steps": 3,
        "seed": 1,
        "master_address": "10.0.0.1",
        "master_port": 1,
        "interface": "eth0",
        "out": str(folder / "out.jsonl"),
        "threads": 1,
    }
    path = folder / "spec.json"
    path.write_text(json.dumps(spec))
    return read_orders(path, rank)


def test_shares_are_every_sample_of_a_step_once(tmp_path: Path) -> None:
    host, guest = orders(tmp_path, 0), orders(tmp_path, 1)
    assert guest.address == "10.0.0.2"
    assert not guest.is_host
    both = host.positions(2, 0, 38) + guest.positions(2, 0, 10)
    assert both == list(range(96, 144))
    assert guest.positions(2, 9, 3) == [143, 96, 97]  # past its share, and past the step's end


def test_a_slow_machine_reports_often(tmp_path: Path) -> None:
    # A step of both takes 5.76 s, of which a micro-batch may take a twentieth.
    assert granule(orders(tmp_path, 0)) == 1
    assert granule(orders(tmp_path, 1)) == 1
    assert granule(orders(tmp_path, 0, devices=("paced:0.05,9=0.1", "paced:0.2"))) == 1
    assert granule(orders(tmp_path, 0, devices=("paced:0.01", "paced:0.6"))) == 2
    assert granule(orders(tmp_path, 0, devices=("cpu", "paced:0.6"))) == 4


# -- the record -----------------------------------------------------------------------------------------


class Notes:
    """A board without a network."""

    def __init__(self) -> None:
        self.said: dict[str, bytes] = {}

    def put(self, key: str, value: Any) -> None:
        self.said[key] = msgspec.json.encode(value)

    def look(self, key: str, kind: Any) -> Any | None:
        return None if key not in self.said else checked.decode(self.said[key], kind)


BOTH = ("desk", "laptop")


def rows(folder: Path) -> list[dict[str, Any]]:
    path = folder / "out.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_a_row_is_written_when_all_have_said_what_they_gave(tmp_path: Path) -> None:
    notes: Any = Notes()
    host, guest = StepRecord(orders(tmp_path, 0), notes), StepRecord(orders(tmp_path, 1), notes)
    host.ended(1, StepPart(samples=39, loss_sum=78.0, group=BOTH))
    host.flush()
    assert rows(tmp_path) == []
    guest.ended(1, StepPart(samples=10, loss_sum=30.0, group=BOTH))
    host.ended(2, StepPart(samples=38, loss_sum=38.0, group=BOTH))
    host.flush()
    [row] = rows(tmp_path)
    assert row["step"] == 1
    assert row["samples"] == {"desk": 39, "laptop": 10}
    assert row["loss"] == pytest.approx(108 / 49)
    guest.ended(2, StepPart(samples=10, loss_sum=10.0, group=BOTH))
    host.flush(5)
    first, second = rows(tmp_path)
    assert second["ended_at"] - first["ended_at"] == pytest.approx(second["step_s"])


def test_who_was_averaged_without_the_host_does_not_count(tmp_path: Path) -> None:
    notes: Any = Notes()
    host, guest = StepRecord(orders(tmp_path, 0), notes), StepRecord(orders(tmp_path, 1), notes)
    guest.ended(1, StepPart(samples=10, loss_sum=30.0, group=("laptop",)))
    host.ended(1, StepPart(samples=39, loss_sum=78.0, group=BOTH))
    guest.ended(2, StepPart(samples=10, loss_sum=30.0, group=BOTH))
    host.ended(2, StepPart(samples=39, loss_sum=78.0, group=()))  # its averaging failed: it went on alone
    host.flush()
    assert [row["samples"] for row in rows(tmp_path)] == [{"desk": 39}, {"desk": 39}]


def test_a_silent_guest_is_left_out_at_the_end(tmp_path: Path) -> None:
    notes: Any = Notes()
    host = StepRecord(orders(tmp_path, 0), notes)
    host.ended(1, StepPart(samples=39, loss_sum=78.0, group=BOTH))
    host.flush(0.1)
    assert [row["samples"] for row in rows(tmp_path)] == [{"desk": 39}]
