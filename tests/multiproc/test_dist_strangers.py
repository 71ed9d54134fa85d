"""Strangers at the port of an encrypted rank: what they can take is bounded, and the ranks do not notice them."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager

import pytest
import zmq
from zmq.utils import garbage

from potluck.dist import connections
from potluck.dist.queues import Kind, MessageQueues
from support.dist_settings import loopback
from support.strangers import MANNERS, Crowd, a_frame_of, files_in_a_burst, greeting, held, until

GROUP, TAG = 7, 1


@pytest.fixture(scope="module", autouse=True)
def _memory_of_sent_frames_is_freed() -> None:
    """Start what pyzmq keeps for the whole process (a thread and a context), so that no test seems to leak it."""
    if not garbage.gc.is_alive():
        garbage.gc.start()


@contextlib.contextmanager
def ranks(count: int = 2) -> Iterator[list[MessageQueues]]:
    """Encrypted ranks in this process that know each other."""
    made = [MessageQueues(loopback(), host="here") for _ in range(count)]
    try:
        for rank in made:
            rank.admit([each.endpoint for each in made])
        yield made
    finally:
        closing = [threading.Thread(target=rank.close) for rank in made]
        for thread in closing:
            thread.start()
        for thread in closing:
            thread.join(20)


def passes(one: MessageQueues, two: MessageQueues, body: bytes = b"words") -> None:
    """What one sends, the other gets."""
    one.send(two.endpoint, (Kind.POINT_TO_POINT, GROUP, TAG), memoryview(body))
    message = two.take(GROUP, one.endpoint, TAG, time.monotonic() + 20, kind=Kind.POINT_TO_POINT)
    assert message.view == body


def crowd_at(rank: MessageQueues, count: int) -> AbstractContextManager[Crowd]:
    return held(Crowd(rank.endpoint.port, count, frame_bytes=connections.PART_BYTES, manners=MANNERS))


def was_ended(line: socket.socket, within_s: float) -> bool:
    """Whether the other end closed the connection, whatever it said before."""
    line.settimeout(within_s)
    with contextlib.suppress(ConnectionError):
        try:
            while line.recv(4096):
                pass
        except TimeoutError:
            return False
    return True


def test_who_announces_a_long_frame_without_a_key_is_cut_off_at_once() -> None:
    """1 GiB, of which the rank would keep all that comes."""
    with ranks(1) as (rank,), socket.create_connection(("127.0.0.1", rank.endpoint.port)) as line:
        line.sendall(greeting() + a_frame_of(1 << 30))
        began = time.monotonic()
        assert was_ended(line, 10)
        assert time.monotonic() - began < connections.HANDSHAKE_S / 2, "that was the handshake's deadline"


def test_a_handshake_has_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "HANDSHAKE_S", 0.3)
    with ranks(1) as (rank,), socket.create_connection(("127.0.0.1", rank.endpoint.port)) as line:
        assert was_ended(line, 10), "who says nothing was kept"


def test_a_crowd_does_not_take_the_files_nor_keep_ranks_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many connections as a rank has, each opened again at once: they crowd out their own."""
    monkeypatch.setattr(connections, "MOST_WAITING", 50)
    with ranks(3) as (one, two, three):
        passes(one, two)
        before = len(os.listdir("/proc/self/fd")) if os.path.exists("/proc/self/fd") else None
        with crowd_at(two, 200) as crowd:
            assert until(lambda: crowd.closed > 300)
            if before is not None:  # the crowd's own ends are here as well
                assert until(lambda: len(os.listdir("/proc/self/fd")) - before - crowd.held < 100)
            passes(one, two)  # who was there
            passes(three, two)  # who comes now, from the address of the crowd
            passes(two, three)


def test_who_knows_a_ranks_public_key_and_has_one_of_its_own_is_refused() -> None:
    """The public keys are in torch's store for all to read."""
    with ranks() as (one, two), zmq.Context() as context, context.socket(zmq.PUSH) as stranger:
        stranger.setsockopt(zmq.LINGER, 0)
        public, secret = zmq.curve_keypair()
        stranger.setsockopt(zmq.CURVE_SERVERKEY, one.endpoint.key.encode())
        stranger.setsockopt(zmq.CURVE_PUBLICKEY, public)
        stranger.setsockopt(zmq.CURVE_SECRETKEY, secret)
        events = stranger.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_HANDSHAKE_FAILED_AUTH)
        stranger.connect(one.endpoint.url)
        assert events.poll(10_000)
        assert int.from_bytes(events.recv_multipart()[0][:2], "little") == zmq.EVENT_HANDSHAKE_FAILED_AUTH
        stranger.disable_monitor()
        passes(two, one)


def test_strangers_are_logged_but_not_without_end(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "potluck.dist"), ranks() as (one, two):
        for _ in range(12):
            with socket.create_connection(("127.0.0.1", one.endpoint.port)) as line:
                line.sendall(b"GET / HTTP/1.1\r\n\r\n" + bytes(100))
                assert was_ended(line, 10)
        assert until(lambda: one.connections._strangers == 12)
        passes(two, one)
    said = [record.getMessage() for record in caplog.records if "stranger" in record.getMessage()]
    assert len(said) == 5
    assert "refused a stranger from" in said[0]


LISTEN = """
from potluck.dist.queues import MessageQueues
from support.dist_settings import loopback
listening = MessageQueues(loopback())
port = listening.endpoint.port
"""


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere libzmq accepts whatever comes while Python is busy")
def test_a_burst_while_python_is_busy_leaves_the_files_of_the_training() -> None:
    assert files_in_a_burst(LISTEN) <= 128, "half of them are the training's"


def test_long_bodies_travel_in_short_parts() -> None:
    body = bytes(range(256)) * (1 << 14)  # 4 MiB
    with ranks() as (one, two):
        passes(one, two, body)
        tracker = one.send(two.endpoint, (Kind.POINT_TO_POINT, GROUP, TAG), memoryview(body), track=True)
        message = two.take(GROUP, one.endpoint, TAG, time.monotonic() + 20, kind=Kind.POINT_TO_POINT)
        assert message.view == body
        tracker.wait(10)
        assert tracker.done
