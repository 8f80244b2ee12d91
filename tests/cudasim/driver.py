"""The CUDA driver and cuBLAS over the simulated card: what cuda_driver.py and cuda_blas.py call.

Work is queued and done when the host waits for it, so that a host that does not wait, or overwrites what is on its
way, is found out.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest

from ckptkit.runtime import cuda_blas, cuda_compile, cuda_driver, cuda_weights

from .casts import f32, f64, i32, u64
from .kernels import Kernels
from .memory import Bytes, Fault
from .threads import Machine

SHARED_BYTES = 227 << 10
OUT_OF_MEMORY, ILLEGAL_WHILE_CAPTURING = 2, 900
C_TYPES = {ctypes.c_uint64: u64, ctypes.c_int32: i32, ctypes.c_float: f32, ctypes.c_double: f64}


class Names:
    """An enum whose members are their names."""

    def __getattr__(self, name: str) -> str:
        return name


class Event:
    """A mark in the stream; `at` counts the work queued before it."""

    at = 0


class Driver:
    """The functions of cuda.bindings.driver that are used, as (error, values...)."""

    CUfunction_attribute = CUstreamCaptureMode = CUlaunchAttributeID = Names()
    CUlaunchConfig = SimpleNamespace

    def __init__(self, machine: Machine, kernels: Kernels, memory_bytes: int) -> None:
        self.machine, self.kernels, self.free = machine, kernels, memory_bytes
        self.total = memory_bytes
        self.sizes: dict[int, int] = {}
        self.queue: list[Callable[[], None]] = []
        self.done = 0  # of all work ever queued
        self.recording: list[Callable[[], None]] | None = None
        self.fault: BaseException | None = None
        self.plans: dict[str, Any] = {}

    @staticmethod
    def CUlaunchAttribute() -> SimpleNamespace:
        return SimpleNamespace(value=SimpleNamespace())

    # the stream

    def put(self, work: Callable[[], None]) -> tuple[int]:
        (self.queue if self.recording is None else self.recording).append(work)
        return (0,)

    def drain(self, until: int | None = None) -> None:
        """Do queued work, the first fault ends it all."""
        while self.queue and (until is None or self.done < until):
            if self.fault is not None:
                raise self.fault
            work = self.queue.pop(0)
            self.done += 1
            try:
                work()
            except BaseException as e:
                self.fault = e
                raise
        if self.fault is not None:
            raise self.fault

    def cuStreamSynchronize(self, _stream: Any) -> tuple[int]:
        if self.recording is not None:
            return (ILLEGAL_WHILE_CAPTURING,)
        self.drain()
        return (0,)

    # memory

    def cuMemAlloc(self, size: int) -> tuple[int, int]:
        if size > self.free:
            return OUT_OF_MEMORY, 0
        address = self.machine.memory.allocate(size)
        self.sizes[address] = size
        self.free -= size
        return 0, address

    def cuMemFree(self, address: int) -> tuple[int]:
        if self.recording is None and self.fault is None:
            try:
                self.drain()
            except BaseException:  # kept, and told by the next call that waits: this one is made by __del__
                return (0,)
        self.free += self.sizes.pop(address)
        self.machine.memory.free(address)
        return (0,)

    def cuMemGetInfo(self) -> tuple[int, int, int]:
        return 0, self.free, self.total

    def cuMemHostAlloc(self, size: int, _flags: int) -> tuple[int, int]:
        raw = np.full(-(-size // 16) * 16 + 16, 255, np.uint8)
        raw = raw[-raw.ctypes.data % 16 :]
        address = int(raw.ctypes.data)
        self.machine.memory.pinned[address] = Bytes(raw, size, size)
        return 0, address

    def cuMemFreeHost(self, address: int) -> tuple[int]:
        self.drain()
        del self.machine.memory.pinned[address]
        return (0,)

    def copy(self, to: Callable[[], Any], source: Callable[[], Any]) -> tuple[int]:
        def work() -> None:
            self.machine.launch += 2  # a copy lets no kernel start early
            to()[:] = source()

        return self.put(work)

    def cuMemsetD8Async(self, address: int, value: int, size: int, _stream: Any) -> tuple[int]:
        return self.copy(lambda: self.machine.memory.span(address, size), lambda: value)

    def cuMemcpyHtoDAsync(self, to: int, source: int, size: int, _stream: Any) -> tuple[int]:
        return self.copy(lambda: self.machine.memory.span(to, size), lambda: host(source, size))

    def cuMemcpyDtoHAsync(self, to: int, source: int, size: int, _stream: Any) -> tuple[int]:
        return self.copy(lambda: host(to, size), lambda: self.machine.memory.span(source, size))

    def cuMemcpyDtoDAsync(self, to: int, source: int, size: int, _stream: Any) -> tuple[int]:
        span = self.machine.memory.span
        return self.copy(lambda: span(to, size), lambda: span(source, size))

    # kernels

    def build(self, plans: Iterable[Any], *_more: Any) -> dict[Any, str]:
        """Stand-in for cuda_compile.build: a text that names the plan."""
        texts = {}
        for plan in plans:
            self.plans[f"k{len(self.plans)}"] = plan
            texts[plan] = f".entry k{len(self.plans) - 1}"
        return texts

    def cuModuleLoadData(self, text: bytes) -> tuple[int, bytes]:
        return 0, text

    def cuModuleGetFunction(self, _module: bytes, name: bytes) -> tuple[int, Any]:
        return 0, self.plans[name.decode()]

    def cuFuncGetAttribute(self, _attribute: str, _function: Any) -> tuple[int, int]:
        return 0, 0

    def cuFuncSetAttribute(self, _function: Any, _attribute: str, value: int) -> tuple[int]:
        return (0 if value <= SHARED_BYTES else 1,)

    def cuLaunchKernelEx(self, config: Any, plan: Any, given: Any, _extra: int) -> tuple[int]:
        function, types = self.kernels.kernel(plan)
        values, kinds = given
        if tuple(C_TYPES[kind] for kind in kinds) != types:
            raise Fault(f"arguments {[k.__name__ for k in kinds]} for {plan}")
        args = [cast(value) for cast, value in zip(types, values, strict=True)]
        if config.sharedMemBytes > SHARED_BYTES:
            raise Fault(f"{config.sharedMemBytes:,} bytes of shared memory for {plan}")
        grid, threads, shared = (
            (config.gridDimX, config.gridDimY, config.gridDimZ),
            config.blockDimX,
            config.sharedMemBytes,
        )
        assert threads == plan.threads
        dependent = any(a.value.programmaticStreamSerializationAllowed for a in getattr(config, "attrs", ()))
        return self.put(lambda: self.machine.run(function, args, grid, config.blockDimX, shared, dependent))

    # graphs

    def cuStreamBeginCapture(self, _stream: Any, _mode: str) -> tuple[int]:
        self.recording = []
        return (0,)

    def cuStreamEndCapture(self, _stream: Any) -> tuple[int, Any]:
        recorded, self.recording = self.recording, None
        return 0, recorded

    def cuGraphInstantiate(self, graph: Any, _flags: int) -> tuple[int, Any]:
        return 0, graph

    def cuGraphUpload(self, _executable: Any, _stream: Any) -> tuple[int]:
        return (0,)

    def cuGraphLaunch(self, graph: Any, _stream: Any) -> tuple[int]:
        for work in graph:
            self.put(work)
        return (0,)

    def cuGraphDestroy(self, _graph: Any) -> tuple[int]:
        return (0,)

    cuGraphExecDestroy = cuEventDestroy = cuGraphDestroy

    # events

    def cuEventCreate(self, _flags: int) -> tuple[int, Event]:
        return 0, Event()

    def cuEventRecord(self, event: Event, _stream: Any) -> tuple[int]:
        event.at = self.done + len(self.queue)
        return (0,)

    def cuEventSynchronize(self, event: Event) -> tuple[int]:
        self.drain(event.at)
        return (0,)


def host(address: int, size: int) -> Any:
    """Host memory as bytes."""
    return np.ctypeslib.as_array((ctypes.c_ubyte * size).from_address(address))


class Blas:
    """cublasGemmEx on the simulated card: column-major C (m, n) = alpha op(A) op(B) + beta C."""

    KINDS: ClassVar = {0: np.float32, 2: np.float16, 14: np.uint16}

    def __init__(self, driver: Driver) -> None:
        self.driver = driver

    def matrix(self, address: int, kind: int, rows: int, columns: int, stride: int) -> Any:
        """A row-major view (rows, columns)."""
        type = np.dtype(self.KINDS[kind])
        assert stride >= columns, (stride, columns)
        span = self.driver.machine.memory.span(address, ((rows - 1) * stride + columns) * type.itemsize)
        flat = span.view(type)
        return np.lib.stride_tricks.as_strided(flat, (rows, columns), (stride * type.itemsize, type.itemsize))

    def cublasGemmEx(self, _handle: Any, trans_a: int, trans_b: int, m: int, n: int, k: int, alpha: Any, a: Any,
                     kind_a: Any, lda: int, b: Any, kind_b: Any, ldb: int, beta: Any, c: Any, kind_c: Any, ldc: int,
                     compute: int, _algorithm: int) -> int:  # fmt: skip
        """Only what is used: A transposed, B as it is, results float32."""
        assert (trans_a, trans_b, kind_c.value) == (1, 0, 0)
        scale, add = alpha._obj.value, beta._obj.value

        def work() -> None:
            self.driver.machine.launch += 2
            left = self.values(self.matrix(b.value, kind_b.value, n, k, ldb), kind_b.value, compute)
            right = self.values(self.matrix(a.value, kind_a.value, m, k, lda), kind_a.value, compute)
            out = self.matrix(c.value, 0, n, m, ldc)
            product = scale * (left @ right.T)
            out[:] = product + (add * out if add else 0)

        self.driver.put(work)
        return 0

    def values(self, matrix: Any, kind: int, compute: int) -> Any:
        """As float32; tf32 loses 13 bits."""
        if kind == 14:
            return (matrix.astype(np.uint32) << np.uint32(16)).view(np.float32)
        matrix = np.ascontiguousarray(matrix, np.float32)
        if compute == cuda_blas.COMPUTE_TF32:
            return (matrix.view(np.uint32) + np.uint32(0x1000) & np.uint32(0xFFFFE000)).view(np.float32)
        return matrix


@contextmanager
def simulated(
    capability: tuple[int, int] = (9, 0), processors: int = 1, memory_bytes: int = 1 << 30,
    changes: Mapping[str, tuple[str, str]] | None = None,
) -> Iterator[Driver]:  # fmt: skip
    """The simulated card in place of a real one. Ends with an error if a kernel failed."""
    machine = Machine()
    driver = Driver(machine, Kernels(machine, changes), memory_bytes)
    card = cuda_driver.Card(driver, 0, 0, "simulated", capability, processors, SHARED_BYTES, "13.0")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda_driver, "_card", card)
        patch.setattr(cuda_compile, "build", driver.build)
        patch.setattr(cuda_blas, "_handle", (Blas(driver), ctypes.c_void_p(1), None))
        patch.setattr(cuda_weights, "STAGE", 1 << 16)
        try:
            yield driver
            driver.drain()
        finally:
            cuda_weights.stage.host, cuda_weights.stage.device, cuda_weights.stage.events = [], [], []
            cuda_weights._tables.clear()
