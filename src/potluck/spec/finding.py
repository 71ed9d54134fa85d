"""The doctor's findings: their fields, order and JSON."""

from __future__ import annotations

from msgspec import Struct
from msgspec.structs import force_setattr

from potluck.bounds import Many, Natural, Text

BLOCKER, WARNING, NOTE = "blocker", "warning", "note"
SEVERITIES = (BLOCKER, WARNING, NOTE)
"""A blocker stops Potluck, a warning costs speed or safety, a note matters to other tools or to you."""


class Finding(Struct, frozen=True, kw_only=True):
    """One problem."""

    code: Text
    """A stable name for programs, such as own-name-is-loopback."""
    severity: Text
    machine: Text
    what: Text
    how: Text
    """The evidence."""
    breaks: Text
    fix: Text
    """How to fix it; a command if there is one."""
    pains: Many[Natural] = ()
    """Rows of the table in troubleshooting/doctor.md."""
    potluck: Text = ""
    """For a problem in the log of another tool: what Potluck does differently."""


class Fine(Struct, frozen=True, kw_only=True):
    """One thing that was checked and is fine."""

    machine: Text
    what: Text
    details: Text = ""


class LogReading(Struct, frozen=True, kw_only=True):
    """The findings in the log of a run."""

    name: Text
    """Name of the log file."""
    lines: Natural
    findings: Many[Finding]
    """The likeliest cause first. A blocker is what ended that run."""
    explained: bool = False
    """Whether a known failure ended that run. An exception of the user's script, the crash of a rank and the errors
    that follow on other ranks explain nothing. Notes (asides) also appear in healthy logs."""
    first_error: Text = ""
    """If no finding explains the failure: the first line that looks like one, quoted; empty if none does."""
    ended_well: bool = False
    """Whether it has Potluck's last message of a run, and no failure after it. Other tools have no such message."""
    network: Many[Fine] = ()
    """The log's lines about the interfaces, transports and variables of NCCL, RCCL and gloo."""
    left_out_bytes: Natural = 0
    """Bytes in the middle of a long log that were not read."""

    @property
    def failed(self) -> bool:
        """Whether it shows a failure, known or not."""
        return bool(self.first_error) or any(finding.severity == BLOCKER for finding in self.findings)


class Diagnosis(Struct, frozen=True, kw_only=True):
    """All findings, the worst first, and what is fine."""

    findings: Many[Finding]
    fine: Many[Fine]
    log: LogReading | None = None

    healthy: bool = True
    """Whether nothing stops Potluck and the log shows no failure; made from the fields above."""

    def __post_init__(self) -> None:
        in_log = self.log is not None and self.log.failed
        force_setattr(self, "healthy", not in_log and not any(f.severity == BLOCKER for f in self.findings))


def ordered(found: list[Finding | Fine]) -> Diagnosis:
    """The diagnosis, with findings sorted by severity, then in the order found."""
    findings = sorted((f for f in found if isinstance(f, Finding)), key=lambda f: SEVERITIES.index(f.severity))
    return Diagnosis(findings=tuple(findings), fine=tuple(f for f in found if isinstance(f, Fine)))
