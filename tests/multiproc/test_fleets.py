"""The contract of a fleet, on every implementation of it, with real processes."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from potluck.fleet.bootstrap import FleetNeeds
from potluck.fleet.interface import GuestFleet, GuestSettings
from potluck.fleet.local import LocalFleet
from potluck.fleet.ssh import SshFleet
from potluck.spec.fleet_file import NamedMachine
from potluck.wire.token import Token, encode
from support import ray_nodes, sshd
from support.processes import SOURCE, Processes

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not Path("/proc/self/cmdline").exists(), reason="looks at processes in /proc"),
]

LAUNCHER = """
import sys, time
from pathlib import Path
sys.path[:0] = {path!r}
from test_fleets import {make}
fleet = {make}(Path({folder!r}))
token = sys.stdin.readline().strip()
from potluck.fleet.interface import GuestSettings
fleet.start(fleet.machines()[0], token, GuestSettings(name={name!r}), Path({folder!r}) / "guest.log")
print("started", flush=True)
time.sleep(600)
"""


def make_local(folder: Path) -> GuestFleet:
    return LocalFleet()


def make_ssh(folder: Path) -> GuestFleet:
    """A fleet of the machine that `_machines` has made in this folder."""
    config = ("ssh", "-F", str(folder / "ssh" / "config"))
    machine = NamedMachine(ssh="laptop", name="laptop", python=sys.executable)
    return SshFleet([machine], FleetNeeds(imports={}), logs=folder, ssh=config)


def make_dask(folder: Path) -> GuestFleet:
    """A fleet of the cluster whose scheduler's address lies in this folder."""
    distributed = pytest.importorskip("distributed")
    from potluck.fleet.dask import DaskFleet

    client = distributed.Client((folder / "scheduler").read_text())

    class OwnClient(DaskFleet):
        def close(self) -> None:
            super().close()
            client.close()

    return OwnClient(client)


def make_ray(folder: Path) -> GuestFleet:
    """A fleet of the cluster whose address lies in this folder."""
    from potluck.fleet.ray import RayFleet

    return RayFleet((folder / "scheduler").read_text(), {"num_cpus": 0.5})  # two fleets share its CPU


FLEETS: dict[str, Callable[[Path], GuestFleet]] = {
    "local": make_local,
    "ssh": make_ssh,
    "dask": make_dask,
    "ray": make_ray,
}


@pytest.fixture(scope="module", params=list(FLEETS))
def engine(request: pytest.FixtureRequest) -> Iterator[tuple[str, str]]:
    """A kind of fleet, and the address of the cluster that is its engine."""
    if request.param == "ray":
        if (why := ray_nodes.why_not()) is not None:
            pytest.skip(why)
        import ray

        with ray_nodes.RayNodes() as nodes:
            nodes.add("head")
            yield request.param, nodes.address
            ray.shutdown()
        return
    if request.param != "dask":
        yield request.param, ""
        return
    distributed = pytest.importorskip("distributed")
    with distributed.LocalCluster(n_workers=1, threads_per_worker=1, dashboard_address="127.0.0.1:0") as cluster:
        yield request.param, cluster.scheduler_address


@pytest.fixture
def kind(engine: tuple[str, str], tmp_path: Path) -> Iterator[str]:
    kind, address = engine
    (tmp_path / "scheduler").write_text(address)
    if kind != "ssh":
        yield kind
        return
    if (why := sshd.why_not()) is not None:
        pytest.skip(why)
    with sshd.SshMachines(tmp_path / "ssh") as machines:
        machines.add("laptop")
        yield kind


@pytest.fixture
def fleet(kind: str, tmp_path: Path) -> Iterator[GuestFleet]:
    made = FLEETS[kind](tmp_path)
    yield made
    made.close()
    made.close()  # harmless


@pytest.fixture
def nobody() -> Iterator[str]:
    """The token of a host that takes connections and never answers: a guest waits for it, for 30 s."""
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen(8)
        port = silent.getsockname()[1]
        yield encode(Token(addresses=("127.0.0.1",), port=port, host_public=bytes(32), guest_secret=os.urandom(32)))


@pytest.fixture
def name() -> str:
    """Of a guest, by which its process is found."""
    return f"guest-{uuid.uuid4().hex[:12]}"


def processes_with(text: str) -> list[int]:
    """Processes whose arguments hold this."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if text.encode() in path.read_bytes() and int(path.parent.name) != os.getpid():
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


def wait_until(reached: Callable[[], object], seconds: float = 20.0) -> float:
    began = time.monotonic()
    while not reached():
        assert time.monotonic() - began < seconds, "not reached"
        time.sleep(0.05)
    return time.monotonic() - began


def test_a_guest_takes_part_and_its_token_is_seen_nowhere(fleet: GuestFleet, tmp_path: Path, name: str) -> None:
    with Processes(tmp_path / "host") as processes:
        small = ["--depth", "1", "--sequence", "32", "--batch-tokens", "256", "--steps", "20"]
        host = processes.potluck("host", *small, "--wait-for", "1", "--bind", "127.0.0.1", "--view", "plain")
        token = host.wait_for_text(r"potluck join (\S+)", 60)[1]
        log = tmp_path / "guest.log"
        guest = fleet.start(fleet.machines()[0], token, GuestSettings(name=name, threads=1), log)
        looks = 0
        while (ended := guest.wait(0.2)) is None:
            assert_in_no_process(token)
            looks += bool(processes_with(f"--name\0{name}"))
        host.succeeds(90)
        assert looks
        assert name in host.stdout()
        assert (ended.status, ended.why) == (0, "")
        assert guest.end() == ended  # harmless
        assert "joined" in log.read_text()
        # The host's own files are another matter.
        files = [p for p in tmp_path.rglob("*") if p.is_file() and tmp_path / "host" not in p.parents]
        assert not [path for path in files if token[-40:].encode() in path.read_bytes()]


def assert_in_no_process(token: str) -> None:
    """In no argument and no variable of any process."""
    secret = token[-40:].encode()
    for path in (*Path("/proc").glob("[0-9]*/cmdline"), *Path("/proc").glob("[0-9]*/environ")):
        try:
            assert secret not in path.read_bytes(), path
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue


def test_a_guest_is_ended(fleet: GuestFleet, tmp_path: Path, name: str, nobody: str) -> None:
    guest = fleet.start(fleet.machines()[0], nobody, GuestSettings(name=name), tmp_path / "guest.log")
    wait_until(lambda: processes_with(f"--name\0{name}"))
    ended = guest.end(3.0)
    assert ended.status not in (0, None)
    assert ended.why
    assert not processes_with(f"--name\0{name}")


def test_one_that_fails_says_why(fleet: GuestFleet, tmp_path: Path) -> None:
    guest = fleet.start(fleet.machines()[0], "potluck3-nonsense", GuestSettings(name="x"), tmp_path / "guest.log")
    ended = guest.wait(30)
    assert ended is not None
    assert ended.status == 2
    assert "token" in ended.why
    assert "nonsense" not in ended.why


def test_closing_a_fleet_ends_its_guests(kind: str, tmp_path: Path, name: str, nobody: str) -> None:
    fleet = FLEETS[kind](tmp_path)
    guest = fleet.start(fleet.machines()[0], nobody, GuestSettings(name=name), tmp_path / "guest.log")
    assert guest.wait(0.0) is None
    wait_until(lambda: bool(processes_with(name)))
    fleet.close()
    assert guest.wait(0.0) is not None
    wait_until(lambda: not processes_with(name), 3)


def test_two_launchers_on_one_machine_do_not_disturb_each_other(
    kind: str, fleet: GuestFleet, tmp_path: Path, name: str, nobody: str
) -> None:
    other = FLEETS[kind](tmp_path)
    guests = [
        made.start(made.machines()[0], nobody, GuestSettings(name=f"{name}-{n}"), tmp_path / f"{n}.log")
        for n, made in enumerate((fleet, other))
    ]
    wait_until(lambda: all(processes_with(f"--name\0{name}-{n}") for n in range(2)))
    other.close()
    assert guests[1].wait(0.0) is not None
    assert guests[0].wait(0.5) is None
    assert processes_with(f"--name\0{name}-0")


def test_a_guest_does_not_outlive_a_killed_launcher(kind: str, tmp_path: Path, name: str, nobody: str) -> None:
    path = [str(Path(__file__).parent), str(Path(__file__).parents[1]), str(SOURCE)]
    text = LAUNCHER.format(path=path, make=FLEETS[kind].__name__, folder=str(tmp_path), name=name)
    launcher = subprocess.Popen([sys.executable, "-c", text], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert launcher.stdin is not None
    assert launcher.stdout is not None
    try:
        launcher.stdin.write(nobody.encode() + b"\n")
        launcher.stdin.flush()
        assert launcher.stdout.readline() == b"started\n"
        wait_until(lambda: processes_with(f"--name\0{name}"))
    finally:
        launcher.send_signal(signal.SIGKILL)
        launcher.wait()
        launcher.stdin.close()
        launcher.stdout.close()
    wait_until(lambda: not processes_with(f"--name\0{name}"), 10)
