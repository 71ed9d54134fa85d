"""One machine of the strategies `ray-ps-sync` and `ray-ps-async`: the parameter server of Ray's documentation.

    python -m potluck.lab.ray_ps_worker --spec FILE --rank R

Each machine is a node of a Ray cluster. One actor has the weights, one on each machine computes gradients of equal
batches; both are sent as fp32 arrays through Ray's object store. The server waits for all gradients (sync), or
applies each one as it arrives, to weights that have changed since (async).
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import psutil
import torch

from potluck.errors import GuestsMissingError
from potluck.lab.peer_run import STEP_LIMIT_S, Board, Orders, PeerTraining, main
from potluck.lab.worker_spec import START_S, WorkerStep

PORT = 6380
Arrays = list[np.ndarray[Any, Any]]


class PsServer:
    """Has the weights and the optimizer."""

    def __init__(self, orders: Orders) -> None:
        self._training = PeerTraining(orders)

    def weights(self) -> Arrays:
        return [p.detach().numpy() for p in self._training.model.parameters()]

    def apply(self, *gradients: Arrays) -> Arrays:
        """Update with the sum of gradients. Returns the new weights."""
        for parameter, *parts in zip(self._training.model.parameters(), *gradients):
            parameter.grad = torch.from_numpy(np.sum(parts, axis=0))
        self._training.optimizer.step()
        if self._training.scheduler is not None:
            self._training.scheduler.step()
        return self.weights()

    def save(self, path: Path) -> None:
        self._training.save(path)


class PsWorker:
    """Computes gradients on one machine."""

    def __init__(self, orders: Orders) -> None:
        self._orders, self._training = orders, PeerTraining(orders)
        self.loss_sum = 0.0

    def gradient(self, weights: Arrays, step: int, scale: float) -> Arrays:
        """The gradient of this machine's share of a step, at these weights, times `scale`."""
        training, share = self._training, self._orders.me.share
        parameters = list(training.model.parameters())
        with torch.no_grad():
            for parameter, value in zip(parameters, weights):
                parameter.copy_(torch.tensor(value))
                parameter.grad = None
        training.device.at_step(step + 1)
        self.loss_sum = 0.0
        for first in range(0, share, self._orders.me.micro_batch):
            positions = self._orders.positions(step, first, min(self._orders.me.micro_batch, share - first))
            self.loss_sum += training.compute(training.model, positions, scale * len(positions) / share)
        return [p.grad.numpy() if p.grad is not None else np.zeros(tuple(p.shape), np.float32) for p in parameters]

    def loss(self) -> float:
        """Summed loss of the last gradient's samples."""
        return self.loss_sum


def work(orders: Orders) -> None:
    """Be a node of the cluster; rank 0 also drives the training."""
    signal.signal(signal.SIGTERM, _leave)
    # The rig's network is closed. Else Ray would ask for a token wherever this user has one for other clusters.
    os.environ["RAY_AUTH_MODE"] = "disabled"
    board = Board(orders)
    address = f"{orders.spec.master_address}:{PORT}"
    if not orders.is_host:
        board.wait("head", bool, START_S, 0)
    with _node(orders, address):
        if orders.is_host:
            board.put("head", True)
            _drive(orders, address)
            board.put("done", True)
        else:
            board.wait("done", bool, STEP_LIMIT_S * orders.spec.steps, 0)
        board.leave()


@contextlib.contextmanager
def _node(orders: Orders, address: str) -> Iterator[None]:
    """Inside, this machine is a Ray node."""
    words = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats"]
    words += [f"--node-ip-address={orders.address}", "--num-cpus=4", "--num-gpus=0"]
    words += [f"--resources={json.dumps({f'rank-{orders.rank}': 2})}", "--object-store-memory=300000000"]
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        if orders.is_host:
            words += ["--head", f"--port={PORT}", f"--temp-dir={folder}", "--include-dashboard=false"]
        else:
            words += [f"--address={address}"]
        variables = {"RAY_enable_worker_prestart": "0", "RAY_USAGE_STATS_ENABLED": "0"}
        # Ray's workers have a niceness of 15: beside other programs they would be slower than the other strategies.
        variables |= {"RAY_worker_niceness": "0", "RAY_raylet_start_wait_time_s": f"{START_S:.0f}"}
        node = subprocess.Popen(words, env=os.environ | variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        try:
            assert node.stdout is not None
            for line in node.stdout:
                if b"Ray runtime started" in line:
                    break
            else:
                raise GuestsMissingError("Ray did not start here", machine=orders.me.name)
            yield
        finally:
            tree = psutil.Process().children(recursive=True)
            node.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                node.wait(5)
            for process in tree:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()


def _drive(orders: Orders, address: str) -> None:
    import ray

    ray.init(address=address, _node_ip_address=orders.address, log_to_driver=False, logging_level="warning")
    deadline = time.monotonic() + START_S
    while sum(node["Alive"] for node in ray.nodes()) < orders.world:
        if time.monotonic() > deadline:
            raise GuestsMissingError(f"{orders.world} nodes did not come within {START_S:.0f} s")
        time.sleep(0.1)

    def on(rank: int, kind: type) -> Any:
        there = Orders(spec=orders.spec, rank=rank)
        return ray.remote(kind).options(num_cpus=0, resources={f"rank-{rank}": 1}).remote(there)

    server = on(0, PsServer)
    workers = [on(rank, PsWorker) for rank in range(orders.world)]
    ray.get([worker.loss.remote() for worker in workers])  # all are there, with torch imported
    (_asynchronous if orders.spec.asynchronous else _synchronous)(orders, ray, server, workers)
    if orders.spec.weights is not None:
        ray.get(server.save.remote(orders.spec.weights))
    ray.shutdown()


def _synchronous(orders: Orders, ray: Any, server: Any, workers: Sequence[Any]) -> None:
    weights, began = server.weights.remote(), time.monotonic()
    for step in range(orders.spec.steps):
        shares = [member.share / orders.global_batch for member in orders.spec.members]
        gradients = [worker.gradient.remote(weights, step, part) for worker, part in zip(workers, shares)]
        weights = server.apply.remote(*gradients)
        losses = ray.get([worker.loss.remote() for worker in workers])
        ray.wait([weights])
        began = _write(orders, step, began, losses, [member.share for member in orders.spec.members])


def _asynchronous(orders: Orders, ray: Any, server: Any, workers: Sequence[Any]) -> None:
    """A step ends when gradients of a global batch have been applied, from whichever machines."""
    weights, began = server.weights.remote(), time.monotonic()
    waiting = {worker.gradient.remote(weights, 0, 1.0): rank for rank, worker in enumerate(workers)}
    step, samples, losses = 0, [0] * orders.world, [0.0] * orders.world
    while step < orders.spec.steps:
        (ready,), _ = ray.wait(list(waiting))
        rank = waiting.pop(ready)
        weights = server.apply.remote(ready)
        losses[rank] += ray.get(workers[rank].loss.remote())
        samples[rank] += orders.spec.members[rank].share
        if sum(samples) >= orders.global_batch:
            ray.wait([weights])
            began = _write(orders, step, began, losses, samples)
            step, samples, losses = step + 1, [0] * orders.world, [0.0] * orders.world
        waiting[workers[rank].gradient.remote(weights, step, 1.0)] = rank


def _write(orders: Orders, step: int, began: float, losses: Sequence[float], samples: Sequence[int]) -> float:
    now = time.monotonic()
    made = {member.name: count for member, count in zip(orders.spec.members, samples) if count}
    loss = sum(losses) / sum(samples)
    with open(orders.spec.out, "ab") as file:
        WorkerStep(step=step + 1, ended_at=now, step_s=now - began, loss=loss, samples=made).append_to(file)
    return now


def _leave(number: int, frame: object) -> NoReturn:
    """Leave through the clean-up, because Ray's processes would outlive a plain SIGTERM."""
    sys.exit(128 + number)


if __name__ == "__main__":
    # Under its importable name: Ray's actors import the classes by it.
    from potluck.lab import ray_ps_worker

    sys.exit(main(ray_ps_worker.work))
