"""The lab's strategies `ray-ps-sync` and `ray-ps-async`: both train on a short version of home-pair."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.ray_cluster import WHY_NOT
from support.rigs import SOURCE, short, to_toml

pytestmark = [
    pytest.mark.clusters,
    pytest.mark.slow,
    pytest.mark.root,
    pytest.mark.skipif(WHY_NOT is not None, reason=WHY_NOT or ""),
]
STEPS = 5


@pytest.mark.timeout(600)  # of a busy machine: two clusters are started, and six processes import torch
def test_rays_parameter_servers_train_on_unequal_machines(tmp_path: Path) -> None:
    (tmp_path / "rig.toml").write_text(to_toml(short("home-pair", steps=STEPS)))
    words = ["lab", "bench", str(tmp_path / "rig.toml"), "--json", "-", "--out", str(tmp_path / "out")]
    words += ["--no-plots", "--strategy", "ray-ps-sync", "--strategy", "ray-ps-async"]
    ended = subprocess.run(
        [sys.executable, "-m", "potluck", *words],
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
        stdout=subprocess.PIPE,
        timeout=580,
    )
    assert ended.returncode == 0
    rows = {row["strategy"]: row for row in json.loads(ended.stdout)["rows"]}
    # All gradients of a step are summed, weighted: the mathematics of one machine.
    assert rows["ray-ps-sync"]["loss"] == pytest.approx(rows["solo"]["loss"], rel=1e-3)
    assert rows["ray-ps-async"]["loss"] < 1.5 * rows["solo"]["loss"]
    # Half of the samples each, however slow one of them is; without waiting the faster one computes more.
    assert [set(step.values()) for step in samples(tmp_path / "out" / "ray-ps-sync")] == [{24}] * STEPS
    steps = samples(tmp_path / "out" / "ray-ps-async")
    assert sum(step.get("desk", 0) for step in steps) > sum(step.get("laptop", 0) for step in steps)


def samples(folder: Path) -> list[dict[str, int]]:
    """Of each machine, by step."""
    return [json.loads(line)["samples"] for line in (folder / "steps.jsonl").read_text().splitlines()]
