"""The host tax: tokens/s that a GPU host computes itself, alone and with guests attached that deliver.

    python bench/gpu/tax.py [--guests 2,8] [--steps 10] [--plain]

The host trains GPT-2 124M (bf16, compiled) as fast as it can, a million tokens a step; the guests come while it
runs, and go again: what it does alone is measured before and after, because a GPU at its limit of power is slower
when it is warm. They are puppets on this machine's cores: they take every change of the weights and deliver a whole
coded gradient each step, encrypted over loopback; their weights are not compared, for they keep none. Counted
is what the host computed itself in the time of its steps, waiting included. `plain torch` is the same model in a
loop without Potluck.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from pathlib import Path

import torch
from _runs import HERE, SEQUENCE, Event, Run, say

from potluck.train.recipes.gpt import GptConfig, GptRecipe

GLOBAL_BATCH, MICRO_BATCH = 1024, 64
WARM_UP, SETTLING = 3, 50
"""Steps that are not counted: alone, and after guests came, until the host knows them and cuDNN most sizes of
micro-batches. A new one costs up to 0.14 s, once, and each of 64 can come as the last of a step: after 30 steps
every second step still had one, which was three quarters of what 8 guests seemed to cost."""
MODEL = ["--depth", "12", "--sequence", str(SEQUENCE), "--batch-tokens", str(SEQUENCE * GLOBAL_BATCH)]
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
            samples = data.__getitems__([(step * GLOBAL_BATCH + first + i) % len(data) for i in range(MICRO_BATCH)])
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


class Table:
    """One host, more and more guests."""

    def __init__(self, folder: Path, steps: int, codec: str = "auto") -> None:
        self._run, self._steps = Run(folder / "run"), steps
        config = folder / "run.toml"
        config.write_text("[run]\ncheck_replica_every = 0\n")
        words = [*MODEL, "--steps", "100000", "--micro-batch", str(MICRO_BATCH), "--config", str(config)]
        words += ["--codec", codec]
        self._run.host(*words, command=[str(HERE / "trusting_host.py")])
        self._token = self._run.token()

    def hold(self, seconds: float) -> None:
        time.sleep(seconds)
        self._run.wait(lambda: len(self._run.events("step")) >= 3, 150.0, "first steps")

    def guests(self, number: int, sample_s: float) -> None:
        """Start so many, and wait until all have joined."""
        joined = len(self._run.events("guest_joined"))
        for guest in range(1, number + 1):
            command = [sys.executable, str(HERE / "puppet.py"), "--token-file", str(self._token)]
            command += ["--name", f"puppet-{guest}", "--sample-s", str(sample_s)]
            self._run.start(f"puppet-{guest}", command, env={"OMP_NUM_THREADS": "1"})
        self._run.wait(lambda: len(self._run.events("guest_joined")) >= joined + number, 120.0, "guests")

    def dismiss(self) -> None:
        """Send all guests home."""
        _, *puppets = self._run.processes
        del self._run.processes[1:]
        for puppet in puppets:
            puppet.kill()
            puppet.wait()
        joined = len(self._run.events("guest_joined"))
        self._run.wait(lambda: len(self._run.events("guest_lost")) >= joined, 30.0, "end of the guests")

    def measured(self, skip: int = WARM_UP) -> list[Event]:
        """The next steps, but for the first few."""
        first = skip + len(self._run.events("step"))
        self._run.wait(lambda: len(self._run.events("step")) >= first + self._steps, 300.0, "steps")
        return self._run.events("step")[first:]

    def troubles(self) -> list[str]:
        kinds = ("guest_sits_out", "lease_taken_back", "contribution_dropped", "guest_left")
        found = [event for kind in kinds for event in self._run.events(kind)]
        return [f"{e['event']}: {e.get('machine')}, step {e.get('step')}: {e.get('reason')}" for e in found[:6]]

    def end(self) -> None:
        self._run.end()


def own_rate(events: list[Event]) -> float:
    """The host's own tokens a second."""
    own = sum(event["samples"].get("host", 0) for event in events)
    return float(SEQUENCE * own / sum(event["step_s"] for event in events))


def summary(guests: int, events: list[Event], alone: float | None) -> str:
    """A row of the table."""
    seconds, own = sum(e["step_s"] for e in events), own_rate(events)
    fleet = SEQUENCE * GLOBAL_BATCH * len(events) / seconds
    delivered = sum(len(e["samples"]) - 1 for e in events) / len(events)
    wait = sum(e["wait_s"] for e in events) / seconds
    busy = own / (1 - wait)
    tax = f"{1 - own / alone:+.2%}, {1 - busy / alone:+.2%}" if alone else "—"
    mfu = f"{sum(e['mfu'] or 0.0 for e in events) / len(events):.2f}"
    return f"| {guests} | {delivered:.1f} | {fleet:,.0f} | {own:,.0f} | {tax} | {wait:.2%} | {mfu} |"


def measure(guests: list[int], steps: int, hold_s: float, keep: Path | None, codec: str = "auto") -> list[str]:
    lines = [
        "| guests | deliver a step | fleet tokens/s | host's own tokens/s | tax, without waiting | waiting | MFU |",
        "|---|---|---|---|---|---|---|",
    ]
    with tempfile.TemporaryDirectory() as folder:
        table = Table(Path(folder), steps, codec)

        def row(number: int, events: list[Event], alone: float | None = None) -> None:
            lines.append(summary(number, events, alone))
            say("\n".join([lines[-1], *table.troubles()]))

        try:
            table.hold(hold_s)
            before = table.measured()
            row(0, before)
            for number in guests:
                table.guests(number, SEQUENCE / own_rate(before) / GUEST_PART)
                with_guests = table.measured(SETTLING)
                table.dismiss()
                after = table.measured()
                row(number, with_guests, (own_rate(before) + own_rate(after)) / 2)
                row(0, after)
                before = after
        except RuntimeError as error:
            say(str(error))
        finally:
            lines += table.troubles()
            table.end()
            if keep is not None:
                shutil.copytree(folder, keep, dirs_exist_ok=True)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description="What guests cost a GPU host.")
    parser.add_argument("--guests", default="2,8")
    parser.add_argument("--steps", type=int, default=10, help="measured with each number of guests")
    parser.add_argument("--codec", default="auto", help="the run's codec")
    parser.add_argument("--plain", action="store_true", help="plain torch first")
    parser.add_argument("--hold-s", type=float, default=0.0, help="do not measure before so many seconds")
    parser.add_argument("--keep", type=Path, help="leave the run folder and what the processes said here")
    options = parser.parse_args()
    if options.plain:
        say(f"plain torch: {plain_tokens_per_s(options.steps):,.0f} tokens/s")
        torch.cuda.empty_cache()
    guests = [int(n) for n in options.guests.split(",")]
    print("\n".join(measure(guests, options.steps, options.hold_s, options.keep, options.codec)))


if __name__ == "__main__":
    main()
