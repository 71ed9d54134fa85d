"""The rows of the campaign: what each tries, how often in all, and which short test stands for it in `make test`.

It must not know how a row is carried out; that is its script's affair.
"""

from __future__ import annotations

from dataclasses import dataclass

TIMES, MINUTES = "times", "min"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One row of the table in docs/reliability.md."""

    name: str
    script: str
    what: str
    must: str
    wanted: int
    """In all, however many pieces that takes."""
    unit: str = TIMES
    """What is counted: attempts, or minutes."""
    minutes: float
    """About how long all of it takes on a quiet computer, and its share of `make stress`'s time."""
    least_minutes: float = 0.5
    """With less it would try nothing."""
    scaled: tuple[tuple[str, float, float], ...] = ()
    """Other options that follow the scale: name, value at scale 1, least value."""
    short: tuple[str, ...]
    """Tests of `make test`, as FILE::NAME below tests/faults."""


ROWS = (
    Row(
        name="R1",
        script="r1_guest_kills.py",
        what="kill -9 a random guest at a random moment",
        must="every run ends with the right step count; each step exactly `global_batch` samples; no step lost",
        wanted=200,
        minutes=15,
        short=("test_guest_faults.py::test_one_guest_dies_one_sleeps_and_then_the_host_sleeps",),
    ),
    Row(
        name="R2",
        script="r2_host_crash.py",
        what="kill -9 the host, resume with the same command",
        must="resumes within one checkpoint interval; the sample ledger exact",
        wanted=100,
        minutes=15,
        short=("test_host_crash.py::test_killed_at_any_moment_with_guests_at_the_table",),
    ),
    Row(
        name="R3",
        script="r3_failpoints.py",
        what="kill at every named failpoint, 10 times each",
        must="no unreadable checkpoint, no acknowledged one lost",
        wanted=10,
        unit="of each",
        minutes=60,
        least_minutes=1.5,
        short=(
            "test_host_crash.py::test_killed_at_a_named_moment",
            "test_checkpoint_faults.py::test_killed_at_every_moment_of_a_save",
        ),
    ),
    Row(
        name="R4",
        script="r4_save_window.py",
        what="kill -9 inside the save window",
        must="0 unreadable",
        wanted=500,
        minutes=10,
        scaled=(("--in-place", 200, 0),),
        short=("test_checkpoint_faults.py::test_kills_inside_the_save_window",),
    ),
    Row(
        name="R5",
        script="r5_damage.py",
        what="truncate or flip bits in any checkpoint file",
        must="all detected, the previous one loaded",
        wanted=1000,
        minutes=5,
        short=("test_checkpoint_faults.py::test_damage_to_any_file_is_noticed",),
    ),
    Row(
        name="R6",
        script="r6_freeze.py",
        what="SIGSTOP or blackhole a guest",
        must="noticed within 5 s, named, the step not delayed beyond its take-back",
        wanted=100,
        minutes=15,
        least_minutes=1.0,
        short=("test_guest_faults.py::test_one_guest_dies_one_sleeps_and_then_the_host_sleeps",),
    ),
    Row(
        name="R7",
        script="r7_bit_identical.py",
        what="a resumed run against an uninterrupted one, host alone, CPU fp32",
        must="bit-identical parameters",
        wanted=20,
        minutes=10,
        short=("test_host_crash.py::test_a_resumed_run_is_the_uninterrupted_one_to_the_bit",),
    ),
    Row(
        name="R8",
        script="r8_hashes.py",
        what="replica hash equal on all machines, joins included",
        must="0 mismatches",
        wanted=10_000,
        minutes=20,
        short=("test_long_rows.py::test_hashes_are_equal_while_guests_come_and_go",),
    ),
    Row(
        name="R9",
        script="r9_churn.py",
        what="churn: a join or a leave every few seconds",
        must="0 wedges, sample accounting exact",
        wanted=20,
        unit=MINUTES,
        minutes=20,
        short=("test_long_rows.py::test_churn_wedges_nobody",),
    ),
    Row(
        name="R10",
        script="r10_endings.py",
        what="Ctrl-C, SIGTERM, terminal gone, host gone; 50 each",
        must="0 orphans after 10 s, no namespace, port or shared memory left",
        wanted=200,
        minutes=30,
        short=(
            "test_endings.py::test_a_signal_ends_it_in_order",
            "test_endings.py::test_it_ends_when_nobody_can_see_it_any_more",
            "test_endings.py::test_guests_on_this_machine_end_with_their_host",
            "test_endings.py::test_guests_of_another_machine_leave_and_give_up",
        ),
    ),
    Row(
        name="R11",
        script="r11_soak.py",
        what="soak with 3 guests",
        must="memory and file descriptors flat",
        wanted=60,
        unit=MINUTES,
        minutes=60,
        least_minutes=2.0,
        short=("test_long_rows.py::test_a_soak_gains_no_descriptor",),
    ),
    Row(
        name="R12",
        script="r12_not_finite.py",
        what="NaN, inf or huge values on the host, a guest, or both",
        must="0 checkpoints that are not finite; a run whose host is well makes all its steps",
        wanted=100,
        minutes=10,
        short=("test_not_finite.py::test_no_bad_number_reaches_a_checkpoint",),
    ),
    Row(
        name="S1",
        script="s1_strangers.py",
        what="strangers: connects, garbage, HTTP, wrong key, replayed handshake",
        must="0 accepted; step time within 5 %; no secret in any log",
        wanted=10_000,
        minutes=10,
        short=(
            "test_strangers.py::test_every_kind_of_stranger_is_refused_and_a_guest_goes_on",
            "test_strangers.py::test_a_run_with_strangers_and_a_rogue_leaks_no_secret",
        ),
    ),
    Row(
        name="S2",
        script="s2_fuzz.py",
        what="fuzzed frames after authentication",
        must="no crash, no hang, memory within its cap",
        wanted=1_000_000,
        minutes=30,
        scaled=(("--live", 20_000, 500),),
        short=("test_fuzz_short.py::test_only_wire_errors_come_out_of_mutated_messages",),
    ),
    Row(
        name="S3",
        script="s3_half_open.py",
        what="500 half-open connections held",
        must="training unaffected, a real guest still joins",
        wanted=5,
        unit=MINUTES,
        minutes=7,
        least_minutes=0.5,
        short=(
            "test_strangers.py::test_a_guest_joins_past_connections_that_are_held",
            "test_strangers.py::test_a_crowd_beyond_the_bound_is_closed_and_a_guest_stays",
        ),
    ),
    Row(
        name="S4",
        script="s4_no_pickle.py",
        what="no pickle, statically and by an audit hook over train, join, resume",
        must="0 loads",
        wanted=1,
        minutes=2,
        least_minutes=1.0,
        short=(
            "test_sockets.py::test_nothing_is_unpickled_by_host_guest_or_resumed_host",
            "test_sockets.py::test_nothing_in_the_source_could_unpickle",
        ),
    ),
    Row(
        name="S5",
        script="s5_sockets.py",
        what="listening sockets of every command",
        must="only the chosen address; none after exit",
        wanted=1,
        minutes=2,
        least_minutes=1.0,
        short=(
            "test_sockets.py::test_a_host_listens_on_the_chosen_address_only_and_a_guest_on_none",
            "test_sockets.py::test_nobody_listens_after_the_end",
        ),
    ),
    Row(
        name="S6",
        script="s6_codes.py",
        what="wrong codes of `potluck host --lan`, and all codes against a recorded exchange",
        must="0 let in; no code of the whole space is confirmed, not even the right one",
        wanted=10_000,
        minutes=8,
        short=(
            "test_codes.py::test_ten_thousand_wrong_codes_let_nobody_in",
            "test_codes.py::test_a_recording_confirms_no_code_not_even_the_right_one",
        ),
    ),
)
NAMES = tuple(row.name for row in ROWS)
