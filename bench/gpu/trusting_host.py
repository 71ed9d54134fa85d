"""`potluck` with one change: every guest's gradient passes the check, so that puppets can be guests.

    python bench/gpu/trusting_host.py host gpt …

For measuring what guests cost their host, and for nothing else.
"""

from __future__ import annotations

from potluck.cli import main
from potluck.hub import host
from potluck.hub.actions import Verdict

host.judge = lambda *args, **keywords: Verdict(cosine=1.0)  # type: ignore[assignment]

if __name__ == "__main__":
    main()
