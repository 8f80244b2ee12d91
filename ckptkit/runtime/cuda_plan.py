"""What is compiled into each kernel, and how a matrix-vector product is cut up for the card that it runs on.

A plan is a frozen value: kernels are compiled from it, cached on disk under it and launched by it. No CUDA is needed
here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from typing import ClassVar

from ..quant.types import QType
from .cuda_layout import LAYOUTS

PIECE = 2048.0  # how much larger the second of two f16 pieces is written than it counts: f16 has 11 bits


@dataclass(frozen=True)
class Matvec:
    """What is compiled in: everything but addresses, the number of rows and the norm's epsilon."""

    type: QType
    n_in: int
    lanes: int  # threads that share a task; a power of two up to 32
    segments: int  # tasks that a row is cut into
    unroll: int  # 16-byte loads under way per thread
    threads: int
    norm: str = ""  # "", "rms", "layer"
    act: str = ""  # "", "silu_gate" (rows gate | up), "gelu_tanh", "relu"
    add: bool = False  # y += instead of y =
    picked: bool = False  # the activations are row rows[column] of x
    dependent: bool = False  # launched while the kernel ahead still runs (sm_90)
    blocks_per_sm: int = 2  # as many fit on a multiprocessor: bounds the registers, lets the next kernel in
    early: bool = False  # the next kernel may start while weights are still streamed, not only after
    per_task: int = 1  # rows of a task, 1 or 2: they share the activations that were read
    MODULE: ClassVar[str] = "kernels_cuda_matvec"

    @property
    def chunks(self) -> int:
        """Batches of `unroll` loads in a task."""
        return -(-LAYOUTS[self.type].vectors(self.n_in) // (self.lanes * self.segments * self.unroll))

    @property
    def staged_bytes(self) -> int:
        """Shared memory for the activations and their sums."""
        values = LAYOUTS[self.type].values
        vectors = self.chunks * self.unroll * self.segments * self.lanes
        planes = values // 4
        stride = self.lanes + (planes > 1)
        sums = vectors * values // 16 * 4 if LAYOUTS[self.type].scale != 1 else 0
        return vectors // self.lanes * planes * stride * 16 + sums

    def shared_bytes(self, units: int, blocks: int) -> int:
        """Dynamic shared memory of a block when `units` outputs are spread over `blocks`."""
        rows = 2 if self.act == "silu_gate" else 1
        return self.staged_bytes + (-(-units // blocks)) * rows * self.segments * 4


@dataclass(frozen=True)
class Cut:
    """How a product is spread: `per` blocks of `threads` on each multiprocessor, tasks of `lanes` threads and
    `per_task` rows (see Matvec)."""

    threads: int
    per: int
    lanes: int
    segments: int
    unroll: int
    per_task: int = 1


@lru_cache(None)
def cut(type: QType, n_in: int, units: int, rows: int, processors: int) -> Cut:
    """The cut for `units` outputs of `rows` matrix rows each, by rules that fit the timings in
    benchmarks/results/gpu_tune.txt.

    Two blocks of 256 threads a multiprocessor, but one where four loads a thread are all there is, and one of 512
    where the activations fill too much shared memory to stage them twice. Within that, the fewest loads of the
    slowest group: a task costs its loads, those of lanes past the row's end included, and 1.5 more to be summed up;
    long batches of loads hide latency.
    """
    vectors = LAYOUTS[type].vectors(n_in)
    if n_in > 8192:
        threads, per = 512, 1
    else:
        threads, per = 256, 1 if units * rows * vectors <= 4.5 * processors * 256 else 2
    best: tuple[float, Cut] | None = None
    widest = 8 if LAYOUTS[type].registers < 6 else 4
    count = -(-units // min(units, processors * per)) * rows
    for per_task, lanes, segments in product(
        (1, 2) if LAYOUTS[type].values > 16 else (1,), (32, 16, 8, 4), (1, 2, 4, 8)
    ):
        for unroll in range(1, widest // per_task + 1):
            loads = -(-vectors // (lanes * segments * unroll)) * unroll
            if (lanes < 8 and vectors >= 16) or (unroll == 1 and vectors > lanes * segments):
                continue
            tasks = -(-count // per_task) * segments
            effort = (loads + 1.5) * (1 if per_task == 1 else 1.5)
            cost = -(-tasks // (threads // lanes)) * effort * (1 + 0.3 / unroll / per_task)
            cost *= 1 + 0.01 * segments + (0.05 if lanes < 16 else 0)
            if best is None or cost < best[0]:
                best = (cost, Cut(threads, per, lanes, segments, unroll, per_task))
    assert best is not None
    return best[1]


@dataclass(frozen=True)
class Heads:
    """What every kernel of attention knows of its model and its cache."""

    n_head: int
    n_kv_head: int
    head_dim: int
    width: int  # head_dim up to a multiple of 16
    pairing: int  # 0 none, 1 adjacent, 2 halves
    half_k: bool
    half_v: bool


@dataclass(frozen=True)
class Attention(Heads):
    """Attention of single tokens over a short cache (kernels_cuda_attention.py)."""

    MODULE: ClassVar[str] = "kernels_cuda_attention"

    store: bool  # also store the token's own key and value (one token of a sequence at a time)
    threads: int = 512
    dependent: bool = False

    def shared_bytes(self, span: int) -> int:
        """Dynamic shared memory of a block that attends to `span` positions."""
        return 4 * (span + self.threads // 32 * self.width)


def record_floats(width: int) -> int:
    """What a split of attention leaves of a head: values, maximum, sum, and two to fill up a vector
    (kernels_cuda_join.py)."""
    return width + 4


@dataclass(frozen=True)
class Deep(Heads):
    """Attention of single tokens over a long cache, on the tensor cores (kernels_cuda_deep.py)."""

    MODULE: ClassVar[str] = "kernels_cuda_deep"

    heads: int  # query heads of a block, up to 8; they share a kv head
    store: bool
    warps: int
    stages: int
    dependent: bool = False

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 32 * self.warps

    # rows in shared memory are padded so that what a warp reads at once lies in different banks

    @property
    def stride_k(self) -> int:
        """Bytes from key to key."""
        return self.width * 2 + 16 if self.half_k else self.width * 4 + 32

    @property
    def stride_v(self) -> int:
        """Bytes from value to value."""
        return self.width * (2 if self.half_v else 4) + 32

    @property
    def stage_bytes(self) -> int:
        """A tile of 16 keys and values."""
        return 16 * (self.stride_k + self.stride_v)

    def shared_bytes(self, splits: int) -> int:
        """Dynamic shared memory: the ring; at the end each warp's values, and what joins the splits."""
        ring = self.warps * self.stages * self.stage_bytes
        return max(ring, self.warps * 8 * self.width * 4, 2 * self.heads * splits * 4)

    @property
    def static_bytes(self) -> int:
        """Shared memory beside that: queries, weights, the warps' maxima and sums."""
        return 8 * self.width * 4 + self.warps * (16 * 8 + 16) * 4 + 16


def deepest(plan: Deep, shared_bytes: int) -> Deep:
    """The plan with as many warps, then stages, as a block's shared memory holds."""
    shapes = ((8, 3), (4, 3), (4, 2), (2, 2), (1, 2))
    fits = (replace(plan, warps=w, stages=s) for w, s in shapes)
    return next(p for p in fits if p.shared_bytes(64) + p.static_bytes <= shared_bytes)


@dataclass(frozen=True)
class StoreKV(Heads):
    """Rotates and stores keys and values of many tokens (kernels_cuda_store.py)."""

    MODULE: ClassVar[str] = "kernels_cuda_store"

    threads: int = 128


@dataclass(frozen=True)
class Embed:
    """Rows of the token embedding, decoded, plus rows of the position embedding (kernels_cuda_embed.py)."""

    MODULE: ClassVar[str] = "kernels_cuda_embed"

    type: QType
    n_embd: int
    position_type: QType | None
    threads: int = 256
    dependent: bool = False


@dataclass(frozen=True)
class Decode:
    """A matrix to f32, f16 or bf16 rows for a matrix product (kernels_cuda_decode.py)."""

    MODULE: ClassVar[str] = "kernels_cuda_decode"

    type: QType
    n_in: int
    to: QType
    pieces: int = 1  # 16-bit pieces, in matrices of their own (kernels_cuda_norm.py says how they add up)
    threads: int = 128


@dataclass(frozen=True)
class Norm:
    """norm(x) to f32, f16 or bf16 rows (kernels_cuda_norm.py); kind "" only converts."""

    MODULE: ClassVar[str] = "kernels_cuda_norm"

    kind: str
    width: int
    to: QType
    split: int = 1  # 16-bit pieces, one after another along the row
    scaled: bool = False  # times a power of two of its own for each row, which brings its largest to 2^14
    threads: int = 256


@dataclass(frozen=True)
class Pick:
    """Index of the largest logit; also moves a decoding sequence on by one token (kernels_cuda_pick.py)."""

    MODULE: ClassVar[str] = "kernels_cuda_pick"

    advance: bool
    threads: int = 256
    dependent: bool = False


@dataclass(frozen=True)
class Ban:
    """Logits of some tokens to minus infinity (kernels_cuda_ban.py)."""

    MODULE: ClassVar[str] = "kernels_cuda_ban"

    threads: int = 32
    dependent: bool = False


@dataclass(frozen=True)
class Bound:
    """A lower bound of the k-th largest logit (kernels_cuda_bound.py)."""

    MODULE: ClassVar[str] = "kernels_cuda_bound"

    blocks: int
    threads: int = 256
    dependent: bool = False

    @property
    def groups(self) -> int:
        """Maxima that the bound is found from: eight a block."""
        return self.blocks * 8


@dataclass(frozen=True)
class Sample:
    """Draws a token from those that reach the bound; moves the sequence on (kernels_cuda_sample.py)."""

    MODULE: ClassVar[str] = "kernels_cuda_sample"

    room: int  # tokens that may reach the bound
    most: int  # of which so many may be drawn from
    threads: int = 256
    dependent: bool = False


@dataclass(frozen=True)
class Nll:
    """-log p of one token of each row of logits (kernels_cuda_nll.py)."""

    MODULE: ClassVar[str] = "kernels_cuda_nll"

    threads: int = 512


@dataclass(frozen=True)
class Split:
    """Blocks as stored to planes (kernels_cuda_split.py)."""

    MODULE: ClassVar[str] = "kernels_cuda_split"

    type: QType
    threads: int = 256


@dataclass(frozen=True)
class Flash(Heads):
    """Attention of many tokens (kernels_cuda_flash.py)."""

    MODULE: ClassVar[str] = "kernels_cuda_flash"

    threads: int = 256

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory: queries, keys, values and weights of a tile."""
        return 4 * (2 * self.width * 68 + 64 * self.width + 64 * 68)


@dataclass(frozen=True)
class Finish:
    """Bias and activation after a matrix product (kernels_cuda_finish.py)."""

    MODULE: ClassVar[str] = "kernels_cuda_finish"

    act: str
    scaled: bool = False
    add: bool = False
    threads: int = 256


@dataclass(frozen=True)
class Flash16(Heads):
    """Attention of many tokens on the tensor cores (kernels_cuda_flash16.py)."""

    MODULE: ClassVar[str] = "kernels_cuda_flash16"

    threads: int = 128

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory: queries, keys and values of a tile."""
        return 3 * 64 * (self.width * 2 + 16)
