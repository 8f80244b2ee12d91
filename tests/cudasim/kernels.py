"""Private copies of the kernel modules, with stand-ins for `numba.cuda`, `math` and cuda_ptx.py."""

from __future__ import annotations

import builtins
import functools
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from types import CodeType, SimpleNamespace
from typing import Any

import numpy as np

import ckptkit.runtime

from . import ptx, warp
from .casts import f32, f64, i32, u32
from .threads import Machine

PACKAGE = ckptkit.runtime.__name__
HERE = Path(ckptkit.runtime.__file__).parent
MATH = SimpleNamespace(
    **{
        **vars(math),
        **{n: getattr(np, n) for n in ("exp", "exp2", "log", "log2", "sqrt", "tanh", "cos", "sin", "fabs")},
    }
)


def largest(*args: Any) -> Any:
    """max; of two floats the number where one is NaN."""
    if len(args) != 2:
        return max(*args)
    a, b = args
    return b if b > a or a != a else a


def smallest(*args: Any) -> Any:
    """min; of two floats the number where one is NaN."""
    if len(args) != 2:
        return min(*args)
    a, b = args
    return b if b < a or a != a else a


@functools.cache
def compiled(name: str) -> CodeType:
    """A kernel module as it is."""
    path = HERE / f"{name}.py"
    return compile(path.read_text(), str(path), "exec")


class Masked(list[int]):
    """An array of unsigned registers."""

    def __setitem__(self, i: Any, value: Any) -> None:
        super().__setitem__(i, value & 0xFFFFFFFF)


def local_array(size: int, dtype: Any) -> list[Any]:
    """Registers of a thread, filled with what nobody wants."""
    if dtype in (f32, f64):
        return [dtype("nan")] * size
    return Masked([0xDEADBEEF] * size) if dtype is u32 else [i32(0xDEADBEEF)] * size


def numba_cuda(m: Machine) -> SimpleNamespace:
    """Stand-in for numba.cuda."""

    def shuffled(joint: warp.Joint) -> Callable[[int, Any, int], Any]:
        return lambda mask, value, argument: m.meet(joint, (mask, value, argument))

    return SimpleNamespace(
        jit=lambda **_how: lambda function: function,
        threadIdx=m.thread_index,
        blockIdx=m.block_index,
        gridDim=m.grid,
        syncthreads=m.synchronize,
        syncwarp=m.synchronize_warp,
        shared=SimpleNamespace(array=m.shared_array),
        local=SimpleNamespace(array=local_array),
        shfl_xor_sync=shuffled(warp.shuffle_xor),
        shfl_down_sync=shuffled(warp.shuffle_down),
        shfl_up_sync=shuffled(warp.shuffle_up),
        shfl_sync=shuffled(warp.shuffle_index),
    )


class Kernels:
    """Kernel modules for a machine. `changes`: module name to (old, new), to see that tests notice."""

    def __init__(self, machine: Machine, changes: Mapping[str, tuple[str, str]] | None = None) -> None:
        self.changes = dict(changes or {})
        self.cuda = numba_cuda(machine)
        self.ptx = ptx.module(machine, HERE / "cuda_ptx.py")
        self.modules: dict[str, SimpleNamespace] = {}
        self.plans: dict[Any, Callable[..., None]] = {}

    def module(self, name: str) -> SimpleNamespace:
        """A kernel module by its name."""
        if name not in self.modules:
            code = compiled(name)
            if name in self.changes:
                path, (old, new) = HERE / f"{name}.py", self.changes[name]
                assert old in path.read_text(), f"{name} has no {old!r}"
                code = compile(path.read_text().replace(old, new), str(path), "exec")
            scope: dict[str, Any] = {
                "__name__": f"{PACKAGE}.{name}", "__package__": PACKAGE,
                "__builtins__": {**vars(builtins), "__import__": self.fetch, "max": largest, "min": smallest},
            }  # fmt: skip
            exec(code, scope)
            self.modules[name] = SimpleNamespace(**{k: v for k, v in scope.items() if k != "__builtins__"})
        return self.modules[name]

    def fetch(self, name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0) -> Any:
        """`import` as the kernel modules see it."""
        if level == 1 and name == "cuda_ptx":
            return self.ptx
        if level == 1 and name.startswith("kernels_cuda_"):
            return self.module(name)
        if name == "numba":
            return SimpleNamespace(cuda=self.cuda)
        if name == "math":
            return MATH
        return builtins.__import__(name, globals, locals, fromlist, level)

    def kernel(self, plan: Any) -> tuple[Callable[..., None], tuple[Any, ...]]:
        """(function, types of its arguments) of a plan."""
        module = self.module(plan.MODULE)
        if plan not in self.plans:
            self.plans[plan] = module.kernel(plan)
        return self.plans[plan], module.ARGUMENTS
