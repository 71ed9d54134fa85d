"""The rig file: every mistake gets an error that says what to type instead, and every rig can be written again."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from potluck.checked import to_json
from potluck.errors import ConfigError
from potluck.lab import rigs
from potluck.plan import about
from potluck.spec.rig import (
    Machine,
    Rig,
    SpeedChange,
    Workload,
    loads,
    parse,
    read_text,
)
from potluck.train import recipes
from support.rigs import to_toml

HOST = {"name": "desk", "role": "host", "seconds_per_sample": 0.15}
GUEST = {"name": "laptop", "seconds_per_sample": 0.6, "link_mbit": 40}
RIG: dict[str, Any] = {"name": "pair", "workload": {"depth": 4, "global_batch": 48}, "machine": [HOST, GUEST]}


def with_guest(**keys: Any) -> dict[str, Any]:
    return {**RIG, "machine": [HOST, {**GUEST, **keys}]}


def with_host(**keys: Any) -> dict[str, Any]:
    return {**RIG, "machine": [{**HOST, **keys}, GUEST]}


def with_workload(**keys: Any) -> dict[str, Any]:
    return {**RIG, "workload": keys}


def test_the_issues_own_file() -> None:
    rig = rigs.load("home-pair")
    assert rig.name == "home-pair"
    assert rig.workload == Workload(recipe="gpt", depth=4, global_batch=48, steps=12)
    assert rig.host == Machine(name="desk", role="host", seconds_per_sample=0.15)
    assert rig.guests == (Machine(name="laptop", seconds_per_sample=0.6, link_mbit=40),)
    assert rig.steady
    assert about.ideal_speedup(rig) == pytest.approx(1.25)


def change(**keys: Any) -> dict[str, Any]:
    return with_guest(speed_changes=[keys])


MISTAKES: dict[str, tuple[dict[str, Any], str, str]] = {
    "unknown key": ({**RIG, "machines": []}, "no key 'machines'", "did you mean machine"),
    "unknown key of a machine": (with_guest(link_mbits=3), "laptop.*'link_mbits'", "did you mean link_mbit?"),
    "unknown key of the workload": (with_workload(dept=3), "workload.*'dept'", "did you mean depth?"),
    "unknown key of a change": (change(at_stepp=3, seconds_per_sample=1), "laptop.*'at_stepp'", "at_step?"),
    "no name": ({**RIG, "name": ""}, "no name", 'name = "my-rig"'),
    "name missing": ({k: v for k, v in RIG.items() if k != "name"}, "no name", 'name = "my-rig"'),
    "name is a number": ({**RIG, "name": 3}, "name is 3", "must be text"),
    "name of a path": ({**RIG, "name": "../x"}, "'../x'", "leave out /"),
    "about is a number": ({**RIG, "about": 3}, "about is 3", "must be text"),
    "workload is a number": ({**RIG, "workload": 3}, "workload is 3", r"\[workload\]"),
    "one bracket": ({**RIG, "machine": HOST}, "machine is {", r"\[\[machine\]\]"),
    "no machines": ({**RIG, "machine": []}, "no host", 'role = "host"'),
    "no host": ({**RIG, "machine": [GUEST]}, "no host", 'role = "host"'),
    "two hosts": (with_guest(role="host"), r"2 hosts \(desk, laptop\)", "exactly one"),
    "two of one name": (with_guest(name="desk"), "two machines are called 'desk'", "its own name"),
    "65 machines": (
        {**RIG, "machine": [HOST, *({"name": f"g{i}"} for i in range(64))]},
        "65 machines",
        "at most 64",
    ),
    "machine without a name": ({**RIG, "machine": [HOST, {}]}, "number 2: name is missing", "must be text"),
    "machine's name of a path": (with_guest(name="a/b"), "called 'a/b'", "letters and digits"),
    "name of an option": (with_guest(name="-x"), "called '-x'", "letters and digits"),
    "name too long": (with_guest(name="x" * 41), "called", "40 at most"),
    "role": (with_guest(role="boss"), "role is 'boss'", "one of guest, host"),
    "recipe": (with_workload(recipe="gtp"), "recipe is 'gtp'", "did you mean gpt"),
    "depth of cnn": (with_workload(recipe="cnn", depth=3), "depth does not apply", "leave depth out"),
    "sequence of cnn": (with_workload(recipe="cnn", sequence=3), "sequence does not apply", "leave"),
    "batch 0": (with_workload(global_batch=0), "global_batch is 0", "1 or more"),
    "steps -1": (with_workload(steps=-1), "steps is -1", "1 or more"),
    "depth 0": (with_workload(depth=0), "depth is 0", "1 or more"),
    "seed -1": (with_workload(seed=-1), "seed is -1", "0 or more"),
    "half a step": (with_workload(steps=2.5), "steps is 2.5", "whole number"),
    "speed 0": (with_guest(seconds_per_sample=0), "laptop.*seconds_per_sample is 0", "from 1e-06 to"),
    "speed negative": (with_host(seconds_per_sample=-0.1), "desk.*is -0.1", "from 1e-06"),
    "speed infinite": (with_guest(seconds_per_sample=float("inf")), "is inf", "to 1e[+]06"),
    "speed next to nothing": (with_guest(seconds_per_sample=1e-300), "is 1e-300", "from 1e-06"),
    "speed in words": (with_guest(seconds_per_sample="fast"), "laptop.*'fast'", "a number"),
    "link 0": (with_guest(link_mbit=0), "link_mbit is 0", "from 0.001"),
    "link negative": (with_host(link_mbit=-1), "link_mbit is -1", "from 0.001"),
    "latency negative": (with_guest(latency_ms=-1), "latency_ms is -1", "from 0 to 60000"),
    "latency of two minutes": (with_guest(latency_ms=120_000), "latency_ms is 120000", "from 0 to 60000"),
    "no cores": (with_guest(cpu_limit=0), "cpu_limit is 0", "from 0.01"),
    "no micro-batch": (with_guest(micro_batch=0), "micro_batch is 0", "from 1 to"),
    "host joins late": (with_host(join_at_step=3), "host cannot join", "only guests"),
    "host leaves": (with_host(leave_at_step=3), "host cannot join", "only guests"),
    "join at 0": (with_guest(join_at_step=0), "join_at_step is 0", "from 1 to"),
    "leaves before it joins": (with_guest(join_at_step=5, leave_at_step=5), "leaves at step 5", "after join"),
    "leaves at 0": (with_guest(leave_at_step=0), "leaves at step 0", "after join"),
    "returns before it leaves": (with_guest(leave_at_step=5, return_at_step=5), "returns at step 5", "after leave"),
    "returns without leaving": (with_guest(return_at_step=5), "never leaves", "after leave"),
    "changes are a number": (with_guest(speed_changes=3), "laptop.*speed_changes is 3", r"list of tables"),
    "changes are numbers": (with_guest(speed_changes=[3]), "laptop.*speed_changes number 1 is 3", "a table"),
    "change without step": (change(seconds_per_sample=1), "number 1: at_step is missing", "from 2 to"),
    "change without speed": (change(at_step=3), "seconds_per_sample is missing", "a number from"),
    "change of nothing": (change(), "at_step is missing", "a whole number"),
    "change twice": (change(**{"at_step": 3, "at-step": 4}), "seconds_per_sample is missing", "a number from"),
    "change to 0": (change(at_step=3, seconds_per_sample=0), "laptop.*is 0", "from 1e-06"),
    "change at step 1": (change(at_step=1, seconds_per_sample=1), "at_step is 1", "from 2 to"),
    "changes not in order": (
        with_guest(
            speed_changes=[{"at_step": 5, "seconds_per_sample": 1}, {"at_step": 3, "seconds_per_sample": 1}]
        ),
        r"at steps \[5, 3\]",
        "rise",
    ),
    "changes of no speed": (
        {**RIG, "machine": [HOST, {"name": "x", "speed_changes": [{"at_step": 2, "seconds_per_sample": 1}]}]},
        "without seconds_per_sample",
        "starts with",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_says_what_to_type_instead(name: str) -> None:
    table, what, hint = MISTAKES[name]
    with pytest.raises(ConfigError) as caught:
        parse(table)
    assert re.search(what, caught.value.what), caught.value.what
    assert re.search(hint, caught.value.hint), caught.value.hint
    assert caught.value.exit_status == 2


def test_the_table_of_mistakes_starts_from_a_sound_rig() -> None:
    assert parse(RIG).guests[0].link_mbit == 40


def test_dashes_are_underscores() -> None:
    changes = [{"at-step": 3, "seconds-per-sample": 1.2}]
    machine = parse({**RIG, "machine": [HOST, {"name": "x", "seconds-per-sample": 1, "speed-changes": changes}]})
    assert machine.guests[0].speed_changes == (SpeedChange(at_step=3, seconds_per_sample=1.2),)


class TestFiles:
    def test_a_file(self, tmp_path: Path) -> None:
        path = tmp_path / "mine.toml"
        path.write_text(to_toml(parse(RIG)))
        assert loads(read_text(path), str(path)) == parse(RIG) == rigs.load(str(path))
        assert rigs.text(str(path)) == path.read_text()

    def test_a_mistake_names_the_file(self, tmp_path: Path) -> None:
        path = tmp_path / "mine.toml"
        path.write_text('name = "x"\ncolour = 3\n')
        with pytest.raises(ConfigError, match=r"mine\.toml:2:") as caught:
            rigs.load(str(path))
        assert (caught.value.code, caught.value.path) == ("bad-config", ("colour",))

    @pytest.mark.parametrize("content", [b"name = ", b"\xff\xfe", b"a = 1\na = 2"])
    def test_no_toml(self, tmp_path: Path, content: bytes) -> None:
        path = tmp_path / "mine.toml"
        path.write_bytes(content)
        with pytest.raises(ConfigError, match=r"mine\.toml is not a") as caught:
            rigs.load(str(path))
        assert "--toml" in caught.value.hint

    @pytest.mark.parametrize("path", ["nowhere.toml", "no/where", "."])
    def test_no_file(self, path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        with pytest.raises(ConfigError):
            rigs.load(path)

    def test_an_unknown_name_gets_the_nearest_and_all(self) -> None:
        with pytest.raises(ConfigError, match="there is no rig 'home-pear'") as caught:
            rigs.load("home-pear")
        assert "did you mean home-pair?" in caught.value.hint
        for name in rigs.NAMES:
            assert name in caught.value.hint

    def test_a_codec_that_does_not_exist(self) -> None:
        assert loads('name="x"\n[[machine]]\nname="a"\nrole="host"\n', "x").workload.codec == "auto"
        with pytest.raises(ConfigError, match="int5"):
            rigs.check(parse(with_workload(codec="int5")), "x")


class TestOverTime:
    MACHINE = Machine(
        name="x",
        seconds_per_sample=0.4,
        join_at_step=3,
        leave_at_step=6,
        return_at_step=9,
        speed_changes=(
            SpeedChange(at_step=4, seconds_per_sample=0.8),
            SpeedChange(at_step=8, seconds_per_sample=0.2),
        ),
    )

    def test_presence(self) -> None:
        assert [step for step in range(1, 12) if self.MACHINE.present_at(step)] == [3, 4, 5, 9, 10, 11]

    def test_speed(self) -> None:
        speeds = [self.MACHINE.seconds_per_sample_at(step) for step in (1, 3, 4, 7, 8, 20)]
        assert speeds == [0.4, 0.4, 0.8, 0.8, 0.2, 0.2]

    def test_the_ideal_follows(self) -> None:
        host = Machine(name="h", role="host", seconds_per_sample=0.2)
        rig = Rig(name="r", workload=Workload(), machines=(host, self.MACHINE))
        assert not rig.steady
        assert about.ideal_speedup(rig, [1]) == pytest.approx(1.0)
        assert about.ideal_speedup(rig, [3]) == pytest.approx(1.5)
        assert about.ideal_speedup(rig, [5]) == pytest.approx(1.25)
        assert about.ideal_speedup(rig, [10]) == pytest.approx(2.0)
        alone = Rig(name="r", workload=Workload(), machines=(Machine(name="h", role="host"),))
        assert about.ideal_speedup(alone) is None

    def test_a_machine_by_name(self) -> None:
        rig = parse(RIG)
        assert rig.machine("laptop") is rig.guests[0]
        with pytest.raises(ConfigError, match="'labtop'") as caught:
            rig.machine("labtop")
        assert "laptop" in caught.value.hint

    def test_other_steps(self) -> None:
        assert parse(RIG).with_steps(3).workload.steps == 3


# -- every rig can be written and read again --------------------------------------------------------------

positive = st.floats(1e-6, 1e6, allow_nan=False) | st.integers(1, 10**6).map(float)
names = st.from_regex(r"[a-z0-9][a-z0-9_.\-]{0,20}", fullmatch=True) | st.sampled_from(["ü1", "東京"])


def maybe(strategy: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.none() | strategy


@st.composite
def guests(draw: st.DrawFn, name: str) -> Machine:
    join = draw(st.integers(1, 20))
    leave = draw(maybe(st.integers(join + 1, 40)))
    back = draw(maybe(st.integers(leave + 1, 60))) if leave is not None else None
    seconds = draw(maybe(positive))
    steps = sorted(draw(st.sets(st.integers(2, 99), max_size=4))) if seconds is not None else []
    return Machine(
        name=name,
        seconds_per_sample=seconds,
        link_mbit=draw(maybe(st.floats(0.001, 1e6))),
        latency_ms=draw(st.floats(0, 59_999)),
        cpu_limit=draw(maybe(st.floats(0.01, 64))),
        micro_batch=draw(maybe(st.integers(1, 999))),
        join_at_step=join,
        leave_at_step=leave,
        return_at_step=back,
        speed_changes=tuple(SpeedChange(at_step=s, seconds_per_sample=draw(positive)) for s in steps),
    )


@st.composite
def rigs_of_any_kind(draw: st.DrawFn) -> Rig:
    taken = draw(st.lists(names, min_size=1, max_size=5, unique=True))
    host = Machine(name=taken[0], role="host", seconds_per_sample=draw(maybe(positive)))
    recipe = draw(st.sampled_from(recipes.NAMES))
    of_gpt = maybe(st.integers(1, 999)) if recipe == "gpt" else st.none()
    workload = Workload(
        recipe=recipe,
        depth=draw(of_gpt),
        sequence=draw(of_gpt),
        global_batch=draw(st.integers(1, 2**40)),
        steps=draw(st.integers(1, 99)),
        seed=draw(st.integers(0, 2**64)),
        codec=draw(st.sampled_from(["none", "auto", "topk:0.01"])),
    )
    text = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
    title = draw(text.filter(lambda t: bool(t.strip()) and t.isprintable() and not set(t) & set("/\\")))
    machines = (host, *(draw(guests(name)) for name in taken[1:]))
    return Rig(name=title, about=draw(text), workload=workload, machines=machines)


@settings(max_examples=150, deadline=None)
@given(rigs_of_any_kind())
def test_any_rig_can_be_written_and_read_again(rig: Rig) -> None:
    assert loads(to_toml(rig), "it") == rig
    assert parse(json.loads(to_json(rig))) == rig


@settings(max_examples=60, deadline=None)
@given(rigs_of_any_kind())
def test_any_rig_has_facts(rig: Rig) -> None:
    facts = about.facts(rig)
    if facts.shares is not None:
        assert sum(facts.shares.values()) == rig.workload.global_batch
    if facts.rounding_cost is not None:
        assert -1e-9 <= facts.rounding_cost < 1


@pytest.mark.parametrize("name", rigs.NAMES)
def test_the_built_in_rigs(name: str) -> None:
    rig = rigs.load(name)
    assert rig.name == name
    assert rig.about
    assert tomllib.loads(rigs.text(name))["name"] == name
    facts = about.facts(rig)
    assert facts.host_step_s is not None
    assert 3 <= facts.host_step_s <= 7.5
    assert facts.rounding_cost is not None
    # home-pair is the issue's own file, with 48 samples at 4 : 1.
    assert facts.rounding_cost < (0.016 if name == "home-pair" else 0.01)


@pytest.mark.parametrize(
    ("name", "slower", "ratio"),
    [
        ("home-pair", [4], 0.37),
        ("desk-and-mac", [8], 0.304),
        ("i9-i5", [2.2], 0.1),
        ("twins", [1], 0.4),
        ("three-friends", [2, 4, 8], 0.2),
        ("wifi", [2], 3.0),
        ("thin-twins", [1], 2.8),
        ("internet", [2], 1.68),
        ("moody", [2, 4], 0.1),
        ("hopeless", [50], 3.46),
    ],
)
def test_the_built_in_rigs_are_what_they_say(name: str, slower: list[float], ratio: float) -> None:
    facts = about.facts(rigs.load(name))
    guests = [m for m in facts.machines if m.role == "guest"]
    assert [1 / (m.relative_speed or 0) for m in guests] == pytest.approx(slower)
    assert [m.gradient_ratio for m in guests] == pytest.approx([ratio] * len(guests), rel=0.01)


def test_desk_and_mac_has_the_ratio_of_the_real_thing() -> None:
    real = 0.498e9 * 8 / 1e9 / (524_288 / 40_000)
    assert about.gradient_ratio(rigs.load("desk-and-mac"), "mac") == pytest.approx(real, rel=0.005)


def test_a_rate_up_needs_one_down_and_the_slower_counts() -> None:
    assert about.link_mbit(rigs.load("internet"), rigs.load("internet").machine("cabin")) == 20
    with pytest.raises(ConfigError, match="link_up_mbit without link_mbit"):
        Machine(name="a", link_up_mbit=3.0)


def test_every_toml_file_is_a_built_in_rig() -> None:
    folder = Path(rigs.__file__).parent
    assert {path.stem for path in folder.glob("*.toml")} == set(rigs.NAMES)


def test_recipes_are_those_that_exist() -> None:
    assert get_args(get_type_hints(Workload)["recipe"]) == recipes.NAMES


def test_the_rigs_files_are_installed() -> None:
    """setuptools leaves out what is not Python unless told."""
    project = tomllib.loads((Path(__file__).resolve().parents[2] / "pyproject.toml").read_text())
    assert "*.toml" in project["tool"]["setuptools"]["package-data"]["potluck.lab.rigs"]


class TestReference:
    PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "rig.md"

    def test_every_key_has_its_row(self) -> None:
        page = self.PAGE.read_text(encoding="utf-8")
        for table in (Workload, Machine):
            for name in table.__struct_fields__:
                assert f"| `{name}` |" in page, name

    def test_its_examples_are_rigs(self) -> None:
        examples = re.findall(r"```toml\n(.*?)```", self.PAGE.read_text(encoding="utf-8"), re.S)
        assert len(examples) == 2
        assert loads(examples[0], "the first") == rigs.load("home-pair")
        assert not loads(examples[1], "the second").steady
