"""The tree of all errors; owns what a user reads when something fails.

    PotluckError
    ├── UserError              the person's input: exit status 2
    │   ├── ConfigError        an unknown key, a value out of range
    │   ├── DataError          a data set that is missing or cannot be read
    │   ├── TokenError         a token that is damaged or of another version
    │   ├── RunFolderError     a run folder that is missing, damaged or not writable
    │   ├── LoopError          the training loop used in a way that cannot work
    │   ├── CollectiveError    a collective of torch.distributed that cannot work (also a RuntimeError)
    │   ├── MissingModuleError this machine lacks what the script imports, or a logger
    │   └── ScriptError        the user's script raised an exception of its own: exit status 1
    ├── NetworkError           a machine or a link: exit status 3
    │   ├── PortTakenError     the port is held by another process (a user's choice: exit status 2)
    │   ├── HostGoneError      the host stayed silent past the deadline
    │   ├── GuestsMissingError the expected guests did not join
    │   ├── RefusedError       the host refused this guest, with its reason
    │   ├── MachineError       a machine on which nothing can be started
    │   ├── CollectiveTimeoutError  ranks did not join a collective (also RuntimeError)
    │   └── RankGoneError      a rank of the group died or cannot be reached (also RuntimeError)
    ├── WireError              bytes that are not a message of this protocol
    ├── CheckpointError        no readable checkpoint where one was needed
    └── NonFiniteError         gradients or weights that are NaN or infinite

Every class has a `code`; `troubleshooting/<code>.md` is its page, which `potluck explain <code>` shows.
"""

from __future__ import annotations

from typing import Any

INTERRUPTED = 130
"""Exit status of a program that Ctrl-C ended, as a shell reports it."""


class PotluckError(Exception):
    """An error that a person can act on: what happened, where, and what to do."""

    code = "internal"
    exit_status = 1

    def __init__(self, what: str, *, hint: str = "", machine: str | None = None, step: int | None = None) -> None:
        super().__init__(what)
        self.what = what
        self.hint = hint
        self.machine = machine
        self.step = step
        if hint:
            self.add_note(f"hint: {hint}")  # under plain python only the traceback shows it

    def __str__(self) -> str:
        where = "".join(
            (f" [{self.machine}]" if self.machine else "", f" [step {self.step}]" if self.step is not None else "")
        )
        return self.what + where


class UserError(PotluckError):
    code = "bad-input"
    exit_status = 2
    path: tuple[str | int, ...] = ()
    """The keys that lead to the invalid value, if it was found in data (`checked.py`)."""


class ConfigError(UserError, ValueError):
    """Also a ValueError, to which msgspec adds its place in the data."""

    code = "bad-config"


class DataError(UserError):
    code = "bad-data"


class TokenError(UserError):
    code = "bad-token"


class RunFolderError(UserError):
    code = "bad-run-folder"


class LoopError(UserError):
    code = "bad-loop"


class CollectiveError(UserError, RuntimeError):
    """Also a RuntimeError, because scripts written for other backends of torch.distributed catch that."""

    code = "bad-collective"


class MissingModuleError(UserError):
    code = "missing-module"


class ScriptError(UserError):
    code = "script-failed"
    exit_status = 1


class NetworkError(PotluckError):
    code = "network"
    exit_status = 3


class PortTakenError(NetworkError):
    code = "port-taken"
    exit_status = 2


class HostGoneError(NetworkError):
    code = "host-gone"


class GuestsMissingError(NetworkError):
    code = "guests-missing"


class RefusedError(NetworkError):
    code = "refused"


class MachineError(NetworkError):
    code = "bad-machine"
    findings: tuple[Any, ...] = ()
    """All of the doctor's findings on that machine (`spec.finding.Finding`), the cause first."""


class CollectiveTimeoutError(NetworkError, RuntimeError):
    code = "collective-timeout"


class RankGoneError(NetworkError, RuntimeError):
    code = "rank-gone"


class WireError(PotluckError):
    code = "bad-message"


class CheckpointError(PotluckError):
    code = "bad-checkpoint"
    exit_status = 2


class NonFiniteError(PotluckError):
    code = "not-finite"
