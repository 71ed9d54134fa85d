"""The rules of the house, enforced on the source: layers, purity, size, secrets, speed of help.

Where a part does not exist yet its rule holds vacuously.
"""

from __future__ import annotations

import ast
import collections
import functools
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TypeGuard

import pytest

from potluck import errors

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "potluck"
FILES = sorted(SOURCE.rglob("*.py"))
PAGES = SOURCE / "troubleshooting"

# From the bottom up; parts on one line must not import each other.
LAYERS = (
    ("errors", "_version", "bounds"),
    ("checked",),
    ("units", "env", "failpoints", "limits", "sinks"),
    ("durable",),
    ("spec",),
    ("balance",),
    ("plan",),
    ("device",),
    ("wire", "codec"),
    ("hub", "dist"),
    ("train",),
    ("doctor",),
    ("report", "lab", "fleet", "probe", "loggers"),
    ("web", "sweep"),
    ("run_session",),
    ("cli", "hosting"),
    ("integrations", "dask", "ray"),
    ("__init__", "__main__"),
)
RANK = {part: rank for rank, parts in enumerate(LAYERS) for part in parts}

PURE = [
    *(path for part in ("spec", "balance", "plan", "doctor") for path in sorted((SOURCE / part).glob("*.py"))),
    *(SOURCE / "dist" / name for name in ("schedules.py", "config.py")),
    SOURCE / "probe" / "stream.py",
    *(SOURCE / "lab" / name for name in ("topology.py", "shaping.py")),
    SOURCE / "sweep" / "sharing.py",
]
IMPURE = {"torch", "time", "random", "secrets", "socket", "zmq", "threading", "asyncio", "subprocess"}

HELP_LIMIT_S = 0.150
MAX_FILE_LINES = 650
MAX_FUNCTION_LINES = 80
MAX_PARAMETERS = 8


def parsed(path: Path) -> ast.Module:
    return parsed_text(path.read_text(encoding="utf-8"))


@functools.cache
def parsed_text(text: str) -> ast.Module:
    return ast.parse(text)


def part_of(path: Path) -> str:
    first = path.relative_to(SOURCE).parts[0]
    return first.removesuffix(".py")


def imported_modules(path: Path) -> Iterator[tuple[int, str]]:
    """Line and full name of everything that the file imports, at its top or anywhere below."""
    package = ["potluck", *path.relative_to(SOURCE).parent.parts]
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            # `from potluck import env` imports potluck.env; `from potluck.env import read` does not.
            for alias in node.names:
                name = f"{module}.{alias.name}"
                yield node.lineno, name if module == "potluck" or file_of(name).exists() else module


def file_of(module: str) -> Path:
    return SOURCE.parent.joinpath(*module.split(".")).with_suffix(".py")


def named_modules(path: Path) -> Iterator[tuple[int, str]]:
    """Line and full name of the modules that a text names, for example to run them with `python -m`."""
    for node in ast.walk(parsed(path)):
        text = node.value if isinstance(node, ast.Constant) else None
        if isinstance(text, str) and re.fullmatch(r"potluck(\.\w+)+", text) and file_of(text).exists():
            yield node.lineno, text


def parts_imported(path: Path) -> Iterator[tuple[int, str]]:
    for line, name in (*imported_modules(path), *named_modules(path)):
        if name == "potluck":
            yield line, "__init__"
        elif name.startswith("potluck."):
            part = name.split(".")[1]
            yield line, part if part in RANK else "__init__"


def top(module: str) -> str:
    return module.split(".")[0]


def assert_none(problems_of: Callable[[Path], Iterable[str]], paths: Iterable[Path] = FILES) -> None:
    """All files' problems at once."""
    problems = [problem for path in paths for problem in problems_of(path)]
    assert not problems, "\n".join(problems)


def functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def error_classes() -> list[type[errors.PotluckError]]:
    found = [c for c in vars(errors).values() if isinstance(c, type) and issubclass(c, errors.PotluckError)]
    assert len(found) > 10
    return found


def test_every_part_has_its_layer() -> None:
    assert {part_of(path) for path in FILES} <= set(RANK)


def upward_imports(path: Path) -> list[str]:
    own = part_of(path)
    return [
        f"{path}:{line}: {own} must not import {part}"
        for line, part in parts_imported(path)
        if part != own and RANK[part] >= RANK[own]
    ]


def test_imports_point_down_only() -> None:
    assert_none(upward_imports)


def test_the_layer_test_can_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "potluck"
    (source / "wire").mkdir(parents=True)
    monkeypatch.setattr(sys.modules[__name__], "SOURCE", source)
    file = source / "wire" / "x.py"
    for text, part in (
        ("from potluck.hub.protocol import HostProtocol", "hub"),
        ("import potluck.cli", "cli"),
        ("from potluck import start", "__init__"),
        ("import potluck", "__init__"),
        ("from potluck import train", "train"),
        ("from ..hub import ledger", "hub"),
        ("def f():\n    from potluck.hub import host", "hub"),
    ):
        file.write_text(text)
        assert [p for _, p in parts_imported(file)] == [part]
        assert len(upward_imports(file)) == 1
    (source / "cli").mkdir()
    (source / "cli" / "join.py").write_text("")
    file.write_text('run(["python", "-m", "potluck.cli.join"])')
    assert len(upward_imports(file)) == 1
    file.write_text(
        "from .frames import pack\nfrom potluck.wire import keys\nfrom potluck import errors\nimport json"
    )
    assert upward_imports(file) == []


def behind(path: Path) -> set[Path]:
    """The file, and all of the package that it imports in turn."""
    found, left = set(), [path]
    while left:
        if (file := left.pop()) in found:
            continue
        found.add(file)
        left += [
            each
            for _, name in imported_modules(file)
            if (each := file_of(name)).is_relative_to(SOURCE) and each.exists()
        ]
    return found


def test_what_decides_is_pure() -> None:
    def impure_imports(path: Path) -> list[str]:
        return [f"{path}:{line} imports {name}" for line, name in imported_modules(path) if top(name) in IMPURE]

    assert_none(impure_imports, PURE)
    # The host's protocol: everything behind `HostProtocol.handle`. `checked` has a lock, for decoders.
    border = behind(SOURCE / "hub" / "protocol.py")
    assert len(border) > 25
    assert_none(impure_imports, border - {SOURCE / "checked.py"})


READ_BY_THE_SHELL = {"handle", "members", "synced", "host_sample_s", "samples_of", "holds", "judges"}
"""What `hub/host.py` uses of the protocol: its way in, and what only reads."""
READ_OF_MEMBERS = {"get", "values"}


def decisions(tree: ast.Module) -> Iterator[str]:
    """Where the hub's shell changes the protocol's state or a guest's, or reaches behind `handle`."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute):
            continue
        owner, line = ast.unparse(node.value), f"line {node.lineno}: {ast.unparse(node)}"
        if isinstance(node.ctx, ast.Store | ast.Del) and owner not in ("self", "self._coder"):
            yield f"{line} is changed"
        if owner == "self._protocol" and node.attr not in READ_BY_THE_SHELL:
            yield f"{line} is behind the border"
        if owner == "self._protocol.members" and node.attr not in READ_OF_MEMBERS:
            yield f"{line} changes who is there"
        if node.attr == "feed" or (owner.split(".")[-1] in ("member", "m") and node.attr not in ("name", "state")):
            yield f"{line} belongs to a guest"


def test_the_hubs_shell_decides_nothing() -> None:
    assert list(decisions(parsed(SOURCE / "hub" / "host.py"))) == []


def test_a_shell_that_decides_is_found() -> None:
    for text in (
        "member.feed.open = True",
        "member.state = 'late'",
        "member.rest(1, 'late')",
        "del member.lease",
        "self._protocol.members[guest].lease.unread += 1",
        "self._protocol.members.pop(guest)",
        "self._protocol.stepping.end()",
        "fed = [m.feed for m in everybody]",
    ):
        assert list(decisions(parsed_text(text))), text
    assert not list(decisions(parsed_text("self._stop = self._protocol.members.get(guest).name")))


POSIX_ONLY = re.compile(
    r"(?:import|from) (?:fcntl|grp|pty|pwd|resource|termios|tty)\b"
    r"|signal\.(?:SIGALRM|SIGCONT|SIGHUP|SIGKILL|SIGSTOP)\b"
    r"|os\.(?:fork|geteuid|getuid|killpg|mkfifo|setsid|uname)\b"
)
ASKS = re.compile(r"os\.name|sys\.platform")


def run_at_import(node: ast.AST) -> Iterator[ast.AST]:
    """What Python runs when it imports a module, without what asks for the system first."""
    if isinstance(node, ast.If | ast.BoolOp | ast.IfExp) and ASKS.search(ast.unparse(node)):
        return
    yield node
    later = node.body if isinstance(node, ast.FunctionDef | ast.Lambda) else ()
    for child in ast.iter_child_nodes(node):
        if child is not later and child not in (later if isinstance(later, list) else ()):
            yield from run_at_import(child)


def test_every_module_can_be_imported_on_windows() -> None:
    """One test module that cannot be imported ends pytest before its first test."""

    def posix_only(path: Path) -> Iterator[str]:
        if not POSIX_ONLY.search(path.read_text(encoding="utf-8")):
            return
        for node in run_at_import(parsed(path)):
            if isinstance(node, ast.Import | ast.ImportFrom | ast.Attribute) and POSIX_ONLY.search(
                ast.unparse(node)
            ):
                yield f"{path}:{node.lineno}: {ast.unparse(node)}"

    assert_none(posix_only, [*FILES, *sorted((ROOT / "tests").rglob("*.py"))])


def test_no_pickle_and_nothing_evaluated() -> None:
    modules = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
    functions_ = {"eval", "torch.load", "torch.save", "np.load", "numpy.load"}

    def may_be_one(node: ast.AST) -> TypeGuard[ast.Call]:
        """By its last name: to write out every call would take seconds."""
        last_name = getattr(node.func, "attr", getattr(node.func, "id", "")) if isinstance(node, ast.Call) else ""
        return any(name.endswith(last_name) for name in functions_) if last_name else False

    def forbidden(path: Path) -> list[str]:
        calls = ((n.lineno, ast.unparse(n.func)) for n in ast.walk(parsed(path)) if may_be_one(n))
        imports = (pair for pair in imported_modules(path) if top(pair[1]) in modules)
        return [
            *(f"{path}:{line} imports {name}" for line, name in imports),
            *(f"{path}:{line} calls {called}" for line, called in calls if called in functions_),
        ]

    assert_none(forbidden)


def test_one_module_makes_decoders() -> None:
    """Two threads that use a class of msgspec's for the first time crash Python. `checked` has a lock for it."""
    made = re.compile(r"msgspec\.(?:convert\(|json\.Decoder\(|\w+\.decode\(.*\btype=)")

    def making(path: Path) -> list[str]:
        lines = enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        return [f"{path}:{number} {line.strip()}" for number, line in lines if made.search(line)]

    assert_none(making, [path for path in FILES if path != SOURCE / "checked.py"])


def test_files_functions_and_parameters_stay_small() -> None:
    """Something beyond these has usually two jobs. The functions that users call write out all their keywords."""

    def large(path: Path) -> Iterator[str]:
        lines = len(path.read_text(encoding="utf-8").splitlines())
        if lines > MAX_FILE_LINES:
            yield f"{path} has {lines} lines"
        for function in functions(path):
            where = f"{path}:{function.lineno}: {function.name}"
            length = (function.end_lineno or function.lineno) - function.lineno + 1
            if length > MAX_FUNCTION_LINES:
                yield f"{where} has {length} lines"
            args = (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)
            count = sum(a.arg not in ("self", "cls") for a in args)
            if function.name.startswith("_") and count > MAX_PARAMETERS:
                yield f"{where} has {count} parameters"

    assert_none(large)


def test_a_class_name_means_one_thing() -> None:
    """In the whole package, also where it is private or inside a function."""
    found: dict[str, list[str]] = {}
    for path in FILES:
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name.lstrip("_"), []).append(str(path.relative_to(SOURCE)))
    assert not {name: paths for name, paths in found.items() if len(paths) > 1}


def test_modules_say_what_they_own() -> None:
    assert not [path for path in FILES if path.name != "_version.py" and not ast.get_docstring(parsed(path))]


@pytest.mark.parametrize("error", error_classes(), ids=lambda e: e.__name__)
def test_every_error_code_has_its_page(error: type[errors.PotluckError]) -> None:
    page = PAGES / f"{error.code}.md"
    assert page.exists(), f"{error.__name__} needs {page}"
    text = page.read_text(encoding="utf-8")
    assert text.startswith(f"# {error.code}: ")
    assert "Symptom" in text
    assert "ause" in text
    assert "ix" in text
    row = re.search(
        rf"^\| \[{error.code}\]\({error.code}\.md\) \|.*\| (\d+) \|$", (PAGES / "index.md").read_text(), re.M
    )
    assert row, f"index.md has no row for {error.code}"
    assert int(row[1]) in {e.exit_status for e in error_classes() if e.code == error.code}


def test_every_page_belongs_to_an_error_and_every_link_leads_somewhere() -> None:
    codes = {error.code for error in error_classes()}
    for page in PAGES.glob("*.md"):
        assert page.stem in codes | {"index", "doctor"}, f"{page} belongs to no error"
        for link in re.findall(r"\]\(([^)#:]+)\)", page.read_text(encoding="utf-8")):
            assert (page.parent / link).exists(), f"{page} links to {link}"


def test_error_codes_name_one_class_each() -> None:
    codes = [error.code for error in error_classes()]
    assert len(codes) == len(set(codes))


def run_python(*arguments: str) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in os.environ.items() if not k.startswith("POTLUCK_")} | {"PYTHONPATH": str(ROOT / "src")}
    return subprocess.run([sys.executable, *arguments], env=env, capture_output=True, text=True, timeout=30)


HEAVY = ("torch", "numpy", "zmq", "rich", "matplotlib", "sklearn", "safetensors", "psutil")


@pytest.mark.parametrize("what", ["import potluck", "from potluck.cli._app import run; run(['--help'])"])
def test_nothing_heavy_is_imported_before_it_is_needed(what: str) -> None:
    done = run_python("-c", f"import sys; {what}; print('heavy:', *[m for m in {HEAVY} if m in sys.modules])")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].split() == ["heavy:"]


def test_help_is_quick() -> None:
    """The best of some, in the process's own time: other work on the machine must not decide."""
    resource = pytest.importorskip("resource", reason="measures a process's time as POSIX does")

    def own_time_s() -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = run_python("-m", "potluck", "--help")
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert done.returncode == 0, done.stderr
        assert "train" in done.stdout
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    times = []
    for _ in range(20):
        times.append(own_time_s())
        if len(times) >= 5 and min(times) < HELP_LIMIT_S:
            break
    assert min(times) < HELP_LIMIT_S


def test_the_public_names_are_what_is_exported() -> None:
    import potluck

    names = getattr(potluck, "__all__", None)
    if names is None:
        pytest.skip("the public API is not there yet")
    assert len(names) == len(set(names))
    for name in names:
        assert getattr(potluck, name) is not None
    public = {name for name in dir(potluck) if not name.startswith("_")}
    submodules = {path.stem for path in SOURCE.iterdir()}
    assert public - submodules == set(names) - submodules - {"__version__"}


def test_the_picture_of_the_parts_has_all_of_them() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    picture = text.split("```")[1]
    parts = [path.parent.name for path in SOURCE.glob("*/__init__.py")]
    assert [part for part in parts if f" {part}/ " not in picture] == []


SAME_JOB = {
    "config": "settings and how they are resolved: of the backend, and of a run",
    "dask": "the fleet of a Dask cluster, and its public name `potluck.dask`",
    "host": "a file of cli/ has the name of its verb; hub/host.py is what that verb starts, beside hub/guest.py",
    "interface": "the contract that all files of its folder implement: codecs, and fleets",
    "ranks": "starts one command as several ranks: on this machine, and on emulated ones",
    "ray": "the fleet of a Ray cluster, and its public name `potluck.ray`",
    "state": "what is known of a run after its events: as the live view draws it, and as the page shows it",
}
"""The names that stand in two folders, and the one job that both files do."""


def test_files_of_one_name_do_one_job() -> None:
    """A new pair gets another name, or does the same job for two things: then that job is named here."""
    names = collections.Counter(path.stem for path in FILES if path.stem != "__init__")
    assert sorted(name for name, count in names.items() if count > 1) == sorted(SAME_JOB)


def test_the_list_of_files_is_made_anew() -> None:
    done = run_python(str(ROOT / "docs" / "generate.py"), "--check")
    assert done.returncode == 0, done.stderr


def test_a_verb_that_is_offered_exists() -> None:
    """Once its file is there, the attribute in the table must be too."""
    from potluck.cli._app import VERBS

    for name, verb in VERBS.items():
        module, _, attribute = verb.target.partition(":")
        path = SOURCE.parent / Path(*module.split(".")).with_suffix(".py")
        if path.exists():
            defined = {node.name for node in parsed(path).body if isinstance(node, ast.FunctionDef)}
            assert attribute in defined, f"potluck {name} needs {verb.target}"
