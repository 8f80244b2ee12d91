# mypy: ignore-errors
# ruff: noqa: D102, D103, ARG001, ARG005, RUF100
"""The CPU's kernel module: the functions that `model.forward` calls, on numpy arrays and weights where they lie in
the file.

Each function becomes one or two steps of a program: (address of a compiled kernel, address of its arguments). Inside
`capture` the steps are kept and run together, the team of threads meeting at a barrier after each; outside, a step
runs at once. Token ids, positions and rows are read from the batch's buffers when a step runs, so a captured program
is replayed for every token.

Kernels are compiled for the types at hand when they are first needed, and kept on disk.
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from numba import types

from ..errors import UnsupportedError
from ..quant.types import QType
from ..tensor import from_array
from . import kernels_cpu_args as lin
from . import kernels_cpu_attention as att
from . import kernels_cpu_cache as kept
from . import kernels_cpu_matmat as many
from . import kernels_cpu_matvec as one
from .kernels_cpu_embed import embed as embed_kernel
from .kernels_cpu_lanes import ROWS
from .kernels_cpu_lanes_dot import has_byte_dot
from .kernels_cpu_norm import norm_rows
from .kernels_cpu_place import NATIVE, place, place_rows, plain  # noqa: F401  of this module's interface
from .kernels_cpu_team import Team
from .log_softmax import nll_rows
from .simd import has_bf16_dot
from .weights import decoded_bytes

NAME = "cpu"
MAX_TOKENS = 512  # of one pass
BF16_TYPES = NATIVE - {QType.F32, QType.F16}  # whose values lose nothing that matters as bf16
ACTS = {"silu_gate": lin.SILU_GATE, "gelu_tanh": lin.GELU, "relu": lin.RELU}
PAIRINGS = {"": 0, "adjacent": 1, "half": 2}
NORMS = {"rms": lin.RMS, "layer": lin.LAYER}


@dataclass
class Workspace:
    """What the steps of one model share: threads, scratch, panels, the program being captured."""

    team: Team
    bf16: bool  # prompts round activations to bf16
    bytes: bool  # single tokens round activations to two bytes
    scratch: np.ndarray  # uint8 (threads, bytes)
    panels: np.ndarray
    partial: np.ndarray
    steps: list[tuple[int, np.ndarray, object]] | None = None
    message: Callable[[str], None] | None = None

    def close(self) -> None:
        self.team.close()


@dataclass
class Program:
    """Steps that can be run again; `keep` holds what their addresses point to."""

    table: np.ndarray
    keep: list[object] = field(default_factory=list)


# --- memory ---


def empty(shape, dtype=np.float32):
    return np.empty(shape, dtype)


def zeros(shape, dtype=np.float32):
    """Zeros that take memory as they are first written, page by page: numpy would ask for huge pages, all of them at
    once."""
    nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return np.frombuffer(mmap.mmap(-1, max(nbytes, 1)), dtype, int(np.prod(shape))).reshape(shape)


def upload(array):
    return np.ascontiguousarray(array)


def download(buf):
    return buf


def sync():
    return None


def write(buf, values):
    """Fill a small int32 buffer from the host."""
    buf[:] = values


def workspace(*, threads, fast, max_tokens, widest, head_dim, n_head, n_kv_head, context, message=None):
    """Threads and scratch for batches of up to `max_tokens`; `widest` is the longest row of any weight."""
    if message is not None and kept.note():
        message(kept.note())
    padded, width = -(-widest // 32) * 32, -(-head_dim // 16) * 16
    per_thread = max(
        one.scratch_bytes(padded), many.scratch_bytes(padded), att.scratch_bytes(width, n_head // n_kv_head)
    )
    tokens = -(-max_tokens // many.PANEL) * many.PANEL
    return Workspace(
        Team(threads),
        fast and has_bf16_dot(),
        fast and has_byte_dot(),
        np.zeros((threads, -(-per_thread // 4096) * 4096), np.uint8),
        np.zeros((tokens, padded), np.float32),
        np.zeros((n_head, -(-context // att.CHUNK), width + 16), np.float32),
        message=message,
    )


def describe(work, report):
    """Complete the load report with what this device decided."""
    report.threading_layer = "ckptkit team" if work.team.n > 1 else "none"
    report.resident_bytes += sum(a.nbytes for a in (work.scratch, work.panels, work.partial))
    if report.precision == "fast":
        for rounded, what in (
            (work.bf16, "prompts: activations and block weights rounded to bf16"),
            (work.bytes, "single tokens: activations rounded to 15 bits where weights are blocks"),
            (not work.bf16, "this CPU has no bf16 dot product: prompts are exact"),
            (not work.bytes, "this CPU has no dot product of bytes: single tokens are exact"),
        ):
            report.notes += [what] if rounded else []


# --- programs ---

_addresses: dict[tuple, int] = {}


def _address(work, kernel, ta=0, tb=0, tc=0):
    """Address of a kernel for three literals, compiled or taken from disk when first asked for."""
    key = (kernel.__name__, ta, tb, tc)
    if key not in _addresses:
        sig = (*(types.literal(int(v)) for v in (ta, tb, tc)), *(types.int64,) * 3)
        if work.message is not None and not kept.on_disk(kernel):
            work.message(f"compiling {kernel.__name__}" + ("" if kept.note() else " (kept for the next start)"))
        done = kept.compiled(kernel, sig)
        _addresses[key] = done.library.get_pointer_to_function(done.fndesc.llvm_func_name)
    return _addresses[key]


def _slots(n, values):
    """An int64 argument table from {byte offset: int, float, array or None}."""
    table = np.zeros(n, np.int64)
    for at, value in values.items():
        if isinstance(value, np.ndarray):
            value = value.ctypes.data
        elif isinstance(value, float):
            value = int(np.float32(value).view(np.uint32))
        table[at // 8] = value or 0
    return table


def _step(work, address, table, *keep):
    if work.steps is None:
        work.team.run(np.array([(address, table.ctypes.data)], np.int64))
    else:
        work.steps.append((address, table, keep))


def capture(fn, work):
    """The steps that `fn()` takes, as a program; nothing is run."""
    work.steps = []
    try:
        fn()
        steps = work.steps
    finally:
        work.steps = None
    return Program(np.array([(a, t.ctypes.data) for a, t, _ in steps], np.int64).reshape(-1, 2), [s[1:] for s in steps])


def replay(graph, work):
    """Run a captured program."""
    work.team.run(graph.table)


def run(fn, work, key=None):
    """The steps that `fn()` takes, now; `key` names what they do."""
    replay(capture(fn, work), work)


def bucket(reach, context):
    """Programs serve every position: there is one size."""
    return 0


STEP_ROWS = 1  # steps of more rows are programs that are not kept


def ready(model, cache, samplers, start):
    """Nothing to prepare."""


def own_steps(model, cache, sequences, tokens, samplers, histories):
    """None: picking a token on the device would save nothing."""


# --- steps ---


def _norm_slots(norm):
    if norm is None:
        return {lin.NORM: lin.NONE}
    return {lin.NORM: NORMS[norm.kind], lin.GAIN: norm.gain, lin.NORM_BIAS: norm.bias, lin.EPS: float(norm.eps)}


def _product(out, x, norm, weight, then, batch, rows=None):
    """out = then(W norm(x) + b): one step for a token, two for many."""
    work, n = batch.work, len(out)
    padded = -(-weight.k // 32) * 32
    table = _slots(
        lin.N_SLOTS,
        {
            lin.OUT: out, lin.OUT_STRIDE: out.strides[0], lin.X: x, lin.X_STRIDE: x.strides[0], lin.N_TOKENS: n,
            lin.K: weight.k, lin.PADDED_K: padded, lin.ROW_INDEX: rows, **_norm_slots(norm), lin.PARTS: weight.table,
            lin.N_PARTS: len(weight.table), lin.N_ROWS: out.shape[1], lin.BIAS: weight.bias, lin.PANELS: work.panels,
            lin.SCRATCH: work.scratch, lin.SCRATCH_STRIDE: work.scratch.shape[1], lin.THEN: then,
        },
    )  # fmt: skip
    ta, tb = weight.types
    keep = (out, x, norm, weight, rows)
    if n == 1:
        rounded = work.bytes and not {QType(ta), QType(tb)}.isdisjoint(ROWS)
        _step(work, _address(work, one.matvec, ta, tb, int(rounded)), table, keep)
        return
    rounded = work.bf16 and weight.k % 32 == 0 and {QType(ta), QType(tb)} <= BF16_TYPES
    _step(work, _address(work, many.pack, 0, 0, int(rounded)), table, keep)
    _step(work, _address(work, many.matmat_bf16 if rounded else many.matmat, ta, tb), table, keep)


def embed(x, token_embd, position_embd, batch):
    """x (n, n_embd) = embedding rows of batch.tokens, plus the rows of batch.pos where positions are learned."""
    table = _slots(
        lin.N_SLOTS,
        {
            lin.OUT: x, lin.OUT_STRIDE: x.strides[0], lin.N_TOKENS: len(x), lin.K: token_embd.k, lin.PARTS: token_embd.table,  # noqa: E501
            lin.TOKENS: batch.tokens, lin.POSITIONS: batch.pos, lin.POSITION_ROWS: position_embd,
        },
    )  # fmt: skip
    _step(batch.work, _address(batch.work, embed_kernel, *token_embd.types), table, x, token_embd, position_embd, batch)


def norm(out, x, norm, batch):
    """out (n, n_embd) = norm(x); out may be x."""
    table = _slots(
        lin.N_SLOTS,
        {
            lin.OUT: out, lin.OUT_STRIDE: out.strides[0], lin.X: x, lin.X_STRIDE: x.strides[0], lin.N_TOKENS: len(out),
            lin.K: x.shape[1], **_norm_slots(norm),
        },
    )  # fmt: skip
    _step(batch.work, _address(batch.work, norm_rows), table, out, x, norm)


def norm_linear(out, x, norm, weight, batch, rows=None):
    """out (n, n_rows) = W norm(x) + b; with `rows` int32 (n,) only those rows of x."""
    _product(out, x, norm, weight, lin.SET, batch, rows)


def linear_add(x, h, weight, batch):
    """x (n, n_embd) += W h + b."""
    _product(x, h, None, weight, lin.ADD, batch)


def norm_ffn(h, x, norm, weight, act, batch):
    """h (n, n_ff) = act(W norm(x) + b); silu_gate takes stacked gate|up rows."""
    _product(h, x, norm, weight, ACTS[act], batch)


def attention(out, qkv, rope_table, pairing, k_cache_i, v_cache_i, batch):
    """out (n, q) = causal grouped attention of qkv (n, q + 2 kv), keys and values put into the layer's cache first.

    k_cache_i, v_cache_i (n_seq, n_kv_head, context, width) f32 or f16; rope_table (context, 2, head_dim / 2) or None.
    """
    work, n = batch.work, len(out)
    _, n_kv, context, width = k_cache_i.shape
    head_dim = (qkv.shape[1] - out.shape[1]) // (2 * n_kv)
    table = _slots(
        att.N_SLOTS,
        {
            att.OUT: out, att.QKV: qkv, att.ROPE: rope_table, att.KEYS: k_cache_i, att.VALUES: v_cache_i, att.N_TOKENS: n,  # noqa: E501
            att.POSITIONS: batch.pos, att.SEQUENCES: batch.seq, att.N_HEAD: out.shape[1] // head_dim, att.N_KV_HEAD: n_kv,  # noqa: E501
            att.HEAD_DIM: head_dim, att.WIDTH: width, att.CONTEXT: context, att.SCALE: float(head_dim**-0.5),
            att.PARTIAL: work.partial, att.N_CHUNKS: work.partial.shape[1], att.SCRATCH: work.scratch,
            att.SCRATCH_STRIDE: work.scratch.shape[1],
        },
    )  # fmt: skip
    kinds = (
        *(int(QType.F16 if c.dtype == np.float16 else QType.F32) for c in (k_cache_i, v_cache_i)),
        PAIRINGS[pairing],
    )
    keep = (out, qkv, rope_table, k_cache_i, v_cache_i, batch)
    steps = (att.decode_attention, att.combine) if n == 1 else (att.store_kv, att.prompt_attention)
    for kernel in steps:
        _step(work, _address(work, kernel, *kinds), table, keep)


def argmax(out, logits, batch):
    """out int32 (n,) = index of the largest logit of each row."""
    out[:] = np.argmax(logits, axis=-1)


def nll(out, logits, targets, batch):
    """out float64 (n,) = -log softmax(logits)[row, targets[row]]; not finite where the logits are not."""
    out[:] = nll_rows(logits, targets, batch.work.team.n)


def load_bytes(ck):
    """Bytes that loading takes beside the mapped file."""
    return decoded_bytes(ck, NATIVE)


def check_fits(nbytes, what):
    """Refuse to take more memory than there is."""
    free = available_bytes()
    if free is not None and nbytes > free:
        raise UnsupportedError(
            "the model does not fit in memory",
            expected=f"at most {free:,} bytes free",
            got=f"{nbytes:,} bytes of {what}",
            hint="use a smaller -c, -ctk f16 -ctv f16, or convert to a type that runs as stored",
        )


def available_bytes():
    """Memory that can be taken now, or None where the system does not say."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        pass
    return None


def memory_bandwidth(work, nbytes=1 << 28):
    """Bytes per second that the threads read of a matrix too large for any cache: the best of five."""
    columns = 4096
    matrix = np.ones((nbytes // 4 // columns, columns), np.float32)
    weight = place([from_array(matrix, QType.F32)], None)
    x, out = np.ones((1, columns), np.float32), np.empty((1, len(matrix)), np.float32)
    batch = SimpleNamespace(work=work)
    graph = capture(lambda: norm_linear(out, x, None, weight, batch), work)
    best = 0.0
    for _ in range(5):
        start = time.perf_counter()
        replay(graph, work)
        best = max(best, nbytes / (time.perf_counter() - start))
    return best
