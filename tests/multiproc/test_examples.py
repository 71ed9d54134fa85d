"""The examples run as they say, and differ from their plain versions in few lines.

Those that need a library are run beside its other tests, which have imported it.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from support.processes import Processes

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
MOST = {"my_train.py": 6, "cnn.py": 10, "finetune.py": 3, "with_lightning.py": 2, "notebook.ipynb": 6}
"""Lines that an example may have beside those of its plain version, its import included."""


def test_few_lines_are_changed() -> None:
    made = runpy.run_path(str(ROOT / "docs" / "generate.py"))
    assert made["EXAMPLES"].keys() == MOST.keys()
    for name, most in MOST.items():
        changed = made["changed_lines"](name)
        assert 0 < len(changed) <= most, "\n".join(changed)


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.[pi]*")), ids=lambda path: path.name)
def test_examples_are_short(path: Path) -> None:
    assert len(path.read_text().splitlines()) < 150


def test_the_notebook_and_the_plain_one_come_to_the_same_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POTLUCK_DEVICE", "cpu")
    threads, weights, results = torch.get_num_threads(), [], []
    torch.set_num_threads(1)
    try:
        for name in ("plain_notebook.ipynb", "notebook.ipynb"):
            cells = json.loads((EXAMPLES / name).read_text())["cells"]
            sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
            names: dict[str, Any] = {}
            with contextlib.redirect_stdout(io.StringIO()) as said:
                for source in sources:
                    exec(source.replace("potluck.start(host=True)", "potluck.start()"), names)
            weights.append(names["model"].state_dict())
            results.append(said.getvalue())
    finally:
        torch.set_num_threads(threads)
    for name, tensor in weights[0].items():
        torch.testing.assert_close(weights[1][name], tensor, atol=1e-4, rtol=1e-4)
    assert all(float(text.removeprefix("right: ").rstrip("%\n")) > 95 for text in results)


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_the_loop_runs_alone_and_learns(tmp_path: Path) -> None:
    """For more steps than lie between two checkpoints: alone, there is no folder to write any to."""
    with Processes(tmp_path, fork=False) as processes:  # as a person starts it
        script = processes.python(str(EXAMPLES / "my_train.py"), env={"POTLUCK_THREADS": "1"})
        said = script.succeeds(deadline_s=100)
        assert script.stderr() == ""
    right = re.fullmatch(r"right: ([\d.]+)%\n", said)
    assert right, said
    assert float(right[1]) > 90
    assert [p.name for p in tmp_path.iterdir() if p.suffix not in (".out", ".err")] == []


def test_the_cnn_learns_and_keeps_its_best_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "best.pt"
    monkeypatch.setattr(sys, "argv", ["cnn.py", "--epochs", "3", "--out", str(out)])
    made = runpy.run_path(str(EXAMPLES / "cnn.py"))
    right = [float(found) for found in re.findall(r"right: ([\d.]+)%", capsys.readouterr().out)]
    assert len(right) == 3
    assert max(right) > 80
    assert made["run"].state["best"] * 100 == pytest.approx(max(right), abs=0.1)
    made["model"].load_state_dict(torch.load(out, weights_only=True))
    share = made["share_right"](made["model"], made["validation"], made["device"])
    assert share == made["run"].state["best"]
