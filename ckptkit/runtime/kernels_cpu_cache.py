# mypy: ignore-errors
"""Compiled kernels on disk: `kernel` is numba's njit with a cache that knows what it was compiled from.

Numba keys a compiled function by its own source file; what the kernels emit is written in others. So the names in the
cache carry a digest of all of them. They lie in NUMBA_CACHE_DIR, else beside the package, else in ckptkit/numba of
the user's cache directory; where none can be written kernels are compiled at every start, and `note()` says so. Never
in a shared temporary directory: what is loaded is pickled.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path

from numba import njit
from numba.core import config

HERE = Path(__file__).parent
SOURCES = [
    *sorted(HERE.glob("kernels_cpu*.py")),
    *sorted(HERE.glob("simd*.py")),
    HERE.parent / "quant" / "lanes.py",
    HERE.parent / "quant" / "types.py",
]
DIGEST = hashlib.sha256(b"".join(path.read_bytes() for path in SOURCES)).hexdigest()[:12]
JIT = {"nogil": True, "error_model": "numpy"}

_kernels = []
_reason = ""


def _writable(directory: Path) -> bool:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            return True
    except OSError:
        return False


def _choose() -> bool:
    """Whether there is a directory to keep kernels in; tells numba which, where it would not find it."""
    global _reason
    if config.CACHE_DIR:
        given = Path(config.CACHE_DIR)
        _reason = f"NUMBA_CACHE_DIR={given} cannot be written"
        return _writable(given)
    if _writable(HERE / "__pycache__"):
        return True
    try:
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ckptkit" / "numba"
    except RuntimeError:  # there is no home
        home = None
    if home is not None and _writable(home):
        config.CACHE_DIR = str(home)
        return True
    _reason = f"{HERE / '__pycache__'} and {home or 'a home directory'} cannot be written"
    return False


_keep = _choose()


def kernel(function):
    """Compile on first use, for any thread to run without the GIL; kept on disk where that is possible."""
    function.__qualname__ += "_" + DIGEST
    try:
        made = njit(cache=_keep, **JIT)(function)
    except RuntimeError:  # numba found no place to write
        made = njit(**JIT)(function)
    _kernels.append(made)
    return made


def compiled(made, signature):
    """The overload of a kernel for a signature, compiled or from disk. A disk that fails ends the keeping."""
    global _keep, _reason
    try:
        made.compile(signature)
    except OSError as e:
        _keep, _reason = False, f"a compiled kernel could not be kept ({e.strerror or e})"
        for each in _kernels:
            if hasattr(each._cache, "disable"):
                each._cache.disable()
        made.compile(signature)
    return made.overloads[signature]


def on_disk(made) -> bool:
    """Whether any version of a kernel is kept."""
    try:
        return any(Path(made._cache.cache_path).glob(f"*.{made.py_func.__qualname__}-*.nbc"))
    except (AttributeError, TypeError, OSError):
        return False


def note() -> str:
    """Why kernels are not kept; "" where they are."""
    return "" if _keep else f"compiled kernels are not kept: {_reason}; set NUMBA_CACHE_DIR to a directory of yours"
