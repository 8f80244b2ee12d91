"""The forward against float64 judges and stored references: archs, pairings, batches, caches, errors."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from runtime_models import CONFIGS, checkpoint, random_blocks, truth
from smollm import SMOLLM

from ckptkit.checkpoint import RopeScaling
from ckptkit.errors import UnsupportedError
from ckptkit.quant.types import QType
from ckptkit.runtime import kernels_cpu, load

IDS = np.random.default_rng(5).integers(0, 53, 70)


@pytest.mark.parametrize("precision", ["exact", "fast"])
@pytest.mark.parametrize("arch", CONFIGS)
def test_logits_are_the_judges(arch, precision):
    ck, values = checkpoint(CONFIGS[arch])
    with load(ck, precision=precision, threads=2) as m:
        expected = truth(ck.config, values, IDS)
        np.testing.assert_allclose(m.forward(IDS), expected, rtol=0, atol=1e-4)
        np.testing.assert_allclose(m.forward(IDS, logits="last"), expected[-1], rtol=0, atol=1e-4)


@pytest.mark.parametrize("pairing", ["adjacent", "half"])
def test_both_pairings(pairing):
    config = replace(CONFIGS["llama"], rope_pairing=pairing, tied_output=True)
    ck, values = checkpoint(config)
    with load(ck) as m:
        np.testing.assert_allclose(m.forward(IDS), truth(config, values, IDS), rtol=0, atol=1e-4)


@pytest.mark.parametrize("arch", CONFIGS)
def test_tokens_one_by_one_and_in_pieces_give_the_same(arch):
    ck, values = checkpoint(CONFIGS[arch])
    with load(ck, threads=2) as m:
        whole = m.forward(IDS)
        cache = m.new_cache()
        pieces = [m.forward(IDS[lo:hi], cache) for lo, hi in [(0, 20), (20, 64)]]
        assert np.array_equal(np.concatenate(pieces), whole[:64])
        single = np.stack([m.forward([i], cache, logits="last") for i in IDS[64:]])
        assert cache.length[0] == len(IDS)
        cache = m.new_cache()
        singles = np.stack([m.forward([i], cache, logits="last") for i in IDS])
        bound = 3e-6 * np.abs(whole).max()  # one token sums in another order than many: 25 units in the last place
        np.testing.assert_allclose(single, whole[64:], rtol=0, atol=bound)
        np.testing.assert_allclose(singles, whole, rtol=0, atol=bound)
        np.testing.assert_allclose(whole, truth(ck.config, values, IDS), rtol=0, atol=1e-4)


def test_batches_of_sequences_give_what_each_gives_alone():
    ck, _ = checkpoint(CONFIGS["qwen2"])
    with load(ck) as m:
        lengths = [5, 1, 40]
        cache = m.new_cache(n_seq=3, context=48)
        tokens = np.concatenate([IDS[:n] for n in lengths])
        pos = np.concatenate([np.arange(n) for n in lengths])
        seq = np.repeat(np.arange(3), lengths)
        out = m.forward_batch(tokens, pos, seq, cache, np.arange(len(tokens)))
        alone = np.concatenate([m.forward(IDS[:n]) for n in lengths])
        np.testing.assert_allclose(out, alone, rtol=0, atol=1e-5)
        assert cache.length.tolist() == lengths
        step = m.forward_batch([7, 8], [5, 1], [0, 1], cache, [1])  # one more token of two of them
        np.testing.assert_allclose(step[0], m.forward([IDS[0], 8], logits="last"), rtol=0, atol=1e-5)


def test_prompts_longer_than_one_pass():
    config = replace(CONFIGS["llama"], context_length=1300)
    ck, values = checkpoint(config)
    ids = np.random.default_rng(0).integers(0, 53, 1100)
    with load(ck) as m:
        out = m.forward(ids)
        np.testing.assert_allclose(
            out[[0, 511, 512, 1099]], truth(config, values, ids)[[0, 511, 512, 1099]], atol=1e-4, rtol=0
        )
        cache = m.new_cache()
        m.forward(ids[:-1], cache, logits="last")
        np.testing.assert_allclose(m.forward(ids[-1:], cache, logits="last"), out[-1], rtol=0, atol=1e-5)


@pytest.mark.parametrize("type", sorted(kernels_cpu.NATIVE - {QType.F32}), ids=lambda t: t.name)
def test_quantised_weights_exact(type):
    """float64 on the decoded weights: within 1e-4 of the largest logit."""
    config = replace(CONFIGS["llama"], n_embd=256, n_ff=512, n_head=8, head_dim=32, vocab_size=64)

    def encode(name, x):
        return random_blocks(type, x.shape, 1 / np.sqrt(x.shape[1]), len(name)) if x.ndim == 2 else None

    ck, values = checkpoint(config, encode=encode)
    with load(ck, threads=2) as m:
        expected = truth(config, values, IDS[:24])
        bound = 1e-4 * np.abs(expected).max()
        assert np.abs(m.forward(IDS[:24]) - expected).max() <= bound
        cache = m.new_cache()
        steps = np.stack([m.forward([i], cache, logits="last") for i in IDS[:24]])
        assert np.abs(steps - expected).max() <= bound
        expected = [] if type in (QType.F16, QType.BF16) else [f"{type.name} interleaved"]
        assert [how for how in m.load_report.copied if "decoded" not in how] == expected


def test_f16_cache_is_close():
    ck, values = checkpoint(CONFIGS["llama"])
    with load(ck, type_k="f16", type_v="f16") as m:
        out = m.forward(IDS)
        np.testing.assert_allclose(out, truth(ck.config, values, IDS), rtol=0, atol=3e-2)
        assert m.new_cache().nbytes == load(ck).new_cache().nbytes // 2


def test_linear_scaling_stretches_positions():
    config = replace(CONFIGS["llama"], rope_scaling=RopeScaling("linear", 4.0))
    ck, values = checkpoint(config)
    with load(ck) as m:
        angle = np.arange(80)[:, None] / 4 * 10000.0 ** (-np.arange(0, 16, 2) / 16)
        np.testing.assert_allclose(m.rope_table, np.stack([np.cos(angle), np.sin(angle)], 1), rtol=0, atol=1e-6)
        unstretched = truth(replace(config, rope_scaling=None), values, IDS)
        assert np.abs(m.forward(IDS) - unstretched).max() > 0.1


def refused(match, call, *args, **kwargs):
    with pytest.raises(UnsupportedError) as e:
        call(*args, **kwargs)
    assert match in str(e.value)


def test_what_cannot_run_is_refused_by_name():
    ck, _ = checkpoint(CONFIGS["llama"])
    refused("yarn", load, replace(ck, config=replace(ck.config, rope_scaling=RopeScaling("yarn", 4.0))))
    refused("known architecture", load, replace(ck, config=replace(ck.config, arch="mamba")))
    refused("device", load, ck, device="tpu")
    refused("precision", load, ck, precision="half")
    refused("cache type", load, ck, type_k="q8_0")
    for threads in (0, -1, 1000):
        refused("threads", load, ck, threads=threads)
    window = replace(ck.source, metadata={"llama.attention.sliding_window": 32})
    refused("sliding-window", load, replace(ck, source=window))
    gpt2, _ = checkpoint(CONFIGS["gpt2"])
    refused("no positions", load, gpt2, context=81)


def test_bad_tokens_and_full_contexts_are_refused():
    ck, _ = checkpoint(CONFIGS["gpt2"])
    with load(ck, context=20) as m:
        refused("no tokens", m.forward, [])
        refused("vocabulary", m.forward, [53])
        refused("vocabulary", m.forward, [-1])
        refused("choice of logits", m.forward, [1], logits="first")
        refused("context is full", m.forward, IDS[:21])
        cache = m.new_cache()
        m.forward(IDS[:20], cache)
        refused("context is full", m.forward, [1], cache)
        refused("prediction head", m.forward, [1], head=1)
        refused("out of range", m.new_cache, context=21)
    refused("closed", m.forward, [1])


def test_a_model_that_does_not_fit_is_refused(monkeypatch):
    ck, _ = checkpoint(CONFIGS["llama"])
    with load(ck) as m:
        monkeypatch.setattr(kernels_cpu, "available_bytes", lambda: 1000)
        refused("does not fit", m.new_cache)


# --- stored references ---


@pytest.mark.parametrize("name", ["gpt2_tiny.bin", "gpt2_tiny_bf16.bin"])
def test_gpt2_reference(shared, name):
    import ckptkit.formats

    ref = np.load(shared / f"gpt2_tiny_{'bf16' if 'bf16' in name else 'fp32'}.ref.npz")
    with load(ckptkit.formats.open(shared / name)) as m:
        np.testing.assert_allclose(m.forward(ref["x"][0]), ref["logits_row0"], rtol=0, atol=2e-4)
        check_greedy(m, ref["prompt"], ref["greedy"])


def test_nanoeuler_reference(shared):
    import ckptkit.formats

    ref = np.load(shared / "nanoeuler_main.ref.npz")
    with load(ckptkit.formats.open(shared / "nanoeuler_main.bin")) as m:
        np.testing.assert_allclose(m.forward(ref["prompt"]), ref["logits_head0"], rtol=0, atol=2e-4)
        for j, expected in enumerate(ref["logits_all_last"]):
            np.testing.assert_allclose(m.forward(ref["prompt"], head=j)[-1], expected, rtol=0, atol=2e-4)
        check_greedy(m, ref["prompt"], ref["greedy"])


def check_greedy(m, prompt, greedy):
    cache, ids = m.new_cache(), list(prompt)
    logits = m.forward(prompt, cache, logits="last")
    start = len(prompt) if list(greedy[: len(prompt)]) == list(prompt) else 0
    for expected in greedy[start:]:
        ids.append(int(np.argmax(logits)))
        assert ids[-1] == expected
        logits = m.forward(ids[-1:], cache, logits="last")


def test_smollm2_reference(shared, models):
    import ckptkit.formats

    ref = np.load(shared / "SmolLM2_ref.npz")
    path = models / SMOLLM
    with load(ckptkit.formats.open(path), context=64) as m:
        logits = m.forward(ref["ids"])
        bound = 1e-4 * np.abs(ref["logits_last"]).max()
        assert np.abs(logits[-1] - ref["logits_last"]).max() <= bound
        assert np.abs(logits[0][:64] - ref["logits_pos0_first64"]).max() <= bound
        check_greedy(m, ref["ids"], ref["greedy"])


@pytest.mark.parametrize("type", ["q8_0", "q4_0", "q5_1"])
def test_fast_single_tokens_score_as_exact(trained, tmp_path, type):
    """What fast may cost: 1e-3 of the mean nll, three of a hundred best tokens."""
    import ckptkit

    ckptkit.convert(trained / "gpt2_tiny.bin", tmp_path / "m.gguf", type=type)
    ids = np.fromfile(trained / "gpt2_tiny_val.bin", np.uint16)[512 : 512 + 8 * 64 + 1].astype(np.int64)
    found = {}
    for precision in ("exact", "fast"):
        with ckptkit.load(tmp_path / "m.gguf", precision=precision, threads=2) as m:
            logits = []
            for lo in range(0, 8 * 64, 64):
                cache = m.new_cache()
                logits += [m.forward([i], cache, logits="last") for i in ids[lo : lo + 64]]
            z = np.array(logits, np.float64)
            z -= z.max(1, keepdims=True)
            found[precision] = z - np.log(np.exp(z).sum(1, keepdims=True))
    exact, fast = found["exact"], found["fast"]
    rows = np.arange(len(exact))
    assert abs(exact[rows, ids[1:]].mean() - fast[rows, ids[1:]].mean()) <= 1e-3
    assert (exact.argmax(1) == fast.argmax(1)).mean() >= 0.97
