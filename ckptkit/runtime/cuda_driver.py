"""The card: opening it, its memory, kernels launched by address, and graphs of captured launches (CUDA driver API).

One card and one stream per process. Launches go through the driver with raw addresses: 7 to 11 microseconds each, where
Numba's own launch of a kernel with eight arrays takes 68; a captured step is replayed for about 3.
"""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import UnsupportedError
from . import cuda_compile

OUT_OF_MEMORY, NO_DEVICE, UNSUPPORTED_PTX = 2, 100, 222
Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Card:
    """What the driver says about the device, and the handles that everything else needs."""

    api: Any  # cuda.bindings.driver
    device: Any
    stream: Any
    name: str
    capability: tuple[int, int]
    processors: int
    shared_bytes: int  # most dynamic shared memory of a block
    driver: str  # the CUDA version that the driver supports
    kernels: dict[Any, Kernel] = field(default_factory=dict)
    configs: dict[Any, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Kernel:
    """A loaded kernel: what a launch needs."""

    plan: Any
    function: Any
    threads: int


@dataclass(frozen=True, eq=False)
class Buffer:
    """Device memory of a shape and type, by address. `owner` frees it once no view of it is left."""

    address: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    owner: Any = None

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return prod(self.shape) * self.dtype.itemsize

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, part: int | slice) -> Buffer:
        """Index or slice of the first axis, as a view."""
        row = prod(self.shape[1:]) * self.dtype.itemsize
        if isinstance(part, slice):
            lo, hi, step = part.indices(self.shape[0])
            assert step == 1
            return Buffer(self.address + lo * row, (max(hi - lo, 0), *self.shape[1:]), self.dtype, self.owner)
        return Buffer(self.address + part * row, self.shape[1:], self.dtype, self.owner)

    def reshape(self, *shape: int | tuple[int, ...]) -> Buffer:
        """The same memory in another shape."""
        new = shape[0] if isinstance(shape[0], tuple) else shape
        return Buffer(self.address, tuple(int(s) for s in new), self.dtype, self.owner)  # type: ignore[arg-type]


class Memory:
    """One allocation; freed when the last Buffer that holds it goes."""

    def __init__(self, api: Any, address: int) -> None:
        self.api, self.address = api, address

    def __del__(self) -> None:
        free = getattr(self.api, "cuMemFree", None)  # None while the interpreter shuts down
        if free is not None:
            free(self.address)


_card: Card | None = None


def check(result: tuple[Any, ...], doing: str) -> Any:
    """The value of a driver call, or an UnsupportedError that says what was being done."""
    error, *values = result
    if int(error) != 0:
        raise UnsupportedError(f"the GPU failed while {doing}", got=error_name(error))
    return values[0] if len(values) == 1 else values


def error_name(error: Any) -> str:
    """CUDA_ERROR_... of a result."""
    return str(getattr(error, "name", error))


def driver_api() -> Any:
    """cuda.bindings.driver with a driver behind it, or an UnsupportedError that names what is missing."""
    try:
        api = importlib.import_module("cuda.bindings.driver")
    except ImportError:
        raise UnsupportedError("package cuda-bindings is missing", hint="pip install 'ckptkit[cuda]'") from None
    try:
        error = api.cuInit(0)[0]
    except Exception:  # the bindings raise RuntimeError where libcuda is not installed
        raise UnsupportedError(
            "there is no NVIDIA driver on this machine", hint="--device cpu runs everywhere"
        ) from None
    if int(error) == NO_DEVICE:
        raise UnsupportedError("the NVIDIA driver finds no GPU", hint="is it hidden by CUDA_VISIBLE_DEVICES?")
    if int(error) != 0:
        raise UnsupportedError("the NVIDIA driver could not be started", got=error_name(error))
    return api


def is_open() -> bool:
    """Whether the card is in use and the driver still there: not so while the interpreter shuts down."""
    return _card is not None and getattr(_card.api, "cuMemFree", None) is not None


def available() -> bool:
    """Whether there is a driver, a card and a compiler for it; nothing is started that could not be stopped."""
    try:
        driver_api()
    except UnsupportedError:
        return False
    return bool(cuda_compile.version("numba-cuda"))


def card() -> Card:
    """The process's card, opened on first use. Raises UnsupportedError where there is none that can be used."""
    global _card
    if _card is not None:
        return _card
    api = driver_api()
    device = check(api.cuDeviceGet(0), "opening it")
    attribute = api.CUdevice_attribute

    def ask(name: str) -> int:
        return int(check(api.cuDeviceGetAttribute(getattr(attribute, f"CU_DEVICE_ATTRIBUTE_{name}"), device), "asking"))

    capability = (ask("COMPUTE_CAPABILITY_MAJOR"), ask("COMPUTE_CAPABILITY_MINOR"))
    version = int(check(api.cuDriverGetVersion(), "asking for its version"))
    if capability < (7, 5):
        raise UnsupportedError(
            "the GPU is too old", expected="compute capability 7.5 or later", got=".".join(map(str, capability))
        )
    if version < 13000:
        raise UnsupportedError(
            "the NVIDIA driver is too old", expected="CUDA 13.0 (driver 580) or later",
            got=f"CUDA {version // 1000}.{version % 1000 // 10}",
        )  # fmt: skip
    check(api.cuCtxSetCurrent(check(api.cuDevicePrimaryCtxRetain(device), "opening it")), "opening it")
    stream = check(api.cuStreamCreate(api.CUstream_flags.CU_STREAM_NON_BLOCKING), "making a stream")
    name = bytes(check(api.cuDeviceGetName(128, device), "asking for its name")).split(b"\0")[0].decode()
    _card = Card(
        api, device, stream, name, capability, ask("MULTIPROCESSOR_COUNT"), ask("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN"),
        f"{version // 1000}.{version % 1000 // 10}",
    )  # fmt: skip
    return _card


# memory


def free_bytes() -> tuple[int, int]:
    """(free, total) bytes of the card's memory."""
    free, total = check(card().api.cuMemGetInfo(), "asking for its memory")
    return int(free), int(total)


def empty(shape: int | tuple[int, ...], dtype: Any) -> Buffer:
    """Uninitialised device memory; UnsupportedError with the numbers if there is not enough."""
    c = card()
    shape = (shape,) if isinstance(shape, int) else tuple(int(s) for s in shape)
    buffer = Buffer(0, shape, np.dtype(dtype))
    error, address = c.api.cuMemAlloc(max(buffer.nbytes, 16) + 256)  # a clamped vector load may end past the last row
    if int(error) == OUT_OF_MEMORY:
        free, total = free_bytes()
        raise UnsupportedError(
            "the GPU has too little memory", expected=f"{buffer.nbytes:,} bytes",
            got=f"{free:,} of {total:,} bytes free",
            hint="a shorter context, -ctk f16 -ctv f16, or a smaller weight type needs less",
        )  # fmt: skip
    check((error,), "allocating memory")
    return Buffer(int(address), shape, buffer.dtype, Memory(c.api, int(address)))


def zeros(shape: int | tuple[int, ...], dtype: Any) -> Buffer:
    """Device memory of zero bytes."""
    buffer = empty(shape, dtype)
    fill_zero(buffer)
    return buffer


def fill_zero(buffer: Buffer) -> None:
    """Zero bytes, in stream order."""
    c = card()
    if buffer.nbytes:
        check(c.api.cuMemsetD8Async(buffer.address, 0, buffer.nbytes, c.stream), "clearing memory")


def copy_in(buffer: Buffer, array: Array) -> None:
    """Host array to device memory of its size; returns when the array may be changed."""
    c = card()
    data = np.ascontiguousarray(array)
    assert data.nbytes <= buffer.nbytes, (data.nbytes, buffer.nbytes)
    if data.nbytes:
        check(c.api.cuMemcpyHtoDAsync(buffer.address, data.ctypes.data, data.nbytes, c.stream), "copying to it")
        sync()


def upload(array: Array) -> Buffer:
    """A device copy of an array."""
    buffer = empty(array.shape, array.dtype)
    copy_in(buffer, array)
    return buffer


def download(buffer: Buffer) -> Array:
    """A host copy of a buffer, after everything launched before."""
    out = np.empty(buffer.shape, buffer.dtype)
    download_into(out, buffer)
    return out


def download_into(out: Array, buffer: Buffer) -> None:
    """Fill a contiguous host array from a buffer, after everything launched before.

    Through page-locked memory in pieces, one copied out while the next arrives: the driver's own way to ordinary memory
    is a quarter as fast.
    """
    c = card()
    assert out.nbytes == buffer.nbytes
    assert out.flags.c_contiguous
    if out.nbytes <= PIECE // 64:
        if out.nbytes:
            check(c.api.cuMemcpyDtoHAsync(out.ctypes.data, buffer.address, out.nbytes, c.stream), "copying from it")
        sync()
        return
    if not _landing:
        _landing.extend((*pinned(PIECE), event()) for _ in range(2))
    flat = out.reshape(-1).view(np.uint8)
    starts = range(0, out.nbytes, PIECE)
    for turn in range(len(starts) + 1):
        if turn < len(starts):
            at = starts[turn]
            _, address, mark = _landing[turn % 2]
            n = min(PIECE, out.nbytes - at)
            check(c.api.cuMemcpyDtoHAsync(address, buffer.address + at, n, c.stream), "copying from it")
            record(mark)
        if turn:
            at = starts[turn - 1]
            raw, _, mark = _landing[(turn - 1) % 2]
            wait(mark)
            flat[at : at + PIECE] = raw[: len(flat) - at]


PIECE = 4 << 20  # bytes on their way to the host at a time
_landing: list[tuple[Array, int, Any]] = []  # two page-locked pieces and their events, made on first use


def release_landing() -> None:
    """Free the page-locked pieces of downloads."""
    while _landing:
        _, address, mark = _landing.pop()
        forget_event(mark)
        release_pinned(address)


def copy_from_pinned(out: Buffer, address: int, nbytes: int) -> None:
    """Page-locked bytes to the card, in stream order; returns at once."""
    c = card()
    check(c.api.cuMemcpyHtoDAsync(out.address, address, nbytes, c.stream), "copying to it")


def copy(out: Buffer, source: Buffer) -> None:
    """The first bytes of `source`, as many as `out` has, in stream order."""
    c = card()
    assert out.nbytes <= source.nbytes
    check(c.api.cuMemcpyDtoDAsync(out.address, source.address, out.nbytes, c.stream), "copying")


def pinned(nbytes: int) -> tuple[Array, int]:
    """Page-locked host bytes, and the address by which both host and card reach them."""
    c = card()
    address = int(check(c.api.cuMemHostAlloc(nbytes, 0), "locking host memory"))
    raw = (ctypes.c_ubyte * nbytes).from_address(address)
    return np.ctypeslib.as_array(raw), address


def release_pinned(address: int) -> None:
    """Give page-locked memory back."""
    check(card().api.cuMemFreeHost(address), "freeing host memory")


def sync() -> None:
    """Wait for everything launched so far; a fault of a kernel shows here."""
    c = card()
    check(c.api.cuStreamSynchronize(c.stream), "running a kernel")


# kernels


def load(plans: Sequence[Any], on_compile: Callable[[int, int], None] | None = None) -> None:
    """Compile what is not yet on disk and load every plan's kernel; a plan that is loaded stays."""
    c = card()
    missing = [p for p in dict.fromkeys(plans) if p not in c.kernels]
    texts = cuda_compile.build(missing, c.capability, on_compile) if missing else {}
    for plan, text in texts.items():
        error, module = c.api.cuModuleLoadData(text.encode() + b"\0")
        if int(error) == UNSUPPORTED_PTX:
            raise UnsupportedError(
                "the NVIDIA driver is too old for the installed CUDA toolkit", expected=f"CUDA {c.driver} wheels",
                got=f"nvidia-nvvm {cuda_compile.version('nvidia-nvvm')}",
                hint="pip install 'cuda-toolkit==13.0.*' or a newer driver",
            )  # fmt: skip
        check((error,), f"loading a kernel ({type(plan).__name__})")
        function = check(c.api.cuModuleGetFunction(module, cuda_compile.entry(text).encode()), "loading a kernel")
        attribute = c.api.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        static = int(
            check(
                c.api.cuFuncGetAttribute(c.api.CUfunction_attribute.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, function),
                "asking",
            )
        )
        check(
            c.api.cuFuncSetAttribute(function, attribute, c.shared_bytes - static), "raising a kernel's shared memory"
        )
        c.kernels[plan] = Kernel(plan, function, plan.threads)


class Address(int):
    """A raw device address among a launch's arguments."""


KINDS: dict[type, Callable[[Any], tuple[Any, Any]]] = {  # of an argument: its C type and value
    Buffer: lambda a: (ctypes.c_uint64, a.address),
    type(None): lambda _: (ctypes.c_uint64, 0),
    Address: lambda a: (ctypes.c_uint64, int(a)),
    float: lambda a: (ctypes.c_float, a),
    int: lambda a: (ctypes.c_int32, a),
}


def launch(plan: Any, grid: tuple[int, int, int], args: Sequence[Any], shared_bytes: int = 0) -> None:
    """Launch a plan's kernel. A Buffer or None argument is an address, an int an int32, a float a float32."""
    c = card()
    kernel = c.kernels.get(plan)
    if kernel is None:
        load([plan])
        kernel = c.kernels[plan]
    values, kinds = [], []
    for a in args:
        kind, value = KINDS[type(a)](a)
        kinds.append(kind)
        values.append(value)
    api = c.api
    key = (plan, grid, shared_bytes)
    config = c.configs.get(key)
    if config is None:
        config = c.configs[key] = api.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = grid
        config.blockDimX, config.blockDimY, config.blockDimZ = kernel.threads, 1, 1
        config.sharedMemBytes = shared_bytes
        config.hStream = c.stream
        if getattr(plan, "dependent", False):
            one = api.CUlaunchAttribute()
            one.id = api.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            one.value.programmaticStreamSerializationAllowed = 1
            config.attrs, config.numAttrs = [one], 1
    done = api.cuLaunchKernelEx(config, kernel.function, (tuple(values), tuple(kinds)), 0)
    if int(done[0]) != 0:  # a plan's text takes longer than its launch
        check(done, f"launching {plan}")


# graphs


class Graph:
    """A captured sequence of launches; freed with its last reference, or by `forget`."""

    def __init__(self, executable: Any) -> None:
        self.executable = executable

    def __del__(self) -> None:
        if self.executable is not None and is_open():
            with suppress(UnsupportedError):  # after a fault nothing can be freed, and that was said
                forget(self)


def capture(fn: Callable[[], Any]) -> Graph:
    """Record what `fn` launches, without running it; every kernel it needs must be loaded."""
    c = card()
    # relaxed: buffers may be freed by the garbage collector while a graph is recorded
    mode = c.api.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    check(c.api.cuStreamBeginCapture(c.stream, mode), "recording a graph")
    try:
        fn()
    except BaseException:
        c.api.cuStreamEndCapture(c.stream)
        raise
    graph = check(c.api.cuStreamEndCapture(c.stream), "recording a graph")
    executable = check(c.api.cuGraphInstantiate(graph, 0), "making a graph")
    check(c.api.cuGraphUpload(executable, c.stream), "making a graph")  # or its first run would
    check(c.api.cuGraphDestroy(graph), "making a graph")
    return Graph(executable)


def replay(graph: Graph) -> None:
    """Launch a recorded graph; returns at once."""
    c = card()
    check(c.api.cuGraphLaunch(graph.executable, c.stream), "running a graph")


def forget(graph: Graph) -> None:
    """Free a graph, which must not be running."""
    executable, graph.executable = graph.executable, None
    if executable is not None:
        check(card().api.cuGraphExecDestroy(executable), "freeing a graph")


# time


def event() -> Any:
    """A mark in the stream, recorded now."""
    c = card()
    made = check(c.api.cuEventCreate(0), "making an event")
    record(made)
    return made


def record(made: Any) -> None:
    """Move a mark to here."""
    c = card()
    check(c.api.cuEventRecord(made, c.stream), "recording an event")


def forget_event(made: Any) -> None:
    """Free a mark."""
    check(card().api.cuEventDestroy(made), "freeing an event")


def wait(made: Any) -> None:
    """Block until the card has passed a mark."""
    check(card().api.cuEventSynchronize(made), "running a kernel")


def seconds(fn: Callable[[], Any], repeat: int = 5) -> float:
    """Median time on the card of what `fn` launches."""
    c = card()
    times = []
    for _ in range(repeat):
        first = event()
        fn()
        last = event()
        wait(last)
        times.append(float(check(c.api.cuEventElapsedTime(first, last), "timing")) * 1e-3)
        for e in (first, last):
            forget_event(e)
    return sorted(times)[repeat // 2]
