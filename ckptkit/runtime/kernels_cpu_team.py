# mypy: ignore-errors
"""A team of threads that runs programs: lists of kernels with a barrier after each.

Numba's own parallel regions need the system's libgomp (without it a region costs 90 us, and a token crosses 150) and
compile slowly. Here a kernel is an ordinary nogil function `kernel(ta, tb, tc, args, team, tid)`, ta..tc literals
that select code, args the address of its int64 arguments. Workers wait in compiled code: they spin for about a
millisecond, then park on a Python lock.

Team memory, int64; each used cell has a cache line of its own:
| cell | meaning |
|---|---|
| GENERATION | counts programs; a change starts the workers |
| ARRIVED, PHASE | the barrier: threads that reached it, and how often it opened |
| CHUNK | next piece of work of the running kernel (`take`); the barrier sets it to 0 |
| PROGRAM, STEPS | address and length of the program: int64 pairs (kernel address, args address) |
| THREADS | members, the caller included |
| SPINS | turns of `pause` before a waiting thread offers its core to others at every turn |
| STOP | workers return |
| STATE + tid | 0 awake, 1 parked |
"""

from __future__ import annotations

import atexit
import os
import threading

import numpy as np
from numba import njit, types

from ..errors import UnsupportedError
from .kernels_cpu_cache import compiled, kernel
from .simd_memory import get_i64
from .simd_threads import atomic_add, atomic_get, atomic_put, atomic_swap, call_kernel, spin_hint

LINE = 64
GENERATION, ARRIVED, PHASE, CHUNK, PROGRAM, STEPS, THREADS, SPINS, STOP, STATE = (LINE * i for i in range(10))
MAX_THREADS = 256
LONG, SHORT = 1 << 17, 64  # spins: about two milliseconds; where there are more threads than cores waiting is in vain

sched_yield = types.ExternalFunction("sched_yield", types.int32())


@njit(inline="always")
def take(team):
    """The next piece of work of this kernel: 0, 1, 2, ... shared by all threads."""
    return atomic_add(team + CHUNK, 1)


@kernel
def barrier(team):
    """Wait until every thread is here; work done before is visible to all after."""
    phase = atomic_get(team + PHASE)
    n = get_i64(team + THREADS)
    if atomic_add(team + ARRIVED, 1) == n - 1:
        atomic_put(team + ARRIVED, 0)
        atomic_put(team + CHUNK, 0)
        atomic_put(team + PHASE, phase + 1)
        return
    turns = 0
    while atomic_get(team + PHASE) == phase:
        turns += 1
        if turns > get_i64(team + SPINS):
            sched_yield()
        else:
            spin_hint()


@kernel
def work(team, tid):
    """Run this thread's share of the program."""
    program = get_i64(team + PROGRAM)
    for step in range(get_i64(team + STEPS)):
        call_kernel(get_i64(program + 16 * step), get_i64(program + 16 * step + 8), team, tid)
        barrier(team)


@kernel
def serve(team, tid, seen):
    """A worker's life until it parks: returns the generation it has seen, or -1 to end."""
    turns, spins = 0, get_i64(team + SPINS)
    while True:
        now = atomic_get(team + GENERATION)
        if now != seen:
            if atomic_get(team + STOP):
                return -1
            work(team, tid)
            seen, turns = now, 0
            continue
        turns += 1
        if turns < spins:
            spin_hint()
        elif turns < spins + 256:
            sched_yield()
        else:
            atomic_swap(team + STATE + LINE * tid, 1)
            # A program posted in between either sees us parked and wakes us, or we see it and take the mark back.
            if atomic_get(team + GENERATION) == seen or atomic_swap(team + STATE + LINE * tid, 0) == 0:
                return seen
            turns = 0


@kernel
def post(team, program, n_steps):
    """Publish a program; returns a bit mask of the workers that are parked and must be woken (63: look at all)."""
    atomic_put(team + PROGRAM, program)
    atomic_put(team + STEPS, n_steps)
    atomic_add(team + GENERATION, 1)
    parked = 0
    for tid in range(1, get_i64(team + THREADS)):
        if atomic_swap(team + STATE + LINE * tid, 0) == 1:
            parked |= 1 << min(tid, 62)
    return parked


class Team:
    """`n` threads, the caller one of them. One program at a time; `run` blocks until it is done."""

    def __init__(self, n: int) -> None:
        self.n = n
        self._memory = np.zeros((STATE // LINE + n + 1) * LINE // 8, np.int64)
        base = self._memory.ctypes.data
        self._memory = self._memory if base % LINE == 0 else np.zeros(len(self._memory) + 8, np.int64)
        self.address = -(-self._memory.ctypes.data // LINE) * LINE
        self._cell(THREADS, n)
        self._cell(SPINS, LONG if n <= cores() else SHORT)
        self._locks = [threading.Semaphore(0) for _ in range(n)]
        self._busy = threading.Lock()
        self._threads: list[threading.Thread] = []

    def _cell(self, cell: int, value: int) -> None:
        self._memory[(self.address - self._memory.ctypes.data + cell) // 8] = value

    def _start(self) -> None:
        compiled(serve, (types.int64,) * 3)
        for tid in range(1, self.n):
            thread = threading.Thread(target=self._life, args=(tid,), name=f"ckptkit-{tid}", daemon=True)
            self._threads.append(thread)
            thread.start()
        atexit.register(self.close)

    def _life(self, tid: int) -> None:
        seen = 0
        while True:
            seen = serve(self.address, tid, seen)
            if seen < 0:
                return
            self._locks[tid].acquire()

    def run(self, program: np.ndarray) -> None:
        """Run the steps of `program`, int64 (n_steps, 2): address of the kernel, address of its arguments."""
        with self._busy:
            if self.n > 1 and not self._threads:
                self._start()
            parked = post(self.address, program.ctypes.data, len(program))
            if parked:
                for tid in range(1, self.n):
                    if parked >> min(tid, 62) & 1:
                        self._locks[tid].release()
            work(self.address, 0)

    def close(self) -> None:
        """End the workers."""
        atexit.unregister(self.close)
        if self._threads:
            self._cell(STOP, 1)
            parked = post(self.address, 0, 0)
            for tid in range(1, self.n):
                if parked >> min(tid, 62) & 1:
                    self._locks[tid].release()
            for thread in self._threads:
                thread.join(1.0)
            self._threads = []


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def check_threads(threads: int | None) -> int:
    """The number of threads to use: all cores of this process by default, never more than four times as many."""
    if threads is None:
        return min(cores(), MAX_THREADS)
    if threads < 1:
        raise UnsupportedError("the number of threads must be at least 1", got=f"-t {threads}")
    limit = min(4 * cores(), MAX_THREADS)
    if threads > limit:
        raise UnsupportedError(
            "more threads than this machine can use",
            expected=f"-t 1 to {limit} ({cores()} cores)",
            got=f"-t {threads}",
            hint=f"-t {cores()} is the fastest",
        )
    return threads
