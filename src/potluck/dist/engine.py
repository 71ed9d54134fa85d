"""The order of a group's collectives: owns the queue and the threads that run it.

A collective that the caller waits for runs in the caller's thread if nothing is queued before it, because passing
it to another thread costs more than a small all-reduce.

Callbacks of a collective's future run in its thread, and may wait for further collectives (as PowerSGD's hook
does). So a job's turn ends before its callbacks begin, and another thread takes the next job.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

import torch

from potluck.dist.work import PotluckWork
from potluck.errors import RankGoneError

Job = Callable[[], None]
_JOIN_S = 5.0


class Engine:
    """Runs jobs one after the other, in the order in which they were submitted."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._changed = threading.Condition()
        self._queue: deque[tuple[Job, PotluckWork]] = deque()
        self._running = False
        self._in_callbacks = 0
        """Threads that run the callbacks of a finished job."""
        self._idle = 0
        self._stopped = False
        self._threads: set[threading.Thread] = set()

    def submit(self, job: Job, work: PotluckWork, *, at_once: bool) -> PotluckWork:
        """Run `job` when its turn comes, then complete `work`, with its error if it failed."""
        with self._changed:
            if self._stopped:
                raise RankGoneError(
                    "the process group has been shut down", hint="make a new process group to continue"
                )
            direct = at_once and not self._running and not self._queue
            if direct:
                self._running = True
            else:
                if torch.is_inference_mode_enabled():  # it is per thread
                    job = torch.inference_mode()(job)
                self._queue.append((job, work))
                if not self._running:
                    self._ensure_thread()
                self._changed.notify_all()
        if direct:
            try:
                work.complete(self._outcome(job, work))  # no one can have its future yet
            finally:
                self._end_turn()
        return work

    @staticmethod
    def _outcome(job: Job, work: PotluckWork) -> Exception | None:
        try:
            job()
        except Exception as error:
            return error
        except BaseException as error:
            work.complete(RankGoneError(f"{work.name} was interrupted ({type(error).__name__})"))
            raise
        return None

    def _end_turn(self, *, callbacks: int = 0) -> None:
        with self._changed:
            self._running = False
            self._in_callbacks += callbacks
            if self._queue:
                self._ensure_thread()
            self._changed.notify_all()

    def _ensure_thread(self) -> None:
        """Start a thread if none is idle. Call with the lock held."""
        if not self._idle:
            thread = threading.Thread(target=self._work, name=self._name, daemon=True)
            self._threads.add(thread)
            thread.start()

    def _work(self) -> None:
        while self._next_job():
            pass
        with self._changed:
            self._threads.discard(threading.current_thread())

    def _next_job(self) -> bool:
        """Wait for a job and run it. Returns False if this thread is no longer needed."""
        with self._changed:
            if self._idle:
                return False  # one idle thread is enough
            self._idle += 1
            while self._running or not self._queue:
                if self._stopped and not self._queue:
                    self._idle -= 1
                    return False
                self._changed.wait()
            self._idle -= 1
            job, work = self._queue.popleft()
            self._running = True
        try:
            outcome = self._outcome(job, work)
        except BaseException:
            self._end_turn()
            raise
        self._end_turn(callbacks=1)
        work.complete(outcome)
        with self._changed:
            self._in_callbacks -= 1
            self._changed.notify_all()
        return True

    def drain(self, timeout_s: float) -> bool:
        """Wait until no job is queued or running and no callback runs. Returns False if that took too long."""
        with self._changed:
            return self._changed.wait_for(
                lambda: not self._queue and not self._running and not self._in_callbacks, timeout_s
            )

    def stop(self, reason: str) -> None:
        """Refuse new jobs, fail the queued ones, and end the threads after their current jobs."""
        with self._changed:
            self._stopped = True
            queued = list(self._queue)
            self._queue.clear()
            threads = [thread for thread in self._threads if thread is not threading.current_thread()]
            self._changed.notify_all()
        for _, work in queued:
            work.complete(RankGoneError(f"{work.name} never began: {reason}"))
        end = time.monotonic() + _JOIN_S
        for thread in threads:
            thread.join(max(0.0, end - time.monotonic()))
