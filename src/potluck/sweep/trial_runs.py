"""Runs the trials of `potluck sweep`, on an existing cluster or on one that is started here."""

from __future__ import annotations

import contextlib
import itertools
import logging
import secrets
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from potluck import checked
from potluck.bounds import Finite, Many, Text
from potluck.errors import MachineError, MissingModuleError, NetworkError, ScriptError
from potluck.fleet.script import Script
from potluck.fleet.sealed import KeyPair, need_library
from potluck.sweep.spec import MACHINE, SweepWork, Trial, TrialResult, best_of, ranked

if TYPE_CHECKING:
    from distributed import Client

CONNECT_S = 10.0
LOCAL = "local"
"""Used instead of an address: a cluster of this machine alone, even if it belongs to another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepSettings:
    """The arguments of `potluck sweep`."""

    script: Script
    trials: Sequence[Trial]
    folder: Path
    """Folder for logs and the result."""
    storage: Path
    """Folder for the checkpoints of this sweep alone."""
    address: str | None
    """Address of the cluster; None: an existing one, else one that is started here."""
    json_option: str | None
    checkpoint_every: int
    share: bool
    tell: Callable[[str], None]
    engine: str = "tune"
    """tune or dask."""
    metric: str = "loss"
    """What decides which trial is best, and `mode`, whether its least or its largest value."""
    mode: str = "min"

    def work(self, public: bytes) -> SweepWork:
        return SweepWork(
            names=self.script.names,
            contents=self.script.contents,
            arguments=self.script.arguments,
            json_option=self.json_option,
            checkpoint_every=self.checkpoint_every,
            storage=str(self.storage),
            public=public,
        )


class SweepRecord(Struct, frozen=True, kw_only=True):
    """The contents of sweep.json."""

    seconds: Finite
    best: Text | None
    trials: Many[TrialResult]
    """The best first."""
    metric: Text
    mode: Text
    engine: Text


def run_sweep(settings: SweepSettings) -> SweepRecord:
    """Run all trials, and write the result into the sweep's folder.

    Raises:
        ScriptError: all trials failed.
    """
    metric, mode, tell = settings.metric, settings.mode, settings.tell
    began, results = time.monotonic(), list[TrialResult]()
    for result in dask_results(settings) if settings.engine == "dask" else tune_results(settings):
        results.append(result)
        if settings.engine == "dask":  # Tune gives all results at its end, and tells of each before
            how, value = "failed" if result.error else "ended", result.metrics.get(metric)
            with_value = "" if value is None else f" with {metric} {value:.6g}"
            tell(f"{result.trial} {how}{with_value} ({len(results)} of {len(settings.trials)})")
    if all(result.error for result in results):
        raise ScriptError(f"all {len(results)} trials failed; the first: {results[0].error}")
    best = best_of(results, metric, mode)
    record = SweepRecord(
        seconds=time.monotonic() - began,
        best=best.trial if best else None,
        trials=tuple(ranked(results, metric, mode)),
        metric=metric,
        mode=mode,
        engine=settings.engine,
    )
    (settings.folder / "sweep.json").write_text(checked.to_json(record, indent=2) + "\n", encoding="utf-8")
    return record


def need_engine(engine: str) -> None:
    """Raises MissingModuleError if the engine's requirements are not installed."""
    if engine == "tune":
        from potluck.sweep.ray_trials import need_tune

        need_tune()
        return
    try:
        import distributed  # noqa: F401
    except ImportError:
        raise MissingModuleError(
            "--engine dask needs distributed, which is not installed", hint="pip install -e '.[dask]'"
        ) from None
    need_library("dask")


def new_folder(wanted: Path) -> Path:
    """Make this folder, or one with a number after its name if another sweep has it."""
    wanted.parent.mkdir(parents=True, exist_ok=True)
    for number in itertools.count(1):
        folder = wanted if number == 1 else wanted.with_name(f"{wanted.name}-{number}")
        with contextlib.suppress(FileExistsError):
            folder.mkdir()
            return folder
    raise AssertionError("itertools.count() ended")


def own_storage(storage: Path | None, folder: Path) -> Path:
    """Make a new folder for one sweep's checkpoints in a storage, which sweeps of many machines may share."""
    if storage is None:
        return folder / "checkpoints"
    return storage.absolute() / f"{folder.name}-{secrets.token_hex(4)}"


def dask_results(settings: SweepSettings) -> Iterator[TrialResult]:
    """The results of a sweep on Dask, as they come."""
    from potluck.sweep.dask_trials import DaskSweep

    with _dask(settings) as client:
        keys = KeyPair()
        sweep = DaskSweep(
            client,
            settings.work(keys.public),
            settings.trials,
            keys,
            logs=settings.folder,
            share=settings.share,
            tell=settings.tell,
        )
        yield from sweep.run()


@contextlib.contextmanager
def _dask(settings: SweepSettings) -> Iterator[Client]:
    from dask import config
    from distributed import Client, LocalCluster

    address = settings.address or config.get("scheduler-address", None) or LOCAL
    if address == LOCAL:
        settings.tell("a local Dask cluster is started, of this machine alone")
        # Without TLS every user of this machine could run code in the worker.
        tls: dict[str, Any] = {"security": True, "protocol": "tls", "dashboard_address": "127.0.0.1:0"}
        with _no_interrupt():
            cluster = LocalCluster(n_workers=1, **tls)
        with _no_tracebacks(), cluster, Client(cluster) as client:
            yield client
        return
    try:
        client = Client(address, timeout=CONNECT_S)
    except (OSError, TimeoutError, ValueError) as error:
        raise NetworkError(
            f"no Dask scheduler answers at {address}: {error}", hint="start one with: dask scheduler"
        ) from None
    with client:
        yield client


@contextlib.contextmanager
def _no_tracebacks() -> Iterator[None]:
    """Suppress an error that tornado logs after Ctrl-C in a call to Dask, about a name of Dask's that is not set
    yet."""
    logger = logging.getLogger("tornado.application")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(before)


@contextlib.contextmanager
def _no_interrupt() -> Iterator[None]:
    """Inside, started processes ignore Ctrl-C, which a terminal also sends to them."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def tune_results(settings: SweepSettings) -> Iterator[TrialResult]:
    """The results of a sweep with Ray Tune, when all trials have ended."""
    import ray

    from potluck.sweep.ray_trials import sweep_results

    _connect_ray(settings)
    try:
        keys = KeyPair()
        yield from sweep_results(settings.work(keys.public), settings.trials, keys, settings)
    finally:
        ray.shutdown()


def _connect_ray(settings: SweepSettings) -> None:
    import ray

    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "warning"}
    if settings.address != LOCAL:
        try:
            ray.init(address=settings.address or "auto", **quiet)
            return
        except Exception as error:  # ConnectionError, RuntimeError, ValueError: each for several reasons
            if settings.address is not None or not isinstance(error, ConnectionError):
                raise NetworkError(
                    f"no Ray cluster at {settings.address or 'auto'}: {_first_line(error)}",
                    hint="start one with: ray start --head; --address local uses this machine alone",
                ) from None
    settings.tell("a local Ray cluster is started, of this machine alone")
    try:
        ray.init(address=LOCAL, resources={MACHINE: 1}, **quiet)
    except Exception as error:
        raise MachineError(
            f"Ray cannot start on this machine: {_first_line(error)}",
            hint="look at the logs in /tmp/ray/session_latest/logs; --engine dask needs no Ray",
        ) from None


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
