"""One rank of stock DDP on gloo whose link is paced: for the table of desk.py.

    python bench/gpu/ddp_rank.py --spec FILE --rank R --mbit 1000

Without network namespaces gloo's connections cannot be led through a shaping proxy. So the gradients' exchange is
gloo's own, over loopback, and its result is handed to DDP when a link of this rate would have carried it: each
bucket after the ones before it, in both directions at once, with no overhead and no latency. DDP overlaps it with
the backward as it always does. What is trained is `lab/ddp_worker.py`'s.
"""

from __future__ import annotations

import argparse
import os
import queue
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from potluck.lab import ddp_worker


class PacedLink:
    """Carries buckets one after the other at the link's rate."""

    def __init__(self, bytes_per_s: float, device: torch.device) -> None:
        self._bytes_per_s = bytes_per_s
        self._devices = [] if device.type == "cpu" else [device]
        self._free_at = 0.0
        self._todo: queue.SimpleQueue[tuple[Any, Tensor, torch.futures.Future[Tensor]]] = queue.SimpleQueue()
        threading.Thread(target=self._carry, daemon=True).start()

    def exchange(self, state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """DDP's communication hook: the mean over the ranks."""
        buffer = bucket.buffer().div_(dist.get_world_size())
        future: torch.futures.Future[Tensor] = torch.futures.Future(devices=self._devices)
        self._todo.put((dist.all_reduce(buffer, async_op=True), buffer, future))
        return future

    def _carry(self) -> None:
        for device in self._devices:
            torch.cuda.set_device(device)
        while True:
            work, buffer, future = self._todo.get()
            work.wait()  # both ranks have the bucket
            ranks = dist.get_world_size()
            # Each rank of a ring sends all but its own part twice: to sum it up, and to hand it round.
            sent = 2 * (ranks - 1) / ranks * buffer.nbytes
            self._free_at = max(self._free_at, time.monotonic()) + sent / self._bytes_per_s
            time.sleep(max(0.0, self._free_at - time.monotonic()))
            future.set_result(buffer)


def main() -> int:
    parser = argparse.ArgumentParser(description="One rank of DDP over a paced link.")
    parser.add_argument("--spec", type=Path, required=True)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--mbit", type=float, required=True)
    options = parser.parse_args()
    stock = ddp_worker.DistributedDataParallel

    def paced(model: torch.nn.Module, **settings: Any) -> Any:
        made = stock(model, **settings)
        link = PacedLink(options.mbit * 125_000, next(model.parameters()).device)
        # Not the method itself: torch looks at annotations, and takes them for types where they are words.
        made.register_comm_hook(None, lambda state, bucket: link.exchange(state, bucket))
        return made

    ddp_worker.DistributedDataParallel = paced  # type: ignore[assignment,misc]
    return ddp_worker.main(["--spec", str(options.spec), "--rank", str(options.rank)])


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)  # gloo's threads now and then abort a process that tidies up after them
