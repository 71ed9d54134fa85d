"""The Hugging Face Trainer on a GPU: the plain Trainer beside Potluck's, alone and with a guest.

    python bench/gpu/trainer.py [--rounds 3] [--steps 24] [--compile]

A GPT-2 of 87 M parameters (2,000 words) in bf16, 64 samples of 512 tokens a step in micro-batches of 16, from
memory. Alone: the two trainers take turns in one process, and each round gives one ratio (plain seconds a step ÷
Potluck's, after the first steps). With a guest: a hosted run of the same training, whose guest is a process on this
GPU held back to a quarter of the host's speed. Its losses are compared with the plain Trainer's.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from _runs import HERE, Run, say
from torch import Tensor
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, TrainerCallback, TrainingArguments
from transformers import Trainer as PlainTrainer

import potluck
from potluck.integrations.transformers import Trainer

SEQUENCE, MICRO_BATCH, PARTS, SKIP = 512, 16, 4, 8
WORDS = 2000
"""All of them occur. With GPT-2's 50,257, most of them unused, the plain Trainer's loss jumped by 2 for a step."""


class Texts(Dataset[dict[str, Tensor]]):
    """Counting in steps of 1 to 7 from a random word on: something to learn."""

    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        words = (index * 7919 + torch.arange(SEQUENCE) * (1 + index % 7)) % WORDS
        return {"input_ids": words, "labels": words}


class Clock(TrainerCallback):  # type: ignore[misc]
    """The seconds of each step, the GPU's work included."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_end(self, *given: Any, **keywords: Any) -> None:
        torch.cuda.synchronize()
        self.ends.append(time.monotonic())

    def step_s(self) -> float:
        return (self.ends[-1] - self.ends[SKIP]) / (len(self.ends) - 1 - SKIP)


def trained(kind: Any, steps: int, compiled: bool, **keywords: Any) -> tuple[float, list[float]]:
    """Seconds a step, and the losses."""
    torch.manual_seed(0)
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        trainer = kind(
            model=GPT2LMHeadModel(GPT2Config(vocab_size=WORDS, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)),
            args=TrainingArguments(
                folder,
                per_device_train_batch_size=MICRO_BATCH,
                gradient_accumulation_steps=PARTS,
                max_steps=steps,
                learning_rate=3e-4,
                warmup_steps=4,
                bf16=True,
                torch_compile=compiled,
                dataloader_num_workers=4,
                logging_steps=1,
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,
            ),
            train_dataset=Texts(),
            callbacks=[clock],
            **keywords,
        )
        trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return clock.step_s(), losses


def alone(rounds: int, steps: int, compiled: bool) -> tuple[float, float, list[float]]:
    """The median ratio, the plain Trainer's seconds a step, and its losses."""
    ratios, plain_s, plain = [], 0.0, []
    for _ in range(rounds):
        plain_s, plain = trained(PlainTrainer, steps, compiled)
        ours_s, ours = trained(Trainer, steps, compiled, run=potluck.start(micro_batch=MICRO_BATCH))
        ratios.append(plain_s / ours_s)
        apart = max(abs(a - b) / b for a, b in zip(ours, plain, strict=True))
        say(f"  plain {plain_s:.4f} s a step, Potluck {ours_s:.4f}: {ratios[-1]:.4f}; losses differ by {apart:.1e}")
    return statistics.median(ratios), plain_s, plain


def hosted(folder: Path, steps: int, sample_s: float, plain: list[float], codec: str) -> None:
    """A run with a guest, whose losses are those of the plain Trainer."""
    run = Run(folder)
    common = ["--bind", "127.0.0.1", "--name", "host", "--view", "plain", "--runs", str(folder / "runs")]
    paced = ["--device", f"paced:{sample_s}@cuda", "--micro-batch", "4"]
    words = [
        *common,
        *paced,
        "--send",
        str(HERE / "_runs.py"),
        "--wait-for",
        "1",
        "--wait-s",
        "120",
        "--codec",
        codec,
    ]
    words += ["--", "--hosted", "--steps", str(steps)]
    run.start("host", [sys.executable, "-m", "potluck", "host", __file__, *words])
    try:
        run.guest("guest", run.token(), "--device", f"paced:{4 * sample_s}@cuda", "--micro-batch", "2")
        found = run.wait_for_steps(steps, 240.0)
    finally:
        run.end()
    samples = [event["samples"] for event in found]
    lent = sum(each.get("guest", 0) for each in samples)
    apart = max(abs(event["loss"] - loss) / loss for event, loss in zip(found, plain, strict=True))
    seconds = statistics.mean(event["step_s"] for event in found[SKIP:])
    ideal = sample_s * MICRO_BATCH * PARTS
    say(f"  the guest computed {lent} of {sum(sum(each.values()) for each in samples)} samples")
    say(f"  {seconds:.3f} s a step, {ideal:.3f} the host alone: {ideal / seconds:.3f} of 1.25")
    say(f"  loss {plain[-1]:.4f} plain, {found[-1]['loss']:.4f} here; they differ by {apart:.1e} at most")
    say("  plain " + " ".join(f"{loss:.2f}" for loss in plain))
    say("  here  " + " ".join(f"{event['loss']:.2f}" for event in found))
    say("  lent  " + " ".join(f"{each.get('guest', 0):4}" for each in samples))


def main() -> None:
    parser = argparse.ArgumentParser(description="The Hugging Face Trainer on a GPU.")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--compile", action="store_true", help="torch_compile=True")
    parser.add_argument("--codec", default="auto", help="of the run with a guest")
    parser.add_argument("--keep", type=Path, help="leave the folder of the run with a guest here")
    parser.add_argument("--hosted", action="store_true", help="what the hosted run and its guest start")
    options = parser.parse_args()
    if options.hosted:
        trained(Trainer, options.steps, options.compile)
        return
    ratio, plain_s, losses = alone(options.rounds, options.steps, options.compile)
    print(f"alone: {ratio:.4f} of the plain Trainer's speed", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        pace_s = max(0.02, 2 * plain_s / MICRO_BATCH / PARTS)
        hosted(Path(folder), options.steps, pace_s, losses, options.codec)
        if options.keep is not None:
            shutil.copytree(folder, options.keep, dirs_exist_ok=True)


if __name__ == "__main__":
    main()
