"""`potluck bench --against gloo` on two machines of namespaces: where gloo cannot connect, and where it can."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from potluck.lab.ranks import run_on_pair
from support.two_machines import why_not

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(why_not() is not None, reason=why_not() or ""),
    pytest.mark.timeout(200),
]
TIMEOUT_S = 1.0
LIMIT_S = 80.0
"""Far less than gloo's own half an hour; mostly for starting torch on a busy box."""

# The status is the log's last line: by a rank that fails the other one would be ended.
VERB = "print('status', _app.run('bench collectives --against gloo --sizes 4K'.split()), flush=True)"
LATE = """
import time, torch, torch.distributed as dist
with groups.groups_of(["potluck", "gloo"]) as (found, _):
    time.sleep(4 * groups.GLOO_TIMEOUT_S * dist.get_rank())
    ones = torch.ones(1)
    dist.all_reduce(ones, group=found["gloo"])
    print("sum", int(ones), flush=True)
"""


def said(code: str, interface: str, folder: Path) -> list[str]:
    """What both ranks said, with a short time for gloo to connect by this interface."""
    imports = "from potluck.cli import _app\nfrom potluck.probe import groups"
    code = f"{imports}\ngroups.GLOO_TIMEOUT_S = {TIMEOUT_S}\n{code}"
    command = ["env", f"GLOO_SOCKET_IFNAME={interface}", sys.executable, "-c", code]
    return [log.read_text() for log in run_on_pair([command] * 2, None, folder, limit_s=LIMIT_S)]


def test_where_gloo_cannot_connect_every_rank_says_so_soon(tmp_path: Path) -> None:
    """As where gloo takes 127.0.0.1 for a machine's address. One rank is refused at once, the other one waits."""
    for text in said(VERB, "lo", tmp_path):
        assert "error: the ranks cannot form a gloo group: Gloo connectFullMesh failed" in text
        assert "GLOO_SOCKET_IFNAME" in text
        assert "Traceback" not in text
        assert text.splitlines()[-1] == "status 2"


def test_the_short_time_is_for_connecting_and_not_for_collectives(tmp_path: Path) -> None:
    for text in said(LATE, "eth0", tmp_path):
        assert "sum 2" in text.splitlines()
