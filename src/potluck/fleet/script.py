"""A user's script, sent and run: read with its imports, identified by its hash, run as __main__.

Owns files and hashes of scripts.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.metadata
import importlib.util
import linecache
import runpy
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from types import ModuleType
from typing import Any

from potluck.errors import UserError, WireError
from potluck.fleet.guest_folder import guest_folder
from potluck.spec.messages import Source

MAX_SCRIPT_BYTES = 4 << 20
MAX_FILES = 48


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """A script, the files that are sent with it, and its arguments."""

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

    def source(self, imports: Mapping[str, str]) -> Source:
        """The description for guests before they run it; `imports` as from `imports_of`."""
        return Source(files=self.names, arguments=self.arguments, sha256=self.sha256, imports=dict(imports))


def is_script(what: str) -> bool:
    """Whether it is a script; otherwise it is a recipe's name."""
    return what.endswith(".py") or "/" in what


def check_send(what: str, send: Sequence[Path]) -> None:
    """Refuse files that are to be sent with a recipe."""
    if send and not is_script(what):
        raise UserError("--send works only with a script", hint="guests have the recipes: leave --send out")


def described(script: Script, folder: Path, python: Script | None = None) -> tuple[Source, list[str]]:
    """Its description for guests, and the files in its folder that it imports and that are not sent with it.

    `python`: the same in plain Python, if the script is something else, such as a notebook's cells.
    """
    imports = imports_of(python or script, folder)
    return script.source(imports), not_sent(imports)


def read_script(path: Path, also: Sequence[Path] = (), arguments: Sequence[str] = ()) -> Script:
    """Read a script and its files (which must be in its folder or below)."""
    return with_files(
        Script(names=(), contents=(), arguments=tuple(arguments)), (path, *also), path.resolve().parent
    )


def with_files(script: Script, files: Sequence[Path], base: Path) -> Script:
    """The script and the files that are sent with it, which must be in `base` or below."""
    names, contents = list(script.names), list(script.contents)
    for file in files:
        if names and file.is_dir():
            raise UserError(f"{file} is a folder, and only files can be sent", hint="name each of its files")
        try:
            contents.append(file.read_bytes())
        except OSError as error:
            kind = "the path of a file" if names else "the path of a Python file"
            raise UserError(f"cannot read {file}: {error.strerror or error}", hint=f"give {kind}") from error
        try:
            names.append(file.resolve().relative_to(base.resolve()).as_posix())
        except ValueError:
            raise UserError(f"{file} is not in {base} or below, as files sent with a script must be") from None
    if len(names) > MAX_FILES:
        raise UserError(f"{len(names) - 1} files beside the script; at most {MAX_FILES - 1} can be sent")
    if sum(map(len, contents)) > MAX_SCRIPT_BYTES:
        raise UserError(
            f"script and files have {sum(map(len, contents))} bytes; at most {MAX_SCRIPT_BYTES} can be sent",
            hint="send code only; data is sent with the leases",
        )
    return replace(script, names=tuple(names), contents=tuple(contents))


def imports_of(script: Script, folder: Path) -> dict[str, str]:
    """The modules that the script in `folder` always imports, each with its origin.

    The origin is the installed package, or the file next to the script ("./model.py"), or "" if unknown. Only
    imports at the top count, because those in an `if`, a `try` or a `def` may not be needed on guests. Python's own
    modules and the files that are sent with the script are left out.
    """
    found: dict[str, None] = {}
    for name, content in zip(script.names, script.contents):
        if name.endswith(".py"):
            found |= dict.fromkeys(_imported(content))
    sent = {PurePosixPath(name).parts[0].removesuffix(".py") for name in script.names}
    wanted = [m for m in found if m not in sys.stdlib_module_names and m not in sent and m != "potluck"]
    known = {m: _beside(m, folder) or _package_of_that_name(m) for m in wanted}
    # The files of every installed package are listed for this: 0.1 s and more.
    packages = {} if all(known.values()) else importlib.metadata.packages_distributions()
    return {m: where or next(iter(packages.get(m, ())), "") for m, where in known.items()}


def _imported(source: bytes) -> list[str]:
    try:
        body = ast.parse(source).body
    except (SyntaxError, ValueError):
        return []  # running it will tell
    names = [alias.name for node in body if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module for node in body if isinstance(node, ast.ImportFrom) and node.module and not node.level]
    return [name.partition(".")[0] for name in names]


def _beside(module: str, folder: Path) -> str:
    if (folder / f"{module}.py").is_file():
        return f"./{module}.py"
    return f"./{module}/__init__.py" if (folder / module / "__init__.py").is_file() else ""


def _package_of_that_name(module: str) -> str:
    """The package with the module's name that contains it, such as numpy; "" if there is none."""
    try:
        found = importlib.metadata.distribution(module)
    except (importlib.metadata.PackageNotFoundError, ValueError):
        return ""
    files = (found.locate_file(name) for name in (f"{module}/__init__.py", f"{module}.py"))
    return found.metadata["Name"] if any(Path(str(file)).is_file() for file in files) else ""


def not_sent(imports: Mapping[str, str]) -> list[str]:
    """Files next to the script that it imports but that are not sent with it."""
    return [where.removeprefix("./") for where in imports.values() if where.startswith("./")]


def missing_here(imports: Mapping[str, str]) -> dict[str, str]:
    """The modules that this machine lacks."""
    return {module: where for module, where in imports.items() if not _is_here(module)}


def _is_here(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):  # in sys.modules without a spec
        return module in sys.modules


def guest_hint(missing: Mapping[str, str]) -> str:
    """What to do about modules that a guest lacks; `missing` as of `imports_of`."""
    hints = []
    if packages := [where or module for module, where in missing.items() if not where.startswith("./")]:
        hints.append(
            f"pip install {' '.join(packages)}   (on this machine); what only the host needs can be imported below "
            '"if run.is_host:"'
        )
    if files := not_sent(missing):
        hints.append("on the host: potluck host SCRIPT " + " ".join(f"--send {file}" for file in files))
    return "; ".join(hints)


def received_script(
    names: Sequence[str], contents: Sequence[bytes], arguments: Sequence[str], sha256: str
) -> Script:
    """A received script, after a check that its names stay inside its folder and its hash is the announced one."""
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
    """Run a received script in a new folder, which is removed afterwards."""
    with guest_folder() as folder:
        for name, content in zip(script.names, script.contents):
            file = folder / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content)
            # A traceback is shown when the folder is gone: then Python has its lines from here (None: of no file).
            lines = content.decode(errors="replace").splitlines(keepends=True)
            linecache.cache[str(file)] = (len(content), None, lines, str(file))
        run_file(folder / script.names[0], script.arguments)


class _ScriptInProcesses(ModuleType):
    """`__mp_main__`: the script, as spawned processes call it.

    multiprocessing takes for it what is __main__ when it is imported, the command `potluck`. So the classes of a
    script, in what a loader's workers send, were not found.
    """

    def __getattr__(self, name: str) -> Any:
        return getattr(sys.modules["__main__"], name)


def run_file(path: Path, arguments: Sequence[str]) -> None:
    """Run a script in this process, as `python script arguments` would."""
    before = sys.argv, list(sys.path), sys.modules.get("__mp_main__")
    sys.argv = [str(path), *arguments]
    sys.path.insert(0, str(path.resolve().parent))
    sys.modules["__mp_main__"] = _ScriptInProcesses("__mp_main__")
    try:
        runpy.run_path(str(path), run_name="__main__")
    finally:
        sys.argv, sys.path[:] = before[0], before[1]
        del sys.modules["__mp_main__"]
        if before[2] is not None:
            sys.modules["__mp_main__"] = before[2]
