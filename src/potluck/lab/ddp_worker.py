"""One machine of the strategies `ddp` and `ddp-balanced`: a rank of stock DistributedDataParallel on gloo.

    python -m potluck.lab.ddp_worker --spec FILE --rank R

It trains the same samples in the same order with the same optimizer as Potluck, without hub and codec. All ranks
read the same spec (`worker_spec.py`).
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any, BinaryIO

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from potluck import env
from potluck.balance.leases import split_evenly
from potluck.balance.ledger import EpochSteps
from potluck.checked import build
from potluck.device import Device, pick
from potluck.errors import ConfigError, NetworkError, PotluckError
from potluck.lab.worker_spec import WorkerSpec, WorkerStep, read_spec
from potluck.train import recipes
from potluck.train.data import Loader, epoch_order, to_device

TIMEOUT = timedelta(minutes=10)
"""Timeout of every collective: longer than any rig's step."""


# -- computing ------------------------------------------------------------------------------------------


class Timed:
    """Ends a device's micro-batch with the last gradient, not when backward() returns.

    The last backward of a step returns when DDP has exchanged the gradients, and waiting for that does not count as
    computing. The hook here runs before DDP's own of the same gradient (theirs follow the whole accumulation), so
    that no bucket leaves before a paced device could have filled it: make it after `device.attach`.
    """

    def __init__(self, device: Device, trained: Sequence[nn.Parameter]) -> None:
        self._device, self._count = device, len(trained)
        self._left = 0
        for parameter in trained:
            parameter.register_post_accumulate_grad_hook(self._arrived)

    def begin(self, samples: int) -> None:
        self._left = self._count
        self._device.begin(samples)

    def after_backward(self) -> None:
        """Needed for a model with a part that had no gradient."""
        if self._left:
            self._left = 0
            self._device.end()

    def _arrived(self, parameter: Tensor) -> None:
        self._left -= 1
        if self._left == 0:
            self._device.end()


class Worker:
    """One rank, from its device to its last step."""

    def __init__(self, spec: WorkerSpec, rank: int) -> None:
        if not 0 <= rank < len(spec.members):
            raise ConfigError(f"there is no rank {rank}", hint=f"ranks go from 0 to {len(spec.members) - 1}")
        self._spec, self._rank = spec, rank
        self._me = spec.members[rank]
        self._recipe = recipes.get(spec.recipe.name)
        self._config = build(self._recipe.Config, spec.recipe.config)
        self._batch: int = self._config.global_batch
        shared = sum(member.share for member in spec.members)
        if shared != self._batch:
            raise ConfigError(f"the shares sum to {shared}, the batch is {self._batch}", hint="make them equal")
        self._device = pick(self._me.device, threads=spec.threads)
        self._loader = Loader(lambda: self._recipe.dataset(self._config), None)
        order = epoch_order(self._loader.samples, spec.seed)
        self._steps = EpochSteps(samples=self._loader.samples, global_batch=self._batch, order=order)
        self._model = self._recipe.model(self._config).to(self._device.torch_device)
        self._trained = [p for p in self._model.parameters() if p.requires_grad]
        self.step = 0
        """The current step, counted from 1; 0 before the first."""

    def run(self) -> None:
        """Meet the others, train, and leave together."""
        self._connect()
        self._device.attach(self._model)
        self._timed = Timed(self._device, self._trained)
        stock: dict[str, Any] = {}
        if self._spec.bucket_mb is not None:
            stock["bucket_cap_mb"] = self._spec.bucket_mb
        self._ddp = DistributedDataParallel(self._model, **stock)
        self._optimizer = self._recipe.optimizer(self._model, self._config)
        self._scheduler = self._recipe.scheduler(self._optimizer, self._config)
        with open(self._spec.out, "ab", buffering=0) if self._rank == 0 else nullcontext() as out:
            self._train(out)
        if self._rank == 0 and self._spec.weights is not None:
            save_file(self._model.state_dict(), self._spec.weights)
        dist.barrier()
        dist.destroy_process_group()

    def _connect(self) -> None:
        os.environ["GLOO_SOCKET_IFNAME"] = self._spec.interface
        dist.init_process_group(
            "gloo",
            init_method=f"tcp://{self._spec.master_address}:{self._spec.master_port}",  # a TCPStore at rank 0
            rank=self._rank,
            world_size=len(self._spec.members),
            timeout=TIMEOUT,
        )

    def _train(self, out: BinaryIO | None) -> None:
        dist.barrier()
        ended = time.monotonic()
        while self.step < self._spec.steps:
            self.step += 1
            self._device.at_step(self.step)
            self._optimizer.zero_grad()
            loss_sum = torch.tensor([self._compute()], dtype=torch.float64)
            # The others' losses travel while this rank updates.
            losses = dist.all_reduce(loss_sum, async_op=True)
            if self._config.clip_norm:
                nn.utils.clip_grad_norm_(self._trained, self._config.clip_norm)
            self._optimizer.step()
            if self._scheduler is not None:
                self._scheduler.step()
            losses.wait()
            began, ended = ended, time.monotonic()
            if out is not None:
                WorkerStep(
                    step=self.step,
                    ended_at=round(ended, 6),
                    step_s=round(ended - began, 6),
                    loss=loss_sum.item() / self._batch,
                    samples={member.name: member.share for member in self._spec.members},
                ).append_to(out)

    def _compute(self) -> float:
        """This rank's share of the step; gradients are exchanged in its last backward. The sum of its losses.

        DDP takes the mean of the ranks' gradients. What a rank adds is therefore scaled by their number, and the
        result is exactly the mean over the samples of the whole batch, whatever the shares.
        """
        loss_sum = 0.0
        sizes = split_evenly(self._me.share, self._me.micro_batch)
        for number, (size, batch) in enumerate(zip(sizes, self._batches(sizes)), 1):
            with nullcontext() if number == len(sizes) else self._ddp.no_sync():
                self._timed.begin(size)
                loss = self._recipe.loss(self._ddp, batch, self._config)
                (loss * (size * len(self._spec.members) / self._batch)).backward()
                self._timed.after_backward()
            loss_sum += loss.item() * size
        return loss_sum

    def _batches(self, sizes: Sequence[int]) -> Iterator[Any]:
        """This rank's part of the step's samples, the one after those of the ranks before it."""
        keys = self._steps.next_step().keys or ()
        first = sum(member.share for member in self._spec.members[: self._rank])
        for size in sizes:
            yield to_device(self._loader.fetch(keys[first : first + size]), self._device)
            first += size


# -- the process ----------------------------------------------------------------------------------------


def work(spec: WorkerSpec, rank: int) -> None:
    """Run one rank until all steps are done. Errors name the machine and the step."""
    worker = Worker(spec, rank)
    try:
        worker.run()
    except RuntimeError as error:  # torch's for whatever happens to the process group
        raise NetworkError(
            f"DDP failed: {_first_sentence(str(error))}",
            machine=spec.members[rank].name,
            step=worker.step or None,
        ) from error


def _first_sentence(text: str) -> str:
    """torch's message without the source file that gloo puts before it."""
    line = next(iter(text.strip().splitlines()), "no reason was given")
    return re.sub(r"^\[[^]]*\] ", "", line).split(". ")[0].rstrip(".")


def main(words: Sequence[str] | None = None) -> int:
    """Prints failures on stderr and returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m potluck.lab.ddp_worker", description="One rank of DDP.")
    parser.add_argument("--spec", type=Path, required=True, help="a JSON file that the bench has written")
    parser.add_argument("--rank", type=int, required=True, help="which of its machines this is, from 0")
    options = parser.parse_args(words)
    try:
        debug = env.read().debug
    except ConfigError as error:
        return _failed(error)
    try:
        work(read_spec(options.spec), options.rank)
    except PotluckError as error:
        if debug:
            raise
        return _failed(error)
    return 0


def _failed(error: PotluckError) -> int:
    hint = f" (hint: {error.hint})" if error.hint else ""
    print(f"error: {error}{hint}", file=sys.stderr, flush=True)
    return 1


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # gloo's threads now and then abort a process that tidies up after them
