"""Two tokenizers compared by what they do: the bytes of every token, special ids, and how they cut the same texts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..errors import CkptError
from ..tokenizer import Tokenizer

TEXTS, LENGTH = 16, 24  # texts made of random tokens, tokens in each
ALWAYS = ("Hello world, it's 12345!\n\n\tTabs  and   spaces", "naïve café Ünïcode 世界 🙂", "")


def compare_tokenizers(
    a: Tokenizer | None,
    b: Tokenizer | None,
    differ: Callable[[str, Any, Any], object],
    note: Callable[[str], object],
) -> None:
    """Call `differ` with (what, of A, of B) for every disagreement, `note` where there is nothing to compare."""
    if a is None or b is None:
        if a is not b:
            note(f"{'A' if a is None else 'B'} has no tokenizer, so tokenizers were not compared")
        return
    if a.vocab_size != b.vocab_size:
        differ("tokenizer vocab_size", a.vocab_size, b.vocab_size)
    n = min(a.vocab_size, b.vocab_size)
    other = [i for i in range(n) if a.token_bytes(i) != b.token_bytes(i)]
    if other:
        i = other[0]
        differ(f"tokenizer: {len(other):,} tokens, first {i}", repr(a.token_bytes(i)), repr(b.token_bytes(i)))
    for role in dict.fromkeys((*a.ids, *b.ids)):
        if role in ("bos", "eos", "unk") and a.ids.get(role) != b.ids.get(role):
            differ(f"tokenizer {role}", a.ids.get(role), b.ids.get(role))
    for flag in ("add_bos", "add_eos"):
        if getattr(a, flag) != getattr(b, flag):
            differ(f"tokenizer {flag}", getattr(a, flag), getattr(b, flag))
    if (a.chat_template or None) != (b.chat_template or None):
        note("the chat templates differ")
    if not other:
        _cuts(a, b, n, differ, note)


def _cuts(
    a: Tokenizer, b: Tokenizer, n: int, differ: Callable[[str, Any, Any], object], note: Callable[[str], object]
) -> None:
    """Encode texts by both. The same tokens with other merges, or another splitter, show here and nowhere else."""
    random = np.random.default_rng(7)
    texts = [a.decode_bytes(random.integers(0, n, LENGTH).tolist()) for _ in range(TEXTS)]
    for text in (*(t.encode() for t in ALWAYS), *texts):
        try:
            ids_a = a.encode(text)
        except CkptError:
            continue  # a text that the vocabulary cannot spell
        try:
            ids_b = b.encode(text)
        except CkptError as e:
            differ("tokenizer: ids of a text", ids_a[:8], str(e).splitlines()[0])
            return
        if ids_a != ids_b:
            k = next((k for k, (x, y) in enumerate(zip(ids_a, ids_b, strict=False)) if x != y), 0)
            what = f"tokenizer: ids of {text[:24]!r} from number {k}"
            differ(what, ids_a[k : k + 4], ids_b[k : k + 4])
            return
    if (a.kind, a.pre) != (b.kind, b.pre):
        note(f"tokenizers {a.kind} {a.pre} and {b.kind} {b.pre} cut every text tried alike".replace("  ", " "))
