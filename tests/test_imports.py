"""Who may import whom inside the package: an ast walk over every module."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "ckptkit"
BASE = {
    "errors",
    "report",
    "files",
    "parallel",
    "tensor",
    "quant",
    "tokenizer",
    "checkpoint",
    "arch",
    "layout",
    "stream",
}
MAY = {  # the part of the package -> parts that it may import, besides itself
    "errors": set(),
    "parallel": set(),
    "report": {"errors"},
    "files": {"errors"},
    "tensor": {"errors", "quant", "files"},
    "quant": {"errors", "tensor", "parallel"},
    "tokenizer": {"errors", "tensor"},
    "checkpoint": {"errors", "files", "tensor", "quant", "tokenizer"},
    "arch": BASE - {"report", "layout", "stream"},
    "layout": BASE - {"report", "stream"},
    "stream": BASE - {"report", "layout", "arch"},
    "formats": BASE,
    "runtime": BASE - {"layout", "stream"},
    "conversion": BASE | {"formats", "manifest", "ollama"},
    "check": BASE | {"formats"},
}
FAMILIES = ("gguf", "llmc", "llama2c", "microgpt", "nanoeuler", "npz", "sidecar")  # and what Hugging Face reads
HUGGING_FACE = ("safetensors", "hf_")
SHARED = ("options", "tokenizer_files", "safetensors_io", "npz", "microgpt_model")  # what several formats are made of
GATHER = ("__init__", "tokenizer_files")  # these open files of any format


def imports(path: Path) -> set[str]:
    """Modules of the package that a file imports, anywhere in it, as dotted names below the package."""
    here = path.relative_to(PACKAGE).with_suffix("").parts
    inside = list(here[:-1])
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            if node.level:
                base = inside[: len(inside) - node.level + 1]
            elif node.module and node.module.split(".")[0] == "ckptkit":
                base, node.module = [], ".".join(node.module.split(".")[1:])
            else:
                continue
            stem = base + (node.module.split(".") if node.module else [])
            found |= {".".join(stem)} if node.module else {".".join([*stem, a.name]) for a in node.names}
        elif isinstance(node, ast.Import):
            found |= {a.name.removeprefix("ckptkit.") for a in node.names if a.name.startswith("ckptkit.")}
    return {f for f in found if f}


def family(module: str) -> str:
    """The family of a module of formats/; those of one family share tables."""
    if module.startswith(HUGGING_FACE):
        return "hugging face"
    return next((f for f in FAMILIES if module.startswith(f)), module)


FILES = sorted(PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=[str(p.relative_to(PACKAGE)) for p in FILES])
def test_imports_go_one_way(path: Path) -> None:
    part = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    for module in imports(path):
        other, *rest = module.split(".")
        if other != part and part in MAY:
            assert other in MAY[part], f"{path.name} imports {module}"
        if part == other == "formats" and rest and path.stem not in GATHER and rest[0] not in SHARED:
            assert family(rest[0]) == family(path.stem), f"{path.name} imports {module}, of another format"


def test_third_parties_stay_where_they_belong() -> None:
    places = {"click": ("cli",), "numba": ("runtime", "quant"), "llvmlite": ("runtime", "quant")}
    for path in FILES:
        part = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
            for name in names:
                assert part in places.get(name.split(".")[0], (part,)), f"{path} imports {name}"
