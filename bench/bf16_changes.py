"""What the exact change of bf16 weights takes, beside thin's, while a small GPT trains on this machine.

    python bench/bf16_changes.py [--depth 4] [--sequence 64] [--batch 8] [--steps 320]

Trains at a learning rate of 3e-4 from the start, then goes on at 1e-4 and at 1e-5, as fine-tuning does. Prints, for
each rate, the part of all weights whose bf16 bits change in a step, the bits a parameter of `bf16-changes`, of
thin:1.25 and of what is sent (by piece, the shorter of both), and MB of float32 that one core codes and decodes a
second.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time

import torch
from torch import Tensor

from potluck.codec import changes, get, to_wire
from potluck.train.recipes import corpus
from potluck.train.recipes.gpt import RECIPE, GptConfig

RATES = ((3e-4, 1.0), (1e-4, 0.1), (1e-5, 0.1))
"""Learning rates, and the part of `--steps` at each."""
MEASURED = 8
PIECE = 65_536


def measured(before: Tensor, after: Tensor) -> list[float]:
    """Of one step: changed values, bits by each way and of the shorter, seconds to code and to decode a value."""
    thin, count = get("thin:1.25"), before.numel()
    rows, speeds = [], []
    for old, new in zip(before.split(PIECE), after.split(PIECE)):
        guest, times = old.clone(), [time.perf_counter()]
        found = changes.differences(new, old)
        message = changes.to_wire(found)
        times.append(time.perf_counter())
        if changes.worth_sending(found, message):
            found = changes.from_wire(message, new.numel())
        changes.apply(found, guest)
        times.append(time.perf_counter())
        assert torch.equal(guest, new.to(torch.bfloat16).float())
        bits = 8 * len(message), 8 * len(to_wire(thin, thin.encode(new - old)))
        rows.append((int(torch.count_nonzero(found)), *bits, min(bits)))
        speeds.append([(b - a) / new.numel() for a, b in itertools.pairwise(times)])
    # Of many pieces the quickest: on a shared machine the others measure the neighbours.
    return [*(sum(column) / count for column in zip(*rows)), *map(min, zip(*speeds))]


def main() -> int:
    parser = argparse.ArgumentParser(description="Bits of exact bf16 changes, at three learning rates.")
    for name, default in (("depth", 4), ("sequence", 64), ("batch", 8), ("steps", 320)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    torch.set_num_threads(1)
    tokens = options.batch * options.sequence
    config = GptConfig(depth=options.depth, sequence=options.sequence, batch_tokens=tokens)
    model = RECIPE.model(config)
    windows, _ = corpus.split(corpus.open_corpus(None), sequence=options.sequence, needed=options.batch)
    optimizer = RECIPE.optimizer(model, config)
    parameters, order = list(model.parameters()), torch.Generator().manual_seed(1)

    def weights() -> Tensor:
        return torch.cat([p.detach().reshape(-1) for p in parameters])

    print("| learning rate | changed | bf16-changes | thin:1.25 | sent | code, MB/s | decode, MB/s |")
    print("|---|---|---|---|---|---|---|")
    for rate, part in RATES:
        steps = max(MEASURED, round(part * options.steps))
        for group in optimizer.param_groups:
            group["lr"] = rate
        rows = []
        for step in range(steps):
            chosen = torch.randint(len(windows), (options.batch,), generator=order).tolist()
            optimizer.zero_grad()
            RECIPE.loss(model, torch.stack(windows.__getitems__(chosen)), config).backward()
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            before = weights()
            optimizer.step()
            if step % (steps // MEASURED) == steps // MEASURED - 1:
                rows.append(measured(before, weights()))
        changed, ours, thins, sent, code_s, decode_s = (
            f(column) for f, column in zip((*[statistics.fmean] * 4, min, min), zip(*rows))
        )
        speeds = f"{4e-6 / code_s:.0f} | {4e-6 / decode_s:.0f}"
        print(f"| {rate:g} | {changed:.1%} | {ours:.2f} | {thins:.2f} | {sent:.2f} | {speeds} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
