"""Copies and reduces long tensors on several cores: owns the threads.

torch has its own threads, but launchers of several ranks on one machine turn them off, so that the ranks do not
compete for cores while they compute. During an exchange they do not compute.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

from potluck.dist import reduction
from potluck.dist.counting import SPENT

MOST = 4
"""About four cores are as fast as the memory of most machines."""
PART_BYTES = 2 * 1024 * 1024
"""The smallest size that is worth a thread. Waking one and waiting for its end takes about 0.1 ms, in which a core
copies about a megabyte; with half of this, two threads were slower than one."""
_ALIGN = 128
"""Parts are multiples of this many elements: whole cache lines and vectors, so that every element is computed as by
one thread."""
_END_S = 5.0


def number_of(asked: int, cores: int, members: int) -> int:
    """Threads of one of `members` processes that share `cores`, the calling thread included.

    `asked`: the user's setting; 0: as many as there are cores for each member, at most four.
    """
    return asked if asked > 0 else max(1, min(MOST, cores // members))


class CopyThreads:
    """Copies and reduces with up to `count` threads, the caller's included.

    The results have the same bits as with one thread. If torch may use several threads, it does so instead.
    """

    def __init__(self, count: int = 1, *, part_bytes: int = PART_BYTES) -> None:
        self.count = count
        self._part_bytes = part_bytes
        self._lock = threading.Lock()
        self._parts: SimpleQueue[_WorkPart | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._started = self._closed = False
        self._process = os.getpid()

    def copy(self, to: Tensor, source: Tensor) -> None:
        """Both [n]; where their types differ, the values are converted."""
        if source.nbytes < self._part_bytes or to.numel() != source.numel():
            to.copy_(source)  # which refuses what does not fit
        else:
            self._share(_copy, to, source)

    def accumulate(self, op: Any, into: Tensor, other: Tensor) -> None:
        """reduction.accumulate of [n] and [n]."""
        if into.nbytes < 2 * self._part_bytes:
            reduction.accumulate(op, into, other)
        else:
            self._reduce(partial(reduction.accumulate, op), into, other)

    def finish(self, op: Any, values: Tensor, world: int) -> None:
        """reduction.finish of [n]."""
        if values.nbytes < 2 * self._part_bytes:
            reduction.finish(op, values, world)
        else:
            self._reduce(lambda part: reduction.finish(op, part, world), values)

    def close(self) -> None:
        """End the threads after their current part; a caller that still shares work does the rest alone."""
        with self._lock:
            self._closed = True
            threads, self._threads = self._threads, []
        for _ in threads:
            self._parts.put(None)
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(_END_S)

    def _reduce(self, work: Callable[..., None], *tensors: Tensor) -> None:
        """The time until all parts are done counts as reduction, whichever thread did them."""
        before, began = SPENT.reduction, time.perf_counter()
        self._share(work, *tensors)
        SPENT.reduction = before + time.perf_counter() - began

    def _share(self, work: Callable[..., None], *tensors: Tensor) -> None:
        """Run `work` on parts of the tensors, which are equally long. Returns when the last part is done."""
        length, nbytes = tensors[0].numel(), tensors[0].nbytes
        count = min(self.count, nbytes // self._part_bytes)
        if count > 1:
            count = min(count, 1 + self._others())
        if count < 2:
            work(*tensors)
            return
        if torch.is_inference_mode_enabled():  # it is per thread
            work = torch.inference_mode()(work)
        each = -(-length // count // _ALIGN) * _ALIGN
        parts = [_WorkPart(work, [t[at : at + each] for t in tensors]) for at in range(0, length, each)]
        for part in parts[1:]:
            self._parts.put(part)
        for part in parts:
            part.settle()
        for part in parts:
            if part.fault is not None:
                raise part.fault

    def _others(self) -> int:
        """The number of threads besides the caller's; they are started when first needed."""
        if torch.get_num_threads() > 1:
            return 0
        with self._lock:
            if self._process != os.getpid():  # a forked child has no threads
                self._process, self._started = os.getpid(), False
                self._parts, self._threads = SimpleQueue(), []
            if not self._started and not self._closed:
                self._started = True
                self._start()
            return len(self._threads)

    def _start(self) -> None:
        for number in range(1, self.count):
            thread = threading.Thread(
                target=_work_off, args=(self._parts,), name=f"potluck-copy-{number}", daemon=True
            )
            try:
                thread.start()
            except RuntimeError:
                return  # no more threads, or Python is about to end: go without
            self._threads.append(thread)


class _WorkPart:
    """A part of some work, done once by the first free thread."""

    __slots__ = ("_begun", "_over", "_tensors", "_work", "fault")

    def __init__(self, work: Callable[..., None], tensors: list[Tensor]) -> None:
        self._work, self._tensors = work, tensors
        self._begun, self._over = threading.Lock(), threading.Lock()
        self._over.acquire()
        self.fault: BaseException | None = None

    def do(self) -> bool:
        """False: another thread has begun it."""
        if not self._begun.acquire(blocking=False):
            return False
        try:
            self._work(*self._tensors)
        except BaseException as error:
            self.fault = error
        finally:
            self._tensors = []  # the part may stay in the queue after the caller has done it
            self._over.release()
        return True

    def settle(self) -> None:
        """Wait until it is done; the caller does it if no thread has begun it."""
        if not self.do():
            self._over.acquire()


def _work_off(parts: SimpleQueue[_WorkPart | None]) -> None:
    while True:
        part = parts.get()
        if part is None:
            return
        part.do()
        del part  # its fault may hold the caller's tensors


def _copy(to: Tensor, source: Tensor) -> None:
    """Copy with the C library, which is faster than torch for long tensors in a single thread."""
    if to.dtype != source.dtype or torch.get_num_threads() > 1:
        to.copy_(source)
    else:
        ctypes.memmove(to.data_ptr(), source.data_ptr(), source.nbytes)
