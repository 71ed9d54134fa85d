"""Ends a training exactly once, with the right reason, and defines the exceptions that end its script.

Inside the loop, `break` and an exception look the same: Python closes the generator before the reason is known. The
code that opened the training knows the reason a moment later.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import weakref
from collections.abc import Callable, Generator
from typing import Any

from potluck.errors import PotluckError
from potluck.sinks import to_stderr

WHY_S = 1.0
"""How long the end of a loop waits for a better reason, unless the script ends first."""


class Interrupted(KeyboardInterrupt):
    """The run was stopped with Ctrl-C; everything has been saved."""

    told = False
    """Whether the place of the checkpoint and the command to resume were shown."""


class GuestDone(BaseException):
    """The run this guest took part in is over: only the host runs the rest of the script."""


class Ending:
    """Any thread may end the training. In a forked child it does nothing, because the training belongs to the
    parent."""

    def __init__(self, end: Callable[[str], None]) -> None:
        """`end` is called once, with the reason."""
        self._do = end
        self._owner = os.getpid()
        self._lock = threading.RLock()
        self._timer: threading.Timer | None = None
        self._soon = ""
        self._then: list[Callable[[], None]] = []
        self._failure: PotluckError | None = None
        """An exception of the end that could not be raised anywhere."""
        self._over = False
        self.done = False
        """Whether the end is complete, or has failed."""

    @property
    def over(self) -> bool:
        """Whether the end has begun, here or in another process that owns the run."""
        return self._over or self._elsewhere

    @property
    def pending(self) -> bool:
        """Whether the end has neither begun nor is about to."""
        return not self.over and not self._soon

    @property
    def _elsewhere(self) -> bool:
        return os.getpid() != self._owner  # and the lock may be held there by a thread that is not here

    def now(self, reason: str) -> None:
        """Only the first call does anything. Others wait until it is done and raise its failure."""
        if self._elsewhere:
            return
        try:
            with self._lock:
                if self._over:
                    failure, self._failure = self._failure, None
                    if failure is not None:
                        raise failure
                    return
                self._over = True
                if self._timer is not None:
                    self._timer.cancel()
                try:
                    self._do(reason)
                finally:
                    self.done = True
        finally:
            # Not under the lock: they may wait for a thread that waits for the lock.
            while self._then:
                self._then.pop()()

    def finish(self) -> None:
        """End now, with the reason given to `soon`; without one, it failed."""
        self.now(self._soon or "failed")

    def then(self, call: Callable[[], None]) -> None:
        """Call this function when the end is done, in that thread; immediately if it is already done."""
        if self._elsewhere:
            return
        with self._lock:
            if not self.done:
                self._then.append(call)
                return
        call()

    def soon(self, reason: str) -> None:
        """End in a moment, with this reason unless a better one comes before."""
        if self._elsewhere:
            return
        with self._lock:
            if self._over or self._timer is not None:
                return
            self._soon = reason
            if sys.is_finalizing():  # a thread that is started now never runs, and Python 3.11 waits for it
                self._alone(reason)
                return
            self._timer = threading.Timer(WHY_S, self._alone, (reason,))
            try:
                self._timer.start()
            except RuntimeError:  # the interpreter is shutting down, and starts no more threads
                self._alone(reason)

    def close_at_exit(self, loop: Generator[Any, None, None]) -> None:
        """If the script leaves its loop open, close it before the interpreter shuts down."""
        held = weakref.ref(loop)

        def close() -> None:
            if getattr(sys, "last_value", None) is not None:  # an exception ended the script
                self.now("failed")
            if (still := held()) is not None:
                with contextlib.suppress(ValueError):  # another thread is in it
                    still.close()
            self.finish()

        atexit.register(close)
        self.then(lambda: atexit.unregister(close))

    def _alone(self, reason: str) -> None:
        """End in the timer's thread while the script continues. A failure is raised when the script ends."""
        try:
            self.now(reason)
        except PotluckError as error:
            self._failure = error
            to_stderr(str(error))
