"""The listening port of a host: who else holds it."""

from __future__ import annotations

import subprocess
import sys

import pytest

FORKED = """
import os, socket, sys, zmq
from potluck.wire.gate import listen

context = zmq.Context()
router = context.socket(zmq.ROUTER)
port, gate = listen(router, "127.0.0.1", 0, 16)
ended, end = os.pipe()
begun, begin = os.pipe()
if os.fork() == 0:
    os.close(end)
    os.write(begin, b"x")
    os.read(ended, 1)  # until the parent is gone
    os._exit(0)
os.read(begun, 1)  # the child has closed what it must
gate.close()
router.close(0)
context.term()
with socket.socket() as again:
    again.bind(("127.0.0.1", port))
    again.listen()
print("free")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the gate is Linux's")
def test_a_forked_child_does_not_keep_the_port() -> None:
    done = subprocess.run([sys.executable, "-c", FORKED], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "free", done.stderr
