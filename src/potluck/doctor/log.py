"""Reads the log of a run: the known messages, which came first, their meaning, or that it ended well. PURE."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import islice

from potluck.doctor import chosen_transport, inferred, known_messages, own
from potluck.doctor.log_text import MOST_LINE, LogText, Part, quoted
from potluck.doctor.raised import BEGINS, Raised, all_raised
from potluck.doctor.signatures import ASIDE, CAUSE, SIGNATURES
from potluck.spec.finding import LogReading

_ERROR_LINE = re.compile(r"^(?:\[[^\]]{1,40}\]:? ?)?(?:[\w.]{1,80}\.)?\w{0,60}(?:Error|Exception|Interrupt): ?\S")
_ENDED = re.compile(
    r"^(?:\S{1,200}: line \d{1,6}: +\d{1,9} )?(?:Killed|Aborted|Bus error|Illegal instruction|Segmentation fault)\b"
    r"|^Fatal Python error: |^terminate called |\(core dumped\)|^(?:error|fatal)(?: error)?: \S|\bERROR\b\W{1,4}\w"
    r"|\b[Ee]xit(?:ed)?(?: with)? ?(?:status|code)\s{0,12}[:=]? ?-?[1-9]\d{0,5}\b",
)
"""The last line of a program that ends without a traceback: the system's, the shell's, or its own."""
_FINISHED = re.compile(r"^(?:\[[^\]]{1,40}\]:? ?)?(?:finished after step \d|the run is over: finished\b)")
"""The last line of Potluck's host and guest after a run that did all of its steps."""
_OF_NCCL = re.compile(r"(?P<thread>\S{1,80}:\d{1,9}:\d{1,9}) \[\d{1,4}\] ")
_NCCL_FAILS = re.compile(r"NCCL INFO [\w./-]{1,200}:\d{1,6} -> [1-7]\b")
"""NCCL's functions print it, each for itself, when they return an error."""
_FAR = 200
_FAILED = ("Traceback (most recent call last)", "ChildFailedError", "Killed", "terminate called")


def read_log(parts: Sequence[Part], name: str, left_out_bytes: int = 0, cores: int | None = None) -> LogReading:
    """The findings of a log, probable causes before their consequences. `cores`: those of the machine, if known."""
    log = LogText(parts)
    raised = list(all_raised(log))
    found = known_messages.known(log, SIGNATURES)
    others = [*inferred.first_failure(log, raised, name), *inferred.out_of_step(log, name)]
    others += [*own.of_potluck(log, name), *inferred.no_script(log, name)]
    failed = bool(others) or any(not hit.signature.only_beside_others for hit in found) or log.holds(_FAILED)
    told = [hit for hit in found if failed or known_messages.stands_alone(log, hit)]
    ranked = [(hit.signature.kind, hit.line, known_messages.finding_of(hit, name, cores)) for hit in told]
    network, about_network = chosen_transport.network(log)
    ranked += [*others, *about_network]
    if any(kind != ASIDE for kind, _, _ in ranked):
        ranked += inferred.of_script(log, raised, ranked, name)
    if all(kind > CAUSE for kind, _, _ in ranked):
        ranked += inferred.ended_early(log, raised, name)
    ctrl_c = inferred.interrupted(log, name)
    if ctrl_c is not None:
        ranked = [entry for entry in ranked if entry[0] == ASIDE or entry[1] < ctrl_c[1]] + [ctrl_c]
    ranked.sort(key=lambda entry: entry[:2])
    told_of = any(kind != ASIDE for kind, _, _ in ranked)
    finished = max((line for line, text, _ in log.hits("finished") if _FINISHED.match(text)), default=0)
    first_error = "" if told_of else _first_error(log, raised, finished, ctrl_c[1] if ctrl_c else None)
    return LogReading(
        name=name,
        lines=log.lines,
        findings=tuple(own.as_with_backend(log, entry[2]) for entry in ranked),
        first_error=first_error,
        explained=inferred.explains(ranked),
        ended_well=finished > 0 and not told_of and not first_error,
        network=network,
        left_out_bytes=left_out_bytes,
    )


def _first_error(log: LogText, raised: Sequence[Raised], after: int, before: int | None) -> str:
    """The first traceback's last line, or the first line that looks like an error, between these lines; quoted."""
    end = before if before is not None else log.lines + 1
    first = next((r for r in raised if not r.of_launcher and after < r.line < end), None)
    if first is not None:
        return f"{first.who}{quoted(_in_short(first), 0)} (line {first.line})"
    of_nccl = next((hit for hit in log.hits("NCCL WARN") if after < hit[0] < end and _nccl_fails(log, *hit)), None)
    if of_nccl is not None:
        return f"line {of_nccl[0]}: {quoted(of_nccl[1], of_nccl[2])}"
    ways = [_ERROR_LINE.match, _ENDED.search]
    if before is None:  # a traceback that begins before Ctrl-C ends with it
        ways.append(re.compile(re.escape(BEGINS)).search)
    for looks in ways:
        for part in log.parts:
            for number, line in enumerate(part.text.split("\n"), part.first_line):
                if after < number < end and looks(line[:MOST_LINE]):
                    return f"line {number}: {quoted(line[:MOST_LINE], 0)}"
    return ""


def _in_short(raised: Raised) -> str:
    """The exception's first line, or the cause that torch quotes from NCCL some lines below it."""
    last = next((i for i, line in enumerate(raised.body[:-1]) if line.strip() == "Last error:"), None)
    return raised.text if last is None else f"{raised.name}: {raised.body[last + 1]}"


def _nccl_fails(log: LogText, line: int, text: str, at: int) -> bool:
    """Whether the thread that wrote this warning says next that a function failed. Many warnings are harmless."""
    writer = _OF_NCCL.search(text[:at])
    if writer is None:
        return False
    following = (next_ for _, next_ in islice(log.after(line), _FAR) if writer["thread"] in next_)
    return _NCCL_FAILS.search(next(following, "")) is not None
