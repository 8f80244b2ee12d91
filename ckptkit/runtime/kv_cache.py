"""Keys and values of the tokens so far, allocated once; a full cache is an error, it never slides."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np

from ..errors import UnsupportedError

KV_TYPES: dict[str, type[np.floating[Any]]] = {"f32": np.float32, "f16": np.float16}
SLACK = 16  # positions that kernels may read behind the last one; what they find there is never used


def kv_dtype(name: str) -> type[np.floating[Any]]:
    """numpy type of a cache type's name."""
    if name not in KV_TYPES:
        raise UnsupportedError("no such cache type", expected=" or ".join(KV_TYPES), got=name)
    return KV_TYPES[name]


def width_of(head_dim: int) -> int:
    """Stored values of a head: head_dim up to a multiple of 16, the rest zero."""
    return -(-head_dim // 16) * 16


def cache_bytes(
    n_layer: int, n_seq: int, n_kv_head: int, context: int, head_dim: int, type_k: str = "f32", type_v: str = "f32"
) -> int:
    """Bytes that such a cache takes."""
    each = sum(np.dtype(kv_dtype(t)).itemsize for t in (type_k, type_v))
    return n_layer * (n_seq * n_kv_head * context + SLACK) * width_of(head_dim) * each


class KVCache:
    """`k[i]`, `v[i]`: (n_seq, n_kv_head, context, width) of layer i; `length[s]` tokens of sequence s are in it."""

    def __init__(
        self,
        kernels: ModuleType,
        n_layer: int,
        n_seq: int,
        n_kv_head: int,
        context: int,
        head_dim: int,
        type_k: str = "f32",
        type_v: str = "f32",
    ) -> None:
        self.n_seq, self.context, self.type_k, self.type_v = n_seq, context, type_k, type_v
        self.length = np.zeros(n_seq, np.int64)
        shape = (n_seq, n_kv_head, context, width_of(head_dim))
        self.k = [_layer(kernels, shape, kv_dtype(type_k)) for _ in range(n_layer)]
        self.v = [_layer(kernels, shape, kv_dtype(type_v)) for _ in range(n_layer)]
        self.graphs: dict[Any, Any] = {}  # captured steps, which hold this cache's addresses

    @property
    def nbytes(self) -> int:
        """Bytes taken."""
        return sum(int(a.nbytes) for a in (*self.k, *self.v))

    def require(self, seq: int, last: int) -> None:
        """Check that position `last` of sequence `seq` has a place."""
        if not 0 <= seq < self.n_seq:
            raise UnsupportedError("no such sequence in the cache", expected=f"0 to {self.n_seq - 1}", got=seq)
        if not 0 <= last < self.context:
            raise UnsupportedError(
                "the context is full",
                expected=f"at most {self.context:,} tokens",
                got=f"{last + 1:,}",
                hint="shorten the prompt; -c raises the context where the positions are rotary",
            )

    def truncate(self, length: int, seq: int = 0) -> None:
        """Forget the tokens of a sequence from `length` on."""
        self.length[seq] = min(int(self.length[seq]), length)


def _layer(kernels: ModuleType, shape: tuple[int, ...], dtype: type[np.floating[Any]]) -> Any:
    """One layer's keys or values, zero, with SLACK positions behind the last."""
    n = int(np.prod(shape))
    flat = kernels.zeros((n + SLACK * shape[-1],), dtype)
    return flat[:n].reshape(shape)
