"""Rigs of network namespaces: links as fast as they should be, shared by all, and nothing ever left behind."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from potluck.errors import UserError
from potluck.lab import cgroup, permission, rigs_up
from potluck.lab.namespaces import MODULES, NamespaceBox
from potluck.lab.permission import why_not
from support.rigs import assert_nothing_is_left, cgroups, files, processes, rig, the_state, wait_until

pytestmark = [
    pytest.mark.skipif(why_not() is not None, reason=why_not() or ""),
    pytest.mark.timeout(60),
]

NOBODY = 65534
DESK = {"name": "desk", "role": "host"}
PYTHON = (sys.executable, "-I", "-S")

SINK = """
import socket, sys, threading, time
address, connections = sys.argv[1], int(sys.argv[2])
listening = socket.create_server((address, 7777))
print("listening", flush=True)

def count(connection):
    # The rate in the middle: neither TCP's slow start nor what was in the queue.
    first = time.monotonic()
    received, began = 0, None
    while data := connection.recv(1 << 20):
        now = time.monotonic()
        received += len(data)
        if began is None and now - first > 0.5:
            began, received = now, 0
    print("mbit", received * 8e-6 / (now - began), flush=True)

threads = [threading.Thread(target=count, args=[listening.accept()[0]]) for _ in range(connections)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""

SOURCE_OF_BYTES = """
import socket, sys, time
connection = socket.create_connection((sys.argv[1], 7777), timeout=5)
# Little is kept here, or it would still be on its way when the time is over.
connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 18)
end = time.monotonic() + float(sys.argv[2])
while time.monotonic() < end:
    connection.sendall(bytes(1 << 15))
"""

OWNER = """
import json, os, sys, time
from pathlib import Path
from potluck.lab.namespaces import NamespaceBox
from potluck.spec.rig import parse

rig, log = parse(json.loads(sys.argv[1])), Path(sys.argv[2])
with NamespaceBox(rig) as box:
    # With a child of its own, which no death signal reaches.
    command = box.start(rig.machines[0].name, ["sh", "-c", "sleep 1000 & sleep 1000"], env=os.environ, log=log)
    print("up", flush=True)
    time.sleep(1000)
"""


@pytest.fixture(autouse=True)
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A place of the test's own for state files; it also marks every process that the test starts."""
    path = tmp_path / "runtime"
    path.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(path))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(MODULES))
    return path


def said(log: Path, word: str) -> list[str]:
    if not log.exists():
        return []
    return [line.split(maxsplit=1)[1] for line in log.read_text().splitlines() if line.startswith(f"{word} ")]


def rates(
    box: NamespaceBox, to: str, *senders: str, log: Path, seconds: float, least: float, most: float
) -> list[float]:
    """Mbit/s of TCP to one machine from others at once; in sum, they must be within bounds.

    More than a link carries is wrong at once. Less may be other work on this box, so it gets another chance.
    """
    for attempt in range(3):
        found = measure(box, to, *senders, log=log.with_suffix(f".{attempt}"), seconds=seconds)
        assert sum(found) < most
        if sum(found) > least:
            return found
    pytest.fail(f"{found} Mbit/s at best, expected {least} or more")


def measure(box: NamespaceBox, to: str, *senders: str, log: Path, seconds: float) -> list[float]:
    sink = box.start(to, [*PYTHON, "-c", SINK, box.address(to), str(len(senders))], env=os.environ, log=log)
    assert wait_until(lambda: log.exists() and "listening" in log.read_text(), 10), log.read_text()
    command = [*PYTHON, "-c", SOURCE_OF_BYTES, box.address(to), str(seconds)]
    started = [box.start(sender, command, env=os.environ, log=log) for sender in senders]
    assert [process.wait(15) for process in started] == [0] * len(senders), log.read_text()
    assert sink.wait(10) == 0, log.read_text()
    return [float(rate) for rate in said(log, "mbit")]


def test_a_shaped_link_has_its_rate_in_both_directions_and_an_unshaped_one_is_fast(
    tmp_path: Path, runtime: Path
) -> None:
    machines = (DESK, {"name": "laptop", "link_mbit": 40}, {"name": "nas"})
    with NamespaceBox(rig(*machines)) as box:
        sent, received = box.traffic("laptop")
        rates(box, "desk", "laptop", log=tmp_path / "up", seconds=2.2, least=32, most=40.5)
        # 2.2 s at 40 Mbit/s are 11 MB.
        assert box.traffic("laptop")[0] - sent > 9e6
        assert box.traffic("laptop")[1] - received < 1e6
        rates(box, "laptop", "desk", log=tmp_path / "down", seconds=2.2, least=32, most=40.5)
        assert box.traffic("laptop")[1] - received > 9e6
        rates(box, "desk", "nas", log=tmp_path / "free", seconds=0.9, least=150, most=1e6)
    assert_nothing_is_left(runtime)


def test_the_hosts_link_is_shared_by_its_guests_and_guests_reach_each_other(tmp_path: Path) -> None:
    machines = ({**DESK, "link_mbit": 40}, {"name": "a"}, {"name": "b"})
    with NamespaceBox(rig(*machines)) as box:
        both = rates(box, "desk", "a", "b", log=tmp_path / "log", seconds=2.5, least=34, most=41)
        assert min(both) > 4, "one of them had the link for itself"
        # What guests say to each other does not cross the host's link.
        rates(box, "a", "b", log=tmp_path / "beside", seconds=0.8, least=400, most=1e6)


def test_statuses_signals_and_output_of_a_started_command(tmp_path: Path) -> None:
    with NamespaceBox(rig(DESK)) as box:
        log = tmp_path / "log"
        script = "echo $MARK; echo problem >&2; exit 3"
        assert box.start("desk", ["sh", "-c", script], env={"MARK": "of the test"}, log=log).wait(10) == 3
        assert log.read_text().splitlines() == ["of the test", "problem"]
        assert box.start("desk", ["nonsuch"], env={}, log=log).wait(10) == 127
        assert box.start("desk", ["sh", "-c", "kill -15 $$"], env=os.environ, log=log).wait(10) == -15
        # Python ignores SIGPIPE; the command must not.
        assert box.start("desk", ["sh", "-c", "yes | head -n 1"], env=os.environ, log=log).wait(10) == 0
        assert log.read_text().endswith("\ny\n"), "yes complained instead of dying"
        assert box.token_file("desk", log) == log
        with pytest.raises(UserError, match="no machine 'dask'"):
            box.start("dask", ["true"], env={}, log=log)
        stubborn = box.start("desk", ["sh", "-c", "trap '' TERM; echo deaf; sleep 1000"], env=os.environ, log=log)
        assert wait_until(lambda: "deaf" in log.read_text())
    assert stubborn.poll() == -signal.SIGKILL
    with pytest.raises(UserError, match="not up"):
        box.start("desk", ["true"], env={}, log=log)


@pytest.mark.skipif(os.name == "nt" or os.geteuid() != 0, reason="is not root, so all the other tests show it")
def test_it_works_without_root(tmp_path: Path) -> None:
    python = next((p for p in (sys.executable, "/usr/bin/python3") if _runs_for_nobody(p)), None)
    if python is None:
        pytest.skip("no Python 3.11 that another user may run")
    runtime = tmp_path / "nobody"
    runtime.mkdir(mode=0o700)
    # pytest's folders are for its own user.
    place = Path("/tmp") / f"potluck-test-{os.getpid()}"
    try:
        place.mkdir(mode=0o700)
        os.chown(place, NOBODY, NOBODY)
        owner = subprocess.Popen(
            [python, "-c", OWNER, json.dumps({"name": "t", "machine": [DESK, {"name": "b"}]}), str(place / "log")],
            env={**os.environ, "XDG_RUNTIME_DIR": str(place), "PYTHONDONTWRITEBYTECODE": "1"},
            cwd="/",
            user=NOBODY,
            group=NOBODY,
            extra_groups=[],
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            assert owner.stdout is not None
            assert owner.stdout.readline() == "up\n"
            (file,) = place.glob("*/*.json")
            found = msgspec.json.decode(file.read_bytes(), type=rigs_up.State)
            network = f"/proc/{found.holders['desk'].pid}/ns/net"
            assert os.stat(network).st_ino != os.stat("/proc/self/ns/net").st_ino
            assert "eth0" in Path(f"/proc/{found.holders['b'].pid}/net/dev").read_text()
            assert os.stat(file).st_uid == NOBODY
            # The owner, the supervisor, two holders, the shell and its two sleeps.
            assert wait_until(lambda: len(processes(place)) == 7), processes(place)
        finally:
            owner.kill()
            owner.wait()
            assert owner.stdout is not None
            owner.stdout.close()
        assert_nothing_is_left(place)
    finally:
        shutil.rmtree(place)


def _runs_for_nobody(python: str) -> bool:
    try:
        check = "import sys; sys.exit(sys.version_info < (3, 11))"
        done = subprocess.run([python, "-c", check], user=NOBODY, group=NOBODY, extra_groups=[], timeout=20, env={})
    except OSError:
        return False
    return done.returncode == 0


@contextlib.contextmanager
def owner_of(tmp_path: Path, *machines: Mapping[str, Any], name: str) -> Iterator[subprocess.Popen[str]]:
    """Another process that has brought a rig up and started something on it."""
    table = json.dumps({"name": name, "machine": list(machines)})
    owner = subprocess.Popen(
        [sys.executable, "-S", "-c", OWNER, table, str(tmp_path / f"{name}.log")], stdout=subprocess.PIPE, text=True
    )
    try:
        assert owner.stdout is not None
        assert owner.stdout.readline() == "up\n"
        yield owner
    finally:
        owner.kill()
        owner.wait()
        assert owner.stdout is not None
        owner.stdout.close()


def may_limit() -> bool:
    mount = cgroup.find_mount()
    return mount is not None and os.geteuid() == 0 and os.access(mount.root, os.W_OK)


def test_an_owner_killed_leaves_nothing_behind(tmp_path: Path, runtime: Path) -> None:
    before = cgroups("killed")
    desk = {**DESK, "cpu_limit": 0.5} if may_limit() else DESK
    with owner_of(tmp_path, desk, {"name": "laptop", "link_mbit": 10}, name="killed") as owner:
        # The owner, the supervisor, two holders, the shell and its two sleeps.
        assert wait_until(lambda: len(processes(runtime)) == 7), processes(runtime)
        assert len(files(runtime)) == 2
        assert (len(cgroups("killed") - before) == 1) == may_limit()
        owner.kill()
        owner.wait()
        assert_nothing_is_left(runtime)
        assert cgroups("killed") <= before


def test_what_a_killed_supervisor_leaves_is_removed_by_the_next_call_and_nothing_else(
    tmp_path: Path, runtime: Path
) -> None:
    before = cgroups("broken", "innocent")
    desk = {**DESK, "cpu_limit": 0.5} if may_limit() else DESK
    with (
        owner_of(tmp_path, desk, name="broken") as broken,
        owner_of(tmp_path, desk, {"name": "laptop"}, name="innocent") as innocent,
    ):
        dead, live = the_state(runtime, "broken"), the_state(runtime, "innocent")
        os.kill(dead.supervisor.pid, signal.SIGKILL)
        assert wait_until(lambda: not dead.holders["desk"].lives), "a holder outlived its supervisor"
        assert len(files(runtime)) == 4
        with NamespaceBox(rig(DESK, name="next")) as box:
            assert box.start("desk", ["true"], env={}, log=tmp_path / "log").wait(10) == 0
            assert {name.partition("-")[0] for name in files(runtime)} == {"innocent", "next"}
        assert {name.partition("-")[0] for name in files(runtime)} == {"innocent"}
        assert len(cgroups("broken", "innocent") - before) == may_limit()
        assert broken.poll() is None, "its owner is not ours to end"
        assert innocent.poll() is None
        assert live.supervisor.lives
        assert all(holder.lives for holder in live.holders.values())
        # What ran on the machines that died, died; what runs on the others goes on.
        assert wait_until(lambda: sum("'sleep" in process for process in processes(runtime)) == 2)
    assert_nothing_is_left(runtime)
    assert cgroups("broken", "innocent") <= before


def test_a_later_process_with_the_same_id_is_not_the_supervisor(runtime: Path, tmp_path: Path) -> None:
    folder = rigs_up.folder()
    own = rigs_up.identify(os.getpid())
    assert own is not None
    assert own.lives
    assert not own.gone
    for name, process in (
        ("earlier", {"started": own.started - 1}),
        ("rebooted", {"boot": "another"}),
        ("elsewhere", {"space": "pid:[1]"}),
        ("here", {}),
    ):
        rigs_up.write(folder, name, rigs_up.State(supervisor=replace(own, **process)))
        rigs_up.lock_path(folder, name).touch()
    with rigs_up.starting(folder):
        assert rigs_up.sweep(folder) == ["earlier", "rebooted"]
    assert files(runtime) == ["elsewhere.json", "elsewhere.lock", "here.json", "here.lock"]
    for name in ("elsewhere", "here"):
        rigs_up.remove(folder, name)


def test_a_state_folder_that_is_not_ours_alone_is_refused(runtime: Path) -> None:
    path = runtime / f"potluck-lab-{os.geteuid()}"
    (runtime / "real").mkdir(mode=0o700)
    path.symlink_to(runtime / "real")
    with pytest.raises(UserError, match="not a folder of yours alone"):
        rigs_up.folder()
    path.unlink()
    path.mkdir()
    path.chmod(0o755)
    with pytest.raises(UserError, match="not a folder of yours alone"):
        rigs_up.folder()
    path.chmod(0o700)
    assert rigs_up.folder() == path


@pytest.mark.skipif(not may_limit(), reason="needs root and the cpu controller of cgroups")
def test_a_cpu_limit_holds(tmp_path: Path) -> None:
    burn = "import time; e = time.monotonic() + 1.5\nwhile time.monotonic() < e: pass\n"
    burn += "print('used', time.process_time())"
    before = cgroups("test")
    with NamespaceBox(rig({**DESK, "cpu_limit": 0.2})) as box:
        log = tmp_path / "log"
        assert box.start("desk", [*PYTHON, "-c", burn], env={}, log=log).wait(15) == 0
        assert 0.1 < float(said(log, "used")[0]) < 0.45
        assert len(cgroups("test") - before) == 1
    assert cgroups("test") <= before


def test_the_mount_with_the_cpu_controller_is_found_in_either_version(tmp_path: Path) -> None:
    place = tmp_path / "a place"  # which the kernel writes as a\040place
    place.mkdir()
    controllers = place / "cgroup.controllers"
    controllers.write_text("cpuset cpu io memory\n")
    unified = "cgroup2 {} cgroup2 rw,nosuid 0 0\n".format(str(place).replace(" ", r"\040"))
    old = "cgroup /sys/fs/cgroup/memory cgroup rw,memory 0 0\ncgroup /sys/fs/cgroup/cpu cgroup rw,cpu,cpuacct 0 0\n"
    assert cgroup.find_mount("proc /proc proc rw 0 0\n" + unified) == cgroup.Mount(place, 2)
    assert cgroup.find_mount(old + unified) == cgroup.Mount(Path("/sys/fs/cgroup/cpu"), 1)
    controllers.write_text("cpuset io\n")
    assert cgroup.find_mount(unified) is None


def test_a_cpu_limit_that_cannot_be_had_says_what_to_do(runtime: Path) -> None:
    nowhere = cgroup.Mount(runtime / "missing", 1)
    with pytest.raises(UserError, match="cpu_limit needs a cgroup") as caught:
        cgroup.make(nowhere, "x", {"desk": 1.0})
    assert "as root, or leave cpu_limit out" in caught.value.hint


def has_netem() -> bool:
    try:
        permission.require(netem=True)
    except UserError:
        return False
    return True


def test_latency_is_added_each_way_and_the_rate_stays(tmp_path: Path) -> None:
    if not has_netem():
        pytest.skip("this kernel has no netem")
    dial = (
        "import socket, sys, time; t = time.monotonic()\ntry: socket.create_connection((sys.argv[1], 9))\n"
        "except ConnectionRefusedError: print('ms', (time.monotonic() - t) * 1e3)"
    )
    with NamespaceBox(rig(DESK, {"name": "far", "latency_ms": 30, "link_mbit": 40})) as box:
        for _ in range(2):  # the first also asks who has the address
            command = [*PYTHON, "-c", dial, box.address("desk")]
            assert box.start("far", command, env={}, log=tmp_path / "log").wait(10) == 0
        assert 55 < float(said(tmp_path / "log", "ms")[-1]) < 120
        rates(box, "desk", "far", log=tmp_path / "up", seconds=2.5, least=34, most=40.5)


def test_latency_without_netem_is_refused_before_anything_is_made(runtime: Path) -> None:
    machines = (DESK, {"name": "far", "latency_ms": 30, "link_mbit": 100})
    if has_netem():
        pytest.skip("this kernel has netem")
    with pytest.raises(UserError, match="netem") as caught, NamespaceBox(rig(*machines)):
        pass
    assert "--loopback" in caught.value.hint
    assert processes(runtime) == []
    assert list(runtime.iterdir()) == []


WITHOUT_NAMESPACES = """
import os, sys
from potluck.lab.enter import CLONE_NEWUSER, call

ready, go = os.pipe(), os.pipe()
child = os.fork()
if child:
    os.read(ready[0], 1)
    for name in ("uid_map", "gid_map"):
        with open(f"/proc/{child}/{name}", "w") as file:
            file.write("0 0 70000")
    os.write(go[1], b"x")
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
call("unshare", CLONE_NEWUSER)
os.write(ready[1], b"x")
os.read(go[0], 1)
with open("/proc/sys/user/max_user_namespaces", "w") as file:
    file.write("0")
os.setgroups([])
os.setresgid(65534, 65534, 65534)
os.setresuid(65534, 65534, 65534)
os.execv(sys.argv[1], sys.argv[1:])
"""


@pytest.mark.skipif(os.name == "nt" or os.geteuid() != 0, reason="needs root to become a user who may not")
def test_a_user_who_may_not_is_told_why() -> None:
    """In a user namespace of the test's own, whose users may make no further ones."""
    python = next((p for p in (sys.executable, "/usr/bin/python3") if _runs_for_nobody(p)), None)
    if python is None:
        pytest.skip("no Python 3.11 that another user may run")
    look = "from potluck.lab.permission import why_not; print(why_not())"
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_NAMESPACES, python, "-c", look],
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )
    if "unshare: " in done.stderr:
        pytest.skip(done.stderr)  # not even root may, as in most containers
    assert done.stdout == "user namespaces are switched off (user.max_user_namespaces is 0)\n", done.stderr


def test_what_is_needed_is_said_with_what_to_do(monkeypatch: pytest.MonkeyPatch, runtime: Path) -> None:
    monkeypatch.setattr(permission, "_try", lambda before, script: "unshare: Operation not permitted")
    with pytest.raises(UserError, match=r"Operation not permitted|is 0|is 1") as caught, NamespaceBox(rig(DESK)):
        pass
    assert ("sudo" in caught.value.hint) == (os.geteuid() != 0)
    assert "--loopback" in caught.value.hint
    assert list(runtime.iterdir()) == []


def test_entering_imports_nothing_heavy() -> None:
    program = (
        "import sys; import potluck.lab.enter, potluck.lab.supervisor;"
        "print([m for m in sys.modules if m.split('.')[0] in ('torch', 'click', 'rich', 'zmq', 'psutil', 'numpy')])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=20, check=True)
    assert done.stdout == "[]\n"
