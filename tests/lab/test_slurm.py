"""The batch script of examples/cluster on a real Slurm of two nodes, which are namespaces on this box."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.fleet import JOB
from support.slurm import Slurm, missing
from support.two_machines import TwoMachines, why_not

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "cluster" / "slurm.sbatch"
FAKE = """#!/bin/sh
case $1 in
  host) echo failed; exit 3 ;;
  join) echo waiting; exec sleep 60 ;;
esac
"""

pytestmark = [
    pytest.mark.root,
    pytest.mark.slow,
    pytest.mark.skipif(why_not() is not None, reason=why_not() or ""),
    pytest.mark.skipif(missing() is not None, reason=missing() or ""),
    pytest.mark.timeout(300),
]


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    folder = tmp_path_factory.mktemp("cluster")
    with TwoMachines(folder / "net") as net, Slurm(net, folder / "slurm") as cluster:
        yield cluster


def test_the_host_runs_in_one_partition_and_a_guest_in_another(slurm: Slurm, tmp_path: Path) -> None:
    if not (Path(sys.prefix) / "bin" / "activate").exists():
        pytest.skip("needs a virtual environment to activate")
    words = [str(JOB), "--wait-for", "1", "--runs", str(tmp_path / "runs"), "--device", "paced:0.02"]
    env = {"VENV": sys.prefix, "SHARED": str(tmp_path), "OMP_NUM_THREADS": "1"}
    status, log = slurm.job(str(SCRIPT), *words, "--", "--steps", "5", env=env, deadline_s=250)
    assert status == "0", log
    (run,) = (tmp_path / "runs").iterdir()
    token = (run / "token").read_text().strip()
    machines = {m["name"]: m["role"] for m in json.loads((run / "manifest.json").read_text())["machines"]}
    assert machines == {"alpha": "host", "beta": "guest"}
    assert "the run is over: finished" in log
    # The token is in no log, and its file is gone.
    assert token not in log
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]


def test_without_partitions_and_with_a_host_that_fails(slurm: Slurm, tmp_path: Path) -> None:
    """The job ends with the host's status, and guests that wait for a token are ended."""
    lines = SCRIPT.read_text().splitlines(keepends=True)
    of_het_job = [line for line in lines if line.startswith(("#SBATCH --partition", "#SBATCH hetjob"))]
    assert len(of_het_job) == 3
    plain = tmp_path / "plain.sbatch"
    plain.write_text("".join(line for line in lines if line not in of_het_job))
    bin_ = tmp_path / "venv" / "bin"
    bin_.mkdir(parents=True)
    (bin_ / "activate").write_text(f"PATH={bin_}:$PATH")
    (bin_ / "potluck").write_text(FAKE)
    (bin_ / "potluck").chmod(0o755)
    env = {"VENV": str(bin_.parent), "SHARED": str(tmp_path)}
    status, log = slurm.job("--partition=all", "--nodes=2", str(plain), "my_train.py", env=env, deadline_s=50)
    assert status == "3", log
    assert "failed" in log
