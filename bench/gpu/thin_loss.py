"""What codecs cost in loss, on one GPU: host and guests simulated step by step with the real codecs.

    python bench/gpu/thin_loss.py [--seeds 3] [--workers 6] [--json FILE]
    python bench/gpu/thin_loss.py --gpt2 --json gpt2.json
    python bench/gpu/thin_loss.py --from gpt2.json --plot docs/images/gpt2-thin.png
    python bench/gpu/thin_loss.py --device cpu --depth 1 --sequence 32 --batch 8 --steps 20 --seeds 1 --workers 1

A GPT of 10.9 M parameters trains 800 steps. In each, the guests' share of the batch is computed at the replica, its
gradient is coded with error feedback, added to the host's, and the weights' change is coded against the replica.
Each run is a process of its own; some run at once, because one alone leaves most of the GPU idle. Prints the
held-out loss of every codec and seed, its mean distance from `exact` (codec none, the same seeds), and the bits a
parameter that the messages had.

A codec is UP or UP/DOWN. `metric+UP` scales the gradient by 1/√v first: v is Adam's second moment, as a product of
rows and columns, which the host would send every 20 steps.

`--gpt2` is GPT-2 124M in bf16, 300 steps of 32 × 512 bytes, a quarter of each batch on a guest: exact, int4 and
thin, the two codecs that `auto` chooses from. Held-out losses on the way make the curve that `--plot` draws (needs
matplotlib; `--from` draws what another machine has measured).
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import statistics
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from potluck.codec import Codec, encode_change, encode_with_feedback, get, to_wire
from potluck.train.recipes.gpt import RECIPE, GptConfig

VARIANTS = "none,int4,thin/thin:1.25,thin/thin:1.5,thin:1.25/thin:1.25,metric+thin/thin:1.25"
SHARES = "0.25,0.5"
BARS = {0.25: 0.005, 0.5: 0.012}
GPT2 = {"depth": 12, "sequence": 512, "batch": 32, "steps": 300, "curve_every": 20, "workers": 3}
GPT2_VARIANTS, GPT2_SHARES = "none,int4,thin/thin:1.25", "0.25"
MEASURED_EVERY = METRIC_EVERY = 20
LARGE, LARGE_MEASURED_EVERY = 50_000_000, 100
"""Messages are coded on one core to count their bits: more seldom for as many parameters."""
EVALUATED_TOKENS = 16_384
CURVE_WINDOWS = 256
PIECE = 170_240
"""Values in a piece of this model."""
HELD_OUT = 1024


@dataclass(frozen=True, kw_only=True)
class Job:
    """One run."""

    variant: str
    share: float
    seed: int
    device: str
    depth: int
    sequence: int
    batch: int
    steps: int
    curve_every: int = 0
    """Steps between two held-out losses on the way; 0: none."""

    @property
    def config(self) -> GptConfig:
        tokens = self.batch * self.sequence
        return GptConfig(
            depth=self.depth, sequence=self.sequence, batch_tokens=tokens, steps=self.steps, seed=self.seed
        )


class Flat:
    """A model whose parameters, and whose gradients, are views of one vector each."""

    def __init__(self, model: nn.Module) -> None:
        self.model, parameters = model, list(model.parameters())
        self.values = torch.cat([p.detach().reshape(-1) for p in parameters])
        self.gradient = torch.zeros_like(self.values)
        self.shapes, at = [p.shape for p in parameters], 0
        for p in parameters:
            p.data = self.values[at : at + p.numel()].view_as(p)
            p.grad = self.gradient[at : at + p.numel()].view_as(p)
            at += p.numel()


class Metric:
    """1/√v of each value, v as a product of rows and columns; ones until the first update was made."""

    def __init__(self, flat: Flat, optimizer: torch.optim.Optimizer) -> None:
        self._flat, self._optimizer = flat, optimizer
        self.scale = torch.ones_like(flat.values)

    def renew(self) -> None:
        at = 0
        for parameter in self._flat.model.parameters():
            second = self._optimizer.state[parameter]["exp_avg_sq"]
            if second.dim() == 2:
                second = (
                    second.mean(1, keepdim=True) * second.mean(0, keepdim=True) / second.mean().clamp(min=1e-30)
                )
            part = second.sqrt().add(1e-10).reciprocal().reshape(-1)
            self.scale[at : at + parameter.numel()] = part
            at += parameter.numel()
        self.scale /= self.scale.square().mean().sqrt()


def bits_a_value(codec: Codec, values: Tensor) -> float:
    """Of the messages that would carry these values, in pieces as they are sent."""
    parts = values.cpu().split(PIECE)
    return 8 * sum(len(to_wire(codec, codec.encode(part))) for part in parts) / values.numel()


@torch.no_grad()
def held_out_loss(model: nn.Module, job: Job, windows: Tensor, most: int = HELD_OUT) -> float:
    model.eval()
    chosen = windows[:: max(1, len(windows) // most)][:most]
    parts = chosen.split(max(1, EVALUATED_TOKENS // job.sequence))
    total = sum(RECIPE.loss(model, some, job.config).item() * len(some) for some in parts)
    model.train()
    return total / len(chosen)


def texts(job: Job) -> tuple[Tensor, Tensor]:
    """All windows to train on and all that are held out, [windows, sequence + 1] uint8."""
    from potluck.train.recipes import corpus

    parts = corpus.split(corpus.open_corpus(None), sequence=job.sequence, needed=job.batch)
    return tuple(torch.stack(part.__getitems__(range(len(part)))).to(job.device) for part in parts)  # type: ignore


def train(job: Job) -> dict[str, Any]:
    torch.set_num_threads(1)
    torch.set_float32_matmul_precision("high")
    began, config = time.monotonic(), job.config
    training, held_out = texts(job)
    host, guest = (Flat(RECIPE.model(config).to(job.device)) for _ in range(2))
    optimizer = RECIPE.optimizer(host.model, config)
    scheduler = RECIPE.scheduler(optimizer, config)
    up_name, _, down_name = job.variant.removeprefix("metric+").partition("/")
    up, down = get(up_name), get(down_name or up_name)
    metric = Metric(host, optimizer) if job.variant.startswith("metric+") else None
    residual = torch.zeros_like(host.values)
    theirs = round(job.share * job.batch)
    order = torch.Generator().manual_seed(job.seed)
    bits_up, bits_down = [], []
    curve: list[tuple[int, float]] = []
    every = LARGE_MEASURED_EVERY if host.values.numel() > LARGE else MEASURED_EVERY
    for step in range(job.steps):
        chosen = torch.randint(len(training), (job.batch,), generator=order).to(job.device)
        batch = training[chosen]
        for flat, part in ((guest, batch[:theirs]), (host, batch[theirs:])):
            flat.gradient.zero_()
            (RECIPE.loss(flat.model, part, config) * len(part)).backward()
        measured = step % every == every - 1
        with torch.no_grad():
            sent = guest.gradient
            if measured:
                total = (sent + residual) * (metric.scale if metric else 1.0)
                bits_up.append(bits_a_value(up, total))
            if metric is None:
                decoded = up.decode(encode_with_feedback(up, sent, residual), sent.numel())
            else:
                sent += residual
                decoded = up.decode(up.encode(sent * metric.scale), sent.numel()) / metric.scale
                torch.sub(sent, decoded, out=residual)
            host.gradient.add_(decoded).div_(job.batch)
            host.gradient.mul_(min(1.0, config.clip_norm / (float(host.gradient.norm()) + 1e-6)))
        optimizer.step()
        scheduler.step()
        with torch.no_grad():
            if measured:
                change = host.values - guest.values
                bits_down.append(bits_a_value(down, change))
            encode_change(down, host.values, guest.values)
            if metric is not None and step % METRIC_EVERY == 0:
                metric.renew()
        if job.curve_every and (step + 1) % job.curve_every == 0:
            curve.append((step + 1, held_out_loss(host.model, job, held_out, CURVE_WINDOWS)))
    return {
        **asdict(job),
        "loss": held_out_loss(host.model, job, held_out),
        "parameters": host.values.numel(),
        "curve": curve,
        "bits_up": statistics.fmean(bits_up) if bits_up else math.nan,
        "bits_down": statistics.fmean(bits_down) if bits_down else math.nan,
        "seconds": time.monotonic() - began,
    }


def table(rows: list[dict[str, Any]], shares: list[float], variants: list[str], seeds: list[int]) -> list[str]:
    found = {(r["variant"], r["share"], r["seed"]): r for r in rows}
    # Codec none has the same mathematics at every share: all its runs of a seed are the reference.
    exact = {
        seed: statistics.fmean(
            found["none", share, seed]["loss"] for share in shares if ("none", share, seed) in found
        )
        for seed in seeds
        if any(("none", share, seed) in found for share in shares)
    }
    lines = ["| guests' share | up/down | bits up | bits down | held-out loss by seed | mean - exact | bar |"]
    lines += ["|---|---|---|---|---|---|---|"]
    for share in shares:
        for variant in variants:
            runs = [found[variant, share, seed] for seed in seeds if (variant, share, seed) in found]
            if not runs:
                continue
            losses = ", ".join(f"{r['loss']:.4f}" for r in runs)
            apart = [r["loss"] - exact[r["seed"]] for r in runs if r["seed"] in exact]
            mean = f"{statistics.fmean(apart):+.4f}" if apart else ""
            up, down = (statistics.fmean(r[key] for r in runs) for key in ("bits_up", "bits_down"))
            bar = f"{BARS[share]:+.3f}" if share in BARS and variant != "none" else ""
            lines.append(f"| {share:g} | {variant} | {up:.3f} | {down:.3f} | {losses} | {mean} | {bar} |")
    return lines


def noise(rows: list[dict[str, Any]], variants: list[str]) -> list[str]:
    """Each codec's mean distance from exact beside what seeds differ by."""
    losses = {v: [r["loss"] for r in rows if r["variant"] == v] for v in variants}
    exact = losses.get("none", [])
    if len(exact) < 2:
        return []
    spread, mean = statistics.stdev(exact), statistics.fmean(exact)
    lines = [f"exact: mean {mean:.4f}, standard deviation of {len(exact)} seeds {spread:.4f}"]
    for variant, found in losses.items():
        if found and variant != "none":
            apart = statistics.fmean(found) - mean
            words = "within" if abs(apart) <= spread else "BEYOND"
            lines.append(f"{variant}: {apart:+.4f}, {words} the seeds' noise")
    return lines


def plot(rows: list[dict[str, Any]], file: Path) -> None:
    """Held-out loss by step: a thin line for each seed, a thick one for a codec's mean."""
    from potluck.report.plot_style import GREY, INK, PALE, new_figure

    colours = {"none": GREY, "int4": "#d55e00", "thin/thin:1.25": "#0072b2"}
    names = {"none": "exact", "thin/thin:1.25": "thin"}
    figure = new_figure(8.0, 4.5)
    whole, end = figure.subplots(1, 2, width_ratios=(3, 2))
    for variant in dict.fromkeys(r["variant"] for r in rows):
        curves = [r["curve"] for r in rows if r["variant"] == variant]
        steps = [step for step, _ in curves[0]]
        mean = [statistics.fmean(point[1] for point in points) for points in zip(*curves)]
        colour = colours.get(variant, INK)
        for axes, start in ((whole, 0), (end, len(steps) // 2)):
            for curve in curves:
                axes.plot(
                    steps[start:], [loss for _, loss in curve][start:], color=colour, linewidth=0.6, alpha=0.5
                )
            label = f"{names.get(variant, variant)}, mean of {len(curves)} seeds"
            axes.plot(steps[start:], mean[start:], color=colour, linewidth=1.8, label=label)
    millions = rows[0]["parameters"] / 1e6
    whole.set_title(
        f"GPT of {millions:.0f} M parameters, {rows[0]['share']:.0%} of each batch on a guest",
        loc="left",
        fontsize=9,
    )
    end.set_title("the second half", loc="left", fontsize=9)
    whole.set_ylabel("held-out loss, nats a byte")
    whole.legend(frameon=False)
    for axes in (whole, end):
        axes.set_xlabel("step")
        axes.grid(color=PALE, linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(file, dpi=160)


def report(rows: list[dict[str, Any]], file: Path | None) -> None:
    """The table, and the curve where it is wanted."""
    variants, shares, seeds = (list(dict.fromkeys(r[key] for r in rows)) for key in ("variant", "share", "seed"))
    print("\n".join(table(rows, shares, variants, seeds)))
    if len(shares) == 1:
        print("\n".join(noise(rows, variants)))
    if file is not None:
        plot(rows, file)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Held-out loss of each codec.")
    parser.add_argument("--gpt2", action="store_true", help="GPT-2 124M, 300 steps: exact, int4 and thin")
    parser.add_argument("--from", type=Path, dest="source", help="train nothing: show the runs of this JSON file")
    parser.add_argument("--plot", type=Path, help="draw the curves into this PNG file")
    parser.add_argument("--curve-every", type=int, default=0, help="steps between two held-out losses on the way")
    parser.add_argument("--variants", default=VARIANTS, help=f"default: {VARIANTS}")
    parser.add_argument("--shares", default=SHARES, help="the guests' parts of the batch")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=6, help="runs at once")
    parser.add_argument("--minutes", type=float, default=7.5, help="start no run after this long")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--depth", type=int, default=6)
    parser.add_argument("--sequence", type=int, default=256)
    parser.add_argument("--batch", type=int, default=64, help="samples in a step")
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--json", type=Path, help="write all runs to this file")
    if "--gpt2" in sys.argv:
        parser.set_defaults(variants=GPT2_VARIANTS, shares=GPT2_SHARES, **GPT2)
    return parser.parse_args()


def main() -> int:
    options = parsed()
    if options.source:
        report(json.loads(options.source.read_text())["runs"], options.plot)
        return 0
    variants, shares = options.variants.split(","), [float(share) for share in options.shares.split(",")]
    seeds = list(range(1, options.seeds + 1))
    sizes = {key: getattr(options, key) for key in ("device", "depth", "sequence", "batch", "steps", "curve_every")}
    # The variants of a seed before the next seed: what is cut off by the time is cut off of all.
    jobs = [
        Job(variant=variant, share=share, seed=seed, **sizes)
        for seed in seeds
        for variant in variants
        for share in shares
    ]
    began, rows = time.monotonic(), []
    with ProcessPoolExecutor(options.workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        running = [pool.submit(train, job) for job in jobs]
        for future in running:
            left = 60 * options.minutes - (time.monotonic() - began)
            if left <= 0 and not future.done():
                future.cancel()
            if future.cancelled():
                continue
            row = future.result()
            rows.append(row)
            words = f"{row['variant']} at {row['share']:g}, seed {row['seed']}: {row['loss']:.4f}"
            print(
                f"{time.monotonic() - began:5.0f} s  {words} in {row['seconds']:.0f} s", file=sys.stderr, flush=True
            )
    if options.json:
        options.json.write_text(json.dumps({"torch": torch.__version__, "runs": rows}, indent=1))
    report(rows, options.plot)
    if len(rows) < len(jobs):
        print(f"\n{len(jobs) - len(rows)} of {len(jobs)} runs did not start within {options.minutes:g} minutes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
