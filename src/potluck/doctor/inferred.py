"""Findings that no single message of a log shows: who failed first, what its script raised, which rank was ahead.

PURE. Each finding has its rank among the others.
"""

from __future__ import annotations

import re
import shlex
from collections import defaultdict
from collections.abc import Iterator, Sequence

from potluck.doctor.log_text import LogText, quoted, redacted
from potluck.doctor.raised import Raised
from potluck.doctor.signatures import ASIDE, CAUSE, CONSEQUENCE, JOIN, SIGNATURES, Signature
from potluck.spec.finding import BLOCKER, NOTE, Finding

_FIELD = re.compile(r"\b(host|rank|exitcode)\s{0,12}: ?(\S.{0,80})")
_AGENT = re.compile(r"failed \(exitcode: (?P<exitcode>-?\d{1,6})\) local_rank: (?P<rank>\d{1,6}) \(pid: \d{1,10}\)")
_ROOT = "Root Cause"
_SIGNALS = {2: "SIGINT", 4: "SIGILL", 6: "SIGABRT", 7: "SIGBUS", 9: "SIGKILL", 11: "SIGSEGV", 15: "SIGTERM"}
_CRASHES = (4, 7, 11)
_NO_SCRIPT = re.compile(r"can't open file '(?P<file>[^']{1,400})': \[Errno \d{1,4}\] (?P<why>.{1,80})")
_SIGINT = re.compile(
    r"received (?:signals\.)?(?:2|sigint) death signal"
    r"|SignalException: .{0,40}got signal: (?:signals\.)?(?:2|sigint)\b",
    re.IGNORECASE,
)
_CTRL_C = re.compile(r"(?:\[[^\]]{1,40}\]:? ?|[\w.-]{1,40}: ){0,3}KeyboardInterrupt\s*")
_FIRST = -1
"""The first cause: the exception of the rank that torchrun saw fail first."""
_RETOLD = ("rank-raised", "one-failed-all-ended")
"""These findings say which rank failed and where to look, but not why."""
_GONE = next(s for s in SIGNATURES if s.code == "other-rank-gone")

Ranked = tuple[int, int, Finding]
"""The kind of finding (cause, consequence, aside) and its line, by which findings are ordered."""


def _root_cause(log: LogText) -> tuple[int, str, dict[str, str]] | None:
    """The line in which torchrun names the rank that failed first, and its content."""
    fields: dict[str, str] = {}
    line, quote = 0, ""
    for line, text, at in log.hits(_ROOT):
        fields = {}
        for following in log.between(line + 1, line + 8):
            if (match := _FIELD.search(following)) is not None:
                fields.setdefault(match[1], match[2].strip())
        quote = quoted(text, at)
        break
    if "exitcode" not in fields:
        found = next(((n, t, m) for n, t, _ in log.hits("failed (exitcode") if (m := _AGENT.search(t))), None)
        if found is None:
            return None
        line, quote, fields = found[0], quoted(found[1], found[2].start()), found[2].groupdict()
    return line, quote, fields


def first_failure(log: LogText, raised: Sequence[Raised], name: str) -> Iterator[Ranked]:
    """The rank that torchrun saw fail first, which is not the one that wrote last (pains 17, 18)."""
    found = _root_cause(log)
    if found is None:
        return
    line, quote, fields = found
    code, rank = _number(fields["exitcode"]), _number(fields.get("rank", ""))
    where = f" on {redacted(fields['host'])[:40]}" if fields.get("host") else ""
    signal = _SIGNALS.get(-code) if code is not None and code < 0 else None
    how = f"line {line}: {quote.rstrip(':')}: rank {rank}, exit code {code}" + (f" ({signal})" if signal else "")
    yield (
        CAUSE if code is not None and -code in (9, *_CRASHES) else CONSEQUENCE,
        line,
        Finding(
            code="worker-killed" if signal == "SIGKILL" else "one-failed-all-ended",
            severity=BLOCKER,
            machine=name,
            what=_first_failure_words(f"rank {rank if rank is not None else '?'}{where}", code, signal),
            how=how,
            breaks="all ranks: torchrun ends the others with it (SIGTERM), and only all together can start again",
            fix="sudo dmesg -T | grep -iE 'out of memory|killed process' | tail -3\n"
            "DataLoader(…, num_workers=2)   (or a smaller batch: less memory)"
            if signal == "SIGKILL"
            else _where_its_error_is(log, raised, rank, name),
            pains=(17, 18),
            potluck="cannot happen: a lost machine costs its share of one step. The host names it and continues",
        ),
    )


def _where_its_error_is(log: LogText, raised: Sequence[Raised], rank: int | None, name: str) -> str:
    """A command that finds the rank's error in this log, or how to get a log that contains it."""
    if log.holds((f"[rank{rank}]",)):
        return f"grep -n '\\[rank{rank}\\]' {shlex.quote(name)} | head   (its error: the others' follow from it)"
    first = next((r for r in raised if not r.name.endswith(("ChildFailedError", "SignalException"))), None)
    if first is not None:
        lines = f"{max(1, first.line - 30)},{first.line}p"
        return f"sed -n '{lines}' {shlex.quote(name)}   (the first error in this log, most likely its own)"
    return "torchrun --log-dir logs --tee 3 …   (then the log says which rank wrote what)"


def no_script(log: LogText, name: str) -> Iterator[Ranked]:
    """Python could not open the script, so nothing ran."""
    for line, text, _ in log.hits("can't open file"):
        if (match := _NO_SCRIPT.search(text)) is None:
            continue
        file = redacted(re.split(r"[/\\]", match["file"])[-1])[:80]
        yield (
            _FIRST,
            line,
            Finding(
                code="script-not-there",
                severity=BLOCKER,
                machine=name,
                what=f"the script {file} cannot be opened: {redacted(match['why']).strip()}",
                how=f"line {line}: {quoted(text, match.start())}",
                breaks="the start: nothing of it was run. With several machines it must be on each of them",
                fix=f"ls -l {shlex.quote(file)}   (in the folder in which it is started, on every machine)",
                potluck="only the host needs the script, and says at once if it is missing; it sends it to guests",
            ),
        )
        return


def interrupted(log: LogText, name: str) -> Ranked | None:
    """Somebody pressed Ctrl-C: no failure, and later messages follow from it."""
    signs = [(n, t, m.start()) for n, t, _ in log.hits("ignal") if (m := _SIGINT.search(t))]
    raised = [(n, t, 0) for n, t, _ in log.hits("KeyboardInterrupt") if _CTRL_C.fullmatch(t)]
    if not signs and (not raised or _root_cause(log) is not None):
        return None  # where torchrun saw one rank fail, that one alone got the signal: not from the keyboard
    line, text, at = min(signs + raised)
    return (
        ASIDE,
        line,
        Finding(
            code="interrupted",
            severity=NOTE,
            machine=name,
            what="interrupted by Ctrl-C (SIGINT), no failure",
            how=f"line {line}: {quoted(text, at)}",
            breaks="nothing. Had it hung before: the tracebacks to KeyboardInterrupt show where each rank waited",
            fix="torchrun …   (again, on every machine, from the last checkpoint)",
            potluck="at Ctrl-C `potluck host` writes a checkpoint, ends the guests and says how to resume",
        ),
    )


def _first_failure_words(who: str, code: int | None, signal: str | None) -> str:
    if signal == "SIGKILL":
        return f"{who} was killed from outside, most often by the system because memory ran out"
    if signal is not None:
        return f"{who} failed first, by {signal}"
    return f"{who} failed first" + (f", with exit code {code}" if code is not None else "")


def _is_known(raised: Raised, signatures: Sequence[Signature] = SIGNATURES) -> bool:
    """One of the table's messages, whose finding is more precise."""
    return any(
        word in line and (signature.pattern is None or signature.pattern.search(line) is not None)
        for line in raised.body
        for signature in signatures
        for word in signature.words
    )


def of_script(log: LogText, raised: Sequence[Raised], others: Sequence[Ranked], name: str) -> Iterator[Ranked]:
    """An exception of the script itself, which then affected the other ranks (pain 17)."""
    own = [r for r in raised if not r.of_launcher and not _is_known(r)]
    own = [r for r in own if not r.name.startswith("torch.distributed.")]
    own = [r for r in own if r.rank is not None] or own  # torch marks what ended a rank, not what was caught
    if not own:
        return
    root = _root_cause(log)
    first = _number(root[2].get("rank", "")) if root is not None else None
    of_first = [r for r in own if r.rank == first and first is not None]
    said = (of_first or own)[0]
    crashed = any(f.code in ("worker-killed", "one-failed-all-ended") and kind == CAUSE for kind, _, f in others)
    alike = len({r.rank for r in own if r.text == said.text and r.rank != said.rank})
    file = said.file.rpartition("/")[2]
    yield (
        CONSEQUENCE if crashed and not of_first else _FIRST if of_first else CAUSE,
        said.line,
        Finding(
            code="rank-raised",
            severity=BLOCKER,
            machine=name,
            what=f"{said.who}{quoted(said.text, 0)} (line {said.line})",
            how=f"line {said.line}: the last line of its traceback"
            + (f", raised in {redacted(file)[:60]}, line {said.at}" if file else "")
            + (f"; {alike} more rank{'s' if alike > 1 else ''} raised the same" if alike else ""),
            breaks="this rank, by an error of its script or its data; the other ranks then lose it in a collective",
            fix=f"sed -n '{max(1, said.line - 30)},{said.line}p' {shlex.quote(name)}   (its traceback)",
            pains=(17,),
            potluck="an error in the script stays one; but a guest that fails costs its own share of one step. The "
            "host says who and why, and continues",
        ),
    )


def explains(ranked: Sequence[Ranked]) -> bool:
    """Whether a known problem ended that run, and not an exception of the script or a crash and its
    consequences."""
    retold = [kind for kind, _, finding in ranked if finding.code in _RETOLD]
    known = [kind for kind, _, finding in ranked if finding.code not in _RETOLD and kind != ASIDE]
    return any(kind != CONSEQUENCE for kind in known) or (bool(known) and all(k == CONSEQUENCE for k in retold))


def ended_early(log: LogText, raised: Sequence[Raised], name: str) -> Iterator[Ranked]:
    """All failed ranks had lost another rank that shows no error: it had ended (pain 16)."""
    root = _root_cause(log)
    lost = {r.rank: r for r in raised if _is_known(r, (_GONE,))}
    if root is None or (rank := _number(root[2].get("rank", ""))) not in lost:
        return
    codes = [_number(m[2]) for _, text, _ in log.hits("exitcode  :") if (m := _FIELD.search(text)) is not None]
    if any(code is not None and code < 0 and code not in (-6, -15) for code in codes):
        return
    if sum(code is not None and code > 0 for code in codes) > len(lost):
        return
    yield (
        CAUSE,
        lost[rank].line,
        Finding(
            code="rank-ended-early",
            severity=BLOCKER,
            machine=name,
            what=f"rank {rank} lost another rank, whose error is not in this log: most likely that one had fewer "
            "batches, left its loop and ended",
            how=f"line {lost[rank].line}: {quoted(lost[rank].text, 0)}; torchrun reported no earlier failure",
            breaks="every rank with more batches, at its next collective. (With several machines: the other "
            "torchruns' logs tell whether one failed there)",
            fix=JOIN,
            pains=(16, 17),
            potluck="cannot happen: no machine has batches of its own; the ledger deals each step's samples",
        ),
    )


def out_of_step(log: LogText, name: str) -> Iterator[Ranked]:
    """Ranks whose watchdogs name different collectives: one had fewer batches (pain 16)."""
    watchdog = next(s for s in SIGNATURES if s.code == "watchdog-timeout")
    assert watchdog.pattern is not None
    at: dict[str, set[int]] = defaultdict(set)
    first = (0, "", 0)
    for line, text, place in log.hits(watchdog.words[0]):
        match = watchdog.pattern.search(text)
        if match is not None and match["seq"]:
            at[match["rank"]].add(int(match["seq"]))
            first = first if first[0] else (line, text, place)
    ranks = sorted(at, key=int)
    apart = next(((a, b) for a in ranks[:1] for b in ranks[1:] if not at[a] & at[b]), None)
    if apart is None:
        return
    one, two = apart
    yield (
        CAUSE,
        first[0],
        Finding(
            code="ranks-out-of-step",
            severity=BLOCKER,
            machine=name,
            what=f"rank {one} was at collective {min(at[one])} and rank {two} at {min(at[two])}: one had more "
            "batches than the other, or took another branch",
            how=f"line {first[0]}: {quoted(first[1], first[2])}; compared with the other ranks' SeqNum",
            breaks="both wait for each other until the watchdog ends them",
            fix="with model.join():   (DDP's own, around the loop over batches)\n"
            "DataLoader(…, drop_last=True)   (with a DistributedSampler)\n"
            "grep -n 'rank == 0' train.py   (no collective in such a branch)",
            pains=(16,),
            potluck="cannot happen: no machine has batches of its own; the ledger deals each step's samples",
        ),
    )


def _number(text: str) -> int | None:
    match = re.match(r"-?\d{1,9}", text)
    return int(match[0]) if match is not None else None
