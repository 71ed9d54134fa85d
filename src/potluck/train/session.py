"""The life of a run on its host, or alone: its folder, keys, token, admission of guests, view, signals and end.

A `Session` opens all of this and closes it in order, whatever happens inside. It needs no command line. It is given
what the layers above add: a view that shows events, and something that starts guests on this machine.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from msgspec import structs

from potluck.device import Device, pick, pick_for_rank
from potluck.env import Environment
from potluck.errors import LoopError, NonFiniteError
from potluck.hub.waiting import WaitingRoom
from potluck.limits import usable_cores
from potluck.sinks import guarded
from potluck.spec.config import RunConfig
from potluck.spec.events import GuestJoined, RunEvent, RunNote, StrangerRefused
from potluck.spec.manifest import MachineEntry, Manifest, RecipeEntry
from potluck.spec.messages import Source
from potluck.train import host_ranks
from potluck.train.checkpoint_folder import newest_first
from potluck.train.context import ALONE, HOST, RANK, Admission, RunContext
from potluck.train.ending import Interrupted
from potluck.train.events import EventLog, View
from potluck.train.folder import RunFolder, new_folder, open_folder
from potluck.train.telemetry import versions
from potluck.wire.keys import HostKeys, load_keys, new_keys, save_keys
from potluck.wire.token import LOOPBACK, Token, cables_first, checked_bind, encode, local_addresses
from potluck.wire.transport import HostSocket

Listener = Callable[[Path, Manifest, Callable[[str], None]], View]
"""Opens something that is told of all events, such as a logger. It is given the run's folder, its manifest, and a
function that shows a sentence. That must not be called from inside `event`, which runs under the log's lock."""


class Watched(Protocol):
    """The page in the browser, while it is served."""

    url: str

    def close(self) -> None: ...


class GuestProcesses(Protocol):
    """Guests on this machine: started together, ended together."""

    def start(self, count: int, *, token: str, threads: int, config: RunConfig) -> None: ...

    def close(self) -> list[str]:
        """End them; what went wrong with any, in words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSpec:
    """A run about to start, resolved."""

    role: str
    config: RunConfig
    what: str
    """The recipe's or the script's name."""
    recipe: RecipeEntry | None = None
    """None for a script."""
    source: Source | None = None
    """What guests run."""
    files: tuple[bytes, ...] = ()
    """The contents of the files in `source`."""
    runs: Path = Path("runs")
    """Where a new run's folder is made."""
    resume: Path | None = None
    """The folder of the run to resume."""
    guests: int = 0
    """Guests to start on this machine. With any, the port is open to this machine only."""
    keys: HostKeys | None = None
    """A new run's keys, where it shares those of an earlier one, and so its token; made if not given."""
    again: Callable[[Path], str] | None = None
    """How to resume the run in a folder, in words; where a NaN ends the run, the error says it."""


class Session:
    """One run's life: open from `__enter__` to `__exit__`, or to `close`."""

    context: RunContext
    """The run as its loop sees it, from `__enter__` on."""

    def __init__(
        self,
        spec: RunSpec,
        environment: Environment,
        view: View,
        *,
        guests: Callable[[Path], GuestProcesses] | None = None,
        listener: Listener | None = None,
        page: Callable[[RunContext], Watched] | None = None,
        signals: bool = True,
    ) -> None:
        """`guests` is given the run's folder; needed where `spec.guests` is not 0.

        `listener` and `page`, what serves the page if the config asks for one: opened on rank 0 only.

        `signals`: handle them for as long as the session is open. Otherwise, see `signals()`.
        """
        self.spec = spec
        self._environment = environment
        self._view = guarded(view, "the view")
        self._make_guests = guests
        self._open_listener = listener
        self._listener: View | None = None
        self._open_page = page
        self.page: Watched | None = None
        self._all_signals = signals
        self._closing = ExitStack()
        self.closed = False
        self._owner = os.getpid()
        self._lock = threading.RLock()
        self._joined: dict[str, MachineEntry] = {}

    @property
    def folder(self) -> RunFolder:
        """The run's folder, on rank 0."""
        assert self.context.folder is not None
        return self.context.folder

    @property
    def token(self) -> str | None:
        """What guests join with; None where nobody can."""
        return self.context.admission.token if self.context.admission is not None else None

    def __enter__(self) -> Self:
        place = host_ranks.place()
        try:
            if place is not None and not place.leads:
                self._open_rank()
            else:
                self._open(self._closing)
            if self._all_signals:
                self._closing.enter_context(self.signals())
            self._closing.push(self._end_training)
        except BaseException:
            self._closing.__exit__(*sys.exc_info())
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if os.getpid() != self._owner:
            return  # in a forked child: the run is its parent's
        with self._lock:  # a second caller waits, and finds nothing to do
            self.closed = True
            self._closing.__exit__(kind, error, trace)

    def close(self, error: BaseException | None = None) -> None:
        """End the run: finished, or failed with `error`. Harmless when it has been closed. From any thread."""
        self.__exit__(type(error) if error is not None else None, error, None)

    def on_close(self, call: Callable[[], None]) -> None:
        """Call this when the run is closed, before anything else is."""
        self._closing.callback(call)

    def check_began(self) -> None:
        """After a script: one that never came to its loop trained alone, if at all, while guests waited."""
        if self.context.role in (HOST, RANK) and not self.context.began:
            raise LoopError(
                f"{self.context.what} ended without reaching run.steps(): what it trained, it trained alone",
                hint="its loop must be `for step in run.steps(model, optimizer, dataset, global_batch=…)`, with "
                "run = potluck.start(); is it below an `if` whose condition is false?",
            )

    # -- opening ----------------------------------------------------------------------------------------

    def _open_rank(self) -> None:
        """Another rank of the host: no folder, no port, no view. Rank 0 decides when to stop."""
        device, group = self._device()
        self.context = RunContext(
            role=RANK,
            config=self.spec.config,
            device=device,
            name=machine_name(self.spec.config, self._environment),
            log=EventLog(None),
            what=self.spec.what,
            ranks=group,
        )

    def _open(self, stack: ExitStack) -> None:
        """`stack` closes in reverse order, each whatever happens to the others."""
        spec = self.spec
        folder = stack.enter_context(_run_folder(spec))
        device, group = self._device()
        log = EventLog(folder.events, self._seen)
        self.context = context = RunContext(
            role=spec.role,
            config=spec.config,
            device=device,
            name=machine_name(spec.config, self._environment),
            log=log,
            what=spec.what,
            folder=folder,
            resume=spec.resume is not None,
            ranks=group,
        )
        if spec.again is not None:
            context.again = spec.again
        stack.callback(guarded(self._add_machines, "the list of machines in manifest.json"), folder)
        if self._open_page is not None and spec.config.web is not None:
            self.page = self._open_page(context)
            context.page_url = self.page.url
            stack.callback(self.page.close)  # when the log is complete
        stack.callback(log.close)
        stack.push(self._tell_how_to_resume)
        stack.callback(self._view.close)
        stack.callback(self._close_listener)
        guests = self._make_guests(folder.path) if self._make_guests is not None else None
        if guests is not None:
            # Where the run itself fails its guests end with a status too, which is no second fault.
            stack.push(lambda kind, error, trace: _send_home(guests, log, tell=not isinstance(error, Exception)))
        if spec.role != ALONE:
            context.admission = admission = _admission(stack, spec, folder, log)
            stack.push(lambda kind, error, trace: send_away(context, error))
            admission.waiting.start()
        manifest = _manifest(context, spec)
        if spec.resume is not None and (changed := _changed_arguments(folder.read_manifest().source, spec.source)):
            log.emit(RunNote(text=changed))
        folder.write_manifest(manifest)
        if self._open_listener is not None:
            opened = self._open_listener(folder.path, manifest, lambda text: log.emit(RunNote(text=text)))
            self._listener = guarded(opened, "a logger")
        if spec.guests:
            assert guests is not None and context.admission is not None
            threads = max(1, usable_cores() // (1 + spec.guests))
            guests.start(spec.guests, token=context.admission.token, config=spec.config, threads=threads)

    def _device(self) -> tuple[Device, host_ranks.Ranks | None]:
        config, environment = self.spec.config, self._environment
        return device_here(
            config.device or environment.device, config.threads or environment.threads, beside=self.spec.guests
        )

    def _seen(self, event: RunEvent) -> None:
        """Show an event, and remember who took part."""
        if isinstance(event, GuestJoined):
            self._joined[event.machine] = MachineEntry(name=event.machine, role="guest", device=event.device)
        self._view.event(event)
        if self._listener is not None:
            self._listener.event(event)

    # -- while it runs ----------------------------------------------------------------------------------

    def stopped_line(self) -> str:
        """What the person who stopped the run is told: where it was saved, and how to go on."""
        folder = self.folder
        saved = newest_first(folder.checkpoints)
        where = f", saved in {folder.path} after step {int(saved[0].name.rpartition('-')[2])}" if saved else ""
        return f"stopped{where}; go on with: {self.context.again(folder.path)}"

    def send(self, source: Source, files: tuple[bytes, ...]) -> None:
        """What guests run, where that is not known before the training begins."""
        assert self.context.admission is not None
        self.context.admission = replace(self.context.admission, source=source, files=files)
        self.folder.write_manifest(structs.replace(self.folder.read_manifest(), source=source))

    def show(self, text: str) -> None:
        """Show a sentence that the log must not hold. From any thread."""
        self._view.event(RunNote(text=text))

    @contextmanager
    def signals(self) -> Iterator[None]:
        """Inside, the first Ctrl-C (or SIGTERM, or the end of the terminal) ends the training in order.

        The second raises KeyboardInterrupt, as does the first where no training is under way. Does nothing outside
        the main thread, where Python has no signals.
        """
        signalled = False

        def on_signal(number: int, frame: Any) -> None:
            nonlocal signalled
            if self.context.role == RANK and self.context.began:
                return
            if signalled or not self.context.training:
                raise KeyboardInterrupt
            signalled = True
            self.context.request_stop()
            note = RunNote(text="stopping: saving first (once more Ctrl-C to stop at once)")
            # In a thread: the signal may have come while this very thread holds the view's lock.
            threading.Thread(target=self._view.event, args=(note,), daemon=True).start()
            if self.context.waits_here:
                raise Interrupted  # nothing of the step has been computed, and its samples may never come

        with _handled(on_signal):
            yield

    # -- closing ----------------------------------------------------------------------------------------

    def _end_training(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.context.end_training("finished" if error is None else "failed")

    def _tell_how_to_resume(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """After a failure, where there is a checkpoint. A stop and a NaN say it by themselves."""
        failed = isinstance(error, Exception) and not isinstance(error, NonFiniteError)
        if failed and self.context.began and newest_first(self.folder.checkpoints):
            line = f"resume from the last checkpoint with: {self.context.again(self.folder.path)}"
            with suppress(OSError):  # nobody may read it any more
                print(line, file=sys.stderr, flush=True)

    def _close_listener(self) -> None:
        if self._listener is not None:
            self._listener.close()

    def _add_machines(self, folder: RunFolder) -> None:
        if not self._joined:
            return
        manifest = folder.read_manifest()
        known = [machine for machine in manifest.machines if machine.name not in self._joined]
        folder.write_manifest(structs.replace(manifest, machines=(*known, *self._joined.values())))


def machine_name(config: RunConfig, environment: Environment) -> str:
    return config.name or environment.name or socket.gethostname().split(".")[0] or "machine"


def alone(
    environment: Environment,
    show: Callable[[RunEvent], None] | None,
    what: str,
    config: RunConfig | None = None,
    *,
    shows_steps: bool = True,
) -> RunContext:
    """A run in this process only: no folder, no guests."""
    config = config or RunConfig()
    device, group = device_here(config.device or environment.device, config.threads or environment.threads)
    return RunContext(
        role=ALONE if group is None or group.place.leads else RANK,
        config=config,
        device=device,
        ranks=group,
        name=machine_name(config, environment),
        log=EventLog(None, show, shows_steps=shows_steps),
        what=what,
    )


def device_here(
    name: str | None, threads: int | None, *, beside: int = 0
) -> tuple[Device, host_ranks.Ranks | None]:
    """This process's device; under torchrun, also the host's ranks, which meet here.

    `beside`: guests on this machine, for which cores are left.
    """
    place = host_ranks.place()
    if place is None:
        return pick(name, threads=threads or (max(1, usable_cores() // (1 + beside)) if beside else None)), None
    share = max(1, usable_cores() // (place.world + beside))
    device, nccl = pick_for_rank(name, place.local_rank, place.world, threads=threads or share)
    group = host_ranks.form(place, nccl=nccl)
    if place.leads:
        device.label = f"{place.world} × {device.label}"
        if device.peak_flops is not None:
            device.peak_flops *= place.world
    return device, group


@contextmanager
def _run_folder(spec: RunSpec) -> Iterator[RunFolder]:
    """The run's folder. A new one in which nothing has happened yet outlives neither an error nor Ctrl-C."""
    if spec.resume is not None:
        folder = open_folder(spec.resume)
        with folder.held():
            yield folder
        return
    folder = new_folder(spec.runs, spec.what)
    try:
        with folder.held():
            yield folder
    except BaseException:
        if not _has_anything(folder):
            shutil.rmtree(folder.path, ignore_errors=True)
        raise


def _changed_arguments(before: Source | None, now: Source | None) -> str | None:
    """A resumed script's own arguments are not taken from the saved run: say where they are others."""
    if before is None or now is None or before.arguments == now.arguments:
        return None
    were, are = (shlex.join(source.arguments) or "none" for source in (before, now))
    return f"the script's arguments differ from those of the saved run: {were} there, {are} now"


def _has_anything(folder: RunFolder) -> bool:
    """Whether something happened that a person may want to read, or to resume."""
    told = folder.events.exists() and folder.events.stat().st_size > 0
    return told or any(folder.checkpoints.iterdir())


def _manifest(context: RunContext, spec: RunSpec) -> Manifest:
    """What the run folder says of the run before it starts."""
    return Manifest(
        what=spec.what,
        command="host" if spec.role == HOST and not spec.guests else "train",
        config=spec.config,
        recipe=spec.recipe,
        source=spec.source,
        versions=versions(),
        machines=(MachineEntry(name=context.name, role=context.role, device=context.device.label),),
        guests=spec.guests,
        port=context.admission.socket.port if context.admission is not None else None,
    )


def _admission(stack: ExitStack, spec: RunSpec, folder: RunFolder, log: EventLog) -> Admission:
    """Bind the port and make the token. A resumed run has the same keys and port, so the same token."""
    config, only_here = spec.config, spec.guests > 0
    port = config.port
    if folder.keys.exists():
        keys = load_keys(folder.keys)
        port = port or folder.read_manifest().port or 0
    else:
        keys = spec.keys or new_keys()
        save_keys(folder.keys, keys)
    bind = LOOPBACK if only_here else checked_bind(config.bind) or next(iter(local_addresses()), LOOPBACK)
    listening = HostSocket(bind=bind, port=port, keys=keys, on_denied=_denied(log))
    stack.callback(listening.close)
    if listening.warning is not None and not only_here:
        log.emit(RunNote(text=listening.warning))
    every = bind in ("0.0.0.0", "::")
    addresses = cables_first(local_addresses(ipv6=bind == "::")) if every else (bind,)
    token = encode(
        Token(
            addresses=addresses or (LOOPBACK,),
            port=listening.port,
            host_public=keys.public,
            guest_secret=keys.guest_secret,
        )
    )
    folder.write_token(token)
    waiting = WaitingRoom(listening, what=spec.what, emit=log.emit)
    return Admission(
        socket=listening, waiting=waiting, keys=keys, token=token, source=spec.source, files=spec.files
    )


def _denied(log: EventLog) -> Callable[[str], None]:
    """Log strangers, but not without end: after the first few only every hundredth."""
    count = 0

    def on_denied(address: str) -> None:
        nonlocal count
        count += 1
        if count <= 5 or count % 100 == 0:
            reason = "no valid token" + (f" ({count} so far)" if count > 5 else "")
            log.emit(StrangerRefused(address=address, reason=reason))

    return on_denied


def send_away(context: RunContext, error: BaseException | None) -> None:
    """Guests that wait for a training that will not begin are told so, and why."""
    if isinstance(error, KeyboardInterrupt):
        reason = "it was stopped there"
    elif error is None or isinstance(error, SystemExit) or (isinstance(error, LoopError) and not context.began):
        reason = f"{context.what} ended without reaching run.steps()"
    else:
        reason = f"{context.what} failed before its first step"
    if context.admission is not None:
        context.admission.waiting.close(reason)


def _send_home(guests: GuestProcesses, log: EventLog, *, tell: bool) -> None:
    for words in guests.close():
        if tell:
            log.emit(RunNote(text=words))


@contextmanager
def _handled(on_signal: Callable[[int, Any], None]) -> Iterator[None]:
    """Inside, this handles Ctrl-C, SIGTERM and the end of the terminal. A handler set meanwhile stays."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = [signal.SIGINT, signal.SIGTERM]
    if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        numbers.append(signal.SIGHUP)  # with nohup it outlives its terminal
    owner = os.getpid()

    def handler(number: int, frame: Any) -> None:
        if os.getpid() == owner:
            on_signal(number, frame)
        elif number != signal.SIGINT:  # in a forked child, whose parent handles Ctrl-C
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    before = {n: signal.signal(n, handler) for n in numbers}
    try:
        yield
    finally:
        for number, previous in before.items():
            if signal.getsignal(number) is handler:
                with suppress(ValueError):  # a generator may be closed by another thread, which may not
                    signal.signal(number, previous)
