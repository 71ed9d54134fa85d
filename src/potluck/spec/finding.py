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
    """The rows of the table in docs/troubleshooting/doctor.md."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fine:
    """One thing that was looked at and is well."""

    machine: str
    what: str
    details: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """All of it: findings, the worst first, and what is fine."""

    findings: tuple[Finding, ...]
    fine: tuple[Fine, ...]

    @property
    def healthy(self) -> bool:
        """Nothing stops Potluck."""
        return not any(f.severity == BLOCKER for f in self.findings)

    def to_dict(self) -> dict[str, Any]:
        return {"healthy": self.healthy, **dataclasses.asdict(self)}

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=1)


def ordered(found: list[Finding | Fine]) -> Diagnosis:
    """By severity; within one, in the order in which they were found."""
    findings = sorted((f for f in found if isinstance(f, Finding)), key=lambda f: SEVERITIES.index(f.severity))
    return Diagnosis(findings=tuple(findings), fine=tuple(f for f in found if isinstance(f, Fine)))
