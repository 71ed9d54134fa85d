"""Predictions for the built-in rigs against what the lab measured on a quiet box, and the script that says so."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from statistics import median
from types import ModuleType

import msgspec
import pytest

from potluck.errors import ConfigError
from potluck.lab import rigs
from potluck.plan.rigs import fleet_of, job_of, step_times
from potluck.spec.rig import parse

ROOT = Path(__file__).resolve().parents[2]

# Seconds a step: ddp, ddp-balanced, potluck. Measured on 2026-11-15 with bench/rigs.py; wifi a day later.
MEASURED = {
    "desk-and-mac": (27.34, 7.69, 5.74),
    "home-pair": (17.43, 8.77, 5.90),
    "hopeless": (None, None, 6.14),
    "i9-i5": (7.88, 5.15, 4.61),
    "moody": (5.75, 3.75, 2.44),
    "three-friends": (None, 5.41, 3.59),
    "twins": (6.39, 6.08, 3.30),
    "wifi": (28.91, 27.18, 4.60),
}
STRATEGIES = ("ddp", "ddp-balanced", "potluck")


def test_the_predictions_are_within_the_bars() -> None:
    errors = []
    for name, measured in MEASURED.items():
        predicted = step_times(rigs.load(name), STRATEGIES, warm_up=4)
        errors += [abs(predicted[s] / m - 1) for s, m in zip(STRATEGIES, measured) if m is not None]
    assert len(errors) == 21
    assert median(errors) <= 0.08
    assert max(errors) <= 0.20


def test_a_rig_is_a_fleet() -> None:
    rig = rigs.load("three-friends")
    fleet, job = fleet_of(rig), job_of(rig)
    assert [m.name for m in fleet.machines] == ["desk", "ann", "ben", "cem"]
    assert fleet.host.bytes_per_s == pytest.approx(84e6 / 8 * 1448 / 1514)
    assert fleet.guests[0].link_bytes_per_s is None
    assert (job.batch, job.codec, job.tokens_per_sample) == (90, "auto", 32)


def test_a_fleet_that_changes_is_predicted_step_by_step() -> None:
    rig = rigs.load("moody")
    assert [m.name for m in fleet_of(rig, 12).machines] == ["desk", "gamer"]
    assert fleet_of(rig, 6).machine("gamer").samples_per_s == pytest.approx(1 / 0.16)
    times = step_times(rig, ["ddp", "potluck"])
    # DDP keeps its shares and waits for the slow steps of gamer.
    assert times["ddp"] > 42 * 0.08


def test_a_speed_that_the_rig_leaves_open_is_taken_from_what_was_measured() -> None:
    table = msgspec.to_builtins(rigs.load("home-pair"))
    del table["machine"][1]["seconds_per_sample"]
    rig = parse(table)
    with pytest.raises(ConfigError, match="how fast laptop is"):
        step_times(rig, ["potluck"])
    assert step_times(rig, ["potluck"], 0, {"laptop": 1 / 0.6}) == step_times(rigs.load("home-pair"), ["potluck"])


def script() -> ModuleType:
    path = ROOT / "bench" / "plan_accuracy.py"
    spec = importlib.util.spec_from_file_location("plan_accuracy", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_the_script_reads_figures_and_keeps_its_bars(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    accuracy = script()
    for name, measured in MEASURED.items():
        rows = [{"strategy": s, "step_s": m} for s, m in zip(STRATEGIES, measured)]
        figures = {"rig": msgspec.to_builtins(rigs.load(name)), "rows": rows, "warm_up_steps": 4}
        (tmp_path / name).mkdir()
        (tmp_path / name / "results.json").write_text(json.dumps(figures))
    monkeypatch.setattr(sys, "argv", ["plan_accuracy", "--from", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        accuracy.main()
    assert not ended.value.code
    assert "21 pairs" in capsys.readouterr().out
    # A wrong figure is found.
    figures["rows"] = [{"strategy": "potluck", "step_s": 1.0}]
    (tmp_path / "wifi" / "results.json").write_text(json.dumps(figures))
    with pytest.raises(SystemExit) as ended:
        accuracy.main()
    assert ended.value.code


def test_the_scripts_own_rigs_are_rigs_and_there_are_enough_pairs() -> None:
    accuracy = script()
    for rig in accuracy.FRESH.values():
        assert parse(msgspec.to_builtins(rig)) == rig
        assert step_times(rig, STRATEGIES).keys() == set(STRATEGIES)
    pairs = [(r, s) for r in [*rigs.NAMES, *accuracy.FRESH] for s in STRATEGIES if (r, s) not in accuracy.TOO_LONG]
    assert len(pairs) >= 12
