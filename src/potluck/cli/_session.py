"""The life of a run under `train` and `host`: opens and closes its folder, socket, view and signal handlers."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, redirect_stdout, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

from potluck.cli._app import Settings
from potluck.cli._options import LOOPBACK, checked_bind
from potluck.device import Device
from potluck.errors import LoopError
from potluck.fleet.life import reader_watched
from potluck.fleet.local import LocalGuests
from potluck.hub.waiting import WaitingRoom
from potluck.limits import usable_cores
from potluck.report.view import View, make_view
from potluck.sinks import guarded
from potluck.spec.config import RunConfig
from potluck.spec.events import GuestJoined, RunEvent, RunNote, StrangerRefused
from potluck.train.events import EventLog
from potluck.train.folder import RunFolder, new_folder, open_folder
from potluck.train.launch import ALONE, HOST, RANK, Launch, set_launch
from potluck.train.ranks import Ranks, place
from potluck.train.run import device_here, manifest
from potluck.wire.keys import load_keys, new_keys, save_keys
from potluck.wire.token import Token, encode, local_addresses
from potluck.wire.transport import HostSocket


@dataclass(slots=True, kw_only=True)
class RunSpec:
    """A run about to start, resolved."""

    role: str
    config: RunConfig
    what: str
    recipe: dict[str, Any] = field(default_factory=dict)
    source: dict[str, Any] = field(default_factory=dict)
    files: tuple[bytes, ...] = ()
    resume: Path | None = None
    words: tuple[str, ...] = ()
    """What follows `potluck` where the run is gone on with, less --resume; then the script's `arguments`."""
    arguments: tuple[str, ...] = ()
    guests: int = 0
    """Guests to start on this machine."""
    view: str = "auto"
    runs: Path = Path("runs")

    def again(self, folder: Path) -> str:
        """The command that goes on with the run."""
        end = ["--", *self.arguments] if self.arguments else []
        return shlex.join(["potluck", *self.words, "--resume", str(folder), *end])


def machine_name(settings: Settings, config: RunConfig) -> str:
    return config.name or settings.environment.name or socket.gethostname().split(".")[0] or "machine"


@contextmanager
def session(settings: Settings, plan: RunSpec) -> Iterator[Launch]:
    """Open everything a run needs, and close all of it whatever happens inside."""
    where = place()
    if where is not None and not where.leads:
        with _rank_session(settings, plan) as launch:
            yield launch
        return
    with _run_folder(plan) as folder, _session_in(folder, settings, plan) as launch:
        yield launch


@contextmanager
def _rank_session(settings: Settings, plan: RunSpec) -> Iterator[Launch]:
    """Another rank of the host: no folder, no door, no voice but for errors. When to stop is rank 0's affair."""
    device, ranks = _device(settings, plan)
    launch = Launch(
        role=RANK,
        config=plan.config,
        device=device,
        name=machine_name(settings, plan.config),
        log=EventLog(None),
        what=plan.what,
        ranks=ranks,
    )

    def on_signal(number: int, frame: Any) -> None:
        if not launch.began:
            raise KeyboardInterrupt

    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), _signals(on_signal):
        set_launch(launch)
        try:
            yield launch
        finally:
            set_launch(None)


@contextmanager
def _run_folder(plan: RunSpec) -> Iterator[RunFolder]:
    """The run's folder. A new one in which nothing has happened yet outlives neither an error nor Ctrl-C."""
    if plan.resume is not None:
        folder = open_folder(plan.resume)
        with folder.held():
            yield folder
        return
    folder = new_folder(plan.runs, plan.what)
    try:
        with folder.held():
            yield folder
    except BaseException:
        if not _has_anything(folder):
            shutil.rmtree(folder.path, ignore_errors=True)
        raise


def _has_anything(folder: RunFolder) -> bool:
    """Whether something happened that a person may want to read, or to go on from."""
    told = folder.events.exists() and folder.events.stat().st_size > 0
    return told or any(folder.checkpoints.iterdir())


@contextmanager
def _session_in(folder: RunFolder, settings: Settings, plan: RunSpec) -> Iterator[Launch]:
    device, ranks = _device(settings, plan)
    view = guarded(make_view(plan.view), "the view")  # type: ignore[arg-type]
    joined: dict[str, dict[str, Any]] = {}
    log = EventLog(folder.events, lambda event: _seen(event, joined, view))
    launch = Launch(
        role=plan.role,
        config=plan.config,
        device=device,
        name=machine_name(settings, plan.config),
        log=log,
        what=plan.what,
        folder=folder,
        resume=plan.resume is not None,
        source=plan.source,
        files=plan.files,
        ranks=ranks,
        again=plan.again,
    )
    guests = LocalGuests(folder.path)
    with ExitStack() as closing:  # in reverse order, each whatever happens to the others
        closing.callback(guarded(_add_machines, "the list of machines in manifest.json"), folder, joined)
        closing.callback(log.close)
        closing.callback(view.close)
        # Where the run itself fails its guests end with a status too, which is no second fault.
        closing.push(lambda kind, error, trace: _send_home(guests, log, tell=not isinstance(error, Exception)))
        closing.callback(lambda: launch.socket.close() if launch.socket is not None else None)
        closing.callback(set_launch, None)
        if plan.role != ALONE:
            token = _open_door(launch, folder, only_here=plan.guests > 0)
            assert launch.socket is not None
            launch.waiting = WaitingRoom(launch.socket, what=plan.what, emit=log.emit)
            closing.push(lambda kind, error, trace: _send_away(launch, error))
            launch.waiting.start()
            if not plan.guests and plan.view != "quiet":
                _tell_token(token, plan.view)
        _write_manifest(launch, plan, folder)
        if plan.guests:
            guests.start(plan.guests, token=token, config=plan.config, threads=_threads_beside(plan.guests))
        with _stop_on_signals(launch, view, seen=plan.view != "quiet"):
            set_launch(launch)
            try:
                yield launch
            except BaseException:
                launch.end_training("failed")
                raise
            launch.end_training("finished")


def _device(settings: Settings, plan: RunSpec) -> tuple[Device, Ranks | None]:
    environment = settings.environment
    return device_here(
        plan.config.device or environment.device, plan.config.threads or environment.threads, beside=plan.guests
    )


def _send_away(launch: Launch, error: BaseException | None) -> None:
    """Guests that wait for a training that will not begin are told so, and why."""
    if isinstance(error, KeyboardInterrupt):
        reason = "it was stopped there"
    elif error is None or isinstance(error, SystemExit) or (isinstance(error, LoopError) and not launch.began):
        reason = f"{launch.what} ended without reaching run.steps()"
    else:
        reason = f"{launch.what} failed before its first step"
    if launch.waiting is not None:
        launch.waiting.close(reason)


def check_began(launch: Launch) -> None:
    """After a script: one that never came to its loop trained alone, if at all, while guests waited."""
    if launch.role in (HOST, RANK) and not launch.began:
        raise LoopError(
            f"{launch.what} ended without reaching run.steps(): what it trained, it trained alone",
            hint="its loop must be `for step in run.steps(model, optimizer, dataset, global_batch=…)`, with "
            "run = potluck.start(); is it below an `if` that was not true?",
        )


def _send_home(guests: LocalGuests, log: EventLog, *, tell: bool) -> None:
    for words in guests.close():
        if tell:
            log.emit(RunNote(text=words))


def _seen(event: RunEvent, joined: dict[str, dict[str, Any]], view: View) -> None:
    """Show an event, and remember who took part."""
    if isinstance(event, GuestJoined):
        joined[event.machine] = {"name": event.machine, "role": "guest", "device": event.device}
    view.event(event)


def _add_machines(folder: RunFolder, joined: dict[str, dict[str, Any]]) -> None:
    if not joined:
        return
    content = folder.read_manifest()
    known = [m for m in content["machines"] if m["name"] not in joined]
    folder.write_manifest({**content, "machines": [*known, *joined.values()]})


def _threads_beside(guests: int) -> int:
    """CPU threads for each guest when several processes share this machine."""
    return max(1, usable_cores() // (1 + guests))


def _open_door(launch: Launch, folder: RunFolder, *, only_here: bool) -> str:
    """Bind the port and make (or find again) the token; `only_here`: for guests on this machine."""
    config = launch.config
    port = config.port
    if folder.keys.exists():
        keys = load_keys(folder.keys)
        port = port or int(folder.read_manifest().get("port", 0))
    else:
        keys = new_keys()
        save_keys(folder.keys, keys)
    bind = LOOPBACK if only_here else checked_bind(config.bind) or next(iter(local_addresses()), LOOPBACK)
    launch.socket = HostSocket(bind=bind, port=port, keys=keys, on_denied=_denied(launch))
    if launch.socket.warning is not None and not only_here:
        launch.log.emit(RunNote(text=launch.socket.warning))
    addresses = local_addresses(ipv6=bind == "::") if bind in ("0.0.0.0", "::") else (bind,)
    token = encode(
        Token(
            addresses=addresses or (LOOPBACK,),
            port=launch.socket.port,
            host_public=keys.public,
            guest_secret=keys.guest_secret,
        )
    )
    folder.write_token(token)
    return token


def _denied(launch: Launch) -> Callable[[str], None]:
    """Log strangers, but not without end: after the first few only every hundredth."""
    count = 0

    def on_denied(address: str) -> None:
        nonlocal count
        count += 1
        if count <= 5 or count % 100 == 0:
            reason = "no valid token" + (f" ({count} so far)" if count > 5 else "")
            launch.log.emit(StrangerRefused(address=address, reason=reason))

    return on_denied


def _tell_token(token: str, view: str) -> None:
    words = view == "json"
    click.echo("On each machine that should help, type:\n", err=words)
    click.echo(f"  potluck join {token}\n", err=words)


def _write_manifest(launch: Launch, plan: RunSpec, folder: RunFolder) -> None:
    content = manifest(launch, plan.recipe)
    content["command"] = "host" if plan.role == HOST and not plan.guests else "train"
    content["guests"] = plan.guests
    if launch.socket is not None:
        content["port"] = launch.socket.port
    folder.write_manifest(content)


@contextmanager
def _stop_on_signals(launch: Launch, view: View, *, seen: bool) -> Iterator[None]:
    """The first Ctrl-C (or SIGTERM) ends the run in order; the second one at once.

    So does the end of whoever reads the output, where the view is to be `seen`.
    """
    asked = threading.Event()
    signalled = False
    launch.stop_requested = asked.is_set

    def on_signal(number: int, frame: Any) -> None:
        nonlocal signalled
        if signalled or not launch.began:
            raise KeyboardInterrupt
        signalled = True
        asked.set()
        note = RunNote(text="stopping: saving first (once more Ctrl-C to stop at once)")
        # In a thread: the signal may have come while this very thread holds the view's lock.
        threading.Thread(target=view.event, args=(note,), daemon=True).start()

    def on_gone() -> None:
        # Ctrl-C ends the other programs of a pipe too: then this is no news, and never a second Ctrl-C.
        if not asked.is_set():
            asked.set()
            say("nobody reads the output any more (a closed pipe): stopping, as with Ctrl-C")

    with _signals(on_signal), reader_watched(on_gone) if seen else nullcontext():
        yield


@contextmanager
def _signals(on_signal: Callable[[int, Any], None]) -> Iterator[None]:
    """Inside, this is what becomes of Ctrl-C, SIGTERM and the end of the terminal."""
    numbers = [signal.SIGINT, signal.SIGTERM]
    if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        numbers.append(signal.SIGHUP)  # with nohup it outlives its terminal
    before = {n: signal.signal(n, on_signal) for n in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def say_resume(folder: RunFolder, plan: RunSpec) -> None:
    """How to go on; nothing where the run ended before there was anything to go on with."""
    if folder.path.exists():
        say(f"stopped; go on with: {plan.again(folder.path)}")


def say(line: str) -> None:
    with suppress(OSError):  # stderr may go where stdout went
        print(line, file=sys.stderr, flush=True)
