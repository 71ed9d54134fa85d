"""The backend's figures, by a clock that the test turns."""

from __future__ import annotations

import importlib
import json
import logging
import threading

import pytest

from potluck.dist import counting as module
from potluck.dist.counting import SPENT, Metrics, log_metrics, metrics, reset_metrics, table


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_a_collective_is_counted_with_where_its_time_went(clock: Clock) -> None:
    m = Metrics(clock)
    with m.op("all_reduce", 1000) as op:
        op.queued(1.0)
        clock.now += 9
        SPENT.staging, SPENT.reduction, SPENT.sent = 2.5, 0.25, 300
    got = m.snapshot()["by_op"]["all_reduce"]
    assert got == {
        "ops": 1,
        "errors": 0,
        "bytes": 1000,
        "sent_bytes": 300,
        "avg_s": 10.0,
        "p50_s": 10.0,
        "p99_s": 10.0,
        "peak_bytes_per_s": 100.0,
        "queue_s": 1.0,
        "staging_s": 2.5,
        "network_s": 6.25,
        "reduction_s": 0.25,
    }
    assert m.snapshot()["total"] == got


def test_quantiles_average_and_peak(clock: Clock) -> None:
    m = Metrics(clock)
    for seconds in range(1, 101):
        with m.op("broadcast", 100):
            clock.now += seconds
    got = m.snapshot()["by_op"]["broadcast"]
    assert (got["p50_s"], got["p99_s"], got["avg_s"], got["peak_bytes_per_s"]) == (50.0, 99.0, 50.5, 100.0)


def test_a_failure_counts_as_an_error_and_not_as_a_latency(clock: Clock) -> None:
    m = Metrics(clock)

    def fail() -> None:
        with m.op("send", 10):
            clock.now += 7
            raise OSError

    with pytest.raises(OSError):
        fail()
    got = m.snapshot()["by_op"]["send"]
    assert (got["ops"], got["errors"], got["bytes"], got["p50_s"], got["avg_s"]) == (0, 1, 0, None, None)
    assert got["network_s"] == 7.0
    assert m.snapshot()["total"]["errors"] == 1


def test_it_stays_small_whatever_it_is_told(clock: Clock) -> None:
    m = Metrics(clock)
    for at in range(5000):
        with m.op("barrier", 0):
            clock.now += 1
        with m.op(f"made up {at}", 1):
            pass
    got = m.snapshot()
    assert len(got["by_op"]) <= 65
    assert got["total"]["ops"] == 10_000
    assert got["by_op"]["other"]["ops"] > 4000
    assert all(len(kind.latencies) <= 1024 for kind in m._kinds.values())


def test_reset_begins_anew(clock: Clock) -> None:
    m = Metrics(clock)
    with m.op("gather", 5):
        clock.now += 1
    m.reset()
    clock.now += 3
    got = m.snapshot()
    assert (got["by_op"], got["total"]["ops"], got["since_s"]) == ({}, 0, 3.0)


def test_threads_lose_nothing() -> None:
    m = Metrics()

    def work() -> None:
        for _ in range(500):
            with m.op("all_gather", 3):
                SPENT.sent += 2

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    total = m.snapshot()["total"]
    assert (total["ops"], total["bytes"], total["sent_bytes"]) == (4000, 12_000, 8000)


def test_the_public_three(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, clock: Clock) -> None:
    monkeypatch.setattr(module, "METRICS", Metrics(clock))
    with module.METRICS.op("all_reduce", 4_000_000):
        clock.now += 0.5
    assert metrics()["total"]["ops"] == 1
    assert json.loads(json.dumps(metrics())) == metrics()
    with caplog.at_level(logging.INFO):
        module.log.setLevel(logging.WARNING)  # as a group of default settings leaves it
        log_metrics()
    assert "all_reduce" in caplog.text
    assert "64 Mbit/s" in caplog.text
    reset_metrics()
    assert metrics()["total"]["ops"] == 0
    assert "total" in table(metrics())


def test_the_function_is_not_hidden_by_a_module_of_its_name() -> None:
    import potluck.dist

    importlib.import_module("potluck.dist.counting")
    assert callable(potluck.dist.metrics)
    assert potluck.dist.metrics()["total"]["ops"] >= 0


def test_what_is_neither_staging_nor_reduction_is_network(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.time, "perf_counter", clock)

    @module.spends("staging")
    def stage() -> str:
        clock.now += 2
        return "staged"

    @module.spends("reduction")
    def fail() -> None:
        clock.now += 3
        raise ValueError

    m = Metrics(clock)
    stage()  # of nobody's collective
    for _ in range(2):
        with m.op("all_reduce", 1000):
            assert stage() == "staged"
            with pytest.raises(ValueError):
                fail()
            module.SPENT.sent += 500
            clock.now += 4
    got = m.snapshot()["by_op"]["all_reduce"]
    assert [got[f"{phase}_s"] for phase in module.PHASES] == [0.0, 4.0, 8.0, 6.0]
    assert got["sent_bytes"] == 1000


def test_figures_are_shown_where_nobody_has_set_up_logging(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module.log, "hasHandlers", lambda: False)
    log_metrics()
    assert "collective" in capsys.readouterr().err
