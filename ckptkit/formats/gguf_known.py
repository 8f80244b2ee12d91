"""Keys of a GGUF and the one type of each (llama-model.cpp, llama-vocab.cpp, llama-model-loader.cpp; docs/gguf.md).

`kind_of` says which type a new key should take; MODEL, GENERAL and TOKENIZER are those whose type llama.cpp insists on.
"""

from __future__ import annotations

from collections.abc import Mapping

from .gguf_io import Kind

T = "tokenizer.ggml."
NORM_EPS = {"rms": "attention.layer_norm_rms_epsilon", "layer": "attention.layer_norm_epsilon"}
ROLES = {
    "bos": "bos", "eos": "eos", "unk": "unknown", "sep": "seperator", "pad": "padding", "mask": "mask",
    **{same: same for same in ("eot", "eom", "fim_pre", "fim_suf", "fim_mid", "fim_pad", "fim_rep", "fim_sep")},
}  # fmt: skip
ID_KEYS = {role: f"{T}{name}_token_id" for role, name in ROLES.items()}  # the spelling of `seperator` is theirs
ARRAYS = {  # key -> type of its elements
    f"{T}tokens": Kind.STRING,
    f"{T}merges": Kind.STRING,
    f"{T}token_type": Kind.I32,
    f"{T}scores": Kind.F32,
}
WITH_MERGES = ("gpt2", "hybriddna", "whitespace", "gemma4")  # models whose merges are read


def _kinds(kind: Kind, keys: str) -> dict[str, Kind]:
    return dict.fromkeys(keys.split(), kind)


# after "{arch}."; read for every architecture
MODEL: Mapping[str, Kind] = {
    **_kinds(
        Kind.U32,
        "context_length embedding_length embedding_length_out block_count feed_forward_length nextn_predict_layers "
        "attention.head_count attention.head_count_kv attention.key_length attention.value_length "
        "attention.key_length_swa attention.value_length_swa rope.dimension_count rope.dimension_count_swa "
        "rope.scaling.original_context_length pooling_type classifier.pooling_type expert_count expert_used_count "
        "expert_group_count expert_group_used_count",
    ),
    **_kinds(
        Kind.F32,
        "rope.freq_base rope.scale_linear rope.scaling.factor rope.scaling.attn_factor rope.scaling.alpha",
    ),
    **_kinds(Kind.BOOL, "attention.causal rope.scaling.finetuned"),
    **_kinds(Kind.STRING, "rope.scaling.type"),
}
PER_LAYER = frozenset(  # a number, or an array with one for each layer
    ("feed_forward_length", "attention.head_count", "attention.head_count_kv", "expert_used_count")
)
GENERAL: Mapping[str, Kind] = {
    "general.architecture": Kind.STRING,
    "general.name": Kind.STRING,
    "general.alignment": Kind.U32,
    "general.file_type": Kind.U32,
    "split.count": Kind.U16,
}
TOKENIZER: Mapping[str, Kind] = {
    **_kinds(Kind.STRING, f"{T}model {T}pre"),
    **_kinds(
        Kind.BOOL,
        f"{T}add_bos_token {T}add_eos_token {T}add_sep_token {T}add_space_prefix {T}remove_extra_whitespaces "
        f"{T}normalizer.lowercase {T}normalizer.strip_accents",
    ),
    **_kinds(Kind.U32, f"{T}token_type_count {T}prefix_token_id {T}suffix_token_id {T}middle_token_id"),
    **dict.fromkeys(ID_KEYS.values(), Kind.U32),
}
# read for some architectures only, or by other programs: their type is a convention
CONVENTION: Mapping[str, Kind] = {
    **_kinds(Kind.U32, "vocab_size attention.sliding_window"),
    **_kinds(Kind.F32, " ".join(NORM_EPS.values())),
}
OTHERS: Mapping[str, Kind] = {
    **_kinds(
        Kind.STRING,
        "general.type general.author general.version general.organization general.finetune general.basename "
        "general.description general.quantized_by general.size_label general.license general.license.name "
        "general.license.link general.url general.doi general.uuid general.repo_url general.source.url "
        "tokenizer.chat_template",
    ),
    **_kinds(Kind.ARRAY, "general.tags general.languages"),
    "general.quantization_version": Kind.U32,
}


def kind_of(key: str) -> Kind | None:
    """The type of a key, ARRAY for one that holds many values; None for one that nothing is known of."""
    if key in ARRAYS:
        return Kind.ARRAY
    suffix = key.partition(".")[2]
    for table, name in ((GENERAL, key), (TOKENIZER, key), (OTHERS, key), (MODEL, suffix), (CONVENTION, suffix)):
        if name in table:
            return table[name]
    return None
