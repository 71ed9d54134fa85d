"""The text of a log: its lines by number and by word, and how they are quoted.

PURE. Quoted lines are shortened, and parts that look like a secret are removed.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

MOST_QUOTED = 160
MOST_LINE = 2000
"""Characters on each side of the known words, because a line may be a whole file."""
_MOST_HITS = 200_000

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
_PATH = re.compile(r"(?<![\w.:])\.{0,2}/[^\s\]:\"']{16,300}/")
"""Long paths are shortened: they say little and may name a person."""


@dataclass(frozen=True, slots=True)
class Part:
    """Consecutive lines; a long log has a beginning and an end."""

    first_line: int
    text: str


def decoded(raw: bytes) -> str:
    """The bytes as text in any encoding; PowerShell writes UTF-16."""
    for mark, encoding in ((b"\xff\xfe", "utf-16-le"), (b"\xfe\xff", "utf-16-be"), (b"\xef\xbb\xbf", "utf-8")):
        if raw.startswith(mark):
            return raw[len(mark) :].decode(encoding, "replace")
    return raw.decode("utf-8", "replace")


def is_text(text: str) -> bool:
    """Whether it is text and not a picture, a model or a program."""
    sample = _ANSI.sub("", text[:65536])
    odd = sum(1 for c in sample if c == "\ufffd" or (ord(c) < 32 and c not in "\t\n\r\f\b\x1b"))
    return odd <= max(8, len(sample) // 20)


def redacted(text: str) -> str:
    """The text without anything that looks like a token or a password."""
    for pattern, instead in _SECRETS:
        text = pattern.sub(instead, text)
    return text


def quoted(text: str, at: int) -> str:
    """A short part of a line, around the relevant words."""
    before = _PATH.sub("…/", redacted(text[:at])).lstrip()
    text = (before + _PATH.sub("…/", redacted(text)[len(redacted(text[:at])) :])).strip()
    at = len(before)
    if len(text) <= MOST_QUOTED:
        return text
    begin = max(0, min(at - 24, len(text) - MOST_QUOTED))
    cut = text[begin : begin + MOST_QUOTED]
    return ("…" if begin else "") + cut.strip() + ("…" if begin + MOST_QUOTED < len(text) else "")


class LogText:
    """The parts of a log, without colours."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self.parts = [Part(part.first_line, _ANSI.sub("", part.text)) for part in parts]
        self._breaks = [[m.start() for m in re.finditer("\n", part.text)] for part in self.parts]
        self.lines = max(
            (
                p.first_line + len(b) - (p.text.endswith("\n") or not p.text)
                for p, b in zip(self.parts, self._breaks)
            ),
            default=0,
        )

    def hits(self, word: str) -> Iterator[tuple[int, str, int]]:
        """Line number, line and place of every line with this word."""
        for part, breaks in zip(self.parts, self._breaks):
            at = part.text.find(word)
            for _ in range(_MOST_HITS):
                if at < 0:
                    break
                text, begin = _line_around(part.text, at)
                yield part.first_line + bisect_right(breaks, at), text, at - begin
                at = part.text.find(word, max(begin + len(text), at + len(word)))

    def between(self, first: int, last: int) -> list[str]:
        """These lines, as far as they exist."""
        for part, breaks in zip(self.parts, self._breaks):
            index = max(0, first - part.first_line)
            if part.first_line <= last and index <= len(breaks):
                begin = breaks[index - 1] + 1 if index else 0
                return part.text[begin : begin + MOST_LINE].split("\n")[: last - part.first_line - index + 1]
        return []

    def holds(self, words: Sequence[str]) -> bool:
        return any(word in part.text for part in self.parts for word in words)

    def after(self, line: int) -> Iterator[tuple[int, str]]:
        """The following lines, one by one, each up to the limit."""
        for part, breaks in zip(self.parts, self._breaks):
            index = line - part.first_line
            if not 0 <= index < len(breaks):
                continue
            for number, begin in enumerate(breaks[index:], line + 1):
                end = breaks[number - part.first_line] if number - part.first_line < len(breaks) else len(part.text)
                yield number, part.text[begin + 1 : min(end, begin + 1 + MOST_LINE)]


def _line_around(text: str, at: int) -> tuple[str, int]:
    """The line at this place, as far as it is looked at, and where it begins. A bar's \\r ends lines, too."""
    least, most = max(0, at - MOST_LINE), min(len(text), at + MOST_LINE)
    begin = 1 + max(text.rfind("\n", least, at), text.rfind("\r", least, at), least - 1)
    ends = [end for sign in "\n\r" if (end := text.find(sign, at, most)) >= 0]
    return text[begin : min(ends, default=most)], begin
