"""Trained files on the card beside the CPU: the same greedy tokens, and what `fast` costs in nll and first choices."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import ckptkit.runtime as runtime
from ckptkit import convert, formats
from ckptkit.checkpoint import Checkpoint
from ckptkit.errors import CkptError
from ckptkit.runtime.log_softmax import nll_rows

from .gpu_forward import greedy

SUFFIXES = (".bin", ".gguf", ".json", ".safetensors")
CLOSE = 1e-3  # a token may differ where the two largest logits are closer than that
TYPES = ("f32", "bf16", "f16", "q8_0", "q4_0", "q4_1", "q4_k_m")


def models(places: list[Path]) -> Iterator[tuple[Path, Checkpoint]]:
    """Every file among `places`, and in folders of them, that holds a model which runs."""
    files = [f for p in places for f in (sorted(p.rglob("*")) if p.is_dir() else [p]) if f.suffix in SUFFIXES]
    for path in files:
        try:
            ck = formats.open(path)
            runtime.load(ck, "cpu").close()
        except CkptError:
            continue
        yield path, formats.open(path)


def prompt_of(ck: Checkpoint) -> list[int]:
    """Eight random ids, fewer where the context is short."""
    c = ck.config
    return [int(i) for i in np.random.default_rng(7).integers(0, c.vocab_size, min(8, c.context_length // 4))]


def same_tokens(say: Callable[[str], Any], places: list[Path]) -> bool:
    """Greedy ids of min(128, context - prompt) tokens on both devices; True if none differs without a near tie."""
    good, count = True, 0
    for path, ck in models(places):
        prompt = prompt_of(ck)
        n = min(128, ck.config.context_length - len(prompt))
        context = min(ck.config.context_length, len(prompt) + n)
        with runtime.load(ck, "cpu", context=context) as cpu:
            want = greedy(cpu, np.array(prompt), n)
            with runtime.load(formats.open(path), "cuda", context=context) as card:
                got = greedy(card, np.array(prompt), n)
            agree = next((i for i in range(n) if got[i] != want[i]), n)
            line = f"{path.name}: {agree} of {n} greedy tokens equal"
            if agree < n:
                top = np.sort(cpu.forward(prompt + want[:agree], logits="last").astype(np.float64))[-2:]
                gap = float(top[1] - top[0])
                line += f", then the two largest logits are {gap:.1e} apart"
                good &= gap < CLOSE
            say(line)
            count += 1
    say(f"greedy: {count} files, {'none differs without a near tie' if good else 'FAILED'}")
    return good and count > 0


def scored(model: Any, windows: Any) -> tuple[Any, Any]:
    """(nll, first choices) of the second half of every window."""
    nll, first = [], []
    for ids in windows:
        half = len(ids) // 2
        logits = model.forward(ids[:-1])[half:]
        nll.append(nll_rows(logits, ids[half + 1 :], 4))
        first.append(logits.argmax(1))
    return np.concatenate(nll), np.concatenate(first)


def precisions(
    say: Callable[[str], Any], path: Path, text: Path, types: Sequence[str], n_windows: int = 20, n_ctx: int = 512
) -> bool:
    """exact and fast on a text, for the file's weights converted to each type; True if fast keeps its limits."""
    good = True
    with tempfile.TemporaryDirectory() as folder:
        for type in types:
            file = Path(folder) / f"{type}.gguf"
            convert(str(path), str(file), type=type)
            ck = formats.open(file)
            assert ck.tokenizer is not None
            ids = np.array(ck.tokenizer.encode(text.read_bytes()[: 8 * n_windows * n_ctx]))[: n_windows * n_ctx]
            windows = ids.reshape(-1, n_ctx)
            results = {}
            for precision in ("exact", "fast"):
                with runtime.load(formats.open(file), "cuda", precision, context=n_ctx) as model:
                    results[precision] = scored(model, windows)
            (a, first_a), (b, first_b) = results["exact"], results["fast"]
            change, same = float(b.mean() - a.mean()), float((first_a == first_b).mean())
            good &= abs(change) <= 1e-3 and same >= 0.97
            say(
                f"{path.stem} as {type}, {len(windows)} windows of {n_ctx}: exact nll {a.mean():.6f} "
                f"(perplexity {np.exp(a.mean()):.4f}); fast {change:+.1e} (limit 1e-3), "
                f"the same first choice {same:.2%} (at least 97 %)"
            )
            file.unlink()
    return good
