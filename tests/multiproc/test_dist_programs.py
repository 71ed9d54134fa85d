"""Other people's programs on the backend, and the ways in which they train: the numbers of one process.

One pair of ranks goes through all of them. guides/other-programs.md says no more than what is tried here.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from support.dist_programs import LR, STEPS
from support.dist_training import alone, batch, losses, model
from support.ranks import Ranks

PROGRAMS = "support.dist_programs:"


def needs(package: str, why: str = "pip install -e '.[programs]'") -> pytest.MarkDecorator:
    """Without importing it, which takes seconds."""
    return pytest.mark.skipif(importlib.util.find_spec(package) is None, reason=f"{package} is not here: {why}")


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    pool = Ranks(2)
    yield pool
    pool.close()


@pytest.mark.parametrize("way", ["nanochat", "fsdp1", "tensor_parallel", "pipelined", "sharded_optimizer"])
def test_the_ways_in_which_programs_train(ranks: Ranks, way: str) -> None:
    for found in ranks.call(f"{PROGRAMS}{way}", 2, deadline_s=55):
        assert found == pytest.approx(alone(2), rel=1e-5)


def test_a_distributed_checkpoint_goes_on_where_it_was_saved(ranks: Ranks) -> None:
    for found in ranks.call(f"{PROGRAMS}checkpointed", 2, deadline_s=55):
        assert found == pytest.approx(alone(2)[STEPS // 2 :], rel=1e-5)


@needs("accelerate")
def test_accelerate(ranks: Ranks) -> None:
    for found, wrapped in ranks.call(f"{PROGRAMS}accelerate", 2, deadline_s=55):
        assert wrapped == "DistributedDataParallel"
        assert found == pytest.approx(alone(2), rel=1e-5)


@needs("accelerate")
@pytest.mark.skipif(torch.accelerator.is_available(), reason="on this machine Accelerate takes the accelerator")
def test_what_accelerate_does_when_it_is_asked_otherwise(ranks: Ranks) -> None:
    """So the guide says: were one of these to work one day, it should say so."""
    for _, wrapped in ranks.call(f"{PROGRAMS}accelerate", 2, False):
        assert wrapped == "Sequential"  # without cpu=True nothing is synchronised
    for answer in ranks.call(f"{PROGRAMS}accelerate_told_the_backend", 2):
        assert "potluck is not available" in answer


@needs("lightning")
def test_lightning_and_its_averages(ranks: Ranks) -> None:
    single = model()
    trained = losses(single, torch.optim.SGD(single.parameters(), lr=LR), [0, 1])
    with torch.no_grad():
        held_out = [single(batch(rank, step)).pow(2).mean() for rank in range(2) for step in range(STEPS)]
        weights = torch.cat([p.flatten() for p in single.parameters()]).double().sum()
    wanted = {"weights": float(weights), "whole": 5.0}
    wanted |= {"loss": sum(trained) / STEPS, "held out": float(torch.stack(held_out).mean())}
    for found in ranks.call(f"{PROGRAMS}lightning", 2, deadline_s=55):
        assert found == pytest.approx(wanted, rel=1e-4)


@needs("lightning")
def test_fabric(ranks: Ranks) -> None:
    for found, average in ranks.call(f"{PROGRAMS}fabric", 2, deadline_s=55):
        assert found == pytest.approx(alone(2), rel=1e-5)
        assert average == 5


@needs("deepspeed", "it is built from source, and compiles its parts when it is used")
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_deepspeed(ranks: Ranks) -> None:
    with Ranks(2) as own:
        for stages in own.call(f"{PROGRAMS}deepspeed", 2, deadline_s=250):
            assert len(stages) == 4
            assert all(found == pytest.approx(alone(2), rel=1e-4) for found in stages)


@needs("ray", "80 MB, and a cluster to start")
@pytest.mark.clusters
@pytest.mark.timeout(400)  # on a busy machine: Ray starts ten processes, and two of them import torch
def test_ray_train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import ray
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    from support.dist_programs import ray_loop
    from support.ray_nodes import QUIET

    for name, value in QUIET.items():  # the workers' niceness, too: with Ray's 15 they starve on a busy machine
        monkeypatch.setenv(name, value)
    folder = str(Path(__file__).resolve().parents[1])
    ray.init(num_cpus=3, include_dashboard=False, runtime_env={"env_vars": {"PYTHONPATH": folder}})
    try:
        trainer = TorchTrainer(
            ray_loop,
            train_loop_config={"file": str(tmp_path / "told")},
            torch_config=TorchConfig(backend="potluck"),
            scaling_config=ScalingConfig(num_workers=2),
            run_config=RunConfig(storage_path=str(tmp_path)),
        )
        trainer.fit()
    finally:
        ray.shutdown()
    told = json.loads((tmp_path / "told").read_text())
    assert (told["backend"], told["wrapped"]) == ("potluck", "DistributedDataParallel")
    assert told["losses"] == pytest.approx(alone(2), rel=1e-5)
