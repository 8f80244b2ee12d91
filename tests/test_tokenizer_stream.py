"""Streams: whole characters, and never a part of a stop string."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptkit.tokenizer import StopStrings, Utf8Stream


def test_a_character_over_three_tokens_comes_out_once_it_is_whole() -> None:
    stream = Utf8Stream()
    assert [stream.feed(b) for b in (b"\xf0", b"\x9f", b"\x99\x82", b"!")] == ["", "", "🙂", "!"]
    assert stream.flush() == ""


def test_invalid_and_unfinished_bytes_become_the_replacement_character() -> None:
    stream = Utf8Stream()
    assert stream.feed(b"a\xffb") == "a�b"
    assert stream.feed(b"\xe4\xb8") == ""
    assert stream.flush() == "�"
    assert stream.feed(b"c") == "c"


@given(st.text(max_size=30), st.lists(st.integers(1, 3), min_size=1))
def test_pieces_add_up_to_the_text(text: str, cuts: list[int]) -> None:
    data = text.encode("utf-8", "replace")
    stream, out, at = Utf8Stream(), "", 0
    for k in range(len(data)):
        n = cuts[k % len(cuts)]
        out += stream.feed(data[at : at + n])
        at += n
    assert out + stream.flush() == data.decode()


def test_a_stop_string_over_three_tokens_is_found_and_never_shown() -> None:
    stops = StopStrings(["O P Q"])
    assert [stops.feed(t) for t in ("N O", " P", " Qrest")] == ["N ", "", ""]
    assert stops.found == "O P Q"
    assert stops.feed("more") == ""
    assert stops.flush() == ""


def test_text_kept_back_comes_out_when_it_was_no_stop_string() -> None:
    stops = StopStrings(["</s>", ""])
    assert stops.feed("a</") == "a"
    assert stops.feed("b><") == "</b>"
    assert not stops.found
    assert stops.flush() == "<"


@pytest.mark.parametrize(("stops", "text", "shown", "found"), [
    (["bc", "abcd"], "xabcd", "xa", "bc"),
    (["cd", "bcd"], "abcd", "a", "bcd"),
    (["aab"], "aaab", "a", "aab"),
    ([], "abc", "abc", ""),
])  # fmt: skip
def test_the_stop_string_complete_first_counts(stops: list[str], text: str, shown: str, found: str) -> None:
    for step in (1, 2, len(text)):
        matcher = StopStrings(stops)
        out = "".join(matcher.feed(text[i : i + step]) for i in range(0, len(text), step)) + matcher.flush()
        assert (out, matcher.found) == (shown, found), step


@given(st.text("ab", max_size=40), st.lists(st.text("ab", min_size=1, max_size=5), max_size=3), st.integers(1, 5))
def test_what_is_shown_does_not_depend_on_the_pieces(text: str, stops: list[str], step: int) -> None:
    ends = [(text.find(s) + len(s), text.find(s)) for s in stops if s in text]
    expected = text[: min(ends)[1]] if ends else text
    matcher = StopStrings(stops)
    out = "".join(matcher.feed(text[i : i + step]) for i in range(0, len(text), step)) + matcher.flush()
    assert out == expected
