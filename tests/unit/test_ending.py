"""The end of a training: once, and with the right reason."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from potluck.train.ending import Ending


def test_a_loop_left_open_ends_while_the_interpreter_shuts_down(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_more_threads(thread: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Timer, "start", no_more_threads)
    reasons: list[str] = []
    ending = Ending(reasons.append)
    ending.soon("finished")
    ending.now("failed")
    assert reasons == ["finished"]


OPEN = """
import sys, torch, potluck

model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loop = potluck.start().steps(model, optimizer, [torch.ones(4)] * 64, global_batch=8, steps=6)
step = next(loop)
if sys.argv[1] != "next":
    for batch in step:
        step.backward(model(batch).mean())
"""


@pytest.mark.parametrize(("how", "status"), [("next", 0), ("done", 0)])
def test_a_script_that_leaves_its_loop_open_ends(how: str, status: int, tmp_path: Path) -> None:
    """Closed while the interpreter shut down, the loop waited for ever for a thread that never ran."""
    script = tmp_path / "open.py"
    script.write_text(OPEN)
    ended = subprocess.run(
        [sys.executable, str(script), how], timeout=50, capture_output=True, text=True, cwd=tmp_path
    )
    assert ended.returncode == status, ended.stderr
    assert ("ValueError: mine" in ended.stderr) == (how == "raise")
