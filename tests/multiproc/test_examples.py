"""The examples run as they say, and the loop that became potluck's differs from the plain one in five lines."""

from __future__ import annotations

import difflib
import re
from pathlib import Path

import pytest

from support.processes import Processes

EXAMPLES = Path(__file__).parents[2] / "examples"


def code(name: str) -> list[str]:
    """The lines below the imports, without blank ones."""
    lines = (EXAMPLES / name).read_text().splitlines()
    last_import = max(i for i, line in enumerate(lines) if line.startswith(("import ", "from ")))
    return [line for line in lines[last_import + 1 :] if line.strip()]


def test_at_most_five_lines_are_changed() -> None:
    plain, ours = code("plain.py"), code("my_train.py")
    changes = [line for line in difflib.ndiff(plain, ours) if line.startswith(("+ ", "- "))]
    added = [line for line in changes if line.startswith("+ ")]
    assert len(added) <= 5, "\n".join(added)


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_examples_are_short(path: Path) -> None:
    assert len(path.read_text().splitlines()) < 150


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
