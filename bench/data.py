"""Data at full speed: Potluck alone against a plain loop with the same DataLoader, and with a guest against alone.

    .venv/bin/python bench/data.py [--kinds 1,4,20,decode,collate,images,mixed] [--workers 0,2,4] [--rounds 3]
        [--no-guest] [--json FILE]

Samples of 1, 4 and 20 ms (sleep, as a disk or a network takes them) and pictures that are decoded (entropy decoding
and inverse cosine transforms as in JPEG; some milliseconds of the CPU each), read by 0, 2 and 4 worker processes.
"collate": samples that take no time, and a collate function of the user that takes 1 ms a sample. "images":
batches of 64 float32 images of 3 × 224 × 224 (38.5 MB) that are made at once: the time goes into moving them.
"mixed": the same with a collate function of the user's that mixes each image with another one, as MixUp does.

A round is the plain loop and then the same loop through Potluck (without workers, a step of each in turn), in one
process, with the same loader settings and one thread; the ratio is the median over the rounds. Beside it the most
samples that were read and not yet computed, also of the plain loop: the loader's own bound is prefetch_factor ×
workers batches. Then a paced host with a guest, where reading a sample takes 4 ms or collating it 1 ms, against
that host alone (`--kinds ""`: this only). Prints a table; fails under the bar of 0.98 (with a guest: 0.99).
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, default_collate

import potluck

CLASSES = 10
BAR, GUEST_BAR = 0.98, 0.99
WARM_UP = 24
"""In these Potluck still looks for its micro-batch size, and the plain loop's workers fill their queue."""
LEAST_S = 4.0
"""A measurement takes at least about so long."""
HOST_S, GUEST_S, GUEST_STEPS = 0.02, 0.06, 60
COLLATE_S = 0.001


def slow(samples: list[Any]) -> Any:
    """A collate function of the user's that takes its time."""
    time.sleep(COLLATE_S * len(samples))
    return default_collate(samples)


def mixed(samples: list[Any]) -> Any:
    images, labels = default_collate(samples)
    return images.mul_(0.7).add_(images.roll(1, 0), alpha=0.3), labels


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A data set and how its batches are made."""

    name: str
    ms: float | None = 0.0
    """What reading a sample takes; None: it is decoded."""
    expected_ms: float = 4.0
    """What a sample takes in all, about: for how many steps are measured."""
    batch: int = 32
    side: int = 64
    dtype: torch.dtype = torch.uint8
    collate: Callable[[list[Any]], Any] | None = None


KINDS = {
    each.name: each
    for each in (
        *(Kind(name=str(ms), ms=ms, expected_ms=ms) for ms in (1, 4, 20)),
        Kind(name="decode", ms=None),
        Kind(name="collate", expected_ms=1.0, collate=slow),
        Kind(name="images", batch=64, side=224, dtype=torch.float32),
        Kind(name="mixed", batch=64, side=224, dtype=torch.float32, collate=mixed),
    )
}
WITH_GUEST = ("4", "collate")


class Pictures(Dataset[tuple[Tensor, int]]):
    """Pictures with a label."""

    def __init__(self, kind: Kind) -> None:
        self._kind = kind
        rows = np.arange(8)[:, None]
        self._cosines = (np.cos((2 * np.arange(8) + 1) * rows * np.pi / 16) * np.where(rows, 0.5, 8**-0.5)).astype(
            "f4"
        )
        blocks = (2 * kind.side // 8) ** 2
        coefficients = np.random.default_rng(1).normal(0, 4, (16, 3, blocks, 8, 8)).astype(np.int8)
        self._files = [zlib.compress(each.tobytes(), 6) for each in coefficients]
        self.read = multiprocessing.Value("q", 0)

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        kind = self._kind
        if kind.ms is not None:
            if kind.ms:
                time.sleep(kind.ms / 1e3)
            picture = torch.full((3, kind.side, kind.side), index % 251, dtype=kind.dtype)
        else:
            picture = self._decoded(self._files[index % len(self._files)])
        with self.read.get_lock():
            self.read.value += 1
        return picture, index % CLASSES

    def _decoded(self, file: bytes) -> Tensor:
        """Twice as large in each direction, and then halved, as pictures are."""
        blocks = np.frombuffer(zlib.decompress(file), np.int8).reshape(3, -1, 8, 8).astype("f4")
        pixels = self._cosines.T @ blocks @ self._cosines
        wide = 2 * self._kind.side
        picture = pixels.reshape(3, wide // 8, wide // 8, 8, 8).transpose(0, 1, 3, 2, 4).reshape(3, wide, wide)
        return F.avg_pool2d(torch.from_numpy(picture), 2).add_(128).clamp_(0, 255).to(torch.uint8)


def loader(kind: Kind, workers: int) -> tuple[Pictures, DataLoader[Any]]:
    pictures = Pictures(kind)
    order = torch.Generator().manual_seed(5)
    how: dict[str, Any] = {"shuffle": True, "generator": order, "collate_fn": kind.collate}
    return pictures, DataLoader(pictures, batch_size=kind.batch, num_workers=workers, **how)


def build(kind: Kind) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    convolutions = [nn.Conv2d(3, 8, 5, stride=4), nn.ReLU(), nn.Conv2d(8, 16, 3, stride=2), nn.ReLU()]
    model = nn.Sequential(*convolutions, nn.Flatten(), nn.LazyLinear(CLASSES))
    model(torch.zeros(1, 3, kind.side, kind.side))
    return model, torch.optim.SGD(model.parameters(), lr=1e-3)


def loss_of(model: nn.Module, pictures: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(model(pictures.float() / 255), labels)


def plain(kind: Kind, batches: DataLoader[Any]) -> Iterator[None]:
    """One yield after each step of a loop as everybody writes it."""
    model, optimizer = build(kind)
    for pictures, labels in batches:
        optimizer.zero_grad()
        loss_of(model, pictures, labels).backward()
        optimizer.step()
        yield


def through_potluck(kind: Kind, batches: DataLoader[Any]) -> Iterator[None]:
    model, optimizer = build(kind)
    for step in potluck.start().steps(model, optimizer, batches):
        for pictures, labels in step:
            step.backward(loss_of(model, pictures, labels))
        yield


def measured(way: Any, kind: Kind, workers: int, steps: int) -> tuple[float, int]:
    """Seconds a step once it runs evenly, and the most samples that were read ahead."""
    pictures, batches = loader(kind, workers)
    warm_up = 2 * workers + WARM_UP
    running, ahead, began = way(kind, batches), 0, 0.0
    for step in range(1, warm_up + steps + 1):
        next(running)
        ahead = max(ahead, pictures.read.value - step * kind.batch)
        if step == warm_up:
            began = time.monotonic()
    seconds = (time.monotonic() - began) / steps
    running.close()
    return seconds, ahead


def in_turns(kind: Kind, steps: int) -> tuple[tuple[float, int], tuple[float, int]]:
    """The same for both loops, a step of one and then a step of the other: other programs disturb both alike.

    Only where nothing is read ahead: one loop's workers would read while the other computes.
    """
    loops = [way(kind, loader(kind, 0)[1]) for way in (plain, through_potluck)]
    spent = [0.0, 0.0]
    for step in range(WARM_UP + steps):
        for number, loop in enumerate(loops):
            began = time.monotonic()
            next(loop)
            spent[number] += (time.monotonic() - began) if step >= WARM_UP else 0.0
    for loop in loops:
        loop.close()
    return (spent[0] / steps, 0), (spent[1] / steps, 0)


def compare(kind: Kind, workers: int, rounds: int) -> dict[str, Any]:
    expected_s = kind.batch * kind.expected_ms / 1e3 / max(1, workers)
    steps = max(8, min(200, int(LEAST_S / expected_s)))
    pairs = [
        (measured(plain, kind, workers, steps), measured(through_potluck, kind, workers, steps))
        if workers
        else in_turns(kind, steps)
        for _ in range(rounds)
    ]
    return {
        "sample": f"{kind.name} ms" if kind.ms else kind.name,
        "workers": workers,
        "plain_samples_per_s": kind.batch / statistics.median(a[0] for a, _ in pairs),
        "potluck_samples_per_s": kind.batch / statistics.median(b[0] for _, b in pairs),
        "ratio": statistics.median(a[0] / b[0] for a, b in pairs),
        "ahead": max(b[1] for _, b in pairs),
        "ahead_plain": max(a[1] for a, _ in pairs),
    }


# -- with a guest -------------------------------------------------------------------------------------------


def job() -> None:
    """What a host and its guest train: started by `with_guest` through `potluck host`."""
    run = potluck.start()
    kind = KINDS[os.environ["BENCH_DATA"]]
    model, optimizer = build(kind)
    _, batches = loader(kind, 2)
    for step in run.steps(model.to(run.device), optimizer, batches, steps=GUEST_STEPS):
        for x, labels in step:
            step.backward(loss_of(model, x, labels))


def with_guest(guests: int, kind: str) -> float:
    """Samples a second of the run's second half."""
    with tempfile.TemporaryDirectory() as scratch:
        runs, words = Path(scratch), [sys.executable, "-m", "potluck"]
        environment = {**os.environ, "BENCH_DATA": kind, "OMP_NUM_THREADS": "1"}
        common = ["--threads", "1", "--view", "quiet", "--micro-batch", "4"]
        bound = ["--bind", "127.0.0.1", "--wait-for", str(guests), "--runs", str(runs), "--name", "host"]
        host = subprocess.Popen(
            [*words, "host", __file__, *bound, "--device", f"paced:{HOST_S}", "--checkpoint-every", "0", *common],
            env=environment,
            stdout=subprocess.DEVNULL,
        )
        children = [host]
        try:
            while not (token := next(runs.glob("*/token"), None)) and host.poll() is None:
                time.sleep(0.1)
            for number in range(guests):
                join = ["join", "--token-file", str(token), "--device", f"paced:{GUEST_S}", "--name", f"g{number}"]
                guest = subprocess.Popen([*words, *join, *common], env=environment, stdout=subprocess.DEVNULL)
                children.append(guest)
            if host.wait(600):
                raise SystemExit("the host failed")
        finally:
            for child in children:
                if child.poll() is None:
                    child.terminate()
                child.wait()
        lines = (json.loads(line) for line in next(runs.glob("*/events.jsonl")).read_text().splitlines())
        late = [e for e in lines if e["event"] == "step" and e["step"] > GUEST_STEPS // 2]
        return sum(sum(e["samples"].values()) for e in late) / sum(e["step_s"] for e in late)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--workers", default="0,2,4")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--no-guest", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    warnings.filterwarnings("ignore", message="This DataLoader will create")
    os.environ["POTLUCK_THREADS"] = "1"
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    print(f"{'sample':>7} {'workers':>7} {'plain':>9} {'potluck':>9} {'ratio':>6} {'read ahead':>10}")
    for kind in filter(None, options.kinds.split(",")):
        for workers in map(int, options.workers.split(",")):
            row = compare(KINDS[kind], workers, options.rounds)
            rows.append(row)
            print(
                f"{row['sample']:>7} {workers:7} {row['plain_samples_per_s']:7.0f}/s "
                f"{row['potluck_samples_per_s']:7.0f}/s {row['ratio']:6.3f}"
                f" {row['ahead']:4} / {row['ahead_plain']}",
                flush=True,
            )
    failed = [row for row in rows if row["ratio"] < BAR]
    for kind in WITH_GUEST if not options.no_guest else ():
        alone, both = with_guest(0, kind), with_guest(1, kind)
        rows.append(
            {"host": kind, "alone_samples_per_s": alone, "with_guest_samples_per_s": both, "ratio": both / alone}
        )
        print(f"a paced host, {kind}: alone {alone:.1f}/s, with a guest {both:.1f}/s, ratio {both / alone:.3f}")
        failed += rows[-1:] if both / alone < GUEST_BAR else []
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))
    print(f"bar: {BAR} alone, {GUEST_BAR} with a guest; below it: {len(failed)}")
    sys.exit(bool(failed))


if __name__ == "__main__":
    if "BENCH_DATA" in os.environ:
        job()
    else:
        main()
