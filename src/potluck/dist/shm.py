"""Shared memory between processes of one machine and one user: owns segments, their names, and words to wait on.

On Linux a segment is a memfd, which has no name in any folder: a process that is killed leaves nothing behind.
Elsewhere it is a POSIX segment with a random name, unlinked as soon as every process has attached.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import platform
import secrets
import select
import sys
import time
from collections.abc import Callable
from typing import Any

from potluck.errors import NetworkError

NONCE_BYTES = 16
LINE_BYTES = 128
"""The distance between words of different processes: two cache lines, because processors fetch them in pairs."""
_HEAD_BYTES = 4096
_SLICE_S = 0.05
"""The longest sleep before a waiter checks whether the other process is still alive."""
_FIRST_SLICE_S = 0.005
"""The first sleep is short: most waits end within it, and the check takes longer than many waits."""
_WORD_MASK = 0xFFFFFFFF
_HALF_WORD = 0x80000000
_FUTEX_CALLS = {"x86_64": 202, "aarch64": 98, "riscv64": 98}
_FUTEX_WAIT, _FUTEX_WAKE = 0, 1


def available() -> tuple[bool, str]:
    """Whether this system has shared memory, and of what kind or why not."""
    if sys.platform == "win32":
        return False, "no POSIX shared memory on Windows"
    if sys.maxsize < 2**32:
        return False, "a 32-bit process has too little address space"
    return True, "memfd" if _has_memfd() else "POSIX shared memory"


def neighbourhood() -> str:
    """An identifier that is equal in two processes that can share memory.

    Network namespaces count as machines: the lab emulates machines with them.
    """
    parts = [platform.node(), str(os.getuid()) if hasattr(os, "getuid") else "-"]
    with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        parts.append(file.read().strip())
    for space in ("pid", "ipc", "net"):
        with contextlib.suppress(OSError):
            parts.append(os.readlink(f"/proc/self/ns/{space}"))
    return " ".join(parts)


class Segment:
    """Memory that several processes have mapped. The others attach by `address`."""

    def __init__(self, fd: int, nbytes: int, address: str, name: str | None) -> None:
        self.nbytes = nbytes
        self.address = address
        self._name = name
        self._fd = fd
        self._map = mmap.mmap(fd, _HEAD_BYTES + nbytes)
        self.view = memoryview(self._map)[_HEAD_BYTES:]

    @classmethod
    def create(cls, nbytes: int, *, memfd: bool | None = None) -> Segment:
        """A new segment of zeros, for this user only."""
        ok, why = available()
        if not ok:
            raise NetworkError(f"shared memory is not available: {why}", hint="use the transport tcp")
        nonce = secrets.token_hex(NONCE_BYTES)
        if _has_memfd() if memfd is None else memfd:
            fd, name = os.memfd_create("potluck", os.MFD_CLOEXEC), None
            address = f"memfd:{os.getpid()}:{fd}:{nonce}:{nbytes}"
        else:
            name = f"/potluck-{nonce[:16]}"  # macOS takes 31 characters
            fd = _shm_open(name, os.O_CREAT | os.O_EXCL | os.O_RDWR)
            address = f"posix:{name}:0:{nonce}:{nbytes}"
        try:
            if name is None:
                os.fchmod(fd, 0o600)
            os.ftruncate(fd, _HEAD_BYTES + nbytes)
            segment = cls(fd, nbytes, address, name)
        except BaseException:
            os.close(fd)
            if name is not None:
                _shm_unlink(name)
            raise
        segment._map[:NONCE_BYTES] = bytes.fromhex(nonce)
        return segment

    @classmethod
    def attach(cls, address: str) -> Segment:
        """Map the segment of another process of this user, and check that it is the right one."""
        try:
            kind, where, number, nonce, size = address.split(":")
            nbytes = int(size)
            if kind == "memfd":
                fd = os.open(f"/proc/{int(where)}/fd/{int(number)}", os.O_RDWR | os.O_CLOEXEC)
            else:
                fd = _shm_open(where, os.O_RDWR)
        except (OSError, ValueError) as error:
            raise NetworkError(
                f"the shared memory of another process cannot be opened: {error}",
                hint="processes in different containers cannot share memory; use the transport tcp",
            ) from error
        try:
            about = os.fstat(fd)
            if about.st_uid != os.geteuid() or about.st_size < _HEAD_BYTES + nbytes:
                raise NetworkError("the shared memory belongs to another user, or is too small")
            segment = cls(fd, nbytes, address, where if kind == "posix" else None)
        except BaseException:
            os.close(fd)
            raise
        if segment._map[:NONCE_BYTES] != bytes.fromhex(nonce):
            segment._name = None  # not this segment's to remove
            segment.close()
            raise NetworkError("the shared memory found is not the one that was announced")
        return segment

    def forget_name(self) -> None:
        """Remove the name: no other process can attach any more, and the memory is freed with the last process that
        uses it."""
        if self._name is not None:
            with contextlib.suppress(OSError):
                _shm_unlink(self._name)
            self._name = None
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def close(self) -> None:
        """Unmap it in this process, at the latest with the last tensor that uses it."""
        self.forget_name()
        with contextlib.suppress(BufferError):
            self.view.release()
            self._map.close()


def _has_memfd() -> bool:
    return sys.platform == "linux" and hasattr(os, "memfd_create") and os.path.isdir("/proc/self/fd")


def _shm_open(name: str, flags: int) -> int:
    # Not multiprocessing.shared_memory: its tracker would unlink what others use, and warn.
    import _posixshmem  # type: ignore[import-not-found, unused-ignore]

    fd: int = _posixshmem.shm_open(name, flags, mode=0o600)
    return fd


def _shm_unlink(name: str) -> None:
    import _posixshmem  # type: ignore[import-not-found, unused-ignore]

    _posixshmem.shm_unlink(name)


class Processes:
    """Detects that processes of this machine have ended."""

    def __init__(self, pids: dict[int, int]) -> None:
        """`pids`: process ids, by the number under which a dead one is reported."""
        self._pids = dict(pids)
        self._fds: dict[int, int] = {}
        self._poll = select.poll() if hasattr(select, "poll") else None
        self._gone: set[int] = set()
        for number, pid in pids.items():
            try:
                fd = os.pidfd_open(pid)  # sees a zombie too, and never the next owner of the number
            except AttributeError:
                continue
            except ProcessLookupError:
                self._gone.add(number)
                continue
            except OSError:
                continue
            self._fds[fd] = number
            assert self._poll is not None
            self._poll.register(fd, select.POLLIN)

    def gone(self) -> set[int]:
        """The numbers of the processes that have ended."""
        if self._poll is not None and self._fds:
            self._gone.update(self._fds[fd] for fd, _ in self._poll.poll(0))
        for number, pid in self._pids.items():
            if number in self._fds.values():
                continue
            try:
                os.kill(pid, 0)
            except ProcessLookupError:
                self._gone.add(number)
            except OSError:
                pass
        return set(self._gone)

    def close(self) -> None:
        for fd in self._fds:
            os.close(fd)
        self._fds.clear()
        self._pids.clear()


class _Timespec(ctypes.Structure):
    _fields_ = (("tv_sec", ctypes.c_long), ("tv_nsec", ctypes.c_long))


def _futex() -> tuple[Callable[..., int], Callable[..., int], int] | None:
    """The system call in two forms (one releases Python's lock, one does not), and its number."""
    number = _FUTEX_CALLS.get(platform.machine())
    if sys.platform != "linux" or number is None:
        return None
    sleeping = ctypes.CDLL(None, use_errno=True).syscall
    quick = ctypes.PyDLL(None).syscall
    for call in (sleeping, quick):
        call.argtypes = (
            ctypes.c_long, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.c_void_p,
            ctypes.c_void_p, ctypes.c_uint32,
        )  # fmt: skip
        call.restype = ctypes.c_long
    return sleeping, quick, number


def _fence() -> Callable[[], Any] | None:
    """A memory fence, so that no word is visible before the bytes that it announces; None if the processor needs
    none."""
    if platform.machine() in ("x86_64", "AMD64", "i686"):
        return None
    for library, name in ((None, "OSMemoryBarrier"), ("libatomic.so.1", "atomic_thread_fence")):
        with contextlib.suppress(OSError, AttributeError):
            call = getattr(ctypes.PyDLL(library), name)
            call.restype = None
            if name == "atomic_thread_fence":
                return lambda: call(ctypes.c_int(5))  # memory_order_seq_cst
            return lambda: call()
    return time.monotonic  # no fence available: a call out of the interpreter is the best substitute


class Words:
    """32-bit counters in shared memory. One process writes each counter, and the others wait for it."""

    def __init__(self, memory: memoryview, count: int, *, spins: int, futex: bool = True) -> None:
        """`memory`: `count` times LINE_BYTES; `spins`: checks before the first sleep, about 0.1 µs each."""
        self.spins = spins
        self._words = memory[: count * LINE_BYTES].cast("I")
        self._stride = LINE_BYTES // 4
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self._futex = _futex() if futex else None
        self._fence = _fence()

    def read(self, index: int) -> int:
        return int(self._words[index * self._stride])

    def write(self, index: int, value: int) -> None:
        """Write a counter and wake its waiters. A process that sees the new value also sees everything written
        before it."""
        if self._fence is not None:
            self._fence()
        self._words[index * self._stride] = value & _WORD_MASK
        if self._futex is not None:
            _, quick, number = self._futex
            # Always: finding out whether a process sleeps would take a fence that costs as much.
            quick(number, self._address + index * LINE_BYTES, _FUTEX_WAKE, 0x7FFFFFFF, None, None, 0)

    def reached(self, index: int, target: int) -> bool:
        """Whether the counter is at `target` or past it; it may have wrapped around."""
        if (self._words[index * self._stride] - target) & _HALF_WORD:
            return False
        if self._fence is not None:
            self._fence()
        return True

    def wait(self, index: int, target: int, deadline: float, check: Callable[[], None]) -> bool:
        """Wait until the counter has reached `target`. Returns False if `deadline` (monotonic) passes first.

        `check` is called occasionally and may raise. Other threads of this process can run during the wait.
        """
        words, at = self._words, index * self._stride
        for _ in range(self.spins):
            # Without yielding: on a busy machine this process would run again only milliseconds later.
            if not (words[at] - target) & _HALF_WORD:
                return self.reached(index, target)
        pause_s, slice_s = 0.00002, _FIRST_SLICE_S
        while not self.reached(index, target):
            left_s = deadline - time.monotonic()
            if slice_s > _FIRST_SLICE_S or left_s <= 0 or self._futex is None:
                check()
            if left_s <= 0:
                return self.reached(index, target)
            if self._futex is not None:
                self._sleep(index, int(words[at]), target, min(left_s, slice_s))
                slice_s = _SLICE_S
            else:
                time.sleep(min(pause_s, left_s))
                pause_s = min(pause_s * 1.5, 0.001)
        return True

    def _sleep(self, index: int, seen: int, target: int, seconds: float) -> None:
        if not (seen - target) & _HALF_WORD:
            return
        assert self._futex is not None
        sleeping, _, number = self._futex
        span = _Timespec(int(seconds), int(seconds % 1 * 1e9))
        done = sleeping(number, self._address + index * LINE_BYTES, _FUTEX_WAIT, seen, ctypes.byref(span), None, 0)
        if done < 0 and ctypes.get_errno() not in (errno.EAGAIN, errno.EINTR, errno.ETIMEDOUT):
            self._futex = None  # forbidden, as in some sandboxes: poll with short sleeps instead

    def close(self) -> None:
        self._words.release()
