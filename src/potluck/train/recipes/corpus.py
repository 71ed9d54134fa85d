"""Owns text as one long sequence of bytes: this machine's Python sources or the user's files, without a copy.

It cuts windows of bytes and keeps the end for validation.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import os
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import Dataset

from potluck.errors import DataError

STDLIB_CAP_BYTES = 8_000_000
HELD_OUT_SHARE = 0.05

# Tests, tables of characters, generated prose and other people's packages: not what Python code looks like.
_SKIPPED_FOLDERS = frozenset(
    (
        *("test", "tests", "idle_test", "__pycache__", "site-packages", "dist-packages"),
        *("encodings", "pydoc_data", "lib2to3", "turtledemo"),
    )
)
_OPEN_FILES = 64
_SNIFFED_BYTES = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    """Concatenated texts: a position is a byte's place in the whole."""

    parts: tuple[bytes | Path, ...]
    """Text in memory, or a file that is mapped when it is read."""

    ends: tuple[int, ...]
    """The position after each part's last byte."""

    name: str
    """What to call it in a message."""

    def __len__(self) -> int:
        return self.ends[-1] if self.ends else 0

    def read(self, start: int, stop: int) -> np.ndarray:
        """Bytes [start, stop) as a fresh uint8 array, across the seams between parts."""
        out = np.empty(stop - start, dtype=np.uint8)
        position = start
        index = bisect.bisect_right(self.ends, start)
        while position < stop:
            base = self.ends[index - 1] if index else 0
            upto = min(stop, self.ends[index])
            out[position - start : upto - start] = _view(self.parts[index])[position - base : upto - base]
            position, index = upto, index + 1
        return out


class Windows(Dataset[torch.Tensor]):
    """The samples: `sequence + 1` bytes each, every byte of [start, stop) a target once."""

    def __init__(self, corpus: Corpus, *, sequence: int, start: int, stop: int) -> None:
        self._corpus = corpus
        self._sequence = sequence
        self._start = start
        self._count = max(0, (stop - start - 1) // sequence)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> torch.Tensor:
        """One window (sequence + 1,) of uint8."""
        if not 0 <= index < self._count:
            raise IndexError(f"window {index} of {self._count}")
        start = self._start + index * self._sequence
        return torch.from_numpy(self._corpus.read(start, start + self._sequence + 1))

    def __getitems__(self, indices: Sequence[int]) -> list[torch.Tensor]:
        """Several windows, as torch's DataLoader asks for them: a list of samples, not yet stacked."""
        return [self[index] for index in indices]


def open_corpus(data: str | None) -> Corpus:
    """The text at `data` (a file or a folder), or this machine's Python sources where none is given."""
    if data is None:
        return stdlib_corpus()
    path = Path(data).expanduser()
    if not os.path.exists(path):  # Path.exists() raises where a folder may not be entered, or a name is too long
        raise DataError(
            f"there is no file or folder {path}", hint="give --data an existing text file or a folder of them"
        )
    files = sorted(_text_files(path)) if path.is_dir() else [path]
    for file in files[:1]:
        _head(file)  # what may not be read is said now, not in the middle of a run
    sizes = [_size_of(file) for file in files]
    if not sum(sizes):
        what = "holds no text file" if path.is_dir() else "is empty"
        raise DataError(f"{path} {what}", hint="give --data a file with some text, or a folder of such files")
    return Corpus(parts=tuple(files), ends=tuple(itertools.accumulate(sizes)), name=str(path))


def split(corpus: Corpus, *, sequence: int, needed: int) -> tuple[Windows, Windows]:
    """Samples for training and, from the tail, for validation; an error where training has under `needed`."""
    edge = len(corpus) - max(int(len(corpus) * HELD_OUT_SHARE), sequence + 1)
    training = Windows(corpus, sequence=sequence, start=0, stop=max(edge, 0))
    if len(training) < max(needed, 1):
        raise DataError(
            f"{corpus.name} has {len(corpus):,} bytes, {len(training):,} samples of {sequence} to train on;"
            f" one step takes {needed:,}",
            hint="give a longer text with --data, or a smaller --sequence or --batch-tokens",
        )
    return training, Windows(corpus, sequence=sequence, start=edge, stop=len(corpus))


@functools.lru_cache(maxsize=1)
def stdlib_corpus() -> Corpus:
    """The .py files of the Python standard library, in order of their paths, up to a cap."""
    root = Path(sysconfig.get_paths()["stdlib"])
    texts: list[bytes] = []
    room = STDLIB_CAP_BYTES
    for file in sorted(_python_files(root)):
        try:
            text = file.read_bytes()[:room]
        except OSError:  # one unreadable source more or less is no reason to stop
            continue
        if text:
            texts.append(text)
            room -= len(text)
        if not room:
            break
    if not texts:
        raise DataError(
            f"this Python has no sources of its standard library in {root}",
            hint="train on your own text: --data FILE_OR_DIR",
        )
    whole = b"".join(texts)
    return Corpus(parts=(whole,), ends=(len(whole),), name="the text of the Python standard library")


def _python_files(root: Path) -> list[Path]:
    found: list[Path] = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in _SKIPPED_FOLDERS]
        found += [Path(folder, name) for name in names if name.endswith(".py")]
    return found


def _text_files(root: Path) -> list[Path]:
    """Files below `root` that are neither hidden, nor empty, nor binary (a zero byte near the start)."""
    found: list[Path] = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if not name.startswith(".")]
        for name in names:
            file = Path(folder, name)
            if not name.startswith(".") and os.path.isfile(file) and _size_of(file) and b"\0" not in _head(file):
                found.append(file)
    return found


def _size_of(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError as error:
        raise _unreadable(file, error) from error


def _head(file: Path) -> bytes:
    try:
        with file.open("rb") as stream:
            return stream.read(_SNIFFED_BYTES)
    except OSError as error:
        raise _unreadable(file, error) from error


def _view(part: bytes | Path) -> np.ndarray:
    return _map(part) if isinstance(part, Path) else np.frombuffer(part, dtype=np.uint8)


@functools.lru_cache(maxsize=_OPEN_FILES)  # a folder may hold more files than a process may map
def _map(file: Path) -> np.ndarray:
    try:
        return np.memmap(file, dtype=np.uint8, mode="r")
    except (OSError, ValueError) as error:
        raise _unreadable(file, error) from error


def _unreadable(file: Path, error: Exception) -> DataError:
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return DataError(f"cannot read {file}: {reason}", hint="check that it is a file that you may read")
