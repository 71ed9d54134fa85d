"""`potluck bench` and `potluck probe` with tensors on a GPU."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from potluck.fleet.ranks import free_port
from potluck.spec.ddp_rows import from_json
from support.processes import Processes

pytestmark = [
    pytest.mark.skipif(sys.platform == "win32", reason="starts sessions of POSIX"),
    pytest.mark.timeout(150),
]
SMALL = ("--depth", "1", "--sequence", "16", "--steps", "2", "--global-batch", "8")
ONE_RANK = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}


def test_a_single_gpu_learns_what_the_cpu_does(tmp_path: Path) -> None:
    files = {device: tmp_path / f"{device}.json" for device in ("cpu", "cuda")}
    with Processes(tmp_path) as processes:
        for device, file in files.items():
            words = ("--device", device, "--processes", "1", "--json", str(file))
            processes.potluck("bench", "ddp", *SMALL, *words).succeeds(deadline_s=60)
        table = processes.potluck("bench", "ddp", "--merge", *map(str, files.values())).succeeds(deadline_s=60)
    (cpu,), (gpu,) = (from_json(file.read_text(), str(file)) for file in files.values())
    assert gpu.label == "single GPU"
    assert gpu.device.startswith(torch.cuda.get_device_name(0))
    assert gpu.loss == pytest.approx(cpu.loss, rel=1e-3)
    assert "| single GPU |" in table


def test_two_ranks_share_a_gpu_on_our_backend(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    with Processes(tmp_path) as processes:
        words = ("--device", "cuda:0", "--processes", "2", "--json", str(file))
        processes.potluck("bench", "ddp", *SMALL, *words, children=2).succeeds(deadline_s=100)
        words = ("--device", "cuda:0", "--sizes", "4K,1M", "--repeats", "2", "--json", "-")
        rows = processes.potluck("bench", "collectives", *words, children=2).succeeds(deadline_s=100)
    assert from_json(file.read_text(), str(file))[0].label == "single GPU, 2 processes"
    assert [row["wrong"] for row in json.loads(rows)] == [0, 0]


@pytest.mark.skipif(not torch.distributed.is_nccl_available(), reason="this torch has no NCCL")
def test_nccl_measures_a_group_of_one(tmp_path: Path) -> None:
    with Processes(tmp_path) as processes:
        words = ("--device", "cuda", "--backend", "nccl", "--sizes", "4K,1M", "--repeats", "2", "--json", "-")
        environment = {**ONE_RANK, "MASTER_PORT": str(free_port())}
        rows = processes.potluck("bench", "collectives", *words, env=environment).succeeds(deadline_s=100)
    assert [row["wrong"] for row in json.loads(rows)] == [0, 0]
