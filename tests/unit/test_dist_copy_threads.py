"""Threads that copy and add up parts of long tensors: how many, the same bits, faults, ends."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from potluck.dist import formation, reduction
from potluck.dist.copy_threads import CopyThreads, number_of
from potluck.dist.counting import SPENT
from potluck.dist.local_collectives import LocalGroup
from potluck.dist.shm import Segment

PART = 512
"""Bytes: so that small tensors have several parts."""
SOON_S = 20.0

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(autouse=True)
def torch_has_one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def threads() -> Iterator[CopyThreads]:
    made = CopyThreads(3, part_bytes=PART)
    yield made
    made.close()
    assert not named_threads()


def named_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("potluck-copy")]


@pytest.mark.parametrize(
    ("asked", "cores", "members", "number"),
    [
        (0, 16, 2, 4),
        (0, 16, 4, 4),
        (0, 16, 5, 3),
        (0, 16, 8, 2),
        (0, 16, 9, 1),
        (0, 2, 2, 1),
        (0, 1, 4, 1),
        (1, 64, 2, 1),
        (3, 2, 2, 3),
        (8, 64, 2, 8),
    ],
)
def test_how_many(asked: int, cores: int, members: int, number: int) -> None:
    assert number_of(asked, cores, members) == number


def test_the_setting_comes_to_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}
    monkeypatch.setattr(LocalGroup, "create", lambda *args, **named: given.update(named))
    info = SimpleNamespace(endpoint=SimpleNamespace(host="here"))
    members: Any = SimpleNamespace(neighbours=lambda rank: [0, 1], ranks=[info, info])
    settings: Any = SimpleNamespace(transport="auto", copy_threads=3)
    formation._local_group(None, 0, members, settings, 1.0)
    assert given["copy_threads"] == 3


def of_type(count: int, dtype: torch.dtype, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    if dtype.is_complex:
        return torch.randn(count, 2, generator=generator).view(torch.complex64).view(-1).to(dtype)
    if dtype.is_floating_point:
        return torch.randn(count, generator=generator).to(dtype)
    return torch.randint(0, 2 if dtype is torch.bool else 100, (count,), generator=generator).to(dtype)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.complex64, torch.bool]
)
@pytest.mark.parametrize("count", [0, 1, 128, 385, 1001, 4096, 30_011])
def test_the_same_bits_as_by_one_thread(threads: CopyThreads, count: int, dtype: torch.dtype) -> None:
    ops = dist.ReduceOp
    for op in (ops.SUM, ops.AVG, ops.PRODUCT, ops.MIN, ops.MAX, ops.BXOR):
        if not reduction.supports(op, dtype):
            continue
        wide = reduction.working_dtype(op, dtype)
        mine, other = of_type(count, dtype, 1), of_type(count, dtype, 2)
        found, wanted = torch.empty(count, dtype=wide), mine.to(wide)
        threads.copy(found, mine)
        assert torch.equal(found, wanted)
        threads.accumulate(op, found, other)
        reduction.accumulate(op, wanted, other)
        threads.finish(op, found, 3)
        reduction.finish(op, wanted, 3)
        assert torch.equal(found.view(torch.uint8), wanted.view(torch.uint8)), str(op)
        back, wanted_back = torch.empty(count, dtype=dtype), wanted.to(dtype)
        threads.copy(back, found)
        assert torch.equal(back.view(torch.uint8), wanted_back.view(torch.uint8))


def test_every_thread_has_a_part(threads: CopyThreads, monkeypatch: pytest.MonkeyPatch) -> None:
    together = threading.Barrier(3)
    monkeypatch.setattr(reduction, "accumulate", lambda op, into, other: together.wait(SOON_S))
    SPENT.reduction = 0.0
    threads.accumulate("SUM", torch.zeros(3000), torch.ones(3000))  # fails where one has to do two
    assert SPENT.reduction > 0


def test_what_is_short_the_caller_does_alone(threads: CopyThreads) -> None:
    values = torch.zeros(PART // 4 * 2 - 1)
    threads.copy(values, torch.ones(len(values)))
    threads.accumulate("SUM", values, torch.ones(len(values)))
    assert values.eq(2).all()
    assert not named_threads()
    threads.copy(torch.zeros(5000), torch.ones(5000))
    assert len(named_threads()) == 2


def test_one_hand_has_no_threads_and_torchs_own_are_enough(threads: CopyThreads) -> None:
    alone = CopyThreads(1, part_bytes=PART)
    values = torch.zeros(5000)
    alone.copy(values, torch.ones(5000))
    torch.set_num_threads(2)
    threads.copy(values, torch.full((5000,), 2.0))
    assert values.eq(2).all()
    assert not named_threads()


def test_a_copy_that_does_not_fit_is_refused(threads: CopyThreads) -> None:
    with pytest.raises(RuntimeError, match="size"):
        threads.copy(torch.zeros(5001), torch.ones(5000))


def test_a_fault_in_any_part_reaches_the_caller_when_all_parts_are_over(
    threads: CopyThreads, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[int] = []
    for bad in range(3):

        def accumulate(op: str, into: Tensor, other: Tensor, bad: int = bad) -> None:
            part = int(into[0])
            if part == bad:
                raise ValueError(f"part {part}")
            done.append(part)

        monkeypatch.setattr(reduction, "accumulate", accumulate)
        done.clear()
        with pytest.raises(ValueError, match=f"part {bad}"):
            threads.accumulate("SUM", torch.arange(3).repeat_interleave(1024), torch.zeros(3072))
        assert sorted(done) == [part for part in range(3) if part != bad]


def blocked(
    monkeypatch: pytest.MonkeyPatch, threads: CopyThreads, values: Tensor
) -> tuple[threading.Thread, threading.Event]:
    """A sum under way: every thread has begun its part, and ends it when the event is set."""
    begun, go = threading.Barrier(4), threading.Event()
    accumulate = reduction.accumulate

    def slow(op: str, into: Tensor, other: Tensor) -> None:
        begun.wait(SOON_S)
        go.wait(SOON_S)
        accumulate(op, into, other)

    monkeypatch.setattr(reduction, "accumulate", slow)
    caller = threading.Thread(target=threads.accumulate, args=("SUM", values, torch.ones(len(values))))
    caller.start()
    begun.wait(SOON_S)
    return caller, go


def test_closing_waits_for_parts_under_way(monkeypatch: pytest.MonkeyPatch, threads: CopyThreads) -> None:
    values = torch.zeros(5000)
    caller, go = blocked(monkeypatch, threads, values)
    closing = threading.Thread(target=threads.close)
    closing.start()
    closing.join(0.1)
    assert closing.is_alive()
    go.set()
    closing.join(SOON_S)
    caller.join(SOON_S)
    assert not closing.is_alive()
    assert not caller.is_alive()
    assert values.eq(1).all()
    assert not named_threads()
    monkeypatch.undo()
    threads.accumulate("SUM", values, torch.ones(5000))  # alone, from here on
    assert values.eq(2).all()
    assert not named_threads()


@pytest.mark.skipif(sys.platform == "win32", reason="no POSIX shared memory")
def test_memory_stays_while_a_thread_writes_to_it(monkeypatch: pytest.MonkeyPatch, threads: CopyThreads) -> None:
    segment = Segment.create(5000 * 4)
    values = torch.frombuffer(segment.view, dtype=torch.float32)
    caller, go = blocked(monkeypatch, threads, values)
    segment.forget_name()  # what a group does at its end; the memory goes with whoever has it last
    del values, segment
    gc.collect()
    go.set()
    caller.join(SOON_S)  # a write to memory that is gone would end this process
    assert not caller.is_alive()


def test_where_no_thread_can_be_had_it_goes_without(monkeypatch: pytest.MonkeyPatch, threads: CopyThreads) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    values = torch.zeros(5000)
    threads.copy(values, torch.ones(5000))
    assert values.eq(1).all()


def test_inference_mode_holds_for_every_thread(threads: CopyThreads, monkeypatch: pytest.MonkeyPatch) -> None:
    together, accumulate = threading.Barrier(3), reduction.accumulate

    def all_at_once(op: str, into: Tensor, other: Tensor) -> None:
        together.wait(SOON_S)
        accumulate(op, into, other)

    monkeypatch.setattr(reduction, "accumulate", all_at_once)
    with torch.inference_mode():
        values = torch.zeros(5000)
        threads.accumulate("SUM", values, torch.ones(5000))
    assert values.eq(1).all()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_has_threads_of_its_own(threads: CopyThreads) -> None:
    values = torch.zeros(5000)
    threads.copy(values, torch.ones(5000))
    child = os.fork()
    if child == 0:
        try:
            threads.copy(values, torch.full((5000,), 2.0))
            threads.close()
            os._exit(0 if values.eq(2).all() else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    threads.copy(values, torch.full((5000,), 3.0))
    assert values.eq(3).all()


AT_THE_END = """
import atexit, torch
from potluck.dist.copy_threads import CopyThreads
torch.set_num_threads(1)
threads, late = CopyThreads(3, part_bytes=512), CopyThreads(3, part_bytes=512)
a, b = torch.zeros(1 << 20), torch.ones(1 << 20)
threads.copy(a, b)  # its threads are never ended
def last():
    late.copy(a, b)
    late.close()
    print("copied", bool(a.eq(1).all()), flush=True)
atexit.register(last)
"""


@pytest.mark.slow
def test_a_script_may_end_without_closing_and_use_others_at_its_end() -> None:
    ended = subprocess.run([sys.executable, "-c", AT_THE_END], capture_output=True, text=True, timeout=50)
    assert (ended.returncode, ended.stdout) == (0, "copied True\n"), ended.stderr
