"""A guest that holds the token and keeps to no rule: it says mutated messages over a real connection.

It must not know what the host does with them; being put out, it comes back under another name.
"""

from __future__ import annotations

import random
import secrets
from collections import Counter

import zmq
from zmq.utils import z85

from potluck.errors import WireError
from potluck.spec.messages import (
    ChangeMessage,
    CheckMessage,
    HelloMessage,
    LeaseMessage,
    ReadyMessage,
    RefuseMessage,
    TakenMessage,
    TensorMessage,
    UnknownMessage,
    WholeMessage,
)
from potluck.wire.frames import FROM_HOST, cut, pack
from potluck.wire.keys import public_of
from potluck.wire.token import Token
from support.fuzz import Mutator, of_guest
from support.plain import Plain, packed
from support.protocol_world import SIZES

A_LIFE = 40
"""Messages after which it comes back even where nobody put it out."""


class Rogue:
    """Both connections of one guest at a time."""

    def __init__(self, token: Token, seed: int, about: bytes) -> None:
        """`about` is what an honest guest's 'ready' would say of its model."""
        self._token, self._about = token, about
        self._mutator = Mutator(random.Random(seed))
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._ends: list[zmq.Socket[bytes]] = []
        self._said = 0
        self._lease = self._check = 0
        self.sent = 0
        self.heard: Counter[str] = Counter()
        """The kinds of what the host answered."""
        self._come()

    def say(self) -> None:
        """One more message, mutated, or half of what a message is made of."""
        if self._said >= A_LIFE or self._heard_the_end():
            self._come()
        chance = self._mutator.chance
        honest = chance.choice(of_guest(lease=self._lease, check=self._check))
        if honest.kind == "ready" and chance.random() < 0.7:
            honest = Plain(kind="ready", fields=honest.fields, frames=(self._about,))
        frames = packed(self._mutator.message(honest))
        if chance.random() < 0.3:
            frames[0] = self._mutator.bytes(bytes(frames[0]))
        self._send(chance.choice(self._ends), frames)
        if chance.random() < 0.2:
            self._ends[0].poll(20)  # let the host answer

    def close(self) -> None:
        for end in self._ends:
            end.close(linger=0)
        self._context.term()

    def _come(self) -> None:
        for end in self._ends:
            end.close(linger=200)
        name = secrets.token_bytes(8)
        self._ends = [self._connect(name + channel) for channel in (b"c", b"d")]
        self._said = 0
        self._send(self._ends[0], pack(HelloMessage(name="rogue", device="cpu")))
        self._ends[0].poll(1000)
        if self._mutator.chance.random() < 0.5:
            self._send(self._ends[0], pack(ReadyMessage(**SIZES), (self._about,)))

    def _connect(self, name: bytes) -> zmq.Socket[bytes]:
        end = self._context.socket(zmq.DEALER)
        end.setsockopt(zmq.LINGER, 0)
        end.setsockopt(zmq.SNDTIMEO, 5000)
        end.setsockopt(zmq.ROUTING_ID, name)
        end.setsockopt(zmq.CURVE_SERVERKEY, z85.encode(self._token.host_public))
        end.setsockopt(zmq.CURVE_PUBLICKEY, z85.encode(public_of(self._token.guest_secret)))
        end.setsockopt(zmq.CURVE_SECRETKEY, z85.encode(self._token.guest_secret))
        end.connect(f"tcp://127.0.0.1:{self._token.port}")
        return end

    def _send(self, end: zmq.Socket[bytes], frames: list[bytes | memoryview]) -> None:
        end.send_multipart(cut(frames))
        self.sent += 1
        self._said += 1

    def _heard_the_end(self) -> bool:
        """Whether the host has put it out; on the way, what it was given to work on."""
        for end in self._ends:
            while end.poll(0):
                try:
                    message, frames = FROM_HOST.read(end.recv_multipart())
                except WireError:
                    continue
                self.heard[message.kind] += 1
                if isinstance(message, RefuseMessage | UnknownMessage):
                    return True
                if isinstance(message, WholeMessage | TensorMessage | ChangeMessage):
                    self._send(self._ends[0], pack(TakenMessage(bytes=sum(map(len, frames)))))
                elif isinstance(message, LeaseMessage):
                    self._lease = message.lease
                elif isinstance(message, CheckMessage):
                    self._check = message.check
        return False
