"""What ranks on different devices do in one group: stock DDP with a small GPT, and collectives in a device's queue.

It knows of Potluck only the name of its backend. Nothing here is newer than torch 2.11.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

STEPS = 20
VOCABULARY, WIDTH, HEADS, LENGTH, ROWS = 24, 32, 2, 12, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.mixed, self.joined = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        heads = self.mixed(self.before(x)).view(rows, length, 3, HEADS, width // HEADS).permute(2, 0, 3, 1, 4)
        query, key, value = heads[0], heads[1], heads[2]  # [rows, heads, length, width / heads]
        # By hand: the same arithmetic on every device.
        scores = query @ key.transpose(-1, -2) * (width // HEADS) ** -0.5
        future = torch.ones(length, length, device=x.device).triu(1) > 0
        found = scores.masked_fill(future, float("-inf")).softmax(-1) @ value
        x = x + self.joined(found.transpose(1, 2).reshape(rows, length, width))
        return x + self.narrow(functional.gelu(self.wide(self.after(x))))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(Block(), Block())
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        """The loss of the next tokens; tokens: [rows, length + 1]."""
        x = self.token(tokens[:, :-1]) + self.place(torch.arange(tokens.shape[1] - 1, device=tokens.device))
        logits = self.head(self.blocks(x))
        return functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def batch(rank: int, step: int) -> Tensor:
    """Sequences that count up by 1 or 2: there is something to learn."""
    numbers = torch.Generator().manual_seed(1000 * step + rank)
    start = torch.randint(VOCABULARY, (ROWS, 1), generator=numbers)
    stride = torch.randint(1, 3, (ROWS, 1), generator=numbers)
    return (start + stride * torch.arange(LENGTH + 1)) % VOCABULARY


def train(model: nn.Module, ranks: Sequence[int], device: str) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    found = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = torch.stack([model(batch(rank, step).to(device)) for rank in ranks]).mean()
        loss.backward()
        optimizer.step()
        found.append(loss.detach())
    return [float(loss.cpu()) for loss in found]


def alone(world: int) -> list[float]:
    """In one process, on the CPU: the losses over all ranks' batches."""
    torch.manual_seed(0)
    return train(GPT(), range(world), "cpu")


@contextmanager
def group(device: str, options: dict[str, Any]) -> Any:
    import potluck
    from potluck.dist import Config

    assert potluck.__version__
    if device == "fake":
        from support import fake_device

        fake_device.install()
    elif device.startswith("cuda"):
        torch.cuda.set_device(device)
    dist.init_process_group("potluck", pg_options=Config(**options), timeout=timedelta(seconds=30))
    try:
        yield
    finally:
        dist.destroy_process_group()


def ddp(
    rank: int, world: int, devices: Sequence[str], options: dict[str, Any]
) -> tuple[list[float], list[float], int]:
    """The losses over all ranks, this rank's weights, and how many all-reduces it took part in."""
    from potluck.dist import metrics, reset_metrics

    device = devices[rank]
    with group(device, options):
        torch.manual_seed(0)
        # Small buckets, so that several all-reduces are under way beside the backward.
        model = nn.parallel.DistributedDataParallel(GPT().to(device), bucket_cap_mb=0.02)
        reset_metrics()
        mine = torch.tensor(train(model, [rank], device), dtype=torch.float64)
        done = metrics()["by_op"]["all_reduce"]["ops"]
        dist.all_reduce(mine, dist.ReduceOp.AVG)
        weights = torch.cat([p.detach().cpu().flatten() for p in model.parameters()])
    return mine.tolist(), weights.tolist(), done


def queued(rank: int, world: int, devices: Sequence[str], options: dict[str, Any]) -> list[float]:
    """Collectives on values that the device has yet to compute, and results used at once, unwaited for."""
    device = devices[rank]
    found = []
    with group(device, options):
        for later in (False, True):
            values = torch.zeros(200_000, device=device)
            if device.startswith("cuda"):
                torch.cuda._sleep(200_000_000)  # cycles: about a tenth of a second
            values += rank + 1.0
            work = dist.all_reduce(values, async_op=later)
            if work is not None:
                work.wait()
            values *= 2.0
            found += [float(values.min().cpu()), float(values.max().cpu())]
    return found
