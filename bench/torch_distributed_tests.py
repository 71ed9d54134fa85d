"""PyTorch's own tests of torch.distributed, with gloo and with this backend, side by side, in one run.

    python bench/torch_distributed_tests.py [--ranks 3] [--only SUBSTRING] [--results FILE [--resume]]

The tests are those of the class `DistributedTest` in torch.testing._internal.distributed.distributed_test, which is
part of the wheel. Many are marked for gloo by name: the marks are read as if this backend were gloo, so that it has
to pass what gloo passes. Where torch itself then refuses a backend of another name, the test counts as refused.

Each test is forked from a process that has torch, so that the whole takes minutes, not hours. It has a process
group of its own, which is killed when the test has ended or its time is over: a test that hangs counts as such,
and the run goes on. Results are lines of JSON in a file, as they come; --resume leaves out what is in it
already. At the end: a table, and what gloo passes and this backend does not. Exit status: 0 if there is nothing
of that kind but what torch refuses, 1 otherwise, 2 if not every test was run.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import re
import select
import signal
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).resolve().parents[1] / "src"
BACKENDS = ("gloo", "potluck")
STATES = ("passed", "failed", "hung", "refused", "skipped")
TEST_S = 60
"""What torch's class gives the ranks of a test."""
GRACE_S = 30
"""After which a test that did not end by itself is killed."""
STARTS = 5
REFUSALS = ("monitored_barrier is only implemented for GLOO backend",)
"""What torch says of backends by their name alone."""
HUNG = re.compile(r"Process \d+ (terminated or )?timed out after")
"""What torch's class says of ranks that did not end in time."""

Row = dict[str, Any]


# -- in a process for each backend


def serve(backend: str, ranks: int, only: str, done: set[str]) -> None:
    """Print a line of JSON for each test, and one with all names before."""
    folder = tempfile.TemporaryDirectory(prefix="potluck-torch-tests-")
    # The marks of the tests are evaluated when the module is imported.
    os.environ.update(BACKEND="gloo", WORLD_SIZE=str(ranks), TEMP_DIR=folder.name, OMP_NUM_THREADS="1")
    os.environ["DISTRIBUTED_TESTS_DEFAULT_TIMEOUT"] = str(TEST_S)
    case = _test_case(backend)
    _stand_in_for_gloo(backend)
    import unittest

    with folder:
        names = [name for name in unittest.TestLoader().getTestCaseNames(case) if only in name]
        _say({"tests": names})
        for name in names:
            if name not in done:
                _say({"backend": backend, "test": name, **_forked(case, name)})


def _test_case(backend: str) -> type:
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

    common_distributed.TIMEOUT_OVERRIDE.clear()

    class Forked(distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase):
        def setUp(self) -> None:
            super().setUp()
            if self._testMethodName == "test_get_backend":
                distributed_test.BACKEND = backend  # what it is to be called is what this one asks for
            self._start_processes(torch.multiprocessing.get_context("fork").Process)

    return Forked


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


def _say(row: Row) -> None:
    print("@" + json.dumps(row), flush=True)


def _forked(case: type, name: str) -> Row:
    """One test in a process group of its own; whatever is left of it is killed."""
    began = time.monotonic()
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.setpgid(0, 0)
        os.close(reading)
        with contextlib.suppress(BaseException), os.fdopen(writing, "w") as pipe:
            pipe.write(json.dumps(_result(case, name)) + "\n")
        os._exit(0)
    with contextlib.suppress(OSError):
        os.setpgid(child, child)
    os.close(writing)
    text = _read_until(reading, began + TEST_S + GRACE_S)
    os.close(reading)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    seconds = round(time.monotonic() - began, 2)
    if text is None:
        return {"state": "hung", "why": f"killed after {seconds:g} s", "seconds": seconds}
    return {**(json.loads(text) if text else {"state": "failed", "why": "its process died"}), "seconds": seconds}


def _read_until(reading: int, deadline: float) -> str | None:
    """The line that the test's process wrote, though its ranks may keep the pipe open; None: its time was over."""
    found = b""
    while (left := deadline - time.monotonic()) > 0:
        if not select.select([reading], [], [], left)[0]:
            continue
        part = os.read(reading, 65536)
        found += part
        if not part or found.endswith(b"\n"):
            return found.decode()
    return None


def _result(case: type, name: str) -> Row:
    import unittest

    result = unittest.TestResult()
    unittest.TestSuite([case(name)]).run(result)
    trouble = [text for _, text in result.failures + result.errors]
    if not trouble:
        skipped = bool(result.skipped)
        return {"state": "skipped" if skipped else "passed", "why": result.skipped[0][1] if skipped else ""}
    why = trouble[0]
    refused = any(text in why for text in REFUSALS)
    hung = HUNG.search(why) is not None
    return {"state": "refused" if refused else "hung" if hung else "failed", "why": why[-3000:]}


# -- the whole


def collect(backend: str, args: argparse.Namespace, known: dict[str, Row], skip: set[str]) -> bool:
    """Run what is not known yet, and add it to `known` and to the file; whether all tests are there then."""
    names: list[str] = []
    for _ in range(STARTS):
        before = len(known)
        for row in _lines(backend, args, sorted(known.keys() | skip)):
            if "tests" in row:
                names = row["tests"]
                continue
            known[row["test"]] = row
            with open(args.results, "a") as file:
                file.write(json.dumps(row) + "\n")
            done = len(known.keys() | skip)
            print(
                f"{done:4}/{len(names)} {backend:8} {row['state']:8} {row['seconds']:7.2f} s  {row['test']}",
                flush=True,
            )
        if names and all(name in known or name in skip for name in names):
            return True
        if len(known) == before:
            break
    return False


def _lines(backend: str, args: argparse.Namespace, done: list[str]) -> Iterator[Row]:
    command = [sys.executable, __file__, "--backend", backend, "--ranks", str(args.ranks), "--only", args.only]
    path = os.pathsep.join(filter(None, (str(SOURCE), os.environ.get("PYTHONPATH", ""))))
    with (
        open(args.results.with_suffix(".stderr"), "ab") as errors,
        subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env={**os.environ, "PYTHONPATH": path},
        ) as process,
    ):
        assert process.stdout is not None
        assert process.stdin is not None
        process.stdin.write(json.dumps(done))
        process.stdin.close()
        for line in process.stdout:
            if line.startswith("@"):
                yield json.loads(line[1:])


def summary(found: dict[str, dict[str, Row]]) -> list[str]:
    """Print the table; the tests that gloo passes and this backend fails for its own reasons."""
    theirs, ours = found["gloo"], found["potluck"]
    worth = [name for name, row in theirs.items() if row["state"] != "skipped"]
    print(f"\n{len(theirs)} tests, of which {len(worth)} run here without a GPU:\n")
    print(f"{'':10}" + "".join(f"{state:>9}" for state in STATES[:-1]))
    for backend, rows in found.items():
        counts = [sum(rows[name]["state"] == state for name in worth if name in rows) for state in STATES[:-1]]
        print(f"{backend:10}" + "".join(f"{count:9}" for count in counts))
    passed = [name for name in worth if theirs[name]["state"] == "passed"]
    states = {name: ours[name]["state"] if name in ours else "not run" for name in passed}
    kinds = sorted(set(states.values()))
    parts = ", ".join(f"{sum(state == kind for state in states.values())} {kind}" for kind in kinds)
    print(f"\nof the {len(passed)} that gloo passes, here: {parts}")
    for name in (name for name in worth if theirs[name]["state"] in ("failed", "hung") and name in ours):
        print(f"gloo: {theirs[name]['state']}, here: {ours[name]['state']}: {name}")
    for name in (name for name in passed if states[name] == "refused"):
        print(f"refused by torch: {name}")
    worse = [name for name in passed if states[name] in ("failed", "hung", "skipped")]
    for name in worse:
        print(f"\n{name} passes with gloo, here it {states[name]}:\n{ours[name]['why']}")
    return worse


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--only", default="", help="only tests whose name holds this")
    parser.add_argument("--results", type=Path, default=Path("torch-distributed-tests.jsonl"))
    parser.add_argument("--resume", action="store_true", help="go on where --results ends")
    parser.add_argument("--backend", choices=BACKENDS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.backend:
        serve(args.backend, args.ranks, args.only, set(json.load(sys.stdin)))
        return 0
    found: dict[str, dict[str, Row]] = {backend: {} for backend in BACKENDS}
    if args.resume and args.results.exists():
        for line in args.results.read_text().splitlines():
            row = json.loads(line)
            found[row["backend"]][row["test"]] = row
    else:
        args.results.write_text("")
    complete = collect("gloo", args, found["gloo"], set())
    skipped = {name for name, row in found["gloo"].items() if row["state"] == "skipped"}
    ours_complete = collect("potluck", args, found["potluck"], skipped)
    worse = summary(found)
    if not (complete and ours_complete):
        print("\nnot every test was run: start again with --resume", file=sys.stderr)
        return 2
    return 1 if worse else 0


if __name__ == "__main__":
    sys.exit(main())
