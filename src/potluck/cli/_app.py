"""The `potluck` command: its verbs, loaded only when used, and what a person sees when something fails.

It knows the verbs' names, not what they do; help and version import neither torch nor rich.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import click

from potluck import env, failpoints
from potluck._version import __version__
from potluck.errors import PotluckError

INTERRUPTED = 130
READER_GONE = 141
"""As a shell has it of a program that the system ends for writing to a closed pipe (128 + SIGPIPE)."""
_DEBUG_HELP = "Show the traceback of an error."


@dataclass(frozen=True, slots=True)
class Verb:
    """Where a command lives, and its line in `potluck --help` (so that help need not import it)."""

    target: str
    help: str


# In the order in which a person meets them.
VERBS: dict[str, Verb] = {
    "train": Verb("potluck.cli.train:train", "Train here, now, with defaults that need no download."),
    "host": Verb("potluck.cli.host:host", "Start a run that guests can join; prints the token."),
    "join": Verb("potluck.cli.join:join", "Bring this machine to a run."),
    "doctor": Verb("potluck.cli.doctor:doctor", "What will go wrong, and how to fix it."),
    "probe": Verb("potluck.cli.probe:probe", "How fast this device and this link really are."),
    "plan": Verb("potluck.cli.plan:plan", "Is it worth it? Predicted before anything runs."),
    "explain": Verb("potluck.cli.explain:explain", "What an error means, and what to do about it."),
    "report": Verb("potluck.cli.report:report", "What happened in a run."),
    "lab": Verb("potluck.cli.lab:lab", "A whole fleet on one box, strategies side by side."),
    "bench": Verb("potluck.cli.bench:bench", "How fast collectives and DDP are here, beside other backends."),
}


@dataclass(slots=True)
class Settings:
    """What holds for every verb; a verb gets it with `@click.pass_obj`."""

    debug: bool = False
    environment: env.Environment = field(default_factory=env.Environment)


class _ReaderLeft(Exception):
    """Whoever read the output (`| head`) has seen enough."""


@contextlib.contextmanager
def _until_the_reader_left() -> Iterator[None]:
    """Around what prints: click ends it with status 1 and without a word, whatever pipe or connection broke."""
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
    """Parsed for the help's sake; `run` looks for it before anything else can fail."""
    return click.Option(["--debug"], is_flag=True, expose_value=False, help=_DEBUG_HELP)


@click.group(cls=LazyGroup, verbs=VERBS, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="potluck", message="%(prog)s %(version)s")
@click.option("--debug", is_flag=True, expose_value=False, help=_DEBUG_HELP)
@click.pass_context
def app(ctx: click.Context) -> None:
    """Train one PyTorch model on every machine you own. Every machine brings what it has."""
    settings = ctx.ensure_object(Settings)
    settings.environment = env.read()
    failpoints.arm(settings.environment.failpoint)
    settings.debug = settings.debug or settings.environment.debug


def main(args: Sequence[str] | None = None) -> None:
    """Run the command line and exit with its status."""
    sys.exit(run(args))


def run(args: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status, having said on stderr what went wrong."""
    arguments = sys.argv[1:] if args is None else list(args)
    settings = Settings(debug="--debug" in arguments)
    _open_streams()
    try:
        result: Any = app.main(args=arguments, prog_name="potluck", obj=settings, standalone_mode=False)
        sys.stdout.flush()
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (KeyboardInterrupt, click.Abort):
        _say("interrupted")
        return INTERRUPTED
    except (_ReaderLeft, BrokenPipeError):
        # Python would complain again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return READER_GONE
    except PotluckError as error:
        _explain(error, settings.debug)
        return error.exit_status
    except Exception as error:
        _confess(error, settings.debug)
        return 1
    # click hands back what ctx.exit() was given, or what the command returned.
    return result if isinstance(result, int) else 0


def _open_streams() -> None:
    """What goes to a stream that was closed before the start, of which Python has None, goes nowhere.

    Its number is taken, too: a socket with the number 1 would get what libraries print.
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
