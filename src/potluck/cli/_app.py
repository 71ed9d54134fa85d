"""The `potluck` command: its verbs, each imported only when used, and how errors are printed.

`--help` and `--version` import neither torch nor rich, so that help is shown within 150 ms.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import click

from potluck import env, failpoints
from potluck._version import __version__
from potluck.errors import INTERRUPTED, PotluckError, UserError

READER_GONE = 141
"""The status that a shell reports for a program ended by SIGPIPE (128 + 13)."""
_CANNOT_WRITE = {errno.ENOSPC, errno.EFBIG, errno.EIO, getattr(errno, "EDQUOT", errno.ENOSPC)}
"""The errors of an open stream, without a file's name, when its disk is full or gone."""
_NOT_ALLOWED = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENAMETOOLONG, *_CANNOT_WRITE}
"""With a file's name: the path, its rights or its disk, not a fault of Potluck's."""
_DEBUG_HELP = "Show the full traceback if an error occurs."


@dataclass(frozen=True, slots=True)
class Verb:
    """The module of a command, and its line in `potluck --help` (so that help need not import it)."""

    target: str
    help: str


# In the order in which a person meets them.
VERBS: dict[str, Verb] = {
    "train": Verb("potluck.cli.train:train", "Train a built-in recipe on this machine. Needs no download."),
    "host": Verb("potluck.cli.host:host", "Start a run that other machines can join, and print the token."),
    "join": Verb("potluck.cli.join:join", "Join a run with this machine."),
    "up": Verb("potluck.cli.up:up", "Start a run on several machines at once, over ssh."),
    "sweep": Verb("potluck.cli.sweep:sweep", "Try many parameters of a script on a Ray or Dask cluster."),
    "doctor": Verb(
        "potluck.cli.doctor:doctor", "Find problems on this machine or between two, and how to fix them."
    ),
    "probe": Verb("potluck.cli.probe:probe", "Measure the speed of this device and of a link."),
    "plan": Verb("potluck.cli.plan:plan", "Predict whether a set of machines is worth it, before running."),
    "explain": Verb("potluck.cli.explain:explain", "Explain an error code and how to fix it."),
    "report": Verb("potluck.cli.report:report", "Summarize a run."),
    "lab": Verb("potluck.cli.lab:lab", "Emulate several machines on one box and compare strategies."),
    "bench": Verb("potluck.cli.bench:bench", "Measure collectives and DDP against other backends."),
}


@dataclass(slots=True)
class Settings:
    """Settings common to all verbs; a verb receives them with `@click.pass_obj`."""

    debug: bool = False
    environment: env.Environment = field(default_factory=env.Environment)


class _ReaderLeft(Exception):
    """The reader of our output (`| head`) closed the pipe."""


@contextlib.contextmanager
def _until_the_reader_left() -> Iterator[None]:
    """Raise `_ReaderLeft` for a closed output pipe. click would exit silently with status 1 on any broken pipe."""
    try:
        yield
    except (BrokenPipeError, KeyboardInterrupt) as error:
        from potluck.fleet.life import ReaderGone, reader_is_gone  # slow to import, and only needed here

        if isinstance(error, ReaderGone) or (isinstance(error, BrokenPipeError) and reader_is_gone()):
            raise _ReaderLeft from error
        if isinstance(error, BrokenPipeError) and os.name == "posix":
            raise RuntimeError(f"{type(error).__name__}: {error}") from error
        raise


class LazyGroup(click.Group):
    """A group that imports a command only to run it or to show that command's own help."""

    def __init__(self, *args: Any, verbs: dict[str, Verb], **attributes: Any) -> None:
        super().__init__(*args, **attributes)
        self._verbs = verbs

    def make_context(self, *args: Any, **more: Any) -> click.Context:
        with _until_the_reader_left():
            return super().make_context(*args, **more)

    def invoke(self, ctx: click.Context) -> Any:
        with _until_the_reader_left():
            return super().invoke(ctx)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self._verbs)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        verb = self._verbs.get(cmd_name)
        if verb is None:
            return None
        module, _, attribute = verb.target.partition(":")
        command: click.Command = getattr(importlib.import_module(module), attribute)
        if not any(parameter.name == "debug" for parameter in command.params):
            # People put --debug at the end of the line that failed.
            command.params.append(_debug_option())
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in self._verbs and not args[0].startswith("-"):
            import difflib  # slow to import, and rarely needed

            close = difflib.get_close_matches(args[0], self._verbs, n=1)
            advice = f"Did you mean {close[0]!r}?" if close else f"There are: {', '.join(self._verbs)}."
            raise click.UsageError(f"no command {args[0]!r}. {advice}", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, verb.help) for name, verb in self._verbs.items()])


def _debug_option() -> click.Option:
    """Declared for the help; `run` checks for it before anything else can fail."""
    return click.Option(["--debug"], is_flag=True, expose_value=False, help=_DEBUG_HELP)


@click.group(cls=LazyGroup, verbs=VERBS, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="potluck", message="%(prog)s %(version)s")
@click.option("--debug", is_flag=True, expose_value=False, help=_DEBUG_HELP)
@click.pass_context
def app(ctx: click.Context) -> None:
    """Train one PyTorch model on all the machines you own, however unequal they are."""
    settings = ctx.ensure_object(Settings)
    settings.environment = env.read()
    failpoints.arm(settings.environment.failpoint)
    settings.debug = settings.debug or settings.environment.debug


def main(args: Sequence[str] | None = None) -> None:
    """Run the command line and exit with its status."""
    sys.exit(run(args))


def run(args: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status. Errors are printed to stderr."""
    arguments = sys.argv[1:] if args is None else list(args)
    settings = Settings(debug="--debug" in arguments)
    _open_streams()
    try:
        result: Any = app.main(args=arguments, prog_name="potluck", obj=settings, standalone_mode=False)
        sys.stdout.flush()
    except click.ClickException as error:
        error.show()
        if isinstance(error, click.NoSuchOption):
            _say_where_script_options_go(error, arguments)
        return error.exit_code
    except (KeyboardInterrupt, click.Abort) as stop:
        # click raises an Abort from what interrupted it.
        if not getattr(stop.__cause__ if isinstance(stop, click.Abort) else stop, "told", False):
            _say("interrupted")
        return INTERRUPTED
    except (_ReaderLeft, BrokenPipeError):
        _drop_output()
        return READER_GONE
    except PotluckError as error:
        _explain(error, settings.debug)
        return error.exit_status
    except Exception as error:
        if isinstance(error, OSError) and error.errno in _CANNOT_WRITE and error.filename is None:
            _drop_output()
            _say(f"error: cannot write the output: {error.strerror}")
        elif isinstance(error, OSError) and error.errno in _NOT_ALLOWED and error.filename is not None:
            path = str(error.filename)
            path = path if len(path) <= 200 else f"{path[:200]}…"
            wrong = UserError(f"cannot use {path}: {error.strerror}", hint="check the path and your rights to it")
            _explain(wrong, settings.debug)
            return wrong.exit_status
        else:
            _confess(error, settings.debug)
        return 1
    # click hands back what ctx.exit() was given, or what the command returned.
    return result if isinstance(result, int) else 0


def _drop_output() -> None:
    """Discard buffered output, because Python would report the error again when it flushes at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _say_where_script_options_go(error: click.NoSuchOption, arguments: Sequence[str]) -> None:
    script = next((word for word in arguments[1:] if word.endswith(".py")), None)
    if script is not None and arguments[0] in ("host", "up"):
        before = arguments[: arguments.index(script)]
        order = [*before, script, "--"] if arguments[0] == "host" else [*before, "--", script]
        command = shlex.join(["potluck", *order, error.option_name])
        _say(f"hint: options of {script} go after --, for example: {command}")


def _open_streams() -> None:
    """Discard output to streams that were closed before the start, for which Python has None.

    Their descriptors are reserved too, because a socket with descriptor 1 would get what libraries print.
    """
    if None in (sys.stdin, sys.stdout, sys.stderr):
        while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
            pass
        os.close(descriptor)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115


def _explain(error: PotluckError, debug: bool) -> None:
    if debug:
        _show_traceback(error)
    _say(f"error: {error}")
    if error.hint:
        _say(f"hint: {error.hint}")
    _say(f"see: potluck explain {error.code}")


def _confess(error: Exception, debug: bool) -> None:
    if debug:
        _show_traceback(error)
    words = " ".join(str(error).split())
    what = type(error).__name__ + (f": {words}" if words else "")
    advice = "please report it" if debug else "run with --debug for the traceback; please report it"
    _say(f"internal error: {what} ({advice})")


def _show_traceback(error: Exception) -> None:
    import traceback  # slow to import, and only needed here

    traceback.print_exception(error)


def _say(line: str) -> None:
    # Where nobody reads, the exit status still tells.
    with contextlib.suppress(OSError):
        print(line, file=sys.stderr, flush=True)
