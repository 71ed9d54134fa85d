"""S5: the listening sockets of every command, while it runs and after it has ended.

    .venv/bin/python bench/stress/s5_sockets.py [--times 1] [--minutes 15] [--json]

Each command runs with its guests and is looked at all the time (see tests/support/sockets.py): it listens on the
address that was chosen and on no other, guests and whoever trains alone on none, and afterwards nobody does.
"""

from __future__ import annotations

import random
import socket
import sys
from collections.abc import Callable
from pathlib import Path

from _campaign import begin
from _forks import Trouble

from potluck.wire.token import local_addresses
from support.fleet import JOB, Fleet
from support.processes import TestProcess
from support.sockets import Listening, still_listening

DEADLINE_S = 300.0
campaign = begin("S5", "listening sockets of every command", times=1, minutes=15)
DEFAULT = next(iter(local_addresses()), "127.0.0.1")


def look(name: str, process: TestProcess, addresses: set[str], *, more: Callable[[], None] = lambda: None) -> None:
    """Watch a command to its end: all its sockets are on these addresses, one each; none afterwards."""
    with Listening(process.pid) as sockets:
        more()
        process.succeeds(DEADLINE_S)
    found = {address for address, _ in sockets.all}
    campaign.add(commands=1, looks=sockets.looks, sockets=len(sockets.all))
    if not sockets.looks:
        raise Trouble(f"{name} was never looked at")
    if found != addresses or len(sockets.all) != len(addresses):
        raise Trouble(f"{name} listened on {sorted(sockets.all)}, not on {sorted(addresses)}: {sockets.seen}")
    if left := still_listening(sockets.all):
        raise Trouble(f"{name} has ended and somebody still listens on {left}")


def attempt(number: int, folder: Path, chance: random.Random) -> None:
    train(folder / "train")
    alone(folder / "alone")
    hosts(folder)
    lab(folder / "lab")


def train(folder: Path) -> None:
    with Fleet(folder) as fleet:
        look("train", fleet.train("--steps", "6", "--view", "plain"), {"127.0.0.1"})
        resumed = fleet.train("--resume", str(fleet.folder), "--steps", "8", "--view", "plain")
        look("train --resume", resumed, {"127.0.0.1"})
        look("report", fleet.potluck("report", str(fleet.folder), name="report"), set())


def alone(folder: Path) -> None:
    with Fleet(folder) as fleet:
        look("train --guests 0", fleet.train("--guests", "0", "--steps", "4", "--view", "plain"), set())
        look("python script.py", fleet.python(str(JOB), "--steps", "20"), set())


def hosts(folder: Path) -> None:
    port = free_port()
    for number, (options, address) in enumerate(
        [
            ((), DEFAULT),
            (("--bind", "127.0.0.1"), "127.0.0.1"),
            (("--bind", "127.0.0.1", "--port", str(port)), "127.0.0.1"),
            (("--bind", "0.0.0.0"), "0.0.0.0"),
        ]
    ):
        with Fleet(folder / f"host-{number}") as fleet:
            host_and_guest(fleet, options, address)


def host_and_guest(fleet: Fleet, options: tuple[str, ...], address: str) -> None:
    words = ["host", str(JOB), "--threads", "1", "--name", "host", "--view", "plain", "--runs", str(fleet.runs)]
    words += ["--wait-for", "1", "--device", "paced:0.002", *options, "--", "--steps", "20"]
    host = fleet.potluck(*words, name="host")

    def join() -> None:
        host.wait_until(lambda: list(fleet.runs.glob("*/manifest.json")), DEADLINE_S, "run folder")
        if "--port" in options and fleet.port != int(options[-1]):
            raise Trouble(f"{options} became port {fleet.port}")
        look("join", fleet.guest("ann", "--device", "paced:0.002"), set())

    look(f"host {' '.join(options)}", host, {address}, more=join)


def lab(folder: Path) -> None:
    """Emulated on the loopback: everything on 127.0.0.1, as many sockets as the rig needs."""
    with Fleet(folder) as fleet:
        words = ["bench", "home-pair", "--loopback", "--strategy", "potluck", "--steps", "2", "--no-plots"]
        bench = fleet.potluck("lab", *words, "--out", str(folder / "out"), name="lab")
        with Listening(bench.pid) as sockets:
            bench.succeeds(DEADLINE_S)
        campaign.add(commands=1, looks=sockets.looks, sockets=len(sockets.all))
        if {address for address, _ in sockets.all} != {"127.0.0.1"}:
            raise Trouble(f"lab bench --loopback listened on {sorted(sockets.all)}")
        if left := still_listening(sockets.all):
            raise Trouble(f"lab bench has ended and somebody still listens on {left}")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    campaign.run(attempt)
    sys.exit(campaign.end())
