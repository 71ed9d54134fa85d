"""A user's script as it travels and as it runs: read with what it imports, shown by its hash, run as __main__.

Owns files and hashes of scripts. It knows no network.
"""

from __future__ import annotations

import hashlib
import runpy
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from potluck.errors import UserError, WireError

MAX_SCRIPT_BYTES = 4 << 20
MAX_FILES = 48


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """A script, the files that go with it, and its arguments."""

    names: tuple[str, ...]
    """File names; the first is the script itself."""
    contents: tuple[bytes, ...]
    arguments: tuple[str, ...] = ()

    @property
    def sha256(self) -> str:
        digest = hashlib.sha256()
        for name, content in zip(self.names, self.contents):
            digest.update(name.encode() + b"\0" + len(content).to_bytes(8, "big") + content)
        return digest.hexdigest()


def read_script(path: Path, also: Sequence[Path] = (), arguments: Sequence[str] = ()) -> Script:
    """Read a script and its companions (which must lie beside or below it)."""
    if len(also) > MAX_FILES - 1:
        raise UserError(f"{len(also)} files beside the script; at most {MAX_FILES - 1} travel")
    names, contents = [], []
    base = path.resolve().parent
    for file in (path, *also):
        try:
            contents.append(file.read_bytes())
        except OSError as error:
            raise UserError(
                f"cannot read {file}: {error.strerror or error}", hint="give the path of a Python file"
            ) from error
        try:
            names.append(file.resolve().relative_to(base).as_posix())
        except ValueError:
            raise UserError(f"{file} does not lie beside or below {path}") from None
    if sum(map(len, contents)) > MAX_SCRIPT_BYTES:
        raise UserError(
            f"the script and its files have {sum(map(len, contents))} bytes; at most {MAX_SCRIPT_BYTES} travel",
            hint="send code only; data goes with the leases",
        )
    return Script(names=tuple(names), contents=tuple(contents), arguments=tuple(arguments))


def received_script(
    names: Sequence[str], contents: Sequence[bytes], arguments: Sequence[str], sha256: str
) -> Script:
    """A script as it came over the wire: names that stay inside its folder, and the hash it was announced with."""
    for name in names:
        parts = PurePosixPath(name).parts
        if not parts or PurePosixPath(name).is_absolute() or ".." in parts or "\\" in name or ":" in name:
            raise WireError(f"the host sent a file named {name!r}")
    if not names or len(names) != len(contents):
        raise WireError("the host sent a script without its files")
    script = Script(names=tuple(names), contents=tuple(contents), arguments=tuple(arguments))
    if script.sha256 != sha256:
        raise WireError("the script that arrived is not the one that was announced")
    return script


def run_received(script: Script) -> None:
    """Run a received script in a folder of its own, which is removed afterwards."""
    with tempfile.TemporaryDirectory(prefix="potluck-") as folder:
        for name, content in zip(script.names, script.contents):
            file = Path(folder) / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content)
        run_file(Path(folder) / script.names[0], script.arguments)


def run_file(path: Path, arguments: Sequence[str]) -> None:
    """Run a script in this process, as `python script arguments` would."""
    before = sys.argv, list(sys.path)
    sys.argv = [str(path), *arguments]
    sys.path.insert(0, str(path.resolve().parent))
    try:
        runpy.run_path(str(path), run_name="__main__")
    finally:
        sys.argv, sys.path[:] = before[0], before[1]
