"""Writes an imagined run to one logger, by its real library, and prints what that library reads back as JSON.

python logger_job.py NAME FOLDER. A process of its own: these libraries leave threads and processes behind.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

Series = dict[str, list[list[float]]]


def written(name: str, folder: Path) -> list[str]:
    """Steps 1 to 4, then a resume after step 3; what was noted meanwhile."""
    import sample_events as sample  # it lies beside this script

    from potluck.loggers.writing import loggers
    from potluck.spec import events as ev

    notes: list[str] = []
    begin = loggers((name,))  # type: ignore[arg-type]
    assert begin is not None
    for first, last, resumed in ((1, 4, None), (4, 5, 3)):
        thread = begin(folder, sample.manifest(), notes.append)
        thread.event(sample.run_start(resumed_from=resumed))
        for number in range(first, last + 1):
            thread.event(sample.step(number))
            thread.event(ev.Logged(step=number, values={"accuracy": number / 10, "broken": None}))
        thread.close()
    return notes


def of_wandb(folder: Path) -> tuple[Series, dict[str, Any]]:
    """From the transaction logs of the offline runs: records of protobuf in LevelDB's log format."""
    import wandb
    from wandb.proto.wandb_internal_pb2 import Record

    wandb.teardown()  # the end of a run does not wait until its service process has written the file
    series: Series = {}
    params: dict[str, Any] = {}
    for path in sorted(folder.glob("wandb/offline-run-*/run-*.wandb")):
        data, at, whole = path.read_bytes(), 7, b""
        while at < len(data):
            length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
            whole += data[at + 7 : at + 7 + length]
            at += 7 + length
            if kind in (1, 4):  # whole, or the last part
                record, whole = Record.FromString(whole), b""
                row = {i.key or i.nested_key[0]: json.loads(i.value_json) for i in record.history.item}
                for name, value in row.items():
                    series.setdefault(name, []).append([row["train/step"], value])
                params |= {i.key: json.loads(i.value_json) for i in record.run.config.update}
    return series, params


def of_mlflow(folder: Path) -> tuple[Series, dict[str, Any]]:
    from mlflow.tracking import MlflowClient

    client = MlflowClient()
    experiment = client.get_experiment_by_name("potluck")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.run_name, run.info.status) == (folder.name, "FINISHED")
    history = {name: client.get_metric_history(run.info.run_id, name) for name in run.data.metrics}
    return {name: [[m.step, m.value] for m in found] for name, found in history.items()}, run.data.params


def of_trackio(folder: Path) -> tuple[Series, dict[str, Any]]:
    import trackio
    from trackio.sqlite_storage import SQLiteStorage

    (run,) = trackio.Api().runs("potluck")
    series: Series = {}
    for row in SQLiteStorage.get_logs("potluck", folder.name):
        for name, value in row.items():
            if isinstance(value, float):
                series.setdefault(name, []).append([row["step"], value])
    return series, dict(run.config or {})


def main() -> None:
    name, folder = sys.argv[1], Path(sys.argv[2])
    os.environ.update(
        HOME=str(folder),
        MLFLOW_TRACKING_URI=(folder / "store").as_uri(),
        MLFLOW_ALLOW_FILE_STORE="true",
        TRACKIO_DIR=str(folder / "trackio"),
    )
    folder.mkdir()
    notes = written(name, folder)
    series, params = {"wandb": of_wandb, "mlflow": of_mlflow, "trackio": of_trackio}[name](folder)
    print(json.dumps({"notes": notes, "series": series, "params": params}))


if __name__ == "__main__":
    main()
