"""The host tax: tokens/s that a GPU host computes itself, alone and with guests attached that deliver.

    python bench/gpu/tax.py [--guests 2,8] [--steps 16]

The host trains GPT-2 124M (bf16, compiled) as fast as it can, half a million tokens a step. Its guests are puppets
on this machine's cores: they take every change of the weights and deliver a whole coded gradient each step,
encrypted over loopback; their weights are not compared, for they keep none. Counted is what the host computed
itself in the time of its steps, waiting included. `plain torch` is the same model in a loop without Potluck.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

import torch
from _runs import GLOBAL_BATCH, GPT2, HERE, SEQUENCE, Event, Run, say

from potluck.train.recipes.gpt import GptConfig, GptRecipe

MICRO_BATCH, WARM_UP = 32, 5
GUEST_PART = 1 / 24
"""A puppet's speed as a part of the host's."""


def plain_tokens_per_s(steps: int) -> float:
    """The same model, optimizer and accumulation in a loop of plain torch."""
    recipe = GptRecipe()
    config = GptConfig(depth=12, sequence=SEQUENCE, batch_tokens=SEQUENCE * GLOBAL_BATCH)
    device = torch.device("cuda")
    model = recipe.model(config).to(device)
    recipe.compile(model, config, device, guest=False)
    optimizer = recipe.optimizer(model, config)
    data = recipe.dataset(config)
    began = 0.0
    for step in range(steps + 3):
        if step == 3:
            torch.cuda.synchronize()
            began = time.monotonic()
        optimizer.zero_grad()
        total = torch.zeros((), device=device)
        for first in range(0, GLOBAL_BATCH, MICRO_BATCH):
            samples = data.__getitems__([(step * 512 + first + i) % len(data) for i in range(MICRO_BATCH)])
            batch = torch.stack(samples).pin_memory().to(device, non_blocking=True)
            loss = recipe.loss(model, batch, config)
            (loss * MICRO_BATCH).backward()
            total += loss.detach() * MICRO_BATCH
        for parameter in model.parameters():
            assert parameter.grad is not None
        torch._foreach_mul_([p.grad for p in model.parameters()], 1 / GLOBAL_BATCH)  # type: ignore[arg-type]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        float(total)
    return steps * SEQUENCE * GLOBAL_BATCH / (time.monotonic() - began)


def with_guests(guests: int, steps: int, sample_s: float, folder: Path) -> list[Event]:
    """The events of the steps after all guests had joined, but for the first few."""
    run = Run(folder / f"guests-{guests}")
    try:
        config = folder / "run.toml"
        config.write_text("[run]\ncheck_replica_every = 0\n")
        words = [*GPT2, "--steps", "100000", "--micro-batch", str(MICRO_BATCH), "--config", str(config)]
        words += ["--wait-for", str(guests), "--wait-s", "200"] if guests else []
        run.host(*words, command=[str(HERE / "trusting_host.py")])
        token = run.token()
        for number in range(guests):
            command = [sys.executable, str(HERE / "puppet.py"), "--token-file", str(token)]
            command += ["--name", f"puppet-{number + 1}", "--sample-s", str(sample_s)]
            run.start(f"puppet-{number + 1}", command, env={"OMP_NUM_THREADS": "1"})

        run.wait(lambda: len(run.events("guest_joined")) >= guests, 120.0, "guests")
        first = WARM_UP + len(run.events("step"))
        run.wait(lambda: len(run.events("step")) >= first + steps, 120.0, f"{steps} steps with all guests")
        return run.events("step")[first:]
    except RuntimeError as error:
        say(str(error))
        found = run.events("step")
        say(f"{len(found)} steps; the last ones: " + "; ".join(str(e["samples"]) for e in found[-4:]))
        return []
    finally:
        run.end()


def summary(guests: int, events: list[Event], alone: float | None) -> tuple[str, float]:
    """A row of the table, and the host's own tokens a second."""
    seconds = sum(e["step_s"] for e in events)
    own = SEQUENCE * sum(e["samples"].get("host", 0) for e in events) / seconds
    fleet = SEQUENCE * GLOBAL_BATCH * len(events) / seconds
    delivered = sum(len(e["samples"]) - 1 for e in events) / len(events)
    wait = sum(e["wait_s"] for e in events) / seconds
    busy = own / (1 - wait)
    tax = f"{1 - own / alone:+.2%}, {1 - busy / alone:+.2%}" if alone else "—"
    mfu = f"{sum(e['mfu'] or 0.0 for e in events) / len(events):.2f}"
    return (
        f"| {guests} | {delivered:.1f} | {fleet:,.0f} | {own:,.0f} | {tax} | {wait:.2%} | {mfu} |",
        own,
    )


def measure(guests: list[int], steps: int) -> list[str]:
    plain = plain_tokens_per_s(max(4, steps // 2))
    say(f"plain torch: {plain:,.0f} tokens/s")
    torch.cuda.empty_cache()
    lines = [
        f"plain torch: {plain:,.0f} tokens/s",
        "| guests | deliver a step | fleet tokens/s | host's own tokens/s | tax, without waiting | waiting | MFU |",
        "|---|---|---|---|---|---|---|",
    ]
    alone: float | None = None
    with tempfile.TemporaryDirectory() as folder:
        for number in [0, *guests]:
            sample_s = SEQUENCE / (alone or plain) / GUEST_PART
            events = with_guests(number, steps, sample_s, Path(folder))
            if not events:
                lines.append(f"| {number} | failed | | | | | |")
                continue
            row, own = summary(number, events, alone)
            alone = alone or own
            lines.append(row)
            say(row)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description="What guests cost a GPU host.")
    parser.add_argument("--guests", default="2,8")
    parser.add_argument("--steps", type=int, default=16)
    options = parser.parse_args()
    print("\n".join(measure([int(n) for n in options.guests.split(",")], options.steps)))


if __name__ == "__main__":
    main()
