"""Host and guest as two real processes: echo, and what is left when one is killed."""

from __future__ import annotations

import multiprocessing
import os
import time
from multiprocessing.connection import Connection
from typing import Any

import pytest
from zmq.utils import garbage

from potluck.wire.keys import new_keys
from potluck.wire.token import Token, decode, encode
from potluck.wire.transport import GuestSocket, HostSocket
from support.plain import Plain, packed, unpacked

DEADLINE_S = 30.0
spawn = multiprocessing.get_context("spawn")


@pytest.fixture(scope="module", autouse=True)
def _memory_of_sent_frames_is_freed() -> None:
    """Start what pyzmq keeps for the whole process (a thread and a context), so that no test seems to leak it."""
    if not garbage.gc.is_alive():
        garbage.gc.start()


def serve(pipe: Connection) -> None:
    """A host that echoes until a message says end."""
    keys = new_keys()
    host = HostSocket(bind="127.0.0.1", port=0, keys=keys)
    pipe.send(
        encode(
            Token(
                addresses=("127.0.0.1",),
                port=host.port,
                host_public=keys.public,
                guest_secret=keys.guest_secret,
            )
        )
    )
    deadline = time.monotonic() + DEADLINE_S
    ended = False
    while not ended and time.monotonic() < deadline:
        for peer, frames in host.receive(0.5):
            message = unpacked(frames)
            ended = ended or message.kind == "end"
            host.send(peer, frames)
    host.close()


def start(target: Any) -> tuple[Any, Token]:
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=target, args=(theirs,), daemon=True)
    process.start()
    assert ours.poll(DEADLINE_S)
    return process, decode(ours.recv())


def test_two_processes_echo_and_end_cleanly() -> None:
    process, token = start(serve)
    guest = GuestSocket(token)
    guest.handshake(10)
    payload = os.urandom(8 * 1024 * 1024)
    assert guest.send_data(packed(Plain(kind="piece", fields={"n": 1}, frames=(payload,))))
    assert guest.send_control(packed(Plain(kind="alive", fields={})))
    kinds: dict[str, Any] = {}
    deadline = time.monotonic() + DEADLINE_S
    while len(kinds) < 2 and time.monotonic() < deadline:
        for channel, frames in guest.receive(0.5):
            kinds[channel] = unpacked(frames)
    assert kinds["control"].kind == "alive"
    assert bytes(kinds["data"].frames[0]) == payload
    assert guest.send_control(packed(Plain(kind="end", fields={})))
    assert [unpacked(frames).kind for _, frames in guest.receive(10)] == ["end"]
    process.join(10)
    assert process.exitcode == 0
    while guest.connected and time.monotonic() < deadline:
        guest.receive(0.5)
    assert not guest.connected
    guest.close()


@pytest.mark.skipif(os.name != "posix", reason="needs SIGKILL (POSIX)")
def test_a_killed_host_is_noticed_at_once() -> None:
    process, token = start(serve)
    guest = GuestSocket(token)
    guest.handshake(10)
    process.kill()
    process.join(10)
    began = time.monotonic()
    while guest.connected and time.monotonic() - began < 10:
        guest.receive(5.0)
    assert not guest.connected
    assert time.monotonic() - began < 2
    guest.close()
