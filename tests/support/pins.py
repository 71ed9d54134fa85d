"""`make pins`: constraints.txt anew, from what pip installs today into an empty environment.

torch stays as it is pinned: another one is a change of its own. What torch itself pins (nvidia-*, triton) is left
out, so that the file is the same from a machine with a GPU and from one without.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "constraints.txt"
KEPT = "torch"
LEFT_OUT = ("pip", "potluck", "triton", "nvidia-", "cuda-")
"""By the beginning of the name where that ends with a dash."""
PIN = re.compile(r"[A-Za-z0-9][\w.-]*==\S+$")
HEADER = """\
# Everything that `make train` and `make test` install, as tested. Renewed by `make pins`.
# pip takes a version from here only for what it installs anyway.
"""


def pins(frozen: str) -> list[str]:
    """Lines of constraints from those of `pip freeze --all`, sorted, without builds such as +cpu."""
    found = [line.split("==") for line in frozen.splitlines() if PIN.match(line)]
    kept = [f"{name}=={version.partition('+')[0]}" for name, version in found if not _left_out(name.lower())]
    return sorted(kept, key=str.lower)


def _left_out(name: str) -> bool:
    return any(name == other or (other.endswith("-") and name.startswith(other)) for other in LEFT_OUT)


def kept(constraints: str) -> str:
    """The line of the one that stays as it is."""
    (line,) = (line for line in constraints.splitlines() if line.startswith(f"{KEPT}=="))
    return line


def installed(extras: Iterable[str]) -> str:
    """What `pip freeze` says of a new environment with the package and its extras."""
    with tempfile.TemporaryDirectory(prefix="potluck-pins-") as folder:
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        only = Path(folder, "only.txt")
        only.write_text(kept(FILE.read_text(encoding="utf-8")) + "\n", encoding="utf-8")
        pip = [str(Path(folder, "bin", "python")), "-m", "pip", "--disable-pip-version-check"]
        install = [*pip, "install", "--quiet", "--upgrade", "--no-compile", "-c", str(only)]
        subprocess.run([*install, "setuptools"], check=True)
        what = f".[{','.join(sorted(set(extras)))}]"
        subprocess.run([*install, "--no-build-isolation", "-e", what], check=True, cwd=ROOT)
        return subprocess.run([*pip, "freeze", "--all"], check=True, capture_output=True, text=True).stdout


def main() -> None:
    parser = argparse.ArgumentParser(prog="make pins", description=__doc__)
    parser.add_argument("--extras", required=True, type=lambda text: text.split(","))
    FILE.write_text(HEADER + "\n".join(pins(installed(parser.parse_args().extras))) + "\n", encoding="utf-8")
    print(f"wrote {FILE.name}; `make test` installs and tries it")


if __name__ == "__main__":
    main()
