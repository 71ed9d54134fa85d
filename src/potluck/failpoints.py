"""Failpoints: named moments on both sides of every durable write and every protocol transition, for tests.

    POTLUCK_FAILPOINT=checkpoint.before-rename=kill      the process is killed (-9) when it gets there
    POTLUCK_FAILPOINT=guest.sending.done=stall:2@3       the third time it gets there, that thread sleeps 2 s

`NAME=ACTION[@COUNT]`; the action happens at the COUNT-th passing (default: the first), and only then. Actions:
`kill`, `kill:SECONDS` (that long after the passing, while everything continues), `raise` (an OSError),
`stall:SECONDS`. A name without its last part means all that begin with it: `host.received=kill@7`. An unarmed
failpoint costs one call and one comparison.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import re
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from potluck.errors import ConfigError

FILES = ("keys", "token", "manifest", "result", "web")
"""The files that `durable.replace` writes, by content."""
FROM_GUEST = ("hello", "ready", "taken", "closing", "grad", "done", "stopped", "sketch", "hashed", "leave")
"""The kinds of message that a guest sends; heartbeats change nothing and are not among them."""
FROM_HOST = (
    *("welcome", "tensor", "whole", "change", "check", "samples", "ahead", "lease"),
    *("revoke", "dropped", "hash", "resync", "note", "refuse", "bye"),
)
"""The kinds of message that a host sends. After a "refuse" the guest ends, so there is no failpoint after it."""

LONGEST_S = 3600.0

_FORM = re.compile(r"(?P<action>kill|raise|stall)(?::(?P<seconds>\d{1,6}(?:\.\d{1,6})?))?(?:@(?P<count>\d{1,9}))?")


def _each(name: str, details: tuple[str, ...], what: str) -> dict[str, str]:
    return {f"{name}.{detail}": what.format(detail) for detail in details}


NAMES: Mapping[str, str] = MappingProxyType(
    {
        # -- a run's small files ------------------------------------------------------------------------
        "run.before-folder": "the run's folder is about to be made",
        "run.after-folder": "the run's folder is there and empty",
        **_each("file.before-write", FILES, "the new {} file is about to be written beside the old one"),
        **_each("file.written", FILES, "the new {} file is written, not yet synced"),
        **_each("file.synced", FILES, "the new {} file is on the disk, under another name"),
        **_each("file.renamed", FILES, "the new {} file has its name, the folder is not synced"),
        **_each("file.after-write", FILES, "the new {} file and its name are on the disk"),
        "events.before-line": "an event is about to be written to the log",
        "events.after-line": "an event is in the log",
        # -- checkpoints --------------------------------------------------------------------------------
        "checkpoint.before-folder": "the temporary folder is about to be made",
        "checkpoint.before-file": "a file of tensors is about to be written",
        "checkpoint.file-written": "a file of tensors is written, not yet synced",
        "checkpoint.file-synced": "a file of tensors is on the disk",
        "checkpoint.before-manifest": "all files of tensors are on the disk, the manifest is not there",
        "checkpoint.manifest-written": "the manifest is written, not yet synced",
        "checkpoint.manifest-synced": "the manifest is on the disk, its folder's entries perhaps not",
        "checkpoint.before-rename": "all of it is on the disk, under its temporary name",
        "checkpoint.renamed": "it has its name, the folder above is not synced",
        "checkpoint.published": "it is there for good; older ones are not yet removed",
        "checkpoint.before-replace": "an older one of the same step is about to be moved away",
        "checkpoint.replacing": "the older one of the same step is gone, the newer has not yet its name",
        "checkpoint.replaced": "the newer one of the same step has its name",
        "checkpoint.before-remove": "one that is no longer kept is about to be removed",
        "checkpoint.removing": "one that is no longer kept has lost its name, its files are still there",
        "checkpoint.removed": "one that is no longer kept is gone",
        "checkpoint.before-acknowledge": "it is published, and its event is not in the log",
        "checkpoint.acknowledged": "its event is in the log",
        # -- what the host does -------------------------------------------------------------------------
        **_each("host.received", FROM_GUEST, "a guest's {!r} has arrived and is not handled yet"),
        **_each("host.handled", FROM_GUEST, "a guest's {!r} has been handled"),
        **_each("host.sending", FROM_HOST, "{!r} is about to be sent to a guest"),
        "host.before-step": "a step is about to be opened and dealt",
        "host.dealt": "a step is dealt and its leases are sent",
        "host.before-introduce": "a newcomer's model fits, nothing has been sent to it",
        "host.introduced": "everything that a newcomer lacks is queued for it",
        "host.before-compare": "a newcomer's gradient is about to be compared",
        "host.compared": "a newcomer is admitted or refused",
        "host.before-change": "a piece of the weights' change is about to be coded",
        "host.change-coded": "a piece of the weights' change is in the replica",
        "host.before-decode": "a whole contribution is about to be added to the sum",
        "host.decoded": "a contribution is in the sum and not yet counted",
        "host.before-count": "a decoded contribution is about to be counted",
        "host.counted": "a contribution's samples are counted",
        "host.before-end-step": "every sample of the step is counted, the step is still open",
        "host.before-update": "the gradient is complete, the weights are the old ones",
        "host.updated": "the weights are the new ones, and the step's event is not in the log",
        "host.before-bye": "the run is over and no guest has been told",
        "host.closed": "all guests are told and the port is closed",
        # -- what a guest does --------------------------------------------------------------------------
        **_each("guest.received", FROM_HOST, "the host's {!r} has arrived and is not handled yet"),
        **_each("guest.handled", tuple(k for k in FROM_HOST if k != "refuse"), "the host's {!r} has been handled"),
        **_each("guest.sending", FROM_GUEST, "{!r} is about to be sent to the host"),
        "guest.before-apply": "a piece of the weights is about to be applied",
        "guest.applied": "a piece of the weights is applied, and the host not told",
        "guest.before-code": "a piece of the gradient is about to be coded",
        "guest.coded": "a piece of the gradient is sent",
        "guest.before-finish": "a gradient is complete, and the host not told",
        "guest.finished": "a whole contribution is sent",
    }
)


def hit(name: str, detail: str = "") -> None:
    """This moment is passed now. With a detail (a message's kind) the failpoint's name ends in it."""
    if _armed is not None:
        _armed.passed(f"{name}.{detail}" if detail else name)


@dataclass(slots=True)
class _Armed:
    name: str
    action: str
    seconds: float
    count: int
    _passings: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    """Its next() is atomic for all threads."""

    def passed(self, name: str) -> None:
        if (name == self.name or name.startswith(self.name + ".")) and next(self._passings) == self.count:
            self._act(name)

    def _act(self, name: str) -> None:
        if self.action == "raise":
            raise OSError(errno.EIO, f"failpoint {name}")
        if self.action == "stall":
            time.sleep(self.seconds)
        elif not self.seconds:
            _kill()
        else:
            timer = threading.Timer(self.seconds, _kill)
            timer.daemon = True
            timer.start()


_armed: _Armed | None = None


def arm(text: str | None) -> None:
    """Arm the failpoint that a text such as `checkpoint.renamed=kill@2` names; None or nothing disarms."""
    global _armed
    _armed = _parsed(text) if text else None


@contextlib.contextmanager
def armed(text: str) -> Iterator[None]:
    """Armed inside, disarmed afterwards: for tests in one process."""
    arm(text)
    try:
        yield
    finally:
        arm(None)


def _kill() -> None:
    # As the kernel or a power cut does it: nothing is flushed, nobody is told.
    os.kill(os.getpid(), getattr(signal, "SIGKILL", signal.SIGTERM))


def _parsed(text: str) -> _Armed:
    name, _, rest = text.partition("=")
    if name not in NAMES and not any(full.startswith(name + ".") for full in NAMES):
        raise _unknown(name)
    form = _FORM.fullmatch(rest)
    if form is None or (form["seconds"] is None and form["action"] == "stall"):
        raise _wrong(text)
    seconds, count = float(form["seconds"] or 0), int(form["count"] or 1)
    if seconds > LONGEST_S or count < 1 or (form["seconds"] and form["action"] == "raise"):
        raise _wrong(text)
    return _Armed(name, form["action"], seconds, count)


def _wrong(text: str) -> ConfigError:
    return ConfigError(
        f"POTLUCK_FAILPOINT={text!r} is not valid",
        hint="NAME=kill, NAME=kill:SECONDS, NAME=raise or NAME=stall:SECONDS, with @COUNT for a later passing",
    )


def _unknown(name: str) -> ConfigError:
    import difflib  # slow to import, and only needed here

    close = difflib.get_close_matches(name, NAMES, n=1, cutoff=0.0)
    return ConfigError(
        f"POTLUCK_FAILPOINT names a failpoint {name!r} that does not exist",
        hint=f"did you mean {close[0]} ({NAMES[close[0]]})?",
    )
