"""`make test-elsewhere` varies what it says: folder, user, locale, time zone, torch's instructions."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from support import elsewhere
from support.elsewhere import Variation

pytestmark = pytest.mark.skipif(os.name != "posix", reason="becomes another user of POSIX")
MAKE = """#!/bin/sh
for word in "$PWD" "$TMPDIR" "$(id -u)" "$LC_ALL" "$TZ" "$ATEN_CPU_CAPABILITY" "$OMP_NUM_THREADS" "$MAKEFLAGS"; do
  echo "$word"
done
echo "$*"
[ -w src ] && [ -w "$TMPDIR" ] && [ -e src/potluck/dist/group.py ] && [ ! -e .venv ] && exit 7
"""


@pytest.fixture(autouse=True)
def _a_make_that_tells(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """In the place of the real one, where another user finds it too."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        program = Path(folder, "make")
        program.write_text(MAKE)
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
        monkeypatch.setenv("MAKEFLAGS", "n")
        yield


@pytest.mark.slow
def test_a_pass_runs_make_test_in_another_folder_as_another_user(capfd: pytest.CaptureFixture[str]) -> None:
    varied = Variation(
        aten="default", threads=3, zone="<+1345>-13:45", locale="C", busy=1, other_user=True, space=True
    )
    assert elsewhere.tried(varied, ["-k", "a or b"]) == 7
    root = os.geteuid() == 0
    said = capfd.readouterr().out.splitlines()
    assert ("no other user: only root can become one" in said) == (not root)
    folder, temporary, user, locale, zone, aten, threads, flags, words = said[-9:]
    assert " " in folder
    assert not Path(folder).exists()
    assert Path(temporary).parent == Path(folder).parent
    assert int(user) == (elsewhere.OTHER_USER if root else os.geteuid())
    assert locale in ("C", "POSIX")
    assert (zone, aten, threads, flags) == ("<+1345>-13:45", "default", "3", "")
    assert words == "test ARGS=-k 'a or b'"


@pytest.mark.slow
def test_a_locale_is_generated_or_its_absence_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    env = elsewhere.locale_of("tr_TR.UTF-8", tmp_path)
    if "LOCPATH" in env:
        assert (tmp_path / env["LC_ALL"] / "LC_CTYPE").exists()
    else:
        assert (env, "no locale tr_TR.UTF-8" in capsys.readouterr().out) == ({"LC_ALL": "POSIX"}, True)
    assert elsewhere.locale_of("xx_XX.UTF-8", tmp_path) == {"LC_ALL": "POSIX"}
