"""How fast the codecs are on this GPU, beside the copy bandwidth of the same run.

    python bench/gpu/codec_rates.py [--parameters 124475904]

Rates count each byte that must be read and each that must be written once. `change` reads the weights and the
replica, and writes the replica and the payload. `plain` is the same in plain torch, for machines without Triton.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from itertools import pairwise

import torch

from potluck.codec import add_decoded, encode_change, fused, get

BAR = 0.40


def median_ms(call: Callable[[], object], repeats: int = 20) -> float:
    """Of many calls, by the device's own clock."""
    for _ in range(3):
        call()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    marks[0].record()
    for mark in marks[1:]:
        call()
        mark.record()
    torch.cuda.synchronize()
    times = sorted(a.elapsed_time(b) for a, b in pairwise(marks))
    return times[repeats // 2]


def copies(count: int) -> dict[str, float]:
    """GB/s: within the device (read and written), to pinned host memory and from there."""
    a, b = torch.randn(count, device="cuda"), torch.empty(count, device="cuda")
    host = torch.empty(count, pin_memory=True)
    return {
        "device": 8e-6 * count / median_ms(lambda: b.copy_(a)),
        "to_host": 4e-6 * count / median_ms(lambda: host.copy_(a, non_blocking=True), 5),
        "from_host": 4e-6 * count / median_ms(lambda: b.copy_(host, non_blocking=True), 5),
    }


def rates(name: str, count: int) -> dict[str, float]:
    """GB/s of one codec."""
    codec = get(name)
    values = torch.randn(count, device="cuda") * 1e-3
    target, replica, out = values.clone(), torch.zeros_like(values), torch.empty_like(values)
    payload = codec.encode(values)
    one_way = 4 * count + payload.numel()
    moved = {"encode": one_way, "decode": one_way, "add": one_way + 4 * count, "change": one_way + 8 * count}
    calls: dict[str, Callable[[], object]] = {
        "encode": lambda: codec.encode(values),
        "decode": lambda: codec.decode(payload, count, out=out),
        "add": lambda: add_decoded(codec, payload, [count], out, first=False, room=torch.empty_like),  # type: ignore[arg-type]
        "change": lambda: encode_change(codec, target, replica),
    }
    return {verb: 1e-6 * moved[verb] / median_ms(call) for verb, call in calls.items()}


def measure(count: int) -> list[str]:
    copy = copies(count)
    lines = [
        f"copy within the device {copy['device']:,.0f} GB/s (read and written), to pinned memory"
        f" {copy['to_host']:.1f}, from it {copy['from_host']:.1f} GB/s; {count:,} parameters",
        "| codec | encode | decode | decode and add | change | encode, decode of copy |",
        "|---|---|---|---|---|---|",
    ]
    worst = 1.0
    for name in ("int8", "int4"):
        row = rates(name, count)
        share = min(row["encode"], row["decode"]) / copy["device"]
        worst = min(worst, share)
        cells = " | ".join(f"{row[verb]:,.0f} GB/s" for verb in ("encode", "decode", "add", "change"))
        lines.append(
            f"| {name} | {cells} | {row['encode'] / copy['device']:.2f}, {row['decode'] / copy['device']:.2f} |"
        )
    usable = fused.usable(torch.device("cuda", torch.cuda.current_device()))
    lines.append(f"fused kernels {'used' if usable else 'not usable'}; slowest {worst:.2f} of copy (bar {BAR})")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description="The codecs' rates on this GPU.")
    parser.add_argument("--parameters", type=int, default=124_475_904)
    print("\n".join(measure(parser.parse_args().parameters)))


if __name__ == "__main__":
    main()
