"""A TCP proxy in user space that emulates links: their rate, latency and faults.

One thread, one selector, the standard library: it works wherever Python does, without any rights. `Proxy` runs in a
thread of the caller. `ProxyProcess` runs one in a separate process, which gets orders as lines of JSON on stdin,
answers each with one line, and ends when stdin ends. `flow.py` moves the bytes.
"""

from __future__ import annotations

import contextlib
import mmap
import queue
import selectors
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from potluck import checked
from potluck.bounds import Many, Natural, Text
from potluck.errors import ConfigError, NetworkError, PotluckError
from potluck.lab.flow import Connection, Flow, close_socket, prepare
from potluck.lab.shaping import Bucket, Direction, Fault, Link, LinkSpec

MOST_CONNECTIONS = 200
"""Two sockets each: Windows lets select() look at 512."""
MOST_ROUTES = 100
COUNTER_BYTES = 8

_ANSWER_S = 20.0
_LONGEST_SLEEP_S = 60.0

T = TypeVar("T")


class Proxy:
    """Listens, connects and moves bytes, in whatever thread calls run()."""

    def __init__(
        self,
        links: Sequence[LinkSpec],
        *,
        shared: LinkSpec | None = None,
        counters: list[int] | memoryview | None = None,
    ) -> None:
        """All links' bytes also cross `shared`; its faults affect all of them.

        `counters` holds, for each link in turn, the bytes that went up and those that went down.
        """
        now = time.monotonic()
        shared = shared or LinkSpec(name="shared")
        buckets: dict[Direction, Bucket] = {d: Bucket(shared.rate_bytes_per_s) for d in ("up", "down")}
        specs = [
            replace(spec, latency_s=spec.latency_s + shared.latency_s, faults=spec.faults + shared.faults)
            for spec in links
        ]
        self._links = {spec.name: Link(spec, number, buckets, now) for number, spec in enumerate(specs)}
        self.counters = [0] * (2 * len(links)) if counters is None else counters
        self.flow = Flow(self.counters)
        self.refused = 0
        """Number of connections refused because there were too many."""
        self._listeners: list[socket.socket] = []
        self._asked: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._stopped = False
        self._waker, self._wake = socket.socketpair()
        for end in (self._waker, self._wake):
            end.setblocking(False)
        self.flow.selector.register(self._waker, selectors.EVENT_READ, self._answer)

    # -- from any thread -------------------------------------------------------------------------------------

    def ask(self, what: Callable[[], T], timeout_s: float = _ANSWER_S) -> T:
        """Let the thread of run() call a function, and wait for its result."""
        answers: queue.SimpleQueue[tuple[T, None] | tuple[None, Exception]] = queue.SimpleQueue()

        def answer() -> None:
            try:
                answers.put((what(), None))
            except Exception as error:
                answers.put((None, error))

        self._asked.put(answer)
        self._nudge()
        try:
            result, error = answers.get(timeout=timeout_s)
        except queue.Empty:
            raise NetworkError(f"the proxy did not answer within {timeout_s:g} s") from None
        if error is not None:
            raise error
        return result  # type: ignore[return-value]

    def stop(self) -> None:
        """Make run() return."""
        self._stopped = True
        self._nudge()

    def _nudge(self) -> None:
        # Full means that it is awake already, closed that it has stopped.
        with contextlib.suppress(OSError):
            self._wake.send(b"\0")

    # -- from the thread of run(), or before it --------------------------------------------------------------

    def open(self, link: str, target: tuple[str, int], port: int = 0) -> int:
        """Listen for connections over a link to a target. Returns the port (0: a free one)."""
        crossed = self._link(link)
        if len(self._listeners) >= MOST_ROUTES:
            raise NetworkError(f"the proxy has {MOST_ROUTES} routes already")
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            target = (socket.gethostbyname(target[0]), target[1])
            prepare(listener)
            listener.bind(("127.0.0.1", port))
            listener.listen(MOST_CONNECTIONS)
        except OSError as error:
            listener.close()
            raise NetworkError(f"the proxy cannot listen at port {port} for {target[0]}: {error}") from error
        listener.setblocking(False)
        self._listeners.append(listener)
        self.flow.selector.register(
            listener, selectors.EVENT_READ, lambda _: self._accept(listener, crossed, target)
        )
        return int(listener.getsockname()[1])

    def add_faults(self, link: str, faults: Sequence[Fault]) -> None:
        """Put faults on a link's schedule, their times counted from now."""
        self._link(link).add_faults(faults, time.monotonic())

    def _link(self, name: str) -> Link:
        if name not in self._links:
            raise ConfigError(f"there is no link {name!r}", hint="links: " + ", ".join(self._links))
        return self._links[name]

    # -- the loop --------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Move bytes until stop(); then every socket is closed."""
        try:
            while not self._stopped:
                wake_at = self._turn(time.monotonic())
                for key, mask in self.flow.selector.select(max(0.0, wake_at - time.monotonic())):
                    key.data(mask)
        finally:
            self.close()

    def close(self) -> None:
        """Close every socket. Only needed if run() was never called."""
        self.flow.close()
        for member in (*self._listeners, self._waker, self._wake):
            member.close()

    def _turn(self, now: float) -> float:
        wake_at = now + _LONGEST_SLEEP_S
        for link in self._links.values():
            if link.resets_now(now):
                self.flow.reset(link)
            wake_at = min(wake_at, link.next_reset)
        return min(wake_at, self.flow.turn(now))

    def _accept(self, listener: socket.socket, link: Link, target: tuple[str, int]) -> None:
        try:
            accepted, _ = listener.accept()
        except OSError:  # gone again, or too many files are open
            return
        full = len(self.flow.connections) >= MOST_CONNECTIONS
        self.refused += full
        if full or time.monotonic() < link.resets_until:
            close_socket(accepted, reset=True)
        else:
            self.flow.connections.add(Connection(self.flow, link, accepted, target))

    def _answer(self, mask: int) -> None:
        with contextlib.suppress(BlockingIOError):
            self._waker.recv(4096)
        with contextlib.suppress(queue.Empty):
            while True:
                self._asked.get_nowait()()


class _Spec(Struct, frozen=True, kw_only=True):
    """The start parameters of the proxy's process."""

    links: Many[LinkSpec]
    shared: LinkSpec | None
    counters: Text
    """A file for the bytes that each link has carried, which its owner maps."""


class _Open(Struct, frozen=True, kw_only=True, tag="open"):
    link: Text
    host: Text
    port: Natural


class _AddFaults(Struct, frozen=True, kw_only=True, tag="faults"):
    link: Text
    faults: Many[Fault]


_Order = _Open | _AddFaults


class _Answer(Struct, frozen=True, kw_only=True):
    port: Natural = 0
    """The port at which the opened path begins."""
    error: Text = ""
    hint: Text = ""


class ProxyProcess:
    """A proxy in a separate process, from its owner's view: it ends with its owner, however that ends.

    Leaves its files in `folder`, which the owner removes.
    """

    def __init__(
        self,
        links: Sequence[LinkSpec],
        *,
        shared: LinkSpec | None = None,
        folder: Path,
        wrap: Callable[[list[str]], list[str]] = lambda command: command,
    ) -> None:
        """`wrap` turns its command into one that runs elsewhere, for example in a network namespace."""
        self._numbers = {link.name: number for number, link in enumerate(links)}
        spec, counters, self._log = (folder / f"proxy.{end}" for end in ("json", "counters", "log"))
        counters.write_bytes(bytes(2 * COUNTER_BYTES * max(1, len(links))))
        spec.write_bytes(msgspec.json.encode(_Spec(links=tuple(links), shared=shared, counters=str(counters))))
        with open(counters, "r+b") as file:
            self._counters: mmap.mmap | bytes = mmap.mmap(file.fileno(), 0)
        with open(self._log, "wb") as log:
            self._process = subprocess.Popen(
                wrap([sys.executable, "-m", "potluck.lab.proxy", str(spec)]),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,  # Ctrl-C is for the owner
            )
        self._lock = threading.Lock()
        self._lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._listen, name="potluck-proxy-answers", daemon=True)
        self._reader.start()
        try:
            self._next_answer()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def open(self, link: str, target: tuple[str, int]) -> int:
        """Open a path over a link to a target. Returns the port of 127.0.0.1 where it begins."""
        return self._order(_Open(link=link, host=target[0], port=target[1])).port

    def add_faults(self, link: str, faults: Sequence[Fault]) -> None:
        """Put faults on a link's schedule, their times counted from now."""
        self._order(_AddFaults(link=link, faults=tuple(faults)))

    def traffic(self, link: str) -> tuple[int, int]:
        """The bytes that a link has carried, up and down. Callable from any thread; never waits."""
        with memoryview(self._counters) as view, view.cast("Q") as numbers:
            at = 2 * self._numbers[link]
            return numbers[at], numbers[at + 1]

    def close(self) -> None:
        """End it. traffic() keeps its last value."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(2.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join()
        self._process.stdout.close()
        # The file could not be removed, on Windows, while it is mapped.
        mapped, self._counters = self._counters, bytes(self._counters)
        if isinstance(mapped, mmap.mmap):
            with contextlib.suppress(BufferError):  # a reader holds it now
                mapped.close()

    def _order(self, order: _Order) -> _Answer:
        assert self._process.stdin is not None
        with self._lock:
            with contextlib.suppress(OSError):  # it is gone: the missing answer says so
                self._process.stdin.write(msgspec.json.encode(order) + b"\n")
                self._process.stdin.flush()
            answer = self._next_answer()
        if answer.error:
            raise NetworkError(answer.error, hint=answer.hint)
        return answer

    def _next_answer(self) -> _Answer:
        try:
            line = self._lines.get(timeout=_ANSWER_S)
        except queue.Empty:
            raise NetworkError(f"the proxy did not answer within {_ANSWER_S:g} s") from None
        if not line:
            self._lines.put(line)
            said = self._log.read_text(encoding="utf-8", errors="replace").splitlines()[-1:]
            raise NetworkError("the proxy has ended: " + ("".join(said) or "it said nothing"))
        return checked.decode(line, _Answer)

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put(b"")


# -- inside that process ------------------------------------------------------------------------------------


def main(arguments: Sequence[str]) -> None:
    """Run what SPEC.json says until stdin ends."""
    spec = checked.decode(Path(arguments[0]).read_bytes(), _Spec)
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(open(spec.counters, "r+b"))
        mapped = stack.enter_context(mmap.mmap(file.fileno(), 0))
        counters = stack.enter_context(stack.enter_context(memoryview(mapped)).cast("Q"))
        proxy = Proxy(spec.links, shared=spec.shared, counters=counters)
        _say(_Answer())
        threading.Thread(target=_obey, args=(proxy,), name="potluck-proxy-control", daemon=True).start()
        with contextlib.suppress(KeyboardInterrupt):
            proxy.run()


def _say(answer: _Answer) -> None:
    with contextlib.suppress(OSError):  # nobody listens: stdin is about to end
        print(msgspec.json.encode(answer).decode(), flush=True)


def _obey(proxy: Proxy) -> None:
    for line in sys.stdin:
        try:
            _say(_do(proxy, checked.decoder(_Order).decode(line)))
        except PotluckError as error:
            _say(_Answer(error=error.what, hint=error.hint))
        except msgspec.DecodeError as error:
            _say(_Answer(error=f"not understood: {error}"))
    proxy.stop()


def _do(proxy: Proxy, order: _Order) -> _Answer:
    if isinstance(order, _Open):
        return _Answer(port=proxy.ask(lambda: proxy.open(order.link, (order.host, order.port))))
    proxy.ask(lambda: proxy.add_faults(order.link, order.faults))
    return _Answer()


if __name__ == "__main__":
    main(sys.argv[1:])
