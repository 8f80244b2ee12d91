"""Matrix times vector, the kernel that a decode step consists of: weights streamed once, everything around them fused.

y = W norm(x) + bias, x += W h + bias, or h = act(W norm(x) + bias): the same loop with another beginning and another
end. A block owns a contiguous range of output units; a task is one segment of a row, or of two rows that share the
activations a thread has read, worked on by `lanes` threads.
Every thread has the next `unroll` 16-byte loads under way while it multiplies the present ones; the first are issued
before the activations are staged in shared memory, and with dependent launch before the kernel ahead has finished.
"""

# mypy: ignore-errors
from __future__ import annotations

from math import exp, sqrt

from numba import cuda

from .cuda_layout import LAYOUTS
from .cuda_plan import Matvec
from .cuda_ptx import (
    f32,
    i32,
    load_f32,
    load_f32x4,
    load_i32,
    put_shared_f32,
    put_shared_f32x4,
    shared_address,
    start_next,
    store_f32,
    u32,
    u64,
    wait_for_previous,
)
from .kernels_cuda_dot import loader, multiplier

device = cuda.jit(device=True)
ARGUMENTS = (u64,) * 10 + (i32, i32, f32)


@device
def warp_sum(a):
    """The sum over the warp, in every lane."""
    a += cuda.shfl_xor_sync(0xFFFFFFFF, a, 16)
    a += cuda.shfl_xor_sync(0xFFFFFFFF, a, 8)
    a += cuda.shfl_xor_sync(0xFFFFFFFF, a, 4)
    a += cuda.shfl_xor_sync(0xFFFFFFFF, a, 2)
    return a + cuda.shfl_xor_sync(0xFFFFFFFF, a, 1)


@device
def activate_gelu(v):
    """GPT-2's gelu; tanh(u) as 1 - 2 / (1 + e^2u), whose absolute error stays at float32's."""
    u = f32(0.7978845608028654) * (v + f32(0.044715) * v * v * v)
    return v * (f32(1) - f32(1) / (f32(1) + exp(f32(2) * u)))


@device
def activate_silu(v):
    """v sigmoid(v)."""
    return v / (f32(1) + exp(-v))


@device
def load_some_f32x4(x, at, n):
    """Activations at..at + 3 of n, zero past the end; whole vectors where n allows it."""
    if n % 4 == 0:
        return load_f32x4(x + u64(at) * u64(4))
    p = x + u64(at) * u64(4)
    b = load_f32(p + u64(4)) if at + i32(1) < n else f32(0)
    c = load_f32(p + u64(8)) if at + i32(2) < n else f32(0)
    d = load_f32(p + u64(12)) if at + i32(3) < n else f32(0)
    return (load_f32(p), b, c, d)


def kernel(p: Matvec):
    """The kernel function of a Matvec; arguments in ARGUMENTS' order, grid (columns, blocks)."""
    N_IN, LANES, SEGMENTS, UNROLL, THREADS = p.n_in, p.lanes, p.segments, p.unroll, p.threads
    layout = LAYOUTS[p.type]
    VECTORS, VALUES, CHUNKS, REGS = layout.vectors(N_IN), layout.values, p.chunks, layout.registers
    PER_TASK = p.per_task
    BATCH = UNROLL * PER_TASK * REGS
    PITCH0, PITCH1, PITCH2, PITCH3 = [layout.pitch(k, N_IN) if k < len(layout.planes) else 0 for k in range(4)]
    PLANES = VALUES // 4  # float4s of activations for one vector of weights
    STRIDE = (LANES + (PLANES > 1)) * 16  # bytes between them: padded, so that staging meets no bank conflict
    STEPS = CHUNKS * UNROLL
    STAGED = STEPS * SEGMENTS * LANES * PLANES  # float4s in shared memory
    SUMS_AT = STEPS * SEGMENTS * PLANES * STRIDE
    PART_AT = p.staged_bytes // 4
    RAGGED = STEPS * SEGMENTS * LANES != VECTORS
    ROWS = 2 if p.act == "silu_gate" else 1
    WARPS, GROUPS = THREADS // 32, THREADS // LANES
    NORM, ACT, ADD, PICKED, DEPENDENT, EARLY = p.norm, p.act, p.add, p.picked, p.dependent, p.early
    LAYER, NORMED = NORM == "layer", NORM != ""
    F0, F1, F2, F3 = layout.factors
    SCALE, RESTORE, HAS_SUMS = layout.scale, 1 / layout.scale, layout.scale != 1
    TURNS = (STAGED + THREADS - 1) // THREADS
    load, multiply = loader(p.type), multiplier(p.type, PER_TASK)
    HALF_LANES = LANES // 2
    AT_ONCE = min(TURNS, 8)
    N_VALUES, N_GAINS = 4 * (TURNS if NORMED else AT_ONCE), 8 * (TURNS if NORMED else 1)

    @device
    def load_batch(out, p0, p1, p2, p3, further, v):
        """The next vectors of a task's rows, the second row `further` rows on."""
        for j in range(UNROLL):
            at = v + i32(j * LANES)
            at = min(at, i32(VECTORS - 1)) if RAGGED else at
            for k in range(PER_TASK):
                load(
                    out,
                    (j * PER_TASK + k) * REGS,
                    p0 + u64(k) * further * u64(PITCH0),
                    p1 + u64(k) * further * u64(PITCH1),
                    p2 + u64(k) * further * u64(PITCH2),
                    p3 + u64(k) * further * u64(PITCH3),
                    at,
                )

    @device
    def row_of(q, first, units):
        """The matrix row of row q of a block's, which are numbered unit by unit."""
        return first + q // i32(ROWS) + (q % i32(ROWS)) * units

    @device
    def further_of(q, count, units):
        """How many rows on the second of a task lies; none where the block's rows end."""
        if ROWS == 2:
            return u64(units)
        return u64(1) if q + i32(1) < count else u64(0)

    @device
    def place_of(i):
        """Shared-memory byte offset of float4 i of the activations."""
        v = i // i32(PLANES)
        return u32(((v // i32(LANES)) * i32(PLANES) + (i - v * i32(PLANES))) * i32(STRIDE) + (v % i32(LANES)) * i32(16))

    @device
    def load_gain(gain, gain_bias, tid, gains):
        """Gain and bias of the norm for this thread's float4s, in registers before anything waits."""
        for turn in range(TURNS):
            i = i32(turn * THREADS) + tid
            inside = i * i32(4) < i32(N_IN)
            for e in range(4):
                gains[turn * 8 + e] = f32(1)
                gains[turn * 8 + 4 + e] = f32(0)
            if inside and gain != u64(0):
                g = load_some_f32x4(gain, i * i32(4), i32(N_IN))
                for e in range(4):
                    gains[turn * 8 + e] = g[e]
            if inside and gain_bias != u64(0):
                g = load_some_f32x4(gain_bias, i * i32(4), i32(N_IN))
                for e in range(4):
                    gains[turn * 8 + 4 + e] = g[e]

    @device
    def put(base, i, a, b, c, d):
        """Float4 i of what the weights are multiplied with, and the sums that their type needs."""
        if i < i32(STAGED):
            put_shared_f32x4(base + place_of(i), a * f32(F0), b * f32(F1), c * f32(F2), d * f32(F3))
        if HAS_SUMS:  # four threads hold sixteen activations
            total = (a + b + c + d) * f32(SCALE)
            total += cuda.shfl_xor_sync(0xFFFFFFFF, total, 1)
            total += cuda.shfl_xor_sync(0xFFFFFFFF, total, 2)
            if i % i32(4) == 0 and i < i32(STAGED):
                put_shared_f32(base + u32(SUMS_AT) + u32(i), total)

    @device
    def stage_plain(x, base, tid, values):
        """x into shared memory; several loads are under way before the first is stored."""
        for first in range(0, TURNS, AT_ONCE):
            for t in range(AT_ONCE):
                i = i32((first + t) * THREADS) + tid
                for e in range(4):
                    values[t * 4 + e] = f32(0)
                if i * i32(4) < i32(N_IN):
                    v = load_some_f32x4(x, i * i32(4), i32(N_IN))
                    for e in range(4):
                        values[t * 4 + e] = v[e]
            for t in range(AT_ONCE):
                if first + t < TURNS:
                    put(
                        base,
                        i32((first + t) * THREADS) + tid,
                        values[t * 4],
                        values[t * 4 + 1],
                        values[t * 4 + 2],
                        values[t * 4 + 3],
                    )
        cuda.syncthreads()

    @device
    def stage_normed(x, gains, eps, base, tid, reduce, values):
        """norm(x) into shared memory; x stays in registers."""
        # sums of x - x[0]: the variance of a row with a large mean would cancel
        shift = load_f32(x) if LAYER else f32(0)
        for turn in range(TURNS):
            i = i32(turn * THREADS) + tid
            for e in range(4):
                values[turn * 4 + e] = shift
            if i * i32(4) < i32(N_IN):
                v = load_some_f32x4(x, i * i32(4), i32(N_IN))
                for e in range(4):
                    values[turn * 4 + e] = v[e]
        total, square = f32(0), f32(0)
        for turn in range(TURNS):
            for e in range(4):
                if N_IN % 4 == 0 or (i32(turn * THREADS) + tid) * i32(4) + i32(e) < i32(N_IN):
                    d = values[turn * 4 + e] - shift
                    total += d
                    square += d * d
        if LAYER:
            total = warp_sum(total)
        square = warp_sum(square)
        if tid % i32(32) == 0:
            reduce[tid // i32(32)] = total
            reduce[i32(WARPS) + tid // i32(32)] = square
        cuda.syncthreads()
        total, square = f32(0), f32(0)
        for w in range(WARPS):
            total += reduce[w]
            square += reduce[WARPS + w]
        mean = f32(0)
        square = square * f32(1.0 / N_IN)
        if LAYER:
            total = total * f32(1.0 / N_IN)
            mean = shift + total
            square = square - total * total
        scale = f32(1) / sqrt(square + eps)
        for turn in range(TURNS):
            i = i32(turn * THREADS) + tid
            for e in range(4):
                v = (values[turn * 4 + e] - mean) * scale * gains[turn * 8 + e] + gains[turn * 8 + 4 + e]
                values[turn * 4 + e] = v if i * i32(4) + i32(e) < i32(N_IN) else f32(0)
            put(base, i, values[turn * 4], values[turn * 4 + 1], values[turn * 4 + 2], values[turn * 4 + 3])
        cuda.syncthreads()

    def matvec(w0, w1, w2, w3, bias, x, gain, gain_bias, y, rows, units, n_out, eps):
        shared = cuda.shared.array(0, f32)
        reduce = cuda.shared.array(64, f32)
        now = cuda.local.array(BATCH, u32)
        ahead = cuda.local.array(BATCH, u32)
        values = cuda.local.array(N_VALUES, f32)
        gains = cuda.local.array(N_GAINS, f32)
        acc = cuda.local.array(PER_TASK, f32)
        base = shared_address(shared)
        tid = i32(cuda.threadIdx.x)
        column, block, blocks = i32(cuda.blockIdx.x), i32(cuda.blockIdx.y), i32(cuda.gridDim.y)
        first = i32(u64(block) * u64(units) // u64(blocks))
        last = i32(u64(block + i32(1)) * u64(units) // u64(blocks))
        count = (last - first) * i32(ROWS)
        tasks = (count + i32(PER_TASK - 1)) // i32(PER_TASK) * i32(SEGMENTS)
        group, lane = tid // i32(LANES), tid % i32(LANES)
        rounds = (tasks + i32(GROUPS - 1)) // i32(GROUPS)

        # the first batch, before anything that waits
        task = min(group, tasks - i32(1))
        segment, q = task % i32(SEGMENTS), task // i32(SEGMENTS) * i32(PER_TASK)
        row, further = row_of(q, first, units), further_of(q, count, units)
        p0, p1 = w0 + u64(row) * u64(PITCH0), w1 + u64(row) * u64(PITCH1)
        p2, p3 = w2 + u64(row) * u64(PITCH2), w3 + u64(row) * u64(PITCH3)
        load_batch(now, p0, p1, p2, p3, further, segment * i32(STEPS * LANES) + lane)
        if NORMED:
            load_gain(gain, gain_bias, tid, gains)
        source = load_i32(rows + u64(column) * u64(4)) if PICKED else column
        bias_a, bias_b, old = f32(0), f32(0), f32(0)
        out = y + (u64(column) * u64(n_out) + u64(first)) * u64(4)
        if bias != u64(0) and tid < last - first:
            bias_a = load_f32(bias + u64(first + tid) * u64(4))
            if ROWS == 2:
                bias_b = load_f32(bias + u64(first + tid + units) * u64(4))
        if DEPENDENT:
            wait_for_previous()
            if EARLY:
                start_next()
        if ADD and tid < last - first:
            old = load_f32(out + u64(tid) * u64(4))
        if NORMED:
            stage_normed(x + u64(source) * u64(N_IN * 4), gains, eps, base, tid, reduce, values)
        else:
            stage_plain(x + u64(source) * u64(N_IN * 4), base, tid, values)

        task, chunk = group, i32(0)
        for k in range(PER_TASK):
            acc[k] = f32(0)
        turns = rounds * i32(CHUNKS)
        for turn in range(turns):
            done, place, past = task, segment, chunk
            chunk += i32(1)
            if chunk == i32(CHUNKS):
                chunk = i32(0)
                task += i32(GROUPS)
            if i32(turn) + i32(1) < turns:
                if chunk == i32(0):
                    near = min(task, tasks - i32(1))
                    segment, q = near % i32(SEGMENTS), near // i32(SEGMENTS) * i32(PER_TASK)
                    row, further = row_of(q, first, units), further_of(q, count, units)
                    p0, p1 = w0 + u64(row) * u64(PITCH0), w1 + u64(row) * u64(PITCH1)
                    p2, p3 = w2 + u64(row) * u64(PITCH2), w3 + u64(row) * u64(PITCH3)
                v = (segment * i32(STEPS) + chunk * i32(UNROLL)) * i32(LANES) + lane
                load_batch(ahead, p0, p1, p2, p3, further, v)
            step = place * i32(STEPS) + past * i32(UNROLL)
            here = base + u32(step * i32(PLANES * STRIDE)) + u32(lane * i32(16))
            sums = base + u32(SUMS_AT) + u32((step * i32(LANES) + lane) * i32(8))
            for j in range(UNROLL):
                x_at, s_at = here + u32(j * PLANES * STRIDE), sums + u32(j * LANES * 8)
                multiply(now, j * PER_TASK * REGS, x_at, u32(STRIDE), s_at, acc)
            for j in range(BATCH):
                now[j] = ahead[j]
            if chunk == i32(0):
                for k in range(PER_TASK):
                    total = acc[k]
                    width = HALF_LANES
                    while width:
                        total += cuda.shfl_xor_sync(0xFFFFFFFF, total, width)
                        width //= 2
                    q_done = done // i32(SEGMENTS) * i32(PER_TASK) + i32(k)
                    if lane == 0 and q_done < count:
                        shared[i32(PART_AT) + q_done * i32(SEGMENTS) + done % i32(SEGMENTS)] = total * f32(RESTORE)
                    acc[k] = f32(0)
        if DEPENDENT and not EARLY:
            start_next()
        cuda.syncthreads()
        for k in range(tid, last - first, THREADS):
            a, b = f32(0), f32(0)
            for s in range(SEGMENTS):
                a += shared[i32(PART_AT) + i32(k) * i32(ROWS * SEGMENTS) + i32(s)]
                if ROWS == 2:
                    b += shared[i32(PART_AT) + i32(k) * i32(ROWS * SEGMENTS) + i32(SEGMENTS + s)]
            if i32(k) >= i32(THREADS):
                if bias != u64(0):
                    bias_a = load_f32(bias + u64(first + i32(k)) * u64(4))
                    if ROWS == 2:
                        bias_b = load_f32(bias + u64(first + i32(k) + units) * u64(4))
                if ADD:
                    old = load_f32(out + u64(k) * u64(4))
            a += bias_a
            if ROWS == 2:
                b += bias_b
            if ACT == "silu_gate":
                a = activate_silu(a) * b
            if ACT == "gelu_tanh":
                a = activate_gelu(a)
            if ACT == "relu":
                a = max(a, f32(0))
            if ADD:
                a += old
            store_f32(out + u64(k) * u64(4), a)

    return matvec
