"""Segments of shared memory, words to wait on, and processes that are gone."""

from __future__ import annotations

import contextlib
import os
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from potluck.dist import shm
from potluck.errors import NetworkError

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="no POSIX shared memory")
KINDS = [pytest.param(True, marks=pytest.mark.skipif(sys.platform != "linux", reason="needs memfd (Linux)")), False]


@contextlib.contextmanager
def pair(memfd: bool, nbytes: int = 8192) -> Iterator[tuple[shm.Segment, shm.Segment]]:
    mine = shm.Segment.create(nbytes, memfd=memfd)
    theirs = shm.Segment.attach(mine.address)
    try:
        yield mine, theirs
    finally:
        mine.close()
        theirs.close()


def never() -> None:
    """There is no reason to stop waiting."""


@pytest.mark.parametrize("memfd", KINDS)
def test_what_one_writes_the_other_reads(memfd: bool) -> None:
    with pair(memfd) as (mine, theirs):
        assert bytes(theirs.view[:4]) == bytes(4)
        mine.view[8000:8004] = b"abcd"
        assert bytes(theirs.view[8000:8004]) == b"abcd"
        assert len(theirs.view) == 8192


@pytest.mark.parametrize("memfd", KINDS)
def test_the_memory_is_for_this_user_alone_and_has_no_name_once_it_is_forgotten(memfd: bool) -> None:
    with pair(memfd) as (mine, _):
        assert stat.S_IMODE(os.fstat(mine._fd).st_mode) == 0o600
        if memfd:
            assert not [name for name in os.listdir("/dev/shm") if "potluck" in name and name in mine.address]
        mine.forget_name()
        with pytest.raises(NetworkError, match="cannot be opened"):
            shm.Segment.attach(mine.address)


@pytest.mark.parametrize("memfd", KINDS)
def test_another_segment_is_not_taken_for_the_announced_one(memfd: bool) -> None:
    with pair(memfd) as (mine, _):
        kind, where, number, nonce, size = mine.address.split(":")
        other = "0" * len(nonce)
        with pytest.raises(NetworkError, match="not the one"):
            shm.Segment.attach(":".join((kind, where, number, other, size)))
        with pytest.raises(NetworkError, match="too small"):
            shm.Segment.attach(":".join((kind, where, number, nonce, str(10**6))))
    for nonsense in ("", "memfd:1:2", "memfd:x:y:z:1", "posix:/no-such-segment:0:00:1"):
        with pytest.raises(NetworkError, match="cannot be opened"):
            shm.Segment.attach(nonsense)


@pytest.mark.parametrize("futex", [True, False])
def test_a_wait_ends_with_the_word(futex: bool) -> None:
    with pair(memfd=False) as (mine, theirs):
        writer = shm.Words(mine.view, 4, spins=0, futex=futex)
        reader = shm.Words(theirs.view, 4, spins=0, futex=futex)
        thread = threading.Timer(0.1, lambda: writer.write(2, 7))
        thread.start()
        assert reader.wait(2, 7, time.monotonic() + 20, never)
        assert reader.read(2) == 7
        assert not reader.reached(2, 8)
        thread.join()
        writer.close()
        reader.close()


@pytest.mark.parametrize("futex", [True, False])
def test_a_wait_has_an_end_and_may_be_ended(futex: bool) -> None:
    with pair(memfd=False) as (mine, _):
        words = shm.Words(mine.view, 1, spins=3, futex=futex)
        assert not words.wait(0, 1, time.monotonic() + 0.1, never)

        def enough() -> None:
            raise NetworkError("enough")

        with pytest.raises(NetworkError, match="enough"):
            words.wait(0, 1, time.monotonic() + 20, enough)
        words.close()


def test_words_may_run_over() -> None:
    with pair(memfd=False) as (mine, _):
        words = shm.Words(mine.view, 1, spins=0)
        words.write(0, 2**32 - 1)
        assert words.reached(0, 2**32 - 2)
        assert not words.reached(0, 2**32)
        words.write(0, 2**32 + 3)
        assert words.read(0) == 3
        assert words.reached(0, 2**32 + 2)
        assert words.reached(0, 2**32 - 1)
        assert not words.reached(0, 2**32 + 4)
        words.close()


def test_a_process_that_ended_is_gone_even_before_its_parent_looks() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    processes = shm.Processes({3: child.pid, 5: os.getpid()})
    try:
        assert processes.gone() == set()
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # it stays a zombie
        assert processes.gone() == {3}
    finally:
        child.kill()
        child.communicate()
        processes.close()


@pytest.mark.skipif(not Path("/proc/self/ns/net").exists(), reason="namespaces are Linux's")
def test_a_network_namespace_is_another_neighbourhood() -> None:
    assert shm.neighbourhood() == shm.neighbourhood()
    assert os.readlink("/proc/self/ns/net") in shm.neighbourhood()
