"""Python processes forked from a server that has imported torch: up in 50 ms, where a new one needs 4 s of CPU.

It owns what makes such a process like a new one: its environment, folder, files, session and arguments, and an end
through Python's own os.fork. It must not know what runs in it.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import gc
import hashlib
import importlib
import json
import os
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

IMPORTED = (
    "torch",
    "torch._dynamo",  # torch's optimizers and DDP import it when they are first used
    "safetensors.torch",
    "potluck.cli.host",
    "potluck.cli.join",
    "potluck.cli.train",
    "potluck.fleet.script",
    "potluck.hosting",
    "potluck.report.guest_view",
    "potluck.train.recipes.gpt",
    "potluck.train.run",
)
"""Only what a host or a guest imports anyway: an import that Potluck forgot must still be missed."""
MAY_DIFFER = (
    *("POTLUCK_", "SPOIL", "TMPDIR", "COLUMNS", "PYTEST_", "PYTORCH_NVML_"),
    *("MASTER_", "RANK", "LOCAL_", "WORLD_SIZE", "STORE", "TORCHINDUCTOR_"),
)
"""Variables, by their beginnings, that nothing of the above reads while it is imported. The last one torch sets
itself when the first optimizer is made; Lightning sets PYTORCH_NVML_BASED_CUDA_CHECK."""
SHARED = "FORKS_OF_ALL_WORKERS"
STARTED_WITH = dict(os.environ)
"""The server's own: not what a test has changed when the first fork is asked for."""
MODULES = ("potluck", "potluck.lab.ddp_worker", "support.dist_endings", "support.ranks")
VERBS = ("host", "join", "probe", "train")
"""The other verbs import no torch, or should not: they start as they do for a person."""
PARENTS = ("potluck", "torch.distributed.run")
"""Those that start processes which import torch: with spares for these, they are forked themselves."""
INHERITED = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))
"""A process ignores those of them that whoever starts it ignores: nohup, and a shell's background."""
ENDS_AS_USUAL = {"__main__", "potluck", "zmq"}
"""Beside Python's own: these are taken apart at the end of a fork, as at the end of any process."""
PR_SET_PDEATHSIG = 1
LONGEST_PATH = 100
"""Of a socket: the system's limit is 108."""
START_S = 120.0


def servers() -> list[int]:
    """The process that forks, if there is one: it stays until the tests end."""
    return [_server().pid] if _server.cache_info().currsize else []


def can_be_forked(command: Sequence[str], env: Mapping[str, str], *, children: int = 0) -> bool:
    """Whether a fork would be the same as this command: a host, a guest or a script, with the usual settings."""
    if sys.platform != "linux" or Path("/dev/nvidiactl").exists() or command[0] != sys.executable:
        return False  # CUDA does not survive a fork, and macOS warns of it
    if not _ends_are_told():
        return False
    words = command[1:]
    is_parent = children > 0 and words[0] == "-m" and words[1] in PARENTS
    return (is_parent or called(words)) and _server().takes(env)


def called(words: Sequence[str]) -> bool:
    """Whether Python, called with these words, is a host, a guest, a worker or a script."""
    return _imports_torch(words) and (words[1:2] != ["potluck"] or words[2] in VERBS)


def _imports_torch(words: Sequence[str]) -> bool:
    """Whether a process that has spares starts one for this; its verbs may be others, as that of a rank."""
    if words[:1] == ["-m"]:
        return words[1] in MODULES
    return bool(words) and words[0].endswith(".py")


def fork(
    command: Sequence[str], *, cwd: Path, env: Mapping[str, str], out: Path, err: Path, children: int = 0
) -> Forked:
    """Start a command, which can be forked, in a session of its own; so many of its children are forks as well."""
    request: dict[str, Any] = {"words": list(command[1:]), "cwd": str(cwd), "env": dict(env)}
    request["children"] = children
    request |= {"out": str(out), "err": str(err)}
    request["ignored"] = [int(n) for n in INHERITED if signal.getsignal(n) is signal.SIG_IGN]
    server = _server()
    return Forked(server, list(command), server.ask(request))


class Forked:
    """A process of the server's, with the part of subprocess.Popen that tests use."""

    def __init__(self, server: _Server, command: list[str], pid: int) -> None:
        self._server = server
        self.args = command
        self.pid = pid
        self.returncode: int | None = None
        # The kernel tells its end. Asking the server every 10 ms would keep two processes busy.
        self._end = os.pidfd_open(pid)
        weakref.finalize(self, os.close, self._end)

    def poll(self) -> int | None:
        self._wait(0.0)
        return self.returncode

    def wait(self, timeout: float) -> int:
        self._wait(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(self.args, timeout)
        return self.returncode

    def _wait(self, seconds: float) -> None:
        """Until it has ended, for so long at most; its status is then known."""
        if self.returncode is not None:
            return
        poll = select.poll()
        poll.register(self._end, select.POLLIN)
        if poll.poll(max(0.0, seconds) * 1000):
            self.returncode = self._server.status_of(self.pid)

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


class _Server:
    """The tests' end of it: a question and an answer at a time, each a line of JSON."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._popen: subprocess.Popen[bytes] | None = None
        path = _shared_path(environment)
        if path is None:
            ours, theirs = socket.socketpair()
            with theirs:
                self._popen = _started(environment, str(theirs.fileno()), pass_fds=[theirs.fileno()])
        else:
            ours = _connected(path, environment)
        ours.settimeout(START_S)
        self._environment = dict(environment)
        self._lock = threading.Lock()
        self._ours, self._lines = ours, ours.makefile("rw", encoding="utf-8")
        self._closed = False
        self.pid = int(self._lines.readline())
        atexit.register(self.close)

    def takes(self, env: Mapping[str, str]) -> bool:
        names = self._environment.keys() | env.keys()
        changed = [name for name in names if self._environment.get(name) != env.get(name)]
        return all(name.startswith(MAY_DIFFER) or _may_be(name, env.get(name)) for name in changed)

    def ask(self, question: dict[str, Any]) -> Any:
        """Its answer. A wait that is broken off (a test's time is over) ends the server: its answer would be taken
        for the next question's. The next test has a new one."""
        with self._lock:
            try:
                self._lines.write(json.dumps(question) + "\n")
                self._lines.flush()
                return json.loads(self._lines.readline())
            except BaseException:
                self.close()
                raise

    def status_of(self, pid: int) -> int:
        """The exit status of a process that has ended. Those of a closed server died with it."""
        return -signal.SIGKILL if self._closed else int(self.ask({"ended": pid}))

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        _server.cache_clear()
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        if self._popen is not None:
            self._popen.wait()
        for end in (self._lines, self._ours):
            with contextlib.suppress(OSError):
                end.close()


def _may_be(name: str, value: str | None) -> bool:
    """Folders that nothing is imported from at the start; no number of threads, which is then torchrun's to set."""
    if name == "PYTHONPATH":
        return not any(Path(folder, "sitecustomize.py").exists() for folder in (value or "").split(os.pathsep))
    return name == "OMP_NUM_THREADS" and value is None


@functools.cache
def _ends_are_told() -> bool:
    """Linux has pidfds since 5.3; some containers forbid them."""
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError):
        return False
    return True


def _started(environment: Mapping[str, str], *words: str, pass_fds: Sequence[int] = ()) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, __file__, *words],
        pass_fds=pass_fds,
        env=dict(environment),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )


def _shared_path(environment: Mapping[str, str]) -> str | None:
    """The socket of the process that imports torch for all workers of one pytest; None: this one is by itself.

    Another Python, or variables that matter while something is imported, have another one.
    """
    folder = STARTED_WITH.get(SHARED)
    if folder is None or not Path(folder).is_dir():
        return None
    matters = sorted(item for item in environment.items() if not item[0].startswith((*MAY_DIFFER, SHARED)))
    name = hashlib.sha256(json.dumps([sys.executable, matters]).encode()).hexdigest()[:16]
    path = str(Path(folder, name))
    return path if len(path.encode()) < LONGEST_PATH else None


def _connected(path: str, environment: Mapping[str, str]) -> socket.socket:
    """A connection to the shared process, which the first worker starts."""
    import fcntl  # not on Windows

    with open(f"{path}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        ours = socket.socket(socket.AF_UNIX)
        if ours.connect_ex(path) != 0:
            Path(path).unlink(missing_ok=True)
            _started(environment, path, environment[SHARED].rpartition("-")[2]).wait(START_S)  # it listens then
            ours.connect(path)
    return ours


def shared_folder() -> Path:
    """A new folder, for the variable `SHARED`: what runs for it ends with this process, whose id its name says."""
    folder = Path(tempfile.mkdtemp(prefix="forks-"))
    return folder.rename(folder.with_name(f"{folder.name}-{os.getpid()}"))


@functools.cache
def _server() -> _Server:
    from support.processes import _environment

    return _Server(_environment({}, STARTED_WITH))


# -- in the server ---------------------------------------------------------------------------------------


def serve(lines: Any) -> tuple[list[str], int]:
    """Answer until the tests are gone; returns in a fork, what it is to run, and how many spares it needs.

    The server itself exits in here.
    """
    lines.write(f"{os.getpid()}\n")
    lines.flush()
    for line in lines:
        question = json.loads(line)
        if "ended" in question:
            answer = os.waitstatus_to_exitcode(os.waitpid(question["ended"], 0)[1])
        else:
            answer = os.fork()
            if not answer:
                _become(question)
                return question["words"], question["children"]
        lines.write(json.dumps(answer) + "\n")
        lines.flush()
    sys.exit()


def _become(question: Mapping[str, Any]) -> None:
    """What the system and Python give to a new process; and that it does not outlive the server."""
    os.setsid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL))
    for descriptor, file in ((1, question["out"]), (2, question["err"])):
        opened = os.open(file, os.O_WRONLY | os.O_APPEND)
        os.dup2(opened, descriptor)
        os.close(opened)
    _settle(question["cwd"], question["env"])
    for number in INHERITED:
        usual = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        signal.signal(number, signal.SIG_IGN if number in question["ignored"] else usual)


def _settle(cwd: str, env: Mapping[str, str]) -> None:
    os.chdir(cwd)
    own, theirs = (variables.get("PYTHONPATH", "").split(os.pathsep) for variables in (os.environ, env))
    sys.path[:] = theirs + [folder for folder in sys.path if folder not in {*own, *theirs}]
    os.environ.clear()
    os.environ.update(env)
    tempfile.tempdir = None
    importlib.invalidate_caches()


def run(words: list[str]) -> None:
    """As `python WORDS`."""
    if words[0] == "-m":
        sys.argv = words[1:]
        sys.path.insert(0, os.getcwd())
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        sys.path.insert(0, str(Path(words[0]).resolve().parent))
        runpy.run_path(words[0], run_name="__main__")


def _keep(libraries: set[str]) -> None:
    """Python's end leaves these modules as they are: to take torch apart would copy 40 MB of shared memory."""
    for name in libraries & sys.modules.keys():
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(sys.modules.pop(name)))


def _end_after_python() -> None:
    """End the process when Python has been finalized and C's files are written.

    The static destructors of torch's libraries would follow. They touch most memory that a fork shares: 0.2 s of
    CPU, more than the whole life of a small guest. Handlers run in the reverse of their order here.
    """
    libc = ctypes.CDLL(None)
    libc.on_exit(libc._exit, None)
    libc.__cxa_atexit(libc.fflush, None, None)


def _listening(path: str) -> socket.socket:
    """Returns in a child that belongs to nobody, when whoever started this can connect."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(64)
    if os.fork():
        os._exit(0)
    return listener


def _one_of_many(listener: socket.socket, owner: int) -> socket.socket:
    """Fork a server for each worker that connects, and return in it; ends with the owner, and its folder too."""
    folder = Path(listener.getsockname()).parent
    try:
        alive = os.pidfd_open(owner)
    except ProcessLookupError:
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(0)
    poll = select.poll()
    for file in (alive, listener.fileno()):
        poll.register(file, select.POLLIN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for a server
    while True:
        if alive in dict(poll.poll()):
            shutil.rmtree(folder, ignore_errors=True)
            os._exit(0)
        theirs, _ = listener.accept()
        if os.fork():
            theirs.close()
            continue
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL))
        listener.close()
        os.close(alive)
        return theirs


def main() -> None:
    import spares

    del sys.path[0]  # this file's folder, which is none of theirs
    listener = _listening(sys.argv[1]) if len(sys.argv) > 2 else None
    libraries: set[str] = set()
    atexit.register(_keep, libraries)  # the first one, so it runs last
    for name in IMPORTED:
        importlib.import_module(name)
    libraries |= {n for n in sys.modules if n.partition(".")[0] not in sys.stdlib_module_names | ENDS_AS_USUAL}
    assert len(list(Path("/proc/self/task").iterdir())) == 1, "threads do not survive a fork"
    gc.collect()
    gc.freeze()
    own = socket.socket(fileno=int(sys.argv[1])) if listener is None else _one_of_many(listener, int(sys.argv[2]))
    with own as theirs, theirs.makefile("rw", encoding="utf-8") as lines:
        words, children = serve(lines)
    if children:
        words = spares.prepare(children, _imports_torch, _settle) or words
    _end_after_python()
    run(words)


if __name__ == "__main__":
    main()
