"""What a check finds: one shape for every rule."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ERROR, WARNING, NOTE = "error", "warning", "note"
SEVERITIES = (ERROR, WARNING, NOTE)
JUDGED_BY = "xllamacpp 2026.10.11549"  # the llama.cpp whose answers the rules were held against
# An error: llama.cpp refuses the file, or dies of it at the first token; each is confirmed by a file in
# tests/test_check.py. A warning: it loads, and gives something else than was meant. A note: for older versions.
ERRORS = """
    unreadable shard-first shard-count offsets alignment arch-missing arch-unknown key-missing key-type key-array
    key-value head-groups head-size no-tensors tensor-missing tensor-extra tensor-shape vocabulary-rows
    position-rows vector-type matrix-type tokenizer-missing no-vocabulary tokenizer-unknown tokenizer-array
    tokens-missing array-length pre-unknown merges-missing bos-absent eos-absent vocabulary-equal byte-token
    template-syntax tokens-beyond-rows
"""
WARNINGS = """
    trailing rope-base rope-pairing nonfinite zero-rows padding-rows token_type-missing scores-missing array-longer
    pre-missing bos-default eos-default id-range vocabulary-empty vocabulary-merge vocabulary-unknown template-code
"""
NOTES = "bias-missing tied-output"
RULES = {
    rule: severity
    for severity, rules in ((ERROR, ERRORS), (WARNING, WARNINGS), (NOTE, NOTES))
    for rule in rules.split()
}


@dataclass(frozen=True)
class Finding:
    """`rule` is stable; `at` names the place; `effect` is what will happen, `mend` what to do about it.

    `fixable` where --fix can do it.
    """

    severity: str
    rule: str
    at: str
    what: str
    effect: str
    mend: str = ""
    fixable: bool = False


def finding(rule: str, at: str, what: str, effect: str, mend: str = "", fixable: bool = False) -> Finding:
    """A finding of one of RULES, which says how grave it is."""
    return Finding(RULES[rule], rule, at, what, effect, mend, fixable)


@dataclass(frozen=True)
class Report:
    """Findings on one file, the gravest first; `notes` say what could not be looked at."""

    path: Path
    format: str
    arch: str
    findings: tuple[Finding, ...]
    notes: tuple[str, ...] = field(default=())

    @property
    def refused(self) -> bool:
        """Whether any finding is an error."""
        return any(f.severity == ERROR for f in self.findings)

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values under stable keys."""
        counts = {s: sum(f.severity == s for f in self.findings) for s in SEVERITIES}
        return {
            "path": str(self.path),
            "format": self.format,
            "arch": self.arch,
            "judged_by": JUDGED_BY,
            "counts": counts,
            "findings": [vars(f) for f in self.findings],
            "notes": list(self.notes),
        }
