"""Makes sure that a training ends once, and with the right reason.

A loop that is left by `break` and one that is left by an exception look alike from inside: Python closes both
before anybody knows why. Whoever opened the training does know, a moment later.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from potluck.errors import PotluckError
from potluck.sinks import to_stderr

WHY_S = 1.0
"""So long the end of a loop waits for a better reason, unless the script's own end comes first."""


class Ending:
    """Any thread may end it."""

    def __init__(self, end: Callable[[str], None]) -> None:
        """`end` is called once, with the reason."""
        self._do = end
        self._lock = threading.RLock()
        self._timer: threading.Timer | None = None
        self._failure: PotluckError | None = None
        """What the end raised where nobody could hear it."""
        self.over = False
        """Whether the end has begun."""

    def now(self, reason: str) -> None:
        """Only the first call does anything; others wait until it is done, and hear what it failed with."""
        with self._lock:
            if self.over:
                failure, self._failure = self._failure, None
                if failure is not None:
                    raise failure
                return
            self.over = True
            if self._timer is not None:
                self._timer.cancel()
            self._do(reason)

    def soon(self, reason: str) -> None:
        """In a moment, with this reason if nobody has another one by then."""
        with self._lock:
            if self.over or self._timer is not None:
                return
            self._timer = threading.Timer(WHY_S, self._alone, (reason,))
            try:
                self._timer.start()
            except RuntimeError:  # the interpreter is shutting down, and starts no more threads
                self._alone(reason)

    def _alone(self, reason: str) -> None:
        """In the timer's thread, while the script goes on: whoever runs it hears of a failure at its end."""
        try:
            self.now(reason)
        except PotluckError as error:
            self._failure = error
            to_stderr(str(error))
