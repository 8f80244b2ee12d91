"""What a check finds: one shape for every rule."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ERROR, WARNING, NOTE = "error", "warning", "note"
SEVERITIES = (ERROR, WARNING, NOTE)
JUDGED_BY = "xllamacpp 2026.10.11549"  # the llama.cpp whose answers the rules were held against


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
