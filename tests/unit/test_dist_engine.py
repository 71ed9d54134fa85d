"""The order of a group's collectives: one at a time, and what follows one may wait for others."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from datetime import timedelta

import pytest

from potluck.dist.engine import Engine
from potluck.dist.work import PotluckWork
from potluck.errors import RankGoneError

SOON = timedelta(seconds=20)


@pytest.fixture
def engine() -> Iterator[Engine]:
    made = Engine("test-engine")
    yield made
    made.stop("the test is over")
    assert not [thread for thread in threading.enumerate() if thread.name == "test-engine"]


def asked(engine: Engine, job: threading.Event | None = None) -> PotluckWork:
    work = PotluckWork("a job", [])
    engine.submit(lambda: None if job is None else (job.wait(20) and None), work, at_once=False)
    return work


def test_what_follows_a_job_may_wait_for_one_that_was_asked_for_after_it(engine: Engine) -> None:
    go = threading.Event()
    first = asked(engine, go)
    end = first.get_future().then(lambda _: second.wait(SOON))
    second = asked(engine)
    go.set()
    assert end.wait()


def test_what_follows_jobs_may_wait_for_jobs_of_its_own_many_deep(engine: Engine) -> None:
    go, before = threading.Event(), threading.active_count()
    works = [asked(engine, go) for _ in range(5)]
    ends = [
        work.get_future().then(lambda _: asked(engine).get_future().then(lambda _: asked(engine).wait(SOON)).wait())
        for work in works
    ]
    go.set()
    assert [end.wait() for end in ends] == [True] * 5
    assert engine.drain(20)
    deadline = time.monotonic() + 10  # one that is no longer needed may not have had its turn to end
    while threading.active_count() >= before + 7 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() < before + 7  # earlier tests of this process have threads of their own


def test_jobs_run_one_at_a_time_in_the_order_of_the_calls(engine: Engine) -> None:
    order: list[int] = []
    busy = threading.Lock()

    def job(number: int) -> None:
        assert busy.acquire(blocking=False)
        order.append(number)
        busy.release()

    works = [PotluckWork(f"job {number}", []) for number in range(50)]
    for number, work in enumerate(works):
        engine.submit(lambda number=number: job(number), work, at_once=number % 7 == 0)  # type: ignore[misc]
        work.get_future().then(lambda _: None)
    for work in works:
        assert work.wait(SOON)
    assert order == list(range(50))


def test_a_stopped_engine_fails_what_is_queued_and_takes_nothing_new(engine: Engine) -> None:
    go = threading.Event()
    running = asked(engine, go)
    queued = asked(engine)
    assert not engine.drain(0.01)
    threading.Timer(0.1, go.set).start()
    engine.stop("it is late")
    assert running.wait(SOON)
    with pytest.raises(RankGoneError, match="never began: it is late"):
        queued.wait(SOON)
    with pytest.raises(RankGoneError, match="shut down"):
        asked(engine)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_job_that_is_interrupted_is_over_and_the_next_one_runs(engine: Engine) -> None:
    def interrupted() -> None:
        raise SystemExit

    work = PotluckWork("a job", [])
    engine.submit(interrupted, work, at_once=False)
    with pytest.raises(RankGoneError, match="interrupted"):
        work.wait(SOON)
    asked(engine).wait(SOON)
    assert engine.drain(20)
