"""Bad input on the real command line: one clear error with a hint, status 2, no traceback, nothing left behind."""

from __future__ import annotations

import json
import socket
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from potluck.checked import to_json
from potluck.wire.frames import PROTOCOL
from support import sample_events as sample
from support.processes import Processes

BAD_INPUT = 2
DAMAGED = "A" * 80
ON_THEIR_OWN = ("no such recipe", "port taken", "damaged token", "absent script", "no such variable")
"""They get a process each, as from a shell. The others share one: importing torch takes seconds."""
ONE_AFTER_THE_OTHER = """
import contextlib, io, json, sys
from potluck.cli._app import run
results = {}
for name, words in json.load(open(sys.argv[1])).items():
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        status = run(words)
    results[name] = [status, out.getvalue(), err.getvalue()]
json.dump(results, open(sys.argv[2], "w"))
"""


@dataclass(frozen=True)
class Mistake:
    """What a person typed ({0} is a folder with FILES, {1} a port in use), and a part of what they must read."""

    words: str
    says: str
    env: dict[str, str] = field(default_factory=dict)


FILES = {
    "key.toml": "[run]\ncolour = 1\n",
    "table.toml": "[gptt]\ndepth = 1\n",
    "broken.toml": "depth = = 1\n",
    "loop.py": "import potluck\n",
    "script-run/manifest.json": to_json(sample.manifest(what="my.py")),
    "no-run/notes.txt": "not a run",
}
TRAIN = "train --guests 0 --steps 1 --depth 1 --runs {0}/runs"
HOST = "host --bind 127.0.0.1 --runs {0}/runs"
MISTAKES = {
    "no such recipe": Mistake("train gtp --runs {0}/runs", "gtp"),
    "no such data": Mistake(TRAIN + " --data {0}/nowhere.txt", "nowhere.txt"),
    "no such setting": Mistake(TRAIN + " --set dept=3", "dept"),
    "no value": Mistake(TRAIN + " --set warmup", "KEY=VALUE"),
    "wrong value": Mistake(TRAIN + " --set warmup=soon", "warmup"),
    "value out of range": Mistake(TRAIN + " --sequence 0", "sequence"),
    "no such key in TOML": Mistake(TRAIN + " --config {0}/key.toml", "colour"),
    "no such table in TOML": Mistake(TRAIN + " --config {0}/table.toml", "gptt"),
    "broken TOML": Mistake(TRAIN + " --config {0}/broken.toml", "broken.toml"),
    "absent TOML": Mistake(TRAIN + " --config {0}/absent.toml", "absent.toml"),
    "port taken": Mistake(HOST + " --port {1}", "port {1} is taken"),
    "no such address": Mistake("host --bind 203.0.113.7 --runs {0}/runs", "203.0.113.7"),
    "runs below a file": Mistake("train --guests 0 --runs {0}/loop.py/runs", "loop.py/runs"),
    "resume of no run": Mistake("train --resume {0}/no-run", "no-run is not a run"),
    "resume of nothing": Mistake("host --resume {0}/absent", "absent"),
    "resume of a script's run": Mistake("train --resume {0}/script-run", "script"),
    "damaged token": Mistake(f"join potluck{PROTOCOL}-{DAMAGED}", "damaged"),
    "token of another version": Mistake(f"join potluck9-{DAMAGED}", "protocol 9"),
    "no token": Mistake("join", "no token"),
    "absent token file": Mistake("join --token-file {0}/absent", "absent"),
    "absent script": Mistake("host {0}/absent.py --runs {0}/runs", "absent.py"),
    "a recipe's flag for a script": Mistake("host {0}/loop.py --depth 3 --runs {0}/runs", "--depth"),
    "no such device": Mistake(TRAIN + " --device cpuu", "cpuu"),
    "no such codec": Mistake(TRAIN + " --codec int5", "int5"),
    "no such variable": Mistake(TRAIN, "POTLUCK_DEVISE", {"POTLUCK_DEVISE": "cpu"}),
}


@dataclass(frozen=True)
class Ended:
    """How one of them ended."""

    status: int | None
    out: str
    err: str


@dataclass(frozen=True)
class Story:
    """All mistakes after their end, and where they might have left something."""

    ends: dict[str, Ended]
    folder: Path
    port: int


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Story:
    folder = tmp_path_factory.mktemp("mistakes")
    for name, text in FILES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    with socket.create_server(("127.0.0.1", 0)) as taken, Processes(folder / "logs") as processes:
        port = taken.getsockname()[1]
        words = {name: [w.format(folder, port) for w in m.words.split()] for name, m in MISTAKES.items()}
        own = {
            name: processes.potluck(*words.pop(name), name=str(number), env=MISTAKES[name].env)
            for number, name in enumerate(ON_THEIR_OWN)
        }
        todo, done = folder / "todo.json", folder / "done.json"
        todo.write_text(json.dumps(words))
        script = folder / "one_after_the_other.py"
        script.write_text(ONE_AFTER_THE_OTHER)
        processes.python(str(script), str(todo), str(done)).succeeds(deadline_s=120)
        ends = {name: Ended(*result) for name, result in json.loads(done.read_text()).items()}
        for name, process in own.items():
            ends[name] = Ended(process.wait(deadline_s=60), process.stdout(), process.stderr())
    return Story(ends, folder, port)


pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_explained(story: Story, name: str) -> None:
    end = story.ends[name]
    assert end.status == BAD_INPUT, end
    lines = end.err.splitlines()
    assert lines[0].startswith("error: ")
    assert MISTAKES[name].says.format(story.folder, story.port) in end.err
    assert sum(line.startswith("error: ") for line in lines) == 1
    assert any(line.startswith("hint: ") for line in lines)
    assert "Traceback" not in end.err
    assert end.out == "", "words about an error belong to stderr"


def test_no_run_folder_is_left_of_a_run_that_never_began(story: Story) -> None:
    runs = story.folder / "runs"
    left = [str(p.relative_to(runs)) for p in runs.rglob("*")] if runs.exists() else []
    assert not left


def test_a_secret_is_never_repeated(story: Story) -> None:
    for name in ("damaged token", "token of another version"):
        assert DAMAGED not in story.ends[name].err + story.ends[name].out
