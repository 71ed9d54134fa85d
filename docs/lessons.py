"""Runs the command blocks of the lessons in docs/learn/, and compares or renews the output that they show.

python docs/lessons.py                  run the quick blocks and compare
python docs/lessons.py --slow           run all blocks
python docs/lessons.py --write --slow   run all blocks and write their output into the lessons
python docs/lessons.py 2 6              only these lessons

A block is a fence marked `console`. Its lines that begin with `$ ` are commands (one that ends with a backslash
goes on in the next line). The lines below a command are its output, with standard error in it. All commands of a
lesson run in one folder, each in a shell of its own, with OMP_NUM_THREADS=1 as docs/learn/index.md says. A comment
before the fence may mark it, such as `<!-- run: slow, status -->`:

slow            takes long: only with --slow
namespaces      needs the lab's network namespaces (Linux, root or user namespaces)
status          only the exit status is compared, since the output depends on the machine
exact           the output is compared as it is
stdout          standard error is left out: progress, and torchrun's own messages
exit=N          the last command ends with this status; the others end with 0

Without `status` or `exact` the words of the output are compared, line by line: what has a digit in it, units and
pictures made of signs may differ, and so may what follows `you said ..., it is`.
"""

from __future__ import annotations

import argparse
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LESSONS = sorted((ROOT / "docs" / "learn").glob("[0-9]*.md"))
BLOCK = re.compile(r"^(?:<!-- run: (?P<marks>.+?) -->\n)?```console\n(?P<text>.*?)^```$", re.M | re.S)
COMMAND = re.compile(r"^\$ ((?:.*\\\n)*.*)\n", re.M)
MARKS = {"slow", "namespaces", "status", "exact", "stdout"}
UNITS = {"B", "kB", "MB", "GB", "s", "ms", "us", "µs", "ns", "min", "h", "k", "M", "G", "T", "x"}
LIMIT_S = 600


@dataclass
class Block:
    """One fence of a lesson: its commands and the output shown below each."""

    marks: set[str]
    commands: list[str]
    shown: list[str]
    status: int = 0
    """What the last command ends with."""
    found: list[str] = field(default_factory=list)
    """What the commands print now."""

    @classmethod
    def read(cls, marks: str | None, text: str) -> Block:
        named = set(filter(None, re.split(r"[,\s]+", marks or "")))
        statuses = {mark for mark in named if mark.startswith("exit=")}
        if unknown := named - statuses - MARKS:
            raise ValueError(f"unknown marks: {', '.join(sorted(unknown))}")
        before, *parts = COMMAND.split(text)
        if before or not parts:
            raise ValueError(f"a block begins with a command ('$ ...'), not with {text[:40]!r}")
        return cls(
            marks=named - statuses,
            commands=parts[::2],
            shown=parts[1::2],
            status=int(statuses.pop()[5:]) if statuses else 0,
        )

    def run(self, folder: Path) -> list[str]:
        """Runs the commands, and says what is wrong."""
        wrong = []
        for number, (command, shown) in enumerate(zip(self.commands, self.shown)):
            wanted = self.status if number == len(self.commands) - 1 else 0
            status, output, errors = run_command(command, folder, apart="stdout" in self.marks)
            self.found.append(output)
            if status != wanted:
                wrong.append(f"$ {command}\nended with status {status}, not {wanted}:\n{output}{errors}")
            elif not self.same(shown, output):
                wrong.append(f"$ {command}\nprinted\n{output}\nbut the lesson shows\n{shown}")
        return wrong

    def same(self, shown: str, output: str) -> bool:
        if "status" in self.marks:
            return True
        return shown == output if "exact" in self.marks else stable(shown) == stable(output)

    def text(self) -> str:
        """The block as it is written into a lesson, with the output of now where there is some."""
        output = self.found or self.shown
        return "".join(f"$ {command}\n{printed}" for command, printed in zip(self.commands, output))


def stable(text: str) -> list[list[str]]:
    """The words of each line that are the same on every machine."""
    told = re.sub(r"(you said .*, it is).*", r"\1", text)
    lines = [re.split(r"[^\w.'/-]+", line) for line in told.splitlines()]
    words = [[word for word in line if re.match(r"[^\W\d]", word) and not re.search(r"\d", word)] for line in lines]
    return [kept for line in words if (kept := [word for word in line if word.strip(".'/-") not in UNITS])]


def run_command(command: str, folder: Path, *, apart: bool) -> tuple[int, str, str]:
    """A command's exit status, what it printed, and its standard error where that is kept apart.

    Everything that it started ends with it.
    """
    quiet = {"NO_COLOR": "1", "COLUMNS": "80", "OMP_NUM_THREADS": "1"}
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    with subprocess.Popen(
        ["bash", "-o", "pipefail", "-c", command],
        cwd=folder,
        env={**os.environ, **quiet, "PATH": path, "MASTER_PORT": str(free_port())},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE if apart else subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as shell:
        try:
            output, errors = shell.communicate(timeout=LIMIT_S)
        except BaseException:
            os.killpg(shell.pid, 9)
            raise
    lines = [line.rstrip() for line in output.splitlines()]
    return shell.returncode, "".join(f"{line}\n" for line in lines), errors or ""


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def work_folder(folder: Path) -> Path:
    """A folder that looks to commands like a clone, in which they may write."""
    for name in ("examples", "docs"):
        (folder / name).symlink_to(ROOT / name)
    return folder


def blocks_of(text: str) -> list[Block]:
    return [Block.read(found["marks"], found["text"]) for found in BLOCK.finditer(text)]


def chosen(block: Block, *, slow: bool, namespaces: bool) -> bool:
    return (slow or "slow" not in block.marks) and (namespaces or "namespaces" not in block.marks)


def run_lesson(lesson: Path, *, slow: bool, namespaces: bool = True, write: bool = False) -> list[str]:
    """Runs the blocks of one lesson in their order, and says what is wrong."""
    text = lesson.read_text(encoding="utf-8")
    blocks, wrong = blocks_of(text), []
    with tempfile.TemporaryDirectory() as name:
        folder = work_folder(Path(name))
        for block in blocks:
            if chosen(block, slow=slow, namespaces=namespaces):
                wrong += block.run(folder)
    if write:
        left = iter(blocks)
        renewed = BLOCK.sub(
            lambda found: found[0].replace(f"```console\n{found['text']}", f"```console\n{next(left).text()}"), text
        )
        lesson.write_text(renewed, encoding="utf-8")
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("lessons", nargs="*", help="numbers of lessons; default: all")
    parser.add_argument("--slow", action="store_true")
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    from potluck.lab.permission import why_not

    lacking = why_not()
    if lacking:
        print(f"blocks marked namespaces are left out: {lacking}")
    failed = False
    for lesson in LESSONS:
        if args.lessons and lesson.name.partition("-")[0] not in args.lessons:
            continue
        begin = time.monotonic()
        wrong = run_lesson(lesson, slow=args.slow, namespaces=not lacking, write=args.write)
        changed = "written" if args.write else "differs"
        print(f"{lesson.name}: {time.monotonic() - begin:.0f} s{f', {len(wrong)} {changed}' if wrong else ''}")
        print("\n".join(wrong))
        failed = failed or bool(wrong)
    sys.exit(failed and not args.write)


if __name__ == "__main__":
    main()
