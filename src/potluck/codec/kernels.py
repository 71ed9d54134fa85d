"""The block codecs' arithmetic as Triton kernels: one pass over the values where plain torch makes ten.

`fused.py` decides where these may run. Every result equals that of `block.py` to the bit, as long as the compiler
does not fuse a product and a sum (launch with fp fusion off).

A program handles ROWS blocks of 128 values as two halves of 64, which is how int4 packs them. The grid's second
axis counts pieces that lie one after the other, each with its scales before its codes.
"""

from __future__ import annotations

import triton
import triton.language as tl

AS_IT_IS, SUM, DIFFERENCE = 0, 1, 2
"""What is encoded: a; a + b, which is stored in a; a - b."""
WRITE, ADD, ADD_IF_FINITE, SUBTRACT_IF_FINITE = 0, 1, 2, 3
"""The use of decoded values d: out = d; out += d; the same; out = other - d."""

ROWS = tl.constexpr(32)


@triton.jit
def _piece_bytes(count, PACKED: tl.constexpr):
    whole, left = count // 128, count % 128
    block_bytes = 64 if PACKED else 128
    return 2 * ((count + 127) // 128) + whole * block_bytes + tl.minimum(left, block_bytes)


@triton.jit
def encode_kernel(a, b, payload, worst, count, step, WHAT: tl.constexpr, PACKED: tl.constexpr, THIN: tl.constexpr):
    """a, b: [pieces, count] float32 -> payload: [pieces, nbytes] uint8; worst: [pieces] int32, zeros at first.

    worst: the bits of the largest scale, from which follows whether all of the payload is finite.
    step: with THIN, the least scale in root mean squares of its block.
    """
    piece = tl.program_id(1).to(tl.int64)
    blocks = (count + 127) // 128
    payload += piece * _piece_bytes(count, PACKED)
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, 64)
    low_at = rows[:, None] * 128 + columns[None, :]
    high_at = low_at + 64
    a += piece * count
    low = tl.load(a + low_at, mask=low_at < count, other=0.0)
    high = tl.load(a + high_at, mask=high_at < count, other=0.0)
    if WHAT != 0:
        b += piece * count
        low_b = tl.load(b + low_at, mask=low_at < count, other=0.0)
        high_b = tl.load(b + high_at, mask=high_at < count, other=0.0)
        if WHAT == 1:
            low += low_b
            high += high_b
            tl.store(a + low_at, low, mask=low_at < count)
            tl.store(a + high_at, high, mask=high_at < count)
        else:
            low -= low_b
            high -= high_b
    peak_low = tl.max(low.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)
    peak_high = tl.max(high.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)
    peak = tl.minimum(tl.maximum(peak_low, peak_high), 0x7F800000)
    scale = peak.to(tl.float32, bitcast=True) * (1.0 / 7 if PACKED else 1.0 / 127)
    if THIN:
        values = tl.minimum(tl.maximum(count - rows * 128, 1), 128).to(tl.float32)
        square = (tl.sum(low * low, 1) + tl.sum(high * high, 1)) / values
        scale = tl.maximum(
            scale, tl.where(square < 1e30, tl.sqrt(tl.where(square < 1e30, square, 0.0)) * step, 0.0)
        )
    bits = scale.to(tl.int32, bitcast=True)
    bits = (tl.maximum(bits, 0x00800000) + 0xFFFF) & -0x10000
    stored = payload.to(tl.pointer_type(tl.int16))
    tl.store(stored + rows, (bits >> 16).to(tl.int16), mask=rows < blocks)
    tl.atomic_max(worst + piece, tl.max(tl.where(rows < blocks, bits >> 16, 0), 0))
    scale = bits.to(tl.float32, bitcast=True)
    inverse = tl.div_rn(tl.full([ROWS], 1.0, tl.float32), scale)[:, None]
    # Of magnitudes this large there are no fractions: adding and taking away rounds to the nearest whole number.
    low = (low * inverse + 12582912.0) - 12582912.0
    high = (high * inverse + 12582912.0) - 12582912.0
    codes = (payload + 2 * blocks).to(tl.pointer_type(tl.int8))
    if PACKED:
        byte_at = rows[:, None] * 64 + columns[None, :]
        tl.store(codes + byte_at, (low + high * 16.0).to(tl.int32).to(tl.int8), mask=low_at < count)
    else:
        tl.store(codes + low_at, low.to(tl.int32).to(tl.int8), mask=low_at < count)
        tl.store(codes + high_at, high.to(tl.int32).to(tl.int8), mask=high_at < count)


@triton.jit
def _put(out, other, at, count, decoded, DO: tl.constexpr):
    inside = at < count
    if DO == 3:
        tl.store(out + at, tl.load(other + at, mask=inside, other=0.0) - decoded, mask=inside)
    elif DO != 0:
        tl.store(out + at, tl.load(out + at, mask=inside, other=0.0) + decoded, mask=inside)
    else:
        tl.store(out + at, decoded, mask=inside)


@triton.jit
def decode_kernel(payload, out, other, worst, count, DO: tl.constexpr, PACKED: tl.constexpr):
    """payload: [pieces, nbytes] uint8 -> out: [pieces, count] float32; other: the same shape.

    A product of a code and a scale is exact, so it does not matter here whether it is fused with the sum.
    """
    piece = tl.program_id(1).to(tl.int64)
    blocks = (count + 127) // 128
    payload += piece * _piece_bytes(count, PACKED)
    wanted = True
    if DO >= 2:
        # From this scale on, some code decodes to infinity.
        wanted = tl.load(worst + piece) < (0x7E00 if PACKED else 0x7C00)
    if wanted:
        rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
        columns = tl.arange(0, 64)
        low_at = rows[:, None] * 128 + columns[None, :]
        high_at = low_at + 64
        stored = payload.to(tl.pointer_type(tl.int16))
        bits = tl.load(stored + rows, mask=rows < blocks, other=0).to(tl.int32) << 16
        scale = bits.to(tl.float32, bitcast=True)[:, None]
        codes = (payload + 2 * blocks).to(tl.pointer_type(tl.int8))
        if PACKED:
            byte_at = rows[:, None] * 64 + columns[None, :]
            pair = tl.load(codes + byte_at, mask=low_at < count, other=0).to(tl.int32)
            # Both codes are -8..7 whatever the byte: the sums wrap around as those of 8 bits do.
            high_code = (((pair + 136) & 255) - 128) >> 4
            low_code = ((pair - 16 * high_code + 128) & 255) - 128
        else:
            low_code = tl.load(codes + low_at, mask=low_at < count, other=0).to(tl.int32)
            high_code = tl.load(codes + high_at, mask=high_at < count, other=0).to(tl.int32)
        out += piece * count
        other += piece * count
        _put(out, other, low_at, count, low_code.to(tl.float32) * scale, DO)
        _put(out, other, high_at, count, high_code.to(tl.float32) * scale, DO)
