"""The script of PyTorch's own tests: one that hangs, dies or leaves processes behind does not end the run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parents[2] / "bench"

TESTS = """
import json, os, sys, time, unittest
sys.path.insert(0, sys.argv[1])
import torch_distributed_tests as script

script.TEST_S = script.GRACE_S = 0.5

class Case(unittest.TestCase):
    def test_hangs(self):
        if os.fork() == 0:
            time.sleep(100)
        time.sleep(100)
    def test_dies(self):
        os._exit(3)
    def test_leaves_a_process(self):
        if os.fork() == 0:
            time.sleep(100)
            os._exit(0)
    def test_fails(self):
        self.assertEqual(1, 2)
    def test_has_ranks_that_hang(self):
        raise RuntimeError("Process 0 terminated or timed out after 60 seconds")
    def test_is_refused(self):
        raise ValueError(script.REFUSALS[0])
    def test_is_skipped(self):
        self.skipTest("no GPU")

names = [name for name in dir(Case) if name.startswith("test_")]
print(json.dumps({name: script._forked(Case, name)["state"] for name in names}))
"""


@pytest.mark.skipif(sys.platform == "win32", reason="needs fork (POSIX)")
def test_every_test_gets_its_word() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", TESTS, str(BENCH)], capture_output=True, text=True, timeout=50, check=True
    )
    assert json.loads(ran.stdout) == {
        "test_hangs": "hung",
        "test_dies": "failed",
        "test_leaves_a_process": "passed",
        "test_fails": "failed",
        "test_has_ranks_that_hang": "hung",
        "test_is_refused": "refused",
        "test_is_skipped": "skipped",
    }
