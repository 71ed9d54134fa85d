"""Data at full speed: Potluck alone against a plain loop with the same DataLoader, and with a guest against alone.

    .venv/bin/python bench/data.py [--kinds 1,4,20,decode] [--workers 0,2,4] [--rounds 3] [--no-guest] [--json FILE]

Samples of 1, 4 and 20 ms (sleep, as a disk or a network takes them) and pictures that are decoded (entropy decoding
and inverse cosine transforms as in JPEG; some milliseconds of the CPU each), read by 0, 2 and 4 worker processes. A
round is the plain loop and then the same loop through Potluck (without workers, a step of each in turn), in one
process, with the same loader settings and one thread; the ratio is the median over the rounds. Beside it the most
samples that were read and not yet computed, also of the plain loop: the loader's own bound is prefetch_factor ×
workers batches. Then a paced host with a guest and samples of 4 ms, against that host alone. Prints a table; fails
under the bar of 0.98 (with a guest: 0.99).
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
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

import potluck

BATCH, SIDE, CLASSES = 32, 64, 10
BAR, GUEST_BAR = 0.98, 0.99
WARM_UP = 24
"""In these Potluck still looks for its micro-batch size, and the plain loop's workers fill their queue."""
LEAST_S = 4.0
"""A measurement takes at least about so long."""
HOST_S, GUEST_S, SAMPLE_S, GUEST_STEPS = 0.02, 0.06, 0.004, 60


class Pictures(Dataset[tuple[Tensor, int]]):
    """Pictures with a label; `ms` is what reading one takes, or it is decoded."""

    def __init__(self, ms: float | None) -> None:
        self._ms = ms
        rows = np.arange(8)[:, None]
        self._cosines = (np.cos((2 * np.arange(8) + 1) * rows * np.pi / 16) * np.where(rows, 0.5, 8**-0.5)).astype(
            "f4"
        )
        coefficients = np.random.default_rng(1).normal(0, 4, (16, 3, (2 * SIDE // 8) ** 2, 8, 8)).astype(np.int8)
        self._files = [zlib.compress(each.tobytes(), 6) for each in coefficients]
        self.read = multiprocessing.Value("q", 0)

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if self._ms is not None:
            time.sleep(self._ms / 1e3)
            picture = torch.full((3, SIDE, SIDE), index % 251, dtype=torch.uint8)
        else:
            picture = self._decoded(self._files[index % len(self._files)])
        with self.read.get_lock():
            self.read.value += 1
        return picture, index % CLASSES

    def _decoded(self, file: bytes) -> Tensor:
        """Twice as large in each direction, and then halved, as pictures are."""
        blocks = np.frombuffer(zlib.decompress(file), np.int8).reshape(3, -1, 8, 8).astype("f4")
        pixels = self._cosines.T @ blocks @ self._cosines
        wide = 2 * SIDE
        picture = pixels.reshape(3, wide // 8, wide // 8, 8, 8).transpose(0, 1, 3, 2, 4).reshape(3, wide, wide)
        return F.avg_pool2d(torch.from_numpy(picture), 2).add_(128).clamp_(0, 255).to(torch.uint8)


def loader(ms: float | None, workers: int) -> tuple[Pictures, DataLoader[Any]]:
    pictures = Pictures(ms)
    order = torch.Generator().manual_seed(5)
    return pictures, DataLoader(pictures, batch_size=BATCH, shuffle=True, generator=order, num_workers=workers)


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    convolutions = [nn.Conv2d(3, 8, 5, stride=4), nn.ReLU(), nn.Conv2d(8, 16, 3, stride=2), nn.ReLU()]
    model = nn.Sequential(*convolutions, nn.Flatten(), nn.LazyLinear(CLASSES))
    model(torch.zeros(1, 3, SIDE, SIDE))
    return model, torch.optim.SGD(model.parameters(), lr=1e-3)


def loss_of(model: nn.Module, pictures: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(model(pictures.float() / 255), labels)


def plain(batches: DataLoader[Any]) -> Iterator[None]:
    """One yield after each step of a loop as everybody writes it."""
    model, optimizer = build()
    for pictures, labels in batches:
        optimizer.zero_grad()
        loss_of(model, pictures, labels).backward()
        optimizer.step()
        yield


def through_potluck(batches: DataLoader[Any]) -> Iterator[None]:
    model, optimizer = build()
    for step in potluck.start().steps(model, optimizer, batches):
        for pictures, labels in step:
            step.backward(loss_of(model, pictures, labels))
        yield


def measured(way: Any, ms: float | None, workers: int, steps: int) -> tuple[float, int]:
    """Seconds a step once it runs evenly, and the most samples that were read ahead."""
    pictures, batches = loader(ms, workers)
    warm_up = 2 * workers + WARM_UP
    running, ahead, began = way(batches), 0, 0.0
    for step in range(1, warm_up + steps + 1):
        next(running)
        ahead = max(ahead, pictures.read.value - step * BATCH)
        if step == warm_up:
            began = time.monotonic()
    seconds = (time.monotonic() - began) / steps
    running.close()
    return seconds, ahead


def in_turns(ms: float | None, steps: int) -> tuple[tuple[float, int], tuple[float, int]]:
    """The same for both loops, a step of one and then a step of the other: other programs disturb both alike.

    Only where nothing is read ahead: one loop's workers would read while the other computes.
    """
    loops = [way(loader(ms, 0)[1]) for way in (plain, through_potluck)]
    spent = [0.0, 0.0]
    for step in range(WARM_UP + steps):
        for number, loop in enumerate(loops):
            began = time.monotonic()
            next(loop)
            spent[number] += (time.monotonic() - began) if step >= WARM_UP else 0.0
    for loop in loops:
        loop.close()
    return (spent[0] / steps, 0), (spent[1] / steps, 0)


def compare(kind: str, workers: int, rounds: int) -> dict[str, Any]:
    ms = None if kind == "decode" else float(kind)
    expected_s = BATCH * (ms or 4.0) / 1e3 / max(1, workers)
    steps = max(8, min(200, int(LEAST_S / expected_s)))
    pairs = [
        (measured(plain, ms, workers, steps), measured(through_potluck, ms, workers, steps))
        if workers
        else in_turns(ms, steps)
        for _ in range(rounds)
    ]
    return {
        "sample": kind if kind == "decode" else f"{kind} ms",
        "workers": workers,
        "plain_samples_per_s": BATCH / statistics.median(a[0] for a, _ in pairs),
        "potluck_samples_per_s": BATCH / statistics.median(b[0] for _, b in pairs),
        "ratio": statistics.median(a[0] / b[0] for a, b in pairs),
        "ahead": max(b[1] for _, b in pairs),
        "ahead_plain": max(a[1] for a, _ in pairs),
    }


# -- with a guest -------------------------------------------------------------------------------------------


def job() -> None:
    """What a host and its guest train: started by `with_guest` through `potluck host`."""
    run = potluck.start()
    model, optimizer = build()
    pictures = Pictures(SAMPLE_S * 1e3)
    batches = DataLoader(pictures, batch_size=BATCH, shuffle=True, num_workers=2)
    for step in run.steps(model.to(run.device), optimizer, batches, steps=GUEST_STEPS):
        for x, labels in step:
            step.backward(loss_of(model, x, labels))


def with_guest(guests: int) -> float:
    """Samples a second of the run's second half."""
    with tempfile.TemporaryDirectory() as scratch:
        runs, words = Path(scratch), [sys.executable, "-m", "potluck"]
        environment = {**os.environ, "BENCH_DATA": "job", "OMP_NUM_THREADS": "1"}
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
    parser.add_argument("--kinds", default="1,4,20,decode")
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
    for kind in options.kinds.split(","):
        for workers in map(int, options.workers.split(",")):
            row = compare(kind, workers, options.rounds)
            rows.append(row)
            print(
                f"{row['sample']:>7} {workers:7} {row['plain_samples_per_s']:7.0f}/s "
                f"{row['potluck_samples_per_s']:7.0f}/s {row['ratio']:6.3f}"
                f" {row['ahead']:4} / {row['ahead_plain']}",
                flush=True,
            )
    failed = [row for row in rows if row["ratio"] < BAR]
    if not options.no_guest:
        alone, both = with_guest(0), with_guest(1)
        rows.append({"alone_samples_per_s": alone, "with_guest_samples_per_s": both, "ratio": both / alone})
        print(f"a paced host: alone {alone:.1f}/s, with a guest {both:.1f}/s, ratio {both / alone:.3f}")
        failed += rows[-1:] if both / alone < GUEST_BAR else []
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))
    print(f"bar: {BAR} alone, {GUEST_BAR} with a guest; below it: {len(failed)}")
    sys.exit(bool(failed))


if __name__ == "__main__":
    if os.environ.get("BENCH_DATA") == "job":
        job()
    else:
        main()
