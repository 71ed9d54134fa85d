"""Observers of a run (a view, a log, a recorder) must never end it: an exception of one becomes one warning.

Owns that rule for all of them.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from typing import Any, TypeVar, cast

T = TypeVar("T")
Warn = Callable[[str], None]


def say(line: str) -> None:
    """Print a line to stderr, if anybody can read it."""
    with contextlib.suppress(OSError, ValueError):  # stderr may be as broken as the sink is
        print(line, file=sys.stderr, flush=True)


def to_stderr(line: str) -> None:
    say(f"warning: {line}")


def guarded(sink: T, name: str, warn: Warn = to_stderr) -> T:
    """The same object or function, but no exception leaves it.

    The first exception goes to `warn`, with the sink's `name`; all others are ignored. The sink is still called,
    because it may have failed at one odd value. A failed call returns None.
    """
    return cast(T, _Guarded(sink, name, warn))


class _Guarded:
    def __init__(self, sink: Any, name: str, warn: Warn) -> None:
        self._sink, self._name, self._warn = sink, name, warn
        self._warned = False

    def __call__(self, *args: Any, **more: Any) -> Any:
        return self._tried(self._sink, *args, **more)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._sink, name)
        if not callable(value):
            return value

        def call(*args: Any, **more: Any) -> Any:
            return self._tried(value, *args, **more)

        self.__dict__[name] = call  # the next call does not come here
        return call

    def _tried(self, function: Callable[..., Any], *args: Any, **more: Any) -> Any:
        try:
            return function(*args, **more)
        except Exception as error:
            if not self._warned:
                self._warned = True
                what = " ".join(str(error).split())
                words = f"{type(error).__name__}: {what}" if what else type(error).__name__
                self._warn(
                    f"{self._name} failed ({words}); the run continues, and more of this kind is not reported"
                )
            return None
