"""The GPU's kernel module: the functions that `model.forward` calls, as launches on one stream.

Every function takes its memory by address and reads token ids, positions and rows from the batch's buffers on the
card, so a step that was captured once serves every position. Kernels are compiled for the sizes at hand when they are
first needed, in parallel, and kept on disk (cuda_compile.py).
"""

# mypy: ignore-errors
# ruff: noqa: ARG001  functions of a family take the same arguments
from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..errors import UnsupportedError
from ..quant.types import QType
from . import cuda_driver as gpu
from .cuda_blas import WORKSPACE
from .cuda_driver import Buffer, download, empty, sync, upload, zeros  # noqa: F401  part of the module's names
from .cuda_layout import LAYOUTS
from .cuda_plan import (
    Attention,
    Ban,
    Bound,
    Deep,
    Embed,
    Flash,
    Flash16,
    Matvec,
    Nll,
    Norm,
    Pick,
    Sample,
    StoreKV,
    cut,
    deepest,
    record_floats,
)
from .cuda_products import many
from .cuda_weights import place, place_rows, plain, stage, weight_bytes  # noqa: F401

NAME = "cuda"
NATIVE = frozenset(LAYOUTS)
MAX_TOKENS = 2048  # of one pass
PAIRINGS = {"": 0, "adjacent": 1, "half": 2}
LOG2_E = 1.4426950408889634
DEEP_FROM = 1 << 20  # attention over more key elements of a layer than that goes to kernels_cuda_deep.py
SPAN = 256  # positions of one split of attention, where that gives a processor no second one
PICK_BLOCKS = 128
SAMPLE_MOST = 128  # largest top-k that is drawn from on the card
SAMPLE_ROOM = 1024  # logits that may reach the bound of the top k before the host is asked
SAMPLE_SETTINGS = 3  # float64 ahead of a row's random numbers: temperature, top-p, min-p
COLUMNS = 16  # up to so many tokens are worked on one by one, exactly as each would be alone
STEP_ROWS = COLUMNS  # of a step that is kept as a graph


@dataclass
class Workspace:
    """What the launches of one model share. `reach`: no position of the batch lies beyond it; it sizes grids only."""

    fast: bool
    max_tokens: int
    n_head: int
    reach: int
    dependent: bool
    early: bool = True
    deep_from: int = DEEP_FROM
    message: Callable[[str], None] | None = None
    plans: list[Any] | None = None  # while plans are collected instead of launched
    kept: dict[str, Buffer] = field(default_factory=dict)
    known: set[Any] = field(default_factory=set)

    def close(self) -> None:
        """Free what is shared."""
        self.kept.clear()
        with suppress(UnsupportedError):  # after a fault nothing can be freed, and that was said
            gpu.sync()
            gpu.release_landing()


def workspace(*, threads, fast, max_tokens, widest, head_dim, n_head, n_kv_head, context, message=None):
    """Scratch for batches of up to `max_tokens`; `threads` is the CPU's."""
    return Workspace(fast, max_tokens, n_head, context, gpu.card().capability >= (9, 0), message=message)


def describe(work, report):
    """What runs, for the load report."""
    card = gpu.card()
    stage.close()
    report.device_name = card.name
    report.threading_layer = f"{card.name}, compute capability {card.capability[0]}.{card.capability[1]}"


def load_bytes(ck):
    """Bytes that a model takes on the card before any cache: its weights, and scratch for prompts."""
    c, rows = ck.config, min(MAX_TOKENS, ck.config.context_length)
    q, kv = c.n_head * c.head_dim, c.n_kv_head * c.head_dim
    batch = 4 * rows * (c.n_embd + 2 * q + 2 * kv + c.n_ff)
    products = rows * (4 * max(2 * c.n_ff, q + 2 * kv) + 6 * max(c.n_embd, c.n_ff))  # results, rounded activations
    return weight_bytes(ck) + batch + products + WORKSPACE


def check_fits(nbytes, what):
    """Refuse to take more memory than there is."""
    free, total = gpu.free_bytes()
    if nbytes > free:
        raise UnsupportedError(
            "the model does not fit in the GPU's memory", expected=f"at most {free:,} of {total:,} bytes",
            got=f"{nbytes:,} bytes of {what}",
            hint="use a smaller -c, -ctk f16 -ctv f16, or a smaller weight type",
        )  # fmt: skip


def bucket(reach, context):
    """The context size that a graph is made for: the next power of two from SPAN on."""
    size = SPAN
    while size < reach:
        size *= 2
    return min(size, max(context, SPAN))


def write(buf, values):
    """Small int32 arrays into a batch's buffers."""
    gpu.copy_in(buf, np.asarray(values, np.int32))


# graphs


def launch(work, plan, grid, args, shared_bytes=0):
    """Launch a kernel, or note that it will be needed."""
    if work.plans is not None:
        work.plans.append(plan)
    else:
        gpu.launch(plan, grid, args, shared_bytes)


def prepare(fn, work):
    """Compile and load every kernel that `fn` launches, in parallel, without launching one."""
    work.plans = []
    try:
        fn()
        plans = work.plans
    finally:
        work.plans = None
    gpu.load(plans, None if work.message is None else lambda n, jobs: work.message(
        f"compiling {n} CUDA kernels in {jobs} processes (kept for the next start)"
    ))  # fmt: skip


def capture(fn, work):
    """The launches of `fn` as a graph; nothing is run."""
    prepare(fn, work)
    return gpu.capture(fn)


def replay(graph, work):
    """Run a captured step; returns at once."""
    gpu.replay(graph)


def run(fn, work, key=None):
    """Launch `fn` now; what has run under the same key needs no new kernels."""
    if key is None or key not in work.known:
        prepare(fn, work)
        work.known.add(key)
    fn()


# steps


def embed(x, token_embd, position_embd, batch):
    """x (n, n_embd) = embedding rows of batch.tokens, plus the rows of batch.pos where positions are learned."""
    part = token_embd.parts[0]
    plan = Embed(part.type, part.n_in, None if position_embd is None else QType.F32, dependent=batch.work.dependent)
    grid = (len(x), -(-part.n_in // plan.threads), 1)
    launch(batch.work, plan, grid, [x, *part.planes, position_embd, batch.tokens, batch.pos])


def norm(out, x, norm, batch):
    """out (n, n_embd) = norm(x); out may be x."""
    plan = Norm(norm.kind, x.shape[1], QType.F32)
    launch(batch.work, plan, (len(out), 1, 1), [out, x, norm.gain, norm.bias, None, None, float(norm.eps)])


def norm_linear(out, x, norm, weight, batch, rows=None):
    """out (n, n_rows) = W norm(x) + b; with `rows` int32 (n,) only those rows of x."""
    _product(out, x, norm, weight, batch, rows=rows)


def linear_add(x, h, weight, batch):
    """x (n, n_embd) += W h + b."""
    _product(x, h, None, weight, batch, add=True)


def norm_ffn(h, x, norm, weight, act, batch):
    """h (n, n_ff) = act(W norm(x) + b); silu_gate takes stacked gate|up rows."""
    _product(h, x, norm, weight, batch, act=act)


def _product(out, x, norm, weight, batch, act="", add=False, rows=None):
    work = batch.work
    if len(out) > COLUMNS:
        many(launch, work, out, x, norm, weight, act, add, rows)
        return
    processors = gpu.card().processors
    first = 0
    for part in weight.parts:
        units = part.n_rows // 2 if act == "silu_gate" else part.n_rows
        how = cut(part.type, part.n_in, units, part.n_rows // units, processors)
        blocks = min(units, processors * how.per)
        plan = Matvec(
            part.type, part.n_in, how.lanes, how.segments, how.unroll, how.threads, norm.kind if norm else "", act, add,
            rows is not None, work.dependent, 512 // how.threads, work.early, how.per_task,
        )  # fmt: skip
        bias = None if weight.bias is None else weight.bias[first : first + part.n_rows]
        args = [
            *part.planes, bias, x, norm.gain if norm else None, norm.bias if norm else None,
            Buffer(out.address + first * 4, (1,), out.dtype), rows, units, out.shape[1], float(norm.eps if norm else 0),
        ]  # fmt: skip
        launch(work, plan, (len(out), blocks, 1), args, plan.shared_bytes(units, blocks))
        first += units


def attention(out, qkv, rope_table, pairing, k_cache_i, v_cache_i, batch):
    """out (n, q) = causal grouped attention of qkv (n, q + 2 kv), keys and values put into the layer's cache first.

    k_cache_i, v_cache_i (n_seq, n_kv_head, context, width) f32 or f16; rope_table (context, 2, head_dim / 2) or None.
    """
    work, n = batch.work, len(out)
    _, n_kv, context, width = k_cache_i.shape
    head_dim = (qkv.shape[1] - out.shape[1]) // (2 * n_kv)
    n_head = out.shape[1] // head_dim
    half_k, half_v = (c.dtype == np.float16 for c in (k_cache_i, v_cache_i))
    kind = (n_head, n_kv, head_dim, width, PAIRINGS[pairing], half_k, half_v)
    if n > 1:
        grid = (n_kv, n, 1)
        launch(work, StoreKV(*kind), grid, [qkv, rope_table, k_cache_i, v_cache_i, batch.pos, batch.seq, context])
    scale = float(head_dim**-0.5 * LOG2_E)
    if n > COLUMNS and width <= 256:
        tensor_cores = work.fast and width <= 128 and gpu.card().capability >= (8, 0)
        flash = Flash16(*kind) if tensor_cores else Flash(*kind)
        args = [out, qkv, rope_table, k_cache_i, v_cache_i, batch.pos, batch.seq, n, context, scale]
        launch(work, flash, (n_head, -(-n // 64), 1), args, flash.shared_bytes)
        return
    reach = min(work.reach, max(context, 1))
    if n_kv * width * reach > work.deep_from and width <= 128 and gpu.card().capability >= (8, 0):
        heads = max(h for h in range(1, 9) if n_head // n_kv % h == 0)
        plan = deepest(Deep(*kind, heads, n == 1, 1, 1, work.dependent), gpu.card().shared_bytes)
        blocks = n_head // heads
        splits = max(min(gpu.card().processors // blocks, 64), 1)
        partial, counters = _attention_scratch(work, n, n_head, splits, width)
        args = [
            out, qkv, rope_table, k_cache_i, v_cache_i, batch.pos, batch.seq, partial, counters, context, scale,
        ]  # fmt: skip
        launch(work, plan, (blocks, splits, n), args, plan.shared_bytes(splits))
        return
    plan = Attention(*kind, n == 1, dependent=work.dependent)
    splits = max(gpu.card().processors // n_head, 1)
    longest = (gpu.card().shared_bytes - plan.shared_bytes(0) - 8192) // 128 * 32  # that shared memory has room for
    span = min(max(SPAN, -(-reach // splits // 32) * 32), longest)
    splits = -(-reach // span)
    partial, counters = _attention_scratch(work, n, n_head, splits, width)
    args = [
        out, qkv, rope_table, k_cache_i, v_cache_i, batch.pos, batch.seq, partial, counters, context, span, scale,
    ]  # fmt: skip
    launch(work, plan, (n_head, splits, n), args, plan.shared_bytes(span))


def _attention_scratch(work, n, n_head, splits, width):
    """Partial results and counters for n tokens; kept, and grown where a batch needs more."""
    need = n * n_head * splits * record_floats(width)
    old = work.kept.get("partial")
    if old is None or len(old) < need:
        work.kept[f"partial{len(work.kept)}"] = work.kept.get("partial")  # graphs may hold the old address
        work.kept["partial"] = empty((need,), np.float32)
    old = work.kept.get("counters")
    if old is None or len(old) < n * n_head:
        work.kept[f"counters{len(work.kept)}"] = work.kept.get("counters")
        work.kept["counters"] = zeros((n * n_head,), np.uint32)
    return work.kept["partial"], work.kept["counters"]


def argmax(out, logits, batch):
    """out int32 (n,) = index of the largest logit of each row."""
    work, n = batch.work, len(logits)
    launch(
        work,
        Pick(False, dependent=work.dependent),
        (n, PICK_BLOCKS, 1),
        [out, logits, *_pick_scratch(work, n), None, None, None, logits.shape[1], 0],
    )


def ban(batch, ids):
    """The logits of `ids` int32 (k,) become minus infinity in every row."""
    n, n_vocab = batch.logits.shape
    launch(batch.work, Ban(dependent=batch.work.dependent), (n, 1, 1), [batch.logits, ids, len(ids), n_vocab])


def advance(batch, log):
    """The largest logit's token becomes the row's token, one position on, and is written to `log` (n, context + 1) at
    that position."""
    work, (n, n_vocab) = batch.work, batch.logits.shape
    args = [batch.tokens, batch.logits, *_pick_scratch(work, n), batch.tokens, batch.pos, log, n_vocab, log.shape[-1]]
    launch(work, Pick(True, dependent=work.dependent), (n, PICK_BLOCKS, 1), args)


def sample(batch, log, numbers, top_k):
    """As `advance` with a token drawn from the `top_k` largest logits, or -1 in the log where the host must pick.

    `numbers` float64 (n, SAMPLE_SETTINGS + context + 1): a row's temperature, top-p and min-p, then the random number
    for each position.
    """
    work, (n, n_vocab) = batch.work, batch.logits.shape
    find = Bound(PICK_BLOCKS, dependent=work.dependent)
    maxima, bound, found, found_ids, counters = _sample_scratch(work, n, find.groups)
    grid = (n, PICK_BLOCKS, 1)
    launch(work, find, grid, [bound, batch.logits, maxima, counters[2 * n :], n_vocab, top_k])
    draw = Sample(SAMPLE_ROOM, SAMPLE_MOST, dependent=work.dependent)
    args = [
        batch.logits, bound, found, found_ids, counters, numbers, batch.tokens, batch.pos, log, n_vocab, top_k,
        log.shape[-1],
    ]  # fmt: skip
    launch(work, draw, grid, args)


def nll(out, logits, targets, batch):
    """out float64 (n,) = -log softmax(logits)[row, targets[row]]; not finite where the logits are not."""
    args = [out, logits, targets, logits.shape[1]]
    run(lambda: launch(batch.work, Nll(), (len(logits), 1, 1), args), batch.work, "nll")


def _pick_scratch(work, n):
    """Best logits, where they are, and counters, of n rows; graphs hold their addresses."""
    if ("pick", n) not in work.kept:
        sizes = ((n * PICK_BLOCKS, np.float32), (n * PICK_BLOCKS, np.int32), (n, np.uint32))
        work.kept["pick", n] = tuple(zeros((size,), type) for size, type in sizes)
    return work.kept["pick", n]


def _sample_scratch(work, n, groups):
    """Maxima, bounds, logits found and their ids, and three counters, of n rows; graphs hold their addresses."""
    if ("sample", n) not in work.kept:
        room = n * SAMPLE_ROOM
        sizes = ((n * groups, np.float32), (n, np.float32), (room, np.float32), (room, np.int32), (3 * n, np.uint32))
        work.kept["sample", n] = tuple(zeros((size,), type) for size, type in sizes)
    return work.kept["sample", n]


def ready(model, cache, samplers, start):
    """Prepare the steps that will follow a prompt of `start` tokens (cuda_decode.py)."""
    from . import cuda_decode

    cuda_decode.ready(model, cache, samplers, start)


def own_steps(model, cache, sequences, tokens, samplers, histories):
    """Steps that pick their tokens on the card, where it can pick as the samplers do; else None (cuda_decode.py)."""
    from . import cuda_decode

    return cuda_decode.own_steps(model, cache, sequences, tokens, samplers, histories)


def memory_bandwidth(work):
    """Bytes read and written per second by a copy on the card: of 1 GiB, or of what fits; the best of five."""
    nbytes = min(1 << 30, gpu.free_bytes()[0] // 4)
    here, there = empty((nbytes,), np.uint8), empty((nbytes,), np.uint8)
    gpu.copy(there, here)
    return 2 * nbytes / min(gpu.seconds(lambda: gpu.copy(there, here), 1) for _ in range(5))
