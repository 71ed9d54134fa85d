"""Ends a process in order when its parent, its terminal or the reader of its output is gone.

Owns signals and the one thread that watches. Ending means a KeyboardInterrupt in the main thread, like Ctrl-C, and
a forced end if the process ignores it. A process with more work at its end, such as a host, is only told that its
reader is gone.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import stat
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType

LOOK_S = 0.5
GRACE_S = 6.0
"""Time that a process has to end in order."""
PR_SET_PDEATHSIG = 1


class ReaderGone(KeyboardInterrupt):
    """The reader of this process's output is gone."""


class _Life:
    """The conditions that end this process."""

    def __init__(self, parent: int | None, reader: bool) -> None:
        self._parent = parent
        self._reader = reader
        self.asked = False
        self._reader_gone = False
        self._stop = threading.Event()
        self._watched: list[int] = []
        self._thread = threading.Thread(target=self._watch, name="potluck-life", daemon=True)

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            return  # it is on its way: a second signal must not interrupt the goodbye
        self.asked = True
        raise ReaderGone if self._reader_gone else KeyboardInterrupt

    def start(self) -> None:
        if self._parent is not None:
            self._die_with_parent()
        self._watched = _readers_to_watch(with_stdin=self._parent is not None, with_stdout=self._reader)
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(2 * LOOK_S)

    def _die_with_parent(self) -> None:
        """Linux signals a process when its parent dies. In addition, and on all other systems, this process checks
        itself."""
        if sys.platform == "linux":
            with contextlib.suppress(OSError, AttributeError):
                ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGTERM))
        if os.name != "posix":
            threading.Thread(target=self._read_to_the_end, name="potluck-stdin", daemon=True).start()

    def _watch(self) -> None:
        poller = select.poll() if self._watched else None
        for descriptor in self._watched:
            assert poller is not None
            poller.register(descriptor, 0)  # only for its end
        while not self._stop.is_set():
            gone = False
            if poller is None:
                self._stop.wait(LOOK_S)
            else:
                for descriptor, what in poller.poll(int(1000 * LOOK_S)):
                    if what & select.POLLNVAL:
                        poller.unregister(descriptor)  # a system that cannot look at this kind
                    if what & (select.POLLHUP | select.POLLERR):
                        gone = True
                        self._reader_gone = self._reader_gone or (descriptor == 1 and _is_pipe(1))
            # On other systems than POSIX ones the number stays that of the dead parent.
            if self._parent is not None and os.name == "posix" and os.getppid() != self._parent:
                gone = True
            if (gone or self.asked) and not self._stop.is_set():
                self._end()
                return

    def _read_to_the_end(self) -> None:
        """The process that started this one holds the other end of its stdin, and closes it only by ending."""
        with contextlib.suppress(OSError):
            while os.read(0, 4096):
                pass
        if not self._stop.is_set():
            self._end()

    def _end(self) -> None:
        if not self.asked:
            os.kill(os.getpid(), signal.SIGTERM)
        if not self._stop.wait(GRACE_S):
            os._exit(1)


def _readers_to_watch(*, with_stdin: bool, with_stdout: bool = True) -> list[int]:
    """The descriptors to watch: a terminal or pipe for output, and the parent's pipe."""
    if not hasattr(select, "poll"):
        return []
    found = []
    hangups_count = not _ignores_hangups()
    for descriptor, wanted in ((0, with_stdin), (1, with_stdout and hangups_count)):
        if wanted and (_is_pipe(descriptor) or (descriptor == 1 and os.isatty(descriptor))):
            found.append(descriptor)
    return found


def _is_pipe(descriptor: int) -> bool:
    try:
        mode = os.fstat(descriptor).st_mode
    except OSError:
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)


def _ignores_hangups() -> bool:
    """Whether it was started with nohup, and so must outlive its terminal."""
    return hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


@contextlib.contextmanager
def leased(parent: int | None = None, *, reader: bool = True) -> Iterator[None]:
    """Inside, SIGTERM and SIGHUP end this process as Ctrl-C does; so does the end of its terminal, of the reader of
    its output (unless `reader` is False: its parent looks), or of `parent`. With nohup it keeps running. After the
    first request to end, it ignores further signals."""
    life = _Life(parent, reader)
    before = {}
    if threading.current_thread() is threading.main_thread():
        names = ["SIGTERM"] if _ignores_hangups() else ["SIGTERM", "SIGHUP"]
        for number in (getattr(signal, name) for name in names if hasattr(signal, name)):
            before[number] = signal.signal(number, life.on_signal)
    life.start()
    try:
        yield
    finally:
        life.stop()
        # Who was asked to end hears it twice (the parent's pipe closes, then the system tells of its death; a
        # terminal's end, then SIGHUP): the second must not kill it in its goodbye, which goes on outside.
        for number, handler in before.items() if not life.asked else ():
            signal.signal(number, handler)


def reader_is_gone() -> bool:
    """Whether stdout is a pipe whose reader is gone."""
    if not (hasattr(select, "poll") and _is_pipe(1)):
        return False
    poller = select.poll()
    poller.register(1, 0)
    return any(what & (select.POLLHUP | select.POLLERR) for _, what in poller.poll(0))


@contextlib.contextmanager
def reader_watched(on_gone: Callable[[], None]) -> Iterator[None]:
    """Inside, `on_gone` is called once, in another thread, when the reader of this process's stdout is gone.

    Only if stdout is a pipe, because the end of a terminal is a signal. After that, output is discarded and raises
    nothing. With nohup this does nothing.
    """
    if 1 not in _readers_to_watch(with_stdin=False) or os.isatty(1):
        yield
        return
    over = threading.Event()

    def look() -> None:
        while not over.wait(LOOK_S):
            if reader_is_gone():
                with open(os.devnull, "wb") as nowhere:
                    os.dup2(nowhere.fileno(), 1)
                on_gone()
                return

    thread = threading.Thread(target=look, name="potluck-reader", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(2 * LOOK_S)


@contextlib.contextmanager
def interrupted_by_signals(interrupt: Callable[[], None]) -> Iterator[None]:
    """Inside, Ctrl-C, SIGTERM and the end of the terminal (but with nohup) call this, each time. POSIX only."""
    numbers = [signal.SIGINT, signal.SIGTERM, *([] if _ignores_hangups() else [signal.SIGHUP])]
    before = {number: signal.signal(number, lambda *ignored: interrupt()) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
