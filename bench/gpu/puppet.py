"""A guest that only takes and delivers: a real link and real messages, but nothing is computed or coded.

    python bench/gpu/puppet.py --token-file FILE --name NAME --sample-s 0.04

Eight guests that compute GPT-2 would need eight machines; what they cost their host does not depend on what their
gradients say. It takes every change of the weights and forgets it, sleeps where a guest computes, and sends the
same coded noise each time. Its host must be the one of tax.py, which takes every gradient for right. It must not
know anything of the host beyond the protocol.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch

from potluck.checked import build
from potluck.codec import to_wire
from potluck.device import Mark, pick
from potluck.hub.guest import GuestHub, RunOver, Update
from potluck.hub.guest_work import Work
from potluck.hub.link import GuestLink, RawFrames
from potluck.hub.model_tensors import ModelTensors
from potluck.hub.parity import SKETCH_VALUES
from potluck.spec.messages import GradMessage, HashMessage, HelloMessage, ResyncMessage, TensorMessage
from potluck.train import recipes
from potluck.train.telemetry import versions
from potluck.wire.token import decode


class PuppetHub(GuestHub):
    """A guest's hub that holds no weights."""

    def prepare(self) -> None:
        counts = {piece.count for piece in self._layout.pieces}
        # A run that chooses codecs may go over from int4 to thin.
        named = {codec.name: codec for codec in self._pieces.up.likely} | {"": self._pieces.up.first}
        self._noise = {
            (name, n): to_wire(codec, codec.encode(torch.randn(n) * 1e-9))
            for name, codec in named.items()
            for n in counts
        }

    def _apply(self, message: Update, frames: RawFrames) -> None:
        if isinstance(message, HashMessage | ResyncMessage):
            super()._apply(message, frames)
            return
        if not isinstance(message, TensorMessage):
            with self._changed:
                self._have[message.piece] = message.version
                self._changed.notify_all()
        self._taken(frames)

    def _code(self, work: Work, index: int, computed: Mark) -> None:
        frame = self._noise[work.codec, self._layout.pieces[index].count]
        self._link.send(GradMessage(lease=work.id, piece=index), frame)
        with self._changed:
            self._coded.add(index)
            self._changed.notify_all()


class Puppet:
    """Serves one host until the run is over."""

    def __init__(self, link: GuestLink, sample_s: float) -> None:
        welcome = link.connect(120.0).message
        recipe = recipes.get(welcome.source.recipe)
        model = recipe.model(build(recipe.Config, welcome.source.config))
        self._sample_s = sample_s
        self._hub = PuppetHub(
            link,
            ModelTensors(model),
            down=welcome.codec_down,
            up=welcome.codec,
            device=pick("cpu", threads=1),
        )

    def serve(self) -> None:
        self._hub.prepare()
        self._hub.open(lambda: (4, 8))
        try:
            while True:
                self._work(self._hub.next_work())
        except RunOver:
            self._hub.close()

    def _work(self, work: Work) -> None:
        hub = self._hub
        # What a lease has beyond its quota is for guests that turn out faster than was thought.
        count = work.sizes[0] if work.check else work.quota
        hub.enter(work)
        hub.wait_for_all(work)
        if work.check:
            hub.batch(work, 0)
            values = memoryview(torch.zeros(SKETCH_VALUES).numpy()).cast("B")
            hub.send_sketch(work, values=values, loss=1.0, compute_s=count * self._sample_s, random={})
        elif work.over:
            hub.stopped(work, 0, 0.0)
        else:
            compute_s = count * self._sample_s
            hub.closing(work, count, compute_s + work.tail_s)
            time.sleep(compute_s)
            hub.finish(work, count=count, loss_sum=float(count), compute_s=compute_s)
        hub.let_go(work)
        hub.leave()


def main() -> None:
    parser = argparse.ArgumentParser(description="A guest that only delivers.")
    parser.add_argument("--token-file", type=Path, required=True)
    parser.add_argument("--name", required=True)
    parser.add_argument("--sample-s", type=float, required=True, help="seconds a sample takes it")
    options = parser.parse_args()
    torch.set_num_threads(1)
    token = decode(options.token_file.read_text().strip())
    hello = HelloMessage(name=options.name, device="puppet", platform="linux", **versions())
    Puppet(GuestLink(token, hello), options.sample_s).serve()


if __name__ == "__main__":
    main()
