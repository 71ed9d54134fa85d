"""`potluck lab bench` from the outside: short versions of home-pair and hopeless, the JSON's shape, no leftovers.

The rigs are the built-in ones with a smaller model and a faster clock: the ratios that matter are the same.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from potluck.lab.permission import why_not
from potluck.spec.rig import Rig
from support.processes import Processes, TestProcess
from support.rigs import short, to_toml

REASON = why_not()
pytestmark = [
    pytest.mark.skipif(REASON is not None, reason=str(REASON)),
    pytest.mark.slow,
    pytest.mark.timeout(150),
]
ROW = {
    "strategy",
    "step_s",
    "samples_per_s",
    "speedup",
    "efficiency",
    "recovery",
    "bytes_per_step",
    "loss",
    "samples_per_step",
}


def started(processes: Processes, folder: Path, rig: Rig, *options: str) -> TestProcess:
    folder.mkdir(exist_ok=True)
    file = folder / "rig.toml"
    file.write_text(to_toml(rig))
    command = ["lab", "bench", str(file), "--json", "-", "--out", str(folder / "out"), *options]
    return processes.potluck(*command, children=4)  # alone twice, and two together


def result(process: TestProcess) -> dict[str, Any]:
    return dict(json.loads(process.succeeds(deadline_s=140)))


def rows_of(found: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {row["strategy"]: row for row in found["rows"]}


@pytest.fixture(scope="module")
def benches(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], dict[str, Any]]]:
    """By a rig's name its figures, or others if asked again. The first time both run side by side: their devices
    mostly sleep, and each bench takes a quarter of a core."""
    folder = tmp_path_factory.mktemp("benches")
    rigs = {"home-pair": short("home-pair", steps=7, faster=8), "hopeless": short("hopeless", steps=7, faster=10)}
    with Processes(folder) as processes:

        def start(name: str) -> tuple[Path, TestProcess]:
            plots = () if name == "home-pair" else ("--no-plots",)
            place = Path(tempfile.mkdtemp(prefix=name, dir=folder))
            return place, started(processes, place, rigs[name], "--strategy", "potluck", *plots)

        first = {name: start(name) for name in rigs}
        for _, process in first.values():
            process.succeeds(deadline_s=140)

        def figures(name: str) -> dict[str, Any]:
            place, process = first.pop(name, None) or start(name)
            return {**result(process), "folder": place / "out"}

        yield figures


def best(benches: Callable[[str], dict[str, Any]], name: str, enough: float) -> dict[str, Any]:
    """The bench with the highest speedup of up to three: what else runs here may strike one of its parts."""
    found = [benches(name)]
    while (speedup := max(found, key=_speedup)) and _speedup(speedup) <= enough and len(found) < 3:
        found.append(benches(name))
    assert _speedup(speedup) > enough, [_speedup(each) for each in found]
    return speedup


def _speedup(found: dict[str, Any]) -> float:
    return float(rows_of(found)["potluck"]["speedup"])


@pytest.mark.alone
@pytest.mark.timeout(450)
def test_home_pair_gains_and_its_json_has_the_shape_that_programs_read(
    benches: Callable[[str], dict[str, Any]],
) -> None:
    # Quiet, it is 1.2; a busy machine takes some of that, but a fleet that gains nothing must fail.
    found = best(benches, "home-pair", 1.08)
    assert found["rig"]["name"] == "home-pair"
    assert found["ideal_speedup"] == pytest.approx(1.25, rel=0.05)
    rows = rows_of(found)
    assert list(rows) == ["solo", "potluck"]
    for row in rows.values():
        assert set(row) >= ROW
        assert row["samples_per_step"] == [48, 48]
    assert found["warm_up_steps"] == 2
    assert rows["solo"]["speedup"] == pytest.approx(1.0)
    assert rows["potluck"]["loss"] == pytest.approx(rows["solo"]["loss"], abs=0.2)
    # Two coded messages of half a byte a parameter, and little else.
    assert 0.4e6 < rows["potluck"]["bytes_per_step"] < 1.0e6
    for name in ("speedup", "timeline", "loss"):
        for kind in ("png", "svg"):
            assert (found["folder"] / f"{name}.{kind}").stat().st_size > 5_000


@pytest.mark.alone
@pytest.mark.timeout(450)
def test_a_hopeless_guest_costs_the_host_nothing(benches: Callable[[str], dict[str, Any]]) -> None:
    found = best(benches, "hopeless", 0.95)  # quiet: 0.99 and more
    assert rows_of(found)["potluck"]["samples_per_step"] == [102, 102]


def test_ddp_runs_between_the_machines(tmp_path: Path) -> None:
    rig = short("home-pair", steps=3, faster=20)
    with Processes(tmp_path) as processes:
        found = result(started(processes, tmp_path, rig, "--strategy", "ddp-balanced", "--no-plots"))
    row = rows_of(found)["ddp-balanced"]
    assert row["samples_per_step"] == [48, 48]
    # Each sends the fp32 gradients and receives as many.
    assert 1.5 * 4 * 0.48e6 < row["bytes_per_step"] < 3 * 4 * 0.48e6


def test_killed_in_the_middle_it_leaves_nothing(tmp_path: Path) -> None:
    file = tmp_path / "rig.toml"
    file.write_text(to_toml(short("home-pair", steps=60)))
    command = [sys.executable, "-m", "potluck", "lab", "bench", str(file), "--strategy", "potluck", "--no-plots"]
    process = subprocess.Popen(
        [*command, "--out", str(tmp_path / "out")], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        deadline = time.monotonic() + 60
        while not list(tmp_path.glob("out/solo/*/events.jsonl")) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert mentioning(str(tmp_path)), "the bench started nothing"
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    deadline = time.monotonic() + 10
    while mentioning(str(tmp_path)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert mentioning(str(tmp_path)) == []


def mentioning(word: str) -> list[str]:
    """The command lines of running processes that name a path of this test."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if word in line:
            found.append(line)
    return found
