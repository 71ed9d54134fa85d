"""Reading the log of a failed run: which known messages are in it, what came first, what it means.

PURE: text in, findings out. It must not know files. Of a person's log only the lines that say something are quoted,
shortened, and without what looks like a secret.
"""

from __future__ import annotations

import re
import shlex
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from potluck.doctor.raised import BEGINS, Raised, raised_after
from potluck.doctor.signatures import ASIDE, CAUSE, CONSEQUENCE, JOIN, SIGNATURES, Signature
from potluck.errors import PotluckError
from potluck.spec.finding import BLOCKER, Finding, LogReading

MOST_QUOTED = 160
MOST_LINE = 2000
"""To each side of the known words: what is called a line may be a whole file."""
_MOST_HITS, _MOST_COUNTED, _MOST_TRACEBACKS = 200_000, 1000, 200
_FEW_LINES = 40

_ANSI = re.compile(r"\x1b(?:\[[0-?]{0,40}[ -/]{0,4}[@-~]|\][^\x07\x1b]{0,400}(?:\x07|\x1b\\)|[@-Z\\-_])")
_SECRETS: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"(potluck\d{1,3}-)[\w-]{8,}"), r"\1(left out)"),
    (re.compile(r"\b(hf_|sk-|ghp_|gho_|github_pat_|xox[abp]-|AKIA)[\w-]{8,}"), r"\1(left out)"),
    (re.compile(r"(://[^\s:/@]{1,60}:)[^\s@/]{1,200}@"), r"\1(left out)@"),
    (
        re.compile(r"((?:password|passwd|secret|token|api[_-]?key)[\"']?\s{0,2}[=:]\s{0,2})\S{6,}", re.I),
        r"\1(left out)",
    ),
)
_ERROR_LINE = re.compile(r"^(?:\[[^\]]{1,40}\]:? ?)?(?:[\w.]{1,80}\.)?\w{0,60}(?:Error|Exception|Interrupt): ?\S")
_ENDED = re.compile(
    r"^(?:\S{1,200}: line \d{1,6}: +\d{1,9} )?(?:Killed|Aborted|Bus error|Illegal instruction|Segmentation fault)\b"
    r"|^Fatal Python error: |^terminate called |\(core dumped\)|^(?:error|fatal)(?: error)?: \S|\bERROR\b",
)
"""How a program ends that writes no traceback: the system's or the shell's last word, or a program's own."""
_FAILED = ("Traceback (most recent call last)", "ChildFailedError", "Killed", "terminate called")
_FIELD = re.compile(r"\b(host|rank|exitcode)\s{0,12}: ?(\S.{0,80})")
_AGENT = re.compile(r"failed \(exitcode: (?P<exitcode>-?\d{1,6})\) local_rank: (?P<rank>\d{1,6}) \(pid: \d{1,10}\)")
_GLOG = re.compile(r"^[EIW]\d{4} \S{1,20} \d{1,9} \S{1,200}\]")
_PATH = re.compile(r"(?<![\w.:])\.{0,2}/[^\s\]:\"']{16,300}/")
"""Long paths say little, and where somebody keeps things is nobody's business."""
_ROOT = "Root Cause"
_SIGNALS = {4: "SIGILL", 6: "SIGABRT", 7: "SIGBUS", 9: "SIGKILL", 11: "SIGSEGV", 15: "SIGTERM"}
_CRASHES = (4, 7, 11)
_FIRST = -1
"""Before all other causes: what the rank raised that torchrun saw fail first."""
_LAUNCHERS = re.compile(
    r"(?:.*\.)?(?:ChildFailedError|SignalException|KeyboardInterrupt|SystemExit)$|potluck\.errors\."
)
_GONE = next(s for s in SIGNATURES if s.code == "other-rank-gone")


@dataclass(frozen=True, slots=True)
class Part:
    """Lines that follow each other; a long log has a beginning and an end."""

    first_line: int
    text: str


def decoded(raw: bytes) -> str:
    """The bytes as text, whatever they are: PowerShell writes UTF-16."""
    for mark, encoding in ((b"\xff\xfe", "utf-16-le"), (b"\xfe\xff", "utf-16-be"), (b"\xef\xbb\xbf", "utf-8")):
        if raw.startswith(mark):
            return raw[len(mark) :].decode(encoding, "replace")
    return raw.decode("utf-8", "replace")


def is_text(text: str) -> bool:
    """Not a picture, a model or a program."""
    sample = _ANSI.sub("", text[:65536])
    odd = sum(1 for c in sample if c == "\ufffd" or (ord(c) < 32 and c not in "\t\n\r\f\b\x1b"))
    return odd <= max(8, len(sample) // 20)


def redacted(text: str) -> str:
    """Without what looks like a token or a password."""
    for pattern, instead in _SECRETS:
        text = pattern.sub(instead, text)
    return text


def read_log(parts: Sequence[Part], name: str, left_out_bytes: int = 0, cores: int | None = None) -> LogReading:
    """The findings of a log, what was likely first before what follows from it. Cores: of the machine, if known."""
    log = _Log(parts)
    raised = list(log.raised())
    found = _unhidden([hit for signature in SIGNATURES if (hit := log.look_for(signature)) is not None])
    others = [*_first_failure(log, name), *_out_of_step(log, name), *_of_potluck(log, name)]
    failed = bool(others) or any(not hit.signature.only_beside_others for hit in found) or log.holds(_FAILED)
    told = [hit for hit in found if failed or log.holds_only(hit)]
    ranked = [(hit.signature.kind, hit.line, _finding(hit, name, cores)) for hit in told]
    ranked += others
    if any(kind != ASIDE for kind, _, _ in ranked):
        ranked += _of_script(log, raised, ranked, name)
    if all(kind > CAUSE for kind, _, _ in ranked):
        ranked += _ended_early(log, raised, name)
    ranked.sort(key=lambda entry: entry[:2])
    return LogReading(
        name=name,
        lines=log.lines,
        findings=tuple(entry[2] for entry in ranked),
        first_error=log.first_error(raised) if all(kind == ASIDE for kind, _, _ in ranked) else "",
        left_out_bytes=left_out_bytes,
    )


Ranked = tuple[int, int, Finding]


@dataclass(slots=True)
class _Hit:
    """Where a known message stands."""

    signature: Signature
    line: int
    text: str
    at: int
    """Of the known words in the text."""
    groups: Mapping[str, str]
    count: int = 1


class _Log:
    def __init__(self, parts: Sequence[Part]) -> None:
        self._parts = [Part(part.first_line, _ANSI.sub("", part.text)) for part in parts]
        self._breaks = [[m.start() for m in re.finditer("\n", part.text)] for part in self._parts]
        self.lines = max(
            (
                p.first_line + len(b) - (p.text.endswith("\n") or not p.text)
                for p, b in zip(self._parts, self._breaks)
            ),
            default=0,
        )

    def hits(self, word: str) -> Iterator[tuple[int, str, int]]:
        """Line number, line and place of every line with this word."""
        for part, breaks in zip(self._parts, self._breaks):
            at = part.text.find(word)
            for _ in range(_MOST_HITS):
                if at < 0:
                    break
                text, begin = _line_around(part.text, at)
                yield part.first_line + bisect_right(breaks, at), text, at - begin
                at = part.text.find(word, max(begin + len(text), at + len(word)))

    def look_for(self, signature: Signature) -> _Hit | None:
        found: _Hit | None = None
        for word in signature.words:
            for line, text, at in self.hits(word):
                match = signature.pattern.search(text) if signature.pattern is not None else None
                if signature.pattern is not None and match is None:
                    continue
                groups = {k: redacted(v) for k, v in match.groupdict().items() if v} if match is not None else {}
                hit = _Hit(signature, line, text, at, groups)
                found = hit if found is None else _better(found, hit)
                if found.count >= _MOST_COUNTED:
                    break
        return found if found is None or not signature.elsewhere or self.holds(signature.elsewhere) else None

    def between(self, first: int, last: int) -> list[str]:
        """These lines, as far as they are there."""
        for part, breaks in zip(self._parts, self._breaks):
            index = max(0, first - part.first_line)
            if part.first_line <= last and index <= len(breaks):
                begin = breaks[index - 1] + 1 if index else 0
                return part.text[begin : begin + MOST_LINE].split("\n")[: last - part.first_line - index + 1]
        return []

    def holds(self, words: Sequence[str]) -> bool:
        return any(word in part.text for part in self._parts for word in words)

    def holds_only(self, hit: _Hit) -> bool:
        """Somebody pasted this message and nothing else, but for its frame."""
        if self.lines > _FEW_LINES or hit.signature.pattern is None:
            return False
        lines = [_GLOG.sub("", line) for part in self._parts for line in part.text.splitlines()]
        return all(hit.signature.pattern.search(line) for line in lines if re.search(r"\w", line))

    def after(self, line: int) -> Iterator[tuple[int, str]]:
        """The lines that follow, one by one; each as far as it is looked at."""
        for part, breaks in zip(self._parts, self._breaks):
            index = line - part.first_line
            if not 0 <= index < len(breaks):
                continue
            for number, begin in enumerate(breaks[index:], line + 1):
                end = breaks[number - part.first_line] if number - part.first_line < len(breaks) else len(part.text)
                yield number, part.text[begin + 1 : min(end, begin + 1 + MOST_LINE)]

    def raised(self) -> Iterator[Raised]:
        """The exceptions that tracebacks end with, in their order."""
        for line, text, _ in islice(self.hits(BEGINS), _MOST_TRACEBACKS):
            if (raised := raised_after(text, self.after(line))) is not None:
                yield raised

    def first_error(self, raised: Sequence[Raised]) -> str:
        """The first traceback's last line, or the first line that looks like an error; quoted."""
        own = [r for r in raised if _LAUNCHERS.match(r.name) is None]
        if own:
            return f"{_rank_words(own[0])}{_quoted(own[0].text, 0)} (line {own[0].line})"
        for looks in (_ERROR_LINE.match, _ENDED.search, re.compile(re.escape(BEGINS)).search):
            for part in self._parts:
                for number, line in enumerate(part.text.split("\n")):
                    if looks(line[:MOST_LINE]):
                        return f"line {part.first_line + number}: {_quoted(line[:MOST_LINE], 0)}"
        return ""


def _unhidden(hits: list[_Hit]) -> list[_Hit]:
    """Without what another one explains better, of the same line."""
    hidden = {(code, hit.line) for hit in hits for code in hit.signature.hides}
    return [hit for hit in hits if (hit.signature.code, hit.line) not in hidden]


def _better(first: _Hit, other: _Hit) -> _Hit:
    """The one that tells more, else the earlier one."""
    count = first.count + (other.line != first.line)
    best = first
    if len(other.groups) > len(first.groups) or (
        len(other.groups) == len(first.groups) and other.line < first.line
    ):
        best = other
    best.count = count
    return best


def _line_around(text: str, at: int) -> tuple[str, int]:
    """The line at this place, as far as it is looked at, and where it begins. A bar's \\r ends lines, too."""
    least, most = max(0, at - MOST_LINE), min(len(text), at + MOST_LINE)
    begin = 1 + max(text.rfind("\n", least, at), text.rfind("\r", least, at), least - 1)
    ends = [end for sign in "\n\r" if (end := text.find(sign, at, most)) >= 0]
    return text[begin : min(ends, default=most)], begin


def _quoted(text: str, at: int) -> str:
    """So much of a line as a person reads, around what matters in it."""
    before = _PATH.sub("…/", redacted(text[:at])).lstrip()
    text = (before + _PATH.sub("…/", redacted(text)[len(redacted(text[:at])) :])).strip()
    at = len(before)
    if len(text) <= MOST_QUOTED:
        return text
    begin = max(0, min(at - 24, len(text) - MOST_QUOTED))
    cut = text[begin : begin + MOST_QUOTED]
    return ("…" if begin else "") + cut.strip() + ("…" if begin + MOST_QUOTED < len(text) else "")


class _Words(dict[str, str]):
    """What a line did not tell is named in capitals, for a person to fill in."""

    def __missing__(self, key: str) -> str:
        return key.upper()


def _finding(hit: _Hit, name: str, cores: int | None) -> Finding:
    signature, words = hit.signature, _Words(hit.groups, name=shlex.quote(name))
    if cores is not None:
        words["cores"] = str(cores)
    more = f" (and {hit.count - 1} more such line{'s' if hit.count > 2 else ''})" if hit.count > 1 else ""
    return Finding(
        code=signature.code,
        severity=signature.severity,
        machine=name,
        what=signature.what.format_map(words),
        how=f"line {hit.line}: {_quoted(hit.text, hit.at)}{more}",
        breaks=signature.breaks,
        fix=signature.fix.format_map(words),
        pains=signature.pains,
        potluck=signature.potluck,
    )


# -- what one line alone does not tell --------------------------------------------------------------------------


def _root_cause(log: _Log) -> tuple[int, str, dict[str, str]] | None:
    """Where torchrun says who failed first, quoted, and what it says."""
    fields: dict[str, str] = {}
    line, quote = 0, ""
    for line, text, at in log.hits(_ROOT):
        fields = {}
        for following in log.between(line + 1, line + 8):
            if (match := _FIELD.search(following)) is not None:
                fields.setdefault(match[1], match[2].strip())
        quote = _quoted(text, at)
        break
    if "exitcode" not in fields:
        found = next(((n, t, m) for n, t, _ in log.hits("failed (exitcode") if (m := _AGENT.search(t))), None)
        if found is None:
            return None
        line, quote, fields = found[0], _quoted(found[1], found[2].start()), found[2].groupdict()
    return line, quote, fields


def _first_failure(log: _Log, name: str) -> Iterator[Ranked]:
    """Whom torchrun saw fail first, which is not who wrote last (pains 17, 18)."""
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
            else f"grep -n '\\[rank{rank}\\]' {shlex.quote(name)} | head   (its error: the others' follow from it)",
            pains=(17, 18),
            potluck="cannot happen: who dies costs its own share of one step. The host says who, and goes on",
        ),
    )


def _first_failure_words(who: str, code: int | None, signal: str | None) -> str:
    if signal == "SIGKILL":
        return f"{who} was killed from outside, most often by the system because memory ran out"
    if signal is not None:
        return f"{who} failed first, by {signal}"
    return f"{who} failed first" + (f", with exit code {code}" if code is not None else "")


def _rank_words(raised: Raised) -> str:
    return f"rank {raised.rank}: " if raised.rank is not None else ""


def _is_known(raised: Raised, signatures: Sequence[Signature] = SIGNATURES) -> bool:
    """One of the table's messages: that finding tells it better."""
    return any(
        word in line and (signature.pattern is None or signature.pattern.search(line) is not None)
        for line in raised.body
        for signature in signatures
        for word in signature.words
    )


def _of_script(log: _Log, raised: Sequence[Raised], others: Sequence[Ranked], name: str) -> Iterator[Ranked]:
    """An exception of the script itself, which the other ranks then suffered from (pain 17)."""
    own = [r for r in raised if _LAUNCHERS.match(r.name) is None and not _is_known(r)]
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
            what=f"{_rank_words(said)}{_quoted(said.text, 0)} (line {said.line})",
            how=f"line {said.line}: the last line of its traceback"
            + (f", raised in {redacted(file)[:60]}, line {said.at}" if file else "")
            + (f"; {alike} more rank{'s' if alike > 1 else ''} raised the same" if alike else ""),
            breaks="this rank, by an error of its script or its data; the other ranks then lose it in a collective",
            fix=f"sed -n '{max(1, said.line - 30)},{said.line}p' {shlex.quote(name)}   (its traceback)",
            pains=(17,),
            potluck="an error in the script stays one; but a guest that fails costs its own share of one step. The "
            "host says who and why, and goes on",
        ),
    )


def _ended_early(log: _Log, raised: Sequence[Raised], name: str) -> Iterator[Ranked]:
    """All who failed had lost another rank, and that one shows no error: it had ended (pain 16)."""
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
            what=f"rank {rank} lost another rank, of which this log shows no error: most likely that one had fewer "
            "batches, left its loop and ended",
            how=f"line {lost[rank].line}: {_quoted(lost[rank].text, 0)}; torchrun saw none fail before it",
            breaks="every rank with more batches, at its next collective. (With several machines: the other "
            "torchruns' logs tell whether one failed there)",
            fix=JOIN,
            pains=(16, 17),
            potluck="cannot happen: no machine has batches of its own; the ledger deals each step's samples",
        ),
    )


def _out_of_step(log: _Log, name: str) -> Iterator[Ranked]:
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
            how=f"line {first[0]}: {_quoted(first[1], first[2])}; compared with the other ranks' SeqNum",
            breaks="both wait for each other until the watchdog ends them",
            fix="with model.join():   (DDP's own, around the loop over batches)\n"
            "DataLoader(…, drop_last=True)   (with a DistributedSampler)\n"
            "grep -n 'rank == 0' train.py   (no collective in such a branch)",
            pains=(16,),
            potluck="cannot happen: no machine has batches of its own; the ledger deals each step's samples",
        ),
    )


def _of_potluck(log: _Log, name: str) -> Iterator[Ranked]:
    """What Potluck itself said, with its own hint and page."""
    codes = {c.__name__: c.code for c in _tree(PotluckError)}
    told: set[str] = set()
    for line, text, at in log.hits("see docs/troubleshooting/"):
        match = re.search(r"see docs/troubleshooting/([a-z-]{1,40})\.md", text)
        before = [_quoted(entry, 0) for entry in log.between(line - 3, line - 1)]
        said = next((b.partition("error: ")[2] for b in reversed(before) if "error: " in b), "")
        hint = next((b.partition("hint: ")[2] for b in reversed(before) if "hint: " in b), "")
        if match is not None and match[1] in codes.values() and match[1] not in told:
            told.add(match[1])
            yield CAUSE, line, _own(match[1], said or _quoted(text, at), line, name, hint)
    for line, text, _ in log.hits("potluck.errors."):
        match = re.search(r"potluck\.errors\.(\w{1,60}): (.*)", text)
        if match is not None and (code := codes.get(match[1], "")) and code not in told:
            told.add(code)
            yield CAUSE, line, _own(code, _quoted(match[2], 0), line, name)


def _own(code: str, said: str, line: int, name: str, hint: str = "") -> Finding:
    return Finding(
        code=f"potluck-{code}",
        severity=BLOCKER,
        machine=name,
        what=f"Potluck ended with: {said}",
        how=f"line {line}",
        breaks="that run, or that guest; docs/troubleshooting tells the causes one by one",
        fix=hint or f"see docs/troubleshooting/{code}.md",
        potluck=f"docs/troubleshooting/{code}.md",
    )


def _tree(kind: type[PotluckError]) -> Iterator[type[PotluckError]]:
    yield kind
    for child in kind.__subclasses__():
        yield from _tree(child)


def _number(text: str) -> int | None:
    match = re.match(r"-?\d{1,9}", text)
    return int(match[0]) if match is not None else None
