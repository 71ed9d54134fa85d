"""Counts what is unpickled in every Python process that has this file's folder `audit` first on its path.

`watched(folder)` gives the environment for that: each process then writes a line for every pickle, marshal or torch
load to a file in `folder`, with who asked for it. Python's own reading of .pyc files is none of them. It must not
know what those processes do.

Two ways to see one thing: Python's audit events (pickle.find_class, marshal.loads), which cannot be avoided but see
a pickle only when it names a class, and counting in the place of pickle's own functions, which see any.
"""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterator
from pathlib import Path

AUDIT = '''\
"""Read by Python when it starts: counts what is unpickled (see tests/support/pickle_watch.py)."""

import os
import sys
import threading


def _install(log):
    import _pickle
    import marshal
    import pickle

    inside = threading.local()

    def asked_by():
        frame, names = sys._getframe(2), []
        while frame is not None and len(names) < 6:
            names.append(f"{frame.f_code.co_filename}:{frame.f_lineno}")
            frame = frame.f_back
        return " < ".join(names)

    def tell(what):
        with open(log, "a", encoding="utf-8") as file:
            file.write(f"{os.getpid()} {what} {asked_by()}\\n")

    def hook(event, args):
        # Python tells of each import, file and attribute as well: those are passed over first.
        if event not in ("pickle.find_class", "marshal.loads", "marshal.load") or getattr(inside, "busy", False):
            return
        if event == "pickle.find_class" or not reads_code():
            inside.busy = True
            try:
                tell(event)
            finally:
                inside.busy = False

    def reads_code():
        frame = sys._getframe(2)
        return frame is not None and "importlib" in frame.f_code.co_filename

    def counted(function, name):
        def call(*args, **kwargs):
            tell(name)
            return function(*args, **kwargs)

        return call

    def counted_class(kind, name):
        class Counted(kind):
            def __init__(self, *args, **kwargs):
                tell(name)
                super().__init__(*args, **kwargs)

        Counted.__name__ = Counted.__qualname__ = kind.__name__
        return Counted

    for module in (pickle, _pickle):
        for name in ("load", "loads"):
            setattr(module, name, counted(getattr(module, name), f"{module.__name__}.{name}"))
        module.Unpickler = counted_class(module.Unpickler, f"{module.__name__}.Unpickler")
    pickle._Unpickler = counted_class(pickle._Unpickler, "pickle._Unpickler")
    sys.addaudithook(hook)
    with open(log, "a", encoding="utf-8") as file:
        file.write(f"{os.getpid()} watched {' '.join(sys.orig_argv[1:4])}\\n")


if os.environ.get("PICKLE_WATCH"):
    _install(os.environ["PICKLE_WATCH"])
'''

FORBIDDEN_MODULES = {
    "pickle",
    "_pickle",
    "cPickle",
    "dill",
    "cloudpickle",
    "marshal",
    "shelve",
    "joblib",
    "copyreg",
}
FORBIDDEN_CALLS = {"eval", "torch.load", "torch.save", "np.load", "numpy.load", "torch.jit.load", "pd.read_pickle"}
LAST_NAMES = {name.rpartition(".")[2] for name in FORBIDDEN_CALLS}
FORBIDDEN_NAMES = {"allow_pickle", "weights_only", "Unpickler", "__reduce__", "__reduce_ex__", "__setstate__"}


def watched(folder: Path) -> dict[str, str]:
    """The environment under which every Python process is watched, and children of it too."""
    place = folder / "audit"
    place.mkdir(parents=True, exist_ok=True)
    (place / "sitecustomize.py").write_text(AUDIT, encoding="utf-8")
    path = os.pathsep.join(filter(None, (str(place), os.environ.get("PYTHONPATH", ""))))
    return {"PYTHONPATH": path, "PICKLE_WATCH": str(folder / "pickle.log")}


def seen(folder: Path) -> tuple[int, list[str]]:
    """How many processes were watched, and every load that one of them made."""
    file = folder / "pickle.log"
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    loads = [line for line in lines if line.split(" ", 2)[1] != "watched"]
    return len(lines) - len(loads), loads


def suspicions(source: Path) -> Iterator[str]:
    """Every place in the source that could pickle or evaluate something."""
    words = re.compile("|".join(map(re.escape, FORBIDDEN_MODULES | LAST_NAMES | FORBIDDEN_NAMES)))
    for path in sorted(source.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if not words.search(text):
            continue  # to parse all files would take 2 s
        for node in ast.walk(ast.parse(text, str(path))):
            for what in _suspected(node):
                yield f"{path.relative_to(source)}:{getattr(node, 'lineno', 0)} {what}"


def _suspected(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Import | ast.ImportFrom):
        names = [a.name for a in node.names] if isinstance(node, ast.Import) else [node.module or ""]
        yield from (f"imports {name}" for name in names if name.split(".")[0] in FORBIDDEN_MODULES)
    elif isinstance(node, ast.Call):
        # Its last name first: to write out every call would take seconds.
        last = getattr(node.func, "attr", getattr(node.func, "id", ""))
        if last in LAST_NAMES and ast.unparse(node.func) in FORBIDDEN_CALLS:
            yield f"calls {ast.unparse(node.func)}"
    elif isinstance(node, ast.keyword) and node.arg in FORBIDDEN_NAMES:
        yield f"says {node.arg}"
    elif isinstance(node, ast.Attribute) and node.attr in FORBIDDEN_NAMES:
        yield f"uses {node.attr}"
    elif isinstance(node, ast.FunctionDef) and node.name in FORBIDDEN_NAMES:
        yield f"defines {node.name}"
