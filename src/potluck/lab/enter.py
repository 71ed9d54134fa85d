"""Enters a machine: joins the namespaces that a process holds, then becomes the command.

    python enter.py PID PARENT SIGNAL CGROUP -- COMMAND...

Imports nothing of Potluck, so that it starts immediately, in any environment.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

CLONE_NEWUSER = 0x10000000
CLONE_NEWNET = 0x40000000
PR_SET_PDEATHSIG = 1
HELD_BACK = frozenset(
    getattr(signal, name) for name in ("SIGINT", "SIGQUIT", "SIGTERM", "SIGHUP") if hasattr(signal, name)
)
NOT_ENTERED = 125
NOT_EXECUTABLE = 126
NOT_FOUND = 127
"""The exit statuses of `env`, `nice` and shells if they cannot run a command."""


def call(name: str, *arguments: int) -> None:
    """A function of the C library that answers -1 when it fails."""
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments) == -1:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def join_namespaces(pid: int) -> None:
    """Become a member of the user and network namespaces of a process."""
    files = []
    for name, kind in (("user", CLONE_NEWUSER), ("net", CLONE_NEWNET)):
        path = f"/proc/{pid}/ns/{name}"
        # Joining the own user namespace fails.
        if os.stat(path).st_ino != os.stat(f"/proc/self/ns/{name}").st_ino:
            files.append((os.open(path, os.O_RDONLY | os.O_CLOEXEC), kind))
    for file, kind in files:  # all are open by now: in the other user namespace /proc may not be ours to read
        call("setns", file, kind)
        os.close(file)


def die_with(parent: int, number: int) -> None:
    """Let the kernel send this process a signal when its parent ends, which may already have happened.

    A change of credentials, so also of the user namespace, undoes it: it comes after that. It is the parent's
    thread that counts: a process dies with the thread that started it.
    """
    call("prctl", PR_SET_PDEATHSIG, number, 0, 0, 0)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def main(arguments: Sequence[str]) -> int:
    pid, parent, death_signal, cgroup, _, *command = arguments
    try:
        if cgroup:
            with open(os.path.join(cgroup, "cgroup.procs"), "w") as file:
                file.write(str(os.getpid()))
        join_namespaces(int(pid))
        die_with(int(parent), int(death_signal))
    except OSError as error:
        print(f"potluck lab: cannot enter the machine: {error}", file=sys.stderr)
        return NOT_ENTERED
    # Python ignores these, and what is ignored stays so in the command: `yes | head` would never end.
    for ignored in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(ignored, signal.SIG_DFL)
    # The caller may have blocked them until the command runs.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HELD_BACK)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"potluck lab: cannot run {command[0]}: {error.strerror}", file=sys.stderr)
        return NOT_FOUND if isinstance(error, FileNotFoundError) else NOT_EXECUTABLE


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
