"""The run that a command opened in this process before it ran the user's script or a recipe.

Owns the one process-wide value, which never changes while it is set. `start()` returns its run; without it, plain
Python started the process.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout

from potluck.train.context import RANK, RunContext

_launched: RunContext | None = None


def current() -> RunContext | None:
    return _launched


@contextmanager
def launched(context: RunContext) -> Iterator[None]:
    """Inside, `start()` returns this run. Ranks other than rank 0 print nothing."""
    global _launched
    before, _launched = _launched, context
    try:
        with ExitStack() as stack:
            if context.role == RANK:
                stack.enter_context(redirect_stdout(stack.enter_context(open(os.devnull, "w"))))
            yield
    finally:
        _launched = before
