"""All-reduces between processes of one machine with one and with more threads each: from where on do more pay?

    python bench/copy_threads.py [--processes 2] [--threads 1,2,4] [--spins 300] [--sizes 1M,8M,64M] [--repeats 30]

First a table of all-reduces between so many processes, then one of copies and sums within one. In a row all numbers
of threads (and of looks before a wait sleeps) take turns, so that what else goes on in the machine meets all alike;
times are medians in microseconds, of the slowest process. Exit status 1 where the results are not the same bits.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist

from potluck.dist.copy_threads import CopyThreads, number_of
from potluck.dist.local_collectives import LocalGroup
from potluck.dist.local_memory import GroupMemory, Sizes
from potluck.dist.record import Call, Header
from potluck.limits import usable_cores

UNITS = {"K": 1 << 10, "M": 1 << 20}
PART_BYTES = 64 << 10
"""Far less than is worth it: the table is to show where threads begin to pay."""
HEADER = Header(op="all_reduce")


def call() -> Call:
    now = time.monotonic()
    return Call(HEADER, 1, now, now + 60.0)


def size(text: str) -> int:
    return int(text[:-1]) * UNITS[text[-1]] if text[-1:] in UNITS else int(text)


def medians(calls: dict[str, Callable[[], None]], before: Callable[[], None], repeats: int) -> dict[str, float]:
    """Of each call in microseconds; `before` comes before every one and is not counted."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(repeats + 2):
        for name, call in calls.items():
            before()
            began = time.perf_counter()
            call()
            if turn > 1:
                times[name].append(1e6 * (time.perf_counter() - began))
    return {name: statistics.median(taken) for name, taken in times.items()}


def row(what: str, nbytes: int, found: dict[str, float]) -> None:
    print(f"{what:<12} {nbytes:>10}" + "".join(f"{found[name]:>16.0f}" for name in found), flush=True)


def head(first: str, names: list[str]) -> None:
    print(f"{first:<12} {'bytes':>10}" + "".join(f"{name:>16}" for name in names), flush=True)


def alone(threads: list[int], sizes: list[int], repeats: int) -> None:
    """What one process copies and adds."""
    copiers = {f"{count} threads": CopyThreads(count, part_bytes=PART_BYTES) for count in threads}
    head("one process", list(copiers))
    for nbytes in sizes:
        a, b = torch.zeros(nbytes // 4), torch.ones(nbytes // 4)
        copies = {name: partial(held.copy, a, b) for name, held in copiers.items()}
        row("copy", nbytes, medians(copies, lambda: None, repeats))
        sums = {name: partial(held.accumulate, "SUM", a, b) for name, held in copiers.items()}
        row("sum", nbytes, medians(sums, lambda: None, repeats))
    for held in copiers.values():
        held.close()


def member(folder: str, rank: int, asked: argparse.Namespace) -> bool:
    """One of the processes; the first one prints. Whether all numbers of threads gave the same bits."""
    world, store = asked.processes, dist.FileStore(f"{folder}/store", asked.processes)
    common = LocalGroup.create(store, "common", rank, world)
    groups: dict[str, LocalGroup] = {}
    for spins in asked.spins:
        for count in asked.threads:
            name = f"{count} threads" + (f"/{spins}" if len(asked.spins) > 1 else "")
            memory = GroupMemory.meet(store, name, rank, world, sizes=Sizes(spins=spins))
            groups[name] = LocalGroup(memory, threads=CopyThreads(count))
    alike = True
    if rank == 0:
        head(f"{world} processes", list(groups))
    for nbytes in asked.sizes:
        mine = torch.randn(nbytes // 4, generator=torch.Generator().manual_seed(rank))
        values = mine.clone()

        def ready(values: torch.Tensor = values, mine: torch.Tensor = mine) -> None:
            values.copy_(mine)
            common.barrier(call())

        calls = {
            name: lambda group=group, values=values: group.all_reduce(call(), values, dist.ReduceOp.SUM)
            for name, group in groups.items()
        }
        found = medians(calls, ready, asked.repeats)
        slowest = torch.tensor(list(found.values()))
        common.all_reduce(call(), slowest, dist.ReduceOp.MAX)
        results = []
        for reduce in calls.values():
            ready()
            reduce()
            results.append(values.clone())
        alike = alike and all(torch.equal(result, results[0]) for result in results)
        if rank == 0:
            row("all_reduce", nbytes, dict(zip(found, slowest.tolist(), strict=True)))
    common.barrier(call())
    for group in (common, *groups.values()):
        group.close()
    return alike


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--threads", type=numbers, default=None, help="default: 1, 2 and 4")
    parser.add_argument("--spins", type=numbers, default=[300], help="looks before a wait sleeps")
    parser.add_argument("--sizes", type=lambda text: [size(part) for part in text.split(",")], default="1M,8M,64M")
    parser.add_argument("--repeats", type=int, default=30)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    chosen = number_of(0, usable_cores(), asked.processes)
    asked.threads = asked.threads or [1, 2, 4]
    print(f"# {usable_cores()} cores; with {asked.processes} processes the backend takes {chosen} threads for each")
    sys.stdout.flush()
    children = []
    with tempfile.TemporaryDirectory() as folder:
        for rank in range(asked.processes):  # before this process has threads
            child = os.fork()
            if child == 0:
                status = 2
                try:
                    status = 0 if member(folder, rank, asked) else 1
                finally:
                    os._exit(status)
            children.append(child)
        statuses = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    alone(asked.threads, asked.sizes, asked.repeats)
    if any(statuses):
        print(json.dumps({"statuses": statuses}), file=sys.stderr)
    return max(map(abs, statuses))


if __name__ == "__main__":
    sys.exit(main())
