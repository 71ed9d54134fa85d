"""Processes find each other by hand: python examples/learn/rendezvous.py --world 2   (start it twice)

The first process opens the port and becomes rank 0. The others connect to it, and it numbers them as they come.
When all are there, it tells each of them the addresses of all. torchrun and TCPStore do the same.
"""

import argparse
import json
import os
import socket
import sys
import time

from guess import verdict

options = argparse.ArgumentParser()
options.add_argument("--world", type=int, default=2, help="number of processes to wait for")
options.add_argument("--port", type=int, default=os.environ.get("MASTER_PORT", "29511"))
options.add_argument("--timeout", type=float, default=30, help="seconds to wait for all of them")
options.add_argument("--guess", type=float, help="seconds that you think rank 0 waits")
args = options.parse_args()

begin = time.monotonic()
server = socket.socket()
server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
try:
    server.bind(("127.0.0.1", args.port))
except OSError:  # the port is taken: somebody was here first
    with socket.create_connection(("127.0.0.1", args.port), args.timeout) as store:
        rank, addresses = json.loads(store.makefile().readline())
    print(f"rank {rank} of {len(addresses)}: rank 0 knows me at port {addresses[rank][1]}", flush=True)
    sys.exit()

server.listen()
others, addresses = [], [server.getsockname()]
while len(addresses) < args.world:
    server.settimeout(max(args.timeout - (time.monotonic() - begin), 0.001))
    try:
        connection, address = server.accept()
    except TimeoutError:
        came, missing = f"{len(addresses)} of {args.world}", range(len(addresses), args.world)
        sys.exit(f"rank 0: {came} came within {args.timeout:g} s; missing: rank {', '.join(map(str, missing))}")
    others.append(connection)
    addresses.append(address)
waited_s = time.monotonic() - begin
print(f"rank 0 of {args.world}: all are here after {waited_s:.2f} s", flush=True)
if args.guess is not None:
    print(verdict(args.guess, waited_s, " s"), flush=True)
for rank, connection in enumerate(others, 1):
    connection.sendall(json.dumps([rank, addresses]).encode() + b"\n")
