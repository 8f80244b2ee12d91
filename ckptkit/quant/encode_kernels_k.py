"""Encoders of the K-quants: 256 values in 8 or 16 sub-blocks whose scales are themselves quantised (Numba).

    Q2_K   84 bytes  (scale | offset << 4)[16], 2-bit levels[64], d, dmin           16 x 16  x = d*sc*q - dmin*m
    Q3_K  110 bytes  third bits[32], 2-bit levels[64], 6-bit scales[12], d          16 x 16  x = d*(sc-32)*(q-4)
    Q4_K  144 bytes  d, dmin, 6-bit scales and offsets[12], 4-bit levels[128]        8 x 32  x = d*sc*q - dmin*m
    Q5_K  176 bytes  d, dmin, as Q4_K[12], fifth bits[32], 4-bit levels[128]         8 x 32  x = d*sc*q - dmin*m
    Q6_K  210 bytes  low nibbles[128], upper 2 bits[64], int8 scales[16], d         16 x 16  x = d*sc*(q-32)

A block is made in three steps: `fit_*` searches scale, offset and levels of sixteen sub-blocks at once; the scales are
quantised; `write_*` takes the nearest level under the quantised scales and packs. Where a quantised scale is zero the
fitted levels stay. Source of truth: the reference quantisers of ggml (ggml-quants.c), equalled bit for bit.
"""

# mypy: ignore-errors
from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numba import njit, types
from numba.extending import intrinsic

from . import encode_kernels_fit as fit
from . import lanes
from .lanes import I64, Column, Lanes, N, address, load, load_one
from .types import QType

F = np.float32
TINY = F(fit.TINY)
EMITTED = hashlib.sha256(b"".join(Path(m.__file__).read_bytes() for m in (fit, lanes))).hexdigest()[:12]


def compiled(function):
    """njit, kept on disk under a name that changes with the modules whose emitted code numba does not see; in memory
    only where there is no place to write."""
    function.__qualname__ += "_" + EMITTED
    try:
        return njit(nogil=True, cache=True, error_model="numpy")(function)
    except RuntimeError:
        return njit(nogil=True, error_model="numpy")(function)


def scalar(emit, returns):
    """A Numba function of one number, emitted from Lanes."""

    @intrinsic
    def call(_typing, value):
        return returns(value), lambda _context, b, _sig, args: emit(Lanes(b, args[0])).v

    return call


nearest = scalar(lambda v: v.nearest(), types.int32)
to_half = scalar(lambda v: v.half(), types.int32)
from_half = scalar(lambda v: lanes.from_half(v), types.float32)


def pointers(context, b, sig, args):
    """The arguments with arrays replaced by the addresses of their data."""
    return [
        context.make_array(t)(context, b, a).data if isinstance(t, types.Array) else a
        for t, a in zip(sig.args, args, strict=True)
    ]


def fitting(size, emit):
    """A Numba function (source, first, second, out, spare) -> bits of the largest magnitude.

    Lanes 0..7 hold the first 128 or 256 values, 8..15 as many from `second`. out (2, 16) receives scales and offsets,
    spare the levels in the order of the values.
    """

    @intrinsic
    def call(_typing, source, first, second, out, spare):
        sig = types.int32(source, first, second, out, spare)

        def generate(context, b, sig, args):
            source, first, second, out, spare = pointers(context, b, sig, args)
            x = Column(b, size)
            peak = None
            for part in range(0, size, N):
                rows = []
                for lane in range(N):
                    start = b.add(first if lane < 8 else second, I64(lane % 8 * size + part))
                    rows.append(load(b, address(b, source, start)))
                    magnitude = rows[-1].bits() & 0x7FFFFFFF
                    peak = magnitude if peak is None else peak.at_least(magnitude)
                for i, v in enumerate(lanes.transposed(b, rows)):
                    x[part + i] = v
            scale, offset, levels = emit(x)
            lanes.store(b, scale.v, out)
            lanes.store(b, offset.v, address(b, out, N))
            for part in range(0, size, N):
                for lane, v in enumerate(lanes.transposed(b, levels[part : part + N])):
                    lanes.store(b, v.v, address(b, spare, lane * size + part))
            return peak.reduce("smax").v

        return sig, generate

    return call


def fit_weighted(x, top, first, step, tries):
    """Q4_K, Q5_K: the weight of a value is its magnitude above the root of the mean square."""
    squares = lanes.Cell(x[0].like(0.0))
    with fit.count(x.b, x.n) as i:
        squares.add(x[i] * x[i])
    root = (squares.get() / float(x.n)).call("llvm.sqrt")
    weights = Column(x.b, x.n)
    for i in range(x.n):
        weights[i] = root + x[i].abs()
    return fit.affine(x, weights, top, first, step, tries, absolute=False)


def fit_plain(x):
    """Q2_K: the weight of a value is its magnitude, and errors count unsquared."""
    weights = Column(x.b, x.n)
    for i in range(x.n):
        weights[i] = x[i].abs()
    return fit.affine(x, weights, 3, -0.5, 0.1, 15, absolute=True)


def without_offset(scale, levels):
    """The result of a symmetric fit in the shape of an affine one."""
    return scale, scale.like(0.0), levels


fit_q2 = fitting(16, fit_plain)
fit_q3 = fitting(16, lambda x: without_offset(*fit.descent(x, 4)))
fit_q4 = fitting(32, lambda x: fit_weighted(x, 15, -1.0, 0.1, 20))
fit_q5 = fitting(32, lambda x: fit_weighted(x, 31, -0.5, 0.1, 15))
fit_q6 = fitting(16, lambda x: without_offset(*fit.symmetric(x, 32)))


def writing(size, top, half, pack):
    """A Numba function (source, at, scales, spare, spare_at, target, to, errors): 256 values as levels, packed.

    scales (2, 16) holds scale and offset of each sub-block, decoded; errors is a record to add to.
    """

    @intrinsic
    def call(_typing, source, at, scales, spare, spare_at, target, to, errors):
        sig = types.void(source, at, scales, spare, spare_at, target, to, errors)

        def generate(context, b, sig, args):
            source, at, scales, spare, spare_at, target, to, errors = pointers(context, b, sig, args)
            levels, pairs = [], []
            for t in range(0, 256, N):
                v = load(b, address(b, source, b.add(at, I64(t))))
                d = load_one(b, address(b, scales, t // size))
                m = load_one(b, address(b, scales, N + t // size))
                if half:
                    q = (v / d).nearest().at_most(half - 1).at_least(-half) + half
                else:
                    q = ((v + m) / d).nearest().at_most(top).at_least(0)
                kept = load(b, address(b, spare, b.add(spare_at, I64(t)))).bits()
                levels.append(q.where(v.like(d).differs(0.0), kept))
                pairs.append((v, (levels[-1] - half).to_float() * d - m))
            lanes.record(errors, pairs)
            pack(levels, lambda offset: address(b, target, b.add(to, I64(offset))))
            return context.get_dummy_value()

        return sig, generate

    return call


def joined(parts):
    """Bits of several vectors of integers in one; part k shifted by its amount."""
    result = None
    for v, shift in parts:
        v = v << shift if shift else v
        result = v if result is None else result | v
    return result


# In all of these q is a list of 16 vectors: elements 0..15, 16..31, ...
def pack_twos(q, at, start):
    """2-bit levels: of each 128, byte j holds elements j, j + 32, j + 64 and j + 96."""
    for block in (0, 8):
        for h in (0, 1):
            joined((q[block + 2 * k + h], 2 * k) for k in range(4)).bytes_to(at(start + 4 * block + N * h))


def pack_nibbles(q, at, start):
    """4-bit levels: of each 64, byte j holds elements j and j + 32."""
    for pair in range(4):
        for h in (0, 1):
            joined([(q[4 * pair + h], 0), (q[4 * pair + 2 + h], 4)]).bytes_to(at(start + 32 * pair + N * h))


def pack_bits(q, at, start):
    """One bit a level: byte j holds elements j, j + 32, ... j + 224."""
    for h in (0, 1):
        joined((q[2 * k + h], k) for k in range(8)).bytes_to(at(start + N * h))


def pack_q2(q, at):
    """Levels after 16 scales."""
    pack_twos(q, at, 16)


def pack_q3(q, at):
    """Third bits, then the lower two."""
    pack_bits([v >> 2 for v in q], at, 0)
    pack_twos([v & 3 for v in q], at, 32)


def pack_q4(q, at):
    """Levels after d, dmin and 12 bytes of scales."""
    pack_nibbles(q, at, 16)


def pack_q5(q, at):
    """Fifth bits, then the lower four."""
    pack_bits([v >> 4 for v in q], at, 16)
    pack_nibbles([v & 15 for v in q], at, 48)


def pack_q6(q, at):
    """Low nibbles: of each 128, byte j holds elements j and j + 64; the upper two bits lie as in `pack_twos`."""
    for block in (0, 8):
        for part in range(4):
            pair = [(q[block + part] & 15, 0), (q[block + part + 4] & 15, 4)]
            joined(pair).bytes_to(at(8 * block + N * part))
    pack_twos([v >> 4 for v in q], at, 128)


write_q2 = writing(16, 3, 0, pack_q2)
write_q3 = writing(16, 0, 4, pack_q3)
write_q4 = writing(32, 15, 0, pack_q4)
write_q5 = writing(32, 31, 0, pack_q5)
write_q6 = writing(16, 0, 32, pack_q6)


@compiled
def put_half(target, at, value):
    """Store a float32 as a half; returns what the half decodes to."""
    h = to_half(value)
    target[at] = h & 255
    target[at + 1] = (h >> 8) & 255
    return from_half(h)


@compiled
def put_scales(found, lane, scales, target, at):
    """Q4_K, Q5_K: d, dmin and eight pairs of 6-bit numbers in 12 bytes; `scales` receives what they decode to."""
    top_scale = top_offset = F(0)
    for j in range(8):
        top_scale = max(top_scale, found[0, lane + j])
        top_offset = max(top_offset, found[1, lane + j])
    to_scale = F(63) / top_scale if top_scale > 0 else F(0)
    to_offset = F(63) / top_offset if top_offset > 0 else F(0)
    d = put_half(target, at, top_scale / F(63))
    dmin = put_half(target, at + 2, top_offset / F(63))
    at += 4
    for j in range(8):
        s = min(63, nearest(to_scale * found[0, lane + j]) & 255)
        m = min(63, nearest(to_offset * found[1, lane + j]) & 255)
        if j < 4:
            target[at + j], target[at + j + 4] = s, m
        else:
            target[at + j + 4] = (s & 15) | (m & 15) << 4
            target[at + j - 4] |= s >> 4 << 6
            target[at + j] |= m >> 4 << 6
        scales[0, j], scales[1, j] = d * F(s), dmin * F(m)


@compiled
def encode_q4(source, target, n_blocks, errors):
    """Two blocks of 8 sub-blocks at a time; an odd last one fills both halves."""
    found, scales, spare = np.empty((2, 16), F), np.zeros((2, 16), F), np.empty(512, F)
    peak = 0
    for block in range(0, n_blocks, 2):
        last = min(block + 1, n_blocks - 1)
        peak = max(peak, fit_q4(source, block * 256, last * 256, found, spare))
        for k in range(last - block + 1):
            to = (block + k) * 144
            put_scales(found, 8 * k, scales, target, to)
            write_q4(source, (block + k) * 256, scales, spare, k * 256, target, to, errors)
    return peak


@compiled
def encode_q5(source, target, n_blocks, errors):
    """As Q4_K, with 32 levels."""
    found, scales, spare = np.empty((2, 16), F), np.zeros((2, 16), F), np.empty(512, F)
    peak = 0
    for block in range(0, n_blocks, 2):
        last = min(block + 1, n_blocks - 1)
        peak = max(peak, fit_q5(source, block * 256, last * 256, found, spare))
        for k in range(last - block + 1):
            to = (block + k) * 176
            put_scales(found, 8 * k, scales, target, to)
            write_q5(source, (block + k) * 256, scales, spare, k * 256, target, to, errors)
    return peak


@compiled
def encode_q2(source, target, n_blocks, errors):
    """4-bit scales and offsets under d and dmin."""
    found, scales, spare = np.empty((2, 16), F), np.zeros((2, 16), F), np.empty(256, F)
    peak = 0
    for block in range(n_blocks):
        at, to = block * 256, block * 84
        peak = max(peak, fit_q2(source, at, at + 128, found, spare))
        top_scale = top_offset = F(0)
        for j in range(16):
            top_scale = max(top_scale, found[0, j])
            top_offset = max(top_offset, found[1, j])
        to_scale = F(15) / top_scale if top_scale > 0 else F(0)
        to_offset = F(15) / top_offset if top_offset > 0 else F(0)
        d = put_half(target, to + 80, top_scale / F(15))
        dmin = put_half(target, to + 82, top_offset / F(15))
        for j in range(16):
            pair = (nearest(to_scale * found[0, j]) | nearest(to_offset * found[1, j]) << 4) & 255
            target[to + j] = pair
            scales[0, j], scales[1, j] = d * F(pair & 15), dmin * F(pair >> 4)
        write_q2(source, at, scales, spare, 0, target, to, errors)
    return peak


@compiled
def largest(scales):
    """The scale of largest magnitude, the first of several."""
    top = F(0)
    for j in range(16):
        if abs(scales[0, j]) > abs(top):
            top = scales[0, j]
    return top


@compiled
def encode_q3(source, target, n_blocks, errors):
    """6-bit scales, from -32 to 31, under d; their low nibbles first, their upper bits in the last 4 bytes."""
    found, scales, spare = np.empty((2, 16), F), np.zeros((2, 16), F), np.empty(256, F)
    peak = 0
    for block in range(n_blocks):
        at, to = block * 256, block * 110
        peak = max(peak, fit_q3(source, at, at + 128, found, spare))
        top = largest(found)
        packed = to + 96
        target[packed : packed + 12] = 0
        inverse = F(-32) / top
        d = put_half(target, to + 108, F(1) / inverse if top != 0 else F(0))
        for j in range(16):
            s = 0
            if top != 0:
                s = ((nearest(inverse * found[0, j]) + 128) & 255) - 128  # an int8 in the reference
                s = max(-32, min(31, s)) + 32
            target[packed + j % 8] |= (s & 15) << 4 * (j // 8)
            target[packed + 8 + j % 4] |= s >> 4 << 2 * (j // 4)
            scales[0, j] = d * F(s - 32)
        write_q3(source, at, scales, spare, 0, target, to, errors)
    return peak


@compiled
def encode_q6(source, target, n_blocks, errors):
    """8-bit scales under d; a block without any magnitude is all zero bytes."""
    found, scales, spare = np.empty((2, 16), F), np.zeros((2, 16), F), np.empty(256, F)
    peak = 0
    for block in range(n_blocks):
        at, to = block * 256, block * 210
        peak = max(peak, fit_q6(source, at, at + 128, found, spare))
        top = largest(found)
        if abs(top) < TINY:  # values that no scale fits become zero bytes
            scales[0] = 0
            write_q6(source, at, scales, spare, 0, target, to, errors)
            target[to : to + 210] = 0
            continue
        inverse = F(-128) / top
        d = put_half(target, to + 208, F(1) / inverse)
        for j in range(16):
            s = ((min(127, nearest(inverse * found[0, j])) + 128) & 255) - 128
            target[to + 192 + j] = s & 255
            scales[0, j] = d * F(s)
        write_q6(source, at, scales, spare, 0, target, to, errors)
    return peak


KERNELS = {
    QType.Q2_K: encode_q2,
    QType.Q3_K: encode_q3,
    QType.Q4_K: encode_q4,
    QType.Q5_K: encode_q5,
    QType.Q6_K: encode_q6,
}


def kernel(type: QType) -> Callable[[np.ndarray, np.ndarray, int, np.ndarray], int]:
    """Encoder (values, target, n_blocks, errors) -> bits of the largest magnitude; lets other threads run."""
    encode = KERNELS[type]
    return lambda values, target, n, errors: encode(values.reshape(-1), target.reshape(-1), n, errors)
