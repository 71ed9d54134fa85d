"""`potluck.start()`: a run from Python, alone or hosted by this script or notebook, without the command line."""

from __future__ import annotations

import atexit
import contextlib
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
from typing import Any, TypedDict

from potluck import env, failpoints, run_session
from potluck.checked import build
from potluck.errors import ConfigError, LoopError
from potluck.fleet import cells
from potluck.fleet.script import Script, described, read_script, with_files
from potluck.report.notices import to_stderr
from potluck.report.summary import read_events
from potluck.report.view import Mode
from potluck.sinks import say
from potluck.spec.config import WEB_HERE, RunConfig
from potluck.spec.messages import Source
from potluck.train import run
from potluck.train.context import ALONE, HOST
from potluck.train.handing_out import Sharing
from potluck.train.launch import current
from potluck.train.run import Run, second_loop
from potluck.train.run_specs import RunSpec, script_spec
from potluck.train.session import Session
from potluck.train.step import Step
from potluck.web.document import frame, state_of
from potluck.web.opening import pulse_of

AnyPath = str | os.PathLike[str]

_SETTINGS = RunConfig.__struct_fields__
_EVERYWHERE = ("name", "device", "threads", "micro_batch")
"""Settings that also apply to a run alone."""
_WITH_PAGE = (*_EVERYWHERE, "web", "runs", "resume", "log", "checkpoint_every", "max_bad_steps")
"""Settings of a run alone that has a page, and so a run folder."""


class _OfHost(TypedDict):
    """Keywords of `start` that are no settings of a RunConfig and need a run folder."""

    guests: int
    lan: bool
    token_file: AnyPath | None
    runs: AnyPath | None
    resume: AnyPath | None
    script: AnyPath | None
    send: Sequence[AnyPath]


_opened: list[HostedRun] = []
"""The last run that was started here, which the next one replaces."""
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
    lan: bool = False,
    token_file: AnyPath | None = None,
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
        lan: let machines in this network find the run, and join it by a short code, which is printed.
        token_file: write the token to this file before the first step, and remove it at the end.
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
    of_host = _OfHost(
        guests=guests, lan=lan, token_file=token_file, runs=runs, resume=resume, script=script, send=send
    )
    allowed = _WITH_PAGE if web else _EVERYWHERE
    wrong = [key for key in (*given, *(key for key, value in of_host.items() if value)) if key not in allowed]
    if wrong and not host:
        raise ConfigError(
            f"start() takes {wrong[0]} only with host=True", hint=f"potluck.start(host=True, {wrong[0]}=…)"
        )
    if host or web:
        return _hosted(HOST if host else ALONE, given, of_host, view)
    return run.start(to_stderr, build(RunConfig, given), shows_steps=False)


def _hosted(role: str, given: dict[str, Any], of_host: _OfHost, view: Mode) -> HostedRun:
    _refuse_worker()
    _take_place()
    environment = env.read()
    failpoints.arm(environment.failpoint)
    send, resume, token_file = of_host["send"], of_host["resume"], of_host["token_file"]
    sent = _script(of_host["script"], send) if role == HOST else None
    own = Path(_own_file() or cells.NAME).name
    kind = "host=True" if role == HOST else "web=True"
    spec = script_spec(
        sent[0].names[0] if sent is not None else own,
        given,
        role=role,
        runs=env.runs_folder(Path(of_host["runs"]) if of_host["runs"] is not None else None, environment),
        resume=os.fspath(resume) if resume is not None else None,
        guests=of_host["guests"],
        again=lambda path: f"potluck.start({kind}, resume={str(path)!r})",
    )
    sharing = Sharing(token_file=Path(token_file) if token_file is not None else None, lan=of_host["lan"])
    spec = replace(spec, sharing=sharing, in_script=True)
    if sent is not None:
        script, folder = sent
        spec = replace(spec, source=_described(script, folder, view), files=script.contents)
    opened = HostedRun(spec, environment, view, [Path(file) for file in send] if sent is None else None)
    _opened[:] = [opened]
    return opened


def _refuse_worker() -> None:
    """Refuse to host a second run in a worker process that imports the script."""
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise LoopError(
            "potluck.start(host=True) was called in a worker process that imports this script",
            hint='put the script below `if __name__ == "__main__":`, as multiprocessing needs it',
        )


def _take_place() -> None:
    """Close the previous run, for example when a notebook's cell is run again."""
    for before in _opened:
        if before.is_training:
            raise LoopError(
                "a run that this process hosts is still training", hint="end its loop first, or call run.close()"
            )
        before.close()


def _script(given: AnyPath | None, send: Sequence[AnyPath]) -> tuple[Script, Path] | None:
    """The code that guests run, and its folder; None in a notebook, whose cells are not complete yet."""
    arguments = sys.argv[1:] if given is None else []
    path = given if given is not None else _own_file()
    if path is not None:
        script = read_script(Path(path), [Path(file) for file in send], arguments)
        return script, Path(path).resolve().parent
    if cells.shell() is None:
        raise ConfigError(
            "code typed at a Python prompt, or read from a pipe or an archive, cannot be sent to guests",
            hint='write it to a file and give script="train.py"; or use a notebook, or IPython',
        )
    return None


def _own_file() -> str | None:
    """The running script; None in a notebook and at a prompt."""
    file = getattr(sys.modules["__main__"], "__file__", None)
    return None if cells.shell() is not None or file is None or not os.path.isfile(file) else file


def _described(script: Script, folder: Path, view: Mode, python: Script | None = None) -> Source:
    """The script's description for guests, as of `described`. Warns of imported files that are not sent with it."""
    source, lacking = described(script, folder, python)
    if lacking and view != "quiet":
        say(f"warning: guests will lack {', '.join(lacking)}: add send={lacking!r} to potluck.start()")
    return source


class HostedRun(Run):
    """A run with a folder, of this script or notebook. Each call of `steps` after the first is a new run."""

    def __init__(self, spec: RunSpec, environment: env.Environment, view: Mode, send: list[Path] | None) -> None:
        """`send`: files that are sent with a notebook's cells; None if guests run a script."""
        self._spec, self._environment, self._view, self._send = spec, environment, view, send
        self._cell = 0
        self._left = False
        self._thread: threading.Thread | None = None
        """The thread in which the loop runs."""
        self._open(spec)
        super().__init__(self._session.context)
        # Where nobody reads the output any more, the session ends the run as with Ctrl-C.
        with contextlib.suppress(BrokenPipeError):
            if self.token is not None and not spec.guests and view != "quiet":
                run_session.tell_join_line(self.token, spec.sharing.token_file, view)
            self._tell_rest()

    @functools.wraps(Run.steps)
    def steps(self, *given: Any, **keywords: Any) -> Iterator[Step]:  # type: ignore[override]
        if self._opened_here:
            raise second_loop()
        if self._context.loop.began or self._session.closed:
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
        return self._context.loop.training and not self._left and not self._session.closed

    @property
    def _opened_here(self) -> bool:
        """Whether an earlier loop of this cell, or of the script, is open. One of an earlier cell cannot go on."""
        shell = cells.shell()
        return self.is_training and (shell is None or shell.execution_count == self._cell)

    def close(self, error: BaseException | None = None) -> None:
        """End the run: the current training, if any, then guests, port, view and run folder."""
        if error is None and not self._context.loop.began:
            error = LoopError("ended without reaching run.steps()")  # its folder is not kept
        self._session.close(error)

    # -- a session --------------------------------------------------------------------------------------

    def _open(self, spec: RunSpec) -> None:
        self._session = run_session.session_of(spec, self._environment, self._view)
        self._session.__enter__()
        self._context, self._left = self._session.context, False
        self._session.on_close(_at_the_end(self.close, lambda thread: thread is self._thread))
        if (shell := cells.shell()) is not None:
            shell.events.register("post_run_cell", self._after_cell)
            self._session.on_close(lambda: shell.events.unregister("post_run_cell", self._after_cell))

    def _reopen(self) -> None:
        """A new run with the keys and port of the last one: the same join line works."""
        admission = self._context.admission
        self._context.loop.finish()
        self.close()
        spec = replace(self._spec, resume=None)
        if admission is not None:
            spec = replace(spec, keys=admission.keys, port=admission.socket.port)
        self._open(spec)
        if self.token is not None and not spec.guests and self._view != "quiet":
            say("a new run; guests join it with the same line as before")
        self._tell_rest()

    def _living(self, session: Session, steps: Iterator[Step]) -> Iterator[Step]:
        """The steps. When the training has ended in any way, the run is closed."""
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
            session.context.loop.then(session.close)
            if session.context.loop.stop_requested() and (line := session.stopped_line()):
                say(line)

    def _tell_rest(self) -> None:
        """Print what is new in each run: the code for this network, and the address of the page."""
        if self._session.code is not None:
            run_session.tell_code(self._session.code, self._view)
        if self.page_url is not None and self._view != "quiet":
            run_session.tell_page(self.page_url, self._view)

    def _repr_html_(self) -> str | None:
        """The run so far, for display in a notebook."""
        folder = self._context.folder
        if folder is None or not folder.events.exists():
            return None
        state = state_of(read_events(folder.path))
        if self._session.closed:
            return frame(state.page())
        state.hear(pulse_of(self._context.loop.members()))
        return frame(state.page(live=True, moment=time.strftime("%Y-%m-%d %H:%M:%S")))

    # -- in a notebook ----------------------------------------------------------------------------------

    def _send_cells(self) -> None:
        """Let guests run the cells that were run here, up to and including the one that calls `steps`."""
        shell = cells.shell()
        if shell is None:
            return
        self._cell = shell.execution_count
        if self._send is not None and self._context.admission is not None:
            found = cells.cells_of(shell.history_manager.input_hist_raw[: self._cell + 1], _loops)
            script = with_files(cells.as_script(found), self._send, Path.cwd())
            python = replace(script, contents=(cells.as_python(found), *script.contents[1:]))
            source = _described(script, Path.cwd(), self._view, python)
            self._session.send(source, script.contents)
            self._context = self._session.context
        _loops.add(self._cell)

    def _after_cell(self, result: Any) -> None:
        """A cell has ended: end a loop that it left, and if the cell failed, fail its training."""
        error = result.error_before_exec or result.error_in_exec
        if self._left or (error is not None and self._context.loop.began and result.execution_count == self._cell):
            self.close(error)


def _at_the_end(
    close: Callable[[BaseException | None], None], loops_in: Callable[[threading.Thread | None], bool]
) -> Callable[[], None]:
    """Close at the end of the script, with the exception that ended it, if any; the result takes this back.

    With `loops_in`, the end of that thread counts too, because the loop runs in it.
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
