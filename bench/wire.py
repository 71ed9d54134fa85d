"""How fast messages cross the wire on this machine: encrypted, between two processes, both ways.

    python bench/wire.py [--mb 400] [--json]

Owns the measurement only. Rates are taken where the bytes arrive, from the first piece to the last; CPU is what
both processes together spend on it. The last line is plain TCP between the same processes, for comparison.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import socket
import sys
import time
from multiprocessing.connection import Connection
from statistics import median
from typing import Any

from potluck.spec.messages import Frames, Message
from potluck.wire.frames import Reader, pack
from potluck.wire.keys import new_keys
from potluck.wire.token import Token, decode, encode
from potluck.wire.transport import GuestSocket, HostSocket

PIECES_BYTES = (64 * 1024, 256 * 1024, 1024 * 1024, 8 * 1024 * 1024)
DEADLINE_S = 120.0


class Bench(Message, frozen=True, kw_only=True):
    """What the two sides of this measurement say."""

    kind = "bench"
    frames = Frames(most=1)
    what: str
    bytes: int = 0
    piece: int = 0
    count: int = 0
    rate: float = 0.0
    cpu_s: float = 0.0


READER = Reader([Bench])


class Meter:
    """Counts what arrives: the time begins with the first piece, whose bytes do not count."""

    def __init__(self, expected: int) -> None:
        self._expected = expected
        self._arrived = 0
        self._began = 0.0

    def add(self, frames: tuple[bytes | memoryview, ...]) -> float | None:
        """Bytes per second once everything is there."""
        if not self._arrived:
            self._began = time.perf_counter()
            self._first = sum(map(len, frames))
        self._arrived += sum(map(len, frames))
        if self._arrived < self._expected:
            return None
        return (self._arrived - self._first) / max(time.perf_counter() - self._began, 1e-9)


def serve(pipe: Connection) -> None:
    """The host: takes pieces and says how fast they came, or sends pieces, as the guest asks."""
    keys = new_keys()
    host = HostSocket(bind="127.0.0.1", port=0, keys=keys)
    token = Token(addresses=("127.0.0.1",), port=host.port, host_public=keys.public, guest_secret=keys.guest_secret)
    pipe.send(encode(token))
    piece = memoryview(os.urandom(max(PIECES_BYTES)))
    meter = Meter(0)
    waiting: list[tuple[bytes, list[Any]]] = []
    while True:
        while waiting and host.send(*waiting[-1]):
            waiting.pop()
        for peer, frames in host.receive(0.001 if waiting else 1.0):
            message, payload = READER.read(frames)
            control = peer[:-1] + b"c"
            if message.what == "piece":
                if (rate := meter.add(payload)) is not None:
                    host.send(control, pack(Bench(what="took", rate=rate)))
            elif message.what == "up":
                meter = Meter(message.bytes)
                host.send(control, pack(Bench(what="ready")))
            elif message.what == "down":
                size, count = message.piece, message.count
                one = pack(Bench(what="piece"), (piece[:size],))
                waiting = [(peer[:-1] + b"d", one)] * count
            elif message.what == "echo":
                host.send(peer, frames)
            elif message.what == "cpu":
                host.send(control, pack(Bench(what="cpu", cpu_s=time.process_time())))
            else:
                host.close()
                return


class Client:
    """The guest's side of the measurement."""

    def __init__(self, token: Token) -> None:
        self.guest = GuestSocket(token)
        self.guest.handshake(10)
        self._piece = memoryview(os.urandom(max(PIECES_BYTES)))
        assert self.guest.send_data(pack(Bench(what="echo")))
        self.wait("echo")

    def wait(self, kind: str) -> Bench:
        deadline = time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline:
            for _, frames in self.guest.receive(1.0):
                message = READER.read(frames).message
                if message.what == kind:
                    return message
        raise TimeoutError(f"the host did not say {kind!r} within {DEADLINE_S:g} s")

    def ask(self, kind: str, answer: str, **fields: Any) -> Bench:
        assert self.guest.send_control(pack(Bench(what=kind, **fields)))
        return self.wait(answer)

    def up(self, size: int, count: int) -> float:
        self.ask("up", "ready", bytes=size * count)
        message = pack(Bench(what="piece"), (self._piece[:size],))
        for _ in range(count):
            while not self.guest.send_data(message):
                self.guest.receive(0.001)
        return self.wait("took").rate

    def down(self, size: int, count: int) -> float:
        assert self.guest.send_control(pack(Bench(what="down", piece=size, count=count)))
        meter = Meter(size * count)
        deadline = time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline:
            for _, frames in self.guest.receive(1.0):
                if (rate := meter.add(READER.read(frames).frames)) is not None:
                    return rate
        raise TimeoutError(f"the pieces did not come within {DEADLINE_S:g} s")

    def round_trip_s(self, count: int = 300) -> float:
        times = []
        for _ in range(count):
            began = time.perf_counter()
            self.ask("echo", "echo")
            times.append(time.perf_counter() - began)
        return median(times)

    def cpu_s(self) -> float:
        return time.process_time() + self.ask("cpu", "cpu").cpu_s


def send_plainly(port: int, total: int) -> None:
    data = memoryview(bytes(1024 * 1024))
    with socket.create_connection(("127.0.0.1", port)) as out:
        for _ in range(total // len(data)):
            out.sendall(data)


def plain_tcp(total: int) -> float:
    """Bytes per second of one plain TCP connection between two processes."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(DEADLINE_S)
        process = spawn.Process(target=send_plainly, args=(listener.getsockname()[1], total))
        process.start()
        connection, _ = listener.accept()
        with connection:
            room = memoryview(bytearray(1024 * 1024))
            arrived = connection.recv_into(room)
            began = time.perf_counter()
            while part := connection.recv_into(room):
                arrived += part
            rate = arrived / (time.perf_counter() - began)
        process.join(DEADLINE_S)
    return rate


spawn = multiprocessing.get_context("spawn")


def measure(total: int) -> dict[str, Any]:
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=serve, args=(theirs,), daemon=True)
    process.start()
    client = Client(decode(ours.recv()))
    rows = []
    for size in PIECES_BYTES:
        for direction, move in (("guest to host", client.up), ("host to guest", client.down)):
            count = max(2, total // size)
            before_s = client.cpu_s()
            rate = move(size, count)
            cpu_s = client.cpu_s() - before_s
            rows.append(
                {
                    "direction": direction,
                    "piece_bytes": size,
                    "bytes_per_s": rate,
                    "cpu_s_per_gb": cpu_s / (size * count / 1e9),
                }
            )
    round_trip_s = client.round_trip_s()
    client.guest.send_control(pack(Bench(what="end")))
    client.guest.close()
    process.join(DEADLINE_S)
    return {"rows": rows, "round_trip_s": round_trip_s, "plain_tcp_bytes_per_s": plain_tcp(total)}


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure the encrypted transport on this machine.")
    parser.add_argument("--mb", type=int, default=400, help="megabytes per measurement (default 400)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    arguments = parser.parse_args()
    result = measure(arguments.mb * 1_000_000)
    if arguments.json:
        print(json.dumps(result, indent=1))
        return 0
    plain = result["plain_tcp_bytes_per_s"]
    print(f"{'direction':<15}{'piece':>10}{'MB/s':>9}{'CPU s/GB':>10}{'of plain TCP':>14}")
    for row in result["rows"]:
        print(
            f"{row['direction']:<15}{row['piece_bytes'] // 1024:>7} KB{row['bytes_per_s'] / 1e6:>9.0f}"
            f"{row['cpu_s_per_gb']:>10.2f}{row['bytes_per_s'] / plain:>14.2f}"
        )
    print(f"{'plain TCP':<15}{1024:>7} KB{plain / 1e6:>9.0f}")
    print(f"round trip of a control message: {result['round_trip_s'] * 1e3:.2f} ms")
    return 0


if __name__ == "__main__":
    sys.exit(main())
