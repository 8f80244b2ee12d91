"""Which stores to global memory a load may rely on, after PTX's memory consistency model and dependent launches.

A thread sees what it wrote itself; what its block wrote before a barrier; what another block wrote before a fence and
an atomic, after its own atomic on the same address and a fence; and what earlier launches wrote, but in a dependent
launch that of the launch before it only once it has waited.
"""

from __future__ import annotations

from typing import Any

from .memory import Bytes, Fault

Mark = tuple[int, int, int, int, int]  # launch, block, thread, barriers passed, clock


class Order:
    """The part of the machine that knows what is ordered before what."""

    launch: int
    block: int
    tid: int
    barriers: int
    threads: int

    def begin_launch(self, dependent: bool) -> None:
        """Forget what blocks of the last launch told each other."""
        self.dependent, self.any_waited, self.clock = dependent, not dependent, 0
        self.released: dict[int, list[tuple[int, Any]]] = {}  # address of an atomic: what its users had made visible

    def begin_block(self) -> None:
        """A new block knows of no other."""
        self.waited = [not self.dependent] * self.threads
        self.fences: dict[int, tuple[int, int]] = {}  # thread: clock and barriers passed of its last fence
        self.settled: dict[int, int] = {}  # thread: clock of its last fence that a barrier followed
        self.covered = -1  # what was stored before so many barriers, a fence and a barrier have followed
        self.pending: dict[int, list[tuple[int, Any]]] = {}  # thread: blocks it has met, until it fences
        self.acquired: dict[int, tuple[Any, int, int]] = {}  # block: what is visible of it, who found so and when

    def settle(self) -> None:
        """At a barrier."""
        for tid, (clock, barriers) in self.fences.items():
            self.settled[tid] = max(clock, self.settled.get(tid, -1))
            self.covered = max(self.covered, barriers)

    def fence(self) -> None:
        """fence.acq_rel.gpu."""
        self.clock += 1
        self.fences[self.tid] = (self.clock, self.barriers)
        for block, visible in self.pending.pop(self.tid, ()):
            self.acquired[block] = (visible, self.tid, self.barriers)

    def meet_others(self, address: int) -> None:
        """An atomic: hear of the blocks that were here, and tell of the own."""
        clock, barriers = self.fences.get(self.tid, (-1, -1))
        visible = ({**self.settled, self.tid: clock}, max(self.covered, barriers))
        users = self.released.setdefault(address, [])
        self.pending.setdefault(self.tid, []).extend(u for u in users if u[0] != self.block)
        users.append((self.block, visible))

    def wait(self) -> None:
        """griddepcontrol.wait."""
        self.waited[self.tid] = self.any_waited = True

    def start_next(self) -> None:
        """griddepcontrol.launch_dependents: what the next launch may rely on without waiting must be done."""
        if not self.waited[self.tid]:
            raise Fault("the next kernel is started before the one ahead is waited for")

    def sees(self, mark: Mark) -> bool:
        """Whether what was stored then is there for this thread now."""
        launch, block, tid, barriers, clock = mark
        if launch != self.launch:
            return launch < self.launch - 1 or self.waited[self.tid]
        if block == self.block:
            return tid == self.tid or barriers < self.barriers
        if block not in self.acquired:
            return False
        (fences, covered), by, when = self.acquired[block]
        if by != self.tid and when >= self.barriers:
            return False
        return clock <= fences.get(tid, -1) or barriers < covered

    def loaded(self, space: Bytes, offset: int, size: int, values: list[Any], junk: Any) -> list[Any]:
        """What a load of words gives: junk where a store was not ordered before it."""
        marks, step = space.marks, size // len(values)
        for i in range(len(values)):
            at = offset + i * step
            for near in {at & ~3, at & ~1, at, *range(at, at + step)}:
                mark = marks.get(near)
                if mark is not None and not self.sees(mark):
                    values[i] = junk
        return values

    def storing(self, space: Bytes, offset: int, same: bool) -> None:
        """Before a store of a word, or less, whose bits are the `same` as before or not."""
        if not self.waited[self.tid]:
            raise Fault("a store before the kernel ahead has been waited for")
        mark = space.marks.get(offset)
        if mark is not None and not same and not self.sees(mark):
            raise Fault(
                f"race in global memory: block {self.block}, thread {self.tid} stores at offset {offset:,} over what "
                f"block {mark[1]}, thread {mark[2]} stored"
            )
        self.clock += 1
        space.marks[offset] = (self.launch, self.block, self.tid, self.barriers, self.clock)
