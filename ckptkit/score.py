"""Scoring a model on a file: text, a shard of ids, an evaluation set, or another model's saved log-probabilities."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .checkpoint import Checkpoint
from .errors import FormatError, UnsupportedError
from .files import File, check_outputs, read_head, replacing
from .formats import llmc_data
from .runtime import perplexity_html
from .runtime.hellaswag import ChoiceReport, choose
from .runtime.kl_divergence import KlReport, compare
from .runtime.logits_file import LogitsFile, LogitsWriter
from .runtime.perplexity import N_BATCH, PplReport, Scored, Sink, check_context, score
from .runtime.perplexity_tokens import PerToken, write_lines
from .runtime.perplexity_windows import MODES, TOGETHER, IdSource, Plan, ints, plan
from .tokenizer import Tokenizer

Progress = Callable[[str, int, int, float], object]  # mode, windows done, windows in all, perplexity so far
DEFAULT_CTX = 512  # as llama-perplexity, where the model's context is not shorter


@dataclass(frozen=True)
class PplOptions:
    """`n_ctx` None: 512, or the model's context if shorter. `chunks` -1: all. `stride` None: half of n_ctx."""

    mode: str = "llama"  # llama, full, stride, docs, or all: the first three
    n_ctx: int | None = None
    chunks: int = -1
    stride: int | None = None
    mtp_head: int = 0
    n_batch: int = N_BATCH
    per_token: Path | None = None
    html: Path | None = None
    save_logits: Path | None = None
    force: bool = False


@dataclass(frozen=True)
class Source:
    """What is scored: text bytes, or ids as they are in a shard."""

    path: Path
    text: bytes | None
    ids: IdSource | None

    def close(self) -> None:
        """Close the shard's file."""
        if isinstance(self.ids, llmc_data.Tokens):
            self.ids.close()


def read_source(path: Path) -> Source:
    """Text, or a token shard: by its magic number, or (the shards of April 2024) as a .bin file of nothing but ids."""
    head, size = read_head(path)
    if llmc_data.is_eval(head):
        raise UnsupportedError(
            "an evaluation set has questions, not text", path=path, expected="text or a token shard",
            hint="score it with --hellaswag",
        )  # fmt: skip
    if llmc_data.is_shard(head):
        return Source(path, None, llmc_data.read_tokens(path))
    if path.suffix == ".bin" and b"\0" in head:
        try:
            return Source(path, None, llmc_data.read_tokens(path))
        except FormatError as e:
            raise FormatError(
                "neither text nor a token shard", path=path, offset=e.offset, expected=e.expected, got=e.got
            ) from None
    file = File(path)
    try:
        return Source(path, file.read(0, size).tobytes(), None)
    finally:
        file.close()


def n_ctx_of(model: Scored, options: PplOptions) -> int:
    """The window length that these options mean for this model."""
    if options.n_ctx is not None:
        return options.n_ctx
    known = [c for c in (model.config.context_length, model.context) if c]
    return min(DEFAULT_CTX, *known)


def plans(model: Scored, source: Source, options: PplOptions) -> list[tuple[Plan, Any]]:
    """What the options ask for as plans, each with its ids; `all` stands for three. Every refusal comes from here."""
    if options.mode not in MODES:
        raise UnsupportedError("unknown mode", at="--mode", expected=", ".join(MODES), got=options.mode)
    n_ctx = n_ctx_of(model, options)
    if n_ctx < 1:
        raise UnsupportedError("a window needs tokens", at="-c", expected="at least 1", got=n_ctx)
    check_context(model, n_ctx)
    tokenizer = model.tokenizer
    bos = tokenizer.bos if tokenizer is not None and tokenizer.add_bos else None
    out = []
    known: dict[bytes, IdSource] = {}
    for mode in TOGETHER if options.mode == "all" else (options.mode,):
        ids = _ids(source, mode, tokenizer, bos, known)
        chunks = options.chunks
        if options.mode == "all" and mode == "stride" and chunks > 0:
            # Side by side, the modes score the same piece of text.
            chunks = 1 + (chunks - 1) * n_ctx // max(options.stride or n_ctx // 2, 1)
        try:
            made = plan(mode, ids, n_ctx, chunks=chunks, stride=options.stride, bos=bos, ahead=options.mtp_head)
        except UnsupportedError as e:
            e.path = source.path if e.path is None and not e.at else e.path
            raise
        out.append((made, ids))
    return out


def _ids(source: Source, mode: str, tokenizer: Tokenizer | None, bos: int | None, known: dict[bytes, IdSource]) -> Any:
    """The ids that a mode scores. Text gets BOS once at its start, if the model adds it; a shard is taken as it is."""
    if source.text is None:
        if mode == "docs":
            raise UnsupportedError(
                "documents are lines of a text", path=source.path, expected="text", got="a token shard"
            )
        return source.ids
    if tokenizer is None:
        raise UnsupportedError(
            "the model has no tokenizer, so text cannot be scored", path=source.path, expected="a token shard",
            hint="pass --tokenizer FILE",
        )  # fmt: skip
    if mode == "docs":
        return _documents(source, tokenizer)
    # Only llama-perplexity drops a final newline, and only one.
    data = source.text.removesuffix(b"\n") if mode == "llama" else source.text
    if data not in known:
        ids = tokenizer.encode(data) if data else []
        known[data] = ints([bos, *ids] if bos is not None and ids else ids)
    return known[data]


def _documents(source: Source, tokenizer: Tokenizer) -> list[Any]:
    first = tokenizer.bos if tokenizer.bos is not None else tokenizer.eos
    last = tokenizer.eos if tokenizer.eos is not None else tokenizer.bos
    if first is None or last is None:
        raise UnsupportedError("the vocabulary has no token that begins a document", path=source.path, at="--mode docs")
    lines = (line.strip() for line in (source.text or b"").split(b"\n"))
    return [ints([first, *tokenizer.encode(line), last]) for line in lines if line]


def run(
    model: Scored, path: Path, options: PplOptions | None = None, progress: Progress | None = None
) -> list[PplReport]:
    """Score a text file or token shard by the mode asked for; one report, or three for mode all.

    Raises UnsupportedError for what cannot be scored before anything is, FormatError for a broken shard and OutputError
    for an output that cannot be written.
    """
    options = options or PplOptions()
    outputs = [p for p in (options.per_token, options.html, options.save_logits) if p is not None]
    source = read_source(path)
    try:
        check_outputs(outputs, (path, *_model_paths(model)), options.force)
        made = plans(model, source, options)
        if options.save_logits is not None and ("llama" not in [p.mode for p, _ in made] or options.mtp_head):
            raise UnsupportedError(
                "log-probabilities are saved in mode llama",
                at="--save-all-logits",
                expected="--mode llama",
                got=options.mode,
            )
        if isinstance(source.ids, llmc_data.Tokens):
            source.ids.check(model.config.vocab_size)
        return _score(model, source, made, options, progress)
    finally:
        source.close()


def _score(
    model: Scored, source: Source, made: Sequence[tuple[Plan, Any]], options: PplOptions, progress: Progress | None
) -> list[PplReport]:
    notes = _notes(model, source, options)
    detail = [PerToken(model.threads) if options.per_token or options.html else None for _ in made]
    reports = []
    with ExitStack() as stack:
        lines = stack.enter_context(replacing(options.per_token)) if options.per_token else None
        for (p, ids), keep in zip(made, detail, strict=True):
            sinks: list[Sink] = [] if keep is None else [keep]
            with ExitStack() as inner:
                if options.save_logits is not None and p.mode == "llama":
                    out = inner.enter_context(replacing(options.save_logits))
                    sinks.append(LogitsWriter(out, ids, p.n_ctx, model.config.vocab_size, p.count, model.threads))
                told = None if progress is None else _named(progress, p.mode)
                reports.append(score(model, p, n_batch=options.n_batch, sinks=sinks, progress=told, notes=notes))
            if lines is not None and keep is not None:
                write_lines(lines, keep.columns(), model.tokenizer, p.mode)
        if options.html is not None:
            parts = [(r, keep.columns()) for r, keep in zip(reports, detail, strict=True) if keep is not None]
            out = stack.enter_context(replacing(options.html))
            perplexity_html.write(out, _title(model, source), parts, model.tokenizer)
    return reports


def _title(model: Scored, source: Source) -> str:
    of = "".join(f" of {path.name}" for path in _model_paths(model)[:1])
    return f"Perplexity{of} on {source.path.name}"


def _model_paths(model: Scored) -> tuple[Path, ...]:
    ck: Checkpoint | None = getattr(model, "checkpoint", None)  # a model made by hand comes from no file
    return ck.source.paths if ck is not None else ()


def _named(progress: Progress, mode: str) -> Callable[[int, int, float], object]:
    return lambda done, count, ppl: progress(mode, done, count, ppl)


def _notes(model: Scored, source: Source, options: PplOptions) -> list[str]:
    notes = []
    if source.text is not None and model.tokenizer is not None and model.tokenizer.add_eos:
        notes.append("the vocabulary asks for an end token after a text; none is scored")
    if options.stride is not None and options.mode not in ("stride", "all"):
        notes.append(f"a stride means nothing in mode {options.mode} and was not used")
    return notes


def kl(
    model: Scored,
    base: Path,
    path: Path | None = None,
    options: PplOptions | None = None,
    progress: Progress | None = None,
) -> KlReport:
    """Compare a model with the log-probabilities that another run saved, on the tokens saved with them.

    `path`: the text or shard that they should be of; another one is refused.
    """
    options = options or PplOptions()
    if options.n_ctx is not None and options.n_ctx < 1:
        raise UnsupportedError("a window needs tokens", at="-c", expected="at least 1", got=options.n_ctx)
    tokenizer = model.tokenizer
    bos = tokenizer.bos if tokenizer is not None and tokenizer.add_bos else None
    told = None if progress is None else _named(progress, "llama")
    with LogitsFile(base) as saved:
        saved.check(model.config.vocab_size)
        if options.n_ctx is not None and options.n_ctx != saved.n_ctx:
            raise UnsupportedError(
                "the log-probabilities are of windows of another length", path=base,
                expected=options.n_ctx, got=saved.n_ctx,
                hint=f"pass -c {saved.n_ctx}, or leave it out",
            )  # fmt: skip
        if path is not None:
            source = read_source(path)
            try:
                ids = _ids(source, "llama", tokenizer, bos, {})
                saved.check(model.config.vocab_size, np.asarray(ids[: len(saved.ids)], np.int32))
            finally:
                source.close()
        return compare(model, saved, bos=bos, n_batch=options.n_batch, progress=told)


def hellaswag(
    model: Scored, path: Path, limit: int | None = None, n_batch: int = N_BATCH, progress: Progress | None = None
) -> ChoiceReport:
    """Answer the questions of an llm.c evaluation set (HellaSwag, MMLU); `limit`: only the first so many."""
    told = None if progress is None else _named(progress, "hellaswag")
    return choose(model, llmc_data.read_eval(path), limit=limit, n_batch=n_batch, progress=told)
