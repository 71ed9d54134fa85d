"""A sweep on a Dask cluster: each trial is a Dask task on one worker; idle workers help.

The task runs as long as the trial's process. The driver polls its worker every second. A worker that was not polled
for SILENT_S ends its trials and guests.
"""

from __future__ import annotations

import queue
import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import msgspec

from potluck.errors import MachineError, PotluckError
from potluck.fleet.dask import DaskFleet
from potluck.fleet.kept import SILENT_S
from potluck.fleet.sealed import KeyPair
from potluck.sweep.helpers import Helpers
from potluck.sweep.sharing import helping, hosts_next
from potluck.sweep.spec import MOST_STARTS, SweepWork, Trial, TrialNews, TrialResult
from potluck.sweep.trial import TrialProcess, handed_over, kept_files

if TYPE_CHECKING:
    from distributed import Client, Future

POLL_S = 0.5
LOST_S = 8.0
"""A worker that has not answered for this long has lost its trial."""

_here: dict[str, list[float]] = {}
_news: dict[str, TrialNews] = {}
"""In a worker's process, by the trial's key: the time of the last poll, and the trial's state."""


def host_trial(work: SweepWork, trial: Trial, key: str, name: str, bind: str | None, threads: int) -> TrialNews:
    """Runs as a Dask task, until the trial has ended."""
    storage = Path(work.storage) / trial.id
    _here[key] = [time.monotonic()]
    start_from = handed_over(storage, work.origin(trial))
    process = TrialProcess(work, trial, name=name, start_from=start_from, bind=bind, threads=threads)
    try:
        while (news := process.news()).status is None:
            process.checkpoint_to(storage)
            process.prepare_next()
            _news[key] = news
            if time.monotonic() - _here[key][0] > SILENT_S:
                raise MachineError("this trial is no longer wanted")
            time.sleep(0.2)
        process.checkpoint_to(storage)
        process.keep_files(storage)
        return news
    finally:
        process.close()
        del _here[key]
        _news.pop(key, None)


def ask_news(key: str) -> TrialNews | None:
    """Runs on a worker: the state of a trial; None if it is not running there."""
    if key in _here:
        _here[key][0] = time.monotonic()
    return _news.get(key)


def forget(key: str) -> None:
    """Runs on a worker: end the trial."""
    if key in _here:
        _here[key][0] = -SILENT_S


class RunningTrial:
    """One trial on one worker, from the driver's view; its thread ends with the trial."""

    def __init__(self, sweep: DaskSweep, trial: Trial, machine: str, address: str) -> None:
        self.trial, self.machine, self.key = trial, machine, f"{trial.id}-{uuid.uuid4().hex[:8]}"
        self.news = TrialNews()
        self.began = time.monotonic()
        self._sweep, self._address = sweep, address
        self.thread = threading.Thread(target=self._follow, name=f"potluck-{trial.id}", daemon=True)
        self.thread.start()

    def _follow(self) -> None:
        fleet = self._sweep.fleet
        try:
            future = self._sweep.submit(self.trial, self.key, self.machine, self._address)
            done = threading.Event()
            future.add_done_callback(lambda future: done.set())
            heard = time.monotonic()
            while not future.done():
                if self._sweep.over.is_set():
                    future.cancel()
                    fleet.ask(self.machine, forget, self.key)
                    return
                try:
                    if fleet.workers().get(self.machine) != self._address:
                        raise MachineError(f"the worker {self.machine} is gone")
                    self.news = fleet.ask(self.machine, ask_news, self.key, timeout_s=LOST_S) or self.news
                    heard = time.monotonic()
                except MachineError:
                    if fleet.workers().get(self.machine) != self._address or time.monotonic() - heard > LOST_S:
                        future.cancel()
                        raise
                done.wait(POLL_S)
            self._sweep.ended.put((self, future.result(), ""))
        except PotluckError as error:
            self._sweep.ended.put((self, None, error.what))
        except Exception as error:  # of the task: the cluster's own words
            self._sweep.ended.put((self, None, f"{type(error).__name__}: {error}"))


class DaskSweep:
    """A sweep on the workers of a cluster. `run` is called once."""

    def __init__(
        self,
        client: Client,
        work: SweepWork,
        trials: Sequence[Trial],
        keys: KeyPair,
        *,
        logs: Path,
        share: bool = True,
        tell: Callable[[str], None] = lambda line: None,
    ) -> None:
        """`keys`: those whose public key is in `work`. `share`: whether idle machines help."""
        self.fleet = DaskFleet(client)
        self.over = threading.Event()
        self.ended: queue.Queue[tuple[RunningTrial, TrialNews | None, str]] = queue.Queue()
        self._client, self._work, self._keys, self._share, self._tell = client, work, keys, share, tell
        self._waiting = list(trials)
        self._running: dict[str, RunningTrial] = {}
        self._began: dict[str, float] = {}
        self._hosted: dict[str, list[str]] = {trial.id: [] for trial in trials}
        self._helped: dict[str, set[str]] = {trial.id: set() for trial in trials}
        self._helpers = Helpers(self.fleet, logs, tell)
        self._took_s: dict[str, float] = {}
        """Seconds of the last trial that each machine hosted alone."""

    def run(self) -> Iterator[TrialResult]:
        """The results as they arrive, each once."""
        try:
            while self._waiting or self._running:
                self._place()
                self._look_after_helpers()
                try:
                    running, news, error = self.ended.get(timeout=POLL_S / 2)
                except queue.Empty:
                    continue
                if (result := self._settled(running, news, error)) is not None:
                    yield result
        finally:
            self.over.set()
            for running in self._running.values():
                running.thread.join(10.0)
            self._helpers.close()
            self.fleet.close()

    def hosts(self) -> dict[str, str]:
        """The machine of each running trial."""
        return {name: running.machine for name, running in list(self._running.items())}

    def submit(self, trial: Trial, key: str, machine: str, address: str) -> Future:
        host = urlsplit(address).hostname if address.startswith(("tcp:", "tls:")) else None
        threads = self._client.nthreads()[address]
        arguments = (self._work, trial, key, machine, host, threads)
        return self._client.submit(host_trial, *arguments, key=key, workers=[address], pure=False, retries=0)

    def _place(self) -> None:
        """Give each machine without a trial the next one, except those that should help instead."""
        workers = self.fleet.workers()
        busy = {running.machine for running in self._running.values()}
        for machine, address in workers.items():
            if self._waiting and machine not in busy and self._should_host(machine, workers):
                trial = self._waiting.pop(0)
                self._began.setdefault(trial.id, time.monotonic())
                again = " again, from its checkpoint" if self._hosted[trial.id] else ""
                self._hosted[trial.id].append(machine)
                self._tell(f"{trial.id} starts on {machine}{again}")
                self._running[trial.id] = RunningTrial(self, trial, machine, address)

    def _should_host(self, machine: str, there: Collection[str]) -> bool:
        if not self._share:
            return True
        takes_s, busy_s = dict(self._took_s), dict[str, float]()
        for running in self._running.values():
            if (left_s := running.news.remaining_s) is not None:
                takes_s.setdefault(running.machine, time.monotonic() - running.began + left_s)
            busy_s[running.machine] = takes_s.get(running.machine, 0.0) if left_s is None else left_s
        known = {name: s for name, s in takes_s.items() if name in there}
        return hosts_next(machine, known, busy_s, waiting=len(self._waiting))

    def _look_after_helpers(self) -> None:
        joinable = {name: r.news for name, r in self._running.items() if r.news.token and r.news.status is None}
        # One that has just begun takes its machine as long as the last one did.
        taking_s = {name: self._took_s.get(running.machine) for name, running in list(self._running.items())}
        wanted = helping(
            self.fleet.machines(),
            self.hosts(),
            {n: taking_s[n] if news.remaining_s is None else news.remaining_s for n, news in joinable.items()},
            dict(self._helpers.busy),
            waiting=0,  # a machine that `_place` has left idle should help
        )
        if self._share:
            self._helpers.assign(wanted, {name: self._keys.open(news.token) for name, news in joinable.items()})

    def _settled(self, running: RunningTrial, news: TrialNews | None, error: str) -> TrialResult | None:
        """The result of a trial that has ended; None if it was lost with its machine and starts again."""
        trial = running.trial
        del self._running[trial.id]
        self._helped[trial.id] |= set((news or running.news).guests)
        if news is None:
            self._tell(f"{trial.id} was lost: {error}")
            if len(self._hosted[trial.id]) < MOST_STARTS:
                self._waiting.insert(0, trial)
                return None
            news = msgspec.structs.replace(running.news, why=error)
        elif not news.why and (running.machine not in self._took_s or not news.guests):
            self._took_s[running.machine] = time.monotonic() - running.began
        return TrialResult(
            trial=trial.id,
            parameters=trial.parameters,
            given=trial.given,
            metrics=news.metrics,
            steps=news.step,
            seconds=time.monotonic() - self._began[trial.id],
            machines=tuple(self._hosted[trial.id]),
            guests=tuple(sorted(self._helped[trial.id])),
            checkpoint=str(handed_over(Path(self._work.storage) / trial.id, self._work.origin(trial)) or ""),
            files=str(files) if (files := kept_files(Path(self._work.storage) / trial.id)).is_dir() else "",
            error=news.why,
        )
