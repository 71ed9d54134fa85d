"""The life of a run on its host, or alone: its folder, keys, token, admission of guests, view, signals and end.

A `Session` opens all of this and closes it in order, whatever happens inside. Meanwhile the machine stays awake. It
needs no command line. `run_session` gives it what belongs to higher parts, such as the view.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from msgspec import structs

from potluck.device import Device, pick, pick_for_rank
from potluck.env import Environment, machine_name
from potluck.errors import LoopError, NonFiniteError
from potluck.hub.members import Member
from potluck.limits import usable_cores
from potluck.sinks import guarded, say
from potluck.spec.config import RunConfig
from potluck.spec.events import GuestJoined, RunEvent, RunNote
from potluck.spec.manifest import MachineEntry, Manifest
from potluck.spec.messages import Source
from potluck.train import host_ranks
from potluck.train.admitting import admit_guests, send_away
from potluck.train.awake import awake
from potluck.train.checkpoint_folder import newest_first
from potluck.train.context import ALONE, HOST, RANK, Admission, LoopState, RunContext
from potluck.train.ending import Interrupted
from potluck.train.event_log import EventLog, View
from potluck.train.folder import RunFolder, new_folder, open_folder
from potluck.train.handing_out import by_code, in_file
from potluck.train.run_specs import RunSpec
from potluck.train.telemetry import versions

Listener = Callable[[Path, Manifest, Callable[[str], None]], View]
"""Opens a receiver of all events, such as a logger. It gets the run's folder, its manifest, and a function that
shows a sentence. That function must not be called from inside `event`, which runs under the log's lock."""


class ServedPage(Protocol):
    """The page in the browser, while it is served."""

    url: str

    def close(self) -> None: ...


OpenPage = Callable[[RunFolder, str, Callable[[], Sequence[Member]]], ServedPage]
"""Opens the page of a run. It gets the run's folder, the requested address, and a function that returns the present
guests."""
WatchReader = Callable[[Callable[[], None]], AbstractContextManager[None]]
"""Inside, calls a function in another thread when the reader of this process's output is gone."""


class GuestProcesses(Protocol):
    """Guests on this machine: started together, ended together."""

    def start(self, count: int, *, token: str, threads: int, config: RunConfig) -> None: ...

    def close(self) -> list[str]:
        """End them. Returns a sentence about each guest that failed."""


class Session:
    """One run's life: open from `__enter__` to `__exit__`, or to `close`."""

    context: RunContext
    """The run from the view of its loop, set by `__enter__`."""
    code: str | None = None
    """The code by which machines in this network join, if one was requested."""

    def __init__(
        self,
        spec: RunSpec,
        environment: Environment,
        view: View,
        *,
        guests: Callable[[Path], GuestProcesses] | None = None,
        listener: Listener | None = None,
        page: OpenPage | None = None,
        show_code: Callable[[str], None] | None = None,
        reader: WatchReader | None = None,
    ) -> None:
        """`guests` gets the run's folder; it is needed if `spec.guests` is not 0.

        `listener`, `reader` and `page`, which serves the page if the config requests one, are used on rank 0 only.

        `show_code` shows a sentence with a new code, which must not be in the log; if not given, the view does.
        """
        self.spec = spec
        self._environment = environment
        self._view = guarded(view, "the view")
        self._make_guests = guests
        self._open_listener = listener
        self._listener: View | None = None
        self._open_page = page
        self._show_code = show_code or self._show
        self._watch_reader = reader
        self._closing = ExitStack()
        self.closed = False
        self._owner = os.getpid()
        self._lock = threading.RLock()
        self._joined: dict[str, MachineEntry] = {}
        self._changed: str | None = None
        """Where the arguments of a resumed run's script differ."""

    @property
    def folder(self) -> RunFolder:
        """The run's folder, on rank 0."""
        assert self.context.folder is not None
        return self.context.folder

    @property
    def token(self) -> str | None:
        """The token; None if no guest can join."""
        return self.context.admission.token if self.context.admission is not None else None

    def __enter__(self) -> Self:
        place = host_ranks.place()
        try:
            leads = place is None or place.leads
            if leads:
                self._open(self._closing)
            else:
                self._open_rank()
            if not self.spec.in_script:
                self._closing.enter_context(self.signals())
            self._closing.push(self._end_training)
            if leads:
                self._share(self._closing)
                if self._watch_reader is not None:
                    self._closing.enter_context(self._watch_reader(self._reader_gone))
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
        """End the run: finished, or failed with `error`. Does nothing if it is already closed. Callable from any
        thread."""
        self.__exit__(type(error) if error is not None else None, error, None)

    def on_close(self, call: Callable[[], None]) -> None:
        """Register a function to call first when the run is closed."""
        self._closing.callback(call)

    def check_began(self) -> None:
        """Call after a script: an error says if it never reached its loop, because it then trained alone while
        guests waited."""
        if self.context.role in (HOST, RANK) and not self.context.loop.began:
            raise LoopError(
                f"{self.context.what} ended without reaching run.steps(): if it trained, it trained alone",
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
            name=machine_name(self.spec.config.name, self._environment),
            log=EventLog(None),
            what=self.spec.what,
            ranks=group,
            interruption=self._interruption,
        )

    def _open(self, stack: ExitStack) -> None:
        """`stack` closes everything in reverse order, even if some of it fails."""
        spec, loop = self.spec, LoopState()
        stack.enter_context(awake())
        folder = stack.enter_context(_run_folder(spec))
        device, group = self._device()
        log = EventLog(folder.events, self._seen)
        stack.callback(guarded(self._add_machines, "the list of machines in manifest.json"), folder)
        page = None
        if self._open_page is not None and spec.config.web is not None:
            page = self._open_page(folder, spec.config.web, lambda: loop.members())
            stack.callback(page.close)  # when the log is complete
        stack.callback(log.close)
        stack.push(lambda kind, error, trace: self._tell_how_to_resume(folder, error, loop))
        stack.callback(self._view.close)
        stack.callback(self._close_listener)
        guests = self._make_guests(folder.path) if self._make_guests is not None else None
        if guests is not None:
            # Where the run itself fails its guests end with a status too, which is no second fault.
            stack.push(lambda kind, error, trace: _send_home(guests, log, tell=not isinstance(error, Exception)))
        admission: Admission | None = None
        if spec.role != ALONE:
            admission = admit_guests(stack, spec, folder, log)
            waiting = admission.waiting
            stack.push(lambda kind, error, trace: send_away(waiting, spec.what, error, began=loop.began))
            waiting.start()
        self.context = RunContext(
            role=spec.role,
            config=spec.config,
            device=device,
            name=machine_name(spec.config.name, self._environment),
            log=log,
            what=spec.what,
            folder=folder,
            resume=spec.resume is not None,
            ranks=group,
            admission=admission,
            again=spec.again,
            page_url=page.url if page is not None else None,
            interruption=self._interruption,
            loop=loop,
        )
        self._manifest = _manifest(self.context, spec)
        if spec.resume is None:
            folder.write_manifest(self._manifest)
        else:
            self._changed = _changed_arguments(folder.read_manifest().source, spec.source)
            loop.on_accepted = self._resumed
        if self._open_listener is not None:
            opened = self._open_listener(folder.path, self._manifest, lambda text: log.emit(RunNote(text=text)))
            self._listener = guarded(opened, "a logger")
        if spec.guests:
            assert guests is not None and admission is not None
            threads = max(1, usable_cores() // (1 + spec.guests))
            guests.start(spec.guests, token=admission.token, config=spec.config, threads=threads)

    def _share(self, stack: ExitStack) -> None:
        """Hand out the token in the requested ways."""
        sharing, port = self.spec.sharing, self.spec.config.port
        if self.token is None:
            return
        if sharing.token_file is not None:
            stack.enter_context(in_file(sharing.token_file, self.token))
        if sharing.lan:
            way = by_code(self.token, port + 1 if port else 0, self.context.log, self._show_code)
            self.code = stack.enter_context(way)

    @property
    def _interruption(self) -> type[KeyboardInterrupt]:
        return KeyboardInterrupt if self.spec.in_script else Interrupted

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

    def stopped_line(self) -> str | None:
        """The line after a stop: where the run was saved, and how to resume it. None if nothing was saved."""
        folder = self.context.folder
        if folder is None or not folder.path.exists():
            return None
        saved = newest_first(folder.checkpoints)
        where = f", saved in {folder.path} after step {int(saved[0].name.rpartition('-')[2])}" if saved else ""
        return f"stopped{where}; resume with: {self.context.again(folder.path)}"

    def send(self, source: Source, files: tuple[bytes, ...]) -> None:
        """Set the code that guests run, if it was not known before the training began. `context` is a new one."""
        assert self.context.admission is not None
        admission = replace(self.context.admission, source=source, files=files)
        self.context = replace(self.context, admission=admission)
        self._manifest = structs.replace(self._manifest, source=source)
        if self.spec.resume is None:
            self.folder.write_manifest(self._manifest)

    def _resumed(self) -> None:
        """The saved run fits the script, and is trained on. A refused one keeps its manifest and its log."""
        if self._changed is not None:
            self.context.log.emit(RunNote(text=self._changed))
        self.folder.write_manifest(self._manifest)

    def _show(self, text: str) -> None:
        """Show a sentence that must not be in the log."""
        self._view.event(RunNote(text=text))

    def _reader_gone(self) -> None:
        # Ctrl-C ends the other programs of a pipe too: then this is no news.
        if not self.context.loop.stop_requested():
            self.context.loop.request_stop()
            say("the output pipe was closed: stopping, as with Ctrl-C")

    @contextmanager
    def signals(self) -> Iterator[None]:
        """Inside, the first Ctrl-C (or SIGTERM, or the end of the terminal) ends the training in order.

        The second raises KeyboardInterrupt, as does the first if no training is running. Does nothing outside the
        main thread, where Python handles no signals.
        """
        signalled = False

        def on_signal(number: int, frame: Any) -> None:
            nonlocal signalled
            loop = self.context.loop
            if self.context.role == RANK and loop.began:
                return
            if signalled or not loop.training:
                raise KeyboardInterrupt
            signalled = True
            loop.request_stop()
            note = RunNote(text="stopping: saving first (press Ctrl-C again to stop immediately)")
            # In a thread: the signal may have come while this very thread holds the view's lock.
            threading.Thread(target=self._view.event, args=(note,), daemon=True).start()
            if loop.waits_here:
                raise Interrupted  # nothing of the step has been computed, and its samples may never come

        with _handled(on_signal):
            yield

    # -- closing ----------------------------------------------------------------------------------------

    def _end_training(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.context.loop.end("finished" if error is None else "failed")

    def _tell_how_to_resume(self, folder: RunFolder, error: BaseException | None, loop: LoopState) -> None:
        """Show how to resume after a failure, if there is a checkpoint. The messages for a stop and for NaN already
        say it. The command of a refused resume would be refused again."""
        failed = isinstance(error, Exception) and not isinstance(error, NonFiniteError)
        if failed and not loop.accepted and self._changed is not None:
            say(self._changed)
        if failed and loop.accepted and newest_first(folder.checkpoints):
            say(f"resume from the last checkpoint with: {self.spec.again(folder.path)}")

    def _close_listener(self) -> None:
        if self._listener is not None:
            self._listener.close()

    def _add_machines(self, folder: RunFolder) -> None:
        if not self._joined:
            return
        manifest = folder.read_manifest()
        known = [machine for machine in manifest.machines if machine.name not in self._joined]
        folder.write_manifest(structs.replace(manifest, machines=(*known, *self._joined.values())))


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
        name=machine_name(config.name, environment),
        log=EventLog(None, show, shows_steps=shows_steps),
        what=what,
    )


def device_here(
    name: str | None, threads: int | None, *, beside: int = 0
) -> tuple[Device, host_ranks.Ranks | None]:
    """This process's device; under torchrun, also the host's ranks, which meet here.

    `beside`: number of guests on this machine, for which cores are reserved.
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
    """The run's folder. A new folder is removed after an error or Ctrl-C if nothing has happened in the run."""
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
        if not folder.has_anything():
            shutil.rmtree(folder.path, ignore_errors=True)
        raise


def _changed_arguments(before: Source | None, now: Source | None) -> str | None:
    """A resumed script's arguments are not taken from the saved run, so report where they differ."""
    if before is None or now is None or before.arguments == now.arguments:
        return None
    were, are = (shlex.join(source.arguments) or "none" for source in (before, now))
    return f"the script's arguments differ from those of the saved run: {were} there, {are} now"


def _manifest(context: RunContext, spec: RunSpec) -> Manifest:
    """The manifest of the run, written before it starts."""
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


def _send_home(guests: GuestProcesses, log: EventLog, *, tell: bool) -> None:
    for words in guests.close():
        if tell:
            log.emit(RunNote(text=words))


@contextmanager
def _handled(on_signal: Callable[[int, Any], None]) -> Iterator[None]:
    """Inside, this handles Ctrl-C, SIGTERM and the end of the terminal. A handler that the script sets stays."""
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
