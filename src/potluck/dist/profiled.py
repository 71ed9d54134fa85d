"""Shows collectives in torch's profiler: owns the ranges from the call to the end, across threads.

torch's profiler watches the thread that started it, and a range can begin only there. So all ranges of a collective
begin in its call. They end by a future, in any thread: torch then lends that thread the profiler's state. gloo's
ranges, made in C++, end in the same way. A profiler of all threads has no state in any: then ranges begin in the
thread that runs the collective, nested in each other.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch
import torch.autograd.profiler as profiler
from torch import Tensor
from torch.futures import Future

_never_ended: list[Any] = []
"""Ranges whose profiler has stopped. Freeing them would end them, in memory that the profiler has freed."""


class Ranges:
    """The ranges of one collective: `potluck:all_reduce`, and within it `potluck:all_reduce.queue`, until its turn,
    and `potluck:all_reduce.wait`, until all ranks from which it receives have arrived."""

    def __init__(self, op: str, tensors: Sequence[Tensor], parts: Sequence[str], *, at_turn: bool) -> None:
        """`at_turn`: they begin with its turn, in the thread that runs it."""
        self.meetings = 1
        """How often ranks must meet until all have arrived."""
        self._op, self._tensors, self._at_turn = op, tensors, at_turn
        self._open: dict[str, _Range] = {}
        if not at_turn:
            self._begin(parts)

    def _begin(self, parts: Sequence[str]) -> None:
        self._open[""] = _Range(f"potluck:{self._op}", self._tensors)
        for part in parts:
            self._open[part] = _Range(f"potluck:{self._op}.{part}", ())
        self._tensors = ()

    def turn(self) -> None:
        """Its turn has come, in this thread; RUNNING has these ranges until leave()."""
        self._end("queue")
        if self._at_turn:
            self._begin(("wait",))
        RUNNING.ranges = self

    def met(self) -> None:
        self.meetings -= 1
        if self.meetings <= 0:
            self._end("wait")

    def leave(self) -> None:
        RUNNING.ranges = None

    def finish(self) -> None:
        """Call at the end, also after a failure or if it never began."""
        for part in list(self._open):
            self._end(part)

    def _end(self, part: str) -> None:
        opened = self._open.pop(part, None)
        if opened is not None:
            opened.end()


class _Running(threading.local):
    ranges: Ranges | None = None


RUNNING = _Running()
"""The ranges of this thread's collective; None without a profiler."""


def begin(op: str, tensors: Sequence[Tensor], parts: Sequence[str] = ("wait", "queue")) -> Ranges | None:
    """None if no profiler runs.

    The longer part begins first: this thread may lose the processor in between, and then a wait that began later
    would be shorter than the queue in it.
    """
    if not profiler._is_profiler_enabled:
        return None
    kind, kinds = torch._C._autograd._profiler_type(), torch._C._profiler.ActiveProfilerType
    if kind not in (kinds.KINETO, kinds.NONE):
        return None  # such as NVTX, where a range must begin and end in one thread
    return Ranges(op, tensors, parts, at_turn=bool(parts) and kind == kinds.NONE)


class _Range:
    __slots__ = ("_done", "_record")

    def __init__(self, name: str, tensors: Sequence[Tensor]) -> None:
        self._done: Future[Any] = Future()
        self._record = torch._C._autograd._record_function_with_args_enter(name, *tensors)
        torch.ops.profiler._call_end_callbacks_on_jit_fut._RecordFunction(self._record, self._done)

    def end(self) -> None:
        if profiler._is_profiler_enabled:
            self._done.set_result(None)
        else:
            _never_ended.append(self._record)
