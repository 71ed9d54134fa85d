"""`potluck up` against real sshd: how fast it starts, what it leaves behind, what it says of broken machines.

    .venv/bin/python bench/up.py [--count 20] [--only start,orphans,broken,twice] [--json FILE]

start    what the time is spent on for one bare machine (nothing but Python, and the wheels in a folder); then from
         bare to the first step, and the second time, with one guest and with two, beside `potluck host` alone in
         the same minute: on a busy box only the difference tells. All share the cores of this box, at equal
         priority; the bars are for one guest
orphans  guests alive 10 s after {Ctrl-C, kill -9 of the launcher, kill -9 of ssh, a black-holed link}, of --count,
         beside the way of mlx.launch: ssh with a terminal, and a second ssh that kills by pid file
broken   ten machines broken in ten ways, in one run: how many are named with their cause and fix
twice    two `potluck up` on the same machines at once

Needs root on Linux, for namespaces and mounts, and openssh-server. Exits with 1 if a bar is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from support import sshd  # noqa: E402
from support.broken_machines import FINDINGS, HEALTHY, broken_machines  # noqa: E402
from support.two_machines import ADDRESSES, TwoMachines, environment, why_not  # noqa: E402

BARE_S, SECOND_S, ORPHAN_S = 60.0, 5.0, 10.0
NO_BYTECODE = "PYTHONDONTWRITEBYTECODE"
"""With it every start compiles Potluck again: 0.25 s of the host's, which people do not have."""
BATCH = 20
"""Guests of one launcher."""
SMALL = ["gpt", "--depth", "1", "--sequence", "32", "--batch-tokens", "256", "--steps", "40"]
PACED = ("--device", "paced:0.02")
"""For the host: else 40 steps are over before its guest has passed its check."""
CASES = ("Ctrl-C", "kill -9 launcher", "kill -9 ssh", "black hole")
GUEST = "import time; print('up', flush=True); time.sleep(900)"

OURS = """
import sys, threading, time
from pathlib import Path
from potluck.fleet.bootstrap import FleetNeeds
from potluck.spec.fleet_file import NamedMachine
from potluck.fleet.ssh import SshFleet
folder, config, python, count, guest, mark = Path(sys.argv[1]), *sys.argv[2:7]
machines = [NamedMachine(ssh="beta", name=f"beta-{n}", python=python) for n in range(int(count))]
fleet = SshFleet(machines, FleetNeeds(imports={}), logs=folder, ssh=("ssh", "-F", config))
def start(name):
    fleet.run(name, ["-S", "-c", guest, mark], fleet.log(name))
threads = [threading.Thread(target=start, args=(name,)) for name in fleet.machines()]
[t.start() for t in threads]; [t.join() for t in threads]
print("started", flush=True)
try:
    time.sleep(900)
except KeyboardInterrupt:
    fleet.close()
"""
BY_PID_FILE = """
import subprocess, sys, time
config, python, count, guest, mark = sys.argv[2:7]
line = f"stty -echo; pidfile=$(mktemp); echo $$ > $pidfile; echo $pidfile; exec {python} -S -c \\"{guest}\\" {mark}"
ssh = ["ssh", "-F", config]
command = [*ssh, "-tt", "-o", "LogLevel=QUIET", "beta", line]
started = [
    subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) for _ in range(int(count))
]
files = [process.stdout.readline().decode().strip() for process in started]
for process in started:
    process.stdout.readline()
print("started", flush=True)
try:
    time.sleep(900)
except KeyboardInterrupt:
    for process, file in zip(started, files):
        process.terminate()
        process.wait()
        subprocess.run([*ssh, "beta", f"kill $(cat {file}); rm {file}"])
"""


def with_mark(mark: str) -> dict[int, list[str]]:
    """Processes whose arguments hold this word, with their arguments."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue
        if mark in words:
            found[int(path.parent.name)] = words
    return found


def wait_for(reached: Any, seconds: float) -> bool:
    end = time.monotonic() + seconds
    while not reached():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


# -- orphans ------------------------------------------------------------------------------------------------


def orphans(folder: Path, count: int) -> dict[str, dict[str, list[int]]]:
    """By way and case: [guests alive after ORPHAN_S, guests that were started]."""
    found: dict[str, dict[str, list[int]]] = {}
    with TwoMachines(folder / "two") as net, sshd.SshMachines(folder / "ssh") as servers:
        many = ("MaxStartups 200", "MaxSessions 200")
        before = tuple(net.beta.inside([]))
        beta = servers.add("beta", address=ADDRESSES["beta"], before=before, reachable=False, options=many)
        scan = f"until ssh-keyscan -T 1 -p {beta.port} {beta.address} 2>/dev/null | grep -q ssh; do :; done"
        net.alpha.sh(scan)
        for way, text in (("potluck", OURS), ("pid file", BY_PID_FILE)):
            found[way] = {case: [0, 0] for case in CASES}
            for case in CASES:
                while found[way][case][1] < count:
                    size = min(BATCH, count - found[way][case][1])
                    left = _one(net, servers, text, case, size, folder)
                    found[way][case][0] += left
                    found[way][case][1] += size
                print(
                    f"  {way:9} {case:17} {found[way][case][0]} of {count} alive after {ORPHAN_S:.0f} s", flush=True
                )
    return found


def _one(net: TwoMachines, servers: sshd.SshMachines, text: str, case: str, size: int, folder: Path) -> int:
    mark = f"mark-{time.monotonic_ns()}"
    logs = folder / mark
    logs.mkdir()
    words = [str(logs), servers.ssh[2], sys.executable, str(size), GUEST, mark]
    command = net.alpha.inside([sys.executable, "-c", text, *words])
    launcher = subprocess.Popen(
        command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True
    )
    assert launcher.stdout is not None
    try:
        assert launcher.stdout.readline() == b"started\n", "the launcher failed"
        assert wait_for(lambda: len(_guests(mark)) == size, 30), f"{len(_guests(mark))} of {size} guests started"
        if case == "Ctrl-C":
            os.killpg(launcher.pid, signal.SIGINT)  # as a terminal does
        elif case == "kill -9 launcher":
            for pid in _launchers(mark):
                sshd.kill(pid)
        elif case == "kill -9 ssh":
            for pid in _clients(servers):
                sshd.kill(pid)
        else:
            net.beta.sh("ip link set eth0 down")
        wait_for(lambda: not _guests(mark), ORPHAN_S)
        return len(_guests(mark))
    finally:
        net.beta.sh("ip link set eth0 up")
        for pid in (*_launchers(mark), *_clients(servers), *_guests(mark)):
            sshd.kill(pid)
        launcher.kill()
        launcher.wait()
        launcher.stdout.close()


def _guests(mark: str) -> list[int]:
    """A launcher has the mark among its arguments, too; a shell has it inside its line."""
    return [pid for pid, words in with_mark(mark).items() if words[1] == "-S"]


def _launchers(mark: str) -> list[int]:
    return [pid for pid, words in with_mark(mark).items() if words[1] == "-c"]


def _clients(servers: sshd.SshMachines) -> list[int]:
    return [pid for pid, words in with_mark(servers.ssh[2]).items() if words[0] == "ssh"]


# -- potluck up ---------------------------------------------------------------------------------------------


def environ() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name != NO_BYTECODE}
    return {**kept, "PYTHONPATH": str(ROOT / "src")}


@contextmanager
def up(folder: Path, servers: sshd.SshMachines, *words: str) -> Iterator[subprocess.Popen[str]]:
    env = {**environ(), **servers.variables}
    command = [sys.executable, "-m", "potluck", "up", "--bind", "127.0.0.1", *words, "--", *SMALL]
    folder.mkdir(exist_ok=True)
    process = subprocess.Popen(
        command, env=env, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def wheels(folder: Path) -> str:
    """Fill a folder with the wheels that a machine needs; what tells its pip of it, for sshd's SetEnv."""
    from potluck.fleet.bootstrap import FleetNeeds

    place = folder / "wheels"
    python = sys.executable
    pins = [*FleetNeeds(imports={}).pins, "uv"]
    command = [python, "-m", "pip", "download", "-qq", "--disable-pip-version-check", "-d", str(place), *pins]
    subprocess.run(command, check=True)
    return f"PIP_NO_INDEX=1 PIP_FIND_LINKS={place}"


def start(folder: Path, names: tuple[str, ...], index: str) -> dict[str, float]:
    """Seconds until the first step with all guests there, on bare machines, and the second time."""
    found: dict[str, float] = {}
    runs = folder / f"runs-{len(names)}"
    with sshd.SshMachines(folder / f"start-{len(names)}") as servers:
        for name in names:
            servers.add(name, env=index)
        all_there = ("--wait-for", str(len(names)), "--wait-s", "600")
        for which, words in (("bare", all_there), ("second, all guests there", all_there), ("second", ())):
            with up(runs, servers, *names, *words) as process:
                marks = first_step(process)
                assert process.wait(60) == 0
            found[which] = marks["first step"]
            print(f"  {which:26} {found[which]:6.1f} s   " + ", ".join(f"{k} {v:.1f}" for k, v in marks.items()))
            if which == "bare":
                for log in sorted(runs.glob("runs/*/logs/*.log")):
                    for line in re.findall("^installed in.*", log.read_text(), re.MULTILINE):
                        print(f"  {'':26} {log.stem}: {line}")
    with alone(folder) as process:
        found["potluck host alone"] = first_step(process)["first step"]
    print(f"  {'potluck host alone':26} {found['potluck host alone']:6.1f} s", flush=True)
    return found


MARKS = {"host ready": r"run [0-9-]+-gpt: ", "a guest joined": r"\* \S+ .*joined", "first step": r"step +1/"}


def first_step(process: subprocess.Popen[str]) -> dict[str, float]:
    """Seconds from now until each of the MARKS is printed; reads the output to its end."""
    began = time.monotonic()
    assert process.stdout is not None
    marks: dict[str, float] = {}
    text = ""
    for line in process.stdout:
        text += line
        for name, pattern in MARKS.items():
            if name not in marks and re.search(pattern, line):
                marks[name] = time.monotonic() - began
    assert "first step" in marks, text
    return marks


def phases(folder: Path, index: str) -> dict[str, float]:
    """Seconds of each thing that is done for one bare machine, one after the other."""
    from potluck.fleet import bootstrap
    from potluck.fleet.ssh import SshFleet
    from potluck.spec.fleet_file import NamedMachine

    found: dict[str, float] = {}

    def timed(what: str, call: Any) -> None:
        began = time.monotonic()
        call()
        found[what] = time.monotonic() - began

    timed("wheel made", bootstrap.wheel)
    logs = folder / "phases-logs"
    logs.mkdir()
    needs = bootstrap.FleetNeeds(imports={"torch": "torch"})
    with sshd.SshMachines(folder / "phases") as servers:
        servers.add("desk", env=index)
        for which in ("bare", "second"):
            fleet = SshFleet([NamedMachine(ssh="desk", name="desk")], needs, logs=logs, ssh=servers.ssh)
            timed(f"{which}: ssh, Python found, facts", lambda fleet=fleet: fleet.reach("desk"))
            timed(f"{which}: installed and checked", lambda fleet=fleet: fleet.prepare("desk"))
            words = ["-c", "import torch, potluck.fleet.received"]
            task = fleet.run("desk", words, logs / "x")
            timed(f"{which}: import of torch and potluck there", lambda task=task: task.wait(100))
            fleet.close()
    line = re.search(r"installed in.*\((.*)\)", (logs / "desk.log").read_text())
    for part in line[1].split(", ") if line else ():
        what, _, seconds = part.rpartition(" ")
        found[f"  of it: {what}"] = float(seconds)
    return found


@contextmanager
def alone(folder: Path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "potluck", "host", "--bind", "127.0.0.1", "--view", "plain", *SMALL]
    process = subprocess.Popen(command, cwd=folder, env=environ(), stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def broken(folder: Path) -> tuple[int, str]:
    """How many of ten are named by `potluck up`, and its output."""
    with broken_machines(folder / "broken") as (servers, named):
        fleet = folder / "fleet.toml"
        fleet.write_text(
            "".join(
                f'[[machine]]\nssh = "{m.ssh}"\n' + (f'python = "{m.python}"\n' if m.python else "") for m in named
            )
        )
        with up(folder / "runs-broken", servers, str(fleet), "--wait-for", "1") as process:
            text = process.communicate(timeout=180)[0]
            status = process.returncode
    named_there = [name for name in FINDINGS if re.search(rf"\[{name}\]", text)]
    fixed = text.count("  fix ")
    assert status == 0, text
    assert f"{HEALTHY} " in text
    return min(len(named_there), fixed), text


def twice(folder: Path) -> bool:
    """Two at once: both finish, each with its own guest, whose gradients agree."""
    with sshd.SshMachines(folder / "twice") as servers:
        servers.add("desk")
        own = ("--python", sys.executable, "--wait-for", "1", *PACED)
        with (
            up(folder / "one", servers, "desk", *own) as one,
            up(folder / "two-runs", servers, "desk", *own) as two,
        ):
            texts = [process.communicate(timeout=180)[0] for process in (one, two)]
            done = [process.returncode for process in (one, two)]
    well = done == [0, 0] and all(re.search(r"\* desk .*joined: gradients", text) for text in texts)
    if not well:
        print("\n".join(texts))
    return well


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--only", default="start,orphans,broken,twice")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    why = sshd.why_not() or why_not()
    if why is not None:
        print(f"skipped: {why}")
        return 0
    # A shell starts what it puts in the background with SIGINT ignored, and every child would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    result: dict[str, Any] = {}
    missed: list[str] = []
    folder = Path(tempfile.mkdtemp(prefix="potluck-bench-up-"))
    try:
        if "start" in options.only:
            cores = len(os.sched_getaffinity(0))
            load = os.getloadavg()[0]
            print(f"host and guests share {cores} cores of this box; load before: {load:.1f}")
            index = wheels(folder)
            result["phases"] = phases(folder, index)
            for name, seconds in result["phases"].items():
                print(f"  {name:45} {seconds:6.1f} s", flush=True)
            for names in (("desk",), ("desk", "laptop")):
                print(f"to the first step, guests: {len(names)}:", flush=True)
                result[f"start, {len(names)}"] = start(folder, names, index)
            bars = {"bare": BARE_S, "second": SECOND_S, "second, all guests there": SECOND_S}
            judged = result["start, 1"]
            missed += [name for name, bar in bars.items() if judged[name] > bar]
        if "orphans" in options.only:
            print(f"guests alive {ORPHAN_S:.0f} s after:")
            result["orphans"] = orphans(folder, options.count)
            missed += [f"orphans after {case}" for case, (left, _) in result["orphans"]["potluck"].items() if left]
        if "broken" in options.only:
            result["broken"], _ = broken(folder)
            print(f"broken machines named with cause and fix: {result['broken']} of {len(FINDINGS)}")
            missed += ["broken"] if result["broken"] < len(FINDINGS) else []
        if "twice" in options.only:
            result["twice"] = twice(folder)
            print(f"two at once on the same machine: {'both finished' if result['twice'] else 'failed'}")
            missed += [] if result["twice"] else ["twice"]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=1))
    if missed:
        print(f"missed: {', '.join(missed)}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
