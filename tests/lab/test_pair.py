"""Host and guest in network namespaces with a shaped link: a real gain, exact steps, nothing left behind."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest

from potluck.lab.netns import Pair, why_not

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(why_not() is not None, reason=why_not() or ""),
    pytest.mark.timeout(120),
]

HOST_S, GUEST_S, BATCH, STEPS = 0.05, 0.2, 32, 12
COMMON = ["--threads", "1", "--micro-batch", "2"]


def namespaces() -> list[str]:
    return subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout.split()


def test_a_guest_behind_a_thin_link_makes_the_host_faster(tmp_path: Path) -> None:
    before = namespaces()
    with Pair(20.0, number=7) as pair:
        command = [sys.executable, "-m", "potluck", "host", "--depth", "2", "--batch-tokens", str(BATCH * 128)]
        command += ["--device", f"paced:{HOST_S}", "--steps", str(STEPS), "--bind", pair.host.address]
        command += ["--wait-for", "1", "--name", "host", "--runs", str(tmp_path), "--view", "quiet"]
        host = pair.start(pair.host, [*command, "--checkpoint-every", "0", *COMMON])
        processes = [host]
        try:
            deadline = time.monotonic() + 60
            while not (tokens := list(tmp_path.glob("*/token"))):
                assert host.poll() is None, "the host did not start"
                assert time.monotonic() < deadline
                time.sleep(0.1)
            join = [sys.executable, "-m", "potluck", "join", "--token-file", str(tokens[0]), "--name", "guest"]
            guest = pair.start(pair.guest, [*join, "--device", f"paced:{GUEST_S}", "--view", "quiet", *COMMON])
            processes.append(guest)
            assert host.wait(90) == 0
            assert guest.wait(20) == 0
        finally:
            for process in processes:
                if process.poll() is None:
                    process.kill()
                    process.wait()
    assert namespaces() == before
    lines = (tokens[0].parent / "events.jsonl").read_text().splitlines()
    steps = [e for e in map(json.loads, lines) if e["event"] == "step"]
    assert len(steps) == STEPS
    assert all(sum(e["samples"].values()) == BATCH for e in steps)
    later = steps[STEPS // 2 :]
    assert statistics.median(e["samples"].get("guest", 0) for e in later) >= 4
    # Alone the host needs BATCH * HOST_S = 1.6 s a step; ideal is 1.28 s.
    assert statistics.median(e["step_s"] for e in later) < 0.95 * BATCH * HOST_S
