"""llama.cpp as judge, in a child process because it can abort: python tests/llamacpp.py DOING TOLD FILE...

TOLD is JSON: n_ctx, and what each of DOING needs. One line of JSON comes out for each answer, or nothing but an exit
code where llama.cpp dies.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

MARK = "=== judged "  # on stderr, before what llama.cpp says about a file
FIRST = "init: initializing"  # what it says first


class Died(Exception):
    """llama.cpp refused a file or stopped the process; the text is what it said."""


def run(path: Path, prompt: list[int], n: int, n_ctx: int = 64) -> dict[str, Any] | None:
    """Greedy ids after `prompt` and the ten likeliest of each step; None where llama.cpp refuses the file."""
    answers = run_all(path, [prompt], n, n_ctx)
    return answers[0] if answers else None


def run_all(path: Path, prompts: list[list[int]], n: int, n_ctx: int = 64) -> list[dict[str, Any]] | None:
    """The same for several prompts, one after another."""
    done = _child("complete", {"prompts": prompts, "n": n, "n_ctx": n_ctx}, [path])
    lines = _answers(done.stdout)
    return lines if done.returncode == 0 and len(lines) == len(prompts) else None


def judged(paths: list[Path]) -> list[tuple[bool, str]]:
    """Of each file: whether it loads and one token can be computed, and what llama.cpp said (stderr) about it."""
    found: list[tuple[bool, str]] = []
    while len(found) < len(paths):  # a file that kills the process is refused; another child judges the rest
        done = _child("judge", {"n_ctx": 64}, paths[len(found) :])
        loaded = [a["loaded"] for a in _answers(done.stdout)]
        # it writes from a thread of its own, in order but late: its first words part the files, the marks count them
        said = done.stderr.replace(MARK, "").split(FIRST)[1:]
        if len(said) != done.stderr.count(MARK):
            said = done.stderr.split(MARK)[1:]
        died = len(loaded) < len(paths) - len(found)
        assert not died or done.returncode, done.stderr
        found += zip([*loaded, *([False] if died else [])], said, strict=True)
    return found


def tokenized(path: Path, texts: list[str]) -> tuple[list[list[int]], dict[str, Any]]:
    """Ids of each text with what the file says is to be added, special tokens parsed; and the server's properties.

    Raises Died.
    """
    done = _child("tokenize", {"texts": texts, "n_ctx": 64}, [path])
    if done.returncode:
        raise Died(done.stderr)
    *ids, properties = _answers(done.stdout)
    return [a["tokens"] for a in ids], properties


def _child(doing: str, told: dict[str, Any], paths: list[Path]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, __file__, doing, json.dumps(told), *map(str, paths)]
    quick = os.environ | {"GGML_NO_BACKTRACE": "1"}  # or each abort starts a debugger
    return subprocess.run(
        command, capture_output=True, encoding="utf-8", errors="replace", timeout=300, check=False, env=quick
    )


def _answers(out: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.splitlines() if line.startswith('{"')]


# -- in the child


def _server(path: str, n_ctx: int, n_threads: int = 2) -> Any:
    import xllamacpp as x

    params = x.CommonParams()
    params.model.path = path
    params.n_ctx, params.n_batch, params.warmup, params.cpuparams.n_threads = n_ctx, n_ctx, False, n_threads
    params.flash_attn_type = x.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    params.cache_type_k = params.cache_type_v = x.ggml_type.GGML_TYPE_F32
    return x.Server(params)


def _complete(server: Any, prompt: list[int], n: int) -> dict[str, Any]:
    request = {"prompt": prompt, "max_tokens": n, "temperature": 0, "logprobs": 10, "ignore_eos": True}
    answer = server.handle_completions(request)
    content = (answer if isinstance(answer, dict) else json.loads(answer))["choices"][0]["logprobs"]["content"]
    top = [[[t["id"], t["logprob"]] for t in step["top_logprobs"]] for step in content]
    return {"ids": [step["id"] for step in content], "top": top}


def complete(paths: list[str], told: dict[str, Any]) -> Iterator[dict[str, Any]]:
    server = _server(paths[0], told["n_ctx"])
    for prompt in told["prompts"]:
        yield _complete(server, prompt, told["n"])


def judge(paths: list[str], told: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for path in paths:
        print(MARK, file=sys.stderr, flush=True)
        try:
            answer = _server(path, told["n_ctx"], 1).handle_completions({"prompt": [1], "max_tokens": 1})
        except RuntimeError:
            yield {"loaded": False}
        else:
            yield {"loaded": "choices" in answer}


def tokenize(paths: list[str], told: dict[str, Any]) -> Iterator[dict[str, Any]]:
    from urllib.request import Request, urlopen

    server = _server(paths[0], told["n_ctx"])
    for text in told["texts"]:
        body = json.dumps({"content": text, "add_special": True, "parse_special": True}).encode()
        with urlopen(Request(f"{server.listening_address}/tokenize", body, {"Content-Type": "application/json"})) as r:
            yield json.load(r)
    with urlopen(f"{server.listening_address}/props") as r:
        yield json.load(r)


def main() -> None:
    doing = {"complete": complete, "judge": judge, "tokenize": tokenize}[sys.argv[1]]
    for answer in doing(sys.argv[3:], json.loads(sys.argv[2])):
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
