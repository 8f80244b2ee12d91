"""Work in pieces on every core this process may use; numpy, our kernels and file calls let other threads run."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from threading import Lock, Thread
from typing import Any, TypeVar

T = TypeVar("T")


def threads() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def spread(task: Callable[[T], Any], pieces: Sequence[T], most: int | None = None) -> None:
    """Run a task on every piece, the calling thread among those at work; pieces are taken up in their order.

    There is a thread for each core, or `most` of them. After an error no further piece is taken up; once all threads
    have stopped, the earliest piece's error is raised, the same one however many threads there are.
    """
    n = min(most or threads(), len(pieces))
    if n < 2:
        for piece in pieces:
            task(piece)
        return
    waiting, turn = enumerate(pieces), Lock()
    failed: dict[int, BaseException] = {}

    def work() -> None:
        while not failed:
            with turn:
                job = next(waiting, None)
            if job is None:
                return
            try:
                task(job[1])
            except BaseException as e:
                failed[job[0]] = e

    ended: list[None] = []
    news: SimpleQueue[None] = SimpleQueue()

    def other() -> None:
        work()
        ended.append(None)
        news.put(None)

    others = [Thread(target=other, name=f"piece {k}") for k in range(1, n)]
    try:
        for thread in others:
            thread.start()
        work()
    except BaseException as e:  # Ctrl-C, which reaches this thread between two pieces too
        failed[-1] = e
    # not Thread.join, which takes a thread for stopped after Ctrl-C; it may still write to what the caller will close
    while len(ended) < sum(thread.ident is not None for thread in others):
        try:
            news.get()
        except KeyboardInterrupt as e:
            failed[-1] = e
    if failed:
        raise failed[min(failed)]
