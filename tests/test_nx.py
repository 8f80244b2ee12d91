"""The Qwen2 trainer's own weights, matrices (in, out): converted, they are its own GGUF export, and complete."""

from __future__ import annotations

from pathlib import Path

import judge_readers as readers
import llamacpp
import numpy as np
import pytest

from ckptkit import formats, runtime
from ckptkit.conversion import Options, convert
from ckptkit.formats.options import ReadOptions
from fixtures.writers import safetensors as writer


@pytest.mark.parametrize("suffix", ["safetensors", "npz"])
def test_in_major_weights_become_the_trainers_export_and_run_in_llamacpp(
    suffix: str, trained: Path, tmp_path: Path
) -> None:
    _, exported = readers.gguf((trained / "nx_ours_qwen.gguf").read_bytes())
    source, out = tmp_path / f"w.{suffix}", tmp_path / "out.gguf"
    source.write_bytes({"safetensors": writer.safetensors, "npz": writer.npz}[suffix](readers.nx_arrays(exported)))
    convert(source, out, Options(read=ReadOptions(tokenizer=trained / "nx_ours_qwen_vocab.bin", context_length=64)))
    keys, tensors = readers.gguf(out.read_bytes())
    assert tensors.keys() == exported.keys()
    for name, a in exported.items():
        assert tensors[name].tobytes() == a.tobytes(), name
    assert keys["qwen2.rope.freq_base"] == 1e6
    assert keys["qwen2.attention.layer_norm_rms_epsilon"] == np.float32(1e-6)
    with np.load(trained / "nx_ours_qwen.ref.npz") as ref, runtime.load(formats.open(source)) as model:
        assert np.abs(model.forward(ref["tokens"]) - ref["logits"]).max() < 2e-4
        greedy = ref["greedy"].tolist()
    pytest.importorskip("xllamacpp", reason="needs xllamacpp, llama.cpp in process")
    answer = llamacpp.run(out, greedy[:1], len(greedy) - 1)
    assert answer is not None
    assert answer["ids"] == greedy[1:]
