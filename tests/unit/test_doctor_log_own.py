"""The doctor reads logs of Potluck's own backend under torchrun, of scripts that are not there, and of Ctrl-C."""

# ruff: noqa: E501 -- messages stand here as they were written

from __future__ import annotations

from pathlib import Path

import pytest

from potluck.checked import to_json
from potluck.cli._app import run
from potluck.doctor.log import read_log
from potluck.doctor.log_text import Part
from potluck.spec.facts import Case
from potluck.spec.finding import NOTE, Finding, LogReading
from support.healthy import linux

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
    assert str(first).count("potluck explain") == 1
    without = read(trace(mark, INT9)).findings[0]
    assert without.fix == "potluck explain bad-config"
    assert str(without).count("potluck explain") == 1


def test_lines_of_other_ranks_may_stand_between_an_error_and_its_hint() -> None:
    text = f"[rank0]: {INT9}\n[rank1]: Traceback (most recent call last):\n[rank1]: hint: of another\n[rank0]: {INT8}\n"
    assert read(text).findings[0].fix == INT8.removeprefix("hint: ")


def test_what_happened_on_the_own_backend_is_not_said_to_be_impossible() -> None:
    own = read(trace("[rank0]: ", INT9, INT8) + torchrun())
    said = of(own, "one-failed-all-ended").potluck
    assert "cannot happen" not in said
    assert "every rank is needed" in said
    assert "`potluck host`" in said
    killed = read(trace("", "x", file="/x/potluck/dist/channel.py") + torchrun(code=-9))
    assert "every rank is needed" in of(killed, "worker-killed").potluck
    other = read(trace("[rank0]: ", "KeyError: 'label'") + torchrun())
    assert "cannot happen" in of(other, "one-failed-all-ended").potluck


@pytest.mark.parametrize(
    "line",
    [
        f"[rank0]: potluck.errors.CollectiveError: {ENDED}\n[rank0]: {USELESS}",
        f"[rank0]: potluck.errors.RankGoneError: {ENDED}",
        f"error: {ENDED}\n{USELESS}\nsee: potluck explain bad-collective",
        f"error: {ENDED}\n{USELESS}\nsee docs/troubleshooting/bad-collective.md",
        f"rank 0 caught RankGoneError {ENDED}",
    ],
)
def test_a_rank_that_ended_while_others_waited_is_gone_whatever_the_class(line: str) -> None:
    (finding,) = read(f"step 1\n{line}\n").findings
    assert finding.code == "potluck-rank-gone"
    assert "rank 1" in finding.fix
    assert "destroy it" not in finding.fix
    assert "`potluck explain rank-gone`" in finding.potluck
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


NO_SCRIPT = "/home/ann/envs/of/mine/bin/python: can't open file '/home/ann/projects/nosuch.py': [Errno 2] No such file or directory\n"


def test_a_script_that_is_not_there_is_the_cause_and_nobody_is_sent_to_lines_that_are_not() -> None:
    cause, after = read(NO_SCRIPT * 2 + torchrun(code=2)).findings
    assert cause.code == "script-not-there"
    assert "nosuch.py cannot be opened: No such file or directory" in cause.what
    assert "can't open file" in cause.how
    assert after.code == "one-failed-all-ended"
    assert "[rank0" not in after.fix
    assert read(NO_SCRIPT).explained
    assert read(NO_SCRIPT.replace("/home/ann/projects/", "C:\\\\users\\\\ann\\\\")).findings[0].what == cause.what


def test_who_failed_first_is_looked_for_where_it_wrote() -> None:
    error = "KeyError: 'label'"
    marked = of(read(trace("[rank0]: ", error) + torchrun()), "one-failed-all-ended")
    assert marked.fix.startswith(r"grep -n '\[rank0\]' run.log")
    plain = of(read(trace("", error) + torchrun()), "one-failed-all-ended")
    assert plain.fix.startswith("sed -n '1,4p' run.log")
    assert "--tee 3" in of(read(torchrun()), "one-failed-all-ended").fix


SIGINT = (
    "W1115 19:57:25.106000 21617 torch/distributed/elastic/agent/server/api.py:753] Received 2 death signal, shutting down workers\n"
    "W1115 19:57:25.106000 21617 torch/distributed/elastic/multiprocessing/api.py:1028] Sending process 21621 closing signal SIGINT\n"
)
SIGNALLED = "torch.distributed.elastic.multiprocessing.api.SignalException: Process 21617 got signal: 2"
STOPPED = trace("[rank0]: ", "KeyboardInterrupt") + trace("[rank1]: ", "KeyboardInterrupt")
LOST = trace("[rank0]: ", f"potluck.errors.RankGoneError: {ENDED}")
CTRL_C = {
    "torchrun": SIGINT + STOPPED + trace("", SIGNALLED),
    "the ranks were first": STOPPED + SIGINT + trace("", SIGNALLED),
    "torch of before": trace("", SIGNALLED.replace(": 2", ": Signals.SIGINT")),
    "one process": trace("", "KeyboardInterrupt"),
    "pressed twice": SIGINT + trace("", SIGNALLED) + "exit status 130\n",
    "a rank lost another": SIGINT + trace("[rank1]: ", "KeyboardInterrupt") + LOST + trace("", SIGNALLED),
}


@pytest.mark.parametrize("name", CTRL_C)
def test_ctrl_c_is_no_failure(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    reading = read("step 0 loss 4.3\n" + CTRL_C[name])
    assert [(f.code, f.severity) for f in reading.findings] == [("interrupted", NOTE)]
    assert (reading.first_error, reading.failed) == ("", False)
    (tmp_path / "facts.json").write_text(to_json(Case(here=linux())), encoding="utf-8")
    (tmp_path / "run.log").write_text(CTRL_C[name], encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    assert run(["doctor", "--error", "run.log", "--facts", "facts.json"]) == 0
    assert "run.log: interrupted by Ctrl-C (SIGINT), no failure (" in capsys.readouterr().out


def test_what_failed_before_ctrl_c_is_still_told() -> None:
    known = read(LOST + CTRL_C["torchrun"])
    assert [f.code for f in known.findings] == ["potluck-rank-gone", "interrupted"]
    unknown = read(trace("[rank1]: ", "KeyError: 'label'") + CTRL_C["torchrun"])
    assert unknown.failed
    assert "KeyError: 'label'" in str(unknown)
    one = read(trace("[rank1]: ", "KeyboardInterrupt") + torchrun(rank=1, code=-2))
    assert [f.code for f in one.findings] == ["one-failed-all-ended"]
    assert "SIGINT" in one.findings[0].what
