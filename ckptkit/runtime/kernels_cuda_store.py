"""Keys and values of many tokens rotated and stored in the cache, before attention reads them (layout:
kernels_cuda_attention.py)."""

# mypy: ignore-errors
from __future__ import annotations

from numba import cuda

from .cuda_plan import StoreKV
from .cuda_ptx import f32, i32, load_f32, load_i32, u64
from .kernels_cuda_attention import element, put

ARGUMENTS = (u64,) * 6 + (i32,)


def kernel(p: StoreKV):
    """The kernel function of a StoreKV plan; grid (kv heads, tokens)."""
    HEAD_DIM, WIDTH, THREADS, N_HEAD, N_KV = p.head_dim, p.width, p.threads, p.n_head, p.n_kv_head
    PAIRING, HALF_K, HALF_V = p.pairing, p.half_k, p.half_v
    ROW_K, ROW_V = WIDTH * (2 if HALF_K else 4), WIDTH * (2 if HALF_V else 4)
    QKV = (N_HEAD + 2 * N_KV) * HEAD_DIM

    def store_kv(qkv, rope, keys, values, positions, sequences, context):
        kv, token = i32(cuda.blockIdx.x), i32(cuda.blockIdx.y)
        position = load_i32(positions + u64(token) * u64(4))
        sequence = load_i32(sequences + u64(token) * u64(4))
        at = u64(sequence * i32(N_KV) + kv) * u64(context) + u64(position)
        key = qkv + u64(token) * u64(QKV * 4) + u64((i32(N_HEAD) + kv) * i32(HEAD_DIM)) * u64(4)
        for i in range(i32(cuda.threadIdx.x), WIDTH, THREADS):
            d = i32(i)
            a, b = f32(0), f32(0)
            if d < i32(HEAD_DIM):
                a = element(key, PAIRING, rope, position, d, i32(HEAD_DIM))
                b = load_f32(key + u64(i32(N_KV * HEAD_DIM) + d) * u64(4))
            put(keys + at * u64(ROW_K), d, a, HALF_K)
            put(values + at * u64(ROW_V), d, b, HALF_V)

    return store_kv
