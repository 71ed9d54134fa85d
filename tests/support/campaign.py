"""Short runs of the campaign's scripts in bench/stress/: `make test` sees what `make stress` does at length.

It knows how the scripts are called and what line they print.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

STRESS = Path(__file__).resolve().parents[2] / "bench" / "stress"


def campaign(script: str, *words: str, seed: int = 1, deadline_s: float = 55.0) -> dict[str, Any]:
    """Run a script of bench/stress/; its figures, of which none may be bad."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("POTLUCK_")}
    done = subprocess.run(
        [sys.executable, str(STRESS / script), *words, "--seed", str(seed), "--json"],
        env={**env, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=deadline_s,
    )
    assert done.stdout, done.stderr
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert not figures["bad"], "\n".join(figures["troubles"])
    assert done.returncode == 0, done.stderr
    return figures
