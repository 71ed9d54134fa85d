"""How fast the codecs are on one core: python bench/codec.py [--json] [--seconds 0.3] [--model 100000000]

For each codec and size: bytes per value, and MB of float32 per second that are encoded, decoded, encoded with
feedback, and coded as a change against a replica. Beside them, what a plain copy reaches in the same run. The
best of many calls is reported: on a shared machine the others measure the neighbours. Then the seconds for a
whole model in pieces of 1,048,576 values, from memory and not from the cache.

It measures the codecs and must not know what they are used for.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable

import torch

from potluck.codec import NAMES, encode_change, encode_with_feedback, get

REQUIRED_MB_PER_S = 300.0
"""What int8 and int4 must reach on one core, encoding and decoding."""

VERBS = ("encode", "decode", "feedback", "change")


def best_s(call: Callable[[], object], seconds: float) -> float:
    """The shortest of the calls that fit into `seconds`."""
    for _ in range(3):
        call()
    best, end = float("inf"), time.perf_counter() + seconds
    while True:
        start = time.perf_counter()
        call()
        now = time.perf_counter()
        best = min(best, now - start)
        if now >= end:
            return best


def measure(name: str, count: int, seconds: float) -> dict[str, float | int | str]:
    """One row: MB of float32 per second for each verb."""
    codec = get(name)
    values = torch.randn(count, generator=torch.Generator().manual_seed(0)) * 1e-3
    payload, out = codec.encode(values), torch.empty(count)
    gradient, residual = values.clone(), torch.zeros(count)
    target, replica = values.clone(), torch.zeros(count)

    def feedback() -> None:
        encode_with_feedback(codec, gradient, residual)

    def change() -> None:
        target.add_(1e-6)  # so that there is always a change to send
        encode_change(codec, target, replica)

    calls: dict[str, Callable[[], object]] = {
        "encode": lambda: codec.encode(values),
        "decode": lambda: codec.decode(payload, count, out=out),
        "feedback": feedback,
        "change": change,
    }
    row: dict[str, float | int | str] = {
        "codec": name,
        "count": count,
        "bytes_per_value": codec.nbytes(count) / count,
    }
    for verb, call in calls.items():
        row[f"{verb}_mb_per_s"] = 4e-6 * count / best_s(call, seconds)
    row["copy_mb_per_s"] = 4e-6 * count / best_s(lambda: out.copy_(values), seconds)
    return row


def whole_model(name: str, count: int) -> dict[str, float | int | str]:
    """Seconds to encode and to decode `count` parameters, piece by piece; the better of two rounds."""
    codec = get(name)
    model, out = torch.full((count,), 1e-3), torch.empty(1 << 20)
    pieces = [model[start : start + out.numel()] for start in range(0, count, out.numel())]
    row: dict[str, float | int | str] = {"codec": name, "count": count}
    for _ in range(2):
        start = time.perf_counter()
        payloads = [codec.encode(piece) for piece in pieces]
        encoded = time.perf_counter()
        for piece, payload in zip(pieces, payloads):
            codec.decode(payload, piece.numel(), out=out[: piece.numel()])
        decoded = time.perf_counter()
        row["encode_s"] = min(encoded - start, float(row.get("encode_s", "inf")))
        row["decode_s"] = min(decoded - encoded, float(row.get("decode_s", "inf")))
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description="MB of float32 per second and core, for each codec.")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--seconds", type=float, default=0.3, help="time for each number (default: 0.3)")
    parser.add_argument("--sizes", default="65536,262144,1048576", help="values in a piece, separated by commas")
    parser.add_argument("--model", type=int, default=100_000_000, help="parameters of the whole model; 0: skip")
    options = parser.parse_args()
    torch.set_num_threads(1)
    sizes = [int(size) for size in options.sizes.split(",")]
    rows = [measure(name, count, options.seconds) for name in NAMES for count in sizes]
    slowest = min(
        float(row[f"{verb}_mb_per_s"])
        for row in rows
        if row["codec"] in ("int8", "int4")
        for verb in ("encode", "decode")
    )
    ratio = slowest / REQUIRED_MB_PER_S
    models = [whole_model(name, options.model) for name in ("int8", "int4")] if options.model else []
    if options.json:
        machine = {"machine": platform.machine(), "torch": torch.__version__, "threads": 1}
        json.dump({**machine, "rows": rows, "models": models, "slowest_over_required": ratio}, sys.stdout, indent=2)
        print()
        return 0
    print(f"{'codec':6}{'values':>9}{'bytes/value':>13}" + "".join(f"{v:>10}" for v in (*VERBS, "copy")))
    for row in rows:
        speeds = "".join(f"{row[f'{verb}_mb_per_s']:>10.0f}" for verb in (*VERBS, "copy"))
        print(f"{row['codec']:6}{row['count']:>9}{row['bytes_per_value']:>13.4f}{speeds}")
    for row in models:
        times = f"encode {row['encode_s']:.2f} s, decode {row['decode_s']:.2f} s"
        print(f"{row['codec']:6}{row['count']:>12,} parameters: {times}")
    print("\nMB of float32 per second, one core.", end=" ")
    print(f"Slowest encode or decode of int8 and int4: {slowest:.0f}, {ratio:.1f} times the required 300.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
