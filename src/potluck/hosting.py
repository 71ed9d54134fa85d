"""`potluck.start()`: a run from Python, alone or hosted by this script or notebook, without the command line."""

from __future__ import annotations

import atexit
import functools
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

from potluck import codec as codecs
from potluck import env, failpoints
from potluck.checked import build
from potluck.errors import ConfigError, LoopError
from potluck.fleet import cells
from potluck.fleet.local import LocalGuests
from potluck.fleet.script import Script, imports_of, not_sent, read_script, with_files
from potluck.loggers.writing import loggers
from potluck.report.notices import to_stderr
from potluck.report.summary import read_events
from potluck.report.view import Mode, make_view
from potluck.spec.config import WEB_HERE, RunConfig
from potluck.train import run
from potluck.train.context import ALONE, HOST, RANK
from potluck.train.folder import find_run, open_folder
from potluck.train.launch import current
from potluck.train.run import Run
from potluck.train.session import RunSpec, Session
from potluck.train.step import Step
from potluck.web.document import frame, state_of
from potluck.web.opening import open_page, pulse_of

AnyPath = str | os.PathLike[str]

_SETTINGS = RunConfig.__struct_fields__
_EVERYWHERE = ("name", "device", "threads", "micro_batch")
"""Settings that a run alone has, too."""
_WITH_PAGE = (*_EVERYWHERE, "web", "runs", "resume", "log", "checkpoint_every", "max_bad_steps")
"""Those of a run alone that has a page, and so a run folder."""

_opened: list[HostedRun] = []
"""The last run that was started here: the next one takes its place."""
_loops: set[int] = set()
"""Numbers of the notebook's cells in which a loop has run: guests of a later one must not run them."""


def start(
    *,
    host: bool = False,
    wait_for: int | None = None,
    wait_s: float | None = None,
    guests: int = 0,
    bind: str | None = None,
    port: int | None = None,
    codec: str | None = None,
    checkpoint_every: int | None = None,
    max_bad_steps: int | None = None,
    log: str | Sequence[str] | None = None,
    web: bool | str | None = None,
    runs: AnyPath | None = None,
    resume: AnyPath | None = None,
    script: AnyPath | None = None,
    send: Sequence[AnyPath] = (),
    view: Mode = "auto",
    name: str | None = None,
    device: str | None = None,
    threads: int | None = None,
    micro_batch: int | None = None,
) -> Run:
    """Begin a run: alone, as host or as guest.

    Under plain `python script.py` and in a notebook the run is alone and writes no files. With `host=True` it has a
    run folder, checkpoints and a view, and prints the line with which other machines join it. It ends with its
    training loop; `with potluck.start(host=True) as run:` ends it in any case. With `web=True` and without
    `host=True` it is alone, with a page, a run folder, checkpoints and a view.

    Under `potluck host script.py` and `potluck join` this returns the run that the command has opened, and the
    keywords have no effect: the command has options of the same names. Under torchrun the processes of one machine
    are one host.

    Args:
        host: let other machines join. The keywords below up to `view` need it, but `checkpoint_every`,
            `max_bad_steps`, `log`, `runs` and `resume` are there with `web` too.
        wait_for: wait for this many guests before the first step (default 0).
        wait_s: seconds to wait for these guests (default 120).
        guests: guest processes to start on this machine. With any, only this machine can join.
        bind: address to listen on (default: the default route's; "0.0.0.0": all of IPv4; "::": IPv6 too).
        port: port to listen on (default: a free one).
        codec: compression: "auto" (default: for each guest by its link), "none", "fp16", "bf16", "int8", "int4",
            "thin" or "topk:RATIO".
        checkpoint_every: save a checkpoint every N steps (default 50; 0: only at the end).
        max_bad_steps: stop after N steps in a row with a NaN or infinite gradient (default 5; 0: never).
        log: loggers to write the run's series to, such as ("tensorboard",); also "wandb", "mlflow", "trackio".
        web: True: a page in the browser, for this machine only; `run.page_url` is its address. Or the address to
            serve it on, such as "127.0.0.1:8080".
        runs: folder for run folders (default: runs).
        resume: resume this run, given by its folder or id, at exactly the next sample. The same token works.
        script: the file that guests run (default: this script; in a notebook, the cells that were run).
        send: more files for guests, such as modules that the script imports.
        view: "auto" (live in a terminal or notebook, else plain lines), "live", "plain", "json" or "quiet".
        name: name of this machine in logs and tables (default: its host name).
        device: "cpu", "cuda", "cuda:1", "mps" or "paced:SECONDS_PER_SAMPLE" (default: CUDA, else MPS, else CPU).
        threads: number of CPU threads (default: physical cores).
        micro_batch: samples computed at once on this machine (default: found by measuring).
    """
    log = (log,) if isinstance(log, str) else log
    web = WEB_HERE if web is True else web or None
    given = {key: value for key, value in locals().items() if key in _SETTINGS and value is not None}
    if current() is not None:
        return run.start()
    of_host = {"guests": guests, "runs": runs, "resume": resume, "script": script, "send": send}
    allowed = _WITH_PAGE if web else _EVERYWHERE
    wrong = [key for key in (*given, *(key for key, value in of_host.items() if value)) if key not in allowed]
    if wrong and not host:
        raise ConfigError(
            f"start() takes {wrong[0]} only with host=True", hint=f"potluck.start(host=True, {wrong[0]}=…)"
        )
    if host or web:
        return _hosted(HOST if host else ALONE, given, guests, runs, resume, script, send, view)
    return run.start(to_stderr, build(RunConfig, given), shows_steps=False)


def _hosted(
    role: str,
    given: dict[str, Any],
    guests: int,
    runs: AnyPath | None,
    resume: AnyPath | None,
    script: AnyPath | None,
    send: Sequence[AnyPath],
    view: Mode,
) -> HostedRun:
    _refuse_worker()
    _take_place()
    environment = env.read()
    failpoints.arm(environment.failpoint)
    folder = Path(runs) if runs is not None else environment.runs or Path("runs")
    resumed = find_run(os.fspath(resume), folder) if resume is not None else None
    before = open_folder(resumed).read_manifest().settings_to_resume() if resumed is not None else {}
    kind = "host=True" if role == HOST else "web=True"
    spec = RunSpec(
        role=role,
        config=_config({**before, **given}),
        what=cells.NAME if cells.shell() is not None else Path(_own_file() or cells.NAME).name,
        runs=folder,
        resume=resumed,
        guests=guests,
        again=lambda path: f"potluck.start({kind}, resume={str(path)!r})",
    )
    sent = _script(script, send) if role == HOST else None
    if sent is not None:
        spec = _sending(spec, *sent, tell=view != "quiet")
    opened = HostedRun(spec, environment, view, [Path(file) for file in send] if sent is None else None)
    _opened[:] = [opened]
    return opened


def _config(values: dict[str, Any]) -> RunConfig:
    config = build(RunConfig, values)
    for name in (config.codec, config.codec_down):
        if name is not None:
            codecs.names.check(name)
    return config


def _refuse_worker() -> None:
    """A worker process that imports the script must not host a second run."""
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise LoopError(
            "potluck.start(host=True) was called in a worker process that imports this script",
            hint='put the script below `if __name__ == "__main__":`, as multiprocessing needs it',
        )


def _take_place() -> None:
    """Close the run that was started before, as where a notebook's cell is run again."""
    for before in _opened:
        if before.is_training:
            raise LoopError(
                "a run that this process hosts is still training", hint="end its loop first, or call run.close()"
            )
        before.close()


def _script(given: AnyPath | None, send: Sequence[AnyPath]) -> tuple[Script, Path] | None:
    """What guests run, and its folder; None in a notebook, whose cells are not complete yet."""
    arguments = sys.argv[1:] if given is None else []
    path = given if given is not None else _own_file()
    if path is not None:
        script = read_script(Path(path), [Path(file) for file in send], arguments)
        return script, Path(path).resolve().parent
    if cells.shell() is None:
        raise ConfigError(
            "code typed at a Python prompt cannot be sent to guests",
            hint='write it to a file and give script="train.py"; or use a notebook, or IPython',
        )
    return None


def _own_file() -> str | None:
    """The script that this is; None in a notebook and at a prompt."""
    return None if cells.shell() is not None else getattr(sys.modules["__main__"], "__file__", None)


def _sending(spec: RunSpec, script: Script, folder: Path, *, tell: bool) -> RunSpec:
    imports = imports_of(script, folder)
    _warn_of(not_sent(imports), tell=tell)
    return replace(spec, what=script.names[0], source=script.source(imports), files=script.contents)


def _warn_of(files: list[str], *, tell: bool) -> None:
    if files and tell:
        words = f"warning: guests will lack {', '.join(files)}: add send={files!r} to potluck.start()"
        print(words, file=sys.stderr, flush=True)


class HostedRun(Run):
    """A run with a folder, of this script or notebook. Each call of `steps` after the first is a new run."""

    def __init__(self, spec: RunSpec, environment: env.Environment, view: Mode, send: list[Path] | None) -> None:
        """`send`: files that go with a notebook's cells; None where guests run a script."""
        self._spec, self._environment, self._view, self._send = spec, environment, view, send
        self._cell = 0
        self._left = False
        self._thread: threading.Thread | None = None
        """In which the loop runs."""
        self._open(spec)
        super().__init__(self._session.context)
        if self._context.role != RANK:
            self._tell_join_line()
            self._tell_page()

    @functools.wraps(Run.steps)
    def steps(self, *given: Any, **keywords: Any) -> Iterator[Step]:  # type: ignore[override]
        if self._context.began or self._session.closed:
            self._reopen()
        session, self._thread = self._session, threading.current_thread()
        try:
            self._send_cells()
            with session.signals():
                steps = super().steps(*given, **keywords)
        except BaseException as error:
            session.close(error)
            raise
        return self._living(session, steps)

    @property
    def is_training(self) -> bool:
        """Whether its loop has been entered and not left."""
        return self._context.training and not self._left and not self._session.closed

    def close(self, error: BaseException | None = None) -> None:
        """End the run: the training, if one is under way, then guests, port, view and run folder."""
        if error is None and not self._context.began:
            error = LoopError("ended without reaching run.steps()")  # its folder is not kept
        self._session.close(error)

    # -- a session --------------------------------------------------------------------------------------

    def _open(self, spec: RunSpec) -> None:
        listener, view = loggers(spec.config.log), make_view(self._view)
        self._session = Session(
            spec, self._environment, view, guests=LocalGuests, listener=listener, page=open_page, signals=False
        )
        self._session.__enter__()
        self._context, self._left = self._session.context, False
        self._context.interruption = KeyboardInterrupt  # Python then ends with the status of Ctrl-C
        self._session.on_close(_at_the_end(self.close, lambda thread: thread is self._thread))
        if (shell := cells.shell()) is not None:
            shell.events.register("post_run_cell", self._after_cell)
            self._session.on_close(lambda: shell.events.unregister("post_run_cell", self._after_cell))

    def _reopen(self) -> None:
        """A new run with the keys and port of the last one: the same join line works."""
        admission = self._context.admission
        self._context.finish_training()
        self.close()
        spec = replace(self._spec, resume=None)
        if admission is not None:
            config = msgspec.structs.replace(spec.config, port=admission.socket.port)
            spec = replace(spec, keys=admission.keys, config=config)
        self._open(spec)
        if self.join_line is not None and not spec.guests and self._view != "quiet":
            self._say("a new run; the same line as before joins it")
        self._tell_page()

    def _living(self, session: Session, steps: Iterator[Step]) -> Iterator[Step]:
        """The steps; when the training has ended, however it did, the run is closed."""
        try:
            with session.signals():
                yield from steps
        except GeneratorExit:
            raise
        except BaseException as error:
            session.close(error)
            raise
        finally:
            # Left by `break` the training ends in a moment, unless a better reason is known by then.
            self._left = True
            session.context.after_training(session.close)
            folder = session.folder.path if session.context.folder is not None else None
            if session.context.stop_requested() and folder is not None and folder.exists():
                self._say(session.stopped_line())

    def _say(self, line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    def _tell_join_line(self) -> None:
        if self.join_line is not None and not self._spec.guests and self._view != "quiet":
            stream = sys.stderr if self._view == "json" else sys.stdout
            print(f"On each machine that should help, type:\n\n  {self.join_line}\n", file=stream, flush=True)

    def _tell_page(self) -> None:
        if self.page_url is not None and self._view != "quiet":
            stream = sys.stderr if self._view == "json" else sys.stdout
            print(f"See it in a browser: {self.page_url}\n", file=stream, flush=True)

    def _repr_html_(self) -> str | None:
        """The run so far, as a notebook shows it."""
        folder = self._context.folder
        if folder is None or not folder.events.exists():
            return None
        state = state_of(read_events(folder.path))
        if self._session.closed:
            return frame(state.page())
        state.hear(pulse_of(self._context.members()))
        return frame(state.page(live=True, moment=time.strftime("%Y-%m-%d %H:%M:%S")))

    # -- in a notebook ----------------------------------------------------------------------------------

    def _send_cells(self) -> None:
        """Guests run what was run here, up to and with the cell that calls `steps`."""
        shell = cells.shell()
        if shell is None:
            return
        self._cell = shell.execution_count
        if self._send is not None and self._context.admission is not None:
            found = cells.cells_of(shell.history_manager.input_hist_raw[: self._cell + 1], _loops)
            script = with_files(cells.as_script(found), self._send, Path.cwd())
            python = replace(script, contents=(cells.as_python(found), *script.contents[1:]))
            imports = imports_of(python, Path.cwd())
            _warn_of(not_sent(imports), tell=self._view != "quiet")
            self._session.send(script.source(imports), script.contents)
        _loops.add(self._cell)

    def _after_cell(self, result: Any) -> None:
        """A cell has ended: a loop that it left has ended, and if the cell failed, so has its training."""
        error = result.error_before_exec or result.error_in_exec
        if self._left or (error is not None and self._context.began and result.execution_count == self._cell):
            self.close(error)


def _at_the_end(
    close: Callable[[BaseException | None], None], loops_in: Callable[[threading.Thread | None], bool]
) -> Callable[[], None]:
    """Close at the end of the script, with the exception that ended it, if any; the result takes this back.

    The end of a thread is one too where `loops_in` says that the loop runs in it.
    """
    before, before_in_thread = sys.excepthook, threading.excepthook

    def failed(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        close(error)
        before(kind, error, trace)

    def failed_in_thread(args: threading.ExceptHookArgs) -> None:
        if loops_in(args.thread) and args.exc_value is not None and not isinstance(args.exc_value, SystemExit):
            close(args.exc_value)
        before_in_thread(args)

    ended = functools.partial(close, None)
    sys.excepthook, threading.excepthook = failed, failed_in_thread
    atexit.register(ended)

    def forget() -> None:
        atexit.unregister(ended)
        if sys.excepthook is failed:
            sys.excepthook = before
        if threading.excepthook is failed_in_thread:
            threading.excepthook = before_in_thread

    return forget
