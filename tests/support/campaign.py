"""Short runs of the campaign's scripts in bench/stress/: `make test` sees what `make stress` does at length.

It knows how the scripts are called and what line they print.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from support.processes import Processes

STRESS = Path(__file__).resolve().parents[2] / "bench" / "stress"


def campaign(script: str, *words: str, seed: int = 1, deadline_s: float = 55.0) -> dict[str, Any]:
    """Run a script of bench/stress/; its figures, of which none may be bad."""
    with tempfile.TemporaryDirectory() as folder, Processes(Path(folder)) as processes:
        done = processes.python(str(STRESS / script), *words, "--seed", str(seed), "--json", name="campaign")
        status = done.wait(deadline_s)
        assert done.stdout(), done.stderr()
        figures: dict[str, Any] = json.loads(done.stdout().splitlines()[-1])
        assert not figures["bad"], "\n".join(figures["troubles"])
        assert status == 0, done.stderr()
    return figures
