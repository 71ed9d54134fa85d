"""The order of a group's collectives: owns the queue, the thread that works it off, and running at once.

It must not know what the jobs do.

A collective that the caller waits for anyway runs in the caller's own thread, when nothing is before it: a handover
between two threads costs more than a small all-reduce.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

import torch

from potluck.dist.work import PotluckWork
from potluck.errors import RankGoneError

Job = Callable[[], None]


class Engine:
    """Runs jobs one after the other, in the order in which they were given."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._changed = threading.Condition()
        self._queue: deque[tuple[Job, PotluckWork]] = deque()
        self._running = False
        self._stopped = False
        self._thread: threading.Thread | None = None

    def submit(self, job: Job, work: PotluckWork, *, at_once: bool) -> PotluckWork:
        """Run `job` when its turn comes; `work` is completed with its end, or with its error."""
        with self._changed:
            if self._stopped:
                raise RankGoneError("the process group has been shut down", hint="make a new one to go on")
            direct = at_once and not self._running and not self._queue
            if direct:
                self._running = True
            else:
                if torch.is_inference_mode_enabled():  # which is the thread's own
                    job = torch.inference_mode()(job)
                self._queue.append((job, work))
                if self._thread is None:
                    self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
                    self._thread.start()
                self._changed.notify_all()
        if direct:
            try:
                self._run(job, work)
            finally:
                with self._changed:
                    self._running = False
                    self._changed.notify_all()
        return work

    @staticmethod
    def _run(job: Job, work: PotluckWork) -> None:
        try:
            job()
        except Exception as error:
            work.complete(error)
        except BaseException as error:
            work.complete(RankGoneError(f"{work.name} was interrupted ({type(error).__name__})"))
            raise
        else:
            work.complete()

    def _work(self) -> None:
        while True:
            with self._changed:
                while self._running or not self._queue:
                    if self._stopped and not self._queue:
                        return
                    self._changed.wait()
                job, work = self._queue.popleft()
                self._running = True
            self._run(job, work)
            # Not kept until the next one comes: they hold the caller's tensors.
            del job, work
            with self._changed:
                self._running = False
                self._changed.notify_all()

    def drain(self, timeout_s: float) -> bool:
        """Wait until nothing is queued or running; False if that took too long."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._queue and not self._running, timeout_s)

    def stop(self, reason: str) -> None:
        """Take nothing new, fail what is queued, and end the thread once its job has ended."""
        with self._changed:
            self._stopped = True
            queued = list(self._queue)
            self._queue.clear()
            self._changed.notify_all()
        for _, work in queued:
            work.complete(RankGoneError(f"{work.name} never began: {reason}"))
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(5.0)
