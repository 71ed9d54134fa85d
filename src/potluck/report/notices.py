"""Prints a run alone's warnings and notes on stderr. Progress is left to the script."""

from __future__ import annotations

import sys

from potluck.report.sentences import describe
from potluck.spec.events import RunEvent, RunNote


def to_stderr(event: RunEvent) -> None:
    message = describe(event)
    if message is not None and (message.level in ("warn", "bad") or isinstance(event, RunNote)):
        print(f"potluck: {message.text}", file=sys.stderr, flush=True)
