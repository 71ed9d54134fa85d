"""Mutated messages for whatever decodes what a holder of the token sends: frames, trees, the host's protocol.

It owns how bytes and messages are changed, and what each target may do with them: raise WireError, nothing else.
All chance comes from one seeded generator, so that a number which failed can be tried again.
"""

from __future__ import annotations

import contextlib
import json
import math
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import torch
import zstandard

from potluck import codec as codecs
from potluck.codec import changes, coder
from potluck.errors import TokenError, WireError
from potluck.hub.model_tensors import from_bytes
from potluck.hub.parity import Reference, Sketch, judge
from potluck.spec import messages as msg
from potluck.wire import frames as wire
from potluck.wire.frames import FROM_GUEST, FROM_HOST, cut, dump_json, joined, load_json, pack
from potluck.wire.keys import new_keys
from potluck.wire.token import Token, decode, encode
from potluck.wire.tree import pack_tree, unpack_tree
from support.plain import Plain, packed, plain
from support.protocol_world import ABOUT, DIGESTS, DONE, GRADIENT_BYTES, KINDS, PIECES, SIZES, World

WORDS = [
    *(
        b"null",
        b"true",
        b"NaN",
        b"Infinity",
        b"-1",
        b"0",
        b"1e999",
        b"1e308",
        b"9" * 400,
        b"9" * 5000,
        b"-0.0",
        b"{}",
    ),
    *(b"[]", b'""', b'"\\ud800"', b"[" * 70, b"[" * 3000, b'{"a":' * 70, b"\xff", b"\x00", b"\xef\xbb\xbf", b"PLK"),
    *(b'"lease":1,"lease":', b'{"lease":1,"lease":2}', b"1.0", b"1e5", b'"NaN"', b'"Infinity"', b"9" * 400 + b".5"),
    *(b"PLK\x02", b"CUT", b"\xff\xff\xff\xff", b"\x00\x00\x00\x80", b'"x"', b'"@"', b'"float32"', b'"bool"', b","),
]
VALUES: list[Any] = [
    *(
        None,
        True,
        False,
        0,
        1,
        -1,
        2,
        7,
        2**31,
        2**63,
        2**64,
        -(2**63),
        10**300,
        0.0,
        -0.0,
        0.5,
        1e308,
        -1e308,
        5e-324,
    ),
    *("", "x", "7", "nan", "inf", "-1", "y" * 5000, "\n\x1b[2J", "é", [], [1], [[1]], [None] * 50, {}, {"a": 1}),
    *(["x", "float32", [2, 2]], ["d", ["k", 1]], ["@", 3], ["t"], ["l", ["x", "bool", [0]]], ["f", "nan"]),
]
NAMES = ["lease", "keep", "eta_s", "piece", "count", "compute_s", "loss_sum", "finite", "micro_batch", "version"]
NAMES += [
    "largest_micro_batch",
    "receive_s",
    "computed",
    "check",
    "loss",
    "bytes",
    "name",
    "reason",
    "before",
    "tree",
]


# -- chance -------------------------------------------------------------------------------------------------


class Mutator:
    """Changes bytes and messages."""

    long_share = 0.01
    """Of the values: those that are very long."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance

    def bytes(self, raw: bytes) -> bytes:
        """One to four small changes."""
        changed = bytearray(raw)
        for _ in range(self.chance.randint(1, 4)):
            self._once(changed)
        return bytes(changed)

    def _once(self, raw: bytearray) -> None:
        chance = self.chance
        at = chance.randrange(len(raw) + 1)
        kind = chance.randrange(8)
        if kind == 0 and at < len(raw):
            raw[at] ^= 1 << chance.randrange(8)
        elif kind == 1 and at < len(raw):
            raw[at] = chance.randrange(256)
        elif kind == 2:
            raw[at:at] = chance.randbytes(chance.randint(1, 8))
        elif kind == 3:
            del raw[at : at + chance.randint(1, 12)]
        elif kind == 4:
            del raw[at:]
        elif kind == 5:
            raw[at:at] = raw[at : at + chance.randint(1, 40)]
        elif kind == 6:
            raw[at : at + chance.randint(0, 6)] = chance.choice(WORDS)
        else:
            other = chance.randrange(len(raw) + 1)
            raw[at : at + 8] = raw[other : other + 8]

    def value(self) -> Any:
        chance = self.chance
        what = chance.random()
        if what < 0.4:
            return chance.randint(-3, 12)
        return chance.choice(VALUES) if what < 1 - self.long_share else "z" * 70_000  # more than fits into a header

    def _frame(self, raw: bytes) -> bytes:
        if raw[:1] == b"{" and self.chance.random() < 0.7:
            with contextlib.suppress(ValueError, RecursionError):  # it was changed before
                return json.dumps(self.json(json.loads(raw))).encode()
        return self.bytes(raw)

    def json(self, node: Any) -> Any:
        """The same value with one thing in it replaced, gone, or there twice."""
        if isinstance(node, dict) and node and self.chance.random() < 0.9:
            key = self.chance.choice(list(node))
            return {**node, key: self.json(node[key])}
        if not isinstance(node, list) or not node or self.chance.random() < 0.1:
            return self.value()
        at, what = self.chance.randrange(len(node)), self.chance.randrange(6)
        if what == 0:
            return [*node[:at], *node[at + 1 :]]
        if what == 1:
            return [*node[:at], node[at], *node[at:]]
        return [*node[:at], self.json(node[at]), *node[at + 1 :]]

    def message(self, message: Plain) -> Plain:
        """The same message with some of its parts replaced, gone, or there twice."""
        chance = self.chance
        fields, frames, kind = dict(message.fields), list(message.frames), message.kind
        for _ in range(chance.choice((0, 1, 1, 1, 2, 3))):
            what = chance.randrange(7)
            if what <= 1 and fields:
                fields[chance.choice(list(fields))] = self.value()
            elif what == 2 and fields:
                del fields[chance.choice(list(fields))]
            elif what == 3:
                fields[chance.choice(NAMES)] = self.value()
            elif what == 4:
                kind = chance.choice(KINDS)
            elif what == 5 and frames:
                at = chance.randrange(len(frames))
                frames[at] = self._frame(bytes(frames[at]))
            else:
                frames = chance.choice(([], frames * 2, [*frames, b""], [*frames, chance.randbytes(10)]))
        return Plain(kind=kind, fields=fields, frames=tuple(frames))


LONG_WELCOME: dict[str, Any] = {
    **dict.fromkeys(("name", "host", "run", "codec", "codec_down"), "a"),
    "versions": {},
    "source": msg.Source(files=("a.py", "b.py"), sha256="0"),
}


# -- targets ------------------------------------------------------------------------------------------------


def examples() -> list[Plain]:
    """Honest messages of both sides, of every shape that there is."""
    spec, views = pack_tree({"x": torch.arange(6.0).reshape(2, 3), "y": [torch.tensor(3), (True, None, "s")]})
    names = dict.fromkeys(("name", "host", "run", "codec", "codec_down"), "a")
    recipe = msg.Source(recipe="gpt", config={"layers": 2, "data": None})
    script = msg.Source(files=("a.py",), arguments=("--x",), sha256="0", imports={"sklearn": "scikit-learn"})
    of_host = [
        plain(msg.SamplesMessage(lease=1, batch=0, tree=spec), *map(bytes, views)),
        plain(msg.AheadMessage(batch=1, step=2, bytes=9, tree=spec), b"part"),
        plain(msg.WelcomeMessage(**names, versions={"torch": "2"}, source=recipe)),
        plain(msg.WelcomeMessage(**names, versions={}, source=script), b"print()"),
        plain(msg.LeaseMessage(lease=3, step=1, sizes=(4, 4), quota=8, within_s=0.3, tail_s=0.1)),
        plain(msg.CheckMessage(check=2, step=1, sizes=(2,), seed=3), bytes(16)),
        plain(msg.ChangeMessage(piece=0, base=1, version=2), bytes(40)),
        plain(msg.WholeMessage(piece=0, version=2), bytes(40)),
        plain(msg.TensorMessage(name="w", start=0), bytes(40)),
        plain(msg.HashMessage(version=2)),
        plain(msg.ResyncMessage(version=2)),
        plain(msg.RevokeMessage(lease=3)),
        plain(msg.DroppedMessage(lease=3)),
        plain(msg.NoteMessage(text="judged by the spread")),
        plain(msg.RefuseMessage(reason="no", hint="update", joined=True)),
        plain(msg.WaitMessage(reason="not yet")),
        plain(msg.ByeMessage(reason="finished")),
        plain(msg.UnknownMessage(protocol="2", potluck="1", torch="2", python="3")),
    ]
    return [*of_host, *of_guest(lease=1, check=1)]


def of_guest(*, lease: int, check: int) -> list[Plain]:
    """What a guest that has this lease and this check could say."""
    grad = [plain(msg.GradMessage(lease=lease, piece=i), bytes(GRADIENT_BYTES)) for i in range(PIECES)]
    sketch = msg.SketchMessage(check=check, count=2, loss=1.0, compute_s=0.2, random={"cpu": "0"}, **SIZES)
    return [
        plain(msg.HelloMessage(name="a", device="cpu", potluck="1", torch="2")),
        plain(msg.ReadyMessage(**SIZES), dump_json(ABOUT)),
        plain(msg.AliveMessage()),
        plain(msg.TakenMessage(bytes=80)),
        plain(msg.ClosingMessage(lease=lease, keep=2, eta_s=0.1)),
        *grad,
        plain(msg.DoneMessage(lease=lease, count=2, **DONE)),
        plain(msg.StoppedMessage(lease=lease, computed=1, compute_s=0.1)),
        plain(sketch, bytes(4)),
        plain(msg.HashedMessage(version=0), DIGESTS),
        plain(msg.LeaveMessage(reason="tired")),
    ]


def bounded(value: Any) -> None:
    """Nothing that came in may be endless, not a number, or a lone surrogate."""
    if isinstance(value, float):
        assert math.isfinite(value)
    elif isinstance(value, str):
        value.encode()
    elif isinstance(value, dict):
        for key, item in value.items():
            bounded(key)
            bounded(item)
    elif isinstance(value, list | tuple):
        for item in value:
            bounded(item)
    elif isinstance(value, msgspec.Struct):
        for name in value.__struct_fields__:
            bounded(getattr(value, name))


class Arrivals:
    """Reader.read, of a host and of a guest, and what it lets through is bounded and can be sent again."""

    def __init__(self, mutator: Mutator) -> None:
        self._mutator = mutator
        self._plain = examples()
        self._packed = [[bytes(frame) for frame in packed(message)] for message in self._plain]

    def __call__(self) -> None:
        chance = self._mutator.chance
        which = chance.randrange(len(self._packed))
        if chance.random() < 0.4:
            frames = [bytes(frame) for frame in packed(self._mutator.message(self._plain[which]))]
        else:
            frames = list(self._packed[which])
            at = 0 if chance.random() < 0.8 else chance.randrange(len(frames))
            frames[at] = self._mutator.bytes(frames[at])
        if chance.random() < 0.05:
            frames += [b""] * chance.choice((1, wire.MAX_FRAMES, wire.MAX_FRAMES + 1))
        reader: Any = chance.choice((FROM_GUEST, FROM_HOST))
        message, raw = reader.read(frames)
        bounded(message)
        assert reader.read(pack(message, raw)) == (message, raw)


class Parts:
    """frames.joined: parts that were cut, and parts that only say so."""

    def __init__(self, mutator: Mutator) -> None:
        self._mutator = mutator
        long = pack(msg.WelcomeMessage(**LONG_WELCOME), (bytes(wire.PART_BYTES + 100), b"x"))
        self._parts = [bytes(part) for part in cut(long)]

    def __call__(self) -> None:
        chance = self._mutator.chance
        parts = list(self._parts)
        change = chance.randrange(4)
        if change <= 1:
            parts[0] = self._mutator.bytes(parts[0])
        elif change == 2:
            del parts[chance.randrange(len(parts))]
        else:
            parts.insert(chance.randrange(len(parts) + 1), chance.randbytes(chance.randint(0, 30)))
        FROM_HOST.read(joined([memoryview(part) for part in parts]))


class Trees:
    """tree.unpack_tree: a description and bytes that do not fit it."""

    def __init__(self, mutator: Mutator) -> None:
        self._mutator = mutator
        batches = [
            {
                "x": torch.arange(6, dtype=torch.int16).reshape(2, 3),
                "b": torch.ones(3) > 0,
                "n": [1, (2.5, "s", None)],
            },
            (torch.zeros(2, 2), {"k": float("nan"), 3: True}, torch.zeros(0, 3)),
            {"text": "w" * 9000, "x": torch.ones(4, dtype=torch.bfloat16)},
            torch.zeros(0, 3),  # next to a zero, any size costs no byte
        ]
        packed = [pack_tree(batch) for batch in batches]
        self._trees = [(json.dumps(spec).encode(), [bytes(view) for view in views]) for spec, views in packed]

    def __call__(self) -> None:
        chance = self._mutator.chance
        text, views = chance.choice(self._trees)
        frames = list(views)
        what = chance.random()
        if what < 0.4:
            text = self._mutator.bytes(text)
        elif what < 0.9:
            text = json.dumps(self._mutator.json(json.loads(text))).encode()
        if frames and chance.random() < 0.4:
            at = chance.randrange(len(frames))
            frames[at] = self._mutator.bytes(frames[at])
        unpack_tree(load_json(text), frames, max_bytes=1 << 20)


class Payloads:
    """A contribution's bytes, of the right length or not, through every codec: decoded, or refused before."""

    COUNT = 384

    def __init__(self, mutator: Mutator) -> None:
        self._mutator = mutator
        self._codecs = [codecs.get(name) for name in ("none", "fp16", "bf16", "int8", "int4", "thin", "topk:0.05")]
        values = torch.linspace(-1, 1, self.COUNT)
        self._honest = [bytes(codec.encode(values).numpy()) for codec in self._codecs]

    def __call__(self) -> None:
        number = self._mutator.chance.randrange(len(self._codecs))
        codec, honest = self._codecs[number], self._honest[number]
        raw = self._mutator.bytes(honest)
        if self._mutator.chance.random() < 0.7:
            raw = raw[: len(honest)].ljust(len(honest), b"\xff")
        payload = from_bytes(raw)
        finite = codec.finite(payload, self.COUNT)
        decoded = codec.decode(payload, self.COUNT)
        assert decoded.shape == (self.COUNT,)
        assert not finite or bool(torch.isfinite(decoded).all()), f"{codec.name} says finite of what is not"


class Streams:
    """Entropy coded pieces: a mutated stream, or that of a mutated payload. None may hold more than its piece."""

    COUNTS = (1, 100, 384, 5000)

    def __init__(self, mutator: Mutator) -> None:
        self._mutator = mutator
        self._codec = codecs.get("thin")
        numbers = torch.Generator().manual_seed(1)
        self._payloads = [
            (count, self._codec.encode(torch.randn(count, generator=numbers) * 10.0 ** (count % 7 - 5)))
            for count in self.COUNTS
        ]
        self._honest = [(count, bytes(codecs.to_wire(self._codec, payload))) for count, payload in self._payloads]

    def _framed(self, content: bytes) -> bytes:
        """As another zstandard could code it: other levels, windows, blocks and checksums; more than one frame."""
        chance = self._mutator.chance
        parameters = zstandard.ZstdCompressionParameters.from_level(
            chance.choice((-5, 1, 3, 9)),
            window_log=chance.randint(10, 24),
            write_checksum=chance.random() < 0.3,
            write_content_size=chance.random() < 0.8,
        )
        stream = zstandard.ZstdCompressor(compression_params=parameters).compressobj(size=len(content))
        parts, block = [], chance.choice((1, 7, 100, 1000, 1 << 17))
        for start in range(0, min(len(content), 40 * block), block):
            parts += [
                stream.compress(content[start : start + block]),
                stream.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK),
            ]
        with contextlib.suppress(zstandard.ZstdError):  # not all was given
            parts.append(stream.flush())
        skipped = b"\x50\x2a\x4d\x18" + chance.choice((b"\x02\0\0\0ab", b"\xff\xff\xff\xff", b"\0\0\0\0"))
        return b"".join(chance.choice((parts, parts, parts * 2, [skipped, *parts], [*parts, skipped])))

    def __call__(self) -> None:
        chance, codec = self._mutator.chance, self._codec
        count, message = chance.choice(self._honest)
        what = chance.random()
        if what < 0.3:
            count, payload = chance.choice(self._payloads)
            raw = self._mutator.bytes(bytes(payload.numpy()))[: payload.numel()].ljust(payload.numel(), b"\x7f")
            message = bytes(codecs.to_wire(codec, from_bytes(raw)))
        elif what < 0.4:
            same = np.full(codec.nbytes(count) + chance.randint(-1, 1), chance.randrange(256), dtype=np.uint8)
            message = b"".join((b"\x01", *coder.coded(same)))
        elif what < 0.5:
            count, payload = chance.choice(self._payloads)
            message = b"\x01" + self._framed(bytes(payload.numpy()))
            message = message if chance.random() < 0.5 else self._mutator.bytes(message)
        elif what < 0.95:
            message = message[:1] + self._mutator.bytes(message[1:])
        else:
            message = self._mutator.bytes(message)
        payload = codecs.from_wire(codec, message, count)
        assert payload.numel() == codec.nbytes(count)
        finite = codec.finite(payload, count)
        decoded = codec.decode(payload, count)
        assert not finite or bool(torch.isfinite(decoded).all()), "finite is said of what is not"


class Changes:
    """Exact changes of weights in bf16: a mutated message, or one that expands. None may exceed its piece."""

    COUNTS = (9, 384, 5000)

    def __init__(self, mutator: Mutator) -> None:
        self._mutator = mutator
        numbers = torch.Generator().manual_seed(1)
        weights = [torch.randn(count, generator=numbers) for count in self.COUNTS]
        self._honest = [(w.numel(), changes.to_wire(changes.differences(w + 1e-4, w))) for w in weights]

    def __call__(self) -> None:
        chance = self._mutator.chance
        count, message = chance.choice(self._honest)
        if chance.random() < 0.1:
            same = np.full(chance.randrange(4 * count), chance.choice((0, 1, 128, 255)), dtype=np.uint8)
            message = b"".join(coder.coded(same))
        else:
            message = self._mutator.bytes(message)
        values = torch.ones(count)
        changes.apply(changes.from_wire(message, count), values)
        assert bool(((values.view(torch.int32) & 0xFFFF) == 0).all()), "no bf16 value"


class Sketches:
    """parity.judge: whatever a guest sends for its gradient, the answer is a number and a reason."""

    def __init__(self, mutator: Mutator) -> None:
        self._mutator = mutator
        values = np.linspace(0.1, 1, 50, dtype="<f4")
        first, second = (Sketch(values=v, tensors=2, loss=1.0) for v in (values, values[::-1].copy()))
        random = {"cpu": "0"}
        self._host = first
        self._references = [
            Reference(first=first, random=random),
            Reference(first=first, random=random, second=second, reseeded=frozenset({"cpu"})),
        ]
        self._names = ABOUT_NAMES

    def __call__(self) -> None:
        chance = self._mutator.chance
        raw = self._mutator.bytes(self._host.values.tobytes())
        if chance.random() < 0.7:
            raw = raw[: self._host.values.nbytes].ljust(
                self._host.values.nbytes, chance.choice((b"\xff", b"\x7f", b"\0"))
            )
        with np.errstate(all="ignore"):
            verdict = judge(
                chance.choice(self._references),
                raw,
                chance.choice((1.0, -1e308, 0.0)),
                random={},
                names=self._names,
            )
        assert isinstance(verdict.cosine, float)
        assert verdict.why_not is None or isinstance(verdict.why_not, str)


class _Named:
    name = "w"


ABOUT_NAMES: Any = [_Named(), _Named()]


class Tokens:
    """token.decode: what a person may have copied."""

    def __init__(self, mutator: Mutator) -> None:
        keys = new_keys()
        self._mutator = mutator
        self._honest = encode(
            Token(
                addresses=("10.0.0.1", "box.local"), port=7, host_public=keys.public, guest_secret=keys.guest_secret
            )
        )

    def __call__(self) -> None:
        text = self._mutator.bytes(self._honest.encode()).decode("latin-1")
        try:
            decode(text)
        except TokenError as error:
            raise WireError("refused") from error


class Host:
    """The host's protocol with a step under way: guests that were checked say anything, and one that never came."""

    EACH = 30
    """Messages in a step, before it is ended; then everything must add up."""

    def __init__(self, mutator: Mutator) -> None:
        self._mutator = mutator
        self._world = World(batch=12, samples=50)
        self._left = 0
        self.steps = self.leases = 0

    def __call__(self) -> None:
        chance = self._mutator.chance
        if not self._left:
            self._end()
            self._begin()
            return
        self._left -= 1
        if chance.random() < 0.4:
            self._go_on()
        guest = chance.choice("aaabbcd")
        if chance.random() < 0.3:
            self._behaves(guest)
        else:
            self._says(guest)

    def _begin(self) -> None:
        """Everybody is there and checked, and the step's leases are out."""
        world, chance = self._world, self._mutator.chance
        if chance.random() < 0.05:
            world = self._world = World(batch=chance.randint(1, 12), samples=chance.randint(1, 50))
        for guest in "abc":
            if guest not in world.members:
                world.join(guest)
        world.code()
        for guest in list(world.members):
            world.take_all(guest)
        world.whole_step()
        world.begin()
        for guest in list(world.members):
            world.take_all(guest)
        self.leases += sum(1 for member in world.members.values() if member.lease is not None)
        self._left = self.EACH

    def _behaves(self, guest: str) -> None:
        """What an honest guest would do now, or nearly."""
        world, mutator = self._world, self._mutator
        member = world.members.get(guest)
        if member is None:
            world.hello(guest)
            ready = plain(msg.ReadyMessage(**SIZES), dump_json(ABOUT))
            self._arrives(guest, mutator.message(ready))
        elif member.check is not None:
            world.sketch(guest)
        elif member.lease is not None and not member.lease.arrived and member.leaving is None:
            lies = mutator.chance.random() < 0.5
            world.deliver(guest, **({mutator.chance.choice(list(DONE)): mutator.value()} if lies else {}))

    def _says(self, guest: str) -> None:
        """Anything at all."""
        world, chance = self._world, self._mutator.chance
        member = world.members.get(guest)
        lease = member.lease.id if member is not None and member.lease is not None else chance.randint(0, 5)
        check = member.check if member is not None and member.check is not None else chance.randint(0, 5)
        self._arrives(guest, self._mutator.message(chance.choice(of_guest(lease=lease, check=check))))

    def _arrives(self, guest: str, message: Plain) -> None:
        raw = [bytes(frame) for frame in packed(message)]
        if self._mutator.chance.random() < 0.1:
            raw[0] = self._mutator.bytes(raw[0])
        self._world.arrives(guest, raw)

    def _go_on(self) -> None:
        """What the host does meanwhile."""
        world, chance = self._world, self._mutator.chance
        what = chance.randrange(6)
        if what == 0 and not world.is_open:
            world.begin()
        elif what == 1 and world.is_open and world.in_hand is not None:
            world.compute()
        elif what == 2 and world.is_open and world.in_hand is None and not world.ledger.full:
            world.take()
        elif what == 2 and world.is_open and world.in_hand is None:
            world.end()
            self.steps += 1
        elif what == 3 and world.comparing:
            world.compare()
        elif what == 4 and world.decoding:
            world.decode()
        else:
            world.hash()
            world.now += 0.1
            world.tick()

    def _end(self) -> None:
        """However wild it was: the step under way ends full."""
        world = self._world
        if world.is_open:
            world.finish()
            self.steps += 1
        while world.decoding:
            world.decode()
        while world.comparing:
            world.compare()
        # Nothing that a guest says may be kept for ever: the world is only a record.
        world.sent.clear()
        world.events.clear()
        world.counted.clear()
        world.of_lease.clear()


# -- the run ------------------------------------------------------------------------------------------------

SHARES: Sequence[tuple[str, type, int]] = (
    ("frames", Arrivals, 30),
    ("parts", Parts, 8),
    ("trees", Trees, 20),
    ("protocol", Host, 30),
    ("payloads", Payloads, 6),
    ("streams", Streams, 6),
    ("changes", Changes, 3),
    ("sketches", Sketches, 3),
    ("tokens", Tokens, 3),
)
"""What is decoded, and how often, beside the others."""


@dataclass
class Fuzz:
    """Decodes mutated messages, one number after the other; what each came to is counted."""

    seed: int
    only: str | None = None
    """One of SHARES."""
    counts: Counter[str] = field(default_factory=Counter)
    slowest_s: float = 0.0

    def __post_init__(self) -> None:
        self._mutator = Mutator(random.Random(self.seed))
        self._targets: dict[str, Callable[[], None]] = {name: kind(self._mutator) for name, kind, _ in SHARES}
        wanted = [(name, share) for name, _, share in SHARES if self.only in (None, name)]
        self._order = [name for name, share in wanted for _ in range(share)]

    def once(self) -> None:
        """One more. Whatever is raised but WireError comes out of here."""
        name = self._mutator.chance.choice(self._order)
        began = time.process_time()  # what else runs here does not count
        try:
            self._targets[name]()
            self.counts[f"{name}: taken"] += 1
        except WireError:
            self.counts[f"{name}: refused"] += 1
        self.slowest_s = max(self.slowest_s, time.process_time() - began)

    @property
    def steps(self) -> int:
        """Steps that the fuzzed host has completed."""
        host = self._targets["protocol"]
        assert isinstance(host, Host)
        return host.steps
