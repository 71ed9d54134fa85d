"""Members of a local group for tests: `python local_members.py SCENARIO SIZE` forks them and tells how they ended.

It knows what each collective should give, computed by itself, and nothing of how it is done.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from potluck.dist import reduction
from potluck.dist.copy_threads import CopyThreads
from potluck.dist.local_collectives import LocalGroup
from potluck.dist.local_memory import GroupMemory, Sizes
from potluck.dist.record import Call, Header
from potluck.errors import CollectiveError, NetworkError, RankGoneError

SLOT = 4096
"""A page: what is larger takes many pieces."""
PART = 256
"""So that a page is long enough for threads."""
T = 60.0
OPS = dist.ReduceOp
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.complex64, torch.bool)
Store = dist.Store


def make(store: Store, name: str, rank: int, size: int, threads: int = 1) -> LocalGroup:
    sizes = Sizes(slot_bytes=SLOT, long_bytes=4 * SLOT, depth=3, small_bytes=1024)
    memory = GroupMemory.meet(store, name, rank, size, sizes=sizes, timeout_s=T)
    return LocalGroup(memory, threads=CopyThreads(threads, part_bytes=PART))


def call(op: str = "collective", nbytes: int = 0, timeout_s: float = T) -> Call:
    now = time.monotonic()
    return Call(Header(op=op, nbytes=nbytes), 1, now, now + timeout_s)


def input_of(rank: int, count: int, dtype: torch.dtype) -> Tensor:
    """[count], the same whoever asks for it; small enough that sums are exact in every type."""
    values = (torch.arange(count) * (rank + 2) + rank) % 7 - (0 if dtype in (torch.uint8, torch.bool) else 3)
    return values.to(dtype)


def expected(op: OPS, size: int, count: int, dtype: torch.dtype) -> Tensor:
    wide = reduction.working_dtype(op, dtype)
    total = input_of(0, count, dtype).to(wide)
    for other in range(1, size):
        reduction.accumulate(op, total, input_of(other, count, dtype))
    reduction.finish(op, total, size)
    return total.to(dtype)


def same(found: Tensor, wanted: Tensor, what: str) -> None:
    if not torch.equal(found, wanted):
        at = int((found != wanted).nonzero()[0])
        raise AssertionError(f"{what}: element {at} is {found[at]}, not {wanted[at]}")


def reductions(group: LocalGroup) -> None:
    rank, size = group.rank, group.size
    for dtype in DTYPES:
        for op in (OPS.SUM, OPS.AVG, OPS.PRODUCT, OPS.MIN, OPS.MAX, OPS.BOR):
            if not reduction.supports(op, dtype):
                continue
            for count in (0, 1, 129, 900, 5000):
                what = f"{op} {dtype} {count}"
                wanted = expected(op, size, count, dtype)
                values = input_of(rank, count, dtype)
                group.all_reduce(call(), values, op)
                same(values, wanted, f"all_reduce {what}")
                if op not in (OPS.SUM, OPS.AVG):
                    continue
                values = input_of(rank, count, dtype)
                group.reduce(call(), values, op, size - 1)
                same(values, wanted if rank == size - 1 else input_of(rank, count, dtype), f"reduce {what}")
                out = torch.empty(count, dtype=dtype)
                group.reduce_scatter(call(), out, input_of(rank, count * size, dtype).view(size, count), op)
                part = expected(op, size, count * size, dtype)[rank * count : (rank + 1) * count]
                same(out, part, f"reduce_scatter {what}")


def movements(group: LocalGroup) -> None:
    rank, size = group.rank, group.size
    for count in (0, 1, 700, 5000):
        everything = torch.cat([input_of(other, count, torch.float32) for other in range(size)])
        for root in {0, size - 1}:
            values = input_of(rank, count, torch.float32)
            group.broadcast(call(), values, root)
            same(values, input_of(root, count, torch.float32), "broadcast")
            parts = list(torch.zeros(size, count)) if rank == root else []
            group.gather(call(), parts, input_of(rank, count, torch.float32), root)
            if parts:
                same(torch.cat(parts), everything, "gather")
            out = torch.zeros(count)
            group.scatter(call(), out, list(everything.clone().view(size, count)) if rank == root else [], root)
            same(out, everything[rank * count : (rank + 1) * count], "scatter")
        parts = list(torch.zeros(size, count))
        group.all_gather(call(), parts, input_of(rank, count, torch.float32))
        same(torch.cat(parts), everything, "all_gather")
        # Member a sends a * size + b elements more than `count` to member b, each of the value 100 a + b.
        mine = torch.cat([torch.full((count + rank * size + b,), 100.0 * rank + b) for b in range(size)])
        counts = [count + rank * size + b for b in range(size)]
        theirs = [count + a * size + rank for a in range(size)]
        out = torch.zeros(sum(theirs))
        group.all_to_all(call(), out.split(theirs), mine.split(counts))
        same(out, torch.cat([torch.full((n,), 100.0 * a + rank) for a, n in enumerate(theirs)]), "all_to_all")
        group.barrier(call())


def everything(store: Store, rank: int, size: int) -> None:
    group = make(store, "all", rank, size)
    reductions(group)
    movements(group)
    halves_are_added_in_full(group)
    group.barrier(call())
    group.close()


def halves_are_added_in_full(group: LocalGroup) -> None:
    """1 and many values too small to count beside it in bf16, but not together."""
    wanted = torch.tensor(1.0 + (group.size - 1) * 2.0**-8).to(torch.bfloat16)
    for count in (600, 9000):
        values = torch.full((count,), 1.0 if group.rank == 0 else 2.0**-8, dtype=torch.bfloat16)
        group.all_reduce(call(), values, OPS.SUM)
        assert bool((values == wanted).all()), f"{values[0]} is not {wanted}"
    factor = dist._make_nccl_premul_sum(0.5)
    values = torch.full((600,), 3.0)
    group.all_reduce(call(), values, factor)
    assert values[599] == 1.5 * group.size


def raises(kind: type[Exception], action: Callable[[], object], *words: str) -> None:
    try:
        action()
    except kind as error:
        missing = [word for word in words if word not in str(error)]
        if missing:
            raise AssertionError(f"{missing} not in: {error}") from error
    else:
        raise AssertionError(f"no {kind.__name__}")


def failures(store: Store, rank: int, size: int) -> None:
    """A mismatch, one that is late, an abort, one that left, one that is killed: each in a group of its own."""
    values = torch.ones(2000 if rank else 2001)
    group = make(store, "mismatch", rank, size)
    told = ("rank 0: all_reduce 8.0 kB", "rank 1:")
    raises(CollectiveError, lambda: group.all_reduce(call("all_reduce", values.nbytes), values, OPS.SUM), *told)
    raises(RankGoneError, lambda: group.barrier(call()), "unusable")
    group = make(store, "counts", rank, size)
    counts = [2 if rank else 1] * size
    out = torch.zeros(sum(counts))
    raises(CollectiveError, lambda: uneven(group, out, counts), "all_to_all")
    group = make(store, "late", rank, size)
    if rank != 1:
        raises(NetworkError, lambda: group.barrier(call(timeout_s=0.5)), "rank 1 did not come within 0.5 s")
    group = make(store, "abort", rank, size)
    if rank == 1:
        time.sleep(0.2)
        group.abort("tired")
    else:
        began = time.monotonic()
        raises(RankGoneError, lambda: group.broadcast(call(), torch.ones(9000), 0), "rank 1 gave up: tired")
        assert time.monotonic() - began < T / 2
    group = make(store, "left", rank, size)
    if rank == 1:
        group.close()
    else:
        raises(RankGoneError, lambda: group.barrier(call()), "rank 1")
    group = make(store, "dead", rank, size)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    raises(RankGoneError, lambda: group.barrier(call()), "rank 1 ended")


def uneven(group: LocalGroup, out: Tensor, counts: list[int]) -> None:
    group.all_to_all(call(), out.split(counts), torch.zeros(sum(counts)).split(counts))


def lost_in_turn(store: Store, rank: int, size: int) -> None:
    """One dies after all have agreed, where the others wait for the sums that it should hand on."""
    group = make(store, "turn", rank, size)
    if rank == 1:
        reduction.accumulate = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    raises(RankGoneError, lambda: group.all_reduce(call(), torch.ones(9000), OPS.SUM), "rank 1 ended")


def same_bits(store: Store, rank: int, size: int) -> None:
    """However values are rounded, everybody gets the same; and nobody takes a sum that is not finished."""
    group = make(store, "bits", rank, size)
    for count in (300, 1000, 30_001):
        for turn in range(30):
            values = torch.randn(count, generator=torch.Generator().manual_seed(1000 * turn + rank))
            group.all_reduce(call(), values, OPS.SUM)
            all_of_them = list(torch.empty(size, count))
            group.all_gather(call(), all_of_them, values)
            for theirs in all_of_them:
                same(theirs, values, f"turn {turn} of {count}")
    torch.set_num_threads(2)  # copies by torch then, not by the C library
    values = input_of(rank, 20_000, torch.float32)
    group.all_reduce(call(), values, OPS.SUM)
    same(values, expected(OPS.SUM, size, 20_000, torch.float32), "two threads")
    group.barrier(call())
    group.close()


def many_threads(store: Store, rank: int, size: int) -> None:
    """Three threads for each member give the bits that one gives."""
    one, three = make(store, "one", rank, size), make(store, "three", rank, size, 3)
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.complex64):
        for op in (OPS.SUM, OPS.AVG, OPS.PRODUCT, OPS.MAX):
            if not reduction.supports(op, dtype):
                continue
            for count in (129, 1000, 5003):
                generator = torch.Generator().manual_seed(1000 * count + rank)
                values = (100 * torch.randn(size * count, generator=generator)).to(dtype)
                what = f"{op} {dtype} {count}"
                same(*(all_reduced(group, values, op) for group in (three, one)), f"all_reduce {what}")
                same(*(reduce_scattered(group, values, op) for group in (three, one)), f"reduce_scatter {what}")
    movements(three)
    threads = sum(thread.name.startswith("potluck-copy") for thread in threading.enumerate())
    assert threads == 2, threads
    three.barrier(call())
    for group in (one, three):
        group.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("potluck-copy")]


def all_reduced(group: LocalGroup, values: Tensor, op: OPS) -> Tensor:
    values = values.clone()
    group.all_reduce(call(), values, op)
    return values


def reduce_scattered(group: LocalGroup, values: Tensor, op: OPS) -> Tensor:
    out = torch.empty(values.numel() // group.size, dtype=values.dtype)
    group.reduce_scatter(call(), out, values.view(group.size, -1), op)
    return out


def last_words(store: Store, rank: int, size: int) -> None:
    """Members that have all they need may end at once: nobody misses them."""
    group = make(store, "last", rank, size)
    values = torch.ones(20_000)
    group.broadcast(call(), values, 0)
    group.all_reduce(call(), values, OPS.SUM)
    if rank == 2:
        time.sleep(0.3)
    assert values[-1] == size


def killed(store: Store, rank: int, size: int) -> None:
    """For a test that kills everybody at some moment."""
    group = make(store, "killed", rank, size)
    print("going", flush=True)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        group.all_reduce(call(), torch.ones(5000), OPS.SUM)


def member(scenario: str, path: str, rank: int, size: int) -> int:
    torch.set_num_threads(1)
    try:
        globals()[scenario](dist.FileStore(path, size), rank, size)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def main() -> int:
    scenario, size = sys.argv[1], int(sys.argv[2])
    torch.set_num_threads(1)  # no threads before the fork
    with tempfile.TemporaryDirectory() as folder:
        children = []
        for rank in range(size):
            pid = os.fork()
            if pid == 0:
                os._exit(member(scenario, f"{folder}/store", rank, size))
            children.append(pid)
        statuses = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]
    print("statuses", *statuses, flush=True)
    return max(abs(status) for status in statuses)


if __name__ == "__main__":
    sys.exit(main())
