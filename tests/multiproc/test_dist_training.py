"""Stock DDP and FSDP2 on the backend: the losses of one process with the same batches."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.dist_training import alone
from support.ranks import Ranks

TRAINING = "support.dist_training:"


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    pool = Ranks(4)
    yield pool
    pool.close()


@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_ddp_trains_as_one_process_and_as_gloo(ranks: Ranks, transport: str) -> None:
    world = 4 if transport == "auto" else 2
    environment = {"POTLUCK_DIST_TRANSPORT": transport}
    ours = ranks.call(f"{TRAINING}ddp", world, "potluck", env=environment, deadline_s=55)
    theirs = ranks.call(f"{TRAINING}ddp", world, "gloo", deadline_s=55)
    assert ours[0] == pytest.approx(alone(world), rel=1e-5)
    assert ours[0] == pytest.approx(theirs[0], rel=1e-6)
    assert all(other == ours[0] for other in ours)
    assert ours[0][-1] < ours[0][0]


def test_ddp_within_a_compiled_module(ranks: Ranks) -> None:
    """DDP's C++ calls the group's collectives while torch.compile looks at every Python function that begins."""
    found = ranks.call(f"{TRAINING}ddp", 2, "potluck", "cpu", True, deadline_s=55)
    assert found[0] == pytest.approx(alone(2), rel=1e-5)


def test_ddp_with_ranks_on_different_kinds_of_devices(ranks: Ranks) -> None:
    with Ranks(2) as changed:  # torch must not have computed a gradient before the device is there
        found = changed.call(f"{TRAINING}ddp", 2, "potluck", "fake", deadline_s=55)
    assert found[0] == pytest.approx(alone(2), rel=1e-5)


def test_fsdp2_trains_as_one_process(ranks: Ranks) -> None:
    found = ranks.call(f"{TRAINING}fsdp", 2, deadline_s=55)
    assert found[0] == pytest.approx(alone(2), rel=1e-5)
    assert found[0][-1] < found[0][0]
