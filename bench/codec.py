"""How fast the codecs are on one core: python bench/codec.py [--json] [--seconds 0.3] [--model 100000000]

For each codec and size: bytes per value that are sent, and MB of float32 per second that are encoded, decoded,
encoded with feedback, and coded as a change against a replica; each from values to the message that is sent, or
back. Beside them, what a plain copy reaches in the same run. The best of many calls is reported: on a shared
machine the others measure the neighbours. Then the seconds for a whole model in pieces of 1,048,576 values, from
memory and not from the cache.

--coders compares entropy coders for thin's codes: zlib, and those of zstandard, isal, zlib-ng and constriction that
are installed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import platform
import sys
import time
import zlib
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from potluck.codec import NAMES, encode_change, encode_with_feedback, from_wire, get, to_wire

THIN_MB_PER_S = {"encode": 400.0, "decode": 1000.0}
"""What thin must reach on one core, its entropy coding included."""
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
    message, out = to_wire(codec, codec.encode(values)), torch.empty(count)
    gradient, residual = values.clone(), torch.zeros(count)
    target, replica = values.clone(), torch.zeros(count)

    def feedback() -> None:
        to_wire(codec, encode_with_feedback(codec, gradient, residual))

    def change() -> None:
        torch.add(replica, values, out=target)  # so that there is always a change to send
        to_wire(codec, encode_change(codec, target, replica))

    calls: dict[str, Callable[[], object]] = {
        "encode": lambda: to_wire(codec, codec.encode(values)),
        "decode": lambda: codec.decode(from_wire(codec, message, count), count, out=out),
        "feedback": feedback,
        "change": change,
    }
    row: dict[str, float | int | str] = {
        "codec": name,
        "count": count,
        "bytes_per_value": len(message) / count,
    }
    for verb, call in calls.items():
        row[f"{verb}_mb_per_s"] = 4e-6 * count / best_s(call, seconds)
    row["copy_mb_per_s"] = 4e-6 * count / best_s(lambda: out.copy_(values), seconds)
    return row


def whole_model(name: str, count: int) -> dict[str, float | int | str]:
    """Seconds to encode and to decode `count` parameters, piece by piece; the better of two rounds."""
    codec = get(name)
    model, out = torch.randn(count), torch.empty(1 << 20)
    pieces = [model[start : start + out.numel()] for start in range(0, count, out.numel())]
    row: dict[str, float | int | str] = {"codec": name, "count": count}
    for _ in range(2):
        start = time.perf_counter()
        messages = [to_wire(codec, codec.encode(piece)) for piece in pieces]
        encoded = time.perf_counter()
        for piece, message in zip(pieces, messages):
            codec.decode(from_wire(codec, message, piece.numel()), piece.numel(), out=out[: piece.numel()])
        decoded = time.perf_counter()
        row["encode_s"] = min(encoded - start, float(row.get("encode_s", "inf")))
        row["decode_s"] = min(decoded - encoded, float(row.get("decode_s", "inf")))
    return row


Coder = tuple[Callable[[bytes], bytes], Callable[[bytes], bytes]]


def coders(nbytes: int) -> dict[str, Coder]:
    """Ways to code so many bytes, each of which holds two codes, and back; those that are installed."""

    def deflate(module: Any, level: int, *strategy: int) -> Coder:
        def code(raw: bytes) -> bytes:
            stream = module.compressobj(level, 8, -15, 9, *strategy)
            return bytes(stream.compress(raw) + stream.flush())

        return code, lambda coded: bytes(module.decompressobj(-15).decompress(coded, nbytes))

    found: dict[str, Coder] = {
        "zlib, Huffman only": deflate(zlib, 1, zlib.Z_HUFFMAN_ONLY),
        "zlib, level 1": deflate(zlib, 1),
    }
    with contextlib.suppress(ImportError):
        from zlib_ng import zlib_ng

        found["zlib-ng, Huffman only"] = deflate(zlib_ng, 1, zlib.Z_HUFFMAN_ONLY)
    with contextlib.suppress(ImportError):
        from isal import isal_zlib

        found |= {f"isal, level {level}": deflate(isal_zlib, level) for level in (0, 1, 2)}
    with contextlib.suppress(ImportError):
        import zstandard

        fast = {"strategy": 1, "min_match": 7, "hash_log": 6, "chain_log": 6, "search_log": 1, "window_log": 17}
        how = zstandard.ZstdCompressionParameters(target_length=0, write_checksum=False, **fast)
        zstd, back = zstandard.ZstdCompressor(compression_params=how), zstandard.ZstdDecompressor()
        found["zstandard, hardly any matches"] = zstd.compress, lambda coded: back.decompress(coded, nbytes)
    with contextlib.suppress(ImportError):
        found["constriction, range coder"] = range_coder(nbytes)
    return found


def range_coder(nbytes: int) -> Coder:
    """Each code by itself, with the probabilities of a normal distribution."""
    import constriction

    model = constriction.stream.model.QuantizedGaussian(0, 15, 7.0, 1.0)

    def code(raw: bytes) -> bytes:
        pairs = np.frombuffer(raw, dtype=np.int8).astype(np.int32)
        high = (pairs + 8) >> 4
        coder = constriction.stream.queue.RangeEncoder()
        coder.encode(np.concatenate((pairs - 16 * high, high)) + 7, model)
        return bytes(coder.get_compressed().tobytes())

    def back(coded: bytes) -> bytes:
        coder = constriction.stream.queue.RangeDecoder(np.frombuffer(coded, dtype=np.uint32))
        codes = coder.decode(model, 2 * nbytes) - 7
        return bytes((codes[:nbytes] + 16 * codes[nbytes:]).astype(np.int8).tobytes())

    return code, back


def compare_coders(count: int, seconds: float) -> list[str]:
    """Bits a code and MB of float32 a second, for normally distributed values and for heavy tails."""
    lines = []
    for kind, name in (("normal", "thin"), ("heavy tails", "thin"), ("normal", "thin:1.25")):
        numbers = np.random.default_rng(0)
        drawn = numbers.standard_normal(count) if kind == "normal" else numbers.standard_t(4, count)
        payload = get(name).encode(torch.from_numpy(drawn.astype(np.float32)))
        raw = payload[2 * (count // 128) :].numpy().tobytes()
        lines.append(f"{name}, {kind}")
        for coder, (code, back) in coders(len(raw)).items():
            coded = code(raw)
            assert back(coded) == raw, coder
            speeds = [4e-6 * count / best_s(partial(*call), seconds) for call in ((code, raw), (back, coded))]
            bits = 8 * len(coded) / count
            lines.append(f"  {coder:30}{bits:6.3f} bits  code {speeds[0]:7.0f}  back {speeds[1]:7.0f}")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description="MB of float32 per second and core, for each codec.")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--seconds", type=float, default=0.3, help="time for each number (default: 0.3)")
    parser.add_argument("--sizes", default="65536,262144,1048576", help="values in a piece, separated by commas")
    parser.add_argument("--model", type=int, default=100_000_000, help="parameters of the whole model; 0: skip")
    parser.add_argument("--coders", action="store_true", help="compare entropy coders instead")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.coders:
        print("\n".join(compare_coders(1 << 20, options.seconds)))
        return 0
    sizes = [int(size) for size in options.sizes.split(",")]
    rows = [measure(name, count, options.seconds) for name in NAMES for count in sizes]
    slowest = min(
        float(row[f"{verb}_mb_per_s"])
        for row in rows
        if row["codec"] in ("int8", "int4")
        for verb in ("encode", "decode")
    )
    ratio = slowest / REQUIRED_MB_PER_S
    models = [whole_model(name, options.model) for name in ("int8", "int4", "thin")] if options.model else []
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
    for verb, least in THIN_MB_PER_S.items():
        found = min(float(row[f"{verb}_mb_per_s"]) for row in rows if row["codec"] == "thin")
        print(f"thin: {verb} {found:.0f}, {found / least:.1f} times the required {least:.0f}.")
    print("\nMB of float32 per second, one core.", end=" ")
    print(f"Slowest encode or decode of int8 and int4: {slowest:.0f}, {ratio:.1f} times the required 300.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
