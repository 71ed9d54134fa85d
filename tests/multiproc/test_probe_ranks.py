"""`potluck probe` as ranks of torchrun, and the same table in a script whose group is up, with real processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from potluck.cli._app import run
from potluck.errors import UserError
from potluck.fleet.ranks import free_port
from potluck.probe import collectives
from potluck.report.collective_table import header, table
from potluck.report.probe_table import probe_lines
from potluck.spec.collective_rows import CollectiveRow
from potluck.spec.probed import DeviceSpeed, Probed
from support.processes import Processes

pytestmark = pytest.mark.timeout(150)
LIMIT_S = 100.0
SCRIPT = """
import torch.distributed as dist
from potluck.probe.collectives import short
from potluck.report.collective_table import table
dist.init_process_group("gloo")
rows = short(seconds=0.5)
if dist.get_rank() == 0:
    print("\\n".join(table(rows)), flush=True)
dist.destroy_process_group()
"""


def torchrun(folder: Path, *arguments: str) -> str:
    """What two ranks wrote."""
    with Processes(folder) as processes:
        words = ("--master-port", str(free_port()), *arguments)
        return processes.torchrun(*words, env={"COLUMNS": "80"}).succeeds(LIMIT_S)


def test_ranks_of_torchrun_measure_collectives(tmp_path: Path) -> None:
    """The first rank speaks: one table, one document; the file is for a plan, as always."""
    probe = ("-m", "potluck", "probe", "--no-device", "--seconds", "2")
    measured = json.loads(torchrun(tmp_path, *probe, "--json", "--save", "facts.json"))
    assert json.loads((tmp_path / "facts.json").read_text()) == measured
    rows = measured["collectives"]
    assert rows[0]["size_bytes"] == 4096
    for row in rows:
        assert (row["op"], row["world"], row["backend"], row["wrong"]) == ("all_reduce", 2, "potluck", 0)
        assert row["time_s"] > 0
        assert row["link_bytes_per_s"] > 0
    assert measured["link_kind"] == "memory"


def test_a_script_whose_group_is_up_has_the_same_table(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    lines = torchrun(tmp_path, "script.py").splitlines()
    assert lines[:2] == header()
    assert lines[2].endswith("| gloo")


def test_under_torchrun_there_is_no_other_side(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    variables = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    for arguments in (["--listen"], ["192.168.1.5"]):
        assert run(["probe", *arguments]) == 2
        told = capsys.readouterr().err
        assert "under torchrun" in told
        assert "hint: " in told


def test_without_a_group_it_says_what_is_missing() -> None:
    with pytest.raises(UserError, match="no process group") as caught:
        collectives.short()
    assert "init_process_group" in caught.value.hint


def row(size: int, time_s: float) -> CollectiveRow:
    return CollectiveRow(
        backend="potluck",
        op="all_reduce",
        size_bytes=size,
        count=size // 4,
        dtype="float",
        redop="sum",
        world=2,
        time_s=time_s,
        wrong=0,
        link_bytes_per_s=1e8,
    )


def test_a_thin_link_gets_the_sizes_that_are_over_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []

    def measured(groups: Any, op: str, sizes: list[int], *, repeats: int, **others: Any) -> Any:
        asked.append((sizes[0], repeats))
        yield row(sizes[0], sizes[0] / bytes_per_s)

    monkeypatch.setattr(collectives, "measure", measured)
    monkeypatch.setattr(collectives.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(collectives.dist, "get_backend", lambda: "potluck")
    monkeypatch.setattr(collectives.dist, "get_backend_config", lambda: "cpu:potluck")
    bytes_per_s = 1e6
    assert [r.size_bytes for r in collectives.short(seconds=5.0)] == [4 << 10, 64 << 10]
    bytes_per_s = 1e9
    assert [r.size_bytes for r in collectives.short(seconds=5.0)] == list(collectives.SHORT_SIZES)
    assert all(3 <= repeats <= 60 for _, repeats in asked)


@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_table_fits_the_terminal(width: int) -> None:
    rows = tuple(row(size, size / 1e8) for size in collectives.SHORT_SIZES)
    probed = Probed(here=DeviceSpeed(name="tower"), collectives=rows, link_kind="tcp")
    lines = [line.plain for line in probe_lines(probed, width)]
    assert max(map(len, lines)) <= width
    assert "2 ranks: all_reduce of " in lines[0]
    assert sum(line.split()[:1] == [str(row.size_bytes)] for line in lines for row in rows) == len(rows)
    assert table(rows, 200) == [*header(), *table(rows, 200)[2:]]
