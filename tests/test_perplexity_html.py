"""The page: it is whole, says what was measured, reaches for nothing, and hostile token text stays text."""

from __future__ import annotations

import html
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from test_perplexity import Bytes, Table, text

from ckptkit import score as scoring
from ckptkit.runtime import perplexity_html
from ckptkit.score import PplOptions

HOSTILE = [
    b"</b></div><script>alert(1)</script>",
    b'" onmouseover="alert(1)',
    b"' style='background:url(http://example.org/x)'",
    b"&lt;img src=x onerror=alert(1)&gt;",
    b"<!--",
    b"]]><svg onload=alert(1)>",
    "\u202egnp.exe\u2066".encode(),
    b"\x00\x1b[31m\x07\r",
    b"\xf0\x9f\x98",
    b"\xed\xa0\x80",
    "über 猫".encode(),
]
VOID = {"meta", "br", "img", "link", "input"}


class Hostile(Bytes):
    """The same ids, with texts that try to leave the page."""

    def token_bytes(self, id: int) -> bytes:
        return HOSTILE[id % len(HOSTILE)]


class Page(HTMLParser):
    """Tags, attributes and text; every tag that opens must close, in order."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.values: list[str] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}
        self.values += [v or "" for name, v in attrs if name != "title"]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style":
            self.text.append(data)

    def handle_comment(self, data: str) -> None:
        raise AssertionError(f"a comment: {data}")


def make(tmp_path: Path, tokenizer: Any, data: bytes, name: str = "text.txt", **options: Any) -> tuple[str, Page]:
    path, out = tmp_path / name, tmp_path / "page.html"
    path.write_bytes(data)
    scoring.run(Table(tokenizer), path, PplOptions(**({"n_ctx": 16, "html": out} | options)))
    page = Page()
    page.feed(out.read_text(encoding="utf-8"))
    page.close()
    assert page.open == []
    return out.read_text(encoding="utf-8"), page


@pytest.mark.parametrize("mode", ["llama", "full", "docs", "all"])
def test_hostile_tokens_stay_text(tmp_path: Path, mode: str) -> None:
    source, page = make(tmp_path, Hostile(), bytes(range(32, 122)), "<b onclick=x>&.txt", mode=mode)
    assert page.tags <= {
        "html", "head", "meta", "title", "style", "body", "h1", "h2", "h3", "p", "table", "tr", "td", "th", "div",
        "figure", "svg", "line", "text", "polyline", "circle", "details", "summary", "b", "i",
    }  # fmt: skip
    assert not [name for name in page.attributes if name.startswith("on")]
    assert not [v for v in page.values if "http" in v or "url" in v or "javascript" in v]
    assert "Perplexity on <b onclick=x>&.txt" in page.text
    shown = set(page.text)
    for raw in HOSTILE[:6]:
        assert raw.decode() in shown
    assert "\\u202egnp.exe\\u2066" in shown
    assert "\\x00\\x1b[31m\\x07\\r" in shown
    assert "\\xf0\\x9f\\x98" in shown
    assert "über 猫" in shown
    assert not re.search("[\u202a-\u202e\u2066-\u2069\x00-\x08\x0b-\x1f\x7f]", source)
    assert "default-src 'none'" in html.unescape(source)


def test_page_shows_the_report_and_every_scored_token(tmp_path: Path) -> None:
    data = b'ab<cd>& "ef"\n' * 9
    source, page = make(tmp_path, Bytes(), data, mode="full")
    [r] = scoring.run(Table(Bytes()), tmp_path / "text.txt", PplOptions(mode="full", n_ctx=16))
    assert {f"{r.tokens:,}", f"{r.nll:.6f}", r.rule + "."} <= set(page.text)
    block = source[source.index('<div class="text">') :]
    tokens = re.findall(r"<b class=s\d title=\"[^\"]*\">(.*?)</b>", block, re.S)
    assert html.unescape("".join(tokens)).encode() == data[1 : r.tokens + 1]
    m = Table(Bytes())
    first = m.nll(list(data[:1]), list(data[1:2]))[0]
    assert f'title="{first:.2f} nats' in block


def test_text_left_out_is_marked(tmp_path: Path) -> None:
    _, page = make(tmp_path, Bytes(), text(64))
    assert page.text.count("[…]") == 4  # before each of four second halves
    assert [t.split()[0] for t in page.text if t.startswith("the ") and "worst" in t] == ["the"]


def test_long_text_is_cut_and_said_to_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(perplexity_html, "SHOWN", 30)
    source, _ = make(tmp_path, Bytes(), text(200), mode="full")
    assert source.count("<b class=s") == 30 + len(perplexity_html.SHADES)
    assert "the first 30 of 192 scored tokens" in source


def test_shard_without_tokenizer_shows_ids(tmp_path: Path) -> None:
    header = np_header(40)
    _, page = make(tmp_path, None, header + bytes([65, 0] * 40), "v.bin", mode="full")
    assert page.text.count("[65]") >= 32


def np_header(n: int) -> bytes:
    return b"".join(v.to_bytes(4, "little") for v in (20240520, 1, n, *[0] * 253))


def test_colour_follows_the_surprise() -> None:
    edges = perplexity_html.EDGES
    assert (sorted(edges) == edges).all()
    assert perplexity_html.SHADES[0][1] == "#ffffff"
