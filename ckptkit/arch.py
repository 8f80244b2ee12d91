"""What a model is: its tensors, their shapes in named dimensions, and the traits that the forward branches on."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from .checkpoint import Checkpoint, Config
from .errors import LossyError, UnsupportedError, some
from .quant.types import PLAIN, QType
from .tensor import Tensor, constant, permute

E, F, V, T = "n_embd", "n_ff", "vocab_size", "context_length"
Shapes = dict[str, tuple[str, ...]]

DENSE: Shapes = {
    "token_embd.weight": (V, E),
    "blk.{i}.attn_q.weight": ("q", E),
    "blk.{i}.attn_k.weight": ("kv", E),
    "blk.{i}.attn_v.weight": ("kv", E),
    "blk.{i}.attn_output.weight": (E, "q"),
    "blk.{i}.ffn_up.weight": (F, E),
    "blk.{i}.ffn_down.weight": (E, F),
    "output.weight": (V, E),
}
GATE: Shapes = {"blk.{i}.ffn_gate.weight": (F, E)}
GAINS: Shapes = {"blk.{i}.attn_norm.weight": (E,), "blk.{i}.ffn_norm.weight": (E,), "output_norm.weight": (E,)}
NORM_BIAS: Shapes = {"blk.{i}.attn_norm.bias": (E,), "blk.{i}.ffn_norm.bias": (E,), "output_norm.bias": (E,)}
QKV_BIAS: Shapes = {"blk.{i}.attn_q.bias": ("q",), "blk.{i}.attn_k.bias": ("kv",), "blk.{i}.attn_v.bias": ("kv",)}
LINEAR_BIAS: Shapes = {"blk.{i}.attn_output.bias": (E,), "blk.{i}.ffn_up.bias": (F,), "blk.{i}.ffn_down.bias": (E,)}
POSITION: Shapes = {"position_embd.weight": (T, E)}
PADDING: Shapes = {"token_embd.padding": ("padding", E)}  # rows V..Vp of a vocabulary, kept until they are proved zero
MTP: Shapes = {"mtp.{j}.weight": (V, E)}  # prediction head j >= 1: the token j + 1 ahead
ROPE_FACTORS: Shapes = {"rope_freqs.weight": ("half_head",)}

BLOCK_PARTS = (
    "attn_norm", "attn_q", "attn_k", "attn_v", "attn_output", "ffn_norm", "ffn_gate", "ffn_up", "ffn_down",
)  # fmt: skip
ORDER = (
    *("token_embd.weight", "token_embd.padding", "position_embd.weight", "rope_freqs.weight"),
    *(f"blk.{{i}}.{part}.{kind}" for part in BLOCK_PARTS for kind in ("weight", "bias")),
    *("output_norm.weight", "output_norm.bias", "output.weight", "mtp.{j}.weight"),
)


@dataclass(frozen=True)
class Arch:
    """Tensors by canonical template with shapes in named dims; `optional` ones may be absent. The rest are traits."""

    tensors: dict[str, tuple[str, ...]]
    norm: str  # "rms" or "layer"
    act: str  # "silu_gate", "gelu_tanh" or "relu"
    position: str  # "rope" or "learned"
    embd_norm: bool = False  # a norm between embedding and first block
    final_norm: bool = True
    optional: frozenset[str] = field(default=frozenset({"output.weight", *PADDING, *MTP, *ROPE_FACTORS}))

    def names(self, config: Config, absent: Collection[str] = ()) -> Iterator[tuple[str, tuple[int, ...], bool]]:
        """(name, shape, must be there) of every tensor of such a model, in canonical order."""
        dims = config.dims()
        for template in ORDER:
            if template not in self.tensors or template in absent or template in PADDING:
                continue
            shape = tuple(dims[d] for d in self.tensors[template])
            for name in expand(template, config):
                yield name, shape, template not in self.optional


ARCHS: dict[str, Arch] = {
    "llama": Arch(DENSE | GATE | GAINS | MTP | ROPE_FACTORS, norm="rms", act="silu_gate", position="rope"),
    "qwen2": Arch(DENSE | GATE | GAINS | QKV_BIAS | MTP, norm="rms", act="silu_gate", position="rope"),
    "gpt2": Arch(
        DENSE | GAINS | NORM_BIAS | QKV_BIAS | LINEAR_BIAS | POSITION | PADDING,
        norm="layer",
        act="gelu_tanh",
        position="learned",
    ),
    "microgpt": Arch(DENSE | POSITION, norm="rms", act="relu", position="learned", embd_norm=True, final_norm=False),
}
TRAITS = ("norm", "act", "position", "embd_norm", "final_norm")


def expand(template: str, config: Config) -> Iterator[str]:
    """The names that a template stands for: {i} counts layers, {j} extra prediction heads from 1."""
    if "{i}" in template:
        yield from (template.replace("{i}", str(i)) for i in range(config.n_layer))
    elif "{j}" in template:
        yield from (template.replace("{j}", str(j)) for j in range(1, config.n_mtp_head))
    else:
        yield template


def template(name: str) -> str:
    """The template that a canonical name comes from: blk.3.attn_q.weight -> blk.{i}.attn_q.weight."""
    parts = name.split(".")
    if len(parts) > 2 and parts[1].isdigit():
        parts[1] = {"blk": "{i}", "mtp": "{j}"}.get(parts[0], parts[1])
    return ".".join(parts)


def arch_of(ck: Checkpoint, doing: str) -> Arch:
    """The arch of a checkpoint, or an UnsupportedError saying that `doing` needs one of those we know."""
    try:
        return ARCHS[ck.config.arch]
    except KeyError:
        raise UnsupportedError(
            f"{doing} needs a known architecture", path=ck.source.paths[0],
            expected=", ".join(ARCHS), got=ck.config.arch or "none named",
            hint="`inspect`, `check` and metadata edits work on any GGUF",
        ) from None  # fmt: skip


def check_tensors(ck: Checkpoint) -> None:
    """Every tensor that the arch demands is there, has its shape, and there is none that the arch does not know."""
    arch = arch_of(ck, "reading tensors")
    path = ck.source.paths[0]
    known = set()
    for name, shape, must in arch.names(ck.config):
        known.add(name)
        t = ck.tensors.get(name)
        if t is None and must:
            raise UnsupportedError(
                f"tensor {name} is missing",
                path=path,
                expected=f"{ck.config.arch} {shape}",
                hint="the file is incomplete",
            )
        if t is not None and t.shape != shape:
            raise UnsupportedError(f"tensor {name} has another shape", path=path, expected=shape, got=t.shape)
    extra = [n for n in ck.tensors if n not in known and template(n) not in PADDING]
    if extra:
        raise UnsupportedError(
            f"{len(extra)} tensors have no place in arch {ck.config.arch}", path=path, got=some(extra, 6),
            hint="running or converting without them would change the model",
        )  # fmt: skip


def neutral(name: str) -> float | None:
    """The value that makes a tensor do nothing: 0 for biases and padding, 1 for gains; None for matrices."""
    if name.endswith((".bias", ".padding")):
        return 0.0
    return 1.0 if name.endswith("norm.weight") else None


def is_neutral(name: str, t: Tensor) -> bool:
    """Whether every value is the neutral one, read chunk by chunk."""
    value = neutral(name)
    if value is None or t.type not in PLAIN:
        return False
    one = constant((1,), value, t.type).read().reshape(-1)
    return all(bool((rows.reshape(-1, len(one)) == one).all()) for _, rows in t.chunks())


def as_arch(ck: Checkpoint, arch: str, drop: Collection[str] = ()) -> tuple[Checkpoint, list[str]]:
    """The same model under another arch's name, and what was filled or left out.

    Traits must agree. What the target has and the source lacks is filled with its neutral value; what the source has
    and the target lacks may go only if it is neutral, or if its name (or template) is in `drop`.
    """
    if arch == ck.config.arch:
        return ck, []
    if arch not in ARCHS:
        raise UnsupportedError("no such architecture", at="--arch", expected=", ".join(ARCHS), got=arch)
    old, new = arch_of(ck, "converting"), ARCHS[arch]
    for trait in TRAITS:
        if getattr(old, trait) != getattr(new, trait):
            raise UnsupportedError(
                f"arch {ck.config.arch} cannot be written as {arch}", path=ck.source.paths[0],
                at=trait, expected=f"{trait} {getattr(new, trait)}", got=f"{trait} {getattr(old, trait)}",
            )  # fmt: skip
    done: list[str] = []
    tensors: dict[str, Tensor] = {}
    for name, shape, must in new.names(ck.config):
        if name in ck.tensors:
            tensors[name] = ck.tensors[name]
        elif must:
            value = neutral(name)
            if value is None:
                raise UnsupportedError(f"arch {arch} needs tensor {name}", path=ck.source.paths[0])
            tensors[name] = constant(shape, value)
    filled = [n for n in tensors if n not in ck.tensors]
    if filled:
        done.append(f"filled {len(filled)} tensors of {arch} with their neutral value ({some(filled)})")
    gone = [n for n in ck.tensors if n not in tensors]
    lost = leave_out(ck, gone, drop, f"arch {arch}")
    return replace(ck, config=replace(ck.config, arch=arch), tensors=tensors), done + lost


def leave_out(ck: Checkpoint, names: Collection[str], drop: Collection[str], target: str) -> list[str]:
    """Check that tensors without a place in `target` do nothing or were named by the user. Says which went."""
    lost = [n for n in names if n not in drop and template(n) not in drop and not is_neutral(n, ck.tensors[n])]
    if lost:
        nbytes = sum(ck.tensors[n].nbytes for n in lost)
        raise LossyError(
            f"{len(lost)} tensors have no place in {target}",
            path=ck.source.paths[0], got=f"{some(lost)}: {nbytes:,} bytes",
            hint="pass --mtp drop to leave the extra prediction heads out"
            if all(template(n) in MTP for n in lost)
            else "pass --drop NAME for each to leave them out (blk.{i}.attn_q.bias, say, drops all of its kind)",
        )  # fmt: skip
    return [f"left out {some(names)} (no place in {target})"] if names else []


def half_from_adjacent(head_dim: int) -> npt.NDArray[np.int64]:
    """Row order within a head that turns adjacent pairs into halves: 0, 2, 4, ... 1, 3, 5, ..."""
    return np.concatenate([np.arange(0, head_dim, 2), np.arange(1, head_dim, 2)])


def with_pairing(ck: Checkpoint, pairing: str) -> Checkpoint:
    """The same model with q and k, weights and biases, permuted head by head to another RoPE pairing."""
    c = ck.config
    if pairing == c.rope_pairing or not pairing:
        return ck
    tensors = dict(ck.tensors)
    for name, t in ck.tensors.items():
        if template(name) in (
            "blk.{i}.attn_q.weight",
            "blk.{i}.attn_k.weight",
            "blk.{i}.attn_q.bias",
            "blk.{i}.attn_k.bias",
        ):
            tensors[name] = permute_heads(t, c.head_dim, pairing)
    return replace(ck, config=replace(c, rope_pairing=pairing), tensors=tensors)


def permute_heads(t: Tensor, head_dim: int, pairing: str) -> Tensor:
    """Permute the rows of every head to `pairing` from the other one."""
    order = half_from_adjacent(head_dim)
    if pairing == "adjacent":
        order = np.argsort(order)
    heads = np.arange(0, t.n_rows, head_dim)
    return permute(t, (heads[:, None] + order).reshape(-1), to=pairing, head_dim=head_dim)


def rope_divisors(ck: Checkpoint) -> npt.NDArray[np.float64] | None:
    """Divisor of each rotary frequency (head_dim / 2,): the file's rope_freqs.weight, else by the config's scaling.

    None for a kind of scaling that is not known here. Where both are there, rope_freqs.weight stands in for llama3's
    rule and comes on top of linear scaling.
    """
    c, stored = ck.config, ck.tensors.get("rope_freqs.weight")
    kind = c.rope_scaling.type if c.rope_scaling else "none"
    if kind not in ("none", "", "linear", "llama3"):
        return None
    out = np.ones(c.head_dim // 2)
    if c.rope_scaling and (kind == "linear" or (kind == "llama3" and stored is None)):
        out = c.rope_scaling.factors(c.head_dim, c.rope_theta).astype(np.float64)
    return out if stored is None else out * stored.read().reshape(-1).view("<f4")


def majority_type(tensors: dict[str, Tensor]) -> QType:
    """The type that holds most of the values."""
    count: dict[QType, int] = {}
    for t in tensors.values():
        count[t.type] = count.get(t.type, 0) + t.n_elements
    return max(count, key=lambda k: count[k]) if count else QType.F32


def check_model(ck: Checkpoint) -> None:
    """The tensors are those of the arch, and the tokenizer has a token for every row of the embedding and no more."""
    check_tensors(ck)
    if ck.tokenizer is not None and ck.tokenizer.vocab_size != ck.config.vocab_size:
        raise UnsupportedError(
            "tokenizer and embedding have different sizes",
            path=ck.source.paths[0],
            expected=f"{ck.config.vocab_size:,} tokens, as the embedding has rows",
            got=f"{ck.tokenizer.vocab_size:,} tokens",
            hint="give the right tokenizer with --tokenizer",
        )
