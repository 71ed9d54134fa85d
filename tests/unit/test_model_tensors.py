"""Pieces are read from and written to parameters of any type and memory format; fixed tensors travel in parts."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from potluck.errors import LoopError
from potluck.hub.layout import make_layout
from potluck.hub.model_tensors import (
    ModelTensors,
    add_to_piece,
    from_bytes,
    raw_bytes,
    read_piece,
    round_to_types,
    tensor_hash,
    write_part,
    write_piece,
)
from potluck.spec.model_description import TensorSpec

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}


def parameter(shape: list[int], dtype: str, strided: bool, seed: int) -> nn.Parameter:
    """Random values; where `strided`, in another order in memory than in the flat vector."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator).to(DTYPES[dtype])
    if strided and len(shape) > 1:
        values = values.transpose(0, -1).contiguous().transpose(0, -1)
        assert values.is_contiguous() == (sum(n != 1 for n in shape) < 2 or 0 in shape)
    return nn.Parameter(values)


models = st.lists(
    st.tuples(st.lists(st.integers(1, 5), max_size=3), st.sampled_from(list(DTYPES)), st.booleans()),
    min_size=1,
    max_size=5,
)


@settings(max_examples=80, deadline=None)
@given(model=models, size=st.sampled_from([1, 3, 8, 64]))
def test_pieces_are_written_and_read_whatever_lies_beneath(
    model: list[tuple[list[int], str, bool]], size: int
) -> None:
    parameters = [parameter(shape, dtype, strided, i) for i, (shape, dtype, strided) in enumerate(model)]
    layout = make_layout(
        [
            TensorSpec(name=str(i), shape=tuple(p.shape), dtype="?", role="trained")
            for i, p in enumerate(parameters)
        ],
        size,
    )
    flat = torch.cat([p.detach().reshape(-1).float() for p in parameters])
    change = torch.randn(flat.numel(), generator=torch.Generator().manual_seed(99))
    out = torch.empty(size)
    for piece in layout.pieces:
        at = slice(piece.offset, piece.offset + piece.count)
        assert torch.equal(read_piece(piece, parameters, out), flat[at])
        add_to_piece(piece, parameters, change[at])
        expected = flat[at] + change[at]
        round_to_types(piece, parameters, expected)
        assert torch.equal(read_piece(piece, parameters, out), expected), "guest and host round alike"
        write_piece(piece, parameters, flat[at])
        assert torch.equal(read_piece(piece, parameters, out), flat[at])


def test_a_missing_gradient_reads_as_zeros() -> None:
    layout = make_layout([TensorSpec(name=n, shape=(3,), dtype="float32", role="trained") for n in "ab"], 4)
    out = torch.full((4,), 7.0)
    assert read_piece(layout.pieces[0], {0: None, 1: torch.ones(3)}, out).tolist() == [0, 0, 0, 1]
    assert read_piece(layout.pieces[1], {1: torch.ones(3)}, out).tolist() == [1, 1]


def test_a_convolution_in_channels_last_follows() -> None:
    model = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    before = model.weight.detach().clone()
    tensors = ModelTensors(model)
    (piece,) = tensors.layout.pieces
    add_to_piece(piece, tensors.trained, torch.ones(piece.count))
    assert torch.equal(model.weight, before + 1)
    assert model.weight.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6, dtype=torch.int64),
        torch.randn(4, 5),
        torch.randn(4, 5).t(),
        torch.randn(7).bfloat16(),
        torch.tensor(3.5),
        torch.tensor([True, False, True]),
        torch.arange(4, dtype=torch.uint8),
    ],
    ids=lambda t: f"{t.dtype}{list(t.stride())}",
)
def test_bytes_and_back(tensor: Tensor) -> None:
    view = raw_bytes(tensor)
    assert view.nbytes == len(view) == tensor.numel() * tensor.element_size()
    for buffer in (view, bytes(view), bytearray(view)):
        assert torch.equal(from_bytes(buffer, tensor.dtype), tensor.reshape(-1))


def test_nothing_has_no_bytes() -> None:
    assert len(raw_bytes(torch.empty(0, 3))) == 0
    assert from_bytes(b"").numel() == 0


def test_what_was_received_may_be_changed_and_stays_as_it_was_received() -> None:
    received = bytes(4)
    from_bytes(received)[0] = 7
    assert received == bytes(4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool])
def test_a_fixed_tensor_arrives_in_parts(dtype: torch.dtype) -> None:
    """Parts end before the tensor does: frozen weights of more than a few megabytes come so."""
    source = torch.randint(0, 2, (5, 4)).to(dtype)
    target = {"w": torch.zeros(5, 4, dtype=dtype)}
    flat = source.reshape(-1)
    for start, stop in ((12, 20), (0, 7), (7, 12)):
        write_part(target, "w", start, from_bytes(raw_bytes(flat[start:stop])))
        assert torch.equal(target["w"].reshape(-1)[start:stop], flat[start:stop])
    assert torch.equal(target["w"], source)


def test_a_fixed_tensor_may_lie_in_any_order_in_memory() -> None:
    target = {"w": torch.zeros(4, 3).t()}
    write_part(target, "w", 0, torch.arange(12.0))
    assert torch.equal(target["w"], torch.arange(12.0).view(3, 4))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.embedding.weight
        self.norm.weight.requires_grad_(False)


def test_trained_frozen_and_buffers_are_told_apart_and_tied_weights_travel_once() -> None:
    tensors = ModelTensors(Tied())
    assert [(s.name, s.role) for s in tensors.fingerprint] == [
        ("embedding.weight", "trained"),
        ("norm.weight", "frozen"),
        ("norm.bias", "trained"),
        ("norm.running_mean", "buffer"),
        ("norm.running_var", "buffer"),
        ("norm.num_batches_tracked", "buffer"),
    ]
    assert [t.shape for t in tensors.trained] == [(10, 4), (4,)]
    assert tensors.layout.count == 44
    assert [t.name for t in tensors.layout.tensors] == ["embedding.weight", "norm.bias"]
    assert (
        set(tensors.fixed) == set(tensors.hashes()) == {s.name for s in tensors.fingerprint if s.role != "trained"}
    )


def test_hashes_tell_contents_apart() -> None:
    one, other = Tied(), Tied()
    assert ModelTensors(one).hashes() == ModelTensors(other).hashes()
    with torch.no_grad():
        other.norm.weight[2] += 1e-6
    differing = {n for n, h in ModelTensors(one).hashes().items() if ModelTensors(other).hashes()[n] != h}
    assert differing == {"norm.weight"}
    assert tensor_hash(torch.arange(6.0).view(2, 3)) == tensor_hash(
        torch.arange(6.0).view(3, 2).t().contiguous().t().reshape(2, 3)
    )


def test_a_model_without_trained_parameters_is_the_users_mistake() -> None:
    with pytest.raises(LoopError, match="no parameter"):
        ModelTensors(nn.Linear(2, 2).requires_grad_(False))
    model = nn.Linear(2, 2)
    model.phase = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    with pytest.raises(LoopError, match=r"phase is trained but is torch\.complex64"):
        ModelTensors(model)
