"""Merge lists rebuilt from a vocabulary whose ids are in merge order, for files that hold none (llm.c's)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..errors import UnsupportedError


def rebuild(tokens: Sequence[bytes], order: Iterable[int]) -> list[tuple[int, int]]:
    """The pair of ids that makes each token of `order` with more than one byte.

    A token is split by merging with the tokens before it in `order`, as tiktoken does it: what is left is its pair.
    Raises UnsupportedError at the first token that does not come down to two parts.
    """
    rank: dict[bytes, int] = {}
    id_of: dict[bytes, int] = {}
    pairs = []
    for i in order:
        token = tokens[i]
        if len(token) > 1:
            parts = _split(token, rank)
            if len(parts) != 2:
                raise UnsupportedError(
                    f"merges cannot be rebuilt: token {i:,} is not made of two earlier tokens",
                    at=f"token {i:,} ({token!r})",
                    expected="ids in merge order",
                    got=f"{len(parts)} parts" if parts else "a byte without a token",
                    hint="give the merges file of the tokenizer (merges.txt or tokenizer.json)",
                )
            pairs.append((id_of[parts[0]], id_of[parts[1]]))
        rank.setdefault(token, len(rank))
        id_of.setdefault(token, i)
    return pairs


def _split(token: bytes, rank: dict[bytes, int]) -> list[bytes]:
    """Merge the bytes of `token` by rank; [] when one of them has no token."""
    parts = [token[k : k + 1] for k in range(len(token))]
    if any(p not in rank for p in parts):
        return []
    none = len(rank)
    ranks = [rank.get(parts[k] + parts[k + 1], none) for k in range(len(parts) - 1)]
    while len(parts) > 2:
        best = min(ranks)
        if best == none:
            break
        k = ranks.index(best)
        parts[k : k + 2] = [parts[k] + parts[k + 1]]
        del ranks[k]
        if k < len(ranks):
            ranks[k] = rank.get(parts[k] + parts[k + 1], none)
        if k:
            ranks[k - 1] = rank.get(parts[k - 1] + parts[k], none)
    return parts
