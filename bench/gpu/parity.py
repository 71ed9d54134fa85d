"""500 steps of a bf16 CUDA host with a fp32 guest on the CPU, beside the host alone with three seeds.

    python bench/gpu/parity.py

The model is small (0.48 M parameters, samples of 64 bytes), because a CPU has to keep up; the host is held back so
that about a quarter of all samples are the guest's. Alone it runs as fast as it can. Same seed, same samples in the
same order: what differs is who computed them. Prints the mean loss of the last 50 steps.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from _runs import Run, say

STEPS, LAST = 500, 50
MODEL = ["--depth", "2", "--sequence", "64", "--batch-tokens", "2048", "--steps", str(STEPS), "--set", "compile=no"]
HOST_S = 0.0035
ON = "cuda"


def start(folder: Path) -> dict[str, Run]:
    runs = {}
    for seed in (1, 2, 3):
        runs[f"alone-{seed}"] = Run(folder / f"alone-{seed}")
        runs[f"alone-{seed}"].host(*MODEL, "--seed", str(seed), "--device", ON, "--micro-batch", "32")
    shared = runs["shared"] = Run(folder / "shared")
    paced = ["--device", f"paced:{HOST_S}@{ON}", "--micro-batch", "4", "--threads", "1"]
    shared.host(*MODEL, "--seed", "1", *paced, "--wait-for", "1", "--wait-s", "200")
    shared.guest("cores", shared.token(), "--device", "cpu", "--threads", "2")
    return runs


def last_loss(run: Run) -> float:
    """Mean over the last steps; not a number where the run did not come so far."""
    losses = [event["loss"] for event in run.events("step")][STEPS - LAST : STEPS]
    return sum(losses) / LAST if len(losses) == LAST else float("nan")


def report(runs: dict[str, Run]) -> list[str]:
    steps = runs["shared"].events("step")
    guests = sum(n for e in steps for who, n in e["samples"].items() if who != "host")
    share = guests / max(1, sum(sum(e["samples"].values()) for e in steps))
    seeds, ours = [last_loss(runs[f"alone-{seed}"]) for seed in (1, 2, 3)], last_loss(runs["shared"])
    joined = runs["shared"].events("guest_joined")
    cosine = f"{joined[0]['parity']:.5f}" if joined else "unknown"
    return [
        f"mean loss of steps {STEPS - LAST + 1}-{STEPS}: host alone, seeds 1, 2, 3: "
        + ", ".join(f"{loss:.4f}" for loss in seeds),
        f"seed 1 with a guest on the CPU that computed {share:.0%} of the samples: {ours:.4f}"
        f" ({ours - seeds[0]:+.4f}; the seeds differ by up to {max(seeds) - min(seeds):.4f});"
        f" cosine of gradients at the start {cosine}",
    ]


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        runs = start(Path(folder))
        try:
            for run in runs.values():
                run.wait(lambda run=run: run.events("run_end"), 200.0, "end")
        except RuntimeError as error:
            say(str(error))
        finally:
            say("\n".join(report(runs)))
            for run in runs.values():
                run.end()


if __name__ == "__main__":
    main()
