"""The threads of a block: greenlets that run one after another until they meet at a barrier or at a joint instruction
of their warp.

Every meeting is checked: all threads of the warp, or of the block, must arrive, and at the same place in the code.
Odd launches run blocks, warps and lanes backwards, so that nothing can lean on their order.
"""

from __future__ import annotations

import contextvars
import math
import sys
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
from greenlet import greenlet

from .casts import f32, f64, i32, u32
from .memory import Fault, Memory, Region
from .order import Order

# of an element of a shared array: the view of the bytes, and words
VIEWS = {f32: ("floats", 1), i32: ("signed", 1), u32: ("words", 1), f64: ("doubles", 2)}
BARRIER, DONE = "barrier", "end"


def WARP_BARRIER(_m: Machine, given: list[Any]) -> list[None]:
    """The joint instruction that does nothing but order memory."""
    return [None] * len(given)


class Machine(Order):
    """The card and the thread at work on it. `launch` counts what is done in stream order."""

    def __init__(self) -> None:
        self.memory = Memory()
        self.launch = 0
        self.thread_index, self.block_index, self.grid = (SimpleNamespace(x=0, y=0, z=0) for _ in range(3))
        self.barriers = 0  # passed so far, by all blocks
        self.floor = self.me = 0  # stamps: see Region
        self.tid = self.block = 0
        self.main: Any = None
        self.context = contextvars.copy_context()
        self.context.run(np.seterr, all="ignore")

    # a launch

    def run(self, kernel: Callable[..., None], args: Sequence[Any], grid: tuple[int, int, int], threads: int,
            dynamic: int, dependent: bool) -> None:  # fmt: skip
        """Run a kernel to its end."""
        if threads % 32 or not 0 < threads <= 1024 or min(grid) < 1:
            raise Fault(f"a launch of {grid} blocks of {threads} threads")
        self.launch += 1
        self.threads, self.dynamic = threads, dynamic
        self.begin_launch(dependent)
        self.grid.x, self.grid.y, self.grid.z = grid
        self.step = -1 if self.launch % 2 else 1
        places = [(x, y, z) for z in range(grid[2]) for y in range(grid[1]) for x in range(grid[0])]
        self.main = greenlet.getcurrent()
        for number, place in list(enumerate(places))[:: self.step]:
            self.block = number
            self.block_index.x, self.block_index.y, self.block_index.z = place
            self.run_block(kernel, args)
        if not self.any_waited:
            raise Fault("a dependent launch never waits for the one before it")

    def run_block(self, kernel: Callable[..., None], args: Sequence[Any]) -> None:
        """Run the threads of one block."""
        self.regions = [Region(self.dynamic)]
        self.taken = [1] * self.threads  # shared arrays that each thread has come past
        self.arrays = [SharedArray(self, 0, (self.dynamic // 4,), f32)]
        self.warp_barriers = [0] * (self.threads // 32)
        self.begin_block()
        self.copies: list[list[list[Callable[[], None]]]] = [[[]] for _ in range(self.threads)]
        self.fibres = [greenlet(kernel, self.main) for _ in range(self.threads)]
        for fibre in self.fibres:
            fibre.gr_context = self.context
        self.pass_barrier()
        given: list[Sequence[Any]] = [args] * self.threads
        warps = list(range(0, self.threads, 32))[:: self.step]
        while True:
            sites: set[Any] = set()
            for warp in warps:
                sites.add(self.run_warp(range(warp, warp + 32)[:: self.step], given))
            if len(sites) > 1:
                raise Fault(f"warps of a block wait in different places: {names(sites)}")
            if DONE in {s[0] for s in sites}:
                break
            self.pass_barrier()
        if any(any(groups) for groups in self.copies):
            raise Fault("a thread ended with copies under way")

    def pass_barrier(self) -> None:
        """What came before is ordered before what follows, within the block."""
        self.barriers += 1
        self.floor = self.barriers << 31
        self.settle()

    def run_warp(self, lanes: Sequence[int], given: list[Sequence[Any]]) -> Any:
        """Run 32 threads until all wait at a barrier or are done; the site that they have come to."""
        fibres, requests = self.fibres, [None] * 32
        low = min(lanes)
        while True:
            stamp = self.floor | self.warp_barriers[low // 32] << 11
            for t in lanes:
                self.tid, self.me, self.thread_index.x = t, stamp | t, t
                request = fibres[t].switch(*given[t])
                requests[t - low] = (DONE, None, None) if fibres[t].dead else request
            first = requests[0]
            here = first[:2]
            for lane in range(1, 32):
                if requests[lane][:2] != here:
                    raise Fault(f"the threads of a warp part: {names({r[:2] for r in requests})}")
            if first[0] in (BARRIER, DONE):
                for t in lanes:
                    given[t] = ()
                return here
            if first[0] is WARP_BARRIER:
                self.warp_barriers[low // 32] += 1
            results = first[0](self, [r[2] for r in requests])
            for t in lanes:
                given[t] = (results[t - low],)

    # what threads call

    def synchronize(self) -> None:
        """The barrier of the block."""
        frame = sys._getframe(1)
        self.main.switch((BARRIER, (frame.f_code, frame.f_lasti), None))

    def meet(self, joint: Callable[..., Any], value: Any, depth: int = 2) -> Any:
        """Hand `value` to the warp's joint instruction; returns this lane's result."""
        frame = sys._getframe(depth)
        return self.main.switch((joint, (frame.f_code, frame.f_lasti), value))

    def synchronize_warp(self, _mask: int = 0xFFFFFFFF) -> None:
        """The barrier of the warp."""
        self.meet(WARP_BARRIER, None)

    def races(self, stamp: int) -> bool:
        """Whether what was done to a shared word then is not ordered before this moment."""
        if stamp < self.floor or not (stamp ^ self.me) & 2047:
            return False
        return (stamp ^ self.me) & 2047 >= 32 or stamp >> 11 == self.me >> 11

    def touch(self, region: Region, first: int, count: int, write: bool) -> None:
        """Note an access to words of shared memory; a Fault if another thread's is in its way."""
        floor, me, wrote, read = self.floor, self.me, region.wrote, region.read
        for word in range(first, first + count):
            stamp, did = wrote[word], "wrote"
            if write and (stamp < floor or stamp == me):
                stamp, did = read[word], "read"
            if stamp >= floor and stamp != me and self.races(stamp):
                raise Fault(
                    f"race in shared memory: thread {self.tid} {'writes' if write else 'reads'} word {word} that "
                    f"thread {stamp & 2047} {did}"
                )
            if write:
                wrote[word] = me
            else:
                read[word] = me

    def shared_array(self, shape: int | tuple[int, ...], dtype: Any) -> SharedArray:
        """The next shared array of this thread; (0,) is the launch's dynamic memory."""
        shape = (shape,) if isinstance(shape, int) else shape
        if shape == (0,):
            return self.arrays[0]
        k = self.taken[self.tid]
        self.taken[self.tid] += 1
        if k == len(self.arrays):
            self.regions.append(Region(4 * VIEWS[dtype][1] * math.prod(shape)))
            self.arrays.append(SharedArray(self, k, shape, dtype))
        if (self.arrays[k].shape, self.arrays[k].cast) != (shape, dtype):
            raise Fault("threads of a block make different shared arrays")
        return self.arrays[k]


class SharedArray:
    """An array in shared memory as a kernel indexes it. `address` in the shared window: its region's own 16 MiB."""

    def __init__(self, machine: Machine, index: int, shape: tuple[int, ...], dtype: Any) -> None:
        region = machine.regions[index]
        self.machine, self.region, self.shape, self.address = machine, region, shape, index + 1 << 24
        self.size = math.prod(shape)
        view, self.words = VIEWS[dtype]
        self.view, self.cast = getattr(region.data, view), dtype

    def place(self, i: Any) -> int:
        """Word of an index, which must lie inside."""
        if i.__class__ is tuple:
            if any(not 0 <= a < n for a, n in zip(i, self.shape, strict=True)):
                raise Fault(f"index {i} of a shared array {self.shape}")
            at = 0
            for a, n in zip(i, self.shape, strict=True):
                at = at * n + a
            return at
        if not 0 <= i < self.size or len(self.shape) > 1:
            raise Fault(f"index {i} of a shared array {self.shape}")
        return i

    def __getitem__(self, i: Any) -> Any:
        i = self.place(i)
        self.machine.touch(self.region, i * self.words, self.words, False)
        return self.view[i]

    def __setitem__(self, i: Any, value: Any) -> None:
        i = self.place(i)
        self.machine.touch(self.region, i * self.words, self.words, True)
        self.view[i] = self.cast(value)


def names(sites: set[Any]) -> str:
    """Where threads wait: what for, file and line."""
    said = []
    for what, where in sites:
        what = what if isinstance(what, str) else what.__name__
        if where is None:
            said.append(what)
            continue
        code, at = where
        line = next((n for a, b, n in code.co_lines() if a <= at < b), code.co_firstlineno)
        said.append(f"{what} in {code.co_name}, line {line}")
    return "; ".join(sorted(said))
