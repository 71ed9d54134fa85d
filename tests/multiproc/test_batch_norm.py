"""A CNN with BatchNorm learns with Potluck as in a plain loop, alone and with a guest; it finds the micro-batch."""

from __future__ import annotations

import importlib.util
import json
import statistics
from pathlib import Path
from types import ModuleType

import pytest
import torch

from support.fleet import Fleet

SCRIPT = Path(__file__).parents[2] / "bench" / "batchnorm.py"
SEEDS = range(4)
PACES = {0: "paced:0.0006", 1: "paced:0.004"}
"""By the number of guests. Every sample takes the same time, whatever the micro-batch: a search for the fastest
ends at 2 or 4, which costs 0.2 to 0.6 of validation loss here."""


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    spec = importlib.util.spec_from_file_location("bench_batchnorm", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def worst(bench: ModuleType) -> float:
    """The largest validation loss that chance explains: four deviations above the plain loop's mean."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    losses = [bench.plain(seed) for seed in SEEDS]
    torch.set_num_threads(threads)
    return statistics.mean(losses) + 4 * statistics.stdev(losses)


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("guests", [0, 1])
def test_batch_norm_learns_as_in_a_plain_loop(tmp_path: Path, bench: ModuleType, worst: float, guests: int) -> None:
    out = tmp_path / "loss.json"
    with Fleet(tmp_path) as fleet:
        host = fleet.host(SCRIPT, "--wait-for", str(guests), "--device", PACES[guests], arguments=["--out", out])
        helpers = [fleet.guest("ann", "--device", PACES[guests]) for _ in range(guests)]
        host.succeeds(deadline_s=150)
        for helper in helpers:
            helper.succeeds(deadline_s=20)
        fleet.assert_every_step_is_full(global_batch=bench.BATCH, steps=bench.STEPS)
        steps, told = fleet.steps(), fleet.events("batch_statistics")

    loss = json.loads(out.read_text())
    assert loss < worst, f"validation loss {loss:.3f}, at most {worst:.3f} by chance"
    rows = [machine for step in steps for machine in step["machines"] if machine["samples"]]
    assert guests == 0 or sum(row["name"] == "ann" for row in rows) > bench.STEPS / 4, "the guest did not help"
    smallest = min(row["samples"] / row["micro_batches"] for row in rows)
    assert smallest >= 4, f"{smallest} samples at once on average in some step"
    usual = statistics.median(bench.BATCH / sum(m["micro_batches"] for m in s["machines"]) for s in steps)
    assert usual >= bench.BATCH / (1 + guests)
    assert told
    assert told[0]["layers"] == 4
