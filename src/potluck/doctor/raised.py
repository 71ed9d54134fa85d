"""Finds the tracebacks in a log: which rank raised which exception, and where. PURE."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

from potluck.doctor.log_text import LogText

BEGINS = "Traceback (most recent call last)"
_MOST_TRACEBACKS, _MOST_LINES, _MOST_BODY = 200, 400, 8
_MARK = re.compile(r"(?:\[[^\]]{1,40}\]:? ?|[\w.-]{1,40}: ){0,3}")
"""The prefix that launchers add to each line: [rank1]: of torch, [default1]: of torchrun --tee, machine: of
pdsh."""
_RANK = re.compile(r"\[rank ?(\d{1,6})\]")
_RAISED = re.compile(
    r"(?:(?:\w{1,60}\.){1,12}[A-Z]\w{0,80}"
    r"|\w{0,80}(?:Error|Exception|Exit|Interrupt|Iteration|Warning|Failure|Timeout))(?::(?: |$)|$)"
)
_FRAME = re.compile(r'  File "([^"]{1,400})", line (\d{1,7})')
_CHAINED = ("During handling of the above exception", "The above exception was the direct cause")
_LAUNCHERS = re.compile(
    r"(?:.*\.)?(?:ChildFailedError|SignalException|KeyboardInterrupt|SystemExit)$|potluck\.errors\."
)
_NOT_THE_SCRIPTS = ("site-packages", "dist-packages", "<frozen", "/lib/python")


@dataclass(frozen=True, slots=True)
class Raised:
    """The last exception of a traceback."""

    rank: int | None
    line: int
    text: str
    """The first line of NAME: MESSAGE, without the launcher's prefix."""
    body: tuple[str, ...]
    """All lines of the message."""
    file: str
    at: int
    """Line of the last frame in a file of the user, else of the last frame."""

    @property
    def name(self) -> str:
        return self.text.partition(":")[0].strip()

    @property
    def who(self) -> str:
        """The rank, as a prefix for its exception."""
        return f"rank {self.rank}: " if self.rank is not None else ""

    @property
    def of_launcher(self) -> bool:
        """Whether it is not the script's: the launcher says that the script ended."""
        return _LAUNCHERS.match(self.name) is not None


def all_raised(log: LogText) -> Iterator[Raised]:
    """The exceptions that tracebacks end with, in their order."""
    for line, text, _ in islice(log.hits(BEGINS), _MOST_TRACEBACKS):
        if (raised := _raised_after(text, log.after(line))) is not None:
            yield raised


def _raised_after(mark_line: str, following: Iterable[tuple[int, str]]) -> Raised | None:
    """The last exception of the traceback that begins in this line. Other ranks' lines may be between its own."""
    mark = mark_line[: mark_line.find(BEGINS)]
    if _MARK.fullmatch(mark) is None:
        return None
    rank = _RANK.search(mark)
    file, at, own = "", 0, False
    found: tuple[int, str] | None = None
    body: list[str] = []
    for line, text in _of_mark(mark, following):
        if found is not None:
            if text.startswith(_CHAINED):
                return None  # the next traceback of this rank is what ended it
            if text.startswith(BEGINS) or len(body) >= _MOST_BODY:
                break
            body.append(text)
        elif (frame := _FRAME.match(text)) is not None:
            of_script = not any(place in frame[1] for place in _NOT_THE_SCRIPTS)
            if of_script or not own:
                file, at, own = frame[1], int(frame[2]), of_script
        elif _RAISED.match(text) is not None:
            found = line, text
            body.append(text)
    if found is None:
        return None
    return Raised(int(rank[1]) if rank else None, found[0], found[1], tuple(body), file, at)


def _of_mark(mark: str, following: Iterable[tuple[int, str]]) -> Iterator[tuple[int, str]]:
    for number, (line, text) in enumerate(following):
        if number >= _MOST_LINES:
            return
        if text.startswith(mark) and (rest := text[len(mark) :].rstrip("\r")) and (mark or rest[0] != "["):
            yield line, rest
