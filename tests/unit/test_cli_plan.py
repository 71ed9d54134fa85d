"""`potluck plan`, and what `potluck report` makes of a saved plan."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from potluck.checked import convert
from potluck.cli import _app
from potluck.plan import advice, fleet_inputs, models
from potluck.report import plan_plot, plan_table, screen
from potluck.spec.fleet import STRATEGIES, Plan
from support import sample_events as sample

ROOT = Path(__file__).resolve().parents[2]
PAIR = ["--machine", "desk=RTX 4070", "--machine", "mac=M2,link=1GbE"]


@pytest.fixture(autouse=True)
def _narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")


def out_of(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert _app.run(["plan", *words]) == 0, capsys.readouterr().err
    return capsys.readouterr().out


def test_a_rig(capsys: pytest.CaptureFixture[str]) -> None:
    out = out_of(capsys, "home-pair")
    assert "bring laptop: 1.23×" in out
    assert all(f"\n{name} " in out for name in STRATEGIES)
    assert "desk waits 10.8 s for laptop" in out
    assert max(map(len, out.splitlines())) <= 80


def test_machines_by_name_say_what_is_assumed(capsys: pytest.CaptureFixture[str]) -> None:
    out = out_of(capsys, *PAIR, "--model", "gpt2-124m", "--batch-tokens", "524288", "--strategy", "ddp")
    assert "RTX 4070: 58.3 TFLOP/s bf16 (derived: 5,888 × 4 × 2.475 GHz) × 0.5" in out
    assert "\nddp " in out
    assert "\nfsdp " not in out


def test_json_is_a_plan(capsys: pytest.CaptureFixture[str]) -> None:
    table = json.loads(out_of(capsys, *PAIR, "--json"))
    assert convert(table, Plan).row("potluck").speedup > 1


def test_facts(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "facts.json"
    machines = [{"name": "a", "flops_per_s": 2e13}, {"name": "b", "flops_per_s": 5e12, "link_bytes_per_s": 1e8}]
    file.write_text(json.dumps({"format": 1, "measured": machines}))
    assert "bring b: 1.2" in out_of(capsys, "--facts", str(file))
    assert "\nmac " in out_of(capsys, "--facts", str(file), "--machine", "mac=M2")


def test_long_names_are_whole_in_a_pipe_and_short_on_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    device = "Intel(R) Xeon(R) Platinum 8259CL CPU @ 2.70GHz"
    long = {"device": device, "flops_per_s": 1e11, "memory_bytes": 8.3e9}
    measured = [{"name": "vm", **long}, {"name": "a-laptop-from-upstairs", "link_bytes_per_s": 5e7, **long}]
    given = fleet_inputs.from_facts([("f.json", {"measured": measured})], models.find("350M"))
    found = advice.plan(models.find("350M").job(512), given.fleet)
    screen.show(plan_table.plan_lines(found, 80, whole=True), sys.stdout)
    out = capsys.readouterr().out
    assert "…" not in out
    assert out.count(device) == 2
    screen.show(plan_table.plan_lines(found, 80), sys.stdout)
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    assert "  memory\n" in out
    assert " of 8.3 GB\n" in out
    assert "codec int4" in out
    assert "Intel Xeon" in out


def test_a_sweep_and_its_picture(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for kind, magic in (("png", b"\x89PNG"), ("svg", b"<?xml")):
        picture = tmp_path / f"pays.{kind}"
        out = out_of(capsys, "desk-and-mac", "--sweep", "link_mbit=1:1000:6", "--plot", str(picture))
        assert "potluck is worth it from about 2.2" in out
        assert picture.read_bytes().startswith(magic)
    assert {file.suffix for file in tmp_path.iterdir()} == {".png", ".svg"}


def test_more_guests(capsys: pytest.CaptureFixture[str]) -> None:
    out = out_of(capsys, *PAIR, "--guests", "1024")
    assert "\n 1,024 " in out
    assert "one more does not help" in out.replace("\n", " ")


def test_parts_are_one_empty_line_apart(capsys: pytest.CaptureFixture[str]) -> None:
    pair = ["--machine", "a=RTX 4090", "--machine", "b=RTX 4090,link=1GbE", "--model", "gpt2-760m"]
    out = out_of(capsys, *pair, "--price", "2.10/h")
    assert "\nlevers " in out
    assert "\n\ncost " in out
    assert "\n\n\n" not in out


def test_the_catalogue(capsys: pytest.CaptureFixture[str]) -> None:
    out = out_of(capsys, "--catalogue")
    for words in ("RTX 4070", "Thunderbolt 5", "gpt2-1.5b", "Nothing here was measured", "read at:"):
        assert words in out
    row, details = (line for line in out.splitlines() if line.startswith("T4 "))
    assert re.search(r" 70 +\[(\d+)\] \[\1\] \[\1\]$", row)
    assert len(row) <= 80
    assert re.search(r"the card alone +2,560 × 2 × 1.59 GHz; it has no bf16", details)
    assert "\n  [1] Wikipedia: https://" in out
    table = json.loads(out_of(capsys, "--catalogue", "--json"))
    assert len(table["devices"]) > 150
    assert table["devices"][0]["memory_from"] in table["pages"]


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["nosuch"],
        ["home-pair", *PAIR],
        ["home-pair", "--facts", "nosuch.json"],
        ["home-pair", "--model", "gpt2-124m"],
        ["home-pair", "--codec", "int3"],
        ["home-pair", "--strategy", "dpp"],
        ["home-pair", "--batch", "8", "--batch-tokens", "1024"],
        ["home-pair", "--sweep", "link_mbit=1:10", "--guests", "4"],
        ["home-pair", "--plot", "x.png"],
        ["home-pair", "--sweep", "link_mbit=1:10", "--plot", "x.gif"],
        ["home-pair", "--sweep", "link_mbit=1:10", "--plot", "no/such/folder/x.png"],
        ["home-pair", "--save", "no/such/folder/plan.json"],
        ["--machine", "a=Z80"],
        ["--facts", "nosuch.json"],
        [*PAIR, "--model", "gtp"],
        [*PAIR, "--bytes", "-1"],
        [*PAIR, "--guests", "0"],
    ],
)
def test_bad_input_is_an_error_with_a_hint_and_nothing_is_written(
    words: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert _app.run(["plan", *words]) == 2
    said = capsys.readouterr()
    assert "hint:" in said.err or "Usage:" in said.err
    assert "Traceback" not in said.err
    assert said.out == ""
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("text", ["", "{", "[]", '{"measured": [{}]}', "[" * 100_000])
def test_facts_that_are_none(text: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "facts.json"
    file.write_text(text)
    assert _app.run(["plan", "--facts", str(file)]) == 2
    assert "facts.json" in capsys.readouterr().err


def test_a_picture_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from potluck.errors import UserError
    from potluck.lab import rigs
    from potluck.plan import variation
    from potluck.plan.rigs import fleet_of, job_of

    (tmp_path / "x.png").mkdir()
    rig = rigs.load("home-pair")
    found = variation.sweep(job_of(rig), fleet_of(rig), variation.parse("link_mbit=1:10:2"))
    with pytest.raises(UserError, match="cannot write"):
        plan_plot.write(tmp_path / "x.png", found, "title")
    assert [file.name for file in tmp_path.iterdir()] == ["x.png"]


def test_help_and_planning_import_no_torch() -> None:
    run = "from potluck.cli._app import run; run(['plan', 'home-pair', '--json'])"
    code = f"import sys; {run}; print('torch' in sys.modules)"
    env = {k: v for k, v in os.environ.items() if not k.startswith("POTLUCK_")} | {"PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "False"


class TestReport:
    @pytest.fixture
    def run(self, tmp_path: Path) -> Path:
        steps = (sample.step(number, predicted_s=0.98, update_s=0.01) for number in range(1, 5))
        return sample.write(tmp_path, [sample.run_start(), *steps, sample.run_end()])

    def test_the_hosts_own_prediction(self, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert _app.run(["report", str(run)]) == 0
        took = "the same steps took 1.00 s, 1.0% more (medians)"
        assert f"\npredicted   990 ms a step from the speeds measured; {took}\n" in capsys.readouterr().out

    def test_what_is_predicted_stands_beside_the_steps_it_was_predicted_of(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """The host alone predicts nothing: those steps say nothing of the prediction."""
        alone = [sample.step(number, predicted_s=None, step_s=3.0) for number in range(1, 8)]
        together = [sample.step(n, predicted_s=s, update_s=0.0) for n, s in ((8, 0.98), (9, 0.5), (10, 1.6))]
        run = sample.write(tmp_path, [sample.run_start(), *alone, *together, sample.run_end()])
        assert _app.run(["report", str(run)]) == 0
        out = capsys.readouterr().out
        assert "(median 3.00 s)" in out
        assert "980 ms a step from the speeds measured; the same steps took 1.00 s, 2.0% more (medians)\n" in out

    def test_a_saved_plan_beside_what_came(self, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert _app.run(["plan", "home-pair", "--save", str(run / "plan.json")]) == 0
        capsys.readouterr()
        for words in ([], ["--plan", str(run / "plan.json")]):
            assert _app.run(["report", str(run), *words]) == 0
            assert "\nplan        5.89 s a step, before the run; it took" in capsys.readouterr().out

    @pytest.mark.parametrize("text", ["", "{}", '{"rows": 3}'])
    def test_what_is_no_plan(self, run: Path, text: str, capsys: pytest.CaptureFixture[str]) -> None:
        (run / "plan.json").write_text(text)
        assert _app.run(["report", str(run)]) == 2
        assert "is not a plan file" in capsys.readouterr().err
