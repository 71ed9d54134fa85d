"""pytest's workers: forks of one process, and the tests that judge time run when all others are done."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from support.processes import Processes

CONFTEST = Path(__file__).parents[1] / "conftest.py"
TESTS = """
import json, os, sys, time
import pytest

imported_in = os.getpid()

def write(name):
    fields = {"name": name, "pid": os.getpid(), "parent": os.getppid(), "in": imported_in}
    fields |= {"began": began, "ended": time.monotonic()}
    with open(os.environ["PYTEST_WRITTEN"], "a") as file:
        file.write(json.dumps(fields) + "\\n")

@pytest.mark.alone
@pytest.mark.parametrize("number", [1, 2])
def test_alone(number):
    global began
    began = time.monotonic()
    time.sleep(0.05)
    write(f"alone {number}")

@pytest.mark.parametrize("number", [1, 2])
def test_usual(number):
    global began
    began = time.monotonic()
    time.sleep(0.2)
    write("usual")
    assert number != DOES_NOT_COME
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="workers are forks on Linux only")
@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="CUDA does not survive a fork")
def test_workers_are_forks_and_tests_that_judge_time_run_last(tmp_path: Path) -> None:
    folder, written = tmp_path / "in a path with spaces", tmp_path / "written"
    folder.mkdir()
    (folder / "conftest.py").write_text(CONFTEST.read_text())
    (folder / "pytest.ini").write_text("[pytest]\nmarkers =\n  alone: judges time\n")
    for number in range(4):
        (folder / f"test_{number}.py").write_text(TESTS.replace("DOES_NOT_COME", "2" if number == 3 else "0"))
    with Processes(tmp_path / "logs") as processes:
        words = ("-n", "3", "--dist", "loadfile", "--no-loadscope-reorder", "-p", "no:cacheprovider", str(folder))
        env = {"PYTHONPATH": str(CONFTEST.parent), "PYTEST_WRITTEN": str(written), "FORKS_OF_ALL_WORKERS": None}
        run = processes.python("-m", "pytest", *words, cwd=folder, env=env)
        run.exits_with(1, 100)
        assert "1 failed, 15 passed" in run.stdout()
        assert "assert 2 != 2" in run.stdout()  # and asserts are explained
    lines = [json.loads(line) for line in written.read_text().splitlines()]
    assert len({line["pid"] for line in lines}) == 3
    (server,) = {line["parent"] for line in lines}
    assert {line["in"] for line in lines} == {server}, "a worker has imported the tests itself"
    usual = [line for line in lines if line["name"] == "usual"]
    alone = [line for line in lines if line["name"] != "usual"]
    assert len(usual) == len(alone) == 8
    assert len({line["pid"] for line in alone}) == 1
    assert min(line["began"] for line in alone) > max(line["ended"] for line in usual)
    assert [line["name"] for line in alone] == ["alone 1", "alone 2"] * 4
    assert not Path(f"/proc/{server}").exists()
