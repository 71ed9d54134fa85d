"""The events of a run's log: one class for each kind, and how a line of events.jsonl is encoded and decoded. PURE.

On disk and in `--view json` an event is one JSON object; everywhere else it is an object of one of these classes. A
field with a default is left out of the JSON while it has that value. The tables in docs/reference/run-folder.md are
generated from this file.
"""

from __future__ import annotations

import itertools
from typing import Any, Literal

import msgspec
from msgspec import Struct

from potluck import checked
from potluck.bounds import LONGEST, Finite, Length, Many, Named, Natural, Positive, Text


class _Event(Struct, frozen=True, tag_field="event", omit_defaults=True):
    t_s: Finite = 0.0
    """Seconds since this process opened the log, by its monotonic clock. Set by the log."""


# -- the run --------------------------------------------------------------------------------------------


class RunStarted(_Event, frozen=True, kw_only=True, tag="run_start"):
    """A process begins or resumes the training."""

    run_id: Text
    """Name of the run folder; empty without one."""
    folder: Text
    """Path of the run folder; empty without one."""
    clock_s: Finite
    """This machine's monotonic clock when `t_s` was 0. Use it to align the log with other recordings of the same
    machine."""
    recipe: Text
    """Name of the recipe or of the script."""
    machine: Text
    """Name of the host."""
    device: Text
    """Device of the host."""
    steps: Length | None
    """Steps in total; null in an endless run, and where a stream does not say its length."""
    global_batch: Natural
    """Samples in a step."""
    parameters: Natural
    """Number of the model's parameters."""
    trained_parameters: Natural
    """Number of those that are trained."""
    codec: Text
    """Codec of the gradients and weights that are sent."""
    micro_batch: Natural | None
    """Samples that the host computes at once, where set; null: found by measuring."""
    tokens_per_sample: Finite | None
    """Tokens in a sample; null if not given."""
    resumed_from: Positive | None
    """Steps that were finished before; null in a new run."""
    join: bool
    """Whether guests can join."""
    epochs: Length | None = None
    """Epochs in total; absent without `epochs=`."""
    workers: Natural | None = None
    """Worker processes of the script's DataLoader; absent without a loader."""


class MachineFigures(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A machine in the `machines` of a step."""

    name: Text
    """Name of the machine."""
    role: Literal["host", "guest"]
    """Its part in the run."""
    device: Text
    """What it computes on."""
    samples: Natural
    """Samples counted for it in this step."""
    micro_batch: Natural | None
    """Most samples computed at once in this step; null: none."""
    micro_batches: Natural
    """Number of its micro-batches."""
    rate: Finite | None
    """Samples per second while it computes."""
    busy: Finite | None
    """Share of the step in which it computed, 0 to 1."""
    state: Text
    """State of the machine, see above."""
    reason: Text
    """Why it is in this state; may be empty."""
    receive_s: Finite | None = None
    """A guest with samples in this step: seconds in which the weights' change arrived there."""
    send_s: Finite | None = None
    """The same guest: seconds from its last backward to the arrival of its gradient."""
    answered_s: Finite | None = None
    """The same guest: seconds from its lease to the arrival of its gradient."""
    link_bytes_per_s: Finite | None = None
    """Bytes of the weights' change ÷ the time that it takes to the guest, smoothed; absent below 5 ms."""


class StepEnded(_Event, frozen=True, kw_only=True, tag="step"):
    """A step is complete."""

    step: Positive
    """Steps finished."""
    steps: Length | None
    """Steps in total; null in an endless run."""
    loss: Finite | None
    """Mean over all samples (or items) of the step; for a guest's samples, the loss that the guest reported. Null
    if it is not finite."""
    applied: bool
    """Whether the update was made: false if the gradient was not finite (`step_not_applied`)."""
    step_s: Finite
    """Seconds since the end of the last step, without `between_s`."""
    between_s: Finite
    """Seconds that the script spent on something else before this step, such as a validation."""
    samples: Named[Natural]
    """`{machine: samples counted}`; they sum to the step's samples."""
    samples_per_s: Finite
    """Samples per second, over the last 8 steps."""
    tokens_per_s: Finite | None
    """Tokens per second, over the last 8 steps."""
    mfu: Finite | None
    """Share of the host's peak FLOP/s that its own samples used: 6 operations per trained and 4 per frozen
    parameter for each token, attention not counted. Null if the device's peak or the tokens per sample are not
    known."""
    speedup: Finite | None
    """Speed-up over the host alone: `(global_batch · host's seconds per sample + update + rest) ÷ step`, over the
    last 8 steps. The seconds per sample are those of the host's micro-batches of the fastest size; the rest is the
    overhead of steps without guests, or, if guests were there from the first step on, the host's overhead in steps
    with guests. Waiting for data counts as it would for the host alone. 1 while no guest computes. Null without
    guests, and until a guest has contributed."""
    predicted_s: Finite | None
    """Compute time of this step that the quotas expected."""
    eta_s: Finite | None
    """Seconds left to the last step; null in an endless run."""
    wait_s: Finite
    """Seconds that the host waited idle for leases."""
    update_s: Finite
    """Seconds for collecting, clipping, optimizer and scheduler."""
    bytes_up: Natural
    """Payload bytes received since the step began."""
    bytes_down: Natural
    """Payload bytes sent since the step began: weights, samples, and everything for new guests."""
    dropped: Natural
    """Samples in dropped contributions."""
    taken_back: Natural
    """Leased samples that the host took back."""
    machines: Many[MachineFigures]
    """The host first, then the guests that are present."""
    data_s: Finite = 0.0
    """Seconds that the host waited for the step's samples before it could begin, with nothing to compute: for the
    loader's worker processes, or for a stream. `predicted_s` includes them. Absent if none."""
    read_s: Finite = 0.0
    """Seconds in which the host's loop read its own samples itself. They count as its computing. Absent if none."""
    restart_s: Finite = 0.0
    """The part of `data_s` in which worker processes were started again for a new epoch. Absent if none."""
    ahead: Natural = 0
    """Leased samples that had been sent before their lease; absent if none."""
    unneeded: Natural = 0
    """Samples sent ahead that no lease of their guest used; absent if none."""
    unneeded_bytes: Natural = 0
    """Bytes of these samples that were sent; absent if none."""


class RunEnded(_Event, frozen=True, kw_only=True, tag="run_end"):
    """The training is over. A log without this event belongs to a run that is still going or was killed."""

    step: Natural
    """Steps finished."""
    loss: Finite | msgspec.UnsetType | None = msgspec.UNSET
    """Loss of the last step: null if it was not finite, absent if no step was made."""
    not_applied: Natural
    """Steps whose update was not applied."""
    seconds: Finite
    """Seconds since `run_start`."""
    samples_per_s: Finite
    """Samples per second over the steps' own seconds."""
    speedup: Finite | None
    """Mean of the steps' speed-ups, weighted by their seconds."""
    reason: Text
    """`finished`, `interrupted` or `failed`."""
    folder: Text
    """Path of the run folder; empty without one, and if it is removed because the run failed at once."""


# -- guests ---------------------------------------------------------------------------------------------


class _GuestEvent(_Event, frozen=True, kw_only=True):
    machine: Text
    """Name of the guest."""
    address: Text
    """Its address."""


class _GuestGone(_GuestEvent, frozen=True, kw_only=True):
    reason: Text
    """What happened."""
    step: Positive
    """Current step."""
    samples_taken_back: Natural
    """Samples of its lease that the host took back."""
    put_out: bool = False
    """True if the host excluded it; otherwise absent."""
    failed: bool = False
    """True if its script had failed; otherwise absent."""


class GuestHello(_GuestEvent, frozen=True, kw_only=True, tag="guest_hello"):
    """A machine with the token is joining. Of machines that have not joined at most 200 events a minute are
    written; a `note` says how many were left out."""

    device: Text
    """What it computes on."""


class GuestJoined(_GuestEvent, frozen=True, kw_only=True, tag="guest_joined"):
    """A guest passed the parity check: its gradients count from now on."""

    device: Text
    """What it computes on."""
    parity: Finite
    """Cosine of its gradient and the host's."""
    rate: Finite | None
    """Samples per second that it reached in the check."""
    spread: Finite | None = None
    """Cosine of the host's own two gradients; absent if the check did not use it."""


class GuestSitsOut(_Event, frozen=True, kw_only=True, tag="guest_sits_out"):
    """A guest gets no leases for a while."""

    machine: Text
    """Name of the guest."""
    step: Positive
    """Current step."""
    reason: Text
    """Why, and when it is tried again."""


class GuestCodec(_Event, frozen=True, kw_only=True, tag="guest_codec"):
    """With `codec = "auto"`: the codec of a guest's gradients was chosen, or changed."""

    machine: Text
    """Name of the guest."""
    step: Positive
    """Step from which it is used."""
    codec: Text
    """The codec."""
    reason: Text
    """Why: the transfer time on its link, and the effect on a step."""


class LeaseTakenBack(_GuestEvent, frozen=True, kw_only=True, tag="lease_taken_back"):
    """The host no longer waits for a lease."""

    step: Positive
    """Step of the lease."""
    samples: Natural
    """Samples taken back."""
    reason: Text
    """Why it was late."""
    silent: bool
    """Whether the guest had sent nothing at all."""


class ContributionDropped(_Event, frozen=True, kw_only=True, tag="contribution_dropped"):
    """A contribution was late, incomplete, not finite, far larger than the host's own, or not what was leased."""

    machine: Text
    """Name of the guest."""
    step: Positive
    """Step of the lease."""
    samples: Natural
    """Samples in the contribution."""
    reason: Text
    """Why it does not count."""


class GuestLeft(_GuestGone, frozen=True, kw_only=True, tag="guest_left"):
    """A guest left in order."""


class GuestLost(_GuestGone, frozen=True, kw_only=True, tag="guest_lost"):
    """A guest fell silent, its connection ended, or it was removed."""


class GuestRefused(_GuestEvent, frozen=True, kw_only=True, tag="guest_refused"):
    """A guest has a different model or protocol or different gradients, or there are too many guests."""

    reason: Text
    """Why it was refused."""
    step: Positive | None = None
    """Current step; absent if the guest had not been welcomed."""
    samples_taken_back: Natural | None = None
    """Samples of its lease that the host took back; absent if the guest had not been welcomed."""
    put_out: bool = False
    """True if the guest had been welcomed; otherwise absent."""
    failed: bool = False
    """True if its script had failed; otherwise absent."""


class ReplicaChecked(_GuestEvent, frozen=True, kw_only=True, tag="replica_checked"):
    """The hashes of a guest's weights equal the host's."""

    step: Positive
    """First step with these weights."""


class ReplicaMismatch(_GuestEvent, frozen=True, kw_only=True, tag="replica_mismatch"):
    """A guest's weights differ from the host's and are sent to it again."""

    step: Positive
    """First step with these weights."""
    samples: Natural
    """Samples taken back."""
    pieces: Natural
    """Pieces of the weights that differ."""
    reason: Text
    """What differs."""


class StrangerRefused(_Event, frozen=True, kw_only=True, tag="refused_stranger"):
    """A connection without the token's key, or with a wrong code, was refused. Of those without the key, only every
    hundredth is written after the first five."""

    address: Text
    """Address of the connection."""
    reason: Text
    """Why it was refused, and how many there were so far."""


# -- others ---------------------------------------------------------------------------------------------


class StepNotApplied(_Event, frozen=True, kw_only=True, tag="step_not_applied"):
    """An update was not made because the gradient was not finite. The step's samples count as used."""

    step: Positive
    """Number of the step."""
    machine: Text | None
    """Whose part of the gradient was not finite; null: all parts were finite, but not their sum."""
    reason: Text
    """What was not finite."""
    in_a_row: Natural
    """Steps in a row that were not applied."""
    so_far: Natural
    """Steps that were not applied since this process began."""


class CheckpointSaved(_Event, frozen=True, kw_only=True, tag="checkpoint"):
    """A checkpoint is on disk."""

    step: Natural
    """Steps finished in it."""
    path: Text
    """Its folder."""
    seconds: Finite
    """Seconds that writing it took."""


class CheckpointFailed(_Event, frozen=True, kw_only=True, tag="checkpoint_failed"):
    """A checkpoint could not be written; the run continues."""

    step: Natural
    """Steps finished."""
    reason: Text
    """What failed."""
    again: bool = False
    """True if it is tried again at the next interval; absent for the last checkpoint."""


class CheckpointDamaged(_Event, frozen=True, kw_only=True, tag="checkpoint_damaged"):
    """When resuming: a newer checkpoint cannot be used."""

    path: Text
    """Its folder."""
    reason: Text
    """What is wrong with it."""
    resumed_from: Natural
    """Step of the checkpoint that is used instead."""


class FlightRecorded(_Event, frozen=True, kw_only=True, tag="flight_recorded"):
    """A flight record was written."""

    machine: Text
    """Machine that wrote it."""
    path: Text
    """Its file."""
    first: bool
    """Whether it is the first since the run was started or resumed; the views show only that one."""


class LoopAwaited(_Event, frozen=True, kw_only=True, tag="loop_awaited"):
    """The script had not reached `run.steps()` after a minute."""

    what: Text
    """Name of the script."""
    seconds: Finite
    """Seconds since the start."""
    guests: Natural
    """Guests that are waiting."""


class LogGap(_Event, frozen=True, kw_only=True, tag="log_gap"):
    """Events before this one could not be written, as on a full disk; the run continued."""

    lines: Natural
    """Number of the missing events."""


class LogFailed(_Event, frozen=True, kw_only=True, tag="log_failed"):
    """This file cannot be written to. Shown by the views, not written."""

    path: Text
    """Path of the log."""
    reason: Text
    """What failed."""


class StatisticsMeasured(_Event, frozen=True, kw_only=True, tag="batch_statistics"):
    """In models with BatchNorm: after the second step, after the first to which a guest contributed, and when
    `effective_batch` has halved."""

    step: Positive
    """Steps finished."""
    kind: Text
    """Class of the first such layer."""
    layers: Natural
    """Number of layers."""
    names: Many[Text]
    """Names of the first three."""
    global_batch: Natural
    """Samples in a step."""
    micro_batch: Named[Natural]
    """`{machine: most samples at once}`."""
    effective_batch: Finite
    """Global batch ÷ micro-batches of the step."""


class Logged(_Event, frozen=True, kw_only=True, tag="logged"):
    """The script called `run.log(name=value)`."""

    step: Natural
    """Steps finished."""
    values: Named[Finite | None]
    """The values by name; null if one is not finite."""


class RunNote(_Event, frozen=True, kw_only=True, tag="note"):
    """Something a person may want to know, such as different versions."""

    text: Text
    """The sentence."""
    machine: Text | None = None
    """Machine that it is about; absent if it is about none."""


# -- on a guest -----------------------------------------------------------------------------------------


class Delivered(_Event, frozen=True, kw_only=True, tag="delivered"):
    """The guest sent a contribution."""

    step: Positive
    """Step of the lease."""
    samples: Natural
    """Samples in the contribution."""
    loss: Finite | None
    """Mean loss of these samples; null if it is not finite."""
    compute_s: Finite
    """Seconds of computing."""
    total_samples: Natural
    """Samples of all contributions so far, without those that the host has said did not count."""


class HostPreparing(_Event, frozen=True, kw_only=True, tag="host_preparing"):
    """The host's script has not reached its loop."""

    reason: Text
    """What it is doing."""


class HostGone(_Event, frozen=True, kw_only=True, tag="host_gone"):
    """The guest waits for its host."""

    seconds: Finite
    """Seconds since the host was last heard."""


class HostBack(_Event, frozen=True, kw_only=True, tag="host_back"):
    """The host is reachable again."""


class GuestEnded(_Event, frozen=True, kw_only=True, tag="guest_end"):
    """The guest's part is over."""

    samples: Natural
    """Samples of all contributions, without those that did not count."""
    compute_s: Finite
    """Seconds of computing."""
    dropped: Natural = 0
    """Samples of contributions that did not count; absent if there were none."""


RunEvent = (
    RunStarted
    | StepEnded
    | RunEnded
    | GuestHello
    | GuestJoined
    | GuestSitsOut
    | GuestCodec
    | LeaseTakenBack
    | ContributionDropped
    | GuestLeft
    | GuestLost
    | GuestRefused
    | ReplicaChecked
    | ReplicaMismatch
    | StrangerRefused
    | StepNotApplied
    | CheckpointSaved
    | CheckpointFailed
    | CheckpointDamaged
    | FlightRecorded
    | LoopAwaited
    | LogGap
    | LogFailed
    | StatisticsMeasured
    | Logged
    | RunNote
    | Delivered
    | HostPreparing
    | HostGone
    | HostBack
    | GuestEnded
)

_encode = msgspec.json.Encoder().encode
_MOST_BYTES = LONGEST
"""Longest line that is written uncut. A text, list or table in it cannot be longer than its type allows."""
_CUT = 4096
"""Characters of a text that are kept in a longer line."""
_decode: msgspec.json.Decoder[RunEvent] = checked.decoder(RunEvent)


class _AnyKind(Struct):
    event: Text


def kind_of(event: RunEvent) -> str:
    """The event's kind, as in the JSON."""
    tag: Any = event.__struct_config__.tag
    return str(tag)


KINDS = frozenset(str(kind.__struct_config__.tag) for kind in RunEvent.__args__)


def to_json(event: RunEvent) -> bytes:
    """The event as a JSON object in one line, which `from_json` reads. Numbers that are not finite are null, at any
    depth, and what is longer than a line may be is cut."""
    try:
        line = _encode(event)
    except UnicodeEncodeError:  # half a surrogate pair, in a path or in what another machine calls itself
        line = _encode(_encodable(msgspec.to_builtins(event), LONGEST))
    return line if len(line) <= _MOST_BYTES else _encode(_encodable(msgspec.to_builtins(event), _CUT))


def _encodable(value: Any, most: int) -> Any:
    if isinstance(value, str):
        return value[:most].encode("utf-8", "replace").decode()
    if isinstance(value, dict):
        pairs = itertools.islice(value.items(), LONGEST)
        return {_encodable(key, most): _encodable(item, most) for key, item in pairs}
    return [_encodable(item, most) for item in value[:LONGEST]] if isinstance(value, (list, tuple)) else value


def from_json(line: bytes | str) -> RunEvent | None:
    """The event in a line of a log. None for a kind that this version does not know: a newer one wrote it.

    Raises `msgspec.ValidationError` for a known kind with a missing or wrong field, and `msgspec.DecodeError` (its
    base class) for a line that is not JSON.
    """
    try:
        return _decode.decode(line)
    except msgspec.ValidationError:
        if checked.decode(line, _AnyKind).event in KINDS:
            raise
        return None
