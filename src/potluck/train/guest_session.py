"""The life of a run on a guest: connects to the host, runs its script until the run is over, and leaves in order.

It needs no command line. Its caller passes a view for its messages and the function that runs the host's script.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from potluck.device import Device
from potluck.errors import LoopError, NetworkError, PotluckError, ScriptError, UserError
from potluck.hub.link import GuestLink
from potluck.hub.recorder import Recorder, remove_old
from potluck.sinks import guarded
from potluck.spec.config import RunConfig
from potluck.spec.events import RunEvent
from potluck.spec.messages import HelloMessage
from potluck.train.context import GUEST, RunContext
from potluck.train.ending import GuestDone
from potluck.train.event_log import EventLog
from potluck.train.launch import launched
from potluck.train.telemetry import versions
from potluck.wire.token import Token

RUN_FAILED = "failed"
"""The reason a host gives its guests when its training ended with an error."""
ANSWER_S, CLOSED_S = 30.0, 3.0
"""How long to wait for a host that does not answer, and for one whose port is closed."""
LEFT_ITS_LOOP = "its script left the loop"


class GuestObserver(Protocol):
    """Shows a guest's part in a run; any thread may call."""

    def waiting(self, error: Exception) -> None: ...
    def preparing(self, reason: str) -> None: ...
    def joined(self, *, host: str, address: str, run: str, name: str, device: str) -> None: ...
    def missing(self, seconds: float, give_up_s: float) -> None: ...
    def found(self) -> None: ...
    def recorded(self, path: object, why: str) -> None: ...
    def event(self, event: RunEvent) -> None: ...
    def ended(self, words: str) -> None: ...
    def close(self) -> None: ...


def connect(
    token: Token,
    *,
    config: RunConfig,
    device: Device,
    name: str,
    view: GuestObserver,
    wait_s: float | None,
    give_up_s: float,
    records: Path | None = None,
    before_again: Callable[[], None] = lambda: None,
) -> RunContext:
    """Join the run; returns the context of this guest's part, for `compute`.

    `wait_s` is the time for the host to answer; None: half a minute, but little where its port is closed, as it is
    when the run has ended. From then on, the host may be unreachable for `give_up_s`. `records` is the folder for
    flight records after a fault (default: the temporary folder). `before_again` is called before another attempt;
    an exception of it ends this.
    """
    if records is None:  # all processes of this machine share the folder for temporary files
        temporary = Path(tempfile.gettempdir())
        remove_old(name, temporary)
        recorder = Recorder(f"{name}-{os.getpid()}", temporary, tell=view.recorded)
    else:
        recorder = Recorder(name, records, tell=view.recorded)
    hello = HelloMessage(name=name, device=device.label, platform=sys.platform, **versions())
    link = GuestLink(token, hello, give_up_s=give_up_s, recorder=guarded(recorder, "the flight recorder"))

    def waiting(error: Exception) -> None:
        view.waiting(error)
        before_again()

    link.waiting = waiting
    link.preparing = view.preparing
    link.missing = lambda seconds: view.missing(seconds, give_up_s)
    link.found = view.found
    welcome = link.connect(ANSWER_S, CLOSED_S) if wait_s is None else link.connect(wait_s)
    view.joined(
        host=welcome.message.host,
        address=link.address,
        run=welcome.message.run,
        name=welcome.message.name,
        device=f"{device.label} ({device.reason})",
    )
    return RunContext(
        role=GUEST,
        config=config,
        device=device,
        name=welcome.message.name,
        log=EventLog(None, view.event),
        link=link,
        welcome=welcome,
    )


def compute(context: RunContext, work: Callable[[], None], view: GuestObserver) -> str:
    """Run `work`, the host's script, until the run is over, then leave in order; returns the reason of its end."""
    link = context.link
    assert link is not None
    try:
        with launched(context):
            work()
        if not context.loop.began:
            raise LoopError("the host's script ended without training", hint="does it reach run.steps()?")
        context.loop.end(LEFT_ITS_LOOP)
        view.ended("the script left its loop")
        link.recorder.discard()
        return LEFT_ITS_LOOP
    except GuestDone as done:
        view.ended(f"the run is over: {done}")
        if str(done) != RUN_FAILED:
            link.recorder.discard()
        return str(done)
    except KeyboardInterrupt:
        context.loop.end("stopped there with Ctrl-C")
        view.ended("left the run")
        if link.reached:  # else what was recorded of its loss is all that is known
            link.recorder.discard()
        raise
    except SystemExit as left:
        if left.code not in (None, 0):
            _failed(context, f"its script ended with status {left.code}")
        raise
    except Exception as error:
        if not isinstance(error, NetworkError):  # the link has recorded what happened to it
            _failed(context, _why(error), records=not isinstance(error, UserError))
        raise
    finally:
        context.loop.end(LEFT_ITS_LOOP)
        link.close("left")
        link.recorder.write(now=True)
        view.close()


def _why(error: Exception) -> str:
    """The failure for the host's log: the script's own exception, not the ScriptError around it."""
    cause = error.__cause__ if isinstance(error, ScriptError) and error.__cause__ is not None else error
    words = " ".join(str(cause).split())
    if isinstance(cause, PotluckError):
        return f"its script failed: {words}"
    return f"its script failed with {type(cause).__name__}" + (f": {words}" if words else "")


def _failed(context: RunContext, why: str, *, records: bool = False) -> None:
    """Report a failure to the host, whose user may be able to fix it. `records`: also write a flight record,
    because a bug is possible."""
    assert context.link is not None
    why = why[:200]
    if records:
        context.link.recorder.fault(why)
    context.loop.end(why, failed=True)
    context.link.close(why, failed=True)
