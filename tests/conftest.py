"""What holds for every test: nothing is left behind. It knows no part of Potluck."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator

import psutil
import pytest

PREFIX = "POTLUCK_"
GRACE_S = 3.0
"""Threads and processes that were told to end may take this long."""


@pytest.fixture(scope="session", autouse=True)
def _no_settings_from_outside() -> Iterator[None]:
    """The developer's own POTLUCK_* variables must not decide what a test sees."""
    own = _settings()
    for name in own:
        del os.environ[name]
    yield
    os.environ.update(own)


@pytest.fixture(autouse=True)
def _leaves_nothing_behind() -> Iterator[None]:
    """Fail a test that leaks a thread, a child process or an environment variable.

    Fixtures of the test itself are torn down before this looks; those of a wider scope were there before.
    """
    threads = set(threading.enumerate())
    children = _children()
    settings = _settings()
    yield
    changed = _settings()
    for name in changed.keys() - settings.keys():
        del os.environ[name]
    os.environ.update(settings)
    assert changed == settings, (
        f"the test changed POTLUCK_* variables: {sorted(changed.items() ^ settings.items())}"
    )
    deadline = time.monotonic() + GRACE_S
    while leaks := _leaked(threads, children):
        if time.monotonic() > deadline:
            for process in _children() - children:
                process.kill()
            pytest.fail("the test left behind: " + "; ".join(leaks))
        time.sleep(0.02)


def _settings() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith(PREFIX)}


def _leaked(threads: set[threading.Thread], children: set[psutil.Process]) -> list[str]:
    leaks = [
        f"thread {thread.name!r}"
        for thread in set(threading.enumerate()) - threads
        if not thread.daemon or thread.name.lower().startswith("potluck")
    ]
    return leaks + [_process_text(process) for process in _children() - children]


def _children() -> set[psutil.Process]:
    """Without multiprocessing's tracker, which stays until Python ends."""
    found = set()
    for process in psutil.Process().children(recursive=True):
        try:
            if process.status() != psutil.STATUS_ZOMBIE and not any(
                "resource_tracker" in p for p in process.cmdline()
            ):
                found.add(process)
        except psutil.NoSuchProcess:
            continue
    return found


def _process_text(process: psutil.Process) -> str:
    try:
        return f"process {process.pid} ({' '.join(process.cmdline())[:200]})"
    except psutil.Error:
        return f"process {process.pid}"
