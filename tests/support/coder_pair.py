"""A host's coder and a guest's hub with the protocol's `Feeding` between them, and no socket.

It performs what the hub's shell performs in a run. There are no leases and no steps.
"""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from potluck.device import Device, pick
from potluck.hub import actions as act
from potluck.hub.feed import Feed, Item, PieceState
from potluck.hub.feeding import Feeding
from potluck.hub.guest import GuestHub
from potluck.hub.host_coder import HostCoder
from potluck.hub.inputs import ContributionDecoded, PartRead, PieceCoded, ReplicaHashed
from potluck.hub.members import Member
from potluck.hub.model_tensors import ModelTensors
from potluck.spec.messages import DATA, FromGuest, FromHost, HashedMessage
from potluck.wire.frames import FROM_HOST, Received
from support.plain import Plain, packed, plain

DEADLINE_S = 20.0


class Net(nn.Module):
    """Weights of several types, one of them tied, one frozen, and a buffer."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.embedding = nn.Linear(24, 40, dtype=dtype)
        self.middle = nn.Linear(40, 40)
        self.frozen = nn.Linear(40, 8)
        self.head = nn.Linear(24, 40, bias=False)
        self.head.weight = self.embedding.weight
        self.frozen.requires_grad_(False)
        self.register_buffer("scale", torch.rand(5))


class FakeLink:
    """The guest's connection, without one: what it says is kept, what it should hear is given to `hear`."""

    def __init__(self) -> None:
        self.failure = None
        self.lost: Callable[[], None]
        self.back: Callable[[], None]
        self.ended: Callable[[], None]
        self.said: list[tuple[str, dict[str, Any]]] = []
        self.sent: list[Received[Any]] = []
        self.hashed: dict[int, bytes] = {}

    def handle(self, handler: Callable[[FromHost, Sequence[bytes | memoryview]], None]) -> None:
        self.handler = handler

    def hear(self, kind: str, *frames: bytes | memoryview, **fields: Any) -> None:
        self.handler(*FROM_HOST.read(packed(Plain(kind=kind, fields=fields, frames=frames))))

    def send(self, message: FromGuest, *frames: bytes | memoryview) -> None:
        if message.channel == DATA:
            self.sent.append(Received(message, frames))
            return
        self.said.append((message.kind, plain(message).fields))
        if isinstance(message, HashedMessage):
            self.hashed[message.version] = bytes(frames[0])

    def close(self, reason: str = "", *, failed: bool = False) -> None:
        pass


class Pair:
    """A host's coder and a guest's hub, with the rules of the feed between them and no socket."""

    def __init__(
        self,
        codec: str,
        dtype: torch.dtype = torch.float32,
        device: Device | None = None,
        *,
        replica_on_host: bool = False,
    ) -> None:
        torch.manual_seed(1)
        self.device = device or pick("cpu")
        self.model = Net(dtype)
        theirs = copy.deepcopy(self.model)
        with torch.no_grad():
            for tensor in (*theirs.parameters(), *theirs.buffers()):
                tensor.copy_(torch.rand_like(tensor))
        self.model.to(self.device.torch_device)
        self.tensors, self.theirs = ModelTensors(self.model), ModelTensors(theirs)
        self.pieces = len(self.tensors.layout.pieces)
        assert self.pieces > 4
        self.said = threading.Event()
        self.coder = HostCoder(
            self.tensors,
            down=codec,
            up=codec,
            device=self.device,
            notify=self.said.set,
            replica_on_host=replica_on_host,
        )
        self.feed = Feed(pieces=self.pieces, window_bytes=2000)
        self.feed.open = True
        about: dict[str, Any] = {"name": "guest", "address": "", "device": "", "about": {}}
        self.member = Member(id="guest", last_heard=0.0, joined_at=0.0, feed=self.feed, **about)
        self.feeding = Feeding(pieces=self.pieces, members={"guest": self.member})
        self.link = FakeLink()
        self.guest = GuestHub(self.link, self.theirs, down=codec, up=codec, device=pick("cpu"))  # type: ignore[arg-type]
        self.decoded: list[ContributionDecoded] = []
        self.probed: dict[int, Tensor] = {}
        self.changes = self.wholes = 0
        self.hashed: dict[int, bytes] = {}

    @contextmanager
    def running(self) -> Iterator[Pair]:
        self.coder.start()
        self.guest.open(lambda: (1, 1))
        try:
            yield self
        finally:
            self.guest.close()
            self.coder.close()

    # -- the I/O thread's part

    @property
    def state(self) -> list[PieceState]:
        """Where the replica's pieces stand, as far as the host's I/O thread has heard."""
        return self.feeding.pieces

    def coded(self) -> bool:
        return all(piece.version == self.coder.version for piece in self.state)

    def fed(self) -> bool:
        """The guest has taken all that there is."""
        return self.feed.current(self.state) and not self.feed.in_flight_bytes

    def pump(self) -> None:
        self.perform(self.feeding.pump(self.member))

    def perform(self, actions: list[act.Action]) -> None:
        for action in actions:
            if isinstance(action, act.ReadPart):
                self.coder.ask("guest", action.item, action.part)
                continue
            assert isinstance(action, act.Send)
            self.changes += action.message.kind == "change"
            self.wholes += action.message.kind == "whole"
            heard = plain(action.message, *map(bytes, action.frames))
            self.link.hear(heard.kind, *heard.frames, **heard.fields)

    def turn(self) -> None:
        while self.coder.results:
            result = self.coder.results.popleft()
            if isinstance(result, ContributionDecoded):
                self.decoded.append(result)
            elif isinstance(result, PartRead) and result.guest == "probe":
                self.probed[result.item.index] = torch.frombuffer(bytearray(result.payload), dtype=torch.float32)
            elif isinstance(result, PartRead):
                self.perform(self.feeding.read(self.member, result))
            elif isinstance(result, ReplicaHashed):
                self.hashed[result.version] = result.digests
            else:
                assert isinstance(result, PieceCoded), result
                self.state[result.index] = result.piece
                self.pump()
        while self.link.said:
            kind, fields = self.link.said.pop(0)
            if kind == "taken":
                self.feed.taken(fields["bytes"])
        self.pump()

    def until(self, done: Callable[[], bool]) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while True:
            self.turn()
            if done():
                return
            assert time.monotonic() < deadline, "nothing happens any more"
            time.sleep(0.0005)

    # -- what tests do

    def update(self, size: float = 1e-2) -> None:
        with self.coder.updating(), torch.no_grad():
            for parameter in self.tensors.trained:
                parameter.add_((torch.randn(parameter.shape) * size).to(parameter))

    def sync(self, codec: str = "") -> None:
        """Code the weights as they are and wait until the guest has taken everything."""
        self.coder.code_change(codec)
        self.until(self.coded)
        self.until(self.fed)

    def replica(self) -> Tensor:
        self.probed.clear()
        for piece in self.tensors.layout.pieces:
            self.coder.ask("probe", Item("whole", piece.index, 0), None)
        self.until(lambda: len(self.probed) == self.pieces)
        return torch.cat([self.probed[i] for i in range(self.pieces)])

    def check_same_bits(self) -> Tensor:
        replica = self.replica()
        assert torch.equal(replica, flat(self.theirs)), "the guest's weights are not the replica"
        return replica


def flat(tensors: ModelTensors) -> Tensor:
    return torch.cat([p.detach().cpu().reshape(-1).float() for p in tensors.trained])
