"""transformers, with torch on the CPU, loads the directories we write and computes the same logits and ids."""

from __future__ import annotations

import unicodedata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from cases import BY_NAME, Case
from smollm import SMOLLM

from ckptkit import formats, runtime
from ckptkit import score as scoring
from ckptkit.conversion import Options, convert
from ckptkit.formats import hf_tokenizer
from ckptkit.formats.options import ReadOptions, WriteOptions
from ckptkit.runtime.chat import chat_prompt
from ckptkit.score import PplOptions

LIMIT = 1e-4  # float32 against float64, models of two layers
NAMES = [
    "llmc/gpt2_v1.bin",
    "llmc/gpt2_v3.bin",
    "llmc/gpt2_v5.bin",
    "llmc_llama3/llama3_v3.bin",
    "llmc_llama3/llama3_v5.bin",
    "llmc_llama3/llama3_v3_scaled.bin",
    "nanoeuler/nanoeuler.bin",
    "nx/nx.gguf",
    "nx/weights.safetensors",
    "nx/weights.npz",
    "llama2c/v0.bin",
    "llama2c/v0_tied.bin",
    "llama2c/v2.bin",
    "gguf/llama.gguf",
    "gguf/llama_q8_0.gguf",
    "gguf/llama31.gguf",
    "gguf/qwen2_bf16.gguf",
    "gguf/gpt2.gguf",
    "hf_llama/",
    "hf_llama_sharded/",
    "hf_llama31/",
    "hf_qwen2/",
    "hf_gpt2/",
]
NANOEULER = {"mtp": "drop"}


def written(case: Case, fixtures_dir: Path, folder: Path, split: int = 0) -> Path:
    out = folder / "out"
    more = NANOEULER if case.format == "nanoeuler" else {}
    told = ReadOptions(**case.told)
    convert(
        case.path(fixtures_dir),
        out,
        Options(format="safetensors", read=told, write=WriteOptions(split_max_size=split), **more),
    )
    return out


def loaded(path: Path) -> torch.nn.Module:
    """The model in float32; every weight found, none left over."""
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, output_loading_info=True, local_files_only=True
    )
    for key in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        assert not info[key], (key, info[key])
    return model.eval()


def logits(model: torch.nn.Module, ids: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        return model(torch.from_numpy(ids.astype(np.int64))[None]).logits[0].double().numpy()


@pytest.mark.parametrize("split", [0, 3000], ids=["whole", "sharded"])
@pytest.mark.parametrize("name", NAMES)
def test_logits_are_the_same(name: str, split: int, fixtures_dir: Path, tmp_path: Path) -> None:
    case = BY_NAME[name]
    model = loaded(written(case, fixtures_dir, tmp_path, split))
    ids = case.ids()
    worst = float(np.abs(logits(model, ids) - case.logits(ids)).max())
    assert worst < LIMIT


def test_logits_of_the_trained_gpt2(trained: Path, tmp_path: Path) -> None:
    convert(trained / "gpt2_tiny.bin", tmp_path / "out", Options(format="safetensors"))
    with np.load(trained / "gpt2_tiny_fp32.ref.npz") as ref:
        got = logits(loaded(tmp_path / "out"), ref["x"][0])
        assert np.abs(got - ref["logits_row0"]).max() < LIMIT
        model = loaded(tmp_path / "out")
        prompt = torch.from_numpy(ref["prompt"].astype(np.int64))[None]
        n = min(20, len(ref["greedy"]))
        out = model.generate(prompt, max_new_tokens=n, do_sample=False, eos_token_id=None, pad_token_id=0)
        greedy = ref["greedy"].tolist()
        got_ids = out[0].tolist()
        assert got_ids == greedy[: len(got_ids)] or got_ids[prompt.shape[1] :] == greedy[:n]


ALONE = {"nanoeuler": Options(mtp="drop"), "as qwen2": Options(mtp="drop", arch="qwen2")}
NX = Options(read=ReadOptions(rope_theta=1e6, norm_eps=1e-6, context_length=64))


@pytest.mark.parametrize(
    ("name", "ids", "expected", "options"),
    [
        ("nanoeuler_main", "prompt", "logits_head0", ALONE["nanoeuler"]),
        ("nanoeuler_main", "prompt", "logits_head0", ALONE["as qwen2"]),
        ("nanoeuler_chat", "prompt3", "last_logits3", ALONE["nanoeuler"]),
        ("nx_ours_qwen", "tokens", "logits", NX),
    ],
    ids=["nanoeuler", "nanoeuler as qwen2", "nanoeuler chat", "nx"],
)
def test_logits_of_other_trained_models(
    name: str, ids: str, expected: str, options: Options, trained: Path, tmp_path: Path
) -> None:
    source = trained / (f"{name}.gguf" if name.startswith("nx") else f"{name}.bin")
    convert(source, tmp_path / "out", options)
    with np.load(trained / f"{name}.ref.npz") as ref:
        got = logits(loaded(tmp_path / "out"), ref[ids])
        assert np.abs((got if ref[expected].ndim == 2 else got[-1]) - ref[expected]).max() < LIMIT


def test_an_id_beyond_the_rows_stops_it(fixtures_dir: Path, tmp_path: Path) -> None:
    """What `check` says of a vocabulary with more tokens than the embedding has rows (tokens-beyond-rows)."""
    case = BY_NAME["hf_gpt2/"]
    model = loaded(written(case, fixtures_dir, tmp_path))
    rows = case.config["vocab_size"]
    logits(model, np.array([rows - 1]))
    with pytest.raises(IndexError):
        logits(model, np.array([rows]))


TEXT = "the rest is on a hill\n in the hot sun"  # letters that the small vocabularies have


@pytest.mark.parametrize("name", ["gguf/gpt2.gguf", "hf_gpt2/", "gguf/qwen2_bf16.gguf", "llama2c/v0.bin"])
def test_ids_are_the_same(name: str, fixtures_dir: Path, tmp_path: Path) -> None:
    case = BY_NAME[name]
    out = written(case, fixtures_dir, tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(out, local_files_only=True)
    with formats.open(out) as ck:
        assert ck.tokenizer is not None
        text = (
            TEXT.replace("\n", " ") if case.format == "llama2c" else "the rest on a hill\n in the hut".replace("u", "o")
        )
        ids = ck.tokenizer.encode(text)
        assert theirs(text, add_special_tokens=False)["input_ids"] == ids
        assert theirs.decode(ids).strip() == text.strip()


TEXTS = [
    "ROMEO:\nI will be a mistress.\n\nPOLIXENES:\nIf you, sir, 'tis 3 o'clock!",
    "  leading and trailing \t \r\n\r\n \n x\n",
    "I'LL we've 'S don’t 1234567 3.14 x1y22 ½ Ⅷ $#!?... a_b",
    "naïve Здравствуй 日本カナ 한국 नमस्ते ไทย",
    "🙂👩\u200d👧🏴 \u200b\u00a0\u3000\u2028\u0085\ufeff \u0000\u0001\ufffd",
    "<|endoftext|><s></s><unk>",
    "x" * 300 + " " * 70 + "\n" * 40,
    "",
]
APART = "cafe\u0301 A\u030angstro\u0308m"  # accents of their own, which NFC composes


def same_ids(theirs: Any, path: Path, options: ReadOptions, texts: list[str]) -> None:
    with formats.open(path, options=options) as ck:
        ours = ck.tokenizer
        assert ours is not None
        for text in texts:
            ids = ours.encode(text)
            assert theirs(text, add_special_tokens=False, split_special_tokens=True)["input_ids"] == ids, text
            assert theirs(text)["input_ids"] == ours.encode_prompt(text, special=True), text
            assert theirs.decode(ids) == ours.decode(ids, special=True), text


@pytest.mark.parametrize("name", ["gpt2_tiny.bin", "gpt2_tiny_bf16.bin", "nanoeuler_main.bin", "nanoeuler_chat.bin"])
def test_ids_of_trained_models(name: str, trained: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    convert(trained / name, out, Options(mtp="drop"))
    theirs = transformers.AutoTokenizer.from_pretrained(out, local_files_only=True)
    for path in (trained / name, out):
        same_ids(theirs, path, ReadOptions(), [*TEXTS, APART])


@pytest.mark.parametrize("name", ["gpt-2", "llama-bpe", "llama-spm", "qwen2"])
def test_ids_of_whole_vocabularies(name: str, shared: Path, tmp_path: Path) -> None:
    source, out = shared / "vocab" / f"ggml-vocab-{name}.gguf", tmp_path / "out"
    convert(source, out)
    theirs = transformers.AutoTokenizer.from_pretrained(out, local_files_only=True)
    # "</s>" is an ordinary token of Qwen2's, which llama.cpp takes for the end of a text
    texts = [t for t in [*TEXTS, APART] if t != APART or name != "qwen2"]
    texts = [t.replace("<s></s>", "") for t in texts]
    for path in (source, out):
        same_ids(theirs, path, ReadOptions(), texts)


def test_ids_of_the_trained_qwen2(trained: Path, tmp_path: Path) -> None:
    read = ReadOptions(tokenizer=trained / "nx_ours_qwen_vocab.bin")
    convert(trained / "nx_ours_qwen.gguf", tmp_path / "out", Options(read=read))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out", local_files_only=True)
    assert len(theirs) == 28
    same_ids(theirs, trained / "nx_ours_qwen.gguf", read, ["the quick brown fox", " a  b."])


def test_a_qwen2_is_cut_by_its_own_rule_as_the_report_says(trained: Path, tmp_path: Path) -> None:
    source, out = trained / "nanoeuler_main.bin", tmp_path / "out"
    report = convert(source, out, ALONE["as qwen2"])
    assert any("PreTrainedTokenizerFast" in note for note in report.notes)
    auto = transformers.AutoTokenizer.from_pretrained(out, local_files_only=True)
    assert len(auto) == 640  # no token without a row
    with formats.open(source) as ck:
        assert ck.tokenizer is not None
        assert auto(TEXTS[0])["input_ids"] != ck.tokenizer.encode(TEXTS[0])
    plain = transformers.PreTrainedTokenizerFast.from_pretrained(out, local_files_only=True)
    same_ids(plain, source, ReadOptions(), [*TEXTS, APART])


def test_qwen2s_own_vocabulary_is_normalised_as_the_report_says(shared: Path, tmp_path: Path) -> None:
    source, out = shared / "vocab" / "ggml-vocab-qwen2.gguf", tmp_path / "out"
    with formats.open(source) as ck:
        assert ck.tokenizer is not None
        assert any("NFC" in said for said in hf_tokenizer.differs(ck.tokenizer, "qwen2"))
        convert(source, out)
        auto = transformers.AutoTokenizer.from_pretrained(out, local_files_only=True)
        assert auto(APART)["input_ids"] == ck.tokenizer.encode(unicodedata.normalize("NFC", APART))
        assert auto(APART)["input_ids"] != ck.tokenizer.encode(APART)


@pytest.mark.parametrize("name", ["gpt2_tiny.bin", "nanoeuler_chat.bin"])
def test_a_tokenizer_that_transformers_saved_is_read(name: str, trained: Path, tmp_path: Path) -> None:
    convert(trained / name, tmp_path / "out", Options(mtp="drop"))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out", local_files_only=True)
    theirs.save_pretrained(tmp_path / "saved")
    loaded(tmp_path / "out").save_pretrained(tmp_path / "saved")
    same_ids(theirs, tmp_path / "saved", ReadOptions(), [*TEXTS, APART])


def strided_nll(model: torch.nn.Module, ids: list[int], n_ctx: int, stride: int) -> tuple[int, float]:
    """The recipe of transformers' page on perplexity; each window weighs as many labels as its loss is the mean of."""
    total, n, scored_to = 0.0, 0, 0
    for begin in range(0, len(ids), stride):
        end = min(begin + n_ctx, len(ids))
        x = torch.tensor([ids[begin:end]])
        labels = x.clone()
        labels[:, : scored_to - end] = -100
        scored = int((labels[:, 1:] != -100).sum())
        with torch.no_grad():
            total += float(model(x, labels=labels).loss) * scored
        n, scored_to = n + scored, end
        if end == len(ids):
            break
    return n, total / n


@pytest.mark.parametrize(("n_ctx", "stride"), [(64, 32), (48, 20), (64, 64)])
def test_strided_perplexity_is_that_of_its_losses(n_ctx: int, stride: int, trained: Path, tmp_path: Path) -> None:
    convert(trained / "gpt2_tiny.bin", tmp_path / "out")
    (tmp_path / "t.txt").write_text(" ".join(TEXTS[:4]) * 4)
    with runtime.load(formats.open(trained / "gpt2_tiny.bin")) as ours:
        assert ours.tokenizer is not None
        ids = ours.tokenizer.encode((tmp_path / "t.txt").read_bytes())
        options = PplOptions(mode="stride", n_ctx=n_ctx, stride=stride)
        [report] = scoring.run(ours, tmp_path / "t.txt", options)
    n, nll = strided_nll(loaded(tmp_path / "out"), ids, n_ctx, stride)
    assert report.tokens == n
    assert report.nll == pytest.approx(nll, abs=1e-5)


@pytest.mark.slow
def test_a_real_model_computes_continues_and_chats_the_same(models: Path, tmp_path: Path) -> None:
    convert(models / SMOLLM, tmp_path / "out", Options(type="f16"))
    model = loaded(tmp_path / "out")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out", local_files_only=True)
    prompt = theirs("The capital of France is")["input_ids"]
    with runtime.load(formats.open(tmp_path / "out")) as ours:
        assert ours.tokenizer is not None
        ids = np.arange(48) * 1009 % 49152
        assert np.abs(ours.forward(ids) - logits(model, ids)).max() < 3e-4  # 30 layers, logits to 38
        out = model.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False)[0].tolist()
        assert ours.generate(prompt, n_predict=12, temp=0).ids == out[len(prompt) :]
        for text in ("Hello, who are you?", "  naïve\n<|im_end|> x "):
            messages = [{"role": "user", "content": text}]
            chat = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
            assert chat_prompt(ours.tokenizer, text)[0] == chat["input_ids"]


SIZES = {
    "hidden_size": 48, "intermediate_size": 56, "num_hidden_layers": 2, "num_attention_heads": 6,
    "num_key_value_heads": 2, "vocab_size": 61, "max_position_embeddings": 64, "initializer_range": 0.3,
}  # fmt: skip
LLAMA31 = {
    "rope_type": "llama3", "rope_theta": 1e8, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
MADE = {
    "llama": lambda: transformers.LlamaConfig(**SIZES),
    "llama with wide heads": lambda: transformers.LlamaConfig(**SIZES, head_dim=16, tie_word_embeddings=True),
    "llama 3.1": lambda: transformers.LlamaConfig(**SIZES, rope_parameters=LLAMA31),
    "llama stretched": lambda: transformers.LlamaConfig(
        **SIZES, rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}
    ),
    "qwen2": lambda: transformers.Qwen2Config(**SIZES, rms_norm_eps=1e-6),
    "gpt2": lambda: transformers.GPT2Config(n_embd=48, n_layer=2, n_head=6, n_positions=64, vocab_size=61),
    "gpt2 with narrow layers": lambda: transformers.GPT2Config(
        n_embd=48, n_layer=2, n_head=6, n_positions=64, vocab_size=61, n_inner=56, tie_word_embeddings=False
    ),
}


@pytest.mark.parametrize("shards", ["5GB", "20KB"])
@pytest.mark.parametrize("name", MADE)
def test_what_transformers_saved_runs_and_comes_back(name: str, shards: str, tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(MADE[name]()).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.1)  # biases that are not 0, gains that are not 1
    model.save_pretrained(tmp_path / "saved", max_shard_size=shards)
    ids = np.arange(40) * 7 % 61
    expected = logits(model, ids)
    with runtime.load(formats.open(tmp_path / "saved")) as ours:
        assert np.abs(ours.forward(ids) - expected).max() < LIMIT
    convert(tmp_path / "saved", tmp_path / "x.gguf")
    convert(tmp_path / "x.gguf", tmp_path / "back")
    assert np.abs(logits(loaded(tmp_path / "back"), ids) - expected).max() < LIMIT
    convert(tmp_path / "saved", tmp_path / "copy")
    assert (tmp_path / "copy" / "config.json").read_bytes() == (tmp_path / "saved" / "config.json").read_bytes()
