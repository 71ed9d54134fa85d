"""How this process was started: the run that a command opened in it before it ran the user's script.

Owns the one process-wide value, which never changes while it is set. `start()` reads it. Without it the process
was started by plain Python.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from potluck.train.context import RunContext


@dataclass(frozen=True, slots=True)
class Launch:
    """The role of this process, and the run that its script is part of."""

    role: str
    context: RunContext


_launch: Launch | None = None


def current() -> Launch | None:
    return _launch


@contextmanager
def launched(context: RunContext) -> Iterator[None]:
    """Inside, `start()` returns this run."""
    global _launch
    before, _launch = _launch, Launch(context.role, context)
    try:
        yield
    finally:
        _launch = before
