"""Models of real shapes with random weights, for timings: every tensor is cut from one pool of random rows of its
type."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ckptkit.arch import ARCHS
from ckptkit.checkpoint import Checkpoint, Config, Source
from ckptkit.quant.types import BLOCKS, QType
from ckptkit.tensor import Tensor

Bytes = npt.NDArray[np.uint8]

CONFIGS = {
    "GPT-2 124M": Config(
        "gpt2", context_length=1024, vocab_size=50257, n_layer=12, n_head=12, n_kv_head=12, n_embd=768, n_ff=3072,
        head_dim=64, tied_output=True,
    ),
    "Qwen2-0.5B": Config(
        "qwen2", context_length=32768, vocab_size=151936, n_layer=24, n_head=14, n_kv_head=2, n_embd=896, n_ff=4864,
        head_dim=64, norm_eps=1e-6, rope_theta=1e6, rope_pairing="half", tied_output=True,
    ),
    "Qwen2-7B": Config(
        "qwen2", context_length=32768, vocab_size=152064, n_layer=28, n_head=28, n_kv_head=4, n_embd=3584, n_ff=18944,
        head_dim=128, norm_eps=1e-6, rope_theta=1e6, rope_pairing="half",
    ),
}  # fmt: skip


def random_blocks(type: QType, n: int, rng: np.random.Generator, spread: float) -> Bytes:
    """uint8 (n, block bytes): blocks whose values have about the standard deviation `spread`."""
    block = BLOCKS[type]
    if block.elements == 1:
        x = rng.standard_normal(n, np.float32) * np.float32(spread)
        if type == QType.BF16:
            return (x.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8).reshape(n, 2)
        return x.astype(np.float16 if type == QType.F16 else np.float32).view(np.uint8).reshape(n, block.nbytes)
    out = rng.integers(0, 256, (n, block.nbytes), np.uint8)

    def scale(at: int, size: float) -> None:
        out[:, at : at + 2] = (rng.uniform(0.5, 1.5, n) * size).astype(np.float16).view(np.uint8).reshape(n, 2)

    if type == QType.Q8_0:
        scale(0, spread / 74)
    elif type in (QType.Q4_0, QType.Q4_1, QType.Q5_0, QType.Q5_1):
        integers = 4.6 if type in (QType.Q4_0, QType.Q4_1) else 9.2
        scale(0, spread / integers)
        if type in (QType.Q4_1, QType.Q5_1):
            scale(2, -1.63 * spread)
    elif type in (QType.Q4_K, QType.Q5_K):
        scale(0, spread / (4.6 if type == QType.Q4_K else 9.2) / 36)
        scale(2, 1.63 * spread / 36)
    elif type == QType.Q6_K:
        scale(208, spread / 18 / 74)
    return out


def random_model(config: Config, type: QType, seed: int = 0, pool_values: int = 1 << 24) -> Checkpoint:
    """A checkpoint of this shape: matrices of `type`, vectors float32; rows come from the pool at scattered places."""
    rng = np.random.default_rng(seed)
    pools: dict[QType, Bytes] = {}
    for t, spread in ((type, 0.02), (QType.F32, 0.02)):
        block = BLOCKS[t]
        pools.setdefault(t, random_blocks(t, pool_values // block.elements, rng, spread).reshape(-1))

    def tensor(name: str, shape: tuple[int, ...]) -> Tensor:
        kind = type if len(shape) == 2 and name != "position_embd.weight" else QType.F32
        pool, block = pools[kind], BLOCKS[kind]
        shell = Tensor(shape, kind, lambda _lo, _hi: np.empty((0, 0), np.uint8))
        width = shell.row_bytes
        start = int(rng.integers(0, 1 << 20))

        def rows(lo: int, hi: int) -> Bytes:
            n = (hi - lo) * width
            room = (len(pool) - n) // block.nbytes
            at = (start + lo * 7919) % room * block.nbytes if room > 0 else 0
            if n > len(pool):
                return np.resize(pool, n).reshape(hi - lo, width)
            return pool[at : at + n].reshape(hi - lo, width)

        return Tensor(shape, kind, rows if not name.endswith("norm.weight") else ones())

    tied = ("output.weight",) if config.tied_output else ()
    names = ARCHS[config.arch].names(config)
    tensors = {n: tensor(n, shape) for n, shape, _ in names if n not in tied and n not in ("rope_freqs.weight",)}
    return Checkpoint(config, tensors, None, Source((Path(f"random {type.name}"),), "random"))


def ones() -> Callable[[int, int], Bytes]:
    """Rows of a vector of ones."""
    return lambda lo, hi: np.ones(hi - lo, np.float32).view(np.uint8).reshape(hi - lo, 4)


def weight_bytes(ck: Checkpoint) -> int:
    """Bytes of weights that one step reads: all but the rows of embeddings that are only looked up."""
    lookup = {"position_embd.weight"} | ({"token_embd.weight"} if "output.weight" in ck.tensors else set())
    return sum(t.nbytes for n, t in ck.tensors.items() if n not in lookup)
