"""The host's side of the protocol, sans-I/O: messages and ticks in, actions out, so that every race is a unit test.

Owns who is at the table and in which state. It knows no socket, no thread, no clock (`now` is an argument) and
no tensor; what a step does with its members is `stepping`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, assert_never

from potluck.balance.leases import Least
from potluck.balance.ledger import Ledger
from potluck.errors import WireError
from potluck.hub.actions import Action, Decode, Emit, Forget, Pump, Send, SendReplica, SendWelcome, Wake
from potluck.hub.checks import Checks
from potluck.hub.feed import Feed, PieceState
from potluck.hub.guard import ReplicaGuard
from potluck.hub.members import JOINING, SYNCING, Member
from potluck.hub.norms import Norms
from potluck.hub.stepping import Stepping
from potluck.spec.config import MOST_GUESTS
from potluck.spec.events import GuestHello, GuestLeft, GuestLost, GuestRefused, RunEvent, RunNote
from potluck.spec.layout import TensorSpec, fingerprint_from_json, fingerprint_to_json, first_difference
from potluck.spec.messages import (
    AliveMessage,
    ClosingMessage,
    DoneMessage,
    DroppedMessage,
    FromGuest,
    GradMessage,
    HashedMessage,
    HelloMessage,
    LeaveMessage,
    ReadyMessage,
    RefuseMessage,
    SketchMessage,
    StoppedMessage,
    TakenMessage,
    UnknownMessage,
)
from potluck.wire.frames import MalformedError, UnknownKindError, dump_json, read_model

ABOUT_BYTES = 1 << 20
"""What a guest may say of its model, beside four times of what the host would say of its own."""
LONGEST_REASON = 500
"""Reasons quote what a guest sent, and must fit into a header whatever that was."""

WRONG_BEFORE_OUT = 3
"""Contributions in a row that cannot be right, and a guest is put out."""
WRONG_HINT = "this device may compute something else: update torch, or try --device cpu"


@dataclass(frozen=True, slots=True, kw_only=True)
class HostTerms:
    """What the host's protocol is set up with."""

    name: str
    versions: dict[str, str]
    fingerprint: tuple[TensorSpec, ...]
    piece_bytes: tuple[int, ...]
    """The length of each piece's gradient in the run's codec."""
    window_bytes: int = 4 << 20
    heartbeat_s: float = 1.0
    silence_s: float = 5.0
    joining_silence_s: float = 60.0
    """Building a model may keep a machine busy for long."""
    joining_s: float = 1800.0
    """For all of that, however often it is heard meanwhile: imports, downloads, the model."""
    checking_s: float = 300.0
    """To answer a check, which is the gradient of a few samples."""
    max_guests: int = MOST_GUESTS
    local_data: bool = False
    codec: str = ""
    """How gradients are packed, for what is said of them."""
    guest_bound: float = 0.0
    """A contribution's norm a sample counts up to so many times the host's own; 0: whatever it is."""
    check_replica_every: int = 50
    """Steps between two comparisons of the replica's hash with the guests'; 0: never."""
    least: Least = field(default_factory=Least)
    """How few samples the model bears in a micro-batch and in a lease."""

    @property
    def pieces(self) -> int:
        return len(self.piece_bytes)


class HostProtocol:
    """Everything the host decides about its guests."""

    def __init__(self, terms: HostTerms, ledger: Ledger) -> None:
        self.terms = terms
        self.ledger = ledger
        self.members: dict[str, Member] = {}
        self.stepping = Stepping(
            ledger=ledger,
            members=self.members,
            host_name=terms.name,
            local_data=terms.local_data,
            least=terms.least,
        )
        self.guard = ReplicaGuard(every=terms.check_replica_every, members=self.members, stepping=self.stepping)
        self.checks = Checks(
            ledger=ledger,
            members=self.members,
            local_data=terms.local_data,
            least=terms.least,
            put_out=self.put_out,
        )
        self.norms = Norms(terms.guest_bound)
        self._most_about_bytes = ABOUT_BYTES + 4 * len(dump_json(fingerprint_to_json(terms.fingerprint)))
        self._last_alive = 0.0

    # -- messages ---------------------------------------------------------------------------------------

    def message(
        self, guest: str, message: FromGuest, frames: Sequence[Any], now: float, address: str = ""
    ) -> list[Action]:
        """One message of an authenticated guest. A message that makes no sense here puts the guest out."""
        if isinstance(message, HelloMessage):
            return self._hello(guest, message, now, address)
        member = self.members.get(guest)
        if member is None:
            return self._unknown(guest)
        if member.leaving is not None:
            return []
        member.last_heard = now
        try:
            match message:
                case GradMessage():
                    return self._grad(member, message, frames[0])
                case TakenMessage():
                    return self._taken(member, message, now)
                case AliveMessage():
                    return []
                case DoneMessage():
                    return self._done(member, message, now)
                case ClosingMessage():
                    return self.stepping.closing(
                        member, lease=message.lease, keep=message.keep, eta_s=message.eta_s, now=now
                    )
                case StoppedMessage():
                    return self._stopped(member, message, now)
                case ReadyMessage():
                    return self._ready(member, message, frames[0], now)
                case SketchMessage():
                    return self._sketch(member, message, frames[0])
                case HashedMessage():
                    return self.guard.answered(member, message.version, bytes(frames[0]), now)
                case LeaveMessage():
                    member.failed = message.failed
                    return self._remove(member, "guest_left", message.reason or "left")
                case _:
                    assert_never(message)
        except WireError as error:
            return self.put_out(member, f"sent {error}")

    def unreadable(self, guest: str, error: WireError, address: str = "") -> list[Action]:
        """Somebody with the right key sent what cannot be read."""
        member = self.members.get(guest)
        if member is not None:
            is_message = isinstance(error, UnknownKindError | MalformedError)
            what = str(error) if is_message else f"bytes that are no message: {error}"
            return [] if member.leaving is not None else self.put_out(member, f"sent {what}")
        if isinstance(error, MalformedError) and error.kind == HelloMessage.kind:
            return self._refuse(guest, "a guest", address, f"sent {error}")
        return self._unknown(guest) if isinstance(error, UnknownKindError | MalformedError) else []

    def _unknown(self, guest: str) -> list[Action]:
        # With versions, for `potluck doctor`, which is no guest and does not mean to be one.
        ours = self.terms.versions
        versions = UnknownMessage(
            protocol=ours["protocol"], potluck=ours["potluck"], torch=ours["torch"], python=ours["python"]
        )
        return [Send(guest=guest, message=versions)]

    def _hello(self, guest: str, hello: HelloMessage, now: float, address: str) -> list[Action]:
        if guest in self.members:
            return []
        # It may have noticed that its last connection was broken before the host did. Only itself knows that name.
        before = self.members.get(hello.before)
        gone = [] if before is None else self._remove(before, "guest_lost", "came back on a new connection")
        if len(self.members) >= self.terms.max_guests:
            reason = f"all {self.terms.max_guests} places are taken"
            return gone + self._refuse(guest, hello.name or "?", address, reason)
        about = {part: getattr(hello, part) for part in ("potluck", "torch", "python", "platform")}
        member = Member(
            id=guest,
            name=self._free_name(hello.name or "guest", besides=before),
            address=address,
            device=hello.device,
            about=about,
            last_heard=now,
            joined_at=now,
            feed=Feed(pieces=self.terms.pieces, window_bytes=self.terms.window_bytes),
            least=self.terms.least,
        )
        self.members[guest] = member
        actions: list[Action] = [
            *gone,
            SendWelcome(guest=guest, name=member.name),
            Emit(event=GuestHello(machine=member.name, address=address, device=member.device)),
        ]
        for part in ("potluck", "torch"):
            if about[part] != self.terms.versions.get(part):
                text = (
                    f"{member.name} runs {part} {about[part]}, this host {self.terms.versions.get(part)}: its "
                    "gradients are checked before they count"
                )
                actions.append(Emit(event=RunNote(machine=member.name, text=text)))
        return actions

    def wrong_version(self, guest: str, theirs: int, address: str) -> list[Action]:
        """Somebody with the right key speaks another protocol."""
        reason = f"it speaks protocol {theirs}, this host speaks {self.terms.versions['protocol']}"
        member = self.members.get(guest)
        if member is not None:
            return self.put_out(member, reason, refused=True)
        return self._refuse(guest, "a guest", address, reason)

    def _ready(self, member: Member, ready: ReadyMessage, about: Any, now: float) -> list[Action]:
        """The guest has built its model: compare fingerprints, then bring it the weights."""
        if member.state != JOINING:
            raise WireError("a second 'ready'")
        if len(about) > self._most_about_bytes:  # it is read while the training may have to wait
            raise WireError(f"{len(about)} bytes about its model, at most {self._most_about_bytes} are read")
        model = read_model(about)
        difference = first_difference(self.terms.fingerprint, fingerprint_from_json(model.fingerprint))
        if difference is not None:
            return self.put_out(member, f"a different model: {difference}", refused=True)
        member.computes(ready.micro_batch, ready.largest_micro_batch)
        member.state, member.sync_started = SYNCING, now
        return [SendReplica(guest=member.id, hashes=model.hashes), Wake()]

    def _taken(self, member: Member, taken: TakenMessage, now: float) -> list[Action]:
        member.feed.taken(taken.bytes)
        if member.state == SYNCING:
            member.sync_bytes += taken.bytes
            member.sync_ended = now
            return [Pump(guest=member.id), Wake()]
        return [Pump(guest=member.id)]

    # -- contributions ----------------------------------------------------------------------------------

    def _grad(self, member: Member, grad: GradMessage, payload: Any) -> list[Action]:
        index = grad.piece
        if index >= self.terms.pieces:
            raise WireError(f"a gradient for piece {index}, which does not exist")
        if len(payload) != self.terms.piece_bytes[index]:
            raise WireError(f"{len(payload)} bytes for piece {index}, not {self.terms.piece_bytes[index]}")
        self.stepping.piece(member, lease=grad.lease, index=index, payload=payload)
        return []

    def _done(self, member: Member, done: DoneMessage, now: float) -> list[Action]:
        lease, count = done.lease, done.count
        member.computes(done.micro_batch, done.largest_micro_batch)
        if member.lease is None or member.lease.id != lease:
            return []  # it answers no lease that is open
        if member.lease.arrived:
            raise WireError(f"lease {lease} twice")
        if done.receive_s > 0 and not member.samples:
            member.transfer.value = done.receive_s  # what the first weights told was a guess
        elif done.receive_s > 0:
            member.transfer.add(done.receive_s)
        self.stepping.learn(member, count=count, compute_s=done.compute_s, now=now)
        actions: list[Action] = []
        if member.lease.closing_at is None:
            # Its 'closing' travels on the other connection, and this may overtake it.
            actions += self.stepping.closing(member, lease=lease, keep=count, eta_s=0.0, now=now)
        why_not = self.stepping.complete(member, lease=lease, count=count, pieces=self.terms.pieces)
        if why_not is not None:
            return actions + self.stepping.drop(member, reason=why_not, now=now)
        if not done.finite:
            return actions + self._wrong(member, "its gradient or its loss is not finite", math.inf, now)
        pieces = member.lease.pieces
        decode = Decode(guest=member.id, lease=lease, pieces=pieces, loss_sum=done.loss_sum, count=count)
        return [*actions, decode]

    def _wrong(self, member: Member, reason: str, norm: float, now: float) -> list[Action]:
        """Drop a contribution that cannot be right, unless the host finds the same when it computes the samples."""
        assert member.lease is not None
        self.norms.suspect(member.id, step=member.lease.step, norm=norm)
        return self.stepping.drop(member, reason=reason, now=now, late=False)

    def host_gradient(self, step: int, norm: float, samples: int) -> list[Action]:
        """The host's own gradient of a step that has ended, before the guests' were added: its norm, of so many
        samples. It tells how large a guest's may be, and who sent what the host itself did not find."""
        actions: list[Action] = []
        for guest, guilty in self.norms.host_gradient(step, norm, samples):
            member = self.members.get(guest)
            if member is None:
                continue
            member.wrong_in_a_row = member.wrong_in_a_row + 1 if guilty else 0
            if member.wrong_in_a_row >= WRONG_BEFORE_OUT:
                packed = f" (in codec {self.terms.codec})" if self.terms.codec else ""
                actions += self.put_out(
                    member,
                    f"sent gradients that are not finite or far too large {member.wrong_in_a_row} times in a row"
                    f"{packed}, of samples whose gradient here is neither",
                    hint=WRONG_HINT,
                )
        return actions

    def not_applied(self) -> list[Action]:
        """A step's gradient was not applied: what packing it has lost must not come with the next one."""
        helped = [member for member in self.members.values() if member.samples]
        return [Send(guest=m.id, message=DroppedMessage(lease=0)) for m in helped]

    def decoded(
        self, guest: str, lease: int, why_not: str | None, now: float, wrong_norm: float | None = None
    ) -> list[Action]:
        """The coder has added a contribution to the sum, or says why it must not count."""
        member = self.members.get(guest)
        if member is None or member.lease is None or member.lease.id != lease:
            raise AssertionError("a contribution was decoded whose guest is gone")  # see _remove
        if why_not is not None and wrong_norm is not None:
            actions = self._wrong(member, why_not, wrong_norm, now)
        elif why_not is not None:
            actions = self.stepping.drop(member, reason=why_not, now=now)
        else:
            actions = self.stepping.counted(member)
        if member.leaving is not None:
            actions += self._remove(member, *member.leaving)
        return actions

    def _stopped(self, member: Member, stopped: StoppedMessage, now: float) -> list[Action]:
        if stopped.lease < 0:  # a check: its weights had gone on before the guest could begin
            self.checks.void(member.id, -stopped.lease)
            return [Wake()]
        lease, computed, compute_s = stopped.lease, stopped.computed, stopped.compute_s
        self.stepping.stopped(member, lease=lease, computed=computed, compute_s=compute_s, now=now)
        return [Wake()]

    # -- steps --------------------------------------------------------------------------------------------

    def begin_step(
        self, now: float, pieces: Sequence[PieceState], host_keeps: int, head_start_s: float = 0.0
    ) -> list[Action]:
        """Open the step: leases for those who count, a common batch for those to be checked."""
        self.checks.begin_step(pieces)
        leases = self.stepping.begin(now, pieces, host_keeps, head_start_s)
        return [*leases, *self.guard.begin_step(self.ledger.step)]

    def _sketch(self, member: Member, answer: SketchMessage, sketch: Any) -> list[Action]:
        actions = self.checks.answered(member, answer, sketch)
        member.computes(answer.micro_batch, answer.largest_micro_batch)
        # First guesses, until leases and the weights' changes tell; of one who is checked again more is known.
        if answer.count > 0 and answer.compute_s > 0 and not member.joined:
            member.rate.add(answer.count / answer.compute_s)
        synced_s = member.sync_ended - member.sync_started
        if member.sync_bytes and not member.joined:
            member.transfer.add(sum(self.terms.piece_bytes) * synced_s / member.sync_bytes)
        return actions

    # -- time -------------------------------------------------------------------------------------------

    def tick(self, now: float) -> list[Action]:
        """Heartbeats out; guests that stayed silent too long are out, their leases back."""
        actions: list[Action] = []
        if now - self._last_alive >= self.terms.heartbeat_s:
            self._last_alive = now
            actions += [Send(guest=g, message=AliveMessage()) for g in self.members]
        for member in list(self.members.values()):
            limit = self.terms.joining_silence_s if member.state == JOINING else self.terms.silence_s
            if now - member.last_heard > limit and not self._decoding(member):
                actions += self._remove(member, "guest_lost", f"sent nothing for {now - member.last_heard:.1f} s")
            elif (overdue := member.overdue(now, self.terms.joining_s, self.terms.checking_s)) is not None:
                actions += self.put_out(member, overdue, refused=not member.joined)
        return actions

    def reads_too_little(self, guest: str, waiting_bytes: int) -> list[Action]:
        """The memory for what waits for guests is spent, and this one has not read for the longest time."""
        member = self.members.get(guest)
        if member is None:
            return []
        return self.put_out(member, f"did not read what it was sent: {waiting_bytes / 1e6:.0f} MB waited for it")

    def unreachable(self, guest: str) -> list[Action]:
        """Nothing can be sent to this guest any more: its process has ended, or it takes nothing."""
        member = self.members.get(guest)
        return [] if member is None else self._remove(member, "guest_lost", "lost its connection")

    def stood_still(self, seconds: float, now: float) -> list[Action]:
        """This host itself did nothing for a while (it was asleep): whoever could not be heard is not to blame."""
        for member in self.members.values():
            member.last_heard = min(now, member.last_heard + seconds)
            member.joined_at += seconds
            if member.checking_since is not None:
                member.checking_since += seconds
        self.stepping.stood_still(seconds, now)
        text = f"this machine stood still for {seconds:.1f} s (asleep, or overloaded); no guest is blamed for that"
        return [Emit(event=RunNote(machine=self.terms.name, text=text))] if self.members else []

    def synced(self, pieces: Sequence[PieceState]) -> list[Member]:
        """Guests that hold the replica (whether checked already or not)."""
        return [m for m in self.members.values() if m.state != JOINING and m.feed.current(pieces)]

    # -- leaving ----------------------------------------------------------------------------------------

    def put_out(self, member: Member, reason: str, *, refused: bool = False, hint: str = "") -> list[Action]:
        """End a guest's part in the run, and tell it why."""
        kind, reason = "guest_refused" if refused else "guest_lost", reason[:LONGEST_REASON]
        member.put_out = True
        refuse = RefuseMessage(reason=reason, hint=hint, joined=member.joined)
        return [Send(guest=member.id, message=refuse), *self._remove(member, kind, reason)]

    def _refuse(self, guest: str, name: str, address: str, reason: str) -> list[Action]:
        return [
            Send(guest=guest, message=RefuseMessage(reason=reason)),
            Emit(event=GuestRefused(machine=name, address=address, reason=reason)),
        ]

    def _remove(self, member: Member, kind: str, reason: str) -> list[Action]:
        if self._decoding(member):
            # Its contribution is complete and being added: let that end first, or a sample would be lost.
            member.leaving = member.leaving or (kind, reason)
            return []
        lease = member.lease
        back = self.stepping.gone(member)
        del self.members[member.id]
        return [
            Emit(event=_gone(member, kind, reason, 1 + (lease.step if lease and back else self.ledger.step), back)),
            Forget(guest=member.id),
            Wake(),
        ]

    def _decoding(self, member: Member) -> bool:
        return member.lease is not None and member.lease.arrived

    def _free_name(self, wanted: str, besides: Member | None) -> str:
        taken = {m.name for m in self.members.values() if m is not besides} | {self.terms.name}
        name, number = wanted, 2
        while name in taken:
            name, number = f"{wanted}-{number}", number + 1
        return name


_GONE: dict[str, type[GuestLeft] | type[GuestLost] | type[GuestRefused]] = {
    "guest_left": GuestLeft,
    "guest_lost": GuestLost,
    "guest_refused": GuestRefused,
}


def _gone(member: Member, kind: str, reason: str, step: int, samples_taken_back: int) -> RunEvent:
    """The event that tells of a guest's end."""
    return _GONE[kind](
        machine=member.name,
        address=member.address,
        reason=reason,
        step=step,
        samples_taken_back=samples_taken_back,
        put_out=member.put_out,
        failed=member.failed,
    )
