"""A notebook hosts: the example runs in a real kernel, a guest joins it, and cells end in every way they can."""

from __future__ import annotations

import importlib.util
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.fleet import Fleet

# They are imported when they are used: every worker of the tests reads this file.
MISSING = [name for name in ("nbclient", "nbformat", "ipykernel") if importlib.util.find_spec(name) is None]
pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"notebooks need {', '.join(MISSING)}")

EXAMPLE = Path(__file__).parents[2] / "examples" / "notebook.ipynb"
START = "potluck.start(host=True)"

# What a cell has left behind after its training ended, and how that is told.
LEFT = """
import json, socket, threading
def left(folder):
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    port = json.loads((folder / "manifest.json").read_text())["port"]
    with socket.socket() as probe:
        is_open = probe.connect_ex(("127.0.0.1", port)) == 0
    threads = [t.name for t in threading.enumerate() if t.name.startswith("potluck")]
    saved = sorted(p.name for p in (folder / "checkpoints").iterdir())
    return events[-1]["event"], events[-1]["reason"], events[-1]["step"], saved, is_open, threads
"""


class Kernel:
    """One notebook in a kernel of its own."""

    def __init__(self, folder: Path, cells: list[Any]) -> None:
        import nbclient
        import nbformat

        self.notebook = nbformat.v4.new_notebook(cells=cells)
        self.client = nbclient.NotebookClient(
            self.notebook, timeout=100, kernel_name="python3", resources={"metadata": {"path": str(folder)}}
        )

    def run(self, source: str | int) -> Any:
        """Run one of its cells, or a new one."""
        if isinstance(source, str):
            from nbformat.v4 import new_code_cell

            self.notebook.cells.append(new_code_cell(source))
        index = source if isinstance(source, int) else len(self.notebook.cells) - 1
        return self.client.execute_cell(self.notebook.cells[index], index)

    def says(self, source: str | int) -> str:
        return "".join(o.text for o in self.run(source).outputs if o.output_type == "stream" and o.name == "stdout")

    def fails(self, source: str) -> str:
        """The name of the exception that ends the cell."""
        from nbclient.exceptions import CellExecutionError

        with pytest.raises(CellExecutionError) as caught:
            self.run(source)
        return str(caught.value.ename)


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    with Fleet(tmp_path / "fleet") as fleet:
        yield fleet


@pytest.mark.skipif(os.name != "posix", reason="a kernel is interrupted by a signal")
@pytest.mark.slow
@pytest.mark.timeout(150)
def test_the_example_with_a_guest_and_cells_that_end_in_other_ways(
    fleet: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2] / "src"))
    import nbformat

    cells = [cell for cell in nbformat.read(EXAMPLE, as_version=4).cells if cell.cell_type == "code"]
    options = f"bind='127.0.0.1', threads=1, wait_for=1, wait_s=90, device='paced:0.002', runs={str(fleet.runs)!r}"
    (begin,) = [cell for cell in cells if START in cell.source]
    begin.source = begin.source.replace(START, f"potluck.start(host=True, {options})")
    loop = next(cell for cell in cells if "run.steps" in cell.source)
    loop.source = loop.source.replace("epochs=10", "steps=20")
    cells[0].source = cells[0].source.replace("batch_size=200", "batch_size=64")
    kernel = Kernel(tmp_path, cells)
    with kernel.client.setup_kernel():
        kernel.run(0)
        line = kernel.says(1)
        token = re.search(r"^  potluck join (potluck\d+-\S+)$", line, re.M)
        assert token, line
        kernel.run("%%time\nfor_guests = 1  # a cell magic, whose cell is Python all the same")
        kernel.run("%who\nhosts = __import__('os').getpid()")
        guest = fleet.guest("ann", "--device", "paced:0.002")
        assert kernel.run(2).outputs == []
        (shown,) = [output for output in kernel.run(3).outputs if output.output_type == "display_data"]
        assert "finished after step 20" in shown.data["text/plain"]
        guest.succeeds(deadline_s=30)
        assert "computing notebook.py from the host" in guest.stdout()
        assert sum(m["samples"] for e in fleet.steps() for m in e["machines"] if m["name"] == "ann") > 0
        fleet.assert_every_step_is_full(global_batch=64)
        assert re.fullmatch(r"right: [\d.]+%\n", kernel.says(4))

        # A kernel's interrupt is a SIGINT. The step under way is abandoned, what was trained is saved.
        others = str(tmp_path / "others")
        kernel.run(f"run = potluck.start(host=True, bind='127.0.0.1', device='cpu', threads=1, runs={others!r})")
        kernel.run(LEFT)
        loop = """
import os, pathlib, signal
def interrupt(): os.kill(os.getpid(), signal.SIGINT)
def fail(): raise ValueError("boom")
def train(at, end):
    for step in run.steps(model, optimizer, spirals, global_batch=8, micro_batch=8):
        for points, labels in step:
            step.backward(F.cross_entropy(model(points), labels))
        if step.index == at and end() is not None:
            break
def last():
    folder = max(pathlib.Path(RUNS).iterdir(), key=lambda path: path.stat().st_mtime_ns)
    return left(folder)
""".replace("RUNS", repr(others))
        kernel.run(loop)
        token = kernel.says("print(run.token)")
        assert kernel.fails("train(2, interrupt)") == "KeyboardInterrupt"
        assert kernel.says("print(last())") == "('run_end', 'interrupted', 3, ['step-00000003'], False, [])\n"
        # The cell is run again: a new run, which the same line joins.
        assert kernel.fails("train(1, fail)") == "ValueError"
        assert kernel.says("print(last())") == "('run_end', 'failed', 2, ['step-00000002'], False, [])\n"
        kernel.run("train(0, lambda: True)")
        assert kernel.says("print(last())") == "('run_end', 'finished', 1, ['step-00000001'], False, [])\n"
        assert kernel.says("print(run.token)") == token
        assert kernel.says("print(signal.getsignal(signal.SIGTERM))") == "0\n"
        # A loop that is open when the kernel is shut down.
        kernel.run("steps = run.steps(model, optimizer, spirals, global_batch=8); step = next(steps)")
    open_last = max((tmp_path / "others").iterdir(), key=lambda path: path.stat().st_mtime_ns)
    event = json.loads((open_last / "events.jsonl").read_text().splitlines()[-1])
    assert (event["event"], event["step"]) == ("run_end", 0)
