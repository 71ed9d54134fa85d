"""The shaping proxy: what its policies decide, by given times, and what they do to real connections."""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec
import psutil
import pytest

from potluck.checked import build
from potluck.errors import ConfigError, NetworkError
from potluck.lab import flow as flow_module
from potluck.lab import proxy as proxy_module
from potluck.lab.proxy import Proxy, ProxyProcess
from potluck.lab.shaping import (
    CATCH_UP_S,
    IDLE_CREDIT_S,
    LEAST_ROOM_BYTES,
    MOST_QUANTUM_BYTES,
    MOST_ROOM_BYTES,
    Bucket,
    Fault,
    LinkSpec,
    Policy,
)

MBIT = 125_000.0
"""Bytes a second."""
PATIENCE_S = 10.0


# -- decisions, by given times -------------------------------------------------------------------------------


def test_a_bucket_spends_the_links_time() -> None:
    bucket = Bucket(1000.0)
    first = bucket.take(100, 50.0, 1000.0, since=50.0)
    assert first == pytest.approx(50.0 - IDLE_CREDIT_S + 0.1)
    assert bucket.take(100, first, 1000.0, since=50.0) == pytest.approx(first + 0.1)


def test_idle_time_is_lost() -> None:
    bucket = Bucket(1000.0)
    bucket.take(100, 50.0, 1000.0, since=50.0)
    assert bucket.take(100, 60.0, 1000.0, since=60.0) == pytest.approx(60.0 - IDLE_CREDIT_S + 0.1)


def test_what_was_there_while_nobody_looked_has_been_sent() -> None:
    bucket = Bucket(1000.0)
    free_at = bucket.take(10, 50.0, 1000.0, since=50.0)
    late = free_at + CATCH_UP_S / 2
    assert bucket.take(10, late, 1000.0, since=50.0) == pytest.approx(free_at + 0.01)
    very_late = free_at + 7.0
    assert bucket.take(10, very_late, 1000.0, since=50.0) == pytest.approx(very_late - CATCH_UP_S + 0.01)


@pytest.mark.parametrize(("mbit", "most_s"), [(1, 0.0045), (2, 0.0025), (8, 0.0025), (100, 0.0025), (1000, 0.0025)])
def test_a_chunk_takes_little_of_the_links_time(mbit: float, most_s: float) -> None:
    policy = Policy(LinkSpec(name="a", rate_bytes_per_s=mbit * MBIT), "up")
    assert policy.quantum_bytes(0.0) / (mbit * MBIT) <= most_s
    assert LEAST_ROOM_BYTES <= policy.room_bytes(0.0) <= max(LEAST_ROOM_BYTES, 0.11 * mbit * MBIT)


def test_a_link_may_be_slower_up_than_down() -> None:
    spec = LinkSpec(name="a", rate_bytes_per_s=5000.0, up_rate_bytes_per_s=1000.0)
    up, down = (Policy(spec, direction).due(1000, now=10.0, since=10.0) for direction in ("up", "down"))
    assert up - down == pytest.approx(0.8)


def test_room_is_bounded_whatever_the_rate_and_the_latency() -> None:
    for rate in (None, 1e12):
        policy = Policy(LinkSpec(name="a", rate_bytes_per_s=rate, latency_s=50.0), "up")
        assert policy.quantum_bytes(0.0) == MOST_QUANTUM_BYTES
        assert policy.room_bytes(0.0) == MOST_ROOM_BYTES


def test_two_policies_share_a_bucket_and_keep_their_own() -> None:
    shared = Bucket(1000.0)
    one, two = (Policy(LinkSpec(name=n, rate_bytes_per_s=2000.0), "up", shared) for n in "ab")
    one.due(1000, 50.0, 50.0)
    assert one.opens_at(50.0) == two.opens_at(50.0) == pytest.approx(51.0, abs=0.01)
    assert one.quantum_bytes(50.0) == 512
    two.due(1000, 51.0, 51.0)
    assert one.opens_at(51.0) == pytest.approx(52.0, abs=0.02)


def test_faults_hold_for_their_time_and_their_direction() -> None:
    policy = Policy(LinkSpec(name="a", rate_bytes_per_s=1e6, latency_s=0.1), "up")
    assert policy.edited(b"abc", 0.0) == (b"abc", False)
    policy.add_faults(
        [
            Fault(kind="delay", at_s=1, for_s=1, amount=3.0),
            Fault(kind="limit", at_s=3, for_s=1, amount=100.0),
            Fault(kind="blackhole", at_s=5, for_s=1),
            Fault(kind="half-open", at_s=7, for_s=1, direction="up"),
            Fault(kind="truncate", at_s=9, for_s=1),
            Fault(kind="flip", at_s=11, for_s=1),
            Fault(kind="flip", at_s=13, for_s=1, direction="down"),
        ],
        100.0,
    )
    small = {"abs": 0.01}
    assert policy.due(10, 100.5, 100.5) == pytest.approx(100.6, **small)
    assert policy.due(10, 101.5, 101.5) == pytest.approx(104.6, **small)
    assert policy.due(100, 103.5, 103.5) == pytest.approx(104.6, **small)
    assert policy.held_until(104.9) < 104.9
    assert policy.held_until(105.5) == policy.opens_at(105.5) == 106.0
    assert [policy.vanishes(t) for t in (106.9, 107.0, 108.0)] == [False, True, False]
    assert policy.edited(b"abcd", 109.5) == (b"ab", True)
    assert policy.edited(b"a", 109.5) == (b"", True)
    flipped, ends = policy.edited(b"abcd", 111.5)
    assert not ends
    assert sum(bin(a ^ b).count("1") for a, b in zip(flipped, b"abcd")) == 1
    assert policy.edited(b"abcd", 113.5) == (b"abcd", False)


@pytest.mark.parametrize(
    ("table", "part"),
    [
        ({"kind": "limt", "at_s": 1, "for_s": 1}, "limt"),
        ({"kind": "limit", "at_s": 1, "for_s": 1}, "amount"),
        ({"kind": "blackhole", "at_s": 1}, "no duration"),
        ({"kind": "blackhole", "at_s": -1, "for_s": 1}, "-1"),
        ({"kind": "blackhole", "for_s": 1}, "at_s"),
        ({"kind": "blackhole", "at_s": 1, "for": 1}, "for"),
    ],
)
def test_a_wrong_fault_is_named(table: dict[str, object], part: str) -> None:
    with pytest.raises(ConfigError, match=part) as caught:
        build(Fault, table)
    assert caught.value.hint


def test_a_link_survives_json_and_a_wrong_one_does_not() -> None:
    link = LinkSpec(name="a", rate_bytes_per_s=1e6, faults=(Fault(kind="reset", at_s=1.0),))
    assert msgspec.json.decode(msgspec.json.encode(link), type=LinkSpec) == link
    with pytest.raises(ConfigError, match="rate"):
        build(LinkSpec, {"name": "a", "rate": 3})
    with pytest.raises(ConfigError, match="-3"):
        build(LinkSpec, {"name": "a", "rate_bytes_per_s": -3})


# -- real connections ----------------------------------------------------------------------------------------


@contextlib.contextmanager
def running(*links: LinkSpec, shared: LinkSpec | None = None) -> Iterator[Proxy]:
    proxy = Proxy(links, shared=shared)
    thread = threading.Thread(target=proxy.run)
    thread.start()
    try:
        yield proxy
    finally:
        proxy.stop()
        thread.join(PATIENCE_S)
        assert not thread.is_alive()


@contextlib.contextmanager
def connections(proxy: Proxy | ProxyProcess, *links: str) -> Iterator[list[tuple[socket.socket, socket.socket]]]:
    """A connection over each of the links: whoever connected, and the target's end."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        listener.settimeout(PATIENCE_S)
        ports = {
            link: proxy.open(link, listener.getsockname())
            if isinstance(proxy, ProxyProcess)
            else proxy.ask(lambda link=link: proxy.open(link, listener.getsockname()))  # type: ignore[misc]
            for link in set(links)
        }
        pairs = []
        for link in links:
            near = stack.enter_context(socket.create_connection(("127.0.0.1", ports[link]), PATIENCE_S))
            far = stack.enter_context(listener.accept()[0])
            far.settimeout(PATIENCE_S)
            pairs.append((near, far))
        yield pairs


@contextlib.contextmanager
def streaming(*senders: socket.socket, drains: Sequence[socket.socket] = ()) -> Iterator[None]:
    """Each sends as much as it can; what comes out of `drains` is thrown away."""
    stop = threading.Event()

    def send(sender: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while not stop.is_set():
                sender.sendall(bytes(64 * 1024))

    def drain(receiver: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while not stop.is_set() and receiver.recv(1 << 16):
                pass

    threads = [threading.Thread(target=send, args=(s,)) for s in senders]
    threads += [threading.Thread(target=drain, args=(r,)) for r in drains]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for sender in senders:
            with contextlib.suppress(OSError):
                sender.shutdown(socket.SHUT_RDWR)
        for thread in threads:
            thread.join(PATIENCE_S)


def rates(receivers: list[socket.socket], began: float, for_s: float) -> list[float]:
    """Bytes a second that each has received since a time at which nothing had been sent.

    Whatever else the machine does, that can only be too little: bytes come late, never early.
    """
    counts = [0] * len(receivers)
    ends = [began] * len(receivers)

    def receive(index: int) -> None:
        while time.monotonic() < began + for_s:
            counts[index] += len(receivers[index].recv(1 << 20))
            ends[index] = time.monotonic()

    threads = [threading.Thread(target=receive, args=(i,)) for i in range(len(receivers))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(for_s + PATIENCE_S)
    return [count / (end - began) for count, end in zip(counts, ends)]


def all_of(receiver: socket.socket, count: int) -> bytes:
    received = bytearray()
    while len(received) < count and (part := receiver.recv(1 << 16)):
        received += part
    return bytes(received)


def refused(address: tuple[str, int]) -> bool:
    """Whether whoever connects there is reset, at once or while it connects."""
    try:
        with socket.create_connection(address, PATIENCE_S) as near:
            near.recv(1)
    except ConnectionError:
        return True
    return False


def soon(found: Callable[[], object]) -> bool:
    deadline = time.monotonic() + PATIENCE_S
    while not found() and time.monotonic() < deadline:
        time.sleep(0.01)
    return bool(found())


@pytest.mark.parametrize("mbit", [8.0, 80.0])
def test_a_link_has_its_rate(mbit: float) -> None:
    with running(LinkSpec(name="a", rate_bytes_per_s=mbit * MBIT)) as proxy, connections(proxy, "a") as pairs:
        ((near, far),) = pairs
        began = time.monotonic()
        with streaming(near):
            (rate,) = rates([far], began, 2.0)
    assert 0.7 * mbit * MBIT < rate < 1.05 * mbit * MBIT


def test_both_directions_have_the_whole_rate_and_latency_costs_none_of_it() -> None:
    link = LinkSpec(name="a", rate_bytes_per_s=8 * MBIT, latency_s=0.1)
    with running(link) as proxy, connections(proxy, "a", "a") as pairs:
        (near, far), (other_near, other_far) = pairs
        began = time.monotonic()
        with streaming(near, other_far):
            found = rates([far, other_near], began, 1.5)
    assert all(0.65 * 8 * MBIT < rate < 1.05 * 8 * MBIT for rate in found), found


def test_links_share_the_one_behind_them_evenly() -> None:
    links = [LinkSpec(name=name, rate_bytes_per_s=16 * MBIT) for name in "abc"]
    shared = LinkSpec(name="all", rate_bytes_per_s=9 * MBIT)
    with running(*links, shared=shared) as proxy, connections(proxy, "a", "b", "c") as pairs:
        began = time.monotonic()
        with streaming(*(near for near, _ in pairs)):
            found = rates([far for _, far in pairs], began, 1.5)
    assert 0.7 * 9 * MBIT < sum(found) < 1.05 * 9 * MBIT
    assert max(found) < 1.3 * min(found)


def round_trips(near: socket.socket, far: socket.socket, count: int) -> list[float]:
    def echo() -> None:
        for _ in range(count):
            far.sendall(far.recv(100))

    thread = threading.Thread(target=echo)
    thread.start()
    times = []
    for _ in range(count):
        began = time.monotonic()
        near.sendall(b"are you there?")
        near.recv(100)
        times.append(time.monotonic() - began)
    thread.join(PATIENCE_S)
    return times


def test_a_small_message_does_not_wait_behind_a_large_one() -> None:
    """A heartbeat beside a thin link that is full both ways. A chunk of 64 KiB would take 0.26 s each way."""
    with running(LinkSpec(name="a", rate_bytes_per_s=2 * MBIT)) as proxy, connections(proxy, "a", "a") as pairs:
        (near, far), (small_near, small_far) = pairs
        with streaming(near, far, drains=(near, far)):
            assert soon(lambda: proxy.counters[0] > 64 * 1024)
            times = round_trips(small_near, small_far, 20)
    assert statistics.median(times) < 0.12, times
    assert max(times) < 2.0, times  # no connection is forgotten


def test_latency_is_added_each_way() -> None:
    link, shared = (LinkSpec(name=n, latency_s=s) for n, s in (("a", 0.05), ("all", 0.02)))
    with running(link, shared=shared) as proxy, connections(proxy, "a") as pairs:
        times = round_trips(*pairs[0], 8)
    assert min(times) >= 0.14
    assert statistics.median(times) < 0.25, times


@pytest.mark.parametrize(
    "link",
    [LinkSpec(name="a"), LinkSpec(name="a", rate_bytes_per_s=100 * MBIT, latency_s=0.02)],
    ids=["unshaped", "shaped"],
)
def test_bytes_arrive_as_they_were_sent_and_are_counted(link: LinkSpec) -> None:
    up, down = os.urandom(2_000_003), os.urandom(300_001)
    with running(LinkSpec(name="other"), link) as proxy, connections(proxy, "a") as pairs:
        ((near, far),) = pairs
        senders = [threading.Thread(target=end.sendall, args=(data,)) for end, data in ((near, up), (far, down))]
        for sender in senders:
            sender.start()
        assert hashlib.sha256(all_of(far, len(up))).digest() == hashlib.sha256(up).digest()
        assert all_of(near, len(down)) == down
        for sender in senders:
            sender.join(PATIENCE_S)
        assert list(proxy.counters) == [0, 0, len(up), len(down)]


def test_a_half_closed_connection_still_carries_the_other_way() -> None:
    with running(LinkSpec(name="a", rate_bytes_per_s=8 * MBIT)) as proxy, connections(proxy, "a") as pairs:
        ((near, far),) = pairs
        near.sendall(b"question" * 1000)
        near.shutdown(socket.SHUT_WR)
        assert all_of(far, 1 << 20) == b"question" * 1000  # to its end
        far.sendall(b"answer" * 1000)
        assert all_of(near, 6000) == b"answer" * 1000
        far.close()
        assert near.recv(1) == b""
        assert soon(lambda: not proxy.flow.connections)


def test_a_reset_is_passed_on_after_what_was_sent_before_it() -> None:
    with running(LinkSpec(name="a", rate_bytes_per_s=8 * MBIT, latency_s=0.05)) as proxy:
        with connections(proxy, "a") as pairs:
            ((near, far),) = pairs
            near.sendall(bytes(30_000))
            assert soon(lambda: proxy.counters[0] == 30_000)
            flow_module.close_socket(near, reset=True)
            assert len(all_of(far, 30_000)) == 30_000
            with pytest.raises(ConnectionResetError):
                far.recv(1)
        assert soon(lambda: not proxy.flow.connections)


def test_a_target_that_is_not_there_resets_whoever_connected() -> None:
    with socket.create_server(("127.0.0.1", 0)) as gone:
        address = gone.getsockname()
    with running(LinkSpec(name="a")) as proxy:
        port = proxy.ask(lambda: proxy.open("a", address))
        assert refused(("127.0.0.1", port))
        assert soon(lambda: not proxy.flow.connections)


def test_a_receiver_that_does_not_read_stops_the_sender() -> None:
    link = LinkSpec(name="a", rate_bytes_per_s=400 * MBIT)
    with running(link) as proxy, connections(proxy, "a") as pairs:
        ((near, far),) = pairs
        near.setblocking(False)
        block, sent, progress_at = os.urandom(1 << 16), 0, time.monotonic()
        while time.monotonic() < progress_at + 0.5:
            try:
                sent += near.send(block[sent % len(block) :])
                progress_at = time.monotonic()
            except BlockingIOError:
                time.sleep(0.01)
        room = proxy.flow.buffered_bytes
        assert 0 < room <= 0.1 * 400 * MBIT + MOST_QUANTUM_BYTES
        assert sent - room < 24e6  # in buffers of the system
        assert all_of(far, sent) == (block * (sent // len(block) + 1))[:sent]
        deadline = time.monotonic() + 5.0
        while proxy.flow.buffered_bytes and time.monotonic() < deadline:
            time.sleep(0.01)  # its thread counts after it has sent
        assert proxy.flow.buffered_bytes == 0


def test_one_connection_too_many_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proxy_module, "MOST_CONNECTIONS", 2)
    with running(LinkSpec(name="a")) as proxy, connections(proxy, "a", "a") as pairs:
        assert refused(pairs[0][0].getpeername())
        assert proxy.refused == 1
        assert round_trips(*pairs[1], 1)


def test_all_pipes_together_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flow_module, "MOST_BUFFERED_BYTES", 100_000)
    with (
        running(LinkSpec(name="a", latency_s=0.1)) as proxy,
        connections(proxy, "a", "a", "a") as pairs,
        streaming(*(near for near, _ in pairs)),
    ):
        assert soon(lambda: proxy.flow.buffered_bytes >= 100_000)
        highest = max(proxy.flow.buffered_bytes for _ in range(50) if not time.sleep(0.005))
        assert all(len(all_of(far, 200_000)) >= 200_000 for _, far in pairs)
    assert highest <= 100_000 + 3 * MOST_QUANTUM_BYTES


# -- faults on real connections ------------------------------------------------------------------------------


def test_a_blackhole_holds_everything_and_loses_nothing() -> None:
    with running(LinkSpec(name="a")) as proxy, connections(proxy, "a") as pairs:
        ((near, far),) = pairs
        proxy.ask(lambda: proxy.add_faults("a", [Fault(kind="blackhole", at_s=0, for_s=0.5)]))
        began = time.monotonic()
        near.sendall(b"hello")
        near.shutdown(socket.SHUT_WR)
        port = near.getpeername()[1]
        with socket.create_connection(("127.0.0.1", port), PATIENCE_S):  # is not let through meanwhile either
            assert all_of(far, 100) == b"hello"
            assert time.monotonic() - began > 0.45
        assert proxy.counters[0] == 5


def test_a_reset_strikes_those_that_are_there_and_those_that_come() -> None:
    with running(LinkSpec(name="a"), LinkSpec(name="b")) as proxy, connections(proxy, "a", "b") as pairs:
        (near, far), other = pairs
        address = near.getpeername()
        proxy.ask(lambda: proxy.add_faults("a", [Fault(kind="reset", at_s=0.05, for_s=5)]))
        for end in (near, far):
            with pytest.raises(ConnectionResetError):
                end.recv(1)
        assert refused(address)
        assert round_trips(*other, 2)


@pytest.mark.timeout(30)
def test_half_open_swallows_one_way_with_its_end() -> None:
    fault = Fault(kind="half-open", at_s=0, for_s=0.4, direction="up")
    with running(LinkSpec(name="a")) as proxy, connections(proxy, "a", "a") as pairs:
        (near, far), (quiet_near, quiet_far) = pairs
        proxy.ask(lambda: proxy.add_faults("a", [fault]))
        near.sendall(b"hello")
        assert soon(lambda: proxy.counters[0] == 5)
        far.sendall(b"still here")
        assert all_of(near, 10) == b"still here"
        time.sleep(0.5)
        near.sendall(b"more")  # the connection has lost bytes: it stays so
        assert soon(lambda: proxy.counters[0] == 9)
        flow_module.close_socket(near, reset=True)
        far.settimeout(0.3)
        with pytest.raises(TimeoutError):
            far.recv(1)
        far.sendall(b"anybody?")
        assert round_trips(quiet_near, quiet_far, 2)  # had nothing to lose
        far.close()
        assert soon(lambda: len(proxy.flow.connections) == 1)


def test_truncate_ends_a_stream_in_the_middle_of_a_message() -> None:
    with running(LinkSpec(name="a")) as proxy, connections(proxy, "a") as pairs:
        ((near, far),) = pairs
        proxy.ask(lambda: proxy.add_faults("a", [Fault(kind="truncate", at_s=0, for_s=5, direction="up")]))
        near.sendall(b"0123456789")
        assert all_of(far, 100) == b"01234"


def test_flip_changes_one_bit() -> None:
    with running(LinkSpec(name="a")) as proxy, connections(proxy, "a") as pairs:
        ((near, far),) = pairs
        proxy.ask(lambda: proxy.add_faults("a", [Fault(kind="flip", at_s=0, for_s=5, direction="down")]))
        far.sendall(b"0123456789")
        near.sendall(b"0123456789")
        assert all_of(far, 10) == b"0123456789"
        received = all_of(near, 10)
        assert sum(bin(a ^ b).count("1") for a, b in zip(received, b"0123456789")) == 1


def test_delay_and_limit_end_again() -> None:
    faults = [
        Fault(kind="delay", at_s=0, for_s=0.5, amount=0.2),
        Fault(kind="limit", at_s=1, for_s=60, amount=20_000),
    ]
    with running(LinkSpec(name="a")) as proxy, connections(proxy, "a") as pairs:
        proxy.ask(lambda: proxy.add_faults("a", faults))
        began = time.monotonic()
        assert min(round_trips(*pairs[0], 1)) >= 0.4
        while time.monotonic() < began + 0.55:
            time.sleep(0.01)
        assert min(round_trips(*pairs[0], 3)) < 0.2
        while time.monotonic() < began + 1.05:
            time.sleep(0.01)
        ((near, far),) = pairs
        began = time.monotonic()
        near.sendall(bytes(10_000))
        all_of(far, 10_000)
        assert time.monotonic() - began > 0.45


# -- a process of its own ------------------------------------------------------------------------------------


def test_a_proxy_process_takes_routes_and_faults_and_counts(tmp_path: Path) -> None:
    links = [LinkSpec(name="other"), LinkSpec(name="a", rate_bytes_per_s=80 * MBIT)]
    with ProxyProcess(links, folder=tmp_path) as proxy:
        with connections(proxy, "a") as pairs:
            ((near, far),) = pairs
            near.sendall(bytes(100_000))
            assert len(all_of(far, 100_000)) == 100_000
            far.sendall(bytes(70))
            assert len(all_of(near, 70)) == 70
            assert proxy.traffic("a") == (100_000, 70)
            assert proxy.traffic("other") == (0, 0)
            proxy.add_faults("a", [Fault(kind="reset", at_s=0)])
            with pytest.raises(ConnectionResetError):
                near.recv(1)
        with pytest.raises(NetworkError, match="no link 'nobody'"):
            proxy.open("nobody", ("127.0.0.1", 1))
        process = psutil.Process(proxy._process.pid)
    assert not process.is_running()
    assert proxy.traffic("a") == (100_000, 70)


def test_a_proxy_process_that_is_gone_says_so(tmp_path: Path) -> None:
    with ProxyProcess([LinkSpec(name="a")], folder=tmp_path) as proxy:
        psutil.Process(proxy._process.pid).kill()
        for _ in range(2):
            with pytest.raises(NetworkError, match="the proxy has ended"):
                proxy.open("a", ("127.0.0.1", 1))


OWNER = """
import sys, time
from pathlib import Path
from potluck.lab.proxy import ProxyProcess
from potluck.lab.shaping import LinkSpec
proxy = ProxyProcess([LinkSpec(name="a")], folder=Path(sys.argv[1]))
print(proxy._process.pid, flush=True)
time.sleep(60)
"""


def test_a_proxy_process_ends_with_its_owner(tmp_path: Path) -> None:
    source = Path(proxy_module.__file__).parents[2]
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(tmp_path)],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(source)},
    )
    try:
        assert owner.stdout is not None
        proxy = psutil.Process(int(owner.stdout.readline()))
        owner.kill()
        assert not psutil.wait_procs([proxy], 5.0)[1]
    finally:
        owner.kill()
        owner.communicate()
