"""Two checkpoints brought to one form, so that files which say the same in other words compare equal."""

from __future__ import annotations

from dataclasses import replace

from ..arch import ARCHS, PADDING, as_arch, is_neutral, template, with_pairing
from ..checkpoint import Checkpoint
from ..errors import LossyError, UnsupportedError
from .tensors import same_values

TOKENS, OUTPUT = "token_embd.weight", "output.weight"


def common_form(a: Checkpoint, b: Checkpoint) -> tuple[Checkpoint, Checkpoint, list[str]]:
    """Both in one arch and pairing, a tied output stored twice and zero padding rows gone; and what was done.

    Foreign archs stay as they are, and so does what cannot be brought together: structure will say it.
    """
    if a.config.arch not in ARCHS or b.config.arch not in ARCHS:
        return a, b, []
    done: list[str] = []
    a, b = _one_arch(a, b, done)
    pairing = a.config.rope_pairing
    if pairing and b.config.rope_pairing and pairing != b.config.rope_pairing:
        done.append(f"q and k of B permuted from {b.config.rope_pairing} to {pairing} rotary pairs")
        b = with_pairing(b, pairing)
    out = []
    for side, ck in (("A", a), ("B", b)):
        ck = _without_padding(ck, side, done)
        out.append(_tied(ck, side, done))
    return out[0], out[1], done


def _one_arch(a: Checkpoint, b: Checkpoint, done: list[str]) -> tuple[Checkpoint, Checkpoint]:
    if a.config.arch == b.config.arch:
        return a, b
    try:
        changed, said = as_arch(b, a.config.arch)
        done += [f"B taken as {a.config.arch}", *(f"B: {s}" for s in said)]
        return a, changed
    except (LossyError, UnsupportedError):
        pass
    try:
        changed, said = as_arch(a, b.config.arch)
        done += [f"A taken as {b.config.arch}", *(f"A: {s}" for s in said)]
        return changed, b
    except (LossyError, UnsupportedError):
        return a, b


def _without_padding(ck: Checkpoint, side: str, done: list[str]) -> Checkpoint:
    """Padding rows are no part of the model; whether they are zero is said, since some formats cannot keep others."""
    names = [n for n in ck.tensors if template(n) in PADDING]
    for name in names:
        t = ck.tensors[name]
        kind = "zero" if is_neutral(name, t) else "trained"
        done.append(f"{side} has {t.n_rows} {kind} padding rows after the vocabulary, which were not compared")
    return replace(ck, tensors={n: t for n, t in ck.tensors.items() if n not in names}) if names else ck


def _tied(ck: Checkpoint, side: str, done: list[str]) -> Checkpoint:
    """An output that repeats the embedding is a tied one."""
    output, tokens = ck.tensors.get(OUTPUT), ck.tensors.get(TOKENS)
    if output is None:
        return replace(ck, config=replace(ck.config, tied_output=True))
    if tokens is None or output.shape != tokens.shape or not same_values(output, tokens):
        return replace(ck, config=replace(ck.config, tied_output=False))
    done.append(f"{side} stores the tied output a second time")
    tensors = {n: t for n, t in ck.tensors.items() if n != OUTPUT}
    return replace(ck, config=replace(ck.config, tied_output=True), tensors=tensors)
