"""What holds for every test: nothing is left behind. It knows no part of Potluck."""

from __future__ import annotations

import functools
import os
import shutil
import signal
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import zmq
from hypothesis import HealthCheck, settings

from support import forks, workers
from support.processes import ids_below

# How long an example takes is a matter of what else the machine does. The same examples in every run: a change that
# breaks nothing must not fail. `--hypothesis-profile random` looks for new ones.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("random", settings.get_profile("any machine"), max_examples=1000)
settings.register_profile("same", settings.get_profile("any machine"), derandomize=True, database=None)
settings.load_profile("same")

PREFIX = "POTLUCK_"
GRACE_S = 3.0
"""Threads and processes that were told to end may take this long."""


def pytest_configure(config: pytest.Config) -> None:
    """One process imports torch for the forks of all workers, as soon as one of them asks for a fork. Another one
    imports all tests for the workers."""
    if sys.platform == "linux" and config.getoption("numprocesses", None) and forks.SHARED not in os.environ:
        folder = forks.shared_folder()
        os.environ[forks.SHARED] = str(folder)
        config.add_cleanup(functools.partial(os.environ.pop, forks.SHARED, None))
        config.add_cleanup(functools.partial(shutil.rmtree, folder, ignore_errors=True))
        workers.prepare(config, folder)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    folder = os.environ.get(forks.SHARED)
    if folder is None or config.getvalue("dist") != "loadfile":
        return None
    return workers.scheduler(config, log, Path(folder))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    workers.alone_last(items)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Have the fake device before any test: torch must know its devices when the first backward runs."""
    if hasattr(session.config, "workerinput") and forks.SHARED in os.environ:
        workers.list_alone(session.items, Path(os.environ[forks.SHARED]))
    fake_device = sys.modules.get("support.fake_device")
    if fake_device is not None and fake_device.available():
        fake_device.install()


@pytest.fixture(scope="session", autouse=True)
def _ctrl_c_works() -> None:
    """A shell starts what it puts in the background with SIGINT ignored, and every child would inherit that."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """torch computes with one thread: for small tensors, two would wait for each other longer than they compute."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


_contexts: weakref.WeakSet[zmq.Context[Any]] = weakref.WeakSet()


@pytest.fixture(scope="session", autouse=True)
def _contexts_are_known() -> Iterator[None]:
    """Keep a list of ZeroMQ contexts: one left open holds its port.

    Their sockets do not linger unless told to. A socket of a failed test with a message that nobody takes would
    otherwise block for ever whatever happens to collect its context.
    """
    original = zmq.Context.__init__

    def remember(self: zmq.Context[Any], *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if not self.closed:
            self.set(zmq.BLOCKY, 0)
        _contexts.add(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(zmq.Context, "__init__", remember)
        yield


@pytest.fixture(scope="session", autouse=True)
def _no_settings_from_outside() -> Iterator[None]:
    """The developer's own POTLUCK_* variables must not decide what a test sees."""
    own = _settings()
    for name in own:
        del os.environ[name]
    yield
    os.environ.update(own)


@pytest.fixture(scope="module", autouse=True)
def _environment_as_it_was() -> Iterator[None]:
    """A Dask cluster sets PYTHONHASHSEED and others for good: after it nothing is forked (support/forks.py)."""
    before = dict(os.environ)
    yield
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)


@pytest.fixture(autouse=True)
def _leaves_nothing_behind() -> Iterator[None]:
    """Fail a test that leaks a thread, a child process, a ZeroMQ context or an environment variable.

    Fixtures of the test itself are torn down before this looks; those of a wider scope were there before.
    """
    threads = set(threading.enumerate())
    children = _children()
    settings = _settings()
    contexts = _open_contexts()
    yield
    changed = _settings()
    for name in changed.keys() - settings.keys():
        del os.environ[name]
    os.environ.update(settings)
    assert changed == settings, (
        f"the test changed POTLUCK_* variables: {sorted(changed.items() ^ settings.items())}"
    )
    deadline = time.monotonic() + GRACE_S
    while leaks := _leaked(threads, children, contexts):
        if time.monotonic() > deadline:
            for process in _children() - children:
                process.kill()
            # Contexts stay as they are: closing sockets that a thread still uses would abort Python.
            pytest.fail("the test left behind: " + "; ".join(leaks))
        time.sleep(0.02)


def _settings() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith(PREFIX)}


def _open_contexts() -> set[zmq.Context[Any]]:
    return {context for context in _contexts if not context.closed}


def _leaked(
    threads: set[threading.Thread], children: set[psutil.Process], contexts: set[zmq.Context[Any]]
) -> list[str]:
    leaks = [
        f"thread {thread.name!r}"
        for thread in set(threading.enumerate()) - threads
        if not thread.daemon or thread.name.lower().startswith("potluck")
    ]
    leaks += [f"an open ZeroMQ context {context!r}" for context in _open_contexts() - contexts]
    return leaks + [_process_text(process) for process in _children() - children]


def _children() -> set[psutil.Process]:
    """Without multiprocessing's tracker and the server of forks, which stay until Python ends."""
    found: set[psutil.Process] = set()
    servers = forks.servers()
    below = {pid for process in (os.getpid(), *servers) for pid in ids_below(process)}
    for pid in below - set(servers):
        try:
            process = psutil.Process(pid)
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
