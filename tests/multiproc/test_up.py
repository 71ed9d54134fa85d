"""`potluck up`, as a person uses it, against real sshd processes on this machine."""

from __future__ import annotations

import os
import re
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from support import sshd
from support.fleet import JOB
from support.processes import Processes, TestProcess

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(400),  # several processes with torch, one after the other
    pytest.mark.skipif(sshd.why_not() is not None, reason=sshd.why_not() or ""),
]

PACED = ("--device", "paced:0.01")  # without it the run takes a core while the test waits
SMALL = ("gpt", "--depth", "1", "--sequence", "32", "--batch-tokens", "256")


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[sshd.SshMachines]:
    with sshd.SshMachines(tmp_path / "ssh") as made:
        yield made


def started(processes: Processes, machines: sshd.SshMachines, *words: str) -> TestProcess:
    own = ("--python", sys.executable, "--bind", "127.0.0.1", "--threads", "1")
    return processes.potluck("up", *own, *words, env=machines.variables, merged=True)


def ours(folder: Path) -> dict[int, str]:
    """Processes that were started below this folder, or by ssh machines of it; without sshd's own."""
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            words = path.joinpath("cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            where = os.readlink(path / "cwd")
        except OSError:
            continue
        if str(folder) in where + words and int(path.name) != os.getpid() and "sshd" not in words:
            found[int(path.name)] = words[:1000]
    return found


def wait_until(reached: Callable[[], object], seconds: float, what: str) -> None:
    began = time.monotonic()
    while not reached():
        assert time.monotonic() - began < seconds, what
        time.sleep(0.05)


def test_a_run_with_a_flapping_guest_and_a_broken_machine_is_stopped_by_ctrl_c(
    tmp_path: Path, machines: sshd.SshMachines
) -> None:
    machines.add("laptop")
    attic = machines.add("attic", authorized=False)
    with Processes(tmp_path / "up") as processes:
        words = ("laptop", "attic", "--keep-trying", *PACED, "--", *SMALL, "--steps", "1000000")
        up = started(processes, machines, *words)
        up.wait_for_text(r"here +│ \* laptop .*joined", 150)
        assert "[attic]" in up.stdout()
        assert "it accepts none of your keys" in up.stdout()
        # The other one can be used later, and then takes part.
        assert not re.search(r"\* attic .*joined", up.stdout())
        (attic.folder / "authorized_keys").write_text(machines.key.with_suffix(".pub").read_text())
        up.wait_for_text(r"here +│ \* attic .*joined", 150)
        # The link flaps: the guest there ends, and another one takes its place.
        (link,) = [
            pid for pid, words in ours(machines.folder).items() if "BatchMode" in words and " laptop " in words
        ]
        (guest,) = [
            pid
            for pid, words in ours(machines.folder).items()
            if "potluck join" in words and "--name laptop" in words
        ]
        sshd.kill(link)
        up.wait_for_text(r"laptop +│ is started again", 40)
        wait_until(lambda: not Path(f"/proc/{guest}").exists(), 10, "the guest outlived its connection")
        joined = re.compile(r"here +│ \* laptop\S* .*joined")
        up.wait_until(lambda: len(joined.findall(up.stdout())) == 2, 120, "the guest again")
        up.signal(signal.SIGINT)
        up.exits_with(130, 90)
        output = up.stdout()
        (run,) = (tmp_path / "up" / "runs").glob("2*")
        assert list((run / "checkpoints").glob("step-*"))
        logs = {path.name: path.read_text() for path in (run / "logs").iterdir()}
        assert set(logs) == {"here.log", "laptop.log", "attic.log"}
        assert "joined" in logs["laptop.log"]
        assert "stopping" in logs["here.log"]
        token = (run / "token").read_text().strip()
        assert token not in output + "".join(logs.values())
        assert "the first error was on attic: attic: it accepts none of your keys" in output
        assert "the connection to laptop was closed" in output
        assert not list((tmp_path / "up" / "runs").glob(".up-*"))
    wait_until(lambda: not ours(tmp_path), 5, f"left behind: {ours(tmp_path)}")


def test_the_status_is_the_runs_and_the_first_error_is_named(tmp_path: Path, machines: sshd.SshMachines) -> None:
    path = machines.variables["PATH"]
    inhibits = Path(path.partition(os.pathsep)[0]) / "systemd-inhibit"
    inhibits.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/kept-awake\nexec cat\n')
    inhibits.chmod(0o755)
    machines.add("laptop", env=f"PATH={path}")
    script = tmp_path / "train.py"
    script.write_text("import sys, potluck\nrun = potluck.start()\nprint('got', sys.argv[1:])\n1 / 0\n")
    with Processes(tmp_path / "up") as processes:
        up = started(processes, machines, "laptop", "--", str(script), "--steps", "5", "--", "-x")
        up.exits_with(1, 150)
        # The host and, if it came so far, its guest, with two locks each.
        assert (tmp_path / "kept-awake").read_text().count("--what=sleep") >= 1
        assert "here   │ got ['--steps', '5', '--', '-x']" in up.stdout()
        assert "here   │     1 / 0" in up.stdout()
        assert "the first error was on here: ended with status 1" in up.stdout()
        # The run never began: it has a folder only if the guest was heard of. The logs are kept all the same.
        (log,) = (tmp_path / "up" / "runs").rglob("here.log")
        assert f"logs: {log.parent.relative_to(tmp_path / 'up')}" in up.stdout()
        assert "ZeroDivisionError" in log.read_text()
    wait_until(lambda: not ours(tmp_path), 5, f"left behind: {ours(tmp_path)}")


@pytest.mark.clusters
def test_check_measures_machines_links_and_the_scripts_own_model_and_starts_no_run(
    tmp_path: Path, machines: sshd.SshMachines
) -> None:
    machines.add("laptop")
    with Processes(tmp_path / "up") as processes:
        up = started(processes, machines, "laptop", "--check", "--", str(JOB), "--steps", "1000000")
        status = up.wait(200)
        output = up.stdout()
        assert status in (0, 1)  # the doctor may find something about the machine that runs this
        assert re.search(r"here +ready .* [\d.]+ *\n", output), output
        # The rate and the round trip to the host.
        assert re.search(r"laptop +ready .* [\d.]+ +[\d.]+ [MG]bit/s +[\d.]+ [mµ]s", output), output
        assert re.search(r"job\.py +143 k parameters, 32 samples a step", output), output
        assert re.search(r"laptop .*tokens/s|laptop .*samples/s", output)
        assert "no link given" not in output  # so the measured one was planned with
        assert "[laptop]" not in output.partition("blocker")[2]
        assert not list((tmp_path / "up").glob("runs/*"))
    wait_until(lambda: not ours(tmp_path), 5, f"left behind: {ours(tmp_path)}")


def test_a_host_elsewhere_that_is_killed_goes_on_with_the_command_that_is_told(
    tmp_path: Path, machines: sshd.SshMachines
) -> None:
    desk = machines.add("desk")
    machines.add("laptop")
    with Processes(tmp_path / "up") as processes:
        words = (*PACED, "desk", "laptop", "--host", "desk", "--checkpoint-every", "5")
        up = started(processes, machines, *words, "--", str(JOB), "--steps", "1000000")
        up.wait_for_text(r"desk +│ \* laptop .*joined", 150)
        up.wait_for_text(r"desk +│ \* saved", 60)
        (host,) = [pid for pid, words in ours(desk.home).items() if "potluck host" in words]
        sshd.kill(host)
        up.exits_with(128 + signal.SIGKILL, 60)
        assert "the first error was on desk: was ended by signal 9" in up.stdout()
        (run,) = (desk.home / "potluck" / "up" / "runs").glob("2*")
        (told,) = re.findall(r"^resume with: potluck (up .*)$", up.stdout(), re.MULTILINE)
        assert f"--host desk --checkpoint-every 5 --resume {run} -- {JOB} --steps 1000000" in told
        again = processes.potluck(*shlex.split(told), env=machines.variables, merged=True)
        again.wait_for_text(r"desk +│ .*(resumed|continues) after step [1-9]", 150)
        again.wait_for_text(r"desk +│ \* laptop .*joined", 60)
        again.signal(signal.SIGINT)
        again.exits_with(130, 90)
        # The host's own hint is the same, and not `potluck host`.
        assert f"resume with: potluck {told}" in again.stdout()
        (run_again,) = (desk.home / "potluck" / "up" / "runs").glob("2*")
        assert run_again == run
    wait_until(lambda: not ours(tmp_path), 5, f"left behind: {ours(tmp_path)}")


def test_what_the_script_imports_is_checked_before_anything_starts(
    tmp_path: Path, machines: sshd.SshMachines
) -> None:
    machines.add("laptop")
    script = tmp_path / "train.py"
    script.write_text("import no_such_module_here\n")
    with Processes(tmp_path / "up") as processes:
        up = started(processes, machines, "laptop", "--", str(script))
        up.exits_with(3, 60)
        assert "it lacks what the script imports: no_such_module_here" in up.stdout()
        assert "--with no_such_module_here" in up.stdout()
        assert "here   │" not in up.stdout()


def test_without_a_usable_machine_nothing_starts(tmp_path: Path, machines: sshd.SshMachines) -> None:
    machines.add("attic", authorized=False)
    machines.add("cellar").stop()
    with Processes(tmp_path / "up") as processes:
        up = started(processes, machines, "attic", "cellar", "--", *SMALL)
        up.exits_with(3, 60)
        output = up.stdout()
        assert "it accepts none of your keys" in output
        assert "no ssh server listens there" in output
        assert "none of 2 machines can be used" in output
        assert "see: potluck explain bad-machine" in output
        assert "here   │" not in output
        assert not list((tmp_path / "up" / "runs").iterdir())
