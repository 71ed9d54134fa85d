"""The lessons of docs/learn/: their quick command blocks are run, and their runner (docs/lessons.py) is tested.

`make lessons` runs the slow blocks as well.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

from potluck.lab.permission import why_not

ROOT = Path(__file__).resolve().parents[2]


def load_runner() -> ModuleType:
    spec = importlib.util.spec_from_file_location("lessons", ROOT / "docs" / "lessons.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["lessons"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


lessons = load_runner()


@pytest.mark.slow
@pytest.mark.parametrize("lesson", lessons.LESSONS, ids=lambda path: path.stem)
def test_the_quick_commands_of_a_lesson_do_what_it_shows(lesson: Path) -> None:
    wrong = lessons.run_lesson(lesson, slow=False, namespaces=why_not() is None)
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("lesson", lessons.LESSONS, ids=lambda path: path.stem)
def test_no_command_of_a_lesson_is_left_out(lesson: Path) -> None:
    """A command in a fence of another kind would never be run; an output that is missing was never made."""
    text = lesson.read_text(encoding="utf-8")
    others = re.sub(r"^```console\n.*?^```$", "", text, flags=re.M | re.S)
    assert not re.findall(r"^\$ .*|^```(?:sh|bash|shell)\b|^(?:potluck|torchrun|python) .*", others, re.M)
    blocks = lessons.blocks_of(text)
    assert len(blocks) == len(re.findall(r"^```console$", text, re.M))
    assert not [block.commands for block in blocks if not any(block.shown)]
    assert [part for part in ("Predict", "Run", "Compare", "Explain") if f"## {part}\n" not in text] == []


def write(folder: Path, block: str) -> Path:
    lesson = folder / "1-try.md"
    lesson.write_text(f"# Try\n\n{block}\n\nThe end.\n", encoding="utf-8")
    return lesson


@pytest.mark.parametrize(
    ("block", "wrong"),
    [
        ("```console\n$ echo it took 3.5 s\nit took 128 ms\n```", 0),
        ("```console\n$ echo it took 3.5 s\nit cost 3.5 s\n```", 1),
        ("```console\n$ echo one; echo two\none\n```", 1),
        ("<!-- run: exact -->\n```console\n$ echo it took 3.5 s\nit took 128 ms\n```", 1),
        ("<!-- run: status -->\n```console\n$ echo this\nthat\n```", 0),
        ("<!-- run: status -->\n```console\n$ false\n```", 1),
        ("<!-- run: exit=3 -->\n```console\n$ echo bye; exit 3\nbye\n```", 0),
        ("<!-- run: exit=3 -->\n```console\n$ exit 3\n$ echo bye\nbye\n```", 2),
        ("<!-- run: slow -->\n```console\n$ false\n```", 0),
        ("```console\n$ echo you said 1, it is 2: right\nyou said 1, it is 3: 3 times too low\n```", 0),
        ("```console\n$ echo one \\\n  two\none two\n```", 0),
    ],
)
def test_the_runner_tells_what_differs(tmp_path: Path, block: str, wrong: int) -> None:
    assert len(lessons.run_lesson(write(tmp_path, block), slow=False)) == wrong


def test_the_runner_writes_the_output_of_now(tmp_path: Path) -> None:
    lesson = write(
        tmp_path,
        "```console\n$ echo 1\nold\n$ echo 2\n```\n\n<!-- run: slow -->\n```console\n$ echo 3\nkept\n```\n\n"
        "<!-- run: status -->\n```console\n$ echo 4\n```",
    )
    lessons.run_lesson(lesson, slow=False, write=True)
    found = [block.text() for block in lessons.blocks_of(lesson.read_text(encoding="utf-8"))]
    assert found == ["$ echo 1\n1\n$ echo 2\n2\n", "$ echo 3\nkept\n", "$ echo 4\n4\n"]
    assert lesson.read_text(encoding="utf-8").endswith("\n\nThe end.\n")


def test_a_mark_that_is_unknown_is_an_error() -> None:
    with pytest.raises(ValueError, match="quick"):
        lessons.Block.read("quick", "$ true\n")
