"""Checks of one machine's cores, memory, disk and power, and of what earlier runs left on it. PURE."""

from __future__ import annotations

from collections.abc import Iterator

from potluck.plan.memory import TRAINING_BYTES
from potluck.spec.facts import Case, Facts, SshHost
from potluck.spec.finding import BLOCKER, NOTE, WARNING, Finding, Fine
from potluck.units import bytes_text, count_text, seconds_text

LITTLE_MEMORY = 10**9
FULL_DISK = 200 * 10**6
SMALL_DISK = 2 * 10**9
CHECKPOINT_BYTES = 12
KEPT_CHECKPOINTS = 3
"""Checkpoints on the disk: two are kept, and a third exists while it is written."""


def threads(case: Case, facts: Facts) -> Iterator[Finding | Fine]:
    """Two threads on one core are slower than one; one thread on eight cores is slower still (pain 25)."""
    cpu = facts.cpu
    own = facts.environment.get("POTLUCK_THREADS", "")
    if own.isdigit() and int(own) > cpu.usable:
        yield Finding(
            code="too-many-threads",
            severity=WARNING,
            machine=facts.name,
            what=f"POTLUCK_THREADS={own}, but this process may keep {cpu.usable} cores busy",
            how=f"{cpu.physical} physical cores, {cpu.logical} logical ones; affinity and quotas counted",
            breaks="threads wait for each other: often half the speed",
            fix=f"export POTLUCK_THREADS={cpu.usable}   (or unset it: Potluck counts the cores itself)",
            pains=(25,),
        )
    else:
        yield Fine(
            machine=facts.name,
            what=f"CPU: {own or cpu.usable} threads on {cpu.usable} usable cores",
            details=f"{cpu.name}; {cpu.physical} physical, {cpu.logical} logical",
        )
    for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        value = facts.environment.get(variable, "")
        if value.isdigit() and int(value) != cpu.usable:
            yield Finding(
                code="thread-variable",
                severity=NOTE,
                machine=facts.name,
                what=f"{variable}={value}, but this process may keep {cpu.usable} cores busy",
                how=f"the variable is set here; {cpu.physical} physical cores, {cpu.logical} logical ones",
                breaks="PyTorch computes with the wrong number of threads, also in Potluck without --threads",
                fix=f"export {variable}={cpu.usable}",
                pains=(25,),
            )


def memory(case: Case, facts: Facts) -> Iterator[Finding | Fine]:
    free, total = facts.memory_free_bytes, facts.memory_bytes
    if free is None or total is None:
        return
    if facts.model_parameters:
        needs = TRAINING_BYTES * facts.model_parameters
        what = f"{count_text(facts.model_parameters)} parameters need {bytes_text(needs)}"
        if needs > free:
            yield Finding(
                code="model-does-not-fit",
                severity=BLOCKER if needs > total else WARNING,
                machine=facts.name,
                what=f"{what}; {bytes_text(free)} of {bytes_text(total)} memory are free",
                how=f"{TRAINING_BYTES:g} bytes a parameter (weights, gradients, AdamW in fp32), before activations",
                breaks="the process is killed, or the machine swaps",
                fix="a smaller model (--depth), another machine as host, or close other programs",
                pains=(14,),
            )
        else:
            yield Fine(machine=facts.name, what=f"memory: {bytes_text(free)} free; {what} before activations")
    elif free < LITTLE_MEMORY:
        yield Finding(
            code="little-memory",
            severity=WARNING,
            machine=facts.name,
            what=f"only {bytes_text(free)} of {bytes_text(total)} memory are free",
            how="asked the system, and this process's cgroups",
            breaks="the process may be killed in the middle of a step (a guest's death costs the run nothing else)",
            fix="close other programs; `ps aux --sort -rss | head` shows the largest",
            pains=(14,),
        )
    else:
        yield Fine(machine=facts.name, what=f"memory: {bytes_text(free)} of {bytes_text(total)} free")


def disk(case: Case, facts: Facts) -> Iterator[Finding | Fine]:
    where = facts.disk
    if where is None:
        return
    fix = "choose another folder with --runs DIR or POTLUCK_RUNS"
    if not where.writable:
        yield Finding(
            code="runs-not-writable",
            severity=BLOCKER,
            machine=facts.name,
            what=f"nothing can be written to {where.path}: {where.error or 'not allowed'}",
            how="tried to write a small file there",
            breaks="a host cannot keep its run: no checkpoints, no log",
            fix=fix,
            pains=(20,),
        )
        return
    needs = KEPT_CHECKPOINTS * CHECKPOINT_BYTES * (facts.model_parameters or 0)
    if where.free_bytes is None:
        return
    if where.free_bytes < max(SMALL_DISK, needs):
        full = where.free_bytes < max(FULL_DISK, needs)
        yield Finding(
            code="disk-full",
            severity=BLOCKER if full else WARNING,
            machine=facts.name,
            what=f"{bytes_text(where.free_bytes)} are free in {where.path}",
            how="asked the file system"
            + (f"; {KEPT_CHECKPOINTS} checkpoints need {bytes_text(needs)}" if needs else ""),
            breaks="checkpoints cannot be written when it is full (earlier ones stay intact)",
            fix=f"free some space (du -sh {where.path}/* | sort -h), or {fix}",
            pains=(20,),
        )
    else:
        yield Fine(machine=facts.name, what=f"disk: {bytes_text(where.free_bytes)} free in {where.path}")


def power(case: Case, facts: Facts) -> Iterator[Finding | Fine]:
    """Laptops sleep, and slow down on battery (pain 25)."""
    state = facts.power
    if state.on_battery:
        percent = f" ({state.percent:.0f} %)" if state.percent is not None else ""
        yield Finding(
            code="on-battery",
            severity=WARNING,
            machine=facts.name,
            what=f"this machine runs on battery{percent}",
            how=state.how,
            breaks="it computes slower, and sleeps or ends in the middle of a run: what keeps a machine awake "
            "prevents neither that nor the sleep of a closed lid",
            fix="plug it in",
            pains=(25,),
        )
    if state.sleeps_after_s:
        fixes = {"win32": "powercfg /change standby-timeout-ac 0", "darwin": "sudo pmset -c sleep 0"}
        yield Finding(
            code="sleeps-when-idle",
            severity=WARNING,
            machine=facts.name,
            what=f"this machine goes to sleep after {seconds_text(state.sleeps_after_s)} of inactivity",
            how=state.how,
            breaks="a guest vanishes (the run continues without it); a host that sleeps stops the run. Potluck "
            "asks the system to stay awake while it runs: some systems refuse, and a closed lid overrides it",
            fix=fixes.get(facts.platform, "sudo systemctl mask sleep.target suspend.target   (undone by unmask)"),
            pains=(25,),
        )
    if (
        not state.on_battery
        and not state.sleeps_after_s
        and (state.on_battery is False or state.sleeps_after_s == 0)
    ):
        yield Fine(machine=facts.name, what="power: plugged in, stays awake", details=state.how)


def orphans(case: Case, facts: Facts) -> Iterator[Finding | Fine]:
    """Processes of earlier trainings that nobody waits for (pain 19)."""
    for process in facts.orphans:
        yield Finding(
            code="orphan",
            severity=WARNING if process.surely else NOTE,
            machine=facts.name,
            what=f"process {process.pid} has been left over for {seconds_text(process.age_s)}: "
            f"{process.command[:80]}",
            how=process.why,
            breaks="it keeps its port, memory and device from the next run",
            fix=f"kill {process.pid}"
            + ("" if process.surely else "   (unless you put it in the background yourself)"),
            pains=(19,),
        )


def checkpoints(case: Case, facts: Facts) -> Iterator[Finding | Fine]:
    """The checkpoints for a resumed run (pain 20)."""
    if not facts.checkpoints:
        return
    newest = facts.checkpoints[0]
    whole = next((c for c in facts.checkpoints if c.whole), None)
    if newest.whole:
        yield Fine(machine=facts.name, what=f"checkpoint {newest.path} is whole", details="every byte was read")
        return
    yield Finding(
        code="torn-checkpoint",
        severity=WARNING if whole else BLOCKER,
        machine=facts.name,
        what=f"the checkpoint {newest.path} is damaged: {newest.why}",
        how="compared its files with the sizes and hashes in its manifest",
        breaks=f"--resume continues from {whole.path} instead" if whole else "this run cannot be resumed",
        fix="nothing: --resume chooses the intact one by itself" if whole else "start again, or restore a copy",
        pains=(20,),
    )


def ssh(case: Case, facts: Facts) -> Iterator[Finding | Fine]:
    """Machines of a fleet.toml that must allow a login without a password (pain 21)."""
    for host in facts.ssh:
        if host.status == 0 and host.python:
            yield Fine(machine=facts.name, what=f"ssh {host.host}: no password needed, {host.python}")
            continue
        code, what, fix = ssh_trouble(host)
        yield Finding(
            code=code,
            severity=BLOCKER,
            machine=facts.name,
            what=f"ssh {host.host}: {what}",
            how=f"ssh -o BatchMode=yes {host.host}: "
            + (f"status {host.status}, " if host.status is not None else "")
            + (host.said[:120] or "nothing was said"),
            breaks="Potluck cannot start anything on that machine; a person can, with: potluck join TOKEN",
            fix=fix,
            pains=(21,),
        )


def ssh_trouble(host: SshHost) -> tuple[str, str, str]:
    """The finding's code, the cause of a failed login, and the fix."""
    said = host.said.lower()
    if host.status is None:
        return "ssh-silent", "no answer in time", f"ssh -v {host.host}"
    if "permission denied" in said and "password" not in said and "keyboard-interactive" not in said:
        return (
            "ssh-no-key",
            "it accepts none of your keys, and no password",
            f"ssh -v {host.host}   (shows the keys that were tried; add one to ~/.ssh/authorized_keys there)",
        )
    if "permission denied" in said:
        return "ssh-password", "it asks for a password", f"ssh-copy-id {host.host}"
    if "identification has changed" in said:
        name = host.host.rpartition("@")[2]
        return (
            "ssh-changed-key",
            "its host key is not the one that is known here: it was reinstalled, or another machine answers",
            f"ssh-keygen -R {name} && ssh {host.host}   (after you have made sure that it is the right machine)",
        )
    if "host key verification failed" in said:
        return "ssh-unknown-host", "its key is not known here, or has changed", f"ssh {host.host}   (once, by hand)"
    if "could not resolve" in said or "not known" in said:
        return (
            "ssh-unknown-name",
            "no machine of that name is known",
            f"ssh {host.host}   (must work by hand; if only its address does, give that: you@192.168.1.7)",
        )
    if "refused" in said:
        return (
            "ssh-refused",
            "no ssh server listens there",
            "there: sudo systemctl enable --now ssh (macOS: Remote Login)",
        )
    if "timed out" in said or "no route" in said:
        return "ssh-unreachable", "it cannot be reached", f"potluck doctor {host.host.rpartition('@')[2]}"
    if host.status in (126, 127) or "not found" in said or host.status == 0:
        return (
            "ssh-path",
            "no Python on the PATH of a login without a terminal (conda's is set up for terminals only)",
            f"ssh {host.host} ls -d .venv miniconda3 /opt/*   (then name the interpreter: --python PATH for "
            '`potluck up`, python = "PATH" for this machine in a file)',
        )
    return "ssh-failed", f"it ended with status {host.status}", f"ssh -v {host.host}"
