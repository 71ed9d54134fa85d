"""Gates before the forward and pieces out of the backward: never too early, each once, whatever the model does."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from potluck.hub.layout import Layout, make_layout
from potluck.hub.model_tensors import ModelTensors
from potluck.hub.overlap import Overlap

WIDTH = 6


class Plain(nn.Module):
    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class Tied(nn.Module):
    """The head uses the embedding's weight; the embedding is used first and gets its gradient last."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Linear(WIDTH, WIDTH)
        self.middle = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WIDTH)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.middle(torch.tanh(self.embedding(x)))))


class Borrowed(nn.Module):
    """Uses a parameter whose owner's forward is never called, as nn.MultiheadAttention does."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.owner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(torch.tanh(self.first(x)), self.owner.weight, self.owner.bias)


class Checkpointed(nn.Module):
    """Layers computed again in the backward; with `shared`, two of them are one."""

    def __init__(self, *, reentrant: bool, shared: bool) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.reentrant, self.shared = reentrant, shared

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for number in (0, 1, 0) if self.shared else (0, 1):
            x = torch.tanh(checkpoint(self.layers[number], x, use_reentrant=self.reentrant))
        return x


class Bench:
    """A model with hooks on it, and what they said in order."""

    def __init__(self, model: nn.Module, size: int = 16) -> None:
        torch.manual_seed(0)
        self.model = model
        self.trained = [p for p in model.parameters() if p.requires_grad]
        self.layout: Layout = make_layout(ModelTensors(model).layout.tensors, size)
        self.overlap = Overlap(model, self.trained, self.layout)
        self.waited: list[tuple[int, ...]] = []
        self.ready: list[int] = []
        self.at_ready: dict[int, list[Tensor | None]] = {}
        self.x = torch.randn(4, WIDTH)

    def backward(self) -> None:
        self.model(self.x).square().sum().backward()

    def watch(self) -> Bench:
        self.overlap.watch()
        self.backward()
        self.overlap.conclude(self.model)
        self.zero()
        return self

    def zero(self) -> None:
        for parameter in self.trained:
            parameter.grad = None

    def on_ready(self, pieces: Sequence[int]) -> None:
        for index in pieces:
            assert index not in self.ready, f"piece {index} was ready twice"
            self.ready.append(index)
            grads = [self.trained[s.tensor].grad for s in self.layout.pieces[index].spans]
            self.at_ready[index] = [None if g is None else g.clone() for g in grads]

    def compute(self, *, ready: bool = True) -> None:
        self.overlap.computing(wait=lambda p: self.waited.append(tuple(p)), ready=self.on_ready if ready else None)
        self.backward()
        self.overlap.idle()

    def check_final(self) -> None:
        """What was read when a piece became ready is what the backward left behind."""
        for index, seen in self.at_ready.items():
            for span, early in zip(self.layout.pieces[index].spans, seen):
                late = self.trained[span.tensor].grad
                assert early is not None
                assert late is not None
                assert torch.equal(early, late), f"piece {index} left before its gradient was final"

    def pieces_of(self, *parameters: Tensor) -> set[int]:
        numbers = [i for i, p in enumerate(self.trained) if any(p is q for q in parameters)]
        return {p for i in numbers for p in self.layout.pieces_of[i]}


# -- gates


def test_before_a_batch_was_watched_everything_is_waited_for_and_nothing_leaves_early() -> None:
    bench = Bench(Plain())
    assert bench.overlap.up_front == tuple(range(len(bench.layout.pieces)))
    assert not bench.overlap.early
    assert bench.overlap.reason == "no batch was watched yet"
    bench.compute()
    assert bench.ready == []


def test_a_layer_waits_for_its_own_pieces_just_before_it_computes() -> None:
    model = Plain()
    bench = Bench(model).watch()
    assert bench.overlap.up_front == ()
    with torch.no_grad():  # the weights of the first layer arrive when the gate asks for them, and not before
        new = torch.randn_like(model.layers[0].weight)
        expected = torch.tanh(functional.linear(bench.x, new, model.layers[0].bias))

    order: list[str] = []

    def gate(pieces: Sequence[int]) -> None:
        order.append(f"gate {sorted(pieces)}")
        if set(pieces) == bench.pieces_of(*model.layers[0].parameters()):
            with torch.no_grad():
                model.layers[0].weight.copy_(new)

    outputs = []
    handles = [
        layer.register_forward_hook(lambda m, a, out, i=i: (order.append(f"layer {i}"), outputs.append(out))[0])
        for i, layer in enumerate(model.layers)
    ]
    bench.overlap.computing(wait=gate, ready=None)
    bench.backward()
    bench.overlap.idle()
    for handle in handles:
        handle.remove()
    gates = [f"gate {sorted(bench.pieces_of(*layer.parameters()))}" for layer in model.layers]
    assert order == [word for i in range(3) for word in (gates[i], f"layer {i}")]
    assert torch.equal(torch.tanh(outputs[0]), expected)


def test_a_gate_opens_before_any_other_hook_reads_the_parameters() -> None:
    """weight_norm computes the weight in a hook of its own, which was there first."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        layer = nn.utils.weight_norm(nn.Linear(WIDTH, WIDTH))
    bench = Bench(nn.Sequential(layer)).watch()
    layer.bias.data.zero_()

    def gate(pieces: Sequence[int]) -> None:
        layer.weight_g.data.zero_()

    bench.overlap.computing(wait=gate, ready=None)
    assert bench.model(bench.x).abs().sum() == 0


def test_a_borrowed_parameter_is_waited_for_up_front() -> None:
    model = Borrowed()
    bench = Bench(model).watch()
    assert set(bench.overlap.up_front) == bench.pieces_of(*model.owner.parameters())
    bench.compute()
    assert {p for pieces in bench.waited for p in pieces} | set(bench.overlap.up_front) == set(
        range(len(bench.layout.pieces))
    )
    bench.check_final()


class Half(nn.Module):
    """Its first layer under autocast, its second one not."""

    def __init__(self, *, both: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.both = both

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            x = self.first(x)
            if self.both:
                return self.second(x)
        return self.second(x.float())


def test_a_guest_knows_whether_all_of_its_layers_compute_in_bf16() -> None:
    assert Bench(Half(both=True)).watch().overlap.bf16
    assert not Bench(Half(both=False)).watch().overlap.bf16
    assert not Bench(Borrowed()).watch().overlap.bf16
    bench = Bench(nn.Sequential(nn.Linear(WIDTH, WIDTH)).to(torch.bfloat16))
    bench.x = bench.x.to(torch.bfloat16)
    assert not bench.overlap.bf16, "nothing is known before a batch was watched"
    assert bench.watch().overlap.bf16


def test_attention_is_safe() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            x = x.unsqueeze(0)
            return self.attention(x, x, x, need_weights=False)[0]

    model = Attention()
    bench = Bench(model).watch()
    assert set(bench.overlap.up_front) >= bench.pieces_of(*model.attention.out_proj.parameters())
    bench.compute()
    bench.check_final()


def test_a_layer_that_the_watched_batch_did_not_reach_is_waited_for_up_front() -> None:
    model = Plain()
    model.extra = nn.Linear(WIDTH, WIDTH)  # as an expert that no sample was sent to
    bench = Bench(model).watch()
    assert set(bench.overlap.up_front) == bench.pieces_of(*model.extra.parameters())


def test_every_parameter_is_behind_some_gate() -> None:
    for model in (Plain(), Tied(), Borrowed(), Checkpointed(reentrant=False, shared=True)):
        bench = Bench(model).watch()
        bench.compute()
        behind = {p for pieces in bench.waited for p in pieces} | set(bench.overlap.up_front)
        assert behind == set(range(len(bench.layout.pieces)))


# -- the backward


@pytest.mark.parametrize("size", [1, 5, 16, 1000])
@pytest.mark.parametrize(
    "make",
    [
        Plain,
        Tied,
        Borrowed,
        lambda: Checkpointed(reentrant=False, shared=False),
        lambda: Checkpointed(reentrant=False, shared=True),
        lambda: Checkpointed(reentrant=True, shared=False),
    ],
    ids=["plain", "tied", "borrowed", "checkpoint", "checkpoint-shared", "checkpoint-reentrant"],
)
def test_every_piece_leaves_once_and_only_when_it_is_final(make: Callable[[], nn.Module], size: int) -> None:
    bench = Bench(make(), size).watch()
    assert bench.overlap.early, bench.overlap.reason
    bench.compute(ready=False)  # the first micro-batch of the lease
    assert bench.ready == []
    bench.compute()
    assert sorted(bench.ready) == list(range(len(bench.layout.pieces)))
    bench.check_final()


def test_every_lease_begins_anew() -> None:
    bench = Bench(Plain()).watch()
    for _ in range(3):
        bench.ready.clear()
        bench.zero()
        bench.compute()
        assert sorted(bench.ready) == list(range(len(bench.layout.pieces)))
        bench.check_final()


def test_pieces_leave_while_the_backward_still_runs() -> None:
    bench = Bench(Plain(layers=4), size=WIDTH).watch()
    bench.compute()
    first, last = bench.ready[0], bench.ready[-1]
    assert first in bench.pieces_of(*bench.model.layers[3].parameters())  # type: ignore[index,union-attr]
    assert last in bench.pieces_of(*bench.model.layers[0].parameters())  # type: ignore[index,union-attr]


def test_a_tied_weight_is_final_only_after_both_uses() -> None:
    model = Tied()
    bench = Bench(model, size=WIDTH).watch()
    bench.compute()
    tied = bench.pieces_of(model.embedding.weight)
    middle = bench.pieces_of(model.middle.weight) - tied
    assert min(bench.ready.index(p) for p in tied) > max(bench.ready.index(p) for p in middle)
    bench.check_final()


def test_re_entrant_checkpointing_of_a_shared_layer_turns_early_sending_off() -> None:
    """Each segment's backward is one of its own, and leaves a part of the gradient behind."""
    bench = Bench(Checkpointed(reentrant=True, shared=True)).watch()
    assert not bench.overlap.early
    assert bench.overlap.reason == "a gradient came in several parts"
    bench.compute()
    assert bench.ready == []


def test_a_parameter_without_a_gradient_is_left_to_the_end() -> None:
    model = Plain()
    model.extra = nn.Linear(WIDTH, WIDTH)
    bench = Bench(model, size=WIDTH).watch()
    bench.compute()
    unused = bench.pieces_of(*model.extra.parameters())
    assert set(bench.ready).isdisjoint(unused)
    assert set(bench.ready) | unused == set(range(len(bench.layout.pieces)))
    bench.check_final()


def test_frozen_parameters_have_no_part_in_it() -> None:
    model = Plain()
    model.layers[1].requires_grad_(False)
    bench = Bench(model).watch()
    bench.compute()
    assert bench.overlap.early
    assert sorted(bench.ready) == list(range(len(bench.layout.pieces)))
    bench.check_final()


# -- compiled models and the end


@pytest.mark.parametrize("how", ["wrapped", "in place"])
def test_a_compiled_model_is_waited_for_as_a_whole(how: str) -> None:
    model: nn.Module = Plain()
    bench = Bench(model)
    if how == "in place":
        model.layers[1].compile(backend="eager")  # type: ignore[index,union-attr]
        compiled = model
    else:
        compiled = torch.compile(model, backend="eager")
    bench.overlap.watch()
    bench.overlap.conclude(compiled)
    assert bench.overlap.up_front == tuple(range(len(bench.layout.pieces)))
    assert not bench.overlap.early
    assert "compiled" in bench.overlap.reason


@pytest.mark.parametrize("what", ["the model", "a function around it"])
def test_what_is_compiled_can_be_computed_with_the_hooks_in_place(what: str) -> None:
    torch._dynamo.reset()  # what it has compiled without hooks would be used again with them
    model = Plain()
    compiled = torch.compile(model if what == "the model" else lambda x: model(x), backend="eager")
    tensors = ModelTensors(model)
    waited: list[int] = []
    overlap = Overlap(compiled if what == "the model" else model, tensors.trained, tensors.layout)
    overlap.computing(wait=waited.extend, ready=None)
    compiled(torch.ones(2, WIDTH)).sum().backward()
    # A compiled model is waited for up front; its layers' hooks are not there to be traced.
    assert bool(waited) == (what != "the model")
    overlap.remove()


def test_nothing_is_called_when_nothing_is_computed() -> None:
    bench = Bench(Plain()).watch()
    bench.compute()
    bench.waited.clear()
    bench.ready.clear()
    bench.backward()
    assert (bench.waited, bench.ready) == ([], [])


def test_the_hooks_can_be_removed() -> None:
    bench = Bench(Plain()).watch()
    bench.overlap.computing(wait=lambda p: bench.waited.append(tuple(p)), ready=bench.on_ready)
    bench.overlap.remove()
    bench.backward()
    assert (bench.waited, bench.ready) == ([], [])
