"""What a run alone says on stderr: what went wrong or deserves a look. Progress is the script's to print."""

from __future__ import annotations

import sys
from typing import Any

from potluck.report.messages import describe


def to_stderr(event: dict[str, Any]) -> None:
    message = describe(event)
    if message is not None and (message.level in ("warn", "bad") or event.get("event") == "note"):
        print(f"potluck: {message.text}", file=sys.stderr, flush=True)
