"""--log: what loggers are given, by their real libraries, and that none can stop or slow a run."""

from __future__ import annotations

import importlib.util
import json
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import potluck
from potluck.cli import main
from potluck.errors import ConfigError, MissingModuleError
from potluck.hosting import HostedRun
from potluck.loggers.logged import params_of, scalars_of
from potluck.loggers.writing import LoggerThread, loggers
from potluck.spec import events as ev
from potluck.spec.config import RunConfig
from potluck.spec.manifest import RecipeEntry
from support import sample_events as sample
from support.processes import Processes

JOB = Path(__file__).resolve().parents[1] / "support" / "logger_job.py"
STEP = {
    "train/loss": 4.0,
    "speed/samples_per_s": 32.0,
    "speed/tokens_per_s": 8192.0,
    "speed/speedup": 1.25,
    "speed/step_s": 1.0,
    "share/tower": 0.75,
    "rate/tower": 24.0,
    "share/laptop": 0.25,
    "rate/laptop": 8.0,
}


def series_in(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard itself reads, and the table of parameters under its name."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(folder))
    read.Reload()
    found = {name: [(e.step, round(e.value, 5)) for e in read.Scalars(name)] for name in read.Tags()["scalars"]}
    table = read.Tensors("parameters/text_summary")[0].tensor_proto.string_val[0].decode()
    return {**found, table: []}


def tensorboard(folder: Path, notes: list[str]) -> LoggerThread:
    begin = loggers(("tensorboard",))
    assert begin is not None
    thread = begin(folder, sample.manifest(), notes.append)
    assert isinstance(thread, LoggerThread)
    return thread


class Client:
    """Keeps what it is given; blocks in `scalars` until `free` is set."""

    def __init__(self) -> None:
        self.seen: list[Any] = []
        self.free = threading.Event()
        self.free.set()

    @staticmethod
    def import_library() -> None: ...

    def begin(self, params: Mapping[str, Any], step: int) -> str:
        self.seen.append(("begin", step))
        return "here"

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        self.free.wait(20)
        self.seen.append((step, dict(values)))

    def close(self) -> None:
        self.seen.append("close")


class Broken(Client):
    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        raise ConnectionError(f"no route at step {step}")

    def close(self) -> None:
        raise OSError("gone")


# -- what they are given --------------------------------------------------------------------------------


def test_a_step_has_loss_speed_and_each_machines_share_and_rate() -> None:
    assert scalars_of(sample.step(1)) == STEP
    unknown = sample.step(1, loss=None, speedup=None, tokens_per_s=None, machines=(sample.host(0, rate=None),))
    assert scalars_of(unknown) == {"speed/samples_per_s": 32.0, "speed/step_s": 1.0}
    assert scalars_of(ev.Logged(step=3, values={"accuracy": 0.5, "broken": None})) == {"accuracy": 0.5}


def test_parameters_are_the_settings_the_versions_and_the_models_size() -> None:
    manifest = sample.manifest(
        what="gpt",
        config=RunConfig(codec="int8", log=("wandb",)),
        recipe=RecipeEntry(name="gpt", config={"depth": 4, "data": None}),
        versions={"torch": "2.13.0"},
    )
    params = params_of(manifest, sample.run_start())
    assert {"what": "gpt", "device": "cuda", "global_batch": 32, "parameters": 10_900_000}.items() <= params.items()
    assert {"run/codec": "int8", "recipe/depth": 4, "versions/torch": "2.13.0"}.items() <= params.items()
    assert not {"recipe/data", "run/device"} & set(params), "what is not set is left out"
    assert all(isinstance(value, str | int | float) for value in params.values())


def test_what_the_script_logs_before_its_loop_follows_the_parameters() -> None:
    client = Client()
    thread = LoggerThread({"it": client}, sample.manifest(), lambda text: None)
    thread.event(ev.Logged(step=0, values={"words": 7.0}))
    thread.event(sample.run_start(resumed_from=3))
    thread.event(ev.RunNote(text="nothing to draw"))
    thread.event(sample.step(4))
    thread.close()
    assert client.seen == [("begin", 3), (0, {"words": 7.0}), (4, {**STEP, "train/loss": 1.0}), "close"]


def test_a_run_that_never_began_writes_nothing(tmp_path: Path) -> None:
    notes: list[str] = []
    tensorboard(tmp_path, notes).close()
    assert (notes, list(tmp_path.iterdir())) == ([], [])


# -- the libraries --------------------------------------------------------------------------------------


def test_tensorboard_reads_the_run_and_its_resumption(tmp_path: Path) -> None:
    notes: list[str] = []
    for steps, resumed in (((1, 2, 3), None), ((3, 4), 2)):
        thread = tensorboard(tmp_path, notes)
        thread.event(sample.run_start(resumed_from=resumed))
        for number in steps:
            thread.event(sample.step(number))
            thread.event(ev.Logged(step=number, values={"accuracy": number / 4}))
        thread.close()
    found = series_in(tmp_path / "tensorboard")
    assert found["train/loss"] == [(1, 4.0), (2, 3.0), (3, 2.0), (4, 1.0)], "step 3 is there once"
    assert found["share/laptop"] == [(number, 0.25) for number in (1, 2, 3, 4)]
    assert found["accuracy"] == [(1, 0.25), (2, 0.5), (3, 0.75), (4, 1.0)]
    assert set(STEP) < set(found)
    (table,) = [name for name in found if "versions/potluck" in name]
    assert "global_batch" in table
    assert notes == [f"tensorboard: tensorboard --logdir {tmp_path / 'tensorboard'}"] * 2


@pytest.mark.slow
@pytest.mark.parametrize("name", ["wandb", "mlflow", "trackio"])
def test_the_other_libraries_read_the_run_too(tmp_path: Path, name: str) -> None:
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed: pip install -e '.[{name}]'")
    with Processes(tmp_path / "out") as processes:
        job = processes.python(str(JOB), name, str(tmp_path / "a run"))
        out = json.loads(job.succeeds(deadline_s=100))
    series, params = out["series"], out["params"]
    repeated = [[1, 4.0], [2, 3.0], [3, 2.0], [4, 1.0], [4, 1.0], [5, 0.0]]
    assert series["train/loss"] == repeated, "a resumed run is continued"
    assert [value for _, value in series["share/laptop"]] == [0.25] * 6
    assert series["accuracy"][-1] == [5, 0.5]
    assert "broken" not in series
    assert set(STEP) < set(series)
    assert str(params["global_batch"]) == "32"
    assert {"versions/potluck", "run/codec"} < set(params)
    assert [note.split(":")[0] for note in out["notes"]] == [name] * 2, "where to look, once for each start"


# -- what goes wrong ------------------------------------------------------------------------------------


def test_a_missing_library_is_an_error_before_the_run_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)  # as if it were not installed
    with pytest.raises(MissingModuleError, match="--log wandb") as caught:
        potluck.start(host=True, log=("tensorboard", "wandb"), script=JOB, runs=tmp_path / "runs", view="quiet")
    assert caught.value.hint == "pip install -e '.[wandb]'"
    with pytest.raises(SystemExit, match="2"):
        main(["train", "--log", "wandb", "--runs", str(tmp_path / "runs")])
    assert "pip install -e '.[wandb]'" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_an_unknown_logger_and_one_for_a_run_alone_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="log"):
        potluck.start(host=True, log="tensorbord", script=JOB, runs=tmp_path)
    with pytest.raises(ConfigError, match="takes log only with host=True"):
        potluck.start(log="tensorboard")


def test_a_logger_that_fails_is_one_note_and_the_others_go_on() -> None:
    notes: list[str] = []
    good = Client()
    thread = LoggerThread({"bad": Broken(), "good": good}, sample.manifest(), notes.append)
    thread.event(sample.run_start())
    for number in (1, 2, 3):
        thread.event(sample.step(number))
    thread.close()
    assert notes[:2] == ["bad: here", "good: here"]
    assert len(notes) == 3
    assert "--log bad failed (ConnectionError: no route at step 1); the run continues" in notes[2]
    assert [seen[0] for seen in good.seen] == ["begin", 1, 2, 3, "c"]


def test_no_step_waits_for_a_logger_that_stands_still() -> None:
    notes: list[str] = []
    client = Client()
    client.free.clear()
    thread = LoggerThread({"it": client}, sample.manifest(), notes.append, most=5)
    thread.event(sample.run_start())
    for number in range(1, 20):
        thread.event(sample.step(number))  # would wait 20 s
    thread.close(patience_s=0.01)
    assert "it: not finished after 0 s" in notes[-1]
    client.free.set()
    thread.close()
    written = [seen[0] for seen in client.seen if isinstance(seen[0], int)]
    assert written[:2] == [1, 2]
    assert len(written) < 8, "what waits is bounded"
    assert notes[-1] == f"{19 - len(written)} values are missing in it: it was too slow for the run"


# -- a run ----------------------------------------------------------------------------------------------


@pytest.fixture
def hosted(tmp_path: Path) -> Callable[..., HostedRun]:
    def begin(**more: Any) -> HostedRun:
        script = tmp_path / "job.py"
        script.write_text("import potluck\n")
        run = potluck.start(
            host=True, script=script, runs=tmp_path / "runs", bind="127.0.0.1", device="cpu", view="plain", **more
        )
        assert isinstance(run, HostedRun)
        return run

    return begin


def trained(run: potluck.Run) -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    samples = [torch.ones(2)] * 8
    for step in run.steps(model, optimizer, samples, global_batch=4, steps=3, micro_batch=2):
        for batch in step:
            step.backward(model(batch).mean())
        run.log(twice=2.0 * step.index)


def test_a_hosted_run_writes_its_series_into_its_folder(
    hosted: Callable[..., HostedRun], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trained(hosted(name="tower", log="tensorboard"))
    (folder,) = (tmp_path / "runs").iterdir()
    found = series_in(folder / "tensorboard")
    assert [step for step, _ in found["train/loss"]] == [1, 2, 3]
    assert found["share/tower"] == [(1, 1.0), (2, 1.0), (3, 1.0)]
    assert [value for _, value in found["twice"]] == [0.0, 2.0, 4.0]
    assert capsys.readouterr().out.count(f"tensorboard --logdir {folder / 'tensorboard'}") == 1
    assert json.loads((folder / "manifest.json").read_text())["config"]["log"] == ["tensorboard"]


def test_a_run_whose_logger_fails_is_finished(
    hosted: Callable[..., HostedRun], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = hosted(log="tensorboard")
    (folder,) = (tmp_path / "runs").iterdir()
    (folder / "tensorboard").write_text("in the way")
    trained(run)
    end = json.loads((folder / "events.jsonl").read_text().splitlines()[-1])
    assert (end["event"], end["reason"], end["step"]) == ("run_end", "finished", 3)
    assert capsys.readouterr().out.count("--log tensorboard failed (") == 1
