"""One machine of the strategy `torchft`: a replica group of one process, its gradients averaged over gloo.

    python -m potluck.lab.torchft_worker --spec FILE --rank R

torchft runs with its lighthouse, manager and DDP. Shares are by speed and exactly weighted.
"""

# No `from __future__ import annotations` here: torch looks at the types of a communication hook.
import contextlib
import os
import sys
import time
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

from torch import Tensor
from torch.distributed import GradBucket, TCPStore  # type: ignore[attr-defined]
from torch.futures import Future

from potluck.lab.peer_run import (
    HOST_RANK,
    LAST_REPORTS_S,
    STEP_LIMIT_S,
    Board,
    Orders,
    PeerTraining,
    StepPart,
    StepRecord,
    main,
)
from potluck.lab.worker_spec import START_S

QUORUM_TICK_MS = 10
RETRIES = 3


def work(orders: Orders) -> None:
    """Run one replica group until all steps are done."""
    os.environ["GLOO_SOCKET_IFNAME"] = orders.spec.interface
    training, board = PeerTraining(orders), Board(orders)
    lighthouse = _lighthouse(orders, board) if orders.is_host else None
    own_store = TCPStore(orders.address, 0, is_master=True, wait_for_workers=False)
    manager = _manager(orders, training, own_store, board.wait("lighthouse", str, START_S, HOST_RANK))
    try:
        _train(orders, training, board, manager)
        if orders.is_host and orders.spec.weights is not None:
            training.save(orders.spec.weights)
        board.leave()
    finally:
        manager.shutdown(wait=False)
        if lighthouse is not None:
            lighthouse.shutdown()


def _lighthouse(orders: Orders, board: Board) -> Any:
    """The server where replica groups meet; it advertises a host name, so its address is made by hand."""
    from torchft.coordination import LighthouseServer

    server = LighthouseServer(
        bind=f"{orders.address}:0",
        min_replicas=orders.world,
        join_timeout_ms=int(START_S * 1000),
        quorum_tick_ms=QUORUM_TICK_MS,
    )
    board.put("lighthouse", f"http://{orders.address}:{urlsplit(server.address()).port}")
    return server


def _manager(orders: Orders, training: PeerTraining, own_store: TCPStore, lighthouse: str) -> Any:
    from torchft import Manager, ProcessGroupGloo

    limit = timedelta(seconds=STEP_LIMIT_S)
    return Manager(
        pg=ProcessGroupGloo(timeout=limit),
        load_state_dict=training.model.load_state_dict,
        state_dict=training.model.state_dict,
        min_replica_size=orders.world,
        timeout=limit,
        quorum_timeout=limit,
        connect_timeout=timedelta(seconds=START_S),
        rank=0,
        world_size=1,
        store_addr=orders.address,
        store_port=own_store.port,
        lighthouse_addr=lighthouse,
        replica_id=f"{orders.me.name}-{orders.rank}",
        hostname=orders.address,
        init_sync=False,  # every machine makes the same model from the seed
        max_retries=RETRIES,
    )


def _train(orders: Orders, training: PeerTraining, board: Board, manager: Any) -> None:
    from torchft import Optimizer

    model = _ddp(training, manager)
    optimizer = Optimizer(manager, training.optimizer)
    everyone = tuple(member.name for member in orders.spec.members)
    size, share = orders.me.micro_batch, orders.me.share
    board.gather("ready", True)
    record = StepRecord(orders, board)
    while (step := manager.current_step()) < orders.spec.steps:
        training.device.at_step(step + 1)
        optimizer.zero_grad()
        loss_sum = 0.0
        for first in range(0, share, size):
            count = min(size, share - first)
            with contextlib.nullcontext() if first + count == share else model.no_sync():
                # The manager takes the mean of the machines; times their number it is the sum over the samples.
                scale = count * orders.world / orders.global_batch
                loss_sum += training.compute(model, orders.positions(step, first, count), scale)
        optimizer.step()
        if manager.current_step() == step:
            continue  # not committed: the same step again
        if training.scheduler is not None:
            training.scheduler.step()
        record.ended(step + 1, StepPart(samples=share, loss_sum=loss_sum, group=everyone))
        record.flush()
    record.flush(LAST_REPORTS_S)


def _ddp(training: PeerTraining, manager: Any) -> Any:
    """torchft's DDP. It waits for each bucket within the backward; that counts as the network's time, not as
    computing."""
    from torchft import DistributedDataParallel

    class Ddp(DistributedDataParallel):  # type: ignore[misc]
        @staticmethod
        def _comm_hook(state: Any, bucket: GradBucket) -> Future[Tensor]:
            began_s = time.perf_counter()
            future: Future[Tensor] = DistributedDataParallel._comm_hook(state, bucket)
            training.device.waited(time.perf_counter() - began_s)
            return future

    return Ddp(manager, training.model)


if __name__ == "__main__":
    sys.exit(main(work))
