"""A chat template run in a process of its own, with little time and memory: it is a program from a file.

Stdin: JSON {"template", "values"}; stdout: JSON {"text"} or {"error"}. Imports nothing of ours, so that it starts fast.
What a template may use is what transformers gives it: namespace, strftime_now, raise_exception, tojson without HTML's
escapes, break and continue.
"""

from __future__ import annotations

import json
import resource
import sys
from contextlib import suppress
from datetime import datetime
from typing import Any

LONGEST = 1 << 20  # characters that a template may make of one message
SECONDS = 2
MEMORY = 1 << 30  # bytes


def render(template: str, values: dict[str, Any]) -> str:
    """The template's text, in Jinja's sandbox."""
    from jinja2 import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment, safe_range
    from jinja2.utils import Namespace

    def refuse(message: str) -> None:
        raise TemplateError(message)

    def now(layout: str) -> str:
        return datetime.now().strftime(layout)

    def as_json(value: Any, indent: int | None = None) -> str:
        return json.dumps(value, ensure_ascii=False, indent=indent)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.globals = {
        "raise_exception": refuse, "range": safe_range, "namespace": Namespace, "dict": dict, "strftime_now": now,
    }  # fmt: skip
    environment.filters["tojson"] = as_json
    pieces, length = [], 0
    for piece in environment.from_string(template).generate(values):
        pieces.append(piece)
        length += len(piece)
        if length > LONGEST:
            raise TemplateError(f"more than {LONGEST:,} characters")
    return "".join(pieces)


def main() -> None:
    """Take one template, answer, end."""
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
    with suppress(ValueError):  # macOS knows no limit below what it maps anyway
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    asked = json.load(sys.stdin)
    try:
        answer = {"text": render(asked["template"], asked["values"])}
    except Exception as e:  # whatever a program from a file can raise
        answer = {"error": f"{type(e).__name__}: {e}"[:1000]}
    json.dump(answer, sys.stdout)


if __name__ == "__main__":
    main()
