"""The run's log: every event one JSON line in the run folder, and the same event to whoever renders it.

Owns the file and the order of its lines. It knows nothing of what events mean.
"""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

Event = dict[str, Any]


class EventLog:
    """Any thread may emit; lines come whole and in order."""

    def __init__(self, path: Path | None, show: Callable[[Event], None] | None = None) -> None:
        self._lock = threading.Lock()
        self._file: TextIO | None = open(path, "a", encoding="utf-8") if path is not None else None  # noqa: SIM115
        self._show = show
        self.started = time.monotonic()
        """The clock at t_s = 0."""

    def emit(self, event: Event) -> None:
        stamped = {"t_s": round(time.monotonic() - self.started, 4), **event}
        # JSON knows no NaN: a value that is not finite is null.
        stamped = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in stamped.items()}
        with self._lock:
            if self._file is not None:
                self._file.write(json.dumps(stamped, default=str) + "\n")
                self._file.flush()
            if self._show is not None:
                self._show(stamped)

    def close(self) -> None:
        with self._lock:
            if self._file is not None:
                self._file.close()
                self._file = None
