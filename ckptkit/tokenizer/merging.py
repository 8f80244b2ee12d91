"""Pair merging over ids, and merging of very long words in blocks.

A word is merged by repeatedly joining the adjacent pair of lowest rank, the leftmost of equals. Where two neighbouring
tokens, encoded together, stay those two tokens, the word can be cut between them: until something is joined across the
cut, each side merges as it would alone, the order of steps on the two sides depends on nothing else, and whatever is
joined across lies within these two tokens. So a long word is encoded in blocks, joined where this holds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from heapq import heapify, heappop, heappush

SHORT = 24  # symbols up to which looking at every pair again is faster than a heap
BLOCK = 512  # symbols of a block; small, so that a run of one character meets the same block again and again
HOLD = 16  # tokens at a block's end that the text after it may still change

Pairs = Mapping[tuple[int, int], tuple[int, int]]  # (left, right) -> (rank, id of both)


def merge(symbols: list[int], pairs: Pairs) -> list[int]:
    """Merge a word given as ids; ids without a token (negative ones) never merge."""
    return _merge_short(symbols, pairs) if len(symbols) <= SHORT else _merge_heap(symbols, pairs)


def _merge_short(symbols: list[int], pairs: Pairs) -> list[int]:
    word = list(symbols)
    while len(word) > 1:
        best, at, new = -1, -1, -1
        for i in range(len(word) - 1):
            found = pairs.get((word[i], word[i + 1]))
            if found is not None and (at < 0 or found[0] < best):
                best, new = found
                at = i
        if at < 0:
            break
        word[at : at + 2] = [new]
    return word


def _merge_heap(symbols: list[int], pairs: Pairs) -> list[int]:
    """The same in n log n steps: a heap of (rank, place) packed into one int, a linked list of symbols."""
    n = len(symbols)
    word = list(symbols)
    after = list(range(1, n + 1))
    before = list(range(-1, n - 1))
    gone = bytearray(n)
    queue = []
    for i in range(n - 1):
        found = pairs.get((word[i], word[i + 1]))
        if found is not None:
            queue.append(found[0] << 32 | i)
    heapify(queue)
    while queue:
        entry = heappop(queue)
        i, rank = entry & 0xFFFFFFFF, entry >> 32
        j = after[i]
        if gone[i] or j >= n:
            continue
        found = pairs.get((word[i], word[j]))
        if found is None or found[0] != rank:  # one of the two has changed since
            continue
        word[i] = found[1]
        gone[j] = 1
        after[i] = k = after[j]
        if k < n:
            before[k] = i
            right = pairs.get((word[i], word[k]))
            if right is not None:
                heappush(queue, right[0] << 32 | i)
        h = before[i]
        if h >= 0:
            left = pairs.get((word[h], word[i]))
            if left is not None:
                heappush(queue, left[0] << 32 | h)
    return [s for s, g in zip(word, gone, strict=True) if not g]


def encode_blocks(
    n: int,
    encode: Callable[[int, int], list[int]],
    size: Callable[[int], int],
    clean: Callable[[int, int], bool],
    block: int = BLOCK,
) -> list[int]:
    """Encode a word of `n` symbols block by block, exactly as if in one piece.

    `encode(lo, hi)`: ids of that part alone. `size(id)`: its length in symbols. `clean(a, b)`: whether tokens a and b,
    encoded together, stay a and b.
    """
    done: list[int] = []
    lo = 0
    step = block
    while True:
        hi = min(lo + step, n)
        ids = encode(lo, hi)
        back = 1
        while done and ids and not clean(done[-1], ids[0]):
            again, done[-back:] = done[-back:], []
            lo -= sum(map(size, again))
            ids = encode(lo, hi)
            back *= 2
        if hi == n:
            return done + ids
        keep = ids[:-HOLD]
        step = block if keep else step * 2
        done += keep
        lo += sum(map(size, keep))
