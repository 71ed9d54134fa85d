"""One all-reduce by hand, in a ring of processes on this machine: python examples/learn/ring.py --processes 3

Every process holds a tensor of S bytes and sends only to its right neighbour, on a link slowed down to --mbit. In
N-1 rounds each process gets one N-th of the sum (reduce-scatter), in N-1 more it gets the rest (all-gather).
"""

import argparse
import multiprocessing
import socket
import threading
import time

import numpy as np
from guess import verdict

CHUNK = 1 << 16


def send(link: socket.socket, data: memoryview, bytes_per_s: float) -> None:
    """Sends no faster than the link would."""
    begin = time.monotonic()
    for at in range(0, len(data), CHUNK):
        link.sendall(data[at : at + CHUNK])
        time.sleep(max(begin + min(at + CHUNK, len(data)) / bytes_per_s - time.monotonic(), 0))


def receive(link: socket.socket, room: memoryview) -> None:
    while room:
        room = room[link.recv_into(room) :]


def exchange(right: socket.socket, left: socket.socket, out: np.ndarray, into: np.ndarray, rate: float) -> None:
    """Sends to the right and receives from the left, both at once."""
    sending = threading.Thread(target=send, args=(right, memoryview(out).cast("B"), rate))
    sending.start()
    receive(left, memoryview(into).cast("B"))
    sending.join()


def all_reduce(rank: int, world: int, right: socket.socket, left: socket.socket, x: np.ndarray, rate: float) -> int:
    """Makes x the sum of everybody's x. Returns how many bytes this process sent."""
    parts = np.array_split(x, world)
    sent = 0
    for step in range(world - 1):  # reduce-scatter: add what comes to the part that goes on next
        mine, theirs = parts[(rank - step) % world], parts[(rank - step - 1) % world]
        arrived = np.empty_like(theirs)
        exchange(right, left, mine, arrived, rate)
        theirs += arrived
        sent += mine.nbytes
    for step in range(world - 1):  # all-gather: hand on the parts that are complete
        mine, theirs = parts[(rank + 1 - step) % world], parts[(rank - step) % world]
        exchange(right, left, mine, theirs, rate)
        sent += mine.nbytes
    return sent


def process(rank: int, args: argparse.Namespace, ports: list, barrier: object, results: object) -> None:
    world, rate = args.processes, args.mbit * 1e6 / 8
    with socket.create_server(("127.0.0.1", 0)) as server:
        ports[rank].put(server.getsockname()[1])  # the rendezvous of lesson 1
        right = socket.create_connection(("127.0.0.1", ports[(rank + 1) % world].get()))
        left, _ = server.accept()
    x = np.full(int(args.mb * 1e6 / 4), rank + 1, dtype=np.float32)

    barrier.wait(60)
    begin = time.monotonic()
    exchange(right, left, x, np.empty_like(x), rate)
    wire_s = time.monotonic() - begin

    barrier.wait(60)
    begin = time.monotonic()
    sent = all_reduce(rank, world, right, left, x, rate)
    ring_s = time.monotonic() - begin
    results.put((wire_s, ring_s, sent, bool((x == world * (world + 1) / 2).all())))


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--processes", type=int, default=2)
    options.add_argument("--mb", type=float, default=6, help="size of the tensor, in MB")
    options.add_argument("--mbit", type=float, default=200, help="rate of each link, in Mbit/s")
    options.add_argument("--guess", type=float, help="seconds that you think the all-reduce takes")
    args = options.parse_args()

    ports = [multiprocessing.Queue() for _ in range(args.processes)]
    barrier, results = multiprocessing.Barrier(args.processes), multiprocessing.Queue()
    ranks = [
        multiprocessing.Process(target=process, args=(rank, args, ports, barrier, results))
        for rank in range(args.processes)
    ]
    for rank in ranks:
        rank.start()
    wires, rings, bytes_sent, rights = zip(*(results.get(timeout=120) for _ in ranks))
    wire_s, ring_s, sent = max(wires), max(rings), max(bytes_sent)
    for rank in ranks:
        rank.join()

    factor = 2 * (args.processes - 1) / args.processes
    print(f"raw wire      {args.mb:g} MB to the right neighbour: {wire_s:.3f} s")
    print(f"formula       2(N-1)/N x wire = {factor:.2f} x {wire_s:.3f} s = {factor * wire_s:.3f} s")
    checked = "right" if all(rights) else "WRONG"
    print(f"all-reduce    {ring_s:.3f} s, {sent / 1e6:.2f} MB sent by each, every sum {checked}")
    if args.guess is not None:
        print(verdict(args.guess, ring_s, " s"))


if __name__ == "__main__":
    main()
