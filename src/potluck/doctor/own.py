"""Finds Potluck's own errors in a log, by class or by page, with their hints.

PURE. Each finding has its rank among the others.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from msgspec import structs

from potluck.doctor.log_text import LogText, quoted
from potluck.doctor.signatures import CAUSE, CONSEQUENCE
from potluck.errors import PotluckError, RankGoneError
from potluck.spec.finding import BLOCKER, Finding

_OF_BACKEND = ("potluck.errors.", "potluck/dist/", "potluck\\dist\\")
_PAGE = re.compile(r"see: potluck explain ([a-z-]{1,40})|see docs/troubleshooting/([a-z-]{1,40})\.md")
"""How the last line of an error names its page; the second form is that of earlier versions."""
_CLASS = re.compile(r"potluck\.errors\.(\w{1,60}): (.*)")
_ENDED = re.compile(r"\brank (\d{1,6}) \([^()]{1,80}\) ended while others were waiting for it")
_UNREACHED = re.compile(r"could not be reached within .{1,20}?\((?:[^(),]{1,80}, )?([\w.:-]{1,80}) port \d{1,5}\)")
_HINT_WITHIN = 8
"""Number of lines of other ranks that may be between an error and its hint."""
_ALL_NEEDED = (
    "under torchrun every rank is needed, with this backend, too. With `potluck host` a machine that dies costs "
    "its share of one step, and the run continues"
)


def of_potluck(log: LogText, name: str) -> Iterator[tuple[int, int, Finding]]:
    """Potluck's own error, with its hint and page."""
    told: set[tuple[str, int]] = set()
    for line, code, said, hint in (*_by_page(log), *_by_class(log), *_by_words(log)):
        # Whatever its class: who writes this waited, and another rank ended first.
        code = RankGoneError.code if _ENDED.search(said) else code
        kind = CONSEQUENCE if code == RankGoneError.code and not _UNREACHED.search(said) else CAUSE
        if (code, kind) not in told:
            told.add((code, kind))
            yield kind, line, _finding(log, line, code, said, hint, name)


def _by_page(log: LogText) -> Iterator[tuple[int, str, str, str]]:
    """An error printed by the command line: line, code, message and hint."""
    codes = {kind.code for kind in _tree(PotluckError)}
    for line, text, at in (*log.hits("see: potluck explain "), *log.hits("see docs/troubleshooting/")):
        match = _PAGE.search(text)
        code = match[1] or match[2] if match is not None else ""
        before = list(reversed(log.between(line - 3, line - 1)))
        said = next((b.partition("error: ")[2] for b in before if "error: " in b), "")
        hint = next((b.partition("hint: ")[2] for b in before if "hint: " in b), "")
        if code in codes:
            yield line, code, said or text[at:], hint


def _by_class(log: LogText) -> Iterator[tuple[int, str, str, str]]:
    """An error as the last line of a traceback, followed by the hint."""
    codes = {kind.__name__: kind.code for kind in _tree(PotluckError)}
    for line, text, _ in log.hits("potluck.errors."):
        match = _CLASS.search(text)
        if match is None or match[1] not in codes:
            continue
        mark = text[: match.start()] + "hint: "
        following = log.between(line + 1, line + _HINT_WITHIN)
        hint = next((f[len(mark) :] for f in following if f.startswith(mark)), "")
        yield line, codes[match[1]], match[2], hint


def _by_words(log: LogText) -> Iterator[tuple[int, str, str, str]]:
    """An error printed by a script that caught it."""
    for line, text, _ in log.hits("ended while others were waiting for it"):
        if (match := _ENDED.search(text)) is not None:
            yield line, RankGoneError.code, text[match.start() :], ""


def _finding(log: LogText, line: int, code: str, said: str, hint: str, name: str) -> Finding:
    page = f"potluck explain {code}"
    fix = _unreached(said) or _ended(log, said) or quoted(hint, 0)
    return Finding(
        code=f"potluck-{code}",
        severity=BLOCKER,
        machine=name,
        what=f"Potluck ended with: {quoted(said, 0)}",
        how=f"line {line}",
        breaks="that run, or that guest",
        fix=fix or page,
        potluck=f"`{page}` names the causes" if fix else "an error of its own; that page lists its causes",
    )


def _unreached(said: str) -> str:
    """The fix for ranks that cannot reach each other: usually a firewall, or an address of the wrong network."""
    match = _UNREACHED.search(said)
    if match is None:
        return ""
    return (
        "export POTLUCK_DIST_PORT_BASE=29600   (a firewall, most often: on every machine, and open these ports "
        "there. Rank r listens at 29600 + r)\n"
        f"potluck doctor {match[1]}   (what is in between?)\n"
        "export POTLUCK_DIST_INTERFACE=eth0   (where that address is of the wrong network: the interface between)"
    )


def _ended(log: LogText, said: str) -> str:
    match = _ENDED.search(said)
    if match is None:
        return ""
    if log.holds((f"[rank{match[1]}]",)):
        return f"see what rank {match[1]} wrote in this log: it ended first"
    return (
        f"see what rank {match[1]} wrote, which is not in this log: it ended first\n"
        "sudo dmesg -T | grep -iE 'out of memory|killed process' | tail -3   (on its machine, if it wrote nothing)"
    )


def as_with_backend(log: LogText, finding: Finding) -> Finding:
    """Problems that cannot happen with guests do happen to the ranks of torchrun, also on Potluck's backend."""
    if not log.holds(_OF_BACKEND) or not {16, 17, 18} & set(finding.pains):
        return finding
    return structs.replace(finding, potluck=_ALL_NEEDED)


def _tree(kind: type[PotluckError]) -> Iterator[type[PotluckError]]:
    yield kind
    for child in kind.__subclasses__():
        yield from _tree(child)
