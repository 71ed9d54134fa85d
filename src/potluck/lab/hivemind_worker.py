"""One machine of the strategy `hivemind`: a peer that computes until all have the global batch, then averages.

    python -m potluck.lab.hivemind_worker --spec FILE --rank R

hivemind runs synchronously (nothing is delayed by a step), with fp16 on the wire.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import sys
from typing import Any, NoReturn

import psutil

from potluck.lab.peer_run import (
    HOST_RANK,
    LAST_REPORTS_S,
    Board,
    Orders,
    PeerTraining,
    StepPart,
    StepRecord,
    main,
)
from potluck.lab.worker_spec import START_S

MATCHMAKING_S = 2.0
"""Peers look for each other this long before they expect the batch to be full, while they still compute."""
REQUEST_S = 1.0
AVERAGING_S = 120.0
GRANULE_PART = 0.05
"""Longest micro-batch of a paced machine as a share of a step, since all wait for the last one."""


def work(orders: Orders) -> None:
    """Run one peer until all steps are done."""
    signal.signal(signal.SIGTERM, _leave)
    # The other way of sharing memory starts a process that outlives this one by seconds.
    os.environ.setdefault("HIVEMIND_MEMORY_SHARING_STRATEGY", "file_descriptor")
    training, board = PeerTraining(orders), Board(orders)
    children: list[psutil.Process] = []
    try:
        dht = _dht(orders, board)
        optimizer = _optimizer(orders, training, dht)
        children = psutil.Process().children(recursive=True)
        ids = board.gather("ready", str(dht.peer_id))
        names = {peer: member.name for peer, member in zip(ids, orders.spec.members)}
        _Peer(orders, training, optimizer, names).train(StepRecord(orders, board))
        if orders.is_host and orders.spec.weights is not None:
            training.save(orders.spec.weights)
        board.leave()
        optimizer.shutdown()
        dht.shutdown()
    finally:
        # hivemind's network daemon outlives hivemind's own shutdown where that is cut short.
        for child in {*children, *psutil.Process().children(recursive=True)}:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()


def _dht(orders: Orders, board: Board) -> Any:
    import hivemind

    dht = hivemind.DHT(
        host_maddrs=[f"/ip4/{orders.address}/tcp/0"],
        initial_peers=None if orders.is_host else board.wait("peers", list[str], START_S, HOST_RANK),
        nat_port_map=False,
        auto_nat=False,
        use_relay=False,
        shutdown_timeout=1,
        start=True,
    )
    if orders.is_host:
        board.put("peers", [str(address) for address in dht.get_visible_maddrs()])
    return dht


def _optimizer(orders: Orders, training: PeerTraining, dht: Any) -> Any:
    import hivemind

    half = hivemind.compression.Float16Compression()
    averager = functools.partial(
        hivemind.optim.grad_averager.GradientAverager, target_group_size=orders.world, request_timeout=REQUEST_S
    )
    return hivemind.Optimizer(
        dht=dht,
        run_id="lab",
        target_batch_size=orders.global_batch,
        optimizer=training.optimizer,
        scheduler=training.scheduler,
        grad_averager_factory=averager,
        grad_compression=half,
        reuse_grad_buffers=True,  # gradients add up where the backward leaves them; hivemind clears them
        state_averaging_compression=half,
        load_state_compression=half,
        matchmaking_time=MATCHMAKING_S,
        averaging_timeout=AVERAGING_S,
        next_chunk_timeout=AVERAGING_S / 4,
        average_state_every=orders.spec.steps + 1,  # gradients are averaged at every step: weights stay together
        # A virtual first step would decay the weights and count as one of AdamW's.
        averager_opts={"initialize_optimizer": False, "request_timeout": REQUEST_S},
        tracker_opts={
            "min_refresh_period": 0.1,
            "max_refresh_period": 1.0,
            "default_refresh_period": 0.2,
            "expected_drift_peers": 0,
            "expected_drift_rate": 0.0,
        },
        verbose=True,
    )


class _Peer:
    """The loop of one peer, and its part of each step."""

    def __init__(self, orders: Orders, training: PeerTraining, optimizer: Any, names: dict[str, str]) -> None:
        self._orders, self._training, self._optimizer, self._names = orders, training, optimizer, names
        self._size = granule(orders)
        self._samples, self._loss_sum = 0, 0.0
        self._used: Any = None

    def train(self, record: StepRecord) -> None:
        optimizer = self._optimizer
        while (step := optimizer.local_epoch) < self._orders.spec.steps:
            self._compute(step)
            if optimizer.local_epoch > step:
                record.ended(optimizer.local_epoch, self._part())
            elif optimizer.grad_averager.local_samples_accumulated == 0:
                self._samples, self._loss_sum = 0, 0.0  # out of step with the others: it started again
            record.flush()
        record.flush(LAST_REPORTS_S)

    def _compute(self, step: int) -> None:
        """One micro-batch; the optimizer averages and updates when the peers have enough of them."""
        training = self._training
        training.device.at_step(step + 1)
        positions = self._orders.positions(step, self._samples, self._size)
        self._loss_sum += training.compute(training.model, positions)
        self._samples += self._size
        self._optimizer.step(batch_size=self._size)

    def _part(self) -> StepPart:
        """Record this peer's part of the step that has just ended, and the peers with which its gradient was
        averaged."""
        control = self._optimizer.scheduled_grads
        group: tuple[str, ...] = ()
        if control is not None and control is not self._used and control.done() and control.exception() is None:
            group = tuple(self._names[str(peer)] for peer in control.result() if str(peer) in self._names)
        self._used = control
        part = StepPart(samples=self._samples, loss_sum=self._loss_sum, group=group)
        self._samples, self._loss_sum = 0, 0.0
        return part


def granule(orders: Orders) -> int:
    """Samples in a micro-batch: small enough that waiting for a peer's last one costs little."""
    speeds = [seconds_per_sample(member.device) for member in orders.spec.members]
    own, size = speeds[orders.rank], orders.me.micro_batch
    if own is None or None in speeds:
        return size
    step_s = orders.global_batch / sum(1 / seconds for seconds in speeds if seconds is not None)
    return max(1, min(size, int(GRANULE_PART * step_s / own)))


def seconds_per_sample(device: str) -> float | None:
    """The (first) speed in a paced device's name; None for another kind."""
    kind, _, argument = device.partition(":")
    return float(argument.partition(",")[0]) if kind == "paced" else None


def _leave(number: int, frame: object) -> NoReturn:
    """Leave through the clean-up, because the background processes would outlive a plain SIGTERM."""
    sys.exit(128 + number)


if __name__ == "__main__":
    sys.exit(main(work))
