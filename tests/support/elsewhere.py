"""`make test` as other machines and users would run it: another processor, locale, user, folder, and more load.

    make test-elsewhere                                     the passes "stranger" and "busy", one after the other
    make test-elsewhere ARGS="--pass stranger"
    make test-elsewhere ARGS="--locale tr_TR.UTF-8 --threads 1 -- tests/unit -k view"

Each pass is `make test` under several variations at once; options replace the passes by one of their own. For
another user or folder the tree is copied, and that user makes a .venv in the copy. What follows `--` goes to
pytest. A variation that this machine does not offer is left out, and named.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
OTHER_USER = 12345
"""No name and no home in the system's list of users, as in a container that was started with `--user`."""
MADE = (".git", ".venv", "__pycache__", "*.egg-info", ".*_cache", ".hypothesis")
MADE_AT_THE_TOP = {"build", "dist", "runs"}
OF_MAKE = ("MAKEFLAGS", "MFLAGS", "MAKELEVEL", "MAKEOVERRIDES")


@dataclass(frozen=True, slots=True, kw_only=True)
class Variation:
    """What is different in a pass; None, False and 0 leave it as it is here."""

    aten: str | None = None
    """ATEN_CPU_CAPABILITY: the instructions that torch uses, `default` or `avx2`."""
    threads: int | None = None
    """OMP_NUM_THREADS."""
    busy: int = 0
    """Busy loops beside the tests."""
    zone: str | None = None
    """TZ. The form `<+1345>-13:45` needs no list of time zones."""
    locale: str | None = None
    """LC_ALL, generated with localedef where the system has it."""
    other_user: bool = False
    """Run as a user who is not root and has no entry in the system's list; from root only."""
    space: bool = False
    """From a path with a space."""

    def __str__(self) -> str:
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        return ", ".join(f"{name} {value}" for name, value in given.items() if value)


PASSES = {
    "stranger": Variation(
        aten="default", threads=1, zone="<+1345>-13:45", locale="tr_TR.UTF-8", other_user=True, space=True
    ),
    "busy": Variation(aten="avx2", threads=2, busy=2, zone="<-0930>+9:30", locale="de_DE.ISO-8859-1"),
}


def environment(varied: Variation, folder: Path) -> dict[str, str]:
    """The variables of a pass; `folder` is for what it generates."""
    env = {name: value for name, value in os.environ.items() if name not in OF_MAKE}
    if varied.aten:
        env["ATEN_CPU_CAPABILITY"] = varied.aten
    if varied.threads:
        env["OMP_NUM_THREADS"] = str(varied.threads)
    if varied.zone:
        env["TZ"] = varied.zone
    if varied.locale:
        env |= locale_of(varied.locale, folder)
    return env


def locale_of(name: str, folder: Path) -> dict[str, str]:
    """The variables that choose a locale, generated in `folder` where that is possible."""
    language, _, encoding = name.partition(".")
    command = ["localedef", "--no-archive", "-i", language, "-f", encoding or "UTF-8", str(folder / name)]
    with contextlib.suppress(OSError):
        done = subprocess.run(command, capture_output=True)
        if (folder / name / "LC_CTYPE").exists():  # localedef warns of trifles with status 1
            return {"LOCPATH": str(folder), "LC_ALL": name, "LANG": name}
        print(f"no locale {name}, but POSIX: {done.stderr.decode(errors='replace').strip()}", flush=True)
        return {"LC_ALL": "POSIX"}
    print(f"no locale {name}, but POSIX: there is no localedef", flush=True)
    return {"LC_ALL": "POSIX"}


@contextlib.contextmanager
def busy(loops: int) -> Iterator[None]:
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(loops)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def copied(to: Path) -> None:
    """The tree with its uncommitted work, without history and what was made in it."""
    nowhere = shutil.ignore_patterns(*MADE)

    def ignored(folder: str, names: list[str]) -> set[str]:
        return nowhere(folder, names) | (MADE_AT_THE_TOP & set(names) if Path(folder) == ROOT else set())

    shutil.copytree(ROOT, to, ignore=ignored)


def tried(varied: Variation, arguments: list[str]) -> int:
    """The status of `make test` under these variations."""
    command = ["make", "test", f"ARGS={shlex.join(arguments)}"]
    other_user = varied.other_user and os.name == "posix" and os.geteuid() == 0
    if varied.other_user and not other_user:
        print("no other user: only root can become one", flush=True)
    with tempfile.TemporaryDirectory(prefix="potluck-elsewhere-") as name, busy(varied.busy):
        folder = Path(name)
        env = environment(varied, folder)
        if not (other_user or varied.space):
            return subprocess.run(command, cwd=ROOT, env=env).returncode
        home = folder / ("a folder" if varied.space else "folder")
        tree, temporary = home / "potluck", home / "tmp"
        copied(tree)
        temporary.mkdir()
        env |= {"HOME": str(home), "TMPDIR": str(temporary)}
        folder.chmod(0o755)
        if not other_user:
            return subprocess.run(command, cwd=tree, env=env).returncode
        for name in ("USER", "LOGNAME", "USERNAME"):
            env.pop(name, None)
        subprocess.run(["chown", "-R", f"{OTHER_USER}:{OTHER_USER}", str(folder)], check=True)
        who = {"user": OTHER_USER, "group": OTHER_USER, "extra_groups": []}
        return subprocess.run(command, cwd=tree, env=env, **who).returncode  # type: ignore[call-overload]


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="make test-elsewhere", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pass", dest="passes", action="append", choices=PASSES, help="this one only")
    parser.add_argument("--aten", metavar="LEVEL", help="ATEN_CPU_CAPABILITY: default or avx2")
    parser.add_argument("--threads", type=int, metavar="N", help="OMP_NUM_THREADS")
    parser.add_argument("--busy", type=int, default=0, metavar="N", help="busy loops beside the tests")
    parser.add_argument("--zone", metavar="TZ", help='time zone, for example "<+1345>-13:45"')
    parser.add_argument("--locale", metavar="NAME", help="for example tr_TR.UTF-8")
    parser.add_argument("--other-user", action="store_true", help="as a user without a name (root only)")
    parser.add_argument("--space", action="store_true", help="from a path with a space")
    parser.add_argument("arguments", nargs="*", metavar="-- ARG", help="for pytest")
    given = vars(parser.parse_args())
    passes, arguments = given.pop("passes"), given.pop("arguments")
    own = Variation(**given)
    if passes or own == Variation():
        chosen = {name: PASSES[name] for name in passes or PASSES}
    else:
        chosen = {"chosen": own}
    statuses = {}
    for name, varied in chosen.items():
        print(f"== {name}: {varied}", flush=True)
        began = time.monotonic()
        statuses[name] = tried(varied, arguments)
        how = "good" if statuses[name] == 0 else f"status {statuses[name]}"
        print(f"== {name}: {how} after {time.monotonic() - began:.0f} s", flush=True)
    return 1 if any(statuses.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
