"""Reports of scoring as lines for people: modes side by side, and the statistics of a comparison."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Body = Mapping[str, Any]

FIGURES = (  # heading, key, format
    ("tokens", "tokens", ",d"),
    ("mean nll", "nll", ".6f"),
    ("perplexity", "ppl", ",.4f"),
    ("+/-", "stderr", ",.4f"),
    ("bits/byte", "bits_per_byte", ".4f"),
    ("tokens/word", "tokens_per_word", ".4f"),
    ("window", "n_ctx", ",d"),
    ("stride", "stride", ",d"),
    ("windows", "chunks", ",d"),
)
COMPARED = (  # label, key, factor, format
    ("PPL(Q)", "ppl", 1, ".6f"),
    ("PPL(base)", "ppl_base", 1, ".6f"),
    ("ln(PPL(Q)/PPL(base))", "log_ratio", 1, ".6f"),
    ("PPL(Q)/PPL(base)", "ratio", 1, ".6f"),
    ("PPL(Q)-PPL(base)", "difference", 1, ".6f"),
    ("mean KLD", "kld", 1, ".6f"),
    ("mean Δp %", "delta_p", 100, ".3f"),
    ("RMS Δp %", "delta_p_rms", 100, ".3f"),
    ("same top p %", "same_top", 100, ".3f"),
)


def _cell(value: Any, form: str) -> str:
    return "-" if value is None else format(value, form)


def side_by_side(bodies: Sequence[Body]) -> list[str]:
    """A table with one line for each mode, then each mode's rule and notes."""
    rows = [["mode", *(heading for heading, _, _ in FIGURES)]]
    rows += [[str(b["mode"]), *(_cell(b.get(key), form) for _, key, form in FIGURES)] for b in bodies]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))])
        for row in rows
    ]
    lines += [f"{b['mode'].ljust(widths[0])}  {b['rule']}" for b in bodies]
    return lines + [f"note: {note}" for note in dict.fromkeys(n for b in bodies for n in b["notes"])]


def compared(body: Body) -> list[str]:
    """The figures of a comparison with their errors, then the spread of KLD and Δp."""
    lines = [f"{body['tokens']:,} tokens in {body['chunks']:,} windows of {body['n_ctx']:,}: {body['rule']}"]
    for label, key, factor, form in COMPARED:
        value, error = body[key]["value"], body[key]["stderr"]
        known = "" if error is None else f" ± {format(factor * error, form)}"
        lines.append(f"{label:21} {format(factor * value, form):>12}{known}")
    if body["correlation"] is not None:
        lines.append(f"{'correlation of ln PPL':21} {100 * body['correlation']:11.2f} %")
    lines.append(f"{'':9} {'KLD':>10} {'Δp %':>10}")
    for key in body["delta_p_spread"]:
        kld = body["kld_spread"].get(key)
        lines.append(f"{_place(key):9} {_cell(kld, '.6f'):>10} {100 * body['delta_p_spread'][key]:10.3f}")
    return lines + [f"note: {note}" for note in body["notes"]]


def _place(key: str) -> str:
    return (
        f"{float(key[1:]):.1f} %"
        if key[0] == "p" and key != "p"
        else {"max": "maximum", "min": "minimum"}.get(key, key)
    )
