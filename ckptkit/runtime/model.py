"""A model that runs: one forward for prompts, single tokens and batches, with the kernel module it is given.

Nothing in `forward` depends on values that change from token to token: ids, positions, sequences and the rows whose
logits are wanted are read from small int32 buffers of the batch. So one token's steps are captured once per cache and
then replayed.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import partial
from types import ModuleType, TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ..arch import ARCHS
from ..checkpoint import Checkpoint
from ..errors import UnsupportedError
from . import rope
from .kv_cache import KVCache, cache_bytes, kv_dtype
from .weights import LoadReport, Weights, load_weights

if TYPE_CHECKING:
    from .generate import Generation

Floats = npt.NDArray[np.float32]
SCORE_BYTES = 256 << 20  # of logits that scoring holds at a time


@dataclass
class Batch:
    """n tokens of any sequences: buffers that kernels read, and scratch rows of that many tokens.

    `rows` (m,) are the tokens whose logits are wanted.
    """

    work: Any
    tokens: Any  # int32 (n,)
    pos: Any  # int32 (n,): position in its sequence
    seq: Any  # int32 (n,): which sequence of the cache
    rows: Any  # int32 (m,)
    x: Any  # (n, n_embd)
    qkv: Any  # (n, q + 2 kv)
    heads: Any  # (n, q)
    h: Any  # (n, n_ff)
    logits: Any  # (m, vocab_size)


def forward(m: Model, cache: KVCache, b: Batch, head: Any) -> None:
    """Run the batch's tokens through the model: extends what `cache` holds, leaves b.logits (m, vocab_size)."""
    k, w, pairing = m.kernels, m.weights, m.config.rope_pairing
    k.embed(b.x, w.token_embd, w.position_embd, b)  # (n, n_embd)
    if w.embd_norm is not None:
        k.norm(b.x, b.x, w.embd_norm, b)
    for i, block in enumerate(w.blocks):
        k.norm_linear(b.qkv, b.x, block.attn_norm, block.qkv, b)  # (n, q + 2 kv)
        k.attention(b.heads, b.qkv, m.rope_table, pairing, cache.k[i], cache.v[i], b)  # (n, q)
        k.linear_add(b.x, b.heads, block.attn_output, b)
        k.norm_ffn(b.h, b.x, block.ffn_norm, block.ffn, m.arch.act, b)  # (n, n_ff)
        k.linear_add(b.x, b.h, block.ffn_down, b)
    if len(b.rows):
        k.norm_linear(b.logits, b.x, w.output_norm, head, b, b.rows)  # (m, vocab_size)


class Model:
    """A loaded checkpoint on a device. A context manager; `close` ends its threads and lets the file go."""

    def __init__(
        self,
        ck: Checkpoint,
        kernels: ModuleType,
        device: str,
        precision: str,
        threads: int,
        context: int,
        type_k: str,
        type_v: str,
        message: Callable[[str], None] | None,
    ) -> None:
        self.checkpoint, self.config, self.arch, self.tokenizer = ck, ck.config, ARCHS[ck.config.arch], ck.tokenizer
        self.kernels, self.device, self.precision, self.threads = kernels, device, precision, threads
        self.context, self.type_k, self.type_v = context, type_k, type_v
        c = self.config
        self.load_report = LoadReport(threads=threads, precision=precision)
        self.weights: Weights = load_weights(ck, kernels, self.load_report)
        table = rope.table(ck, context)
        self.rope_table = None if table is None else kernels.upload(table)
        self.work = kernels.workspace(
            threads=threads,
            fast=precision == "fast",
            max_tokens=kernels.MAX_TOKENS,  # of one pass; longer prompts go through in pieces
            widest=max(c.n_embd, c.n_ff, c.n_head * c.head_dim),
            head_dim=c.head_dim,
            n_head=c.n_head,
            n_kv_head=c.n_kv_head,
            context=context,
            message=message,
        )
        self._batches: dict[tuple[int, int], Batch] = {}
        self._scored: Any = None  # logits (rows, vocab_size) that scoring works on
        self._heads: dict[int, Any] = {0: self.weights.output}
        self._closed = False
        kernels.describe(self.work, self.load_report)

    def new_cache(self, n_seq: int = 1, context: int | None = None) -> KVCache:
        """An empty cache for `n_seq` sequences of up to `context` tokens (the model's, by default)."""
        c = self.config
        context = self.context if context is None else context
        if not 1 <= context <= self.context:
            raise UnsupportedError(
                "the cache's context is out of range", expected=f"1 to {self.context:,}", got=context
            )
        sizes = (c.n_layer, n_seq, c.n_kv_head, context, c.head_dim)
        self.kernels.check_fits(
            cache_bytes(*sizes, self.type_k, self.type_v), f"cache for {n_seq} x {context:,} tokens"
        )
        return KVCache(self.kernels, *sizes, self.type_k, self.type_v)

    def forward(
        self, ids: Sequence[int] | npt.NDArray[Any], cache: KVCache | None = None, logits: str = "all", head: int = 0
    ) -> Floats:
        """Logits after each of `ids`, (n, vocab_size), or with logits="last" (vocab_size,) after the last.

        The ids follow what `cache` holds and are added to it; without one they stand alone. `head` is the prediction
        head (0 predicts the next token, j the one j further on).
        """
        if logits not in ("all", "last"):
            raise UnsupportedError("unknown choice of logits", at="logits", expected="all or last", got=logits)
        ids = np.asarray(ids, np.int64)
        if cache is None:
            cache = self.new_cache(1, max(min(len(ids), self.context), 1))
        n, start = len(ids), int(cache.length[0])
        if n == 1 and logits == "last":
            return self._one(int(ids[0]), start, cache, head)
        positions = np.arange(start, start + n)
        rows = np.arange(n) if logits == "all" else np.array([n - 1])
        out = self.forward_batch(ids, positions, np.zeros(n, np.int64), cache, rows, head)
        return out if logits == "all" else out[0]

    def forward_batch(
        self,
        tokens: Sequence[int] | npt.NDArray[Any],
        pos: Sequence[int] | npt.NDArray[Any],
        seq: Sequence[int] | npt.NDArray[Any],
        cache: KVCache,
        rows: Sequence[int] | npt.NDArray[Any],
        head: int = 0,
    ) -> Floats:
        """Logits (len(rows), vocab_size) of token indices `rows` (ascending), for tokens of any sequences of the cache.

        Token i goes to position pos[i] of sequence seq[i]; a sequence's tokens come in the order of their positions.
        """
        tokens, pos, seq, rows = (np.asarray(a, np.int64) for a in (tokens, pos, seq, rows))
        self._check(tokens, pos, seq, cache)
        out = np.empty((len(rows), self.config.vocab_size), np.float32)
        done = 0
        step = self.kernels.MAX_TOKENS
        for lo in range(0, len(tokens), step):
            hi = min(lo + step, len(tokens))
            here = rows[(rows >= lo) & (rows < hi)] - lo
            b = self._batch(hi - lo, len(here))
            k = self.kernels
            k.write(b.tokens, tokens[lo:hi])
            k.write(b.pos, pos[lo:hi])
            k.write(b.seq, seq[lo:hi])
            k.write(b.rows, here)
            self._run(b, cache, head, int(pos[lo:hi].max()) + 1)
            out[done : done + len(here)] = k.download(b.logits)
            done += len(here)
        self._grow(cache, pos, seq)
        return out

    @staticmethod
    def _grow(cache: KVCache, pos: Any, seq: Any) -> None:
        """Count tokens that were run as part of what the cache holds."""
        for s in np.unique(seq):
            cache.length[s] = max(int(cache.length[s]), int(pos[seq == s].max()) + 1)

    def score_batch(
        self,
        tokens: Sequence[int] | npt.NDArray[Any],
        pos: Sequence[int] | npt.NDArray[Any],
        seq: Sequence[int] | npt.NDArray[Any],
        cache: KVCache,
        rows: Sequence[int] | npt.NDArray[Any],
        targets: Sequence[int] | npt.NDArray[Any],
        head: int = 0,
    ) -> npt.NDArray[np.float64]:
        """-log p (len(rows),) of targets[k] after token index rows[k]; the rest as for `forward_batch`.

        No more than SCORE_BYTES of logits are there at a time, and they stay on the device. Not finite where they are
        not.
        """
        tokens, pos, seq, rows, targets = (np.asarray(a, np.int64) for a in (tokens, pos, seq, rows, targets))
        self._check(tokens, pos, seq, cache)
        out, k, weight = np.empty(len(rows), np.float64), self.kernels, self._head(head)
        most = max(1, SCORE_BYTES // (4 * self.config.vocab_size))
        for lo in range(0, len(tokens), k.MAX_TOKENS):
            hi = min(lo + k.MAX_TOKENS, len(tokens))
            first, last = np.searchsorted(rows, (lo, hi))
            n = int(last - first)
            b = self._batch(hi - lo, 0)
            for buffer, values in ((b.tokens, tokens), (b.pos, pos), (b.seq, seq)):
                k.write(buffer, values[lo:hi])
            self.work.reach = k.bucket(int(pos[lo:hi].max()) + 1, cache.context)
            wanted, asked = k.empty((n,), np.int32), k.empty((n,), np.int32)
            k.write(wanted, rows[first:last] - lo)
            k.write(asked, targets[first:last])
            scores = k.empty((n,), np.float64)
            if n and (self._scored is None or len(self._scored) < min(n, most)):
                self._scored = None  # freed first
                self._scored = k.empty((min(n, most), self.config.vocab_size), np.float32)
            k.run(partial(forward, self, cache, b, weight), self.work, (hi - lo, 0, head))
            for at in range(0, n, most):
                end = min(at + most, n)
                logits = self._scored[: end - at]
                step = partial(k.norm_linear, logits, b.x, self.weights.output_norm, weight, b, wanted[at:end])
                k.run(step, self.work, ("head", end - at, head))
                k.nll(scores[at:end], logits, asked[at:end], b)
            out[first:last] = k.download(scores)
        self._grow(cache, pos, seq)
        return out

    def _one(self, token: int, position: int, cache: KVCache, head: int) -> Floats:
        """The same for one token of sequence 0, without what only batches need: this is what decoding repeats."""
        if self._closed or not 0 <= token < self.config.vocab_size:
            self._check(np.array([token]), np.array([position]), np.array([0]), cache)
        cache.require(0, position)
        b, k = self._batch(1, 1), self.kernels
        for buffer, value in ((b.tokens, token), (b.pos, position), (b.seq, 0), (b.rows, 0)):
            k.write(buffer, [value])
        self._run(b, cache, head, position + 1)
        cache.length[0] = position + 1
        return np.array(k.download(b.logits)[0])

    def _run(self, b: Batch, cache: KVCache, head: int, reach: int) -> None:
        """One pass; no position lies at or beyond `reach`.

        Steps of a token, or of a token of several sequences, are captured once for each size of context.
        """
        k = self.kernels
        self.work.reach = k.bucket(reach, cache.context)
        if not self._is_step(len(b.x), len(b.rows)):
            k.run(lambda: forward(self, cache, b, self._head(head)), self.work, (len(b.x), len(b.rows), head))
            return
        key = (len(b.x), len(b.rows), head, self.work.reach)
        if key not in cache.graphs:
            cache.graphs[key] = k.capture(lambda: forward(self, cache, b, self._head(head)), self.work)
        k.replay(cache.graphs[key], self.work)

    def _require_open(self) -> None:
        if self._closed:
            raise UnsupportedError("the model is closed")

    def _check(self, tokens: Any, pos: Any, seq: Any, cache: KVCache) -> None:
        self._require_open()
        if not len(tokens):
            raise UnsupportedError(
                "there are no tokens to run", hint="an empty prompt needs at least one token, such as BOS"
            )
        low, high = int(tokens.min()), int(tokens.max())
        if low < 0 or high >= self.config.vocab_size:
            raise UnsupportedError(
                "a token id is not in the vocabulary",
                expected=f"0 to {self.config.vocab_size - 1:,}",
                got=low if low < 0 else high,
            )
        for s in np.unique(seq):
            here = pos[seq == s]
            cache.require(int(s), int(here.max()))
            cache.require(int(s), int(here.min()))

    def _is_step(self, n: int, m: int) -> bool:
        """Whether decoding repeats batches of n tokens and m rows of logits: their buffers and graphs are kept."""
        return n == 1 or n == m <= self.kernels.STEP_ROWS

    def _batch(self, n: int, m: int) -> Batch:
        """Buffers for n tokens of which m rows give logits; the ones for steps are kept, and the last of many."""
        if (n, m) in self._batches:
            return self._batches[n, m]
        k, c = self.kernels, self.config
        q, kv = c.n_head * c.head_dim, c.n_kv_head * c.head_dim
        f32 = np.float32
        b = Batch(
            self.work,
            k.empty((n,), np.int32),
            k.empty((n,), np.int32),
            k.empty((n,), np.int32),
            k.empty((m,), np.int32),
            k.empty((n, c.n_embd), f32),
            k.empty((n, q + 2 * kv), f32),
            k.empty((n, q), f32),
            k.empty((n, c.n_ff), f32),
            k.empty((m, c.vocab_size), f32),
        )
        self._batches = {key: kept for key, kept in self._batches.items() if self._is_step(*key)}
        self._batches[n, m] = b
        return b

    def _head(self, j: int) -> Any:
        if j not in self._heads:
            t = self.checkpoint.tensors.get(f"mtp.{j}.weight")
            if t is None:
                raise UnsupportedError(
                    "the model has no such prediction head", expected=f"0 to {self.config.n_mtp_head - 1}", got=j
                )
            self._heads[j] = self.kernels.place([t], None)
        return self._heads[j]

    def prepare(self, cache: KVCache, samplers: Sequence[Any], n_prompt: int) -> None:
        """Make ready what decoding after prompts of `n_prompt` tokens needs; without it the first step does."""
        self._require_open()
        self.kernels.ready(self, cache, samplers, n_prompt)

    def decode(self, cache: KVCache, token: int, sampler: Any, history: list[int]) -> Generator[int, None, None]:
        """Once the prompt is in the cache: feed `token`, yield what `sampler.pick(logits, history)` takes, feed that.

        `history`: all tokens so far, to which the caller adds each that it is given.
        """
        self._require_open()
        for picked in self.kernels.own_steps(self, cache, [0], [token], [sampler], [history]) or ():
            for _, token in picked:
                yield token
        while True:
            token = int(sampler.pick(self.forward([token], cache, logits="last"), history))
            yield token

    def decode_rows(
        self,
        cache: KVCache,
        sequences: Sequence[int],
        samplers: Sequence[Any],
        histories: Sequence[list[int]],
    ) -> Generator[list[tuple[int, int]], None, None]:
        """The same for several sequences of the cache side by side; yields [(row, token)] after every step.

        The last token of each one's history is fed first. Each row comes out as it would alone (exactly so for up to 16
        rows on a GPU).
        """
        self._require_open()
        tokens = [history[-1] for history in histories]
        yield from self.kernels.own_steps(self, cache, sequences, tokens, samplers, histories) or ()
        while True:
            positions = [int(cache.length[s]) for s in sequences]
            logits = self.forward_batch(tokens, positions, sequences, cache, np.arange(len(tokens)))
            tokens = [int(s.pick(z, h)) for s, z, h in zip(samplers, logits, histories, strict=True)]
            yield list(enumerate(tokens))

    def generate(
        self, prompt: str | bytes | Sequence[int], emit: Callable[[str], object] | None = None, **how: Any
    ) -> Generation:
        """Continue a text or ids; `how`: fields of GenerateOptions and Sampling (n_predict, stop, temp, seed, ...).

        `emit` hears the text as it comes. A text is encoded by the model's tokenizer, with BOS where it adds one.
        """
        from . import generate as engine
        from .sampler import Sampling

        sampling = {k: how.pop(k) for k in list(how) if k in Sampling.__dataclass_fields__}
        options = engine.GenerateOptions(sampling=Sampling(**sampling), **how)
        if isinstance(prompt, str | bytes):
            if self.tokenizer is None:
                raise UnsupportedError("the model has no tokenizer", hint="give ids, or open it with tokenizer=FILE")
            prompt = self.tokenizer.encode_prompt(prompt, special=options.special)
        return engine.generate(self, prompt, options, emit)

    def close(self) -> None:
        """End the threads, free the device, close the file."""
        if not self._closed:
            self._closed = True
            self._batches.clear()
            self._heads.clear()
            self._scored = self.rope_table = None
            del self.weights
            self.work.close()
            self.checkpoint.close()

    def __enter__(self) -> Model:
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def check_kv_types(type_k: str, type_v: str) -> None:
    """Refuse cache types that there are none of."""
    for name in (type_k, type_v):
        kv_dtype(name)
