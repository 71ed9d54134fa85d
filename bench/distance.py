"""How much of a long link's bandwidth is used: the hub's data over the internet, the backend's all-reduce.

    python bench/distance.py [--only proxy,hub,backend] [--mbit 1000] [--delays 20,50] [--json FILE]

All through the shaping proxy on 127.0.0.1, encrypted; exits with 1 if a bar is missed.

The hub: 20 Mbit/s up, 100 down, 30 ms each way. Pieces of a large model, whole and in int4, under the host's own
flow control (`hub/feed.py`), and gradients up; each way alone and both at once. Beside it, how long a control
message takes to the host and back. The bar: 0.9 of the link's bandwidth from the first piece's arrival to the last.

The backend: all-reduces of 64 MB between two ranks at `--mbit` with `--delays` milliseconds each way, beside the
time that the link needs: all bytes at its rate, and twice its delay, because each part goes to the other rank and
back. The proxy's own limit is measured first, with a plain connection. If it cannot carry such a link here, take a
fifth of the rate with five times the delay: as many bytes are under way then.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from potluck.hub.feed import NOTHING, Feed, PieceState
from potluck.hub.terms import HostTerms
from potluck.lab.proxy import ProxyProcess
from potluck.lab.shaping import LinkSpec
from potluck.wire.frames import pack
from potluck.wire.keys import new_keys
from potluck.wire.token import Token, decode, encode
from potluck.wire.transport import GuestSocket, HostSocket
from wire import READER, Bench, Meter

MBIT = 125_000.0
INTERNET = LinkSpec(name="link", rate_bytes_per_s=100 * MBIT, up_rate_bytes_per_s=20 * MBIT, latency_s=0.03)
LEAST = 0.9
WINDOW_BYTES = int(HostTerms.__dataclass_fields__["window_bytes"].default)
WHOLE_BYTES, INT4_BYTES = 4 << 20, (1 << 20) * 66 // 128
"""A piece of 1,048,576 values, as a model of 67 million parameters has."""
TENSOR_BYTES, REPEATS = 64_000_000, 3
LIMIT_S = 300.0

spawn = multiprocessing.get_context("spawn")


@contextmanager
def proxied(link: LinkSpec) -> Iterator[ProxyProcess]:
    with tempfile.TemporaryDirectory() as folder, ProxyProcess([link], folder=Path(folder)) as proxy:
        yield proxy


# -- the proxy itself ------------------------------------------------------------------------------------------


def plain_rate(link: LinkSpec, total: int) -> float:
    """Bytes per second each way, of a plain connection that is full both ways."""
    rates: list[float] = []

    def move(connection: socket.socket) -> None:
        sender = threading.Thread(target=connection.sendall, args=(bytes(total),), daemon=True)
        sender.start()
        room, got, began = bytearray(1 << 20), 0, 0.0
        while got < total and (count := connection.recv_into(room)):
            began, got = began or time.monotonic(), got + count
        rates.append(got / (time.monotonic() - began))
        sender.join()

    with proxied(link) as proxy, socket.create_server(("127.0.0.1", 0)) as listener:
        port = proxy.open(link.name, listener.getsockname()[:2])
        near = socket.create_connection(("127.0.0.1", port))
        far, _ = listener.accept()
        with near, far:
            other = threading.Thread(target=move, args=(far,), daemon=True)
            other.start()
            move(near)
            other.join()
    return min(rates)


# -- the hub ---------------------------------------------------------------------------------------------------


def serve(pipe: Any) -> None:
    """The host: sends pieces as its feed lets it, takes gradients, and answers control messages at once."""
    keys = new_keys()
    host = HostSocket(bind="127.0.0.1", port=0, keys=keys)
    token = Token(addresses=("127.0.0.1",), port=host.port, host_public=keys.public, guest_secret=keys.guest_secret)
    pipe.send(encode(token))
    piece = memoryview(os.urandom(WHOLE_BYTES))
    feed, state, to, meter = Feed(pieces=0, window_bytes=0), [], b"", Meter(1)
    while True:
        while (item := feed.next(state)) is not None:
            feed.asked(item)
            feed.answered(item, 1)
            assert host.send(to, pack(Bench(what="piece"), (piece[: item.nbytes],)))
        for peer, frames in host.receive(1.0):
            message, payload = READER.read(frames)
            control = peer[:-1] + b"c"
            if message.what == "piece":
                if (rate := meter.add(payload)) is not None:
                    host.send(control, pack(Bench(what="took", rate=rate)))
            elif message.what == "taken":
                feed.taken(message.bytes)
            elif message.what == "begin":
                to, meter = peer[:-1] + b"d", Meter(max(message.bytes, 1))
                feed = Feed(pieces=message.count, window_bytes=WINDOW_BYTES)
                feed.open = True
                state = [PieceState(NOTHING, 1, 0, message.piece)] * message.count
            elif message.what == "echo":
                host.send(control, frames)
            else:
                host.close()
                return


class Transfer:
    """The guest: takes pieces and gives credit, sends gradients, and asks for an echo four times a second."""

    def __init__(self, guest: GuestSocket, *, down: int, piece: int, up: int) -> None:
        self._guest, self._up = guest, up
        self._down = Meter(down * piece) if down else None
        self._gradient = memoryview(os.urandom(INT4_BYTES))
        self.rates: dict[str, float] = {}
        self.echoes: list[float] = []
        begin = Bench(what="begin", count=down, piece=piece, bytes=up * INT4_BYTES)
        assert guest.send_control(pack(begin))
        self._wanted = {name for name, count in (("down", down), ("up", up)) if count}

    def run(self) -> None:
        asked = due = time.monotonic()
        end = due + LIMIT_S
        while self._wanted != set(self.rates):
            now = time.monotonic()
            if now > end:
                raise TimeoutError(f"{self._wanted - set(self.rates)} did not end within {LIMIT_S:g} s")
            if now >= due:
                asked, due = now, now + 0.25
                self._guest.send_control(pack(Bench(what="echo")))
            while self._up and self._guest.send_data(pack(Bench(what="piece"), (self._gradient,))):
                self._up -= 1
            for _, frames in self._guest.receive(0.02):
                message, payload = READER.read(frames)
                if message.what == "echo":
                    self.echoes.append(time.monotonic() - asked)
                elif message.what == "took":
                    self.rates["up"] = message.rate
                elif self._down is not None:
                    self._guest.send_control(pack(Bench(what="taken", bytes=sum(map(len, payload)))))
                    if (rate := self._down.add(payload)) is not None:
                        self.rates["down"] = rate


def hub_rows() -> list[dict[str, Any]]:
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=serve, args=(theirs,), daemon=True)
    process.start()
    token = decode(ours.recv())
    rows = []
    with proxied(INTERNET) as proxy:
        port = proxy.open(INTERNET.name, ("127.0.0.1", token.port))
        guest = GuestSocket(replace(token, port=port))
        guest.handshake(10)
        guest.send_data(pack(Bench(what="echo")))
        transfers = {
            "whole pieces down": {"down": 12, "piece": WHOLE_BYTES, "up": 0},
            "changes down": {"down": 80, "piece": INT4_BYTES, "up": 0},
            "gradients up": {"down": 0, "piece": 0, "up": 16},
            "changes down, gradients up": {"down": 80, "piece": INT4_BYTES, "up": 16},
        }
        for what, sizes in transfers.items():
            transfer = Transfer(guest, **sizes)
            transfer.run()
            for direction, rate in transfer.rates.items():
                share = rate / (INTERNET.rate(direction) or rate)  # type: ignore[arg-type]
                echo = max(transfer.echoes)
                rows.append({"what": what, "direction": direction, "share": share, "longest_echo_s": echo})
        guest.send_control(pack(Bench(what="end")))
        guest.close()
    process.join(10)
    return rows


# -- the backend -----------------------------------------------------------------------------------------------


def rank_main(rank: int, store: str, mbit: float, delay_s: float, pipe: Any) -> None:
    """One of two ranks, whose connections to the other one go through a proxy of its own."""
    import torch
    import torch.distributed as dist

    import potluck.dist
    from potluck.dist import channel, connections

    torch.set_num_threads(1)
    ports: dict[tuple[str, int], int] = {}
    with proxied(LinkSpec(name="link", rate_bytes_per_s=mbit * MBIT, latency_s=delay_s)) as proxy:

        def through(address: str, port: int) -> int:
            if (address, port) not in ports:
                ports[address, port] = proxy.open("link", (address, port))
            return ports[address, port]

        plain = channel.connect

        def connect(address: str, offer: bytes, within_s: float) -> Any:
            """The stream's: its offer begins with the port."""
            port = through(address, int.from_bytes(offer[:2], "little"))
            return plain("127.0.0.1", port.to_bytes(2, "little") + offer[2:], within_s)

        url = property(lambda self: f"tcp://127.0.0.1:{through(self.address, self.port)}")
        channel.connect = connect  # type: ignore[assignment]
        connections.Endpoint.url = url  # type: ignore[assignment, method-assign]
        options = potluck.dist.Config(transport="tcp", address="127.0.0.1")
        dist.init_process_group("potluck", init_method=store, rank=rank, world_size=2, pg_options=options)
        tensor = torch.ones(TENSOR_BYTES // 4)
        times = []
        for _ in range(1 + REPEATS):
            dist.barrier()
            began = time.monotonic()
            dist.all_reduce(tensor)
            times.append(time.monotonic() - began)
        assert float(tensor[0]) == float(tensor[-1]) == 2.0 ** (1 + REPEATS)
        pipe.send(times[1:])
        dist.destroy_process_group()


def backend_row(mbit: float, delay_ms: float) -> dict[str, Any]:
    """One all-reduce between two ranks moves the whole tensor once each way."""
    with tempfile.TemporaryDirectory() as folder:
        ours, theirs = spawn.Pipe()
        arguments = (f"file://{folder}/store", mbit, delay_ms / 1e3, theirs)
        ranks = [spawn.Process(target=rank_main, args=(rank, *arguments), daemon=True) for rank in range(2)]
        for rank in ranks:
            rank.start()
        if not ours.poll(LIMIT_S):
            raise TimeoutError(f"no all-reduce at {mbit:g} Mbit/s and {delay_ms:g} ms within {LIMIT_S:g} s")
        took_s = median(ours.recv())
        for rank in ranks:
            rank.join(20)
    wire_s = TENSOR_BYTES / (mbit * MBIT)
    return {
        "mbit": mbit,
        "delay_ms": delay_ms,
        "s": took_s,
        "of_bandwidth": wire_s / took_s,
        "of_link": (wire_s + 2 * delay_ms / 1e3) / took_s,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description="How much of a long link is used.")
    parser.add_argument("--only", default="proxy,hub,backend")
    parser.add_argument("--mbit", type=float, default=1000.0, help="the backend's link (default 1000)")
    parser.add_argument("--delays", default="20,50", help="milliseconds each way, for the backend")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    parts, result, kept = options.only.split(","), {}, True
    if "proxy" in parts:
        link = LinkSpec(name="link", rate_bytes_per_s=options.mbit * MBIT, latency_s=0.02)
        rate = plain_rate(link, int(options.mbit * MBIT))
        result["proxy"] = rate / (options.mbit * MBIT)
        print(f"the proxy alone carries {result['proxy']:.2f} of {options.mbit:g} Mbit/s both ways", flush=True)
    if "hub" in parts:
        result["hub"] = hub_rows()
        for row in result["hub"]:
            good = row["share"] >= LEAST
            kept = kept and good
            words = f"{row['what']}, {row['direction']}: {row['share']:.3f} of the link (bar {LEAST})"
            echo = f"longest echo of a control message {row['longest_echo_s'] * 1e3:.0f} ms"
            print(f"{'kept  ' if good else 'MISSED'} {words}; {echo}", flush=True)
    if "backend" in parts:
        result["backend"] = [backend_row(options.mbit, float(ms)) for ms in options.delays.split(",")]
        for row in result["backend"]:
            good = row["of_link"] >= LEAST
            kept = kept and good
            words = f"64 MB at {row['mbit']:g} Mbit/s, {row['delay_ms']:g} ms each way: {row['s']:.3f} s"
            share = (
                f"{row['of_link']:.3f} of what the link allows (bar {LEAST}), {row['of_bandwidth']:.3f} of its rate"
            )
            print(f"{'kept  ' if good else 'MISSED'} {words}, {share}", flush=True)
    if options.json:
        options.json.write_text(json.dumps(result, indent=1))
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
