"""The simulated card itself: what it computes, what it finds, and that it notices when a kernel is broken."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from cudasim import ptx
from cudasim.casts import f32, i32, u32
from cudasim.driver import simulated
from cudasim.kernels import Kernels
from cudasim.memory import Fault
from cudasim.threads import Machine

from benchmarks import gpu_check
from ckptkit.quant.types import QType
from ckptkit.runtime import cuda_plan, cuda_products
from ckptkit.runtime import kernels_cuda as k


class Bench:
    """A machine, its stand-ins, and one buffer of 64 words."""

    def __init__(self) -> None:
        self.machine = Machine()
        self.kernels = Kernels(self.machine)
        self.cuda, self.ptx = self.kernels.cuda, self.kernels.ptx
        self.address = self.machine.memory.allocate(256 + 256)
        self.bytes = self.machine.memory.spaces[self.address >> 32]

    def run(self, kernel: Callable[..., None], blocks: int = 1, threads: int = 32, shared: int = 0,
            dependent: bool = False) -> np.ndarray[Any, Any]:  # fmt: skip
        """The words of the buffer after a launch of kernel(address)."""
        self.machine.run(kernel, [self.address], (blocks, 1, 1), threads, shared, dependent)
        return np.array(self.bytes.words[:64])

    def statement(self, text: str, result: Any, *args: Any) -> Callable[..., Any]:
        return ptx.Translator(self.machine).function(text, result, *args)


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_every_statement_is_translated(bench: Bench) -> None:
    for name, function in vars(bench.ptx).items():
        code = getattr(function, "__code__", None)
        assert code is None or "NotImplementedError" not in code.co_names, f"{name}: add its instruction to ptx.py"


@pytest.mark.parametrize(
    ("text", "given", "expected"),
    [
        ("prmt.b32 $0, $1, $2, $3;", (0x33221100, 0x77665544, 0x7420), 0x77442200),
        ("prmt.b32 $0, $1, $2, $3;", (0x80FF0001, 0, 0xB8A9), 0xFF00FF00),
        ("lop3.b32 $0, $1, $2, $3, 0xEA;", (0b1100, 0b1010, 0b0001), 0b1001),
        ("lop3.b32 $0, $1, $2, $3, 0x96;", (0b1100, 0b1010, 0b0001), 0b0111),
        ("shf.r.wrap.b32 $0, $1, $2, $3;", (2, 1, 33), 0x80000001),
    ],
)
def test_bit_instructions_as_the_ptx_isa_says(bench: Bench, text: str, given: Any, expected: int) -> None:
    assert bench.statement(text, u32, u32, u32, u32)(*given) == expected


def test_halves_are_rounded_to_nearest_even(bench: Bench) -> None:
    p = bench.ptx
    with np.errstate(over="ignore"):
        for x, bits in ((1.0, 0x3C00), (1 + 2**-11, 0x3C00), (1 + 3 * 2**-11, 0x3C02), (65520.0, 0x7C00), (2**-25, 0)):
            assert p.f32_f16(f32(x)) == bits
    assert p.pack_f16(f32(1), f32(-2)) == 0xC0003C00
    assert (p.low_f16(0xC0003C00), p.high_f16(0xC0003C00)) == (1, -2)
    assert p.round_tf32(f32(1 + 2**-11)) == 0x3F802000


def test_a_product_of_matrices_in_fragments(bench: Bench) -> None:
    """Fragments of A (16 x 16), B (16 x 8) and C by the tables of the PTX ISA, written out element by element."""
    rng = np.random.default_rng(0)
    a, b, c = rng.standard_normal((16, 16)), rng.standard_normal((16, 8)), rng.standard_normal((16, 8))
    a, b = a.astype(np.float16), b.astype(np.float16)
    out = np.empty((16, 8), np.float32)

    def half(x: Any) -> int:
        return int(np.float16(x).view(np.uint16))

    def kernel(_address: int) -> None:
        lane = bench.machine.tid
        group, t = lane >> 2, lane % 4
        fragment = []
        for i in range(0, 8, 2):  # elements a0..a7
            row = group if i < 2 or 4 <= i < 6 else group + 8
            column = t * 2 + (0 if i < 4 else 8)
            fragment.append(half(a[row, column]) | half(a[row, column + 1]) << 16)
        for i in range(0, 4, 2):
            row = t * 2 + (0 if i < 2 else 8)
            fragment.append(half(b[row, group]) | half(b[row + 1, group]) << 16)
        fragment += [f32(c[group if i < 2 else group + 8, t * 2 + i % 2]) for i in range(4)]
        for i, x in enumerate(bench.ptx.multiply_f16(*fragment)):
            out[group if i < 2 else group + 8, t * 2 + i % 2] = x

    bench.run(kernel)
    np.testing.assert_allclose(out, a.astype(np.float64) @ b.astype(np.float64) + c, rtol=0, atol=1e-5)


def test_a_product_of_tf32_fragments(bench: Bench) -> None:
    rng = np.random.default_rng(0)
    a, b, c = rng.integers(-9, 9, (16, 8)), rng.integers(-9, 9, (8, 8)), rng.integers(-9, 9, (16, 8))
    out = np.empty((16, 8), np.float32)

    def kernel(_address: int) -> None:
        lane, bits = bench.machine.tid, bench.ptx.f32_bits
        g, t = lane >> 2, lane % 4
        given = [bits(f32(a[r, q])) for r, q in ((g, t), (g + 8, t), (g, t + 4), (g + 8, t + 4))]
        given += [bits(f32(b[r, g])) for r in (t, t + 4)]
        given += [f32(c[g + 8 * (i // 2), 2 * t + i % 2]) for i in range(4)]
        for i, x in enumerate(bench.ptx.multiply_tf32(*given)):
            out[g + 8 * (i // 2), 2 * t + i % 2] = x

    bench.run(kernel)
    np.testing.assert_array_equal(out, a @ b + c)


@pytest.mark.parametrize("transposed", [False, True])
def test_matrices_loaded_by_a_warp(bench: Bench, transposed: bool) -> None:
    """Lane l gets row l / 4, elements 2 (l % 4) and the next, of each of four 8 x 8 matrices."""
    found = {}

    def kernel(_address: int) -> None:
        shared = bench.cuda.shared.array(0, f32)
        base, lane = bench.ptx.shared_address(shared), bench.machine.tid
        for i in range(4):  # row `lane` of 8 halves: 8 lane, 8 lane + 1...
            low = 8 * lane + 2 * i
            bench.ptx.put_shared_u32(base + 16 * lane + 4 * i, low | low + 1 << 16)
        bench.cuda.syncthreads()
        load = bench.ptx.load_matrices_transposed if transposed else bench.ptx.load_matrices
        found[lane] = load(base + 16 * lane)

    bench.run(kernel, shared=512)
    matrices = np.arange(256).reshape(4, 8, 8)
    for lane, registers in found.items():
        for matrix, register in zip(matrices, registers, strict=True):
            matrix = matrix.T if transposed else matrix
            row, column = lane // 4, 2 * (lane % 4)
            assert register == matrix[row, column] | matrix[row, column + 1] << 16


def test_sums_over_a_warp_and_a_block(bench: Bench) -> None:
    def kernel(address: int) -> None:
        cuda, p = bench.cuda, bench.ptx
        sums = cuda.shared.array(2, i32)
        tid = cuda.threadIdx.x
        value = tid
        for step in (16, 8, 4, 2, 1):
            value += cuda.shfl_xor_sync(0xFFFFFFFF, value, step)
        if tid % 32 == 0:
            sums[tid // 32] = value
        cuda.syncthreads()
        p.store_i32(address + 4 * tid, sums[0] + sums[1])

    assert set(bench.run(kernel, threads=64)) == {64 * 63 // 2}


def broken(bench: Bench) -> dict[str, tuple[Callable[[int], None], str, dict[str, Any]]]:
    """name: (kernel, what the fault says, launch)."""
    cuda, p, tid = bench.cuda, bench.ptx, bench.cuda.threadIdx

    def stores_past_the_end(address: int) -> None:
        p.store_f32(address + 256 + 4 * tid.x, f32(0))

    def loads_past_the_slack(address: int) -> None:
        p.load_f32(address + 512)

    def loads_from_null(_address: int) -> None:
        p.load_f32(0)

    def loads_a_vector_between_words(address: int) -> None:
        p.load_f32x4(address + 4)

    def leaves_the_shared_array(_address: int) -> None:
        cuda.shared.array(8, f32)[tid.x] = f32(0)

    def leaves_the_shared_window(_address: int) -> None:
        p.shared_f32(p.shared_address(cuda.shared.array(0, f32)) + 64)

    def reads_what_others_write(_address: int) -> None:
        a = cuda.shared.array(32, f32)
        a[tid.x] = f32(1)
        a[31 - tid.x]

    def writes_what_others_read(_address: int) -> None:
        a = cuda.shared.array(33, f32)
        a[32 - tid.x]
        a[tid.x] = f32(1)

    def part_at_a_shuffle(_address: int) -> None:
        if tid.x < 31:
            cuda.shfl_xor_sync(0xFFFFFFFF, tid.x, 1)

    def part_at_a_barrier(_address: int) -> None:
        if tid.x:
            cuda.syncthreads()

    def warps_wait_in_different_places(_address: int) -> None:
        if tid.x < 32:
            cuda.syncthreads()
        else:
            cuda.syncthreads()

    def threads_store_different_values(address: int) -> None:
        p.store_i32(address, tid.x)

    def forgets_copies(address: int) -> None:
        p.copy_async(p.shared_address(cuda.shared.array(0, f32)) + 16 * tid.x, address + 16 * (tid.x % 16), 16)

    def stores_before_it_waits(address: int) -> None:
        p.store_i32(address + 4 * tid.x, 1)
        p.wait_for_previous()

    def starts_the_next_before_it_waits(_address: int) -> None:
        p.start_next()
        p.wait_for_previous()

    def never_waits(_address: int) -> None:
        return

    return {
        "past the end": (stores_past_the_end, "store of 4 bytes", {}),
        "past the slack": (loads_past_the_slack, "load of 4 bytes", {}),
        "null": (loads_from_null, "no allocation", {}),
        "alignment": (loads_a_vector_between_words, "not aligned", {}),
        "shared index": (leaves_the_shared_array, "of a shared array", {}),
        "shared address": (leaves_the_shared_window, "shared memory", {"shared": 64}),
        "read race": (reads_what_others_write, "race in shared", {}),
        "write race": (writes_what_others_read, "race in shared", {}),
        "shuffle": (part_at_a_shuffle, "threads of a warp part", {}),
        "barrier": (part_at_a_barrier, "threads of a warp part", {}),
        "barriers": (warps_wait_in_different_places, "different places", {"threads": 64}),
        "stores": (threads_store_different_values, "race in global", {}),
        "copies": (forgets_copies, "copies under way", {"shared": 512}),
        "early store": (stores_before_it_waits, "before the kernel ahead", {"dependent": True}),
        "early start": (starts_the_next_before_it_waits, "next kernel is started", {"dependent": True}),
        "no wait": (never_waits, "never waits", {"dependent": True}),
    }


@pytest.mark.parametrize("name", broken(Bench()))
def test_a_broken_kernel_is_a_fault(bench: Bench, name: str) -> None:
    kernel, said, launch = broken(bench)[name]
    with pytest.raises(Fault, match=said):
        bench.run(kernel, **launch)


@pytest.mark.parametrize("fences", ["both", "first", "second", "none"])
def test_blocks_see_each_other_through_a_fence_an_atomic_and_a_fence(bench: Bench, fences: str) -> None:
    """The last of three blocks adds up what all have left."""
    p, cuda = bench.ptx, bench.cuda
    bench.bytes.words[0] = 0

    def kernel(address: int) -> None:
        last = cuda.shared.array(1, i32)
        tid, block = cuda.threadIdx.x, cuda.blockIdx.x
        if tid == 5:
            p.store_i32(address + 4 + 4 * block, 10 + block)
        if fences in ("both", "first"):
            p.fence()
        cuda.syncthreads()
        if tid == 0:
            last[0] = i32(p.count_up_to(address, 2) == 2)
            if fences in ("both", "second"):
                p.fence()
        cuda.syncthreads()
        if last[0] and tid == 0:
            p.store_i32(address + 16, sum(p.load_i32(address + 4 + 4 * b) for b in range(3)))

    words = bench.run(kernel, blocks=3)
    assert (int(words[4]) == 10 + 11 + 12) == (fences == "both")
    assert words[0] == 0


def test_a_dependent_launch_sees_the_one_ahead_only_after_waiting(bench: Bench) -> None:
    p, tid = bench.ptx, bench.cuda.threadIdx
    seen = []

    def first(address: int) -> None:
        p.store_i32(address + 4 * tid.x, 7)

    def second(address: int) -> None:
        early = p.load_i32(address + 4 * tid.x)
        p.wait_for_previous()
        seen.append((early == 7, p.load_i32(address + 4 * tid.x) == 7))

    bench.run(first)
    bench.run(second, dependent=True)
    assert set(seen) == {(False, True)}
    seen.clear()
    bench.run(second)
    assert set(seen) == {(True, True)}


def test_copies_arrive_when_they_are_waited_for(bench: Bench) -> None:
    p, cuda = bench.ptx, bench.cuda
    bench.bytes.words[:64] = memoryview(np.arange(64, dtype=np.uint32))
    wait_one, wait_all, seen = p.wait_copies(1), p.wait_copies(0), {}

    def kernel(address: int) -> None:
        tid = cuda.threadIdx.x
        at = p.shared_address(cuda.shared.array(0, f32)) + 32 * tid
        for part, given in ((0, 16), (1, 8)):
            p.copy_async(at + 16 * part, address + 16 * part, given)
            p.commit_copies()
        wait_one()
        one = [p.shared_u32(at + 4 * i) for i in range(8)]
        wait_all()
        seen[tid] = one, [p.shared_u32(at + 4 * i) for i in range(8)]

    bench.run(kernel, shared=1024)
    for one, both in seen.values():
        assert one == [0, 1, 2, 3] + [0xFFFFFFFF] * 4
        assert both == [0, 1, 2, 3, 4, 5, 0, 0]


# kernels with one thing broken, each of which a test above or beside this one must notice


def attention(past: int, n: int, **how: Any) -> Callable[[], gpu_check.Finding]:
    kinds = (np.float16, np.float32)
    return lambda: gpu_check.attention(np.random.default_rng(1), 2, 1, 24, past, n, "half", kinds, **how)


def product(type: QType, kind: str, act: str, n: int = 1, n_in: int = 256) -> Callable[[], gpu_check.Finding]:
    return lambda: gpu_check.product(np.random.default_rng(1), type, 5, n_in, kind, act, n)


SYNC = "cuda.syncthreads()\n"
F32, BF16 = QType.F32, QType.BF16
BROKEN: list[tuple[str, str, str, Callable[[], gpu_check.Finding]]] = [
    ("matvec", f"values[turn * 4 + 3])\n        {SYNC}", "values[turn * 4 + 3])\n", product(F32, "rms", "")),
    ("matvec", f"            start_next()\n        {SYNC}", "            start_next()\n", product(F32, "", "relu")),
    ("matvec", "if RAGGED else at\n", "if False else at\n", product(BF16, "", "", 1, 33)),
    ("matvec", "else u64(0)", "else u64(1)", product(QType.Q4_0, "", "", 1, 8192)),
    ("matvec", "return a + cuda.shfl_xor_sync(0xFFFFFFFF, a, 1)", "return a", product(F32, "layer", "gelu_tanh")),
    ("matvec", "            wait_for_previous()\n", "            pass\n", product(F32, "", "add")),
    ("dot", "u32(0xFFFF0000)", "u32(0xFFFE0000)", product(BF16, "", "")),
    ("split", "<< u32(4 * e)", "<< u32(4 * (e ^ 1))", product(QType.Q4_0, "", "")),
    ("norm", f"        {SYNC}        total = f32(0)", "        total = f32(0)", product(BF16, "rms", "", 17)),
    ("join", f"        fence()\n        {SYNC}", f"        {SYNC}", attention(70, 1)),
    ("attention", "sign * (partner", "-sign * (partner", attention(40, 1)),
    ("attention", "min(span, position + i32(1) - lo)", "min(span, position + i32(2) - lo)", attention(40, 1)),
    ("deep", "            finish_copies()\n", "", attention(40, 1, deep_from=0)),
    ("deep", "finish_copies()\n            cuda.syncwarp()", "finish_copies()", attention(40, 1, deep_from=0)),
    ("flash", f"highest + 1, TILE):\n                {SYNC}", "highest + 1, TILE):\n", attention(70, 17)),
    ("store", "u64(sequence * i32(N_KV) + kv)", "u64(kv)", attention(5, 2)),
]


@pytest.mark.parametrize("case", BROKEN, ids=[f"{m}-{i}" for i, (m, *_) in enumerate(BROKEN)])
def test_a_broken_line_is_noticed(monkeypatch: pytest.MonkeyPatch, case: Any) -> None:
    module, old, new, test = case
    monkeypatch.setattr(k, "SPAN", 32)
    monkeypatch.setattr(k, "Attention", lambda *a, **how: cuda_plan.Attention(*a, **{**how, "threads": 64}))
    monkeypatch.setattr(k, "cut", lambda *_: cuda_plan.Cut(64, 1, 8, 1, 2, 2))
    monkeypatch.setattr(cuda_products, "Norm", partial(cuda_plan.Norm, threads=64))
    processors = 1 if module in ("matvec", "norm") else 8
    with simulated(processors=processors):
        assert test().ok
    try:
        with simulated(processors=processors, changes={f"kernels_cuda_{module}": (old, new)}):
            noticed = not test().ok
    except Fault:
        noticed = True
    assert noticed
