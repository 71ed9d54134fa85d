"""The thread beside the training: in order, and never in the way of the process's end."""

from __future__ import annotations

import subprocess
import sys
import threading

from potluck.hub.thread import HubThread

HANGS = """
import threading
from potluck.hub.thread import HubThread

began = threading.Event()
worker = HubThread("hangs")
worker.submit(lambda: (began.set(), threading.Event().wait()))
began.wait()
worker.close()
print("over", flush=True)
"""


def test_calls_are_done_in_order_and_none_after_the_close() -> None:
    done: list[int] = []
    reached, go_on, ended = threading.Event(), threading.Event(), threading.Event()
    worker = HubThread("test")
    for number in range(5):
        worker.submit(done.append, number)
    worker.submit(reached.set)
    worker.submit(go_on.wait)
    worker.submit(done.append, 5)
    assert reached.wait(10)
    worker.close()
    go_on.set()
    other = HubThread("other")
    other.submit(ended.set)
    assert ended.wait(10)
    worker._thread.join(10)
    assert done == [0, 1, 2, 3, 4]


def test_a_call_that_hangs_does_not_keep_the_process() -> None:
    done = subprocess.run([sys.executable, "-c", HANGS], capture_output=True, text=True, timeout=40)
    assert (done.returncode, done.stdout) == (0, "over\n"), done.stderr
