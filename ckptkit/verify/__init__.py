"""Proof that two files say the same: compared level by level in canonical space, and the cause named where they do not.

verify(a, b)                two checkpoints: structure, tensors, logits
verify_state(ck, path)      a model against llm.c's debug state: logits and loss
verify_manifest(out, path)  a converted file against the manifest of its conversion
"""

from __future__ import annotations

from .causes import Cause
from .manifest import ManifestReport, verify_manifest
from .pair import Options, Report, verify
from .state import StateReport, verify_state

__all__ = [
    "Cause", "ManifestReport", "Options", "Report", "StateReport", "verify", "verify_manifest", "verify_state",
]  # fmt: skip
