"""Blocks as they lie in a file to the planes that the card reads (layouts: cuda_layout.py; blocks: ggml-common.h of
llama.cpp)."""

# mypy: ignore-errors
# ruff: noqa: ARG001  functions of a family take the same arguments
from __future__ import annotations

from numba import cuda

from ..quant.types import BLOCKS, QType
from .cuda_layout import LAYOUTS
from .cuda_plan import Split
from .cuda_ptx import i32, load_u8, load_u16, store_u16, store_u32, u16, u32, u64

device = cuda.jit(device=True)
ARGUMENTS = (u64,) * 5 + (i32,)


@device
def load_two(p):
    """A 32-bit word at an even address."""
    return u32(load_u16(p)) | (u32(load_u16(p + u64(2))) << u32(16))


@device
def nibble_word(p, shift):
    """Nibbles of eight bytes at p, those `shift` bits up, as a word of plane 0."""
    word = u32(0)
    for e in range(8):
        word |= ((load_u8(p + u64(e)) >> shift) & u32(15)) << u32(4 * e)
    return word


@device
def high_word(bits):
    """One high bit of each of 32 weights, weight k's at bit k, as a word of their plane."""
    word = u32(0)
    for k in range(32):
        word |= ((bits >> u32(k)) & u32(1)) << u32((4 * (k & 7) + (k >> 3) + 4) & 31)
    return word


def splitter(type: QType):
    """split(block, word, p, p0, p1, p2, p3): one 32-bit word of plane 0, and what hangs on it, of the block at p."""
    HIGH, SCALES = LAYOUTS[type].high, LAYOUTS[type].planes[1].nbytes

    @device
    def q8_0(block, word, p, p0, p1, p2, p3):
        at = p + u64(2) + u64(word) * u64(4)
        store_u32(p0 + (block * u64(8) + u64(word)) * u64(4), load_two(at))
        if word == 0:
            store_u16(p1 + block * u64(2), load_u16(p))

    @device
    def of_32(block, word, p, p0, p1, p2, p3):
        """Scales, high bits, nibbles: Q4_0, Q4_1, Q5_0, Q5_1."""
        at = p + u64(SCALES + 4 * HIGH) + u64(word & i32(1)) * u64(8)
        store_u32(p0 + (block * u64(4) + u64(word)) * u64(4), nibble_word(at, u32((word >> i32(1)) * i32(4))))
        if word == 0:
            if SCALES == 4:
                store_u32(p1 + block * u64(4), load_two(p))
            else:
                store_u16(p1 + block * u64(2), load_u16(p))
            if HIGH:
                store_u32(p2 + block * u64(4), high_word(load_two(p + u64(SCALES))))

    @device
    def of_256(block, word, p, p0, p1, p2, p3):
        """Q4_K and Q5_K."""
        s, q = word >> i32(2), word & i32(3)  # sub-block of 32, word in it
        at = p + u64(16 + 32 * HIGH) + u64((s >> i32(1)) * i32(32) + q * i32(8))
        store_u32(p0 + (block * u64(32) + u64(word)) * u64(4), nibble_word(at, u32((s & i32(1)) * i32(4))))
        if q == 0:
            packed = p + u64(4) + u64(s)
            if s < 4:
                scale, least = load_u8(packed) & u32(63), load_u8(packed + u64(4)) & u32(63)
            else:
                both, low, high = load_u8(packed + u64(4)), load_u8(packed - u64(4)), load_u8(packed)
                scale = (both & u32(15)) | ((low >> u32(6)) << u32(4))
                least = (both >> u32(4)) | ((high >> u32(6)) << u32(4))
            store_u16(p1 + (block * u64(8) + u64(s)) * u64(2), u16(scale | (least << u32(8))))
            if HIGH:  # bit s of byte k is the high bit of the sub-block's weight k
                bits = u32(0)
                for k in range(32):
                    bits |= ((load_u8(p + u64(16 + k)) >> u32(s)) & u32(1)) << u32(k)
                store_u32(p3 + (block * u64(8) + u64(s)) * u64(4), high_word(bits))
        if word == 0:
            store_u32(p2 + block * u64(4), load_two(p))

    @device
    def q6_k(block, word, p, p0, p1, p2, p3):
        s, q = word >> i32(2), word & i32(3)
        half, part = s >> i32(2), s & i32(3)
        low = p + u64(half * i32(64) + (part & i32(1)) * i32(32) + q * i32(8))
        store_u32(p0 + (block * u64(32) + u64(word)) * u64(4), nibble_word(low, u32((part >> i32(1)) * i32(4))))
        if q < 2:
            high = p + u64(128) + u64(half * i32(32) + q * i32(16))
            w = u32(0)
            for e in range(8):
                for second in range(2):
                    bits = (load_u8(high + u64(8 * second + e)) >> u32(part * i32(2))) & u32(3)
                    w |= bits << u32((4 * e + 2 * second + 4) % 32)
            store_u32(p3 + (block * u64(16) + u64(s * i32(2) + q)) * u64(4), w)
        if word < 8:
            store_u16(p1 + (block * u64(8) + u64(word)) * u64(2), load_u16(p + u64(192) + u64(word) * u64(2)))
        if word == 0:
            store_u16(p2 + block * u64(2), load_u16(p + u64(208)))

    if type in (QType.Q8_0, QType.Q6_K):
        return q8_0 if type == QType.Q8_0 else q6_k
    return of_32 if BLOCKS[type].elements == 32 else of_256


def kernel(p: Split):
    """The kernel function of a Split plan: `n` blocks at `raw`; plane addresses are those of the first block's
    place."""
    THREADS, BYTES = p.threads, BLOCKS[p.type].nbytes
    WORDS = BLOCKS[p.type].elements // LAYOUTS[p.type].values * 4
    split = splitter(p.type)

    def planes(raw, p0, p1, p2, p3, n):
        i = u64(cuda.blockIdx.x) * u64(THREADS) + u64(cuda.threadIdx.x)
        block = i // u64(WORDS)
        if block < u64(n):
            split(block, i32(i % u64(WORDS)), raw + block * u64(BYTES), p0, p1, p2, p3)

    return planes
