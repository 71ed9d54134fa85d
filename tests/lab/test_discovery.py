"""Two machines as network namespaces: one finds the other's run by multicast, and says so when it cannot."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("spake2", reason="needs the extra lan")
pytest.importorskip("zeroconf", reason="needs the extra lan")

from support.two_machines import TwoMachines, environment, why_not

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(why_not() is not None, reason=why_not() or ""),
    pytest.mark.timeout(120),
]

HOST = """
import time
from potluck.wire.code import Codes, CodeServer
from potluck.wire.discovery import Announcement
server = CodeServer("10.77.0.1", 0, lambda address, right: print("tried by", address, right, flush=True))
announced = Announcement(["10.77.0.1"], server.port)
codes = Codes(announced.number)
server.start(codes, "potluck3-the-token")
print("code", codes.current, "ready", flush=True)
time.sleep(100)
"""
GUEST = """
import sys
from potluck.errors import NetworkError
from potluck.wire.by_code import token_by_code
try:
    print(token_by_code(sys.argv[1], lambda line: None))
except NetworkError as error:
    print(error, error.hint)
"""


@pytest.fixture
def net(tmp_path: Path) -> Iterator[TwoMachines]:
    with TwoMachines(tmp_path) as machines:
        yield machines


def test_a_run_on_another_machine_is_found_and_its_token_fetched(net: TwoMachines) -> None:
    def join(code: str) -> str:
        command = net.beta.inside([sys.executable, "-c", GUEST, code])
        done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        return done.stdout

    with net.alpha.running(sys.executable, "-c", HOST, until="ready") as written:
        code = re.findall(r"code (\S+) ready", written)[0]
        assert join(code) == "potluck3-the-token\n"
        if shutil.which("nft") is None:
            return
        net.beta.sh("nft 'add table inet f; add chain inet f i { type filter hook input priority 0; }'")
        net.beta.sh("nft add rule inet f i udp dport 5353 drop")
        began = time.monotonic()
        said = join(code)
        assert f"run {code[:2]} was not seen in this network within 5 s" in said
        assert "potluck join TOKEN" in said
        assert time.monotonic() - began < 40
