"""The loggers themselves: one class for each library, which alone imports it, behind one small interface."""

from __future__ import annotations

import logging
import re
import shlex
import sys
import time
from collections.abc import Mapping
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any, Protocol

from potluck.loggers.logged import ParamValue

PROJECT = "potluck"
"""Name of the project or experiment, where a library wants one. The run's name is that of its folder."""


class Client(Protocol):
    """Writes one run. All methods are called by one thread, in this order; any may fail and may block."""

    @staticmethod
    def import_library() -> None:
        """Import the library; raises if it is not installed."""

    def begin(self, params: Mapping[str, ParamValue], step: int) -> str:
        """The training begins after `step` steps, above 0 in a resumed run. Returns a sentence that says where to
        look."""

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Values after `step` steps. Several calls may be about one step."""

    def close(self) -> None:
        """Write the values that are still in memory."""


class TensorBoardClient:
    """Event files in the run folder."""

    @staticmethod
    def import_library() -> None:
        import torch.utils.tensorboard  # noqa: F401

    def __init__(self, folder: Path) -> None:
        self._path = folder / "tensorboard"

    def begin(self, params: Mapping[str, ParamValue], step: int) -> str:
        from torch.utils.tensorboard import SummaryWriter

        # Steps after the checkpoint are made again: the first points of these are hidden.
        purge = {"purge_step": step + 1} if step else {}
        self._writer: Any = SummaryWriter(str(self._path), flush_secs=10, **purge)
        rows = "".join(f"| {name} | {str(value).replace('|', '&#124;')} |\n" for name, value in params.items())
        self._writer.add_text("parameters", f"| parameter | value |\n|---|---|\n{rows}", step)
        return f"tensorboard --logdir {shlex.quote(str(self._path))}"

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        # One record for a step, where add_scalar() makes one for each value and takes several times as long. The
        # training needs the interpreter, too.
        made = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._writer.file_writer.add_summary(Summary(value=made), step)

    def close(self) -> None:
        self._writer.close()


class WandbClient:
    """A run on the W&B server; without a login, files in the run folder that `wandb sync` uploads."""

    @staticmethod
    def import_library() -> None:
        import wandb  # noqa: F401

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def begin(self, params: Mapping[str, ParamValue], step: int) -> str:
        import wandb

        self._run = run = wandb.init(
            project=wandb.setup().settings.project or PROJECT,
            id=re.sub(r"[^\w-]", "-", self._folder.name),
            name=self._folder.name,
            dir=str(self._folder),
            config=dict(params),
            mode=_wandb_mode(wandb),
            resume="allow",
            settings=wandb.Settings(console="off", silent=True),
        )
        # An own step: W&B drops what comes for an earlier step than its last, as after a resume.
        run.define_metric("*", step_metric="train/step")
        if run.offline:
            return f"offline; upload with: wandb sync {shlex.quote(str(Path(run.dir).parent))}"
        return str(run.url)

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({"train/step": step, **values})

    def close(self) -> None:
        self._run.finish()


def _wandb_mode(wandb: Any) -> str | None:
    """Offline without a login, so that W&B does not ask for one. WANDB_MODE has priority if it is set."""
    if wandb.setup().settings.mode != "online":
        return None
    try:
        there = wandb.login(prompt=False, verify=False)
    except TypeError:  # before `prompt` was added
        there = bool(wandb.api.api_key)
    return "online" if there else "offline"


_MLFLOW_MOST = 1000
"""The most values in one call."""


class MlflowClient:
    """A run in MLflow's tracking store; if none is set, in an SQLite file in the run folder."""

    @staticmethod
    def import_library() -> None:
        import mlflow

        if not mlflow.is_tracking_uri_set():
            import sqlalchemy  # noqa: F401  (mlflow-skinny has none: enough only where a server is set)

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def begin(self, params: Mapping[str, ParamValue], step: int) -> str:
        import mlflow
        from mlflow.entities import Metric, Param
        from mlflow.tracking import MlflowClient as Tracking

        file = self._folder.resolve() / "mlflow.db"
        uri = mlflow.get_tracking_uri() if mlflow.is_tracking_uri_set() else f"sqlite:///{file.as_posix()}"
        self._waiting: list[Metric] = []
        self._sent_s = time.monotonic()
        logging.getLogger("mlflow.store.db").setLevel(logging.WARNING)  # the steps that make a new file
        self._tracking = Tracking(tracking_uri=uri)
        known = self._tracking.get_experiment_by_name(PROJECT)
        experiment = known.experiment_id if known else self._tracking.create_experiment(PROJECT)
        name = self._folder.name
        found = self._tracking.search_runs([experiment], f"tags.`mlflow.runName` = '{name}'", max_results=1)
        run = found[0] if found else self._tracking.create_run(experiment, run_name=name)
        self._id = run.info.run_id
        if found:  # the run is resumed; MLflow refuses other values of its parameters
            self._tracking.update_run(self._id, status="RUNNING")
        else:
            entries = [Param(_mlflow_name(name), str(value)[:500]) for name, value in params.items()]
            self._tracking.log_batch(self._id, params=entries)
        return f"mlflow ui --backend-store-uri {shlex.quote(uri)}" if "://" in uri and uri[:4] != "http" else uri

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now_ms = int(time.time() * 1000)
        self._waiting += [Metric(_mlflow_name(name), value, now_ms, step) for name, value in values.items()]
        # A call takes 50 ms with SQLite, however much it writes.
        if time.monotonic() - self._sent_s > 1.0 or len(self._waiting) > _MLFLOW_MOST // 2:
            self._send()

    def _send(self) -> None:
        entries, self._waiting = self._waiting, []
        for begin in range(0, len(entries), _MLFLOW_MOST):
            self._tracking.log_batch(self._id, metrics=entries[begin : begin + _MLFLOW_MOST])
        self._sent_s = time.monotonic()

    def close(self) -> None:
        self._send()
        self._tracking.set_terminated(self._id)


def _mlflow_name(name: str) -> str:
    """A name with only characters that MLflow accepts; a machine's name may have others."""
    return re.sub(r"[^\w\-. /]", "_", name, flags=re.ASCII)


class TrackioClient:
    """A run in Trackio's own store on this machine, where its dashboard looks."""

    @staticmethod
    def import_library() -> None:
        import trackio  # noqa: F401

    def __init__(self, folder: Path) -> None:
        self._name = folder.name

    def begin(self, params: Mapping[str, ParamValue], step: int) -> str:
        import trackio

        with redirect_stdout(sys.stderr):  # it prints, and stdout may have the events of --json
            self._run = trackio.init(PROJECT, self._name, config=dict(params), resume="allow", embed=False)
        return f"trackio show --project {PROJECT}"

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        import trackio

        with redirect_stdout(sys.stderr):
            trackio.finish()
