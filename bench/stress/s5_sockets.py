"""S5: the listening sockets of every command, while it runs and after it has ended.

    .venv/bin/python bench/stress/s5_sockets.py [--times 1] [--minutes 15] [--json]

Each command runs with its guests and is looked at all the time (see tests/support/sockets.py): it listens on the
address that was chosen and on no other, guests and whoever trains alone on none, and afterwards nobody does. The
listeners of doctor and probe get a client: a probe's extra ports, and the one at which a connecting doctor is
tried, are on that address, too.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from pathlib import Path

from _campaign import begin
from _forks import Trouble

from potluck.fleet.ranks import free_port
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
    listeners(folder)
    lab(folder / "lab")


def train(folder: Path) -> None:
    with Fleet(folder) as fleet:
        look("train", fleet.train("--steps", "6", "--view", "plain", guests=1), {"127.0.0.1"})
        resumed = fleet.train("--resume", str(fleet.folder), "--steps", "8", "--view", "plain", guests=1)
        look("train --resume", resumed, {"127.0.0.1"})
        look("report", fleet.potluck("report", str(fleet.folder), name="report"), set())


def alone(folder: Path) -> None:
    with Fleet(folder) as fleet:
        look("train --guests 0", fleet.train("--steps", "4", "--view", "plain", guests=0), set())
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


def listeners(folder: Path) -> None:
    """doctor --listen and probe --listen, each with a client."""
    probed = ("--seconds", "2", "--no-device", "--no-iperf3")
    places = [((), DEFAULT), (("--bind", "127.0.0.1"), "127.0.0.1"), (("--bind", "0.0.0.0"), "0.0.0.0")]
    for verb, more in (("doctor", ()), ("probe", probed)):
        for number, (options, address) in enumerate(places):
            with Fleet(folder / f"{verb}-{number}") as fleet:
                meet(fleet, verb, (*options, *more), more, address)


def meet(fleet: Fleet, verb: str, options: tuple[str, ...], more: tuple[str, ...], where: str) -> None:
    listener = fleet.potluck(verb, "--listen", *options, name=verb)
    with Listening(listener.pid) as sockets:
        token = listener.wait_for_text(rf"potluck {verb} (potluck\d+-\S+)", DEADLINE_S)[1]
        client = fleet.potluck(verb, token, *more, name="client")
        with Listening(client.pid) as its_sockets:
            status = client.wait(DEADLINE_S)
        listener.wait_for_text("connected to ", DEADLINE_S)
        listener.interrupt()
        listener.succeeds(DEADLINE_S)
    campaign.add(commands=2, looks=sockets.looks, sockets=len(sockets.all))
    name = f"{verb} --listen {' '.join(options)}"
    if status not in ((0, 1) if verb == "doctor" else (0,)):  # a doctor's 1: something on this box stops Potluck
        raise Trouble(f"the client of {name} ended with {status}: {client.tails()}")
    # If it listens at every address, a probe opens its extra ports at the one that the client connected to.
    allowed = {where, *local_addresses(), "127.0.0.1"} if where == "0.0.0.0" else {where}
    extra = len(sockets.all) - 1
    if not {address for address, _ in sockets.all} <= allowed or not 0 <= extra <= (0 if verb == "doctor" else 12):
        raise Trouble(f"{name} listened on {sorted(sockets.all)}")
    if where not in {address for address, _ in sockets.all}:
        raise Trouble(f"{name} never listened on {where}: {sorted(sockets.all)}")
    if any(address == "0.0.0.0" for address, _ in its_sockets.all) or (verb == "probe" and its_sockets.all):
        raise Trouble(f"the client of {name} listened on {sorted(its_sockets.all)}")
    if left := still_listening(sockets.all | its_sockets.all):
        raise Trouble(f"{name} has ended and somebody still listens on {left}")


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


if __name__ == "__main__":
    campaign.run(attempt)
    sys.exit(campaign.end())
