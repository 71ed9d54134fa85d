"""The doctor reads logs of Potluck's own backend under torchrun, of scripts that are not there, and of Ctrl-C."""

# ruff: noqa: E501 -- messages stand here as they were written

from __future__ import annotations

import pytest

from potluck.doctor.log import read_log
from potluck.doctor.log_text import Part
from potluck.spec.finding import Finding, LogReading

INT9 = "potluck.errors.ConfigError: POTLUCK_DIST_COMPRESSION='int9' is not valid: unknown codec 'int9'"
INT8 = "hint: did you mean int8? the codecs are none, fp16, bf16, int8, int4, topk"
ENDED = (
    "all_reduce #14 (all_reduce SUM float32 [279360], 1.1 MB): rank 1 (vm) ended while others were waiting for it"
)
USELESS = "hint: the group cannot be used any more: destroy it and make a new one"
UNREACHED = "all_gather #1: rank 1 (vm) could not be reached within 15 s (vm, 10.91.0.2 port 42797)"
CHILD_FAILED = "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: "


def read(text: str) -> LogReading:
    return read_log([Part(1, text)], "run.log")


def trace(mark: str, *last: str, file: str = "/a/train.py") -> str:
    lines = ("Traceback (most recent call last):", f'  File "{file}", line 7, in <module>', "    f()", *last)
    return "".join(f"{mark}{line}\n" for line in lines)


def torchrun(rank: int = 0, code: int = 1) -> str:
    """As torchrun ends when this rank failed first."""
    return (
        f"E1115 19:39:30.375000 19248 torch/distributed/elastic/multiprocessing/api.py:1002] failed (exitcode: {code}) local_rank: {rank} (pid: 19252) of binary: /usr/bin/python\n"
        + trace("", CHILD_FAILED, file="/usr/bin/torchrun")
        + f"Root Cause (first observed failure):\n[0]:\n  host      : x\n  rank      : {rank} (local_rank: {rank})\n  exitcode  : {code} (pid: 19252)\n"
    )


def of(reading: LogReading, code: str) -> Finding:
    return next(finding for finding in reading.findings if finding.code == code)


@pytest.mark.parametrize("mark", ["", "[rank0]: ", "[default0]:[rank0]: "])
def test_the_hint_of_an_error_is_its_fix_and_its_page_is_named_once(mark: str) -> None:
    reading = read(trace(mark, INT9, INT8) + trace(mark, INT9, INT8) + torchrun())
    first = reading.findings[0]
    assert first.code == "potluck-bad-config"
    assert first.fix == INT8.removeprefix("hint: ")
    assert str(first).count("docs/troubleshooting") == 1
    without = read(trace(mark, INT9)).findings[0]
    assert without.fix == "see docs/troubleshooting/bad-config.md"
    assert str(without).count("docs/troubleshooting") == 1


def test_lines_of_other_ranks_may_stand_between_an_error_and_its_hint() -> None:
    text = f"[rank0]: {INT9}\n[rank1]: Traceback (most recent call last):\n[rank1]: hint: of another\n[rank0]: {INT8}\n"
    assert read(text).findings[0].fix == INT8.removeprefix("hint: ")


def test_what_happened_on_the_own_backend_is_not_said_to_be_impossible() -> None:
    own = read(trace("[rank0]: ", INT9, INT8) + torchrun())
    said = of(own, "one-failed-all-ended").potluck
    assert "cannot happen" not in said
    assert "every rank is needed" in said
    assert "`potluck host`" in said
    killed = read(trace("", "x", file="/x/potluck/dist/lane.py") + torchrun(code=-9))
    assert "every rank is needed" in of(killed, "worker-killed").potluck
    other = read(trace("[rank0]: ", "KeyError: 'label'") + torchrun())
    assert "cannot happen" in of(other, "one-failed-all-ended").potluck


@pytest.mark.parametrize(
    "line",
    [
        f"[rank0]: potluck.errors.CollectiveError: {ENDED}\n[rank0]: {USELESS}",
        f"[rank0]: potluck.errors.RankGoneError: {ENDED}",
        f"error: {ENDED}\n{USELESS}\nsee docs/troubleshooting/bad-collective.md",
        f"rank 0 caught RankGoneError {ENDED}",
    ],
)
def test_a_rank_that_ended_while_others_waited_is_gone_whatever_the_class(line: str) -> None:
    (finding,) = read(f"step 1\n{line}\n").findings
    assert finding.code == "potluck-rank-gone"
    assert "rank 1" in finding.fix
    assert "destroy it" not in finding.fix
    assert "docs/troubleshooting/rank-gone.md" in finding.potluck
    killed = read(f"step 1\n{line}\n" + torchrun(rank=1, code=-9))
    assert [f.code for f in killed.findings] == ["worker-killed", "potluck-rank-gone"]


def test_a_rank_that_was_never_reached_is_behind_a_firewall() -> None:
    text = trace("[rank0]: ", f"potluck.errors.RankGoneError: {UNREACHED}", "hint: look at that rank's own output")
    cause, after = read(text + torchrun()).findings
    assert (cause.code, after.code) == ("potluck-rank-gone", "one-failed-all-ended")
    assert "potluck doctor 10.91.0.2 " in cause.fix
    assert "POTLUCK_DIST_PORT_BASE=29600 " in cause.fix
    assert "29600 + r" in cause.fix
    assert "that rank's own output" not in cause.fix
    both = read(f"[rank1]: potluck.errors.RankGoneError: {ENDED}\n" + text).findings
    assert ["could not be reached" in f.what for f in both] == [True, False]
