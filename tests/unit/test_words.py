"""Sentences in the source and the docs keep the plain voice: no phrase that was mended again and again comes back.

A phrase that is not plain has an entry in `INSTEAD`: a pattern, and what to write.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "potluck"
PAGES = sorted(
    path
    for path in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/**/*.md"), *SOURCE.rglob("*.md")]
    if path.name != "log.md"  # history, in the words of its day
)
NOT_SENTENCES = {"words.py"}
"""The words of codes."""

INSTEAD = {
    r"\bfarewells?\b": "CLOSE, an acknowledgement",
    r"\bmailrooms?\b|\bmailbox(?:es)?\b": "queue",
    r"\bparcels?\b": "message",
    r"(?<![Rr]ound[ -])\btrips?\b": "transfer, round trip",
    r"\b(?:at|through|by|the|its|their) doors?\b": "connections that are not admitted yet",
    r"\bso (?:long|often|many|much) (?:a|an|the|of|in|that it|samples|seconds|times)\b": "this long",
    r"\bgo(?:es)? on (?:at|with|from)\b": "continue, resume",
    r"\b(?:bear|bears|borne)\b": "tolerate, carry",
    r"\bwithout a word\b": "silently, without a message",
    r"\bin words\b": "a description",
    r"\bin vain\b": "useless, until the timeout",
    r"\bin the clear\b": "unencrypted",
    r"\bputs? out\b": "remove",
    r"\b(?:was|were|is|are|be) (?:turned|sent) (?:away|out|home)\b": "refused, disconnected, ended",
    r"\b(?:hung|hangs|hanging) up\b": "closed the connection",
    r"\bto and fro\b": "round trip",
    r"\band (?:its |their )?kin\b": "and similar ones",
    r"\bunder way\b": "current, running, in flight",
    r"\b[Ww]hoever\b": "everybody who, the machine that",
    r"\bmend(?:s|ed|ing)?\b": "fix, repair",
    r"\blets? go of\b": "release, free, end",
    r"\b(?:the|this|that) very (?:machine|same|batch|step|lease|size|sample|file)\b": "exactly this",
    r"\b(?:to|can|may) be had\b": "available",
    r"\bover and over\b": "many times",
    r"\bIt knows (?:no|nothing|neither)\b": "nothing: say what the module owns",
    r"^Of (?:the|a|an|its|his|each|all|this|what|that|which) ": "a phrase that stands alone",
}
PLAIN = {re.compile(pattern): words for pattern, words in INSTEAD.items()}


def sentences_of(path: Path) -> Iterator[tuple[str, str]]:
    """(place, text): docstrings, and texts of some words, without their code."""
    if path.suffix == ".md":
        text = re.sub(r"```.*?```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
        for number, block in enumerate(text.split("\n\n")):
            yield f"{path.relative_to(ROOT)}, paragraph {number}", " ".join(re.sub(r"`[^`]*`", "", block).split())
        return
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.count(" ") > 1:
            yield f"{path.relative_to(ROOT)}:{node.lineno}", " ".join(re.sub(r"`[^`]*`", "", node.value).split())


def not_plain(text: str) -> list[str]:
    """What is not plain in a text, with what to write."""
    return [f"{match[0]!r}: write {words}" for found, words in PLAIN.items() for match in found.finditer(text)]


def test_sentences_are_plain() -> None:
    files = [*PAGES, *(path for path in sorted(SOURCE.rglob("*.py")) if path.name not in NOT_SENTENCES)]
    found = [f"{place}: {what}" for path in files for place, text in sentences_of(path) for what in not_plain(text)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "text",
    [
        "Who ends says farewell.",
        "Of the last change, all pieces together.",
        "The run goes on with the next sample.",
        "A rank died without a word.",
        "The step under way.",
    ],
)
def test_what_is_not_plain_is_found(text: str) -> None:
    assert not_plain(text)
    assert not not_plain("A run resumes at exactly the next sample, with two round trips for each message.")


COINED = {"door", "farewell", "lane", "lobby", "mail", "mailbox", "mailroom", "parcel", "trip", "visit", "visitor"}
"""Nouns for what has an established name: connection, message, queue, channel, client."""
ESTABLISHED = ("round_trip", "dtype_lanes")
"""Names in which such a noun is the usual word; the second is a field of DLPack."""


def names_of(path: Path) -> Iterator[tuple[int, str]]:
    """Line and name of everything that a file defines, imports or uses."""
    yield 1, path.stem
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        for field in ("id", "attr", "name", "arg", "asname", "module"):
            if isinstance(name := getattr(node, field, None), str):
                yield getattr(node, "lineno", 1), name


def coined(name: str) -> set[str]:
    words = re.sub(r"([a-z0-9])([A-Z])", r"\1_\2", name).lower().replace(".", "_")
    for usual in ESTABLISHED:
        words = words.replace(usual, "")
    return {word.removesuffix("s") for word in words.split("_")} & COINED


def test_no_name_is_a_coined_noun() -> None:
    files = [*SOURCE.rglob("*.py"), *(ROOT / "tests").rglob("*.py"), *(ROOT / "bench").rglob("*.py")]
    found = [f"{path.relative_to(ROOT)}:{line}: {name}" for path in files for line, name in names_of(path)]
    assert [each for each in found if coined(each.rpartition(" ")[2])] == []
    assert coined("ProbeDoor") == {"door"}
    assert coined("link_visits") == {"visit"}
    assert not coined("RoundTrips") | coined("stripped") | coined("planes")
