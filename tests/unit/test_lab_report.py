"""What a person sees of the lab: the picture of a rig, the table of results, the plots."""

from __future__ import annotations

import builtins
import io
import struct
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from pathlib import Path

import pytest
from msgspec.structs import replace
from rich.cells import cell_len

from potluck.errors import UserError
from potluck.lab import rigs
from potluck.plan import about
from potluck.report import lab_plots, lab_timeline, screen
from potluck.report.lab_picture import list_lines, rig_lines
from potluck.report.lab_plots import place_labels
from potluck.report.lab_table import best_row, results_lines, show_results
from potluck.report.line import Line
from potluck.spec.outcome import Interval, Outcome
from potluck.spec.results import Results
from potluck.spec.rig import Machine, Rig, Workload
from support import lab_outcomes

ODD = Rig(
    name="odd",
    about="a bit of everything",
    workload=Workload(recipe="cnn", global_batch=64, codec="topk:0.05", steps=30),
    machines=(
        Machine(name="h" * 40, role="host", link_mbit=1000, latency_ms=2.5, seconds_per_sample=0.02),
        Machine(
            name="g1", link_mbit=94.1234, latency_ms=12.25, cpu_limit=0.5, seconds_per_sample=0.01, join_at_step=3
        ),
        Machine(name="g2"),
    ),
)
ALONE = Rig(name="alone", workload=Workload(), machines=(Machine(name="h", role="host"),))


class Terminal(io.StringIO):
    def __init__(self, encoding: str = "utf-8") -> None:
        super().__init__()
        self._encoding = encoding

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._encoding

    def isatty(self) -> bool:
        return True


class Pipe(Terminal):
    def isatty(self) -> bool:
        return False


def plain(lines: Sequence[Line]) -> str:
    return "\n".join(line.plain for line in lines)


@pytest.fixture(scope="module")
def pair() -> tuple[Results, list[Outcome]]:
    return lab_outcomes.all_of(rigs.load("home-pair"))


class TestPicture:
    @pytest.mark.parametrize("width", [80, 100, 120])
    @pytest.mark.parametrize("rig", [*map(rigs.load, rigs.NAMES), ODD, ALONE], ids=lambda r: r.name)
    def test_it_fits_and_its_boxes_are_whole(self, rig: Rig, width: int) -> None:
        lines = [line.plain for line in rig_lines(rig, about.facts(rig), width)]
        assert max(map(cell_len, lines)) <= width
        text = "\n".join(lines)
        for corner in "╭╮╰╯":
            assert text.count(corner) == len(rig.machines), corner
        rows = [line for line in lines if "╭" in line or "╰" in line]
        # Corners stand in the same columns in every row that has them: nothing is torn.
        host, guest = {row.index("╮") for row in rows if row.startswith("╭")}, {cell_len(r) for r in rows}
        assert len(host) == 1
        assert len(guest) <= 2

    def test_it_says_what_there_is_to_say(self) -> None:
        rig = rigs.load("home-pair")
        text = plain(rig_lines(rig, about.facts(rig), 80))
        for words in (
            "desk",
            "laptop",
            "0.15 s/sample",
            "1.67 samples/s",
            "0.25×",
            "40 Mbit/s",
            "3.3 M parameters",
            "48 samples of 128 bytes; 12 steps",
            "7.20 s a step",
            "1.250, 5.76 s a step",
            "1.231 (39 + 9): rounding costs 1.5 %",
            "13.3 MB of gradients in fp32, 1.7 MB in int4",
            "0.369",
            "0.048",
        ):
            assert words in text, words

    def test_the_hosts_link_stands_where_all_share_it(self) -> None:
        rig = rigs.load("three-friends")
        text = plain(rig_lines(rig, about.facts(rig), 80))
        assert text.count("84 Mbit/s") == 1
        assert "├─ 84 Mbit/s ─┬" in text

    def test_speeds_over_time(self) -> None:
        rig = rigs.load("moody")
        text = plain(rig_lines(rig, about.facts(rig), 80))
        assert "████▄▄▄▄████▄▄▄▄████▄▄▄▄" in text
        assert "██████████·····█████████" in text
        assert "leaves at step 11; returns at step 16" in text
        assert "0.16 from step 5" in text

    def test_a_bit_of_everything(self) -> None:
        text = plain(rig_lines(ODD, about.facts(ODD), 120))
        for words in ("94.12 Mbit/s", "+ 12.2 ms", "0.5 CPU cores", "joins at step 3", "as fast as this computer"):
            assert words in text, words

    def test_what_is_not_known_is_not_made_up(self) -> None:
        text = plain(rig_lines(ALONE, about.facts(ALONE), 80))
        assert "ideal speed-up    known when" in text
        assert "nan" not in text.lower()

    def test_the_list(self) -> None:
        found = [(rig, about.facts(rig)) for rig in map(rigs.load, rigs.NAMES)]
        for width in (80, 120):
            lines = [line.plain for line in list_lines(found, width)]
            assert max(map(cell_len, lines)) <= width
            assert [line.split()[0] for line in lines if not line.startswith(" ")] == ["rig", *rigs.NAMES]
            assert "1.875×" in "\n".join(lines)


class TestScreen:
    LINES = (Line("a × b ÷ c", "bold").add(" ╭──╮ █▌ –"), Line())

    def test_colours_on_a_terminal(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.delenv("NO_COLOR", raising=False)
        stream = Terminal()
        screen.show(self.LINES, stream)
        assert "\x1b[1m" in stream.getvalue()

    def test_none_in_a_pipe(self) -> None:
        stream = Pipe()
        screen.show(self.LINES, stream)
        assert stream.getvalue() == "a × b ÷ c ╭──╮ █▌ –\n\n"

    @pytest.mark.parametrize("stream", [Pipe("ascii"), Terminal("latin-1")])
    def test_ascii_where_need_be(self, stream: Terminal) -> None:
        screen.show(self.LINES, stream)
        assert "a x b / c" in stream.getvalue()
        assert "+--+ ## -" in stream.getvalue()
        assert stream.getvalue().isascii()

    @pytest.mark.parametrize("name", rigs.NAMES)
    def test_every_sign_of_a_picture_has_its_ascii(self, name: str) -> None:
        stream = Pipe("ascii")
        rig = rigs.load(name)
        screen.show(rig_lines(rig, about.facts(rig), 80), stream)
        assert "?" not in stream.getvalue()

    def test_a_long_line_is_not_broken_by_the_terminal(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("COLUMNS", "20")
        stream = Terminal()
        screen.show([Line("word " * 20)], stream)
        assert stream.getvalue().count("\n") == 1


def results_text(results: Results) -> str:
    return "\n".join(line.plain.rstrip() for line in results_lines(results, 80))


class TestTable:
    def test_it_fits_80_columns_and_has_every_row(self, pair: tuple[Results, list[Outcome]]) -> None:
        text = results_text(pair[0])
        lines = text.splitlines()
        assert max(map(cell_len, lines)) <= 80
        header = next(line for line in lines if line.startswith("strategy"))
        columns = ["strategy", "s/step", "predicted", "speed-up", "efficiency", "recovery", "MB/step", "loss"]
        assert header.split() == columns
        below = lines.index(header) + 2
        rows = {line.split()[0]: line.split() for line in lines[below : below + 4]}
        assert list(rows) == ["solo", "ddp", "ddp-balanced", "potluck"]
        assert {len(row) for row in rows.values()} == {len(columns)}
        assert rows["solo"][3] == "1.000"
        assert rows["solo"][6] == "–"
        assert rows["ddp"][6] == "26.59"

    def test_what_stands_below(self, pair: tuple[Results, list[Outcome]]) -> None:
        text = " ".join(results_text(replace(pair[0], notes={"ddp": "made 4 of 12 steps"})).split())
        for words in (
            "best potluck, 23 % faster than the host alone",
            "ideal speed-up 1.250",
            "the first 4 steps",
            "desk 6.65 samples/s, laptop 1.66 samples/s",
            "ddp made 4 of 12 steps",
            "network namespaces",
            "efficiency samples/s ÷ the sum",
            "recovery (speed-up − 1) ÷ (ideal − 1)",
            "MB/step what crossed the host's link",
        ):
            assert words in text, words
        assert "not 48" not in text

    def test_samples_that_do_not_add_up_are_told(self, pair: tuple[Results, list[Outcome]]) -> None:
        rows = [replace(row, samples_per_step=(44, 48)) for row in pair[0].rows]
        assert "44 to 48 samples a step, not 48" in results_text(replace(pair[0], rows=tuple(rows)))

    def test_the_best_row_stands_out(self, pair: tuple[Results, list[Outcome]]) -> None:
        lines = results_lines(pair[0], 80)
        bold = [line.plain.split()[0] for line in lines if any("bold green" in style for _, style in line.parts)]
        assert bold == ["potluck"]
        assert best_row(pair[0].rows[:1]) is None

    def test_a_strategy_that_failed(self, pair: tuple[Results, list[Outcome]]) -> None:
        failed = replace(pair[0].rows[1], step_s=None, samples_per_s=None, speedup=None, efficiency=None)
        failed = replace(failed, recovery=None, bytes_per_step=None, loss=None, samples_per_step=None)
        table = replace(pair[0], rows=(pair[0].rows[0], failed), notes={"ddp": "failed: no"})
        assert results_text(table).count("–") == 9  # solo's bytes among them; nothing was predicted here
        assert "failed: no" in results_text(table)

    def test_no_minus_before_a_zero(self, pair: tuple[Results, list[Outcome]]) -> None:
        rows = tuple(replace(row, recovery=-0.001) for row in pair[0].rows)
        assert "-0.00" not in results_text(replace(pair[0], rows=rows))

    def test_on_a_stream_without_utf8(self, pair: tuple[Results, list[Outcome]]) -> None:
        stream = Pipe("ascii")
        show_results(pair[0], stream)
        assert stream.getvalue().isascii()
        assert "?" not in stream.getvalue()


def interval(start: float, end: float, kind: str = "compute") -> Interval:
    return Interval(machine="desk", kind=kind, start=start, end=end)


class TestTimeline:
    def test_intervals_are_joined_cut_and_moved(self) -> None:
        many = [interval(10.0 + n * 0.01, 10.009 + n * 0.01) for n in range(1000)]
        assert lab_timeline.joined(many, 12.0, 15.0, 0.002) == [pytest.approx((0.0, 2.999))]
        assert len(lab_timeline.joined(many, 12.0, 15.0, 0.0001)) == 300
        apart = [interval(1, 2), interval(1.5, 3), interval(5, 6), interval(8, 9)]
        assert lab_timeline.joined(apart, 2, 7, 0.1) == [(0, 1), (3, 4)]
        assert lab_timeline.joined([interval(3, 3), interval(4, 3)], 0, 9, 0.1) == []

    def test_the_window(self) -> None:
        assert lab_timeline.window_length([7.0, 16.0, 6.0]) == pytest.approx(1.12 * 16)
        assert lab_timeline.window_length([7.0, 6.0]) == pytest.approx(15)
        assert lab_timeline.window_length([150.0, 6.0]) == pytest.approx(48)

    def test_the_window_begins_with_a_step_in_the_middle_of_the_run(
        self, pair: tuple[Results, list[Outcome]]
    ) -> None:
        for outcome in pair[1]:
            start = lab_timeline.window_start(outcome, 18.0, 4)
            begins = [outcome.started_at, *(step.ended_at for step in outcome.steps)]
            assert start in begins[4:]
            assert start + 18.0 <= outcome.steps[-1].ended_at

    def test_a_run_shorter_than_the_window(self, pair: tuple[Results, list[Outcome]]) -> None:
        outcome = pair[1][0]
        assert lab_timeline.window_start(outcome, 1e6, 4) == outcome.steps[3].ended_at

    def test_how_busy_a_machine_is(self, pair: tuple[Results, list[Outcome]]) -> None:
        solo, ddp = pair[1][0], pair[1][1]
        assert lab_timeline.busy_share(solo, "desk", 4) == pytest.approx(0.99, abs=0.01)
        assert lab_timeline.busy_share(ddp, "desk", 4) == pytest.approx(3.6 / ddp.steps[5].step_s, rel=0.02)
        assert lab_timeline.busy_share(solo, "laptop", 4) is None


def test_labels_do_not_touch() -> None:
    ends = [("solo", 87.0), ("ddp", 194.0), ("ddp-balanced", 92.0), ("potluck", 71.0)]
    labels = place_labels(ends, 206.0, 8.1)
    assert [label.row for label in labels] == [1, 0, 2, 0]
    assert [label.text for label in labels] == ["solo, 87 s", "ddp, 194 s", "ddp-balanced, 92 s", "potluck, 71 s"]
    far = place_labels([("solo", 10.0), ("ddp", 5000.0)], 42.0, 8.1)
    assert far[1].text.endswith("→")
    assert far[1].right_s == pytest.approx(42.0)
    at_the_left = place_labels([("ddp-balanced", 1.0)], 100.0, 8.1)
    assert at_the_left[0].right_s > 20  # moved to the right, not cut off


class TestPlots:
    @pytest.fixture(autouse=True)
    def _needs_matplotlib(self) -> None:
        pytest.importorskip("matplotlib")

    def test_all_pictures_are_written(self, pair: tuple[Results, list[Outcome]], tmp_path: Path) -> None:
        written = lab_plots.write(tmp_path / "new", *pair)
        kinds = [f"{name}.{kind}" for name in ("speedup", "timeline", "loss") for kind in ("png", "svg")]
        assert [path.name for path in written] == kinds
        for path in written:
            if path.suffix == ".png":
                content = path.read_bytes()
                assert content.startswith(b"\x89PNG")
                width, height = struct.unpack(">II", content[16:24])
                assert width >= 1400
                assert height >= 500
                assert len(content) > 20_000
            else:
                assert ET.parse(path).getroot().tag.endswith("svg")

    def test_the_same_results_give_the_same_svg(self, pair: tuple[Results, list[Outcome]], tmp_path: Path) -> None:
        for folder in ("a", "b"):
            lab_plots.write(tmp_path / folder, pair[0], pair[1][3:])
        assert (tmp_path / "a" / "loss.svg").read_bytes() == (tmp_path / "b" / "loss.svg").read_bytes()

    def test_the_bars_are_the_speedups(self, pair: tuple[Results, list[Outcome]]) -> None:
        figure = lab_plots.draw_speedup(pair[0])
        assert figure is not None
        (axes,) = figure.axes
        assert [bar.get_width() for bar in axes.patches] == [row.speedup for row in pair[0].rows]
        words = [text.get_text() for text in axes.texts]
        assert "1.23×" in words
        assert " ideal 1.25×" in words

    def test_only_what_happened_in_the_window_is_drawn(self, pair: tuple[Results, list[Outcome]]) -> None:
        figure = lab_timeline.draw_timeline(*pair)
        assert figure is not None
        (axes,) = figure.axes
        # Thousands of intervals become some dozens of bars.
        bars = sum(len(collection.get_paths()) for collection in axes.collections)
        assert sum(len(outcome.intervals) for outcome in pair[1]) > 5000
        assert bars < 120
        words = [text.get_text() for text in axes.texts]
        for name in ("solo", "ddp", "ddp-balanced", "potluck", "desk", "laptop", "step 8"):
            assert name in words, name

    def test_nothing_measured_nothing_drawn(self, pair: tuple[Results, list[Outcome]], tmp_path: Path) -> None:
        nothing = Outcome(strategy="ddp", started_at=0.0, steps=[])
        rows = tuple(replace(row, speedup=None) for row in pair[0].rows)
        assert lab_plots.write(tmp_path, replace(pair[0], rows=rows), [nothing]) == []

    def test_a_strategy_without_intervals_is_left_out(self, pair: tuple[Results, list[Outcome]]) -> None:
        figure = lab_timeline.draw_timeline(pair[0], [replace(pair[1][1], intervals=[]), pair[1][3]])
        assert figure is not None
        words = [text.get_text() for text in figure.axes[0].texts]
        assert "potluck" in words
        assert "ddp" not in words

    def test_a_folder_that_cannot_be_written(self, pair: tuple[Results, list[Outcome]], tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        with pytest.raises(UserError, match="cannot write") as caught:
            lab_plots.write(tmp_path / "file", *pair)
        assert caught.value.hint


def test_without_matplotlib(
    pair: tuple[Results, list[Outcome]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = builtins.__import__

    def no_matplotlib(name: str, *args: object, **kwargs: object) -> object:
        if name.split(".")[0] == "matplotlib":
            raise ImportError(name)
        return original(name, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(builtins, "__import__", no_matplotlib)
    with pytest.raises(UserError, match="matplotlib") as caught:
        lab_plots.write(tmp_path, *pair)
    assert ".[plots]" in caught.value.hint
