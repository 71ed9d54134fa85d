"""The host's ranks, as far as one process shows: who is who, who gets what, and what is refused."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from potluck import checked
from potluck.device import pick_for_rank
from potluck.errors import ConfigError, LoopError
from potluck.train import gradient_sum, host_ranks
from potluck.train.given import check_model
from potluck.train.host_ranks import RankPlace, RankReady, Ranks, place, shares
from potluck.train.rank_loop import seed


def variables(rank: int, world: int, local_world: int | None = None) -> dict[str, str]:
    given = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    return given if local_world is None else given | {"LOCAL_WORLD_SIZE": str(local_world)}


def test_a_rank_can_say_that_its_data_set_is_endless() -> None:
    ready = RankReady(model="m", samples=sys.maxsize, free_bytes=None)
    assert checked.decode(msgspec.json.encode(ready), RankReady) == ready


def test_torchrun_says_who_is_who() -> None:
    assert place(variables(1, 4, 4)) == RankPlace(rank=1, world=4, local_rank=1)
    assert place(variables(0, 2)) == RankPlace(rank=0, world=2, local_rank=0)
    assert RankPlace(rank=0, world=2, local_rank=0).leads
    assert not RankPlace(rank=1, world=2, local_rank=1).leads


@pytest.mark.parametrize("given", [{}, variables(0, 1, 1), {"WORLD_SIZE": "8"}, {"WORLD_SIZE": "2", "RANK": "0"}])
def test_one_process_is_no_group(given: dict[str, str]) -> None:
    assert place(given) is None


def test_other_machines_are_guests() -> None:
    with pytest.raises(ConfigError, match="16 ranks on several machines, 8 of them here") as raised:
        place(variables(3, 16, 8))
    assert "join as guests" in raised.value.hint
    with pytest.raises(ConfigError, match="whole numbers"):
        place({"RANK": "one", "LOCAL_RANK": "0", "WORLD_SIZE": "2"})


@pytest.mark.parametrize("world", [2, 3, 8])
@pytest.mark.parametrize("count", [1, 2, 7, 8, 23, 24])
def test_every_sample_is_somebodys_and_rank_0_is_never_idle(count: int, world: int) -> None:
    parts = shares(range(100, 100 + count), world)
    assert len(parts) == world
    assert [p for part in parts for p in part] == list(range(100, 100 + count))
    sizes = [len(part) for part in parts]
    assert sizes[0] == max(sizes) == -(-count // world)
    assert min(sizes) >= max(sizes) - 1


def test_which_device_a_rank_gets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("potluck.device.cuda.why_not", lambda: "none here")
    for name in (None, "auto"):
        device, nccl = pick_for_rank(name, 1, 2, threads=1)
        assert (device.kind, nccl) == ("cpu", False)
    device, nccl = pick_for_rank("paced:0.01", 1, 2, threads=1)
    assert (device.kind, nccl) == ("paced", False)
    with pytest.raises(ConfigError, match="2 ranks cannot share the device mps"):
        pick_for_rank("mps", 0, 2, threads=1)
    monkeypatch.setattr("potluck.device.cuda.why_not", lambda: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ConfigError, match="2 ranks, but only 1 GPU on this machine") as raised:
        pick_for_rank("cuda", 1, 2, threads=1)
    assert "--nproc-per-node 1" in raised.value.hint


def test_wrapped_models_are_refused() -> None:
    wrapped = nn.parallel.DistributedDataParallel.__new__(nn.parallel.DistributedDataParallel)
    with pytest.raises(LoopError, match="DistributedDataParallel") as raised:
        check_model(wrapped)
    assert "plain model" in raised.value.hint
    check_model(nn.Linear(2, 2))


@pytest.mark.filterwarnings("ignore")  # FSDP1 is deprecated
def test_sharded_models_are_refused(tmp_path: Path) -> None:
    """Also FSDP1's, whose parameters are plain tensors: rank 0's part would be copied to all ranks."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        flat = fsdp.FullyShardedDataParallel(nn.Linear(2, 2), device_id=torch.device("cpu"), use_orig_params=True)
        mesh = init_device_mesh("cpu", (1,))  # not the fake device of another test in this process
        split = parallelize_module(nn.Sequential(nn.Linear(2, 2)), mesh, {"0": ColwiseParallel()})
        for sharded in (nn.Sequential(flat), fsdp.fully_shard(nn.Linear(2, 2), mesh=mesh), split):
            with pytest.raises(LoopError, match=r"sharded over the ranks \(FSDP or tensor") as raised:
                check_model(sharded)
            assert "plain model" in raised.value.hint
    finally:
        dist.destroy_process_group()


class Heard(Ranks):
    """Rank 0 of three; what the others say is given."""

    def __init__(self, answers: dict[int, Tensor]) -> None:
        super().__init__(RankPlace(rank=0, world=3, local_rank=0), control=None, sums=None, ours=False)
        self._answers = answers

    def _receive(self, room: Tensor, rank: int) -> Tensor:
        assert room.shape == self._answers[rank].shape
        return self._answers[rank]


def test_weights_that_differ_are_named() -> None:
    torch.manual_seed(1)
    mine = list(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1)).parameters())
    names = ["0.weight", "0.bias", "1.weight", "1.bias"]
    same = gradient_sum.hashes(mine)
    Heard({1: same, 2: same.clone()}).compare_weights(names, mine, step=50)
    with torch.no_grad():
        theirs = [p.clone() for p in mine]
        theirs[1][2] += 1e-7
        theirs[3] *= 1.0001
    with pytest.raises(
        LoopError, match=r"rank 2's weights .* 2 of 4 tensors differ, the first is 0.bias"
    ) as raised:
        Heard({1: same, 2: gradient_sum.hashes(theirs)}).compare_weights(names, mine, step=50)
    assert raised.value.step == 50


def test_gradients_are_joined_by_type_and_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradient_sum, "BUCKET_BYTES", 40)
    half = torch.ones(2, dtype=torch.bfloat16)
    tensors = [torch.ones(4), torch.ones(6), torch.ones(1), half, half, torch.ones(50), torch.ones(1)]
    buckets = [[t.nbytes for t in bucket] for bucket in gradient_sum._buckets(tensors)]
    assert buckets == [[16, 24], [4], [4, 4], [200], [4]]


def test_a_ranks_random_numbers_depend_on_nothing_before() -> None:
    drawn = set()
    for step, rank in ((3, 1), (4, 1), (3, 2)):
        torch.manual_seed(random.randrange(1000))
        seed(0, step, rank)
        first = (torch.rand(1).item(), random.random(), np.random.rand())
        seed(0, step, rank)
        assert (torch.rand(1).item(), random.random(), np.random.rand()) == first
        drawn.add(first)
    assert len(drawn) == 3


def test_the_end_of_a_rank_is_no_failure() -> None:
    assert host_ranks.RankDone(0).code == 0
    assert not issubclass(host_ranks.RankDone, Exception), "a script's `except Exception` would go on"
