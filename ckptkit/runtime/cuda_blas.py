"""Matrix products of many tokens through cuBLAS, called by ctypes.

Five functions are needed, and a call must be cheap and recordable in a graph: through ctypes one costs about 4
microseconds of host time, where cupy's takes 13 and nvmath-python's 50, and neither package has to be installed.
"""

from __future__ import annotations

import ctypes
import importlib
from typing import Any

from ..errors import UnsupportedError
from ..quant.types import QType
from . import cuda_driver as gpu

KINDS = {QType.F32: 0, QType.F16: 2, QType.BF16: 14}  # cudaDataType
COMPUTE_32F, COMPUTE_TF32 = 68, 77  # cublasComputeType_t: float32 throughout, or float32 rounded to tf32 on the way in
TRANSPOSED, AS_IS, DEFAULT_ALGORITHM = 1, 0, -1
WORKSPACE = 64 << 20

_handle: tuple[Any, ctypes.c_void_p, gpu.Buffer] | None = None


def handle() -> tuple[Any, ctypes.c_void_p]:
    """The library and a handle on the card's stream; UnsupportedError where the library is not installed."""
    global _handle
    if _handle is None:
        try:
            pathfinder = importlib.import_module("cuda.pathfinder")
            path = pathfinder.load_nvidia_dynamic_lib("cublas").abs_path
            library = ctypes.CDLL(path)
        except Exception:
            raise UnsupportedError(
                "the cuBLAS library is missing", hint="pip install 'ckptkit[cuda]', or install CUDA 13"
            ) from None
        made = ctypes.c_void_p()
        _check(library.cublasCreate_v2(ctypes.byref(made)), "starting cuBLAS")
        _check(library.cublasSetStream_v2(made, ctypes.c_void_p(int(gpu.card().stream))), "starting cuBLAS")
        space = gpu.empty((WORKSPACE,), "u1")
        _check(
            library.cublasSetWorkspace_v2(made, ctypes.c_void_p(space.address), ctypes.c_size_t(WORKSPACE)),
            "starting cuBLAS",
        )
        _handle = (library, made, space)
    return _handle[0], _handle[1]


def _check(status: int, doing: str) -> None:
    if status != 0:
        raise UnsupportedError(f"cuBLAS failed while {doing}", got=f"status {status}")


def product(
    out: int, out_stride: int, x: int, x_stride: int, w: int, w_stride: int, sizes: tuple[int, int, int], type: QType,
    add: bool, tf32: bool = False, factor: float = 1.0,
) -> None:  # fmt: skip
    """out (n, rows) f32 = or += factor x (n, k) w (rows, k)^T; x and w of `type`; strides in elements, addresses as
    ints."""
    n, rows, k = sizes
    library, made = handle()
    alpha, beta = ctypes.c_float(factor), ctypes.c_float(1 if add else 0)
    kind = ctypes.c_int(KINDS[type])
    _check(
        library.cublasGemmEx(
            made, TRANSPOSED, AS_IS, rows, n, k, ctypes.byref(alpha), ctypes.c_void_p(w), kind, w_stride,
            ctypes.c_void_p(x), kind, x_stride, ctypes.byref(beta), ctypes.c_void_p(out), ctypes.c_int(0), out_stride,
            COMPUTE_TF32 if tf32 else COMPUTE_32F, DEFAULT_ALGORITHM,
        ),
        "multiplying matrices",
    )  # fmt: skip
