"""Compressed DDP on stock gloo, in real processes: it learns as without, for fewer bytes, and feedback matters."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from support.processes import Processes

WORLD = 2
STEPS = 80
DEADLINE_S = 110.0
CASES = ("exact", "bf16", "int8", "int4", "topk:0.03", "int4 bfloat16", "powersgd:2", "topk:0.03 without")


def train(case: str) -> dict[str, Any]:
    """Some steps of a regression with one fixed batch for each rank; the loss over both at the end."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    from potluck.dist.hooks import compress

    codec, _, extra = case.partition(" ")
    torch.manual_seed(5)
    net = nn.Sequential(nn.Linear(32, 96), nn.Tanh(), nn.Linear(96, 96), nn.Tanh(), nn.Linear(96, 4))
    if extra == "bfloat16":
        net = net.to(torch.bfloat16)
    model = DistributedDataParallel(net, bucket_cap_mb=0.02)  # several buckets
    state = None
    if codec != "exact":
        state = compress(model, codec, feedback=extra != "without", start_step=4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.5)
    generator = torch.Generator().manual_seed(100 + dist.get_rank())
    dtype = next(net.parameters()).dtype
    inputs = torch.randn(64, 32, generator=generator).to(dtype)
    wanted = torch.stack([inputs[:, i] * inputs[:, i + 1] for i in range(4)], 1)
    for _ in range(STEPS):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), wanted).backward()
        optimizer.step()
    with torch.no_grad():
        loss = nn.functional.mse_loss(net(inputs), wanted).float()
    dist.all_reduce(loss)
    weights = torch.cat([p.detach().float().flatten() for p in net.parameters()])
    result: dict[str, Any] = {"loss": loss.item() / WORLD, "weights": weights.double().sum().item()}
    if state is not None:
        result |= {"sent": state.sent_bytes, "exact": state.exact_bytes}
    return result


def main(rank: int, store: str) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD)
    print(json.dumps({case: train(case) for case in CASES}), flush=True)
    dist.destroy_process_group()


pytestmark = pytest.mark.timeout(DEADLINE_S + 20)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("hooks")
    tests = str(Path(__file__).resolve().parents[1])
    with Processes(folder) as processes:
        ranks = [
            processes.python(
                __file__,
                str(rank),
                str(folder / "store"),
                name=f"rank{rank}",
                env={"PYTHONPATH": f"{tests}/../src:{tests}"},
            )
            for rank in range(WORLD)
        ]
        return [json.loads(rank.succeeds(DEADLINE_S).splitlines()[-1]) for rank in ranks]


@pytest.mark.parametrize("case", CASES)
def test_both_ranks_have_the_same_weights(results: list[dict[str, dict[str, Any]]], case: str) -> None:
    assert results[0][case]["weights"] == results[1][case]["weights"]


@pytest.mark.parametrize(
    ("case", "within"), [("bf16", 0.02), ("int8", 0.02), ("int4", 0.05), ("int4 bfloat16", 0.1)]
)
def test_the_loss_is_close_to_the_exact_one(
    results: list[dict[str, dict[str, Any]]], case: str, within: float
) -> None:
    exact = results[0]["exact"]["loss"]
    assert results[0][case]["loss"] == pytest.approx(exact, rel=within)


def test_the_residual_matters(results: list[dict[str, dict[str, Any]]]) -> None:
    """Three values in a hundred: with feedback it learns most of what is to be learned, without it falls behind."""
    exact, with_, without = (results[0][case]["loss"] for case in ("exact", "topk:0.03", "topk:0.03 without"))
    assert with_ - exact < 0.7 * (without - exact)


def test_powersgd_learns_too(results: list[dict[str, dict[str, Any]]]) -> None:
    assert results[0]["powersgd:2"]["loss"] < 0.6  # 1.0 at the start


@pytest.mark.parametrize(
    ("case", "factor"), [("bf16", 1.9), ("int8", 3.5), ("int4", 6.5), ("topk:0.03", 12.0), ("int4 bfloat16", 3.2)]
)
def test_fewer_bytes_are_sent(results: list[dict[str, dict[str, Any]]], case: str, factor: float) -> None:
    assert results[0][case]["exact"] > factor * results[0][case]["sent"]


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
