"""PyTorch's own tests of torch.distributed, with gloo and with this backend, side by side.

    python bench/torch_distributed_tests.py [--ranks 3] [--only SUBSTRING] [--json FILE]

The tests are those of the class `DistributedTest` in torch.testing._internal.distributed.distributed_test, which is
part of the wheel. Each starts its own ranks; here they are forked from a process that has torch, so that the whole
takes minutes, not hours. Many are marked for gloo by name: the marks are read as if this backend were gloo, so that
it has to pass what gloo passes. Where torch itself then refuses a backend of another name, the test counts as
refused. Exit status 1 if a test that gloo passes fails here.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[1] / "src"
BACKENDS = ("gloo", "potluck")
TEST_S = 90
REFUSALS = ("monitored_barrier is only implemented for GLOO backend",)
"""What torch says of backends by their name alone."""


def run_backend(backend: str, ranks: int, only: str, wanted: list[str] | None) -> None:
    """In a process of its own: run the class and print a line of JSON for each test."""
    # The marks of the tests are evaluated when the module is imported.
    os.environ.update(BACKEND="gloo", WORLD_SIZE=str(ranks), TEMP_DIR="/tmp", OMP_NUM_THREADS="1")
    os.environ["DISTRIBUTED_TESTS_DEFAULT_TIMEOUT"] = str(TEST_S)
    import tempfile
    import unittest

    if importlib.util.find_spec("expecttest") is None:
        # torch's test classes derive from it; what it adds is used by none of these tests.
        sys.modules["expecttest"] = types.ModuleType("expecttest")
        sys.modules["expecttest"].TestCase = unittest.TestCase  # type: ignore[attr-defined]

    import torch
    from torch.testing._internal import common_distributed

    import potluck
    import potluck.dist.group  # before the ranks are forked, as torch itself

    assert potluck.__version__
    torch.set_num_threads(1)
    from torch.testing._internal.distributed import distributed_test

    _stand_in_for_gloo(backend)
    with tempfile.TemporaryDirectory(prefix="potluck-torch-tests-") as folder:
        os.environ["TEMP_DIR"] = folder
        common_distributed.TIMEOUT_OVERRIDE.clear()

        class Forked(distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase):
            def setUp(self) -> None:
                super().setUp()
                self._start_processes(torch.multiprocessing.get_context("fork").Process)

        names = [name for name in unittest.TestLoader().getTestCaseNames(Forked) if only in name]
        names = [name for name in names if wanted is None or name in wanted]
        for name in names:
            began = time.monotonic()
            result = unittest.TestResult()
            unittest.TestSuite([Forked(name)]).run(result)
            trouble = [text for _, text in result.failures + result.errors]
            refused = any(text in trouble[0] for text in REFUSALS) if trouble else False
            state = "refused" if refused else "failed" if trouble else "skipped" if result.skipped else "passed"
            why = trouble[0][-3000:] if trouble else result.skipped[0][1] if result.skipped else ""
            row = {"test": name, "state": state, "why": why, "seconds": round(time.monotonic() - began, 2)}
            print("@" + json.dumps(row), flush=True)


def _stand_in_for_gloo(backend: str) -> None:
    """Tests also ask for gloo by name within: whoever makes a group of gloo gets one of this backend."""
    import torch.distributed as dist

    def instead(make: Callable[..., object]) -> Callable[..., object]:
        def wrapped(*args: object, **kwargs: object) -> object:
            args = tuple(backend if arg == "gloo" else arg for arg in args)
            return make(*args, **{name: backend if value == "gloo" else value for name, value in kwargs.items()})

        return wrapped

    dist.init_process_group = instead(dist.init_process_group)  # type: ignore[assignment]
    dist.new_group = instead(dist.new_group)  # type: ignore[assignment]


def collect(backend: str, ranks: int, only: str, wanted: list[str] | None = None) -> dict[str, dict[str, object]]:
    command = [sys.executable, __file__, "--backend", backend, "--ranks", str(ranks), "--only", only]
    if wanted is not None:
        command += ["--tests", json.dumps(wanted)]
    path = os.pathsep.join(filter(None, (str(SOURCE), os.environ.get("PYTHONPATH", ""))))
    rows = {}
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("@"):
                row = json.loads(line[1:])
                rows[row["test"]] = row
                print(f"{backend:8} {row['state']:8} {row['seconds']:7.2f} s  {row['test']}", flush=True)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--only", default="", help="only tests whose name holds this")
    parser.add_argument("--json", type=Path, help="write all results to this file")
    parser.add_argument("--backend", choices=BACKENDS, help=argparse.SUPPRESS)
    parser.add_argument("--tests", default="null", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.backend:
        run_backend(options.backend, options.ranks, options.only, json.loads(options.tests))
        return 0
    found = {"gloo": collect("gloo", options.ranks, options.only)}
    worth = [name for name, row in found["gloo"].items() if row["state"] != "skipped"]
    found["potluck"] = collect("potluck", options.ranks, options.only, worth)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))
    states = ("passed", "failed", "refused")
    print(f"\nof {len(worth)} tests that run here without a GPU:")
    for backend, rows in found.items():
        counts = [f"{sum(row['state'] == state for row in rows.values())} {state}" for state in states]
        print(f"{backend:8} " + ", ".join(counts))
    ours, theirs = found["potluck"], found["gloo"]
    worse = [name for name in ours if ours[name]["state"] == "failed" and theirs[name]["state"] == "passed"]
    for name in worse:
        print(f"\n{name} passes with gloo and fails here:\n{ours[name]['why']}")
    return 1 if worse else 0


if __name__ == "__main__":
    sys.exit(main())
