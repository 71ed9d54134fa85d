"""`make test` fails when anything fails, and when nothing was tested."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

PYTHON = """#!/bin/sh
case "$*" in
  *"-m alone"*) exit {alone} ;;
  *"not alone"*) exit {many} ;;
esac
"""


def script(file: Path, text: str) -> None:
    file.write_text(text)
    file.chmod(0o755)


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")
@pytest.mark.parametrize(
    ("many", "alone", "good"),
    [(0, 0, True), (0, 5, True), (5, 0, True), (5, 5, False), (1, 0, False), (0, 1, False)],
)
def test_no_chosen_test_is_an_error_unless_the_other_part_had_some(
    many: int, alone: int, good: bool, tmp_path: Path
) -> None:
    for name in ("ruff", "mypy"):
        script(tmp_path / name, "#!/bin/sh\n")
    script(tmp_path / "python", PYTHON.format(many=many, alone=alone))
    (tmp_path / "stamp").touch()
    words = ["make", "-C", str(ROOT), "test", f"BIN={tmp_path}", f"STAMP={tmp_path / 'stamp'}", "SOUND=yes"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=30)
    assert (done.returncode == 0) == good, done.stdout + done.stderr
    assert ("chose no test" in done.stderr) == (many == alone == 5)
