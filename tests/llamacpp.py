"""llama.cpp as judge, in a child process because it can abort: python tests/llamacpp.py FILE TOLD.

TOLD is JSON: prompts (lists of ids), n, n_ctx. For each prompt one line of JSON with ids and top (id, log-probability)
comes out, or nothing but an exit code where it refuses the file.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any


def run(path: Path, prompt: list[int], n: int, n_ctx: int = 64) -> dict[str, Any] | None:
    """Greedy ids after `prompt` and the ten likeliest of each step; None where llama.cpp refuses the file."""
    answers = run_all(path, [prompt], n, n_ctx)
    return answers[0] if answers else None


def run_all(path: Path, prompts: list[list[int]], n: int, n_ctx: int = 64) -> list[dict[str, Any]] | None:
    """The same for several prompts, one after another."""
    told = json.dumps({"prompts": prompts, "n": n, "n_ctx": n_ctx})
    done = subprocess.run(
        [sys.executable, __file__, str(path), told], capture_output=True, text=True, timeout=300, check=False
    )
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"ids"')]
    return lines if done.returncode == 0 and len(lines) == len(prompts) else None


def main() -> None:
    import xllamacpp as x

    told = json.loads(sys.argv[2])
    params = x.CommonParams()
    params.model.path = sys.argv[1]
    params.n_ctx, params.n_batch, params.warmup, params.cpuparams.n_threads = told["n_ctx"], told["n_ctx"], False, 2
    params.flash_attn_type = x.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    params.cache_type_k = params.cache_type_v = x.ggml_type.GGML_TYPE_F32
    server = x.Server(params)
    for prompt in told["prompts"]:
        request = {"prompt": prompt, "max_tokens": told["n"], "temperature": 0, "logprobs": 10, "ignore_eos": True}
        answer = server.handle_completions(request)
        content = (answer if isinstance(answer, dict) else json.loads(answer))["choices"][0]["logprobs"]["content"]
        top = [[[t["id"], t["logprob"]] for t in step["top_logprobs"]] for step in content]
        print(json.dumps({"ids": [step["id"] for step in content], "top": top}), flush=True)


if __name__ == "__main__":
    main()
