"""A thread that runs queued calls in order: reading samples, comparing and hashing during training.

A data set may hang and worker processes may be gone: unlike a pool of concurrent.futures, this thread never keeps
the process from ending.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any


class HubThread:
    """Starts with the first call and ends with `close`. A call must catch its exceptions."""

    def __init__(self, name: str) -> None:
        self._calls: SimpleQueue[tuple[Callable[..., None], tuple[Any, ...]] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._closed = False

    def submit(self, call: Callable[..., None], *arguments: Any) -> None:
        if self._thread.ident is None:
            self._thread.start()
        self._calls.put((call, arguments))

    def close(self) -> None:
        """Cancel the queued calls. Does not wait for the current one."""
        self._closed = True
        self._calls.put(None)

    def _run(self) -> None:
        while (next_one := self._calls.get()) is not None and not self._closed:
            call, arguments = next_one
            call(*arguments)
