"""The handle of a running collective: owns its completion, its error and its future."""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from potluck.dist.profiled import Ranges
from potluck.errors import CollectiveTimeoutError, PotluckError

_FOREVER = timedelta(0)

log = logging.getLogger("potluck.dist")


class PotluckWork(dist.Work):
    """Completed once, by the thread that does the work. wait() raises its error."""

    def __init__(self, name: str, result: Sequence[Tensor], ranges: Ranges | None = None) -> None:
        super().__init__()
        self.name = name
        self._result = list(result)
        self._finished = False
        self._end: threading.Event | None = None
        """Created at the first wait, because most collectives end before that."""
        self._error: BaseException | None = None
        self._promise: Future[Any] | None = None
        """Set at the end, also after a failure. The dependent future has the result or the error."""
        self._future: Future[Any] | None = None
        self._lock = threading.Lock()
        self._source = -1
        self._ranges = ranges
        self.progress: Callable[[float | None], None] | None = None
        """Set if no thread works in the background: wait() then works, up to a moment (None: to its end)."""

    def complete(self, error: BaseException | None = None, source: int = -1) -> None:
        with self._lock:
            if self._finished:
                return
            self._error, self._source, self._finished = error, source, True
            promise, end = self._promise, self._end
        if self._ranges is not None:
            self._ranges.finish()  # before a waiting thread can stop the profiler
        if end is not None:
            end.set()
        if promise is not None:
            self._fulfil(promise)

    def wait(self, timeout: timedelta = _FOREVER) -> bool:
        if not self._finished:
            self._wait(timeout.total_seconds() if timeout is not None else 0.0)
        if self._error is not None:
            raise self._error
        return True

    def _wait(self, seconds: float) -> None:
        until = time.monotonic() + seconds if seconds > 0 else None
        if self.progress is not None:
            self.progress(until)
        with self._lock:
            if self._finished:
                return
            end = self._end = self._end or threading.Event()
        if not end.wait(None if until is None else max(0.0, until - time.monotonic())):
            raise CollectiveTimeoutError(
                f"{self.name} had not finished after {seconds:g} s of waiting",
                hint="it is still running: wait again, with a longer timeout",
            )

    @property
    def finished(self) -> bool:
        """Like is_completed, without working on it."""
        return self._finished

    def is_completed(self) -> bool:
        if self.progress is not None and not self._finished:
            self.progress(time.monotonic())
        return self._finished

    def is_success(self) -> bool:
        return self.is_completed() and self._error is None

    def exception(self) -> BaseException | None:
        return self._error

    def result(self) -> list[Tensor]:
        return self._result

    def synchronize(self) -> None:
        self.wait()

    def block_current_stream(self) -> None:
        self.wait()

    def source_rank(self) -> int:
        return self._source

    _source_rank = source_rank

    def get_future(self) -> Future[Any]:
        with self._lock:
            if self._future is not None:
                return self._future
            promise = self._promise = _new_future(self._result)
            # By a callback: after `set_exception` DDP, in C++, takes the error for tensors and crashes.
            future = self._future = promise.then(self._outcome)
            done = self._finished
        if done:
            self._fulfil(promise)
        elif self.progress is not None:
            threading.Thread(target=self.progress, args=(None,), name="potluck-dist-wait", daemon=True).start()
        return future

    def _outcome(self, _: Future[Any]) -> list[Tensor]:
        error = self._error
        if error is None:
            return self._result
        if isinstance(error, PotluckError) and error.hint:
            error = type(error)(f"{error}\nhint: {error.hint}")  # torch passes on only the text
        raise error

    def _fulfil(self, promise: Future[Any]) -> None:
        """Run the callbacks of the future. Their errors are not the collective's."""
        try:
            promise.set_result(self._result)
        except Exception:
            log.exception("a callback of %s failed", self.name)


def _new_future(result: Sequence[Tensor]) -> Future[Any]:
    """A future for these tensors. torch must know the devices that have streams, to order them. With a device
    without streams it would run no callbacks."""
    devices = sorted({tensor.device for tensor in result if tensor.device.type != "cpu"}, key=str)
    if not all(_has_streams(device.type) for device in devices):
        return Future()  # nothing is asynchronous there
    return Future(devices=[torch.device(device) for device in devices])


@functools.cache
def _has_streams(device: str) -> bool:
    """Whether torch's futures can order work on this kind of device."""
    try:
        tried: Future[Any] = Future(devices=[torch.device(device, 0)])
        tried.then(lambda _: None)
        tried.set_result(None)
    except RuntimeError:
        return False
    return True
