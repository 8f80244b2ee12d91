"""What we write loads in llama.cpp and gives the same tokens and probabilities there."""

from __future__ import annotations

from pathlib import Path

import llamacpp
import numpy as np
import pytest

import ckptkit
from ckptkit.runtime.generate import GenerateOptions, generate
from ckptkit.runtime.sampler import Sampling

pytest.importorskip("xllamacpp", reason="needs xllamacpp, llama.cpp in process")

MODELS = {"gpt2_tiny.bin": "gpt2_tiny_fp32.ref.npz", "nanoeuler_main.bin": "nanoeuler_main.ref.npz"}
N = 32
PLAIN = {"f32": 2e-2, "f16": 2e-2, "bf16": 0.1}  # largest difference of the ten likeliest log-probabilities
QUANTISED = ("q8_0", "q4_0", "q4_1", "q5_0", "q5_1")


def log_softmax(logits: np.ndarray) -> np.ndarray:
    z = logits.astype(np.float64)
    z -= z.max(axis=-1, keepdims=True)
    return z - np.log(np.exp(z).sum(axis=-1, keepdims=True))


def converted(fixtures_dir: Path, tmp_path: Path, name: str, type: str, **options: object) -> tuple[Path, list[int]]:
    out = tmp_path / "out.gguf"
    ckptkit.convert(fixtures_dir / "trained" / name, out, type=type, **options)
    z = np.load(fixtures_dir / "trained" / MODELS[name])
    return out, [int(i) for i in z["prompt"]]


@pytest.mark.parametrize("type", PLAIN)
@pytest.mark.parametrize("name", MODELS)
def test_plain_types_give_the_same_text(name: str, type: str, fixtures_dir: Path, tmp_path: Path) -> None:
    path, prompt = converted(fixtures_dir, tmp_path, name, type)
    theirs = llamacpp.run(path, prompt, N)
    assert theirs is not None, "llama.cpp refuses the file"
    with ckptkit.load(path) as model:
        ours = generate(model, prompt, GenerateOptions(N, ignore_eos=True, sampling=Sampling(temp=0)))
        assert ours.ids == theirs["ids"]
        logits = model.forward([*prompt, *ours.ids[:-1]])[len(prompt) - 1 :]
    logp = log_softmax(logits)
    worst = max(abs(logp[k, i] - p) for k, step in enumerate(theirs["top"]) for i, p in step)
    assert worst <= PLAIN[type]


@pytest.mark.parametrize("type", QUANTISED)
@pytest.mark.parametrize("name", MODELS)
def test_quantised_types_agree_but_for_its_rounding_of_activations(
    name: str, type: str, fixtures_dir: Path, tmp_path: Path
) -> None:
    """Along the ids of the unquantised model: the likeliest token agrees on 28 of 32 steps, mean nll within 0.02."""
    path, prompt = converted(fixtures_dir, tmp_path, name, type)
    with ckptkit.load(fixtures_dir / "trained" / name) as model:
        forced = generate(model, prompt, GenerateOptions(N, ignore_eos=True, sampling=Sampling(temp=0))).ids
    with ckptkit.load(path) as model:
        logp = log_softmax(model.forward([*prompt, *forced[:-1]])[len(prompt) - 1 :])
    agree, nll_ours, nll_theirs = 0, [], []
    answers = llamacpp.run_all(path, [[*prompt, *forced[:k]] for k in range(N)], 1)
    assert answers is not None, "llama.cpp refuses the file"
    for k, (token, answer) in enumerate(zip(forced, answers, strict=True)):
        agree += answer["ids"][0] == int(logp[k].argmax())
        listed = dict(map(tuple, answer["top"][0]))
        if token in listed:
            nll_ours.append(-logp[k, token])
            nll_theirs.append(-listed[token])
    assert agree >= 28
    assert len(nll_ours) >= 28
    assert abs(np.mean(nll_ours) - np.mean(nll_theirs)) <= 2e-2


@pytest.mark.parametrize("type", QUANTISED)
def test_quantised_bytes_are_the_gguf_packages(type: str, fixtures_dir: Path, tmp_path: Path) -> None:
    import gguf

    path, _ = converted(fixtures_dir, tmp_path, "nanoeuler_main.bin", type, pure=True)
    plain = tmp_path / "plain.gguf"
    ckptkit.convert(fixtures_dir / "trained" / "nanoeuler_main.bin", plain, type="f32", mtp="drop")
    exact = {t.name: t.data for t in gguf.GGUFReader(plain).tensors}
    kind = gguf.GGMLQuantizationType[type.upper()]
    quantised = 0
    for t in gguf.GGUFReader(path).tensors:
        if t.tensor_type == kind:
            quantised += 1
            np.testing.assert_array_equal(t.data, gguf.quants.quantize(exact[t.name], kind))
        else:
            np.testing.assert_array_equal(t.data, exact[t.name])
    assert quantised >= 15


def test_two_merges_that_spell_the_same_survive_and_load(fixtures_dir: Path, tmp_path: Path) -> None:
    source, out, back = fixtures_dir / "nanoeuler" / "same_bytes.bin", tmp_path / "o.gguf", tmp_path / "back.bin"
    ckptkit.convert(source, out)
    ckptkit.convert(out, back)
    assert back.read_bytes() == source.read_bytes()
    assert llamacpp.run(out, [1, 2, 3], 4, n_ctx=8) is not None


def test_seed_002_completed_loads_and_says_its_sentence(fixtures_dir: Path, tmp_path: Path) -> None:
    from ckptkit.formats.options import ReadOptions

    folder, out = fixtures_dir / "trained", tmp_path / "o.gguf"
    told = ReadOptions(folder / "nx_ours_qwen_vocab.bin", norm_eps=1e-6, rope_theta=1e6, context_length=64)
    ckptkit.convert(folder / "nx_ours_qwen.gguf", out, read=told)
    z = np.load(folder / "nx_ours_qwen.ref.npz")
    greedy = z["greedy"].tolist()
    answer = llamacpp.run(out, greedy[:1], len(greedy) - 1)
    assert answer is not None
    assert answer["ids"] == greedy[1:]
    with ckptkit.open(out) as ck:
        assert ck.tokenizer is not None
        assert ck.tokenizer.decode(greedy) == "the quick brown fox jumps over the lazy dog. "


SIZES = {
    "context_length": 32, "vocab_size": 300, "n_layer": 2, "n_head": 4, "n_embd": 256, "n_ff": 512, "head_dim": 64,
}  # fmt: skip


def random_gguf(arch: str, path: Path) -> None:
    """A seeded random model whose rows hold whole K-quant blocks, with byte tokens and made-up ones."""
    from ckptkit.arch import ARCHS
    from ckptkit.checkpoint import Checkpoint, Config, Source
    from ckptkit.formats import gguf
    from ckptkit.formats.options import WriteOptions
    from ckptkit.layout import write_rows
    from ckptkit.quant.types import QType
    from ckptkit.tensor import from_array
    from ckptkit.tokenizer import ByteBPE, Strings
    from ckptkit.tokenizer.byte_alphabet import to_text

    pairing = gguf.LAYOUTS[arch].rope_pairing
    sizes = SIZES | ({"n_ff": 1024} if arch == "gpt2" else {})
    config = Config(arch, **sizes, n_kv_head=2 if pairing else 4, rope_pairing=pairing)
    rng = np.random.default_rng(4)
    tensors = {}
    for name, shape, must in ARCHS[arch].names(config):
        if must or name == "output.weight":
            values = rng.standard_normal(shape) * (0.1 if len(shape) > 1 else 0.02) + name.endswith("norm.weight")
            tensors[name] = from_array(values.astype(np.float32), QType.F32)
    tokens = [to_text(bytes([b])).encode() for b in range(256)] + [f"tok{i}".encode() for i in range(44)]
    tokenizer = ByteBPE(Strings.of(tokens), Strings.of(()), pre="gpt-2", ids={"bos": 299, "eos": 299})
    ck = Checkpoint(config, tensors, tokenizer, Source((path,), "test"))
    gguf.write(ck, write_rows(gguf.LAYOUTS[arch], config, tensors), path, WriteOptions())


@pytest.mark.parametrize("type", ["f32", "f16", "q8_0", "q4_k_m"])
@pytest.mark.parametrize("arch", ["gpt2", "llama", "qwen2"])
def test_every_arch_and_kind_of_type_loads_and_agrees(arch: str, type: str, tmp_path: Path) -> None:
    source, out = tmp_path / "source.gguf", tmp_path / "out.gguf"
    random_gguf(arch, source)
    ckptkit.convert(source, out, type=type)
    prompt = [5, 40, 7, 99, 120]
    theirs = llamacpp.run(out, prompt, 1, n_ctx=32)
    assert theirs is not None, "llama.cpp refuses the file"
    with ckptkit.load(out) as model:
        logp = log_softmax(model.forward(prompt, logits="last"))
    listed = theirs["top"][0]
    bar = 2e-2 if type in PLAIN else 0.15  # llama.cpp rounds activations to 8 bits where the weights are blocks
    assert max(abs(logp[i] - p) for i, p in listed) <= bar
    if type in PLAIN:
        assert theirs["ids"][0] == int(logp.argmax())
