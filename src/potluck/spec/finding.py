"""Findings: what the doctor says, as plain data.

Owns their shape, their order and their JSON. It must not know how one comes to a finding.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any

BLOCKER, WARNING, NOTE = "blocker", "warning", "note"
SEVERITIES = (BLOCKER, WARNING, NOTE)
"""Potluck will not work; it works but costs speed or safety; Potluck does not mind, but other tools or you may."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that is wrong."""

    code: str
    """Stable, for programs: own-name-is-loopback."""
    severity: str
    machine: str
    """Where."""
    what: str
    how: str
    """How we know."""
    breaks: str
    fix: str
    """A command where there is one."""
    pains: tuple[int, ...] = ()
    """The rows of the table in troubleshooting/doctor.md."""
    potluck: str = ""
    """Of what a log of another tool shows: what Potluck does about it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fine:
    """One thing that was looked at and is well."""

    machine: str
    what: str
    details: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogReading:
    """What the log of a run tells."""

    name: str
    """Of the file."""
    lines: int
    findings: tuple[Finding, ...]
    """What was likely first comes first. A blocker is what ended that run."""
    explained: bool = False
    """Something known ended that run. That a rank raised an exception of its script's, or crashed, explains
    nothing, nor does what the others suffered from it; asides stand in healthy logs, too."""
    first_error: str = ""
    """Where no finding tells what ended it: the first line that looks like a failure, quoted; empty: none does."""
    ended_well: bool = False
    """Potluck's own last word is in it, and no failure after that. Other tools have no such word."""
    left_out_bytes: int = 0
    """In the middle of a log that is too long."""

    @property
    def failed(self) -> bool:
        """A failure is in it, known or not."""
        return bool(self.first_error) or any(finding.severity == BLOCKER for finding in self.findings)


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """All of it: findings, the worst first, and what is fine."""

    findings: tuple[Finding, ...]
    fine: tuple[Fine, ...]
    log: LogReading | None = None

    @property
    def healthy(self) -> bool:
        """Nothing stops Potluck, and no failure is in the log."""
        in_log = self.log is not None and self.log.failed
        return not in_log and not any(f.severity == BLOCKER for f in self.findings)

    def to_dict(self) -> dict[str, Any]:
        """Without a log there is no word of it."""
        table = {"healthy": self.healthy, **dataclasses.asdict(self)}
        return table if self.log is not None else {k: v for k, v in table.items() if k != "log"}

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=1)


def ordered(found: list[Finding | Fine]) -> Diagnosis:
    """By severity; within one, in the order in which they were found."""
    findings = sorted((f for f in found if isinstance(f, Finding)), key=lambda f: SEVERITIES.index(f.severity))
    return Diagnosis(findings=tuple(findings), fine=tuple(f for f in found if isinstance(f, Fine)))
