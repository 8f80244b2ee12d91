"""A page that shows where a model is surprised: one file, no script, nothing fetched.

The text is coloured by -log p, with the perplexity window by window, by position in the window, and the worst tokens.
Token text is hostile: it is escaped, control and direction characters are spelt out, and the page's own policy forbids
scripts and the network.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, BinaryIO

import numpy as np
import numpy.typing as npt

from .perplexity import PplReport, exp
from .perplexity_tokens import Columns

if TYPE_CHECKING:
    from ..tokenizer import Tokenizer

SHOWN = 20_000  # coloured tokens for each mode
WORST = 40
BEFORE = 12  # tokens shown before one of the worst
BINS = 64
SHADES = (  # up to this nll, background, text
    (0.1, "#ffffff", "#222"), (0.5, "#fff7ec", "#222"), (1.0, "#fee8c8", "#222"), (2.0, "#fdd49e", "#222"),
    (3.0, "#fdbb84", "#222"), (4.0, "#fc8d59", "#222"), (6.0, "#ef6548", "#111"), (8.0, "#d7301f", "#fff"),
    (11.0, "#b30000", "#fff"), (math.inf, "#7f0000", "#fff"),
)  # fmt: skip
EDGES = np.array([edge for edge, _, _ in SHADES[:-1]])
POLICY = "default-src 'none'; style-src 'unsafe-inline'"
STYLE = """
body{font:15px/1.5 system-ui,sans-serif;margin:2em auto;max-width:64em;padding:0 1em;color:#222;background:#fff}
h1{font-size:1.4em}h2{font-size:1.15em;margin:2em 0 .3em}h3{font-size:1em;margin:1.4em 0 .3em}
p.rule,p.note{color:#555;margin:.2em 0}
table{border-collapse:collapse;font-variant-numeric:tabular-nums}
td,th{padding:.15em .7em;text-align:right;border-bottom:1px solid #ddd;font-weight:normal}
th{color:#555}td.t,th.t{text-align:left;font-family:ui-monospace,monospace;white-space:pre-wrap;overflow-wrap:anywhere}
.text{font:14px/1.7 ui-monospace,monospace;white-space:pre-wrap;overflow-wrap:anywhere}
.text{border:1px solid #ddd;padding:.8em}
.text b{font-weight:normal;unicode-bidi:isolate;border-radius:2px}
.text i{color:#888;font-style:normal}
.legend b{font-weight:normal;padding:.1em .5em;font-size:13px;border:1px solid #eee}
svg{max-width:100%;height:auto}svg text{font:11px system-ui,sans-serif;fill:#555}
.pair{display:flex;flex-wrap:wrap;gap:1.5em}
""" + "".join(f".s{k}{{background:{back};color:{ink}}}\n" for k, (_, back, ink) in enumerate(SHADES))


def write(out: BinaryIO, title: str, parts: Sequence[tuple[PplReport, Columns]], tokenizer: Tokenizer | None) -> None:
    """Write the page for one or more modes; `parts` are their reports with what each scored token got."""
    for piece in page(title, parts, tokenizer):
        out.write(piece.encode("utf-8", "replace"))


def page(title: str, parts: Sequence[tuple[PplReport, Columns]], tokenizer: Tokenizer | None) -> Iterator[str]:
    """The page, in pieces."""
    show = _Text(tokenizer)
    yield '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
    yield f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
    yield '<meta name="viewport" content="width=device-width,initial-scale=1">'
    yield f"<title>{visible(title)}</title><style>{STYLE}</style></head><body><h1>{visible(title)}</h1>\n"
    yield from _summary([report for report, _ in parts])
    for report, columns in parts:
        yield f"<h2>mode {visible(report.mode)}</h2><p class=rule>{visible(report.rule)}.</p>"
        yield from (f"<p class=note>note: {visible(note)}</p>" for note in report.notes)
        yield '<div class="pair">'
        yield _chart("perplexity so far", "window", np.arange(1, len(report.running) + 1), np.array(report.running))
        yield _chart("perplexity by position in the window", "position", *_by_position(columns))
        yield "</div>\n"
        yield from _worst(columns, show)
        yield from _coloured(columns, show)
    yield "</body></html>\n"


def visible(text: str) -> str:
    """Text as HTML: markup escaped, and characters that do not print (controls, direction marks) spelt out."""
    return html.escape(
        "".join(
            c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape", "surrogatepass").decode() for c in text
        )
    )


class _Text:
    """Token texts as HTML, made once for each id."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self.tokenizer = tokenizer
        self.known: dict[int, str] = {}

    def __call__(self, id: int) -> str:
        if id not in self.known:
            self.known[id] = self._make(id)
        return self.known[id]

    def _make(self, id: int) -> str:
        if self.tokenizer is None or id >= self.tokenizer.vocab_size:
            return f"[{id}]"
        # Part of a character: its bytes in hex, since no token alone says what the character is.
        return visible(self.tokenizer.token_bytes(id).decode("utf-8", "backslashreplace"))

    def quoted(self, id: int) -> str:
        """In one line, for a tooltip or a table."""
        return "“" + self(id).replace("\n", "\\n").replace("\t", "\\t") + "”"


def _summary(reports: Sequence[PplReport]) -> Iterator[str]:
    names = ("mode", "tokens", "nll", "perplexity", "±", "bits/byte", "tokens/word", "window", "windows", "precision")
    yield "<table><tr>" + "".join(f"<th>{name}</th>" for name in names) + "</tr>"
    for r in reports:
        cells = [r.mode, f"{r.tokens:,}", f"{r.nll:.6f}", _number(r.ppl), _number(r.stderr), _number(r.bits_per_byte)]
        cells += [_number(r.tokens_per_word), f"{r.n_ctx:,}", f"{r.chunks:,}", r.precision]
        yield "<tr>" + "".join(f"<td>{visible(c)}</td>" for c in cells) + "</tr>"
    yield "</table>\n"


def _number(x: float | None) -> str:
    return "" if x is None else f"{x:,.4f}" if abs(x) < 1e6 else f"{x:.4g}"


def _by_position(columns: Columns) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Middle of each of at most BINS ranges of positions, and e^(mean nll) there."""
    position, nll = columns["position"], columns["nll"]
    if not len(nll):
        return np.empty(0), np.empty(0)
    lo, hi = int(position.min()), int(position.max()) + 1
    n = min(BINS, hi - lo)
    which = (position - lo) * n // (hi - lo)
    count = np.bincount(which, minlength=n)
    with np.errstate(all="ignore"):
        mean = np.bincount(which, nll, n) / count
        middle = np.bincount(which, position, n) / count
    there = count > 0
    return middle[there], np.array([exp(m) for m in mean[there]])


def _chart(title: str, axis: str, x: npt.NDArray[np.generic], y: npt.NDArray[np.float64]) -> str:
    """A line through (x, y), y from 0 up to its largest finite value; at most 600 points."""
    keep = np.unique(np.linspace(0, max(len(x) - 1, 0), min(len(x), 600)).astype(int)) if len(x) else np.empty(0, int)
    x, y = np.asarray(x, float)[keep], np.asarray(y, float)[keep]
    x, y = x[np.isfinite(y)], y[np.isfinite(y)]
    if not len(x):
        return ""
    left, right, high, low = 64.0, 430.0, 24.0, 190.0
    x0, span, step = x[0], max(float(x[-1] - x[0]), 1e-9), _step(float(y.max()))
    n_steps = max(math.ceil(float(y.max()) / step), 1)
    top = n_steps * step
    at = [(left + (a - x0) / span * (right - left), low - b / top * (low - high)) for a, b in zip(x, y, strict=True)]
    line = " ".join(f"{a:.1f},{b:.1f}" for a, b in at)
    levels = [(k * step, low - k / n_steps * (low - high)) for k in range(n_steps + 1)]
    ticks = "".join(
        f'<line x1="{left}" x2="{right}" y1="{b:.1f}" y2="{b:.1f}" stroke="#ddd"/>'
        f'<text x="{left - 6}" y="{b + 4:.1f}" text-anchor="end">{_short(v)}</text>'
        for v, b in levels
    )
    ends = "".join(
        f'<text x="{a:.1f}" y="{low + 16}" text-anchor="{anchor}">{_short(v)}</text>'
        for a, v, anchor in ((left, x[0], "start"), (right, x[-1], "end"))
    )
    dots = "".join(
        f'<circle cx="{a:.1f}" cy="{b:.1f}" r="2.5" fill="#b30000"/>' for a, b in at[: len(at) if len(at) < 3 else 0]
    )
    return (
        f'<figure style="margin:0"><h3>{title}</h3><svg width="450" height="225" viewBox="0 0 450 225" role="img">'
        f"<title>{title}</title>{ticks}{ends}{dots}"
        f'<polyline fill="none" stroke="#b30000" stroke-width="1.5" points="{line}"/>'
        f'<text x="{(left + right) / 2}" y="{low + 30}" text-anchor="middle">{axis}</text></svg></figure>'
    )


def _step(largest: float) -> float:
    """A round distance (1, 2 or 5 times a power of ten) between three to six grid lines."""
    rough = max(largest, 1e-9) / 5
    unit = 10.0 ** math.floor(math.log10(rough))
    return next(unit * m for m in (1, 2, 5, 10) if unit * m >= rough)


def _short(v: float) -> str:
    return f"{v:,.0f}" if v >= 100 or v == int(v) else f"{v:.3g}"


def _probability(nll: float) -> str:
    p = math.exp(-nll)
    return f"{100 * p:.1f} %" if p >= 0.001 else f"1 in {1 / p:,.0f}" if p > 1e-15 else f"e^-{nll:.0f}"


def _worst(columns: Columns, show: _Text) -> Iterator[str]:
    nll = columns["nll"]
    order = np.argsort(-nll, kind="stable")[:WORST]
    yield f"<details><summary>the {len(order)} worst tokens</summary><table>"
    yield "<tr><th>nll</th><th>p</th><th>rank</th><th>place</th><th class=t>after</th><th class=t>token</th>"
    yield "<th class=t>likeliest</th></tr>\n"
    runs = _runs(columns)
    for k in order.tolist():
        lo = max(int(runs[k]), k - BEFORE)
        before = "".join(show(i) for i in columns["id"][lo:k].tolist()).replace("\n", "\\n")
        yield f"<tr><td>{nll[k]:.2f}</td><td>{_probability(float(nll[k]))}</td><td>{columns['rank'][k]:,}</td>"
        token, best = show.quoted(int(columns["id"][k])), show.quoted(int(columns["best"][k]))
        yield f"<td>{columns['index'][k]:,}</td><td class=t>{before}</td><td class=t>{token}</td>"
        yield f"<td class=t>{best} {_probability(float(columns['best_nll'][k]))}</td></tr>\n"
    yield "</table></details>\n"


def _runs(columns: Columns) -> npt.NDArray[np.int64]:
    """For each scored token, the first of the run of neighbours in the source that it belongs to."""
    index, n = columns["index"], len(columns["index"])
    new = np.ones(n, bool)
    new[1:] = index[1:] != index[:-1] + 1
    return np.maximum.accumulate(np.where(new, np.arange(n), 0))


def _coloured(columns: Columns, show: _Text) -> Iterator[str]:
    n = len(columns["nll"])
    yield "<h3>the text, coloured by surprise</h3><p class=legend>-log p up to "
    yield "".join(
        f"<b class=s{k}>{edge:g}</b>" if edge < math.inf else f"<b class=s{k}>more</b>"
        for k, (edge, _, _) in enumerate(SHADES)
    )
    cut = f"; the first {SHOWN:,} of {n:,} scored tokens" if n > SHOWN else ""
    yield f" nats{cut}. Point at a token to see what was expected; […] stands for tokens that were not scored.</p>"
    yield '<div class="text">'
    shade = np.searchsorted(EDGES, columns["nll"], side="left").tolist()
    starts = _runs(columns).tolist()
    names: Iterable[str] = ("id", "nll", "rank", "best", "best_nll")
    rows = zip(*(columns[name][:SHOWN].tolist() for name in names), strict=True)
    for k, (id, nll, rank, best, best_nll) in enumerate(rows):
        if starts[k] == k and (k or columns["index"][0] > 1):
            yield "<i>[…]</i>" if k == 0 else "\n<i>[…]</i>"
        tip = f"{nll:.2f} nats, {_probability(nll)}"
        if rank > 1:
            tip += f", rank {rank:,}; expected {show.quoted(best)} {_probability(best_nll)}"
        yield f'<b class=s{shade[k]} title="{tip}">{show(id)}</b>'
    yield "</div>\n"
