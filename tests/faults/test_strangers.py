"""Strangers that connect to a host, in small: none is let in, no guest is kept out, and their cost is bounded."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import psutil
import pytest
import zmq
from zmq.utils import garbage

from potluck.errors import NetworkError
from potluck.wire import admission, gate, transport
from potluck.wire.files import Room
from potluck.wire.frames import MAX_FRAME_BYTES, PART_BYTES
from potluck.wire.keys import new_keys
from potluck.wire.token import Token, decode
from potluck.wire.transport import ClosedAtOnceError, GuestSocket, HostSocket
from support.fleet import JOB, Fleet
from support.leaks import leaks, needles
from support.processes import SOURCE
from support.rogue import Rogue
from support.strangers import (
    ACCEPTED,
    MANNERS,
    Crowd,
    Strangers,
    ZmqKnock,
    a_frame_of,
    files_in_a_burst,
    greeting,
    held,
    record,
    until,
)

KEYS = new_keys()


@pytest.fixture(scope="module", autouse=True)
def _memory_of_sent_frames_is_freed() -> None:
    """Start what pyzmq keeps for the whole process (a thread and a context), so that no test seems to leak it."""
    if not garbage.gc.is_alive():
        garbage.gc.start()


class Host:
    """A host in a thread that answers every message; one that is still loading its data answers none."""

    def __init__(self, *, serves: bool = True) -> None:
        self.denied: list[str] = []
        self.received = 0
        self.socket = HostSocket(bind="127.0.0.1", port=0, keys=KEYS, on_denied=self.denied.append)
        self.token = Token(
            addresses=("127.0.0.1",),
            port=self.socket.port,
            host_public=KEYS.public,
            guest_secret=KEYS.guest_secret,
        )
        self._stop = not serves
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop:
            for peer, _ in self.socket.receive(0.2):
                self.received += 1
                self.socket.send(peer, [b"yes"])

    def close(self) -> None:
        self._stop = True
        self.socket.wake()
        self._thread.join(5)
        self.socket.close()


@contextlib.contextmanager
def host_with(
    monkeypatch: pytest.MonkeyPatch, *, most: int = 1024, batch: int | None = None, serves: bool = True
) -> Iterator[Host]:
    room = Room(waiting=most, inside=64, batch=batch or most // 4)
    monkeypatch.setattr(transport, "connection_room", lambda limit, in_use: room)
    host = Host(serves=serves)
    try:
        yield host
    finally:
        host.close()


def crowd_at(host: Host, count: int, *manners: str) -> AbstractContextManager[Crowd]:
    return held(Crowd(host.socket.port, count, frame_bytes=PART_BYTES, manners=manners or MANNERS))


def joined(host: Host, tries: int = 1) -> GuestSocket:
    """A guest that has been answered; as a guest's link does, it may try again."""
    for left in reversed(range(tries)):
        guest = GuestSocket(host.token, connect_timeout_s=10)
        try:
            guest.handshake(10)
            asks(guest)
            return guest
        except (NetworkError, AssertionError):
            guest.close()
            if not left:
                raise
    raise AssertionError


def asks(guest: GuestSocket) -> None:
    assert guest.send_control([b"PLK?"])
    assert guest.send_data([b"PLK?"])
    deadline, got = time.monotonic() + 10, 0
    while got < 2 and guest.connected and time.monotonic() < deadline:
        got += len(guest.receive(0.5))
    assert got == 2


def test_every_kind_of_stranger_is_refused_and_a_guest_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    with host_with(monkeypatch) as host:
        recordings = record(host.token, "recorded")
        assert len(recordings) == 2
        guest = joined(host)
        before = host.received
        strangers = Strangers(port=host.socket.port, host_public=KEYS.public, recordings=recordings, seed=4)
        for number in range(2 * len(strangers.kinds)):
            assert strangers.knock(number) != ACCEPTED
        strangers.close()
        assert sum(strangers.outcomes.values()) == 2 * len(strangers.kinds) >= 50
        assert host.received == before, "a stranger's message came through"
        asks(guest)
        # Bare connections are no news; most of the others are.
        assert until(lambda: len(host.denied) >= len(strangers.kinds))
        guest.close()


def test_a_stranger_who_is_let_in_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The strangers' own eyes: with the guests' key, one of them is accepted."""
    with host_with(monkeypatch) as host, zmq.Context() as context:
        keys = {
            int(zmq.CURVE_SERVERKEY): KEYS.public,
            int(zmq.CURVE_PUBLICKEY): KEYS.guest_public,
            int(zmq.CURVE_SECRETKEY): KEYS.guest_secret,
        }
        assert ZmqKnock(context, keys)(host.socket.port) == ACCEPTED


@pytest.mark.parametrize("manner", MANNERS)
def test_a_guest_joins_past_connections_that_are_held(monkeypatch: pytest.MonkeyPatch, manner: str) -> None:
    with host_with(monkeypatch) as host, crowd_at(host, 150, manner) as crowd:
        watch = host.socket._auth.watch
        assert until(lambda: len(watch._pending) >= 150), "the crowd is not there"
        guest = joined(host)
        assert crowd.held == 150
        asks(guest)
        guest.close()


def test_a_crowd_beyond_the_bound_is_closed_and_a_guest_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    with host_with(monkeypatch, most=100) as host, crowd_at(host, 250, "greeting", "silent") as crowd:
        pending = host.socket._auth.watch._pending
        assert until(lambda: pending.closed > 200), "nobody was closed"
        guest = joined(host, tries=10)
        out = pending.closed
        # From the same address as the crowd, and both of its connections younger than theirs: only having spoken
        # keeps it from being turned out.
        assert until(lambda: pending.closed > out + 400)
        assert guest.connected
        asks(guest)
        assert crowd.closed > 0
        assert until(lambda: "127.0.0.1" in host.denied), "nobody hears of the crowd"
        guest.close()


def test_a_guest_whose_connection_has_the_number_of_a_stranger_who_left_is_no_stranger(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In a flood a guest can be heard before the admission thread has seen the one before it leave."""
    with host_with(monkeypatch, serves=False) as host:
        watch = host.socket._auth.watch
        watch.close()  # its thread: what it would see is told by hand
        peers = {50: ("10.0.0.9", 1000)}
        monkeypatch.setattr(admission, "_peer", peers.get)
        watch._note([(admission.ACCEPTED, 50)])
        assert 50 in watch._pending
        peers[50] = ("10.0.0.2", 2000)
        watch.heard(50)
        watch._note([(admission.DISCONNECTED, 50), (admission.ACCEPTED, 50)])
        assert 50 not in watch._pending
        watch._note([(admission.DISCONNECTED, 50)])
        assert watch._spoke == {}


def test_a_guest_heard_before_its_number_was_seen_to_pass_to_it_is_no_stranger(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The stranger is noted when the number is the guest's already: the stranger's end is not the guest's."""
    with host_with(monkeypatch, serves=False) as host:
        watch = host.socket._auth.watch
        watch.close()  # its thread: what it would see is told by hand
        peers = {50: ("10.0.0.2", 2000)}
        monkeypatch.setattr(admission, "_peer", peers.get)
        watch._note([(admission.ACCEPTED, 50)])  # of a stranger who has left
        watch.heard(50, b"guest")
        watch._note([(admission.DISCONNECTED, 50), (admission.ACCEPTED, 50)])
        assert 50 not in watch._pending
        assert watch._names == {50: b"guest"}  # and it can be disconnected
        watch._note([(admission.DISCONNECTED, 50)])
        assert watch._spoke == {}
        # Another one at that number is a stranger again.
        peers[50] = ("10.0.0.2", 2001)
        watch._note([(admission.ACCEPTED, 50)])
        assert 50 in watch._pending


@pytest.mark.alone
def test_a_guest_that_was_crowded_out_is_not_told_for_certain_that_its_token_is_wrong(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """From the same address as the crowd it may be the oldest there; its link tries again after this error only."""
    # More than one batch: both of the guest's connections have room, however far apart they come.
    with host_with(monkeypatch, most=10, batch=8, serves=False) as host:
        pending = host.socket._auth.watch._pending
        guest = GuestSocket(host.token, connect_timeout_s=10)
        assert until(lambda: len(pending) >= 2)
        with crowd_at(host, 24, "greeting"), pytest.raises(ClosedAtOnceError):
            guest.handshake(5)
        guest.close()


@pytest.mark.skipif(os.name != "posix", reason="Windows counts handles, not descriptors")
def test_a_host_that_does_not_receive_yet_is_not_filled_up(monkeypatch: pytest.MonkeyPatch) -> None:
    files = psutil.Process().num_fds()
    with host_with(monkeypatch, most=40, serves=False) as host, crowd_at(host, 200, "greeting") as crowd:
        assert until(lambda: host.socket._auth.watch._pending.closed > 60)
        most = 0
        for _ in range(20):
            # The crowd's own 200 are of this process too.
            most = max(most, psutil.Process().num_fds() - files - crowd.held)
            time.sleep(0.02)
        assert most < 40 + 64 + 40, "more than the bounds and what was there already"


@pytest.mark.parametrize("size", [MAX_FRAME_BYTES, PART_BYTES + 2048])
def test_a_stranger_cannot_announce_more_than_a_part(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    with host_with(monkeypatch) as host, socket.create_connection(("127.0.0.1", host.socket.port)) as stranger:
        stranger.sendall(greeting() + a_frame_of(size))
        stranger.settimeout(3)
        with contextlib.suppress(ConnectionError):
            while stranger.recv(4096):
                pass  # its greeting, and then its end; a TimeoutError would be a host that believes it


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such limit")
def test_a_low_limit_of_files_is_raised_or_told() -> None:
    script = """
import json, resource, sys
soft, hard = map(int, sys.argv[1:])
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
from potluck.wire.keys import new_keys
from potluck.wire.transport import HostSocket
host = HostSocket(bind="127.0.0.1", port=0, keys=new_keys())
print(json.dumps([resource.getrlimit(resource.RLIMIT_NOFILE)[0], host._auth.watch._pending.most, host.warning]))
host.close()
"""
    found = []
    for soft, hard in ((256, 4096), (256, 1024), (256, 256)):
        done = subprocess.run(
            [sys.executable, "-c", script, str(soft), str(hard)],
            env={**os.environ, "PYTHONPATH": str(SOURCE)},
            capture_output=True,
            text=True,
            timeout=30,
            check=True,
        )
        found.append(json.loads(done.stdout))
    (limit, most, warning), (limit_2, most_2, warning_2), (limit_3, most_3, _) = found
    assert (limit, most, warning) == (4096, 1024, None)
    assert limit_2 == 1024
    assert 250 < most_2 < 512
    assert "only 1024 files" in warning_2
    assert "ulimit -n 8192" in warning_2
    assert limit_3 == 256
    assert 32 < most_3 < 128


LISTEN = """
from potluck.wire.keys import new_keys
from potluck.wire.transport import HostSocket
listening = HostSocket(bind="127.0.0.1", port=0, keys=new_keys())
port = listening.port
"""


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere libzmq accepts whatever comes while Python is busy")
def test_a_burst_while_python_is_busy_leaves_the_files_of_the_training() -> None:
    assert files_in_a_burst(LISTEN) <= 128, "half of them are the training's"


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere libzmq accepts by itself")
def test_a_host_that_nobody_closed_ends_in_order() -> None:
    script = (
        "import socket\nfrom potluck.wire.keys import new_keys\nfrom potluck.wire.transport import HostSocket\n"
        "host = HostSocket(bind='127.0.0.1', port=0, keys=new_keys())\n"
        "socket.create_connection(('127.0.0.1', host.port), timeout=5)\n"
    )
    env = {**os.environ, "PYTHONPATH": str(SOURCE)}
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_run_with_strangers_and_a_rogue_leaks_no_secret(tmp_path: Path) -> None:
    """A real host and a real guest: strangers and a rogue come by, the steps stay full, nothing is told."""
    with Fleet(tmp_path) as fleet:
        until_file = tmp_path / "enough"
        host = fleet.host(
            JOB, "--wait-for", "1", "--device", "paced:0.002", arguments=["--until", until_file, "--width", 32]
        )
        guest = fleet.guest("ann", "--device", "paced:0.002")
        token = decode((fleet.folder / "token").read_text())
        fleet.wait_for_step(host, 3)
        recordings = record(token, "recorded")
        strangers = Strangers(port=token.port, host_public=token.host_public, recordings=recordings, seed=7)
        for number in range(len(strangers.kinds)):
            assert strangers.knock(number) != ACCEPTED
        strangers.close()
        rogue = Rogue(token, 7, b"{}")
        for _ in range(300):
            rogue.say()
        rogue.close()
        assert rogue.heard["refuse"] > 5
        reached = fleet.step_reached()
        fleet.wait_for_step(host, reached + 3)
        until_file.touch()
        host.succeeds(deadline_s=30)
        guest.succeeds(deadline_s=30)
        fleet.assert_every_step_is_full(global_batch=32)
        assert fleet.events("guest_lost", "ann") == []
        assert {e["machine"] for e in fleet.events("guest_hello")} >= {"ann", "recorded"}
        assert len(fleet.events("guest_hello", "recorded")) == 1, "a replay was let in"
        assert fleet.events("refused_stranger")
        outputs = [path for process in (host, guest) for path in (process.out, process.err)]
        assert leaks(fleet.folder, outputs) == []
        assert_leaks_are_found(fleet.folder)


def assert_leaks_are_found(run: Path) -> None:
    """A search that finds nothing must be able to find something."""
    spoiled = run / "spoiled.log"
    for needle in list(needles(run))[:: len(needles(run)) // 5]:
        spoiled.write_bytes(b"before " + needle + b" after\n")
        assert leaks(run), needle
    spoiled.unlink()


def test_without_proc_a_host_listens_as_on_other_systems(monkeypatch: pytest.MonkeyPatch) -> None:
    def hidden(path: Path) -> Iterator[Path]:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(gate.Path, "iterdir", hidden)
    monkeypatch.setattr(gate, "_FOUND_S", 0.05)
    with host_with(monkeypatch) as host:
        joined(host).close()
