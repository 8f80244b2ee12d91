"""The committed files are what fixtures/make.py writes, and judges other than our own reader agree about them."""

from __future__ import annotations

import ast
import hashlib
import math
from pathlib import Path
from typing import Any

import judge_readers as readers
import judges
import numpy as np
import pytest
from cases import BY_NAME, CASES, Case

from fixtures import make, models
from fixtures.models import Model
from fixtures.writers import gguf, llama2c, llmc, nanoeuler, safetensors, vocab

ROOT = Path(__file__).resolve().parent.parent


def sums(fixtures_dir: Path) -> dict[str, str]:
    lines = (fixtures_dir / "SHA256SUMS").read_text().splitlines()
    return {name: digest for digest, _, name in (line.partition("  ") for line in lines)}


def test_files_made_again_have_the_committed_hashes(tmp_path: Path, fixtures_dir: Path) -> None:
    again = make.write(tmp_path)
    known = {n: d for n, d in sums(fixtures_dir).items() if not n.startswith("trained/")}
    assert again == known


def test_every_committed_file_is_listed_and_intact(fixtures_dir: Path) -> None:
    known = sums(fixtures_dir)
    own = ("SHA256SUMS",)
    found = {
        str(p.relative_to(fixtures_dir)): p
        for p in fixtures_dir.rglob("*")
        if p.is_file() and p.suffix not in (".py", ".pyc") and p.name not in own
    }
    assert set(found) == set(known)
    assert {n: hashlib.sha256(p.read_bytes()).hexdigest() for n, p in found.items()} == known


def test_made_files_are_small(fixtures_dir: Path) -> None:
    sizes = {n: (fixtures_dir / n).stat().st_size for n in sums(fixtures_dir) if not n.startswith("trained/")}
    assert max(sizes.values()) < 65536
    assert min(sizes.values()) > 0


@pytest.mark.parametrize(
    "path",
    [*ROOT.glob("fixtures/**/*.py"), *ROOT.glob("tests/judge*.py"), ROOT / "tests/cases.py"],
    ids=lambda p: p.name,
)
def test_writers_and_judges_import_nothing_of_the_package(path: Path) -> None:
    allowed = {"fixtures", "judges", "numpy", "cases"}
    standard = {"__future__", "ast", "collections", "dataclasses", "functools", "hashlib", "io", "json", "math"}
    standard |= {"pathlib", "struct", "sys", "typing", "zipfile"}
    for node in ast.walk(ast.parse(path.read_text())):
        names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        for name in names:
            assert name.partition(".")[0] in allowed | standard, f"{path.name} imports {name}"


def test_every_model_file_has_a_case() -> None:
    no_model = ("state.bin", "tokenizer", "/shard", "hellaswag", "vocab.bin")
    models_made = {"gguf/split/tiny-00001-of-00003.gguf" if n == "gguf/split/" else n for n in make.FILES}
    assert {n for n in models_made if not any(x in n for x in no_model)} == set(BY_NAME)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_logits_are_of_order_one_and_depend_on_the_past(case: Case) -> None:
    ids = case.ids()
    logits = case.logits(ids)
    assert logits.shape == (len(ids), case.config["vocab_size"])
    assert 0.1 < logits.std() < 5
    other = ids.copy()
    other[0] = (ids[0] + 1) % case.config["vocab_size"]
    changed = np.abs(case.logits(other) - logits).max(1)
    assert changed.min() > 1e-3  # above every tolerance: a wrong attention cannot hide


# ------------------------------------------------------------------ the writers against files of the programs


def test_llmc_writer_repeats_the_programs_model_byte_for_byte(shared: Path) -> None:
    for name, version in (("gpt2_tiny.bin", 3), ("gpt2_tiny_bf16.bin", 5)):
        raw = (shared / name).read_bytes()
        d, p = readers.llmc_gpt2(raw)
        p["wte"] = p["wte"][: d["vocab"]]
        assert llmc.gpt2(Model(d, p), version) == raw


def test_llmc_writer_rounds_to_bfloat16_as_torch_does(shared: Path) -> None:
    d, p = readers.llmc_gpt2((shared / "gpt2_tiny.bin").read_bytes())
    p["wte"] = p["wte"][: d["vocab"]]
    assert llmc.gpt2(Model(d, p), 5) == (shared / "gpt2_tiny_bf16.bin").read_bytes()


def test_llmc_writer_repeats_the_programs_other_files(shared: Path) -> None:
    raw = (shared / "gpt2_tiny_tokenizer.bin").read_bytes()
    assert llmc.tokenizer(readers.llmc_tokens(raw), 2, eot=508) == raw
    raw = (shared / "realvocab" / "gpt2_tokenizer_v1.bin").read_bytes()
    assert llmc.tokenizer(readers.llmc_tokens(raw), 1) == raw
    raw = (shared / "gpt2_tiny_val.bin").read_bytes()
    assert llmc.shard(np.frombuffer(raw, "<u2", offset=1024)) == raw
    raw = (shared / "gpt2_tiny_debug_state.bin").read_bytes()
    s = readers.llmc_state(raw, 509)
    grads = np.frombuffer(raw, "<f4", offset=1024 + 8 * s["x"].size + 4 * s["logits"].size + 4)
    assert llmc.debug_state(s["x"], s["y"], s["logits"], s["loss"], [grads]) == raw


def test_nanoeuler_writer_repeats_the_programs_file(shared: Path) -> None:
    for name in ("nanoeuler_main.bin", "nanoeuler_chat.bin"):
        raw = (shared / name).read_bytes()
        d, merges, p = readers.nanoeuler(raw)
        kv = d["NKV"] * d["C"] // d["NH"]
        q, k, v = np.split(p["qkvw"], [d["C"], d["C"] + kv], axis=1)
        w = {"tok_emb": p["tok"], "rms_att": p["rms1g"], "wq": q, "wk": k, "wv": v, "wo": p["attprojw"]}
        w |= {"rms_ffn": p["rms2g"], "w1": p["gatew"], "w3": p["upw"], "w2": p["downw"], "rms_final": p["rmsfg"]}
        dims = {"vocab": d["V"], "dim": d["C"], "n_head": d["NH"], "n_kv_head": d["NKV"], "n_layer": d["NL"]}
        dims |= {"seq": d["T"], "hidden": d["H"], "n_pred": d["K"]}
        assert nanoeuler.nanoeuler(Model(dims, w | {"wcls": p["headw"]}), merges) == raw


def test_nx_writer_repeats_the_trainers_export(shared: Path) -> None:
    raw = (shared / "nx_ours_qwen.gguf").read_bytes()
    p = readers.nx_arrays(readers.gguf(raw)[1])
    dims = {"dim": 16, "hidden": 32, "n_layer": 2}
    assert gguf.nx(Model(dims, p)) == raw


def test_microgpt_writers_hold_what_the_programs_files_hold(fixtures_dir: Path, shared: Path) -> None:
    for kind in ("f64", "f32"):
        meta, _ = readers.safetensors((shared / f"microgpt_names.{kind}.safetensors").read_bytes())
        ours, arrays = readers.safetensors((fixtures_dir / f"microgpt/microgpt_{kind}.safetensors").read_bytes())
        assert set(ours) == set(meta) - {"seed", "num_steps"}
        assert {a.dtype.str for a in arrays.values()} == {"<f8" if kind == "f64" else "<f4"}


# ------------------------------------------------------------------ hand-computed bytes


def at(raw: bytes, offset: int, kind: str = "<f4") -> Any:
    return np.frombuffer(raw, kind, 1, offset)[0]


def test_llmc_headers_are_as_documented(fixtures_dir: Path) -> None:
    raw = (fixtures_dir / "llmc/gpt2_v3.bin").read_bytes()
    assert raw[:4] == bytes.fromhex("c6d73401")
    assert np.frombuffer(raw, "<i4", 9).tolist() == [20240326, 3, 16, 29, 2, 3, 18, 128, 0]
    assert len(raw) == 1024 + 4 * (128 * 18 + 16 * 18 + 2 * (12 * 18 * 18 + 13 * 18) + 2 * 18)
    raw = (fixtures_dir / "llmc_llama3/llama3_v3_scaled.bin").read_bytes()
    header = np.frombuffer(raw, "<i4", 17).tolist()
    assert header == [20240803, 3, 64, 29, 2, 3, 1, 18, 1, 4, 0, 100000000, 1, 4, 3, 1, 0]
    state = (fixtures_dir / "llmc_llama3/llama3_v3_debug_state.bin").read_bytes()
    assert np.frombuffer(state, "<i4", 4).tolist() == [20240803, 3, 8, 0]  # B = 3 sits where the version would


def test_llmc_versions_2_and_4_keep_norms_in_float32(fixtures_dir: Path) -> None:
    first_gain = float(make.GPT2.p["ln1w"][0, 0])
    before = (29 + 16) * 18 * 2  # wte and wpe in bfloat16
    assert at((fixtures_dir / "llmc/gpt2_v2.bin").read_bytes(), 1024 + before) == first_gain
    assert at((fixtures_dir / "llmc/gpt2_v4.bin").read_bytes(), 1024 + (128 + 16) * 18 * 2) == first_gain
    last = (fixtures_dir / "llmc/gpt2_v2_norms_last.bin").read_bytes()
    norms = 4 * (4 * 2 * 18 + 2 * 18)  # four slabs of two layers, and the last norm
    assert at(last, len(last) - norms) == first_gain
    assert len(last) == len((fixtures_dir / "llmc/gpt2_v2.bin").read_bytes())


def test_llama3_stores_up_before_gate(fixtures_dir: Path) -> None:
    raw = (fixtures_dir / "llmc_llama3/llama3_v3.bin").read_bytes()
    c, kv, h, n = 18, 6, 64, 2
    up = 1024 + 4 * (29 * c + n * c + n * (c + 2 * kv) * c + n * c * c + n * c)
    assert at(raw, up) == make.LLAMA3.p["w3"][0, 0, 0]
    assert at(raw, up + 4 * n * h * c) == make.LLAMA3.p["w1"][0, 0, 0]


def test_llama3_width_needs_the_multiplier_that_the_header_truncates() -> None:
    assert llmc.llama3_ffn(4096, 1.3, 1024) == 14336  # Llama-3.1-8B
    assert llmc.llama3_ffn(4096, 1, 1024) == 11264
    assert (llmc.llama3_ffn(18, 1.3, 4), llmc.llama3_ffn(18, 1, 4)) == (64, 48)


def test_debug_states_are_the_judges_logits_and_loss(fixtures_dir: Path) -> None:
    state = readers.llmc_state((fixtures_dir / "llmc/gpt2_v3_debug_state.bin").read_bytes(), 29)
    logits = np.stack([BY_NAME["llmc/gpt2_v3.bin"].logits(x) for x in state["x"]])
    assert np.abs(state["logits"] - logits).max() < 1e-6
    loss = np.mean([judges.nll(z, y) for z, y in zip(logits, state["y"], strict=True)])
    assert state["loss"] == pytest.approx(loss, abs=1e-6)
    raw = (fixtures_dir / "llmc_llama3/llama3_v3_debug_state.bin").read_bytes()
    last = np.frombuffer(raw, "<f4", 29, 1024 + 2 * 3 * 8 * 4 + 23 * 29 * 4)
    ids = np.frombuffer(raw, "<i4", 8, 1024 + 16 * 4)
    assert np.abs(last - BY_NAME["llmc_llama3/llama3_v3.bin"].logits(ids)[-1]).max() < 1e-6


def test_llama2c_tokenizer_records_follow_each_other(fixtures_dir: Path) -> None:
    raw = (fixtures_dir / "llama2c/tokenizer.bin").read_bytes()
    assert at(raw, 0, "<u4") == 6  # "\n</s>\n" and "<0x00>" are the longest
    assert raw[4:17] == bytes(4) + b"\x05\x00\x00\x00<unk>"
    assert raw.endswith(b"\x00\x00\x20\xc1\x02\x00\x00\x00\xc3\xa9")  # -10.0, 2 bytes, é


def test_llama2c_v0_has_rope_tables_before_its_classifier(fixtures_dir: Path) -> None:
    raw = (fixtures_dir / "llama2c/v0.bin").read_bytes()
    assert np.frombuffer(raw, "<i4", 7).tolist() == [12, 20, 2, 3, 1, -270, 16]
    classifier = len(raw) - 4 * 270 * 12
    assert at(raw, classifier) == make.LLAMA2C.p["wcls"][0, 0]
    cos, sin = classifier - 2 * 4 * 16 * 2, classifier - 4 * 16 * 2
    assert at(raw, cos) == 1
    assert at(raw, sin) == 0
    assert at(raw, cos + 8) == np.float32(math.cos(1))  # position 1, first pair
    assert at(raw, sin + 12) == pytest.approx(math.sin(0.01), rel=1e-6)  # position 1, second pair of four


def test_llama2c_v2_alternates_values_and_scales(fixtures_dir: Path) -> None:
    raw = (fixtures_dir / "llama2c/v2.bin").read_bytes()
    assert raw[:4] == b"24ka"
    assert (at(raw, 36, "u1"), at(raw, 37, "<i4")) == (0, 4)  # 64 halved until it divides 12
    body = 256 + 4 * (2 * 2 * 12 + 12)
    w = make.LLAMA2C.p["tok_emb"].reshape(-1, 4)
    scale = at(raw, body + 270 * 12)
    assert scale == np.abs(w[0]).max() / np.float32(127)
    values = np.frombuffer(raw, "i1", 4, body)
    assert values.tolist() == [round(float(x / scale)) for x in w[0]]
    wq = body + 270 * 12 * 2  # one byte and a fourth of a float per element
    q = make.LLAMA2C.p["wq"][0].reshape(-1, 4)
    assert np.abs(np.frombuffer(raw, "i1", 144, wq)).reshape(-1, 4).max(1).tolist() == [127] * 36
    assert at(raw, wq + 144) == np.abs(q[0]).max() / np.float32(127)


def test_two_nanoeuler_merges_spell_the_same_bytes() -> None:
    words: dict[int, bytes] = {i: bytes([i]) for i in range(256)}
    for a, b in nanoeuler.SAME_BYTES:
        words[len(words)] = words[a] + words[b]
    assert words[258] == words[259] == b"the"


def test_eval_set_examples_chain_by_their_byte_counts(fixtures_dir: Path) -> None:
    raw = (fixtures_dir / "llmc/hellaswag.bin").read_bytes()
    assert np.frombuffer(raw, "<i4", 3).tolist() == [20240522, 1, 3]
    offset, longest = 1024, 0
    for index, (label, context, _) in enumerate(make.EXAMPLES):
        words = np.frombuffer(raw, "<u2", 6 + len(context), offset).tolist()
        assert words[:1] + words[2:6] == [65535, index, label, 4, len(context)]
        assert words[6:] == list(context)
        offset += words[1]
        longest = max(longest, words[1])
    assert (offset, at(raw, 12, "<i4")) == (len(raw), longest)


# ------------------------------------------------------------------ other packages as judges


@pytest.mark.parametrize(
    "name", [n for n in make.FILES if n.startswith("gguf/") and n.endswith(".gguf")] + ["nx/nx.gguf"]
)
def test_gguf_package_reads_the_same_tensors(name: str, fixtures_dir: Path) -> None:
    from gguf import GGUFReader
    from gguf.quants import dequantize

    path = fixtures_dir / name
    reader = GGUFReader(path)
    if "q8_0" in name:
        want = {n: gguf.encode(a, kind) for n, (a, kind) in gguf.llama_tensors(make.Q8, "q8_0").items()}
        assert {t.name: t.data.tobytes() for t in reader.tensors} == want
        return
    _, arrays = readers.gguf(path.read_bytes())
    got = {}
    for t in reader.tensors:  # dequantize() would take big-endian numbers for little-endian ones
        a = t.data if t.data.dtype.kind == "f" else dequantize(t.data, t.tensor_type)
        got[t.name] = a.reshape(t.shape[::-1])
    assert list(got) == list(arrays)
    assert all((got[n] == arrays[n].astype(np.float32)).all() for n in got)


def test_q8_0_blocks_are_those_of_the_gguf_package() -> None:
    from gguf import GGMLQuantizationType
    from gguf.quants import quantize

    w = models.Bits(60).spread(31, 96, scale=1.0)
    w[3, :32] = 0
    assert gguf.encode(w, "q8_0") == quantize(w, GGMLQuantizationType.Q8_0).tobytes()


def test_big_endian_gguf_holds_the_numbers_of_the_little_endian_one(fixtures_dir: Path) -> None:
    little = readers.gguf((fixtures_dir / "gguf/llama.gguf").read_bytes())
    big = readers.gguf((fixtures_dir / "gguf/llama_big_endian.gguf").read_bytes())
    assert little[0] == big[0]
    assert all((little[1][n] == big[1][n]).all() for n in little[1])


def test_split_gguf_files_hold_the_whole_model(fixtures_dir: Path) -> None:
    whole, keys = {}, []
    for path in sorted((fixtures_dir / "gguf/split").iterdir()):
        meta, arrays = readers.gguf(path.read_bytes())
        whole |= arrays
        keys.append((meta["split.no"], meta["split.count"], meta["split.tensors.count"]))
    assert keys == [(k, 3, 21) for k in range(3)]
    want = gguf.llama_tensors(make.LLAMA)
    assert list(whole) == list(want)
    assert all((whole[n] == want[n][0]).all() for n in want)


@pytest.mark.parametrize("name", [n for n in sums(ROOT / "fixtures") if n.endswith(".safetensors")])
def test_safetensors_package_reads_the_same_tensors(name: str, fixtures_dir: Path) -> None:
    from safetensors import safe_open

    meta, arrays = readers.safetensors((fixtures_dir / name).read_bytes())
    with safe_open(fixtures_dir / name, "numpy") as f:
        assert sorted(f.keys()) == sorted(arrays)
        assert (f.metadata() or {}) == meta
        for n, a in arrays.items():
            s = f.get_slice(n)
            assert tuple(s.get_shape()) == a.shape
            if s.get_dtype() != "BF16":  # numpy has none
                assert (f.get_tensor(n) == a).all()


def test_npz_is_numpys(fixtures_dir: Path) -> None:
    with np.load(fixtures_dir / "nx/weights.npz") as z:
        assert sorted(z.files) == sorted(make.NX.p)
        assert all((z[n] == make.NX.p[n]).all() for n in z.files)


@pytest.mark.parametrize("name", ["hf_llama", "hf_gpt2", "hf_qwen2"])
def test_tokenizers_package_loads_the_tokenizer(name: str, fixtures_dir: Path) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(fixtures_dir / name / "tokenizer.json"))
    ids = tokenizer.encode(" the hen is here\n<|endoftext|>").ids
    words = [vocab.BPE_TOKENS[i] for i in ids]
    assert b"".join(words).decode() == " the hen is here\n<|endoftext|>"
    assert words[0] == b" the"
    assert ids[-1] == vocab.BPE_EOT


def test_hugging_face_weights_are_the_models(fixtures_dir: Path) -> None:
    _, gpt2 = readers.safetensors((fixtures_dir / "hf_gpt2/model.safetensors").read_bytes())
    assert gpt2["transformer.h.1.attn.c_attn.weight"].shape == (18, 54)
    assert (gpt2["transformer.h.1.mlp.c_proj.weight"] == make.GPT2.p["fcprojw"][1].T).all()
    _, llama = readers.safetensors((fixtures_dir / "hf_llama/model.safetensors").read_bytes())
    q = llama["model.layers.0.self_attn.q_proj.weight"]
    own = make.LLAMA.p["wq"][0]
    # the permutation of transformers' conversion script, head by head: (hd / 2, 2) becomes (2, hd / 2)
    assert (q == own.reshape(3, 3, 2, 18).swapaxes(1, 2).reshape(18, 18)).all()


LLAMA_CPP = ["llama", "llama_f16", "llama_v2", "llama_q8_0", "llama31", "qwen2_bf16", "gpt2", "gpt2_v2"]


@pytest.mark.parametrize("stem", LLAMA_CPP)
def test_llama_cpp_loads_the_file_and_agrees_with_the_judge(stem: str, fixtures_dir: Path) -> None:
    xllamacpp = pytest.importorskip("xllamacpp")
    case = BY_NAME[f"gguf/{stem}.gguf"]
    params = xllamacpp.CommonParams()
    params.model.path = str(case.path(fixtures_dir))
    params.n_ctx, params.n_parallel, params.warmup, params.cpuparams.n_threads = 64, 1, False, 1
    server = xllamacpp.Server(params)
    ids = case.ids(12 if case.config["context_length"] < 64 else 60)
    got = server.handle_completions(
        {"prompt": ids.tolist(), "n_predict": 1, "temperature": 0, "logprobs": 10, "n_probs": 10, "ignore_eos": False}
    )
    logits = case.logits(ids)[-1]
    logp = logits - np.log(np.exp(logits).sum())
    top = got["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
    # block types: llama.cpp rounds activations to 8 bits as well
    limit = 0.1 if "q8_0" in stem or "bf16" in stem else 2e-2
    assert len(top) == 10
    assert max(abs(logp[t["id"]] - t["logprob"]) for t in top) < limit


def test_equal_numbers_are_written_by_all_writers(fixtures_dir: Path) -> None:
    """One model through five formats: the first value matrix is the same wherever it is stored."""
    want = make.LLAMA2C.p["wv"][0]
    _, tensors = readers.gguf((fixtures_dir / "gguf/llama.gguf").read_bytes())
    assert (tensors["blk.0.attn_v.weight"] == want).all()
    raw = llama2c.v1(make.LLAMA2C)
    wv = 256 + 4 * (2 * 2 * 12 + 12 + 270 * 12 + 2 * 144 + 2 * 4 * 12)
    assert (np.frombuffer(raw, "<f4", 48, wv).reshape(4, 12) == want).all()
    hf = safetensors.llama_arrays(make.LLAMA2C)
    assert (hf["model.layers.0.self_attn.v_proj.weight"] == want).all()
