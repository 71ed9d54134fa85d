"""The trace of computing: its lines, where it is split, and that every line is in the file at once."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from potluck.device import pick, trace
from potluck.device.trace import Trace
from potluck.errors import ConfigError


class Clock:
    """Stands for the time module."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(trace, "time", clock)
    return clock


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "trace.jsonl"


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_an_interval_is_a_line_that_is_there_at_once(clock: Clock, file: Path) -> None:
    written = Trace(file)
    assert lines(file) == []
    written.begin(4)
    clock.now_s = 102.5
    written.end()
    assert lines(file) == [{"start": 100.0, "end": 102.5, "samples": 4}]
    clock.now_s = 103.0
    written.begin(2)
    clock.now_s = 104.0
    written.end()
    assert lines(file)[1:] == [{"start": 103.0, "end": 104.0, "samples": 2}]
    written.close()


def test_waiting_splits_an_interval_and_the_samples_add_up(clock: Clock, file: Path) -> None:
    written = Trace(file)
    written.begin(4)
    clock.now_s = 105.0
    written.waited(3.0)
    clock.now_s = 106.0
    written.waited(0.5)
    clock.now_s = 107.0
    written.end()
    written.close()
    assert lines(file) == [
        {"start": 100.0, "end": 102.0, "samples": 0},
        {"start": 105.0, "end": 105.5, "samples": 0},
        {"start": 106.0, "end": 107.0, "samples": 4},
    ]


def test_a_layer_whose_weights_are_there_splits_nothing(clock: Clock, file: Path) -> None:
    written = Trace(file)
    written.begin(1)
    for seconds in (0.0, 1e-6):
        clock.now_s += 1.0
        written.waited(seconds)
    written.end()
    written.close()
    assert lines(file) == [{"start": 100.0, "end": 102.0, "samples": 1}]


def test_what_is_not_ended_is_forgotten_and_waiting_outside_is_nothing(clock: Clock, file: Path) -> None:
    written = Trace(file)
    written.waited(1.0)
    written.end()
    written.begin(9)
    clock.now_s = 110.0
    written.begin(1)
    clock.now_s = 111.0
    written.end()
    written.waited(1.0)
    written.close()
    assert lines(file) == [{"start": 110.0, "end": 111.0, "samples": 1}]


def test_lines_are_added_to_what_is_there(clock: Clock, file: Path) -> None:
    for samples in (1, 2):
        written = Trace(file)
        written.begin(samples)
        written.end()
        written.close()
    assert [line["samples"] for line in lines(file)] == [1, 2]


def test_a_file_that_cannot_be_written_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot write the trace") as caught:
        Trace(tmp_path / "missing" / "trace")
    assert "POTLUCK_TRACE" in caught.value.hint


def test_a_full_disk_is_a_clear_error() -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")
    written = Trace(Path("/dev/full"))
    written.begin(1)
    with pytest.raises(ConfigError, match="No space left"):
        written.end()
    written.close()


def test_a_paced_device_is_traced_by_its_line(file: Path) -> None:
    device, model = pick("paced:0.01,2=0.02", threads=1), nn.Linear(4, 4)
    device.trace = Trace(file)
    device.attach(model)
    before_s = time.monotonic()
    for step in (1, 2):
        device.at_step(step)
        device.begin(4)
        model(torch.randn(4, 4)).sum().backward()
        device.end()
    after_s = time.monotonic()
    device.trace.close()
    first, second = lines(file)
    assert before_s - 1e-6 <= first["start"] < first["end"] <= second["start"] < second["end"] <= after_s + 1e-6
    assert first["end"] - first["start"] >= 0.95 * 0.04
    # What the first one overslept, on a busy machine, the second makes up for.
    assert second["end"] - first["start"] >= 0.95 * (0.04 + 0.08)


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="ends with a signal of POSIX")
def test_a_killed_process_loses_only_what_it_was_computing(file: Path) -> None:
    script = (
        "import os, signal, sys; from pathlib import Path; from potluck.device.trace import Trace\n"
        "trace = Trace(Path(sys.argv[1]))\n"
        "for samples in range(1, 6): trace.begin(samples); trace.end()\n"
        "trace.begin(6); os.kill(os.getpid(), signal.SIGKILL)"
    )
    env = os.environ | {"PYTHONPATH": str(Path(trace.__file__).parents[2])}
    done = subprocess.run([sys.executable, "-c", script, str(file)], env=env, timeout=40)
    assert done.returncode == -signal.SIGKILL
    assert [line["samples"] for line in lines(file)] == [1, 2, 3, 4, 5]
