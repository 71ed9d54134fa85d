"""Finds the known messages in a log, and turns each into a finding. PURE."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from potluck.doctor.log_text import LogText, quoted, redacted
from potluck.doctor.signatures import Signature
from potluck.spec.finding import Finding

_MOST_COUNTED = 1000
_FEW_LINES = 40
_GLOG = re.compile(r"^[EIW]\d{4} \S{1,20} \d{1,9} \S{1,200}\]")


@dataclass(slots=True)
class Hit:
    """The place of a known message."""

    signature: Signature
    line: int
    text: str
    at: int
    """Position of the known words in the text."""
    groups: Mapping[str, str]
    count: int = 1


def known(log: LogText, signatures: Iterable[Signature]) -> list[Hit]:
    """The lines of each of these messages, without those that another message explains better."""
    hits = [hit for signature in signatures if (hit := _look_for(log, signature)) is not None]
    hidden = {(code, hit.line) for hit in hits for code in hit.signature.hides}
    return [hit for hit in hits if (hit.signature.code, hit.line) not in hidden]


def _look_for(log: LogText, signature: Signature) -> Hit | None:
    found: Hit | None = None
    for word in signature.words:
        for line, text, at in log.hits(word):
            match = signature.pattern.search(text) if signature.pattern is not None else None
            if signature.pattern is not None and match is None:
                continue
            groups = {k: redacted(v) for k, v in match.groupdict().items() if v} if match is not None else {}
            hit = Hit(signature, line, text, at, groups)
            found = hit if found is None else _better(found, hit)
            if found.count >= _MOST_COUNTED:
                break
    return found if found is None or not signature.elsewhere or log.holds(signature.elsewhere) else None


def stands_alone(log: LogText, hit: Hit) -> bool:
    """Whether the log is only this message, apart from its frame."""
    if log.lines > _FEW_LINES or hit.signature.pattern is None:
        return False
    lines = [_GLOG.sub("", line) for part in log.parts for line in part.text.splitlines()]
    return all(hit.signature.pattern.search(line) for line in lines if re.search(r"\w", line))


def _better(first: Hit, other: Hit) -> Hit:
    """The match with more information, else the earlier one."""
    count = first.count + (other.line != first.line)
    best = first
    if len(other.groups) > len(first.groups) or (
        len(other.groups) == len(first.groups) and other.line < first.line
    ):
        best = other
    best.count = count
    return best


class _Placeholders(dict[str, str]):
    """A placeholder in capitals for a value that a line does not contain."""

    def __missing__(self, key: str) -> str:
        return key.upper()


def finding_of(hit: Hit, name: str, cores: int | None) -> Finding:
    signature, words = hit.signature, _Placeholders(hit.groups, name=shlex.quote(name))
    if cores is not None:
        words["cores"] = str(cores)
    more = f" (and {hit.count - 1} more such line{'s' if hit.count > 2 else ''})" if hit.count > 1 else ""
    return Finding(
        code=signature.code,
        severity=signature.severity,
        machine=name,
        what=signature.what.format_map(words),
        how=f"line {hit.line}: {quoted(hit.text, hit.at)}{more}",
        breaks=signature.breaks,
        fix=signature.fix.format_map(words),
        pains=signature.pains,
        potluck=signature.potluck,
    )
