"""What a message costs its sender and its receiver, beside an untyped one: a dict, packed by json, checked by hand.

    .venv/bin/python bench/messages.py [--times 20000]

For each kind that a step has many of: microseconds of CPU to build, record and pack it, and to unpack, check and
record it, without the socket. The untyped side does what potluck did before its messages had types.
"""

from __future__ import annotations

import argparse
import json
import math
import time
import timeit
from collections.abc import Callable, Mapping
from typing import Any

from potluck.hub.recorder import NUMBERS, Recorder
from potluck.spec.messages import (
    AliveMessage,
    ChangeMessage,
    DoneMessage,
    GradMessage,
    LeaseMessage,
    Message,
    TakenMessage,
)
from potluck.wire.frames import FROM_GUEST, FROM_HOST, MAGIC, PROTOCOL, pack

FRAME = bytes(1000)
DONE = {"compute_s": 0.2987654, "loss_sum": 123.456789, "finite": True, "receive_s": 0.0345678}
LEASE = {"within_s": 0.31234567, "host_sample_s": 0.0123456, "transfer_s": 0.0234567, "tail_s": 0.0456789}
KINDS: dict[str, tuple[type[Message], dict[str, Any], tuple[bytes, ...]]] = {
    "grad": (GradMessage, {"lease": 1234, "piece": 17}, (FRAME,)),
    "done": (DoneMessage, {"lease": 1234, "count": 26, **DONE, "micro_batch": 8, "largest_micro_batch": 16}, ()),
    "taken": (TakenMessage, {"bytes": 123456}, ()),
    "alive": (AliveMessage, {}, ()),
    "lease": (LeaseMessage, {"lease": 1234, "step": 617, "sizes": (8, 8, 8, 4), "quota": 26, **LEASE}, ()),
    "change": (ChangeMessage, {"piece": 17, "base": 616, "version": 617}, (FRAME,)),
}
PREFIX = MAGIC + bytes([PROTOCOL])


def microseconds(work: Callable[[], object], times: int) -> float:
    return min(timeit.repeat(work, number=times, repeat=7, timer=time.process_time)) / times * 1e6


def typed(kind: str, times: int) -> tuple[float, float]:
    make, fields, frames = KINDS[kind]
    recorder = Recorder("host", None)
    reader: Any = FROM_HOST if make.sender == "host" else FROM_GUEST
    raw = [memoryview(bytes(part)) for part in pack(make(**fields), frames)]

    def send() -> None:
        message = make(**fields)
        recorder.message("out", "laptop", message, sum(map(len, frames)))
        pack(message, frames)

    def receive() -> None:
        message, payload = reader.read(raw)
        recorder.message("in", "laptop", message, sum(map(len, payload)))

    return microseconds(send, times), microseconds(receive, times)


def untyped(kind: str, times: int) -> tuple[float, float]:
    _, fields, frames = KINDS[kind]
    entries: dict[str, tuple[str, dict[str, Any], int]] = {}
    header = memoryview(PREFIX + json.dumps([kind, fields]).encode())
    checks = {name: is_real if isinstance(value, float) else is_whole for name, value in fields.items()}
    checks |= {"sizes": are_sizes, "finite": lambda value: isinstance(value, bool)}

    def record(fields: Mapping[str, Any], nbytes: int) -> None:
        numbers = {k: v for k in NUMBERS if type(v := fields.get(k)) is int and abs(v) < 1 << 53}
        entries["laptop"] = (kind, numbers, nbytes)

    def send() -> list[bytes]:
        message = dict(fields)
        record(message, sum(len(f) for f in frames))
        text = json.dumps([kind, message], allow_nan=False, ensure_ascii=False, separators=(",", ":"))
        return [PREFIX + text.encode(), *frames]

    def receive() -> None:
        if bytes(header[: len(PREFIX)]) != PREFIX or any(memoryview(f).nbytes > 1 << 24 for f in frames):
            raise ValueError
        raw = bytes(header[len(PREFIX) :])
        found: dict[str, Any]
        _, found = json.loads(raw.decode(), parse_constant=refuse, parse_float=finite)
        if raw.count(b"[") + raw.count(b"{") > 64:
            raise ValueError
        for name in fields:
            if not checks[name](found[name]):
                raise ValueError(name)
        record(found, sum(len(f) for f in frames))

    return microseconds(send, times), microseconds(receive, times)


def is_whole(value: Any) -> bool:
    return type(value) is int and -(1 << 62) <= value <= 1 << 62


def is_real(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def are_sizes(value: Any) -> bool:
    return isinstance(value, list) and 0 < len(value) <= 4096 and all(is_whole(n) and n > 0 for n in value)


def refuse(name: str) -> Any:
    raise ValueError(name)


def finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(text)
    return value


def main() -> None:
    parser = argparse.ArgumentParser(description="What a message costs.")
    parser.add_argument("--times", type=int, default=20_000)
    times = parser.parse_args().times
    print(f"{'µs':8}{'send':>10}{'untyped':>10}{'receive':>10}{'untyped':>10}")
    for kind in KINDS:
        (send, receive), (old_send, old_receive) = typed(kind, times), untyped(kind, times)
        print(f"{kind:8}{send:>10.2f}{old_send:>10.2f}{receive:>10.2f}{old_receive:>10.2f}")


if __name__ == "__main__":
    main()
