"""Runs the trials of `potluck sweep`: on the cluster that is there, or on one that is started here."""

from __future__ import annotations

import contextlib
import itertools
import logging
import secrets
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from potluck.errors import MachineError, MissingModuleError, NetworkError
from potluck.fleet.script import Script
from potluck.fleet.sealed import KeyPair, need_library
from potluck.sweep.spec import MACHINE, SweepWork, Trial, TrialResult

if TYPE_CHECKING:
    from distributed import Client

CONNECT_S = 10.0
LOCAL = "local"
"""Instead of an address: a cluster of this machine alone, whatever else is there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepSettings:
    """What `potluck sweep` was told."""

    script: Script
    trials: Sequence[Trial]
    folder: Path
    """For logs and the result."""
    storage: Path
    """For the checkpoints of this sweep alone."""
    address: str | None
    """Of the cluster; None: the one that is there, else one that is started here."""
    json_option: str | None
    checkpoint_every: int
    share: bool
    tell: Callable[[str], None]

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


def need_engine(engine: str) -> None:
    """Raises MissingModuleError where what the engine needs is not installed."""
    if engine == "tune":
        from potluck.sweep.tune import need_tune

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
    """Make this folder, or one with a number behind its name where another sweep has it."""
    wanted.parent.mkdir(parents=True, exist_ok=True)
    for number in itertools.count(1):
        folder = wanted if number == 1 else wanted.with_name(f"{wanted.name}-{number}")
        with contextlib.suppress(FileExistsError):
            folder.mkdir()
            return folder
    raise AssertionError("itertools.count() ended")


def own_storage(storage: Path | None, folder: Path) -> Path:
    """The folder of one sweep's checkpoints: in a storage, which many sweeps use from many machines, a new one."""
    if storage is None:
        return folder / "checkpoints"
    return storage.absolute() / f"{folder.name}-{secrets.token_hex(4)}"


def dask_results(settings: SweepSettings) -> Iterator[TrialResult]:
    """The results of a sweep on Dask, as they come."""
    from potluck.sweep.dask import DaskSweep

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
    """Ctrl-C in a call to Dask makes tornado log an error of Dask's own, a name that is not set yet."""
    logger = logging.getLogger("tornado.application")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(before)


@contextlib.contextmanager
def _no_interrupt() -> Iterator[None]:
    """Processes that are started meanwhile ignore Ctrl-C, which a terminal sends to them too."""
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

    from potluck.sweep.tune import sweep_results

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
