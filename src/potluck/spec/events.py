"""The events of a run's log: one class for each kind, and how a line of events.jsonl is encoded and decoded. PURE.

On disk and in `--view json` an event is one JSON object; everywhere else it is an object of one of these classes. A
field with a default is left out of the JSON while it has that value. The tables in docs/reference/run-folder.md are
generated from this file.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import Struct

from potluck import checked
from potluck.checked import Natural, Positive


class _Event(Struct, frozen=True, tag_field="event", omit_defaults=True):
    t_s: float = 0.0
    """Seconds since this process opened the log, by its monotonic clock. Set by the log."""


# -- the run --------------------------------------------------------------------------------------------


class RunStarted(_Event, frozen=True, kw_only=True, tag="run_start"):
    """A process begins or resumes the training."""

    run_id: str
    """Name of the run folder; empty without one."""
    folder: str
    """Path of the run folder; empty without one."""
    clock_s: float
    """This machine's monotonic clock when `t_s` was 0. Use it to align the log with other recordings of the same
    machine."""
    recipe: str
    """Name of the recipe or of the script."""
    machine: str
    """Name of the host."""
    device: str
    """Device of the host."""
    steps: Natural | None
    """Steps in total; null in an endless run, and where a stream does not say its length."""
    global_batch: Natural
    """Samples in a step."""
    parameters: Natural
    """Number of the model's parameters."""
    trained_parameters: Natural
    """Number of those that are trained."""
    codec: str
    """Codec of gradients and weights on the wire."""
    micro_batch: Natural | None
    """Samples that the host computes at once, where set; null: found by measuring."""
    tokens_per_sample: float | None
    """Tokens in a sample; null if not given."""
    resumed_from: Positive | None
    """Steps that were finished before; null in a new run."""
    join: bool
    """Whether guests can join."""
    epochs: Positive | None = None
    """Epochs in total; absent without `epochs=`."""
    workers: Natural | None = None
    """Worker processes of the script's DataLoader; absent without a loader."""


class MachineFigures(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A machine in the `machines` of a step."""

    name: str
    """Name of the machine."""
    role: Literal["host", "guest"]
    """Its part in the run."""
    device: str
    """What it computes on."""
    samples: Natural
    """Samples counted for it in this step."""
    micro_batch: Natural | None
    """Most samples computed at once in this step; null: none."""
    micro_batches: Natural
    """Number of its micro-batches."""
    rate: float | None
    """Samples per second while it computes."""
    busy: float | None
    """Share of the step in which it computed, 0 to 1."""
    state: str
    """State of the machine, see above."""
    reason: str
    """Why it is in this state; may be empty."""
    receive_s: float | None = None
    """A guest with samples in this step: seconds in which the weights' change arrived there."""
    send_s: float | None = None
    """The same guest: seconds from its last backward to the arrival of its gradient."""
    answered_s: float | None = None
    """The same guest: seconds from its lease to the arrival of its gradient."""
    link_bytes_per_s: float | None = None
    """Bytes of the weights' change ÷ the time that it takes to the guest, smoothed; absent below 5 ms."""


class StepEnded(_Event, frozen=True, kw_only=True, tag="step"):
    """A step is complete."""

    step: Positive
    """Steps finished."""
    steps: Natural | None
    """Steps in total; null in an endless run."""
    loss: float | None
    """Mean over all samples (or items) of the step; for a guest's samples, the loss that the guest reported. Null
    if it is not finite."""
    applied: bool
    """Whether the update was made: false if the gradient was not finite (`step_not_applied`)."""
    step_s: float
    """Seconds since the end of the last step, without `between_s`."""
    between_s: float
    """Seconds that the script spent on something else before this step, such as a validation."""
    samples: dict[str, Natural]
    """`{machine: samples counted}`; they sum to the step's samples."""
    samples_per_s: float
    """Samples per second, over the last 8 steps."""
    tokens_per_s: float | None
    """Tokens per second, over the last 8 steps."""
    mfu: float | None
    """Share of the host's peak FLOP/s that its own samples used: 6 operations per trained and 4 per frozen
    parameter for each token, attention not counted. Null if the device's peak or the tokens per sample are not
    known."""
    speedup: float | None
    """Speed-up over the host alone: `(global_batch · host's seconds per sample + update + rest) ÷ step`, over the
    last 8 steps. The seconds per sample are those of the host's micro-batches of the fastest size; the rest is what
    steps without guests took besides, or, where guests were there from the first step on, what theirs took the host
    besides. It waits for its data as it would alone. 1 while no guest computes. Null without guests, and until a
    guest has contributed."""
    predicted_s: float | None
    """Compute time of this step that the quotas expected."""
    eta_s: float | None
    """Seconds left to the last step; null in an endless run."""
    wait_s: float
    """Seconds that the host waited idle for leases."""
    update_s: float
    """Seconds for collecting, clipping, optimizer and scheduler."""
    bytes_up: Natural
    """Payload bytes received since the step began."""
    bytes_down: Natural
    """Payload bytes sent since the step began: weights, samples, and everything for new guests."""
    dropped: Natural
    """Samples in dropped contributions."""
    taken_back: Natural
    """Leased samples that the host took back."""
    machines: tuple[MachineFigures, ...]
    """The host first, then the guests that are present."""
    data_s: float = 0.0
    """Seconds that the host waited for the step's samples before it could begin, with nothing to compute: for the
    loader's worker processes, or for a stream. `predicted_s` includes them. Absent if none."""
    read_s: float = 0.0
    """Seconds in which the host's loop read its own samples itself. They count as its computing. Absent if none."""
    restart_s: float = 0.0
    """Of `data_s`, what passed while worker processes were started again for a new epoch. Absent if none."""
    ahead: Natural = 0
    """Leased samples that had been sent before their lease; absent if none."""
    unneeded: Natural = 0
    """Samples sent ahead that their guest was not lent; absent if none."""
    unneeded_bytes: Natural = 0
    """Bytes sent of those; absent if none."""


class RunEnded(_Event, frozen=True, kw_only=True, tag="run_end"):
    """The training is over. A log without this event belongs to a run that is still going or was killed."""

    step: Natural
    """Steps finished."""
    loss: float | msgspec.UnsetType | None = msgspec.UNSET
    """Loss of the last step: null if it was not finite, absent if no step was made."""
    not_applied: Natural
    """Steps whose update was not made."""
    seconds: float
    """Seconds since `run_start`."""
    samples_per_s: float
    """Samples per second over the steps' own seconds."""
    speedup: float | None
    """Mean of the steps' speed-ups, weighted by their seconds."""
    reason: str
    """`finished`, `interrupted` or `failed`."""
    folder: str
    """Path of the run folder; empty without one."""


# -- guests ---------------------------------------------------------------------------------------------


class _GuestEvent(_Event, frozen=True, kw_only=True):
    machine: str
    """Name of the guest."""
    address: str
    """Its address."""


class _GuestGone(_GuestEvent, frozen=True, kw_only=True):
    reason: str
    """What happened."""
    step: Positive
    """Step under way."""
    samples_taken_back: Natural
    """Samples of its lease that the host took back."""
    put_out: bool = False
    """True if the host excluded it; otherwise absent."""
    failed: bool = False
    """True if its script had failed; otherwise absent."""


class GuestHello(_GuestEvent, frozen=True, kw_only=True, tag="guest_hello"):
    """A machine with the token is joining. Of machines that have not joined at most 200 events a minute are
    written; a `note` says how many were left out."""

    device: str
    """What it computes on."""


class GuestJoined(_GuestEvent, frozen=True, kw_only=True, tag="guest_joined"):
    """A guest passed the parity check: its gradients count from now on."""

    device: str
    """What it computes on."""
    parity: float
    """Cosine of its gradient and the host's."""
    rate: float | None
    """Samples per second that it reached in the check."""
    spread: float | None = None
    """Cosine of the host's own two gradients; absent if the check did not use it."""


class GuestSitsOut(_Event, frozen=True, kw_only=True, tag="guest_sits_out"):
    """A guest gets no leases for a while."""

    machine: str
    """Name of the guest."""
    step: Positive
    """Step under way."""
    reason: str
    """Why, and when it is tried again."""


class GuestCodec(_Event, frozen=True, kw_only=True, tag="guest_codec"):
    """With `codec = "auto"`: the codec of a guest's gradients was chosen, or changed."""

    machine: str
    """Name of the guest."""
    step: Positive
    """Step from which it is used."""
    codec: str
    """The codec."""
    reason: str
    """Why: what its link takes, and what that means for a step."""


class LeaseTakenBack(_GuestEvent, frozen=True, kw_only=True, tag="lease_taken_back"):
    """The host no longer waits for a lease."""

    step: Positive
    """Step of the lease."""
    samples: Natural
    """Samples taken back."""
    reason: str
    """Why it was late."""
    silent: bool
    """Whether the guest had sent nothing at all."""


class ContributionDropped(_Event, frozen=True, kw_only=True, tag="contribution_dropped"):
    """A contribution was late, incomplete, not finite, far larger than the host's own, or not what was leased."""

    machine: str
    """Name of the guest."""
    step: Positive
    """Step of the lease."""
    samples: Natural
    """Samples in the contribution."""
    reason: str
    """Why it does not count."""


class GuestLeft(_GuestGone, frozen=True, kw_only=True, tag="guest_left"):
    """A guest left in order."""


class GuestLost(_GuestGone, frozen=True, kw_only=True, tag="guest_lost"):
    """A guest fell silent, its connection ended, or it was put out."""


class GuestRefused(_GuestEvent, frozen=True, kw_only=True, tag="guest_refused"):
    """A guest has a different model or protocol or different gradients, or there are too many guests."""

    reason: str
    """Why it was refused."""
    step: Positive | None = None
    """Step under way; absent if the guest had not been welcomed."""
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
    reason: str
    """What differs."""


class StrangerRefused(_Event, frozen=True, kw_only=True, tag="refused_stranger"):
    """A connection without the token's key, or with a wrong code, was refused. Of those without the key, only every
    hundredth is written after the first five."""

    address: str
    """Address of the connection."""
    reason: str
    """Why it was refused, and how many there were so far."""


# -- others ---------------------------------------------------------------------------------------------


class StepNotApplied(_Event, frozen=True, kw_only=True, tag="step_not_applied"):
    """An update was not made because the gradient was not finite. The step's samples count as used."""

    step: Positive
    """Number of the step."""
    machine: str | None
    """Whose part of the gradient was not finite; null: all parts were finite, but not their sum."""
    reason: str
    """What was not finite."""
    in_a_row: Natural
    """Steps in a row that were not applied."""
    so_far: Natural
    """Steps that were not applied since this process began."""


class CheckpointSaved(_Event, frozen=True, kw_only=True, tag="checkpoint"):
    """A checkpoint is on disk."""

    step: Natural
    """Steps finished in it."""
    path: str
    """Its folder."""
    seconds: float
    """Seconds that writing it took."""


class CheckpointFailed(_Event, frozen=True, kw_only=True, tag="checkpoint_failed"):
    """A checkpoint could not be written; the run continues."""

    step: Natural
    """Steps finished."""
    reason: str
    """What failed."""
    again: bool = False
    """True if it is tried again at the next interval; absent for the last checkpoint."""


class CheckpointDamaged(_Event, frozen=True, kw_only=True, tag="checkpoint_damaged"):
    """When resuming: a newer checkpoint cannot be used."""

    path: str
    """Its folder."""
    reason: str
    """What is wrong with it."""
    resumed_from: Natural
    """Step of the checkpoint that is used instead."""


class FlightRecorded(_Event, frozen=True, kw_only=True, tag="flight_recorded"):
    """A flight record was written."""

    machine: str
    """Machine that wrote it."""
    path: str
    """Its file."""
    first: bool
    """Whether it is the first since the run was started or resumed; the views show only that one."""


class LoopAwaited(_Event, frozen=True, kw_only=True, tag="loop_awaited"):
    """The script had not reached `run.steps()` after a minute."""

    what: str
    """Name of the script."""
    seconds: float
    """Seconds since the start."""
    guests: Natural
    """Guests that are waiting."""


class LogGap(_Event, frozen=True, kw_only=True, tag="log_gap"):
    """Events before this one could not be written, as on a full disk; the run continued."""

    lines: Natural
    """Number of the missing events."""


class LogFailed(_Event, frozen=True, kw_only=True, tag="log_failed"):
    """This file cannot be written to. Shown by the views, not written."""

    path: str
    """Path of the log."""
    reason: str
    """What failed."""


class StatisticsMeasured(_Event, frozen=True, kw_only=True, tag="batch_statistics"):
    """In models with BatchNorm: after the second step, after the first to which a guest contributed, and when
    `effective_batch` has halved."""

    step: Positive
    """Steps finished."""
    kind: str
    """Class of the first such layer."""
    layers: Natural
    """Number of layers."""
    names: tuple[str, ...]
    """Names of the first three."""
    global_batch: Natural
    """Samples in a step."""
    micro_batch: dict[str, Natural]
    """`{machine: most samples at once}`."""
    effective_batch: float
    """Global batch ÷ micro-batches of the step."""


class Logged(_Event, frozen=True, kw_only=True, tag="logged"):
    """The script called `run.log(name=value)`."""

    step: Natural
    """Steps finished."""
    values: dict[str, float | None]
    """The values by name; null if one is not finite."""


class RunNote(_Event, frozen=True, kw_only=True, tag="note"):
    """Something a person may want to know, such as different versions."""

    text: str
    """The sentence."""
    machine: str | None = None
    """Machine that it is about; absent if it is about none."""


# -- on a guest -----------------------------------------------------------------------------------------


class Delivered(_Event, frozen=True, kw_only=True, tag="delivered"):
    """The guest sent a contribution."""

    step: Positive
    """Step of the lease."""
    samples: Natural
    """Samples in the contribution."""
    loss: float | None
    """Mean loss of these samples; null if it is not finite."""
    compute_s: float
    """Seconds of computing."""
    total_samples: Natural
    """Samples of all contributions so far, without those that the host has said did not count."""


class HostPreparing(_Event, frozen=True, kw_only=True, tag="host_preparing"):
    """The host's script has not reached its loop."""

    reason: str
    """What it is doing."""


class HostGone(_Event, frozen=True, kw_only=True, tag="host_gone"):
    """The guest waits for its host."""

    seconds: float
    """Seconds since the host was last heard."""


class HostBack(_Event, frozen=True, kw_only=True, tag="host_back"):
    """The host is reachable again."""


class GuestEnded(_Event, frozen=True, kw_only=True, tag="guest_end"):
    """The guest's part is over."""

    samples: Natural
    """Samples of all contributions, without those that did not count."""
    compute_s: float
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
_decode: msgspec.json.Decoder[RunEvent] = checked.decoder(RunEvent)


class _AnyKind(Struct):
    event: str


def kind_of(event: RunEvent) -> str:
    """The event's kind, as in the JSON."""
    tag: Any = event.__struct_config__.tag
    return str(tag)


KINDS = frozenset(str(kind.__struct_config__.tag) for kind in RunEvent.__args__)


def to_json(event: RunEvent) -> bytes:
    """The event as a JSON object in one line. Numbers that are not finite are null, at any depth."""
    try:
        return _encode(event)
    except UnicodeEncodeError:  # half a surrogate pair, in a path or in what another machine calls itself
        return _encode(_encodable(msgspec.to_builtins(event)))


def _encodable(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, dict):
        return {_encodable(key): _encodable(item) for key, item in value.items()}
    return [_encodable(item) for item in value] if isinstance(value, (list, tuple)) else value


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
