"""microgpt's JSON files, from independent writers and from the program itself."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hostile import accepted, error_of

from ckptkit.checkpoint import Checkpoint
from ckptkit.errors import FormatError, UnsupportedError
from ckptkit.formats import microgpt
from ckptkit.formats.options import ReadOptions, WriteOptions
from ckptkit.layout import write_rows
from ckptkit.quant.types import QType
from fixtures import models
from fixtures.writers import microgpt as writer

MODEL = models.microgpt(51)
FORMS = {"flat": writer.as_json(MODEL), "nested": writer.nested_json(MODEL), "bare": writer.bare_json(MODEL)}
OURS = {
    "attn_wq": "attn_q", "attn_wk": "attn_k", "attn_wv": "attn_v", "attn_wo": "attn_output",
    "mlp_fc1": "ffn_up", "mlp_fc2": "ffn_down",
}  # fmt: skip


def ours(theirs: str) -> str:
    if theirs.startswith("layer"):
        layer, part = theirs[5:].split(".")
        return f"blk.{layer}.{OURS[part]}.weight"
    return {"wte": "token_embd", "wpe": "position_embd", "lm_head": "output"}[theirs] + ".weight"


def opened(folder: Path, data: bytes, **options: Any) -> Checkpoint:
    (folder / "m.json").write_bytes(data)
    return microgpt.read(folder / "m.json", ReadOptions(**options))


def write(ck: Checkpoint, path: Path) -> bytes:
    microgpt.write(ck, write_rows(microgpt.LAYOUT, ck.config, ck.tensors), path, WriteOptions())
    return path.read_bytes()


@pytest.mark.parametrize("form", FORMS)
def test_reads_every_form(tmp_path: Path, form: str) -> None:
    ck = opened(tmp_path, FORMS[form], n_head=3 if form == "bare" else None)
    c = ck.config
    assert (c.arch, c.n_layer, c.n_embd, c.n_head, c.n_kv_head) == ("microgpt", 2, 9, 3, 3)
    assert (c.context_length, c.vocab_size, c.n_ff, c.head_dim, c.tied_output) == (8, 7, 36, 3, False)
    assert ck.source.version == form
    assert len(ck.tensors) == len(MODEL.p)
    for name, a in MODEL.p.items():
        t = ck.tensors[ours(name)]
        assert (t.type, t.shape) == (QType.F64, a.shape)
        assert t.read().tobytes() == a.tobytes()
    if form == "bare":
        assert ck.tokenizer is None
    else:
        assert ck.tokenizer is not None
        assert ck.tokenizer.encode("hellban") == [3, 2, 4, 4, 1, 0, 5]
        assert ck.tokenizer.bos == 6


@pytest.mark.parametrize("form", FORMS)
def test_writes_the_same_bytes_back(tmp_path: Path, form: str) -> None:
    ck = opened(tmp_path, FORMS[form], n_head=3)
    assert write(ck, tmp_path / "out.json") == FORMS[form]


@pytest.mark.parametrize("name", ["microgpt_names.json", "microgpt_names.state_dict.json"])
def test_files_of_the_program_come_back_byte_identical(tmp_path: Path, shared: Path, name: str) -> None:
    ck = microgpt.read(shared / name, ReadOptions())
    assert ck.config.n_head == 4
    assert write(ck, tmp_path / "out.json") == (shared / name).read_bytes()
    whole = json.loads((shared / name).read_bytes())
    wq = np.array(whole.get("state_dict", whole)["layer0.attn_wq"])
    assert ck.tensors["blk.0.attn_q.weight"].read().tobytes() == wq.tobytes()


def test_a_model_from_elsewhere_is_written_flat(tmp_path: Path) -> None:
    ck = opened(tmp_path, FORMS["nested"])
    ck = replace(ck, source=replace(ck.source, format="gguf", metadata={}))
    assert write(ck, tmp_path / "out.json") == FORMS["flat"]


def test_heads_are_assumed_with_a_note(tmp_path: Path) -> None:
    ck = opened(tmp_path, writer.bare_json(models.microgpt(52, n_embd=8)))
    assert ck.config.n_head == 4
    assert any("n_head is not stored" in note for note in ck.source.notes)
    error = error_of(microgpt.read, tmp_path / "m.json", FORMS["bare"])  # 9 channels
    assert isinstance(error, FormatError)
    assert "--heads" in error.hint


def test_foreign_tokenizers_and_heads_are_refused(tmp_path: Path) -> None:
    from ckptkit.tokenizer.chars import CharTokenizer

    ck = opened(tmp_path, FORMS["flat"])
    for other in (
        replace(ck, tokenizer=CharTokenizer.from_bytes(b"abcdefg")),
        replace(ck, config=replace(ck.config, head_dim=4)),
        replace(ck, config=replace(ck.config, norm_eps=1e-6)),
    ):
        with pytest.raises(UnsupportedError):
            write(other, tmp_path / "out.json")
    assert not (tmp_path / "out.json").exists()


def test_detection(tmp_path: Path) -> None:
    for data in FORMS.values():
        assert microgpt.detect(tmp_path, data[:4096], len(data))
    assert not microgpt.detect(tmp_path, b'{"n_embd": 4, "n_layer": 2, "model_type": "gpt2"}', 50)
    assert not microgpt.detect(tmp_path, b'[{"wte": [[', 11)
    assert not microgpt.detect(tmp_path, b"", 0)


def changed(**how: Any) -> bytes:
    return json.dumps(json.loads(FORMS["flat"]) | how).encode()


def state(**how: Any) -> bytes:
    whole = json.loads(FORMS["flat"])
    whole["state_dict"] |= how
    return json.dumps(whole).encode()


MATRIX = MODEL.p["wte"].tolist()
BROKEN = {
    "empty": b"",
    "empty object": b"{}",
    "a list": b"[]",
    "not UTF-8": b'{"wte": "\xff"}',
    "nested": b'{"wte": ' + b"[" * 100_000,
    "key twice": b'{"wte": [[1.0]], "wte": [[1.0]]}',
    "digits": b'{"wte": [[' + b"9" * 5000 + b"]]}",
    "too large a number": state(wte=[[10**400, *r[1:]] for r in MATRIX]),
    "state_dict is text": changed(state_dict="x"),
    "config is text": changed(config="x"),
    "text in a row": state(wte=[["1.0", *r[1:]] for r in MATRIX]),
    "truth in a row": state(wte=[[True, *r[1:]] for r in MATRIX]),
    "ragged": state(wte=[MATRIX[0][:-1], *MATRIX[1:]]),
    "empty matrix": state(wte=[]),
    "empty rows": state(wte=[[]] * 7),
    "a vector": state(wte=[1.0, 2.0]),
    "a row less": state(wte=MATRIX[1:]),
    "an extra tensor": state(extra=MATRIX),
    "layer 7": state(**{"layer7.attn_wq": MATRIX}),
    "chars": changed(uchars=[1, 2]),
    "chars missing": changed(uchars=list("abc")),
    "chars twice": changed(uchars=list("abehll")),
    "long chars": changed(uchars=["ab", "c", "d", "e", "f", "g"]),
    "bos": changed(bos=3),
    **{
        f"{key} {v}": changed(**{key: v})
        for key in ("n_layer", "n_embd", "n_head", "block_size", "vocab_size")
        for v in (-1, 0, 4, 2**31 - 1, "x", 2.5, None, True)
    },
}


def test_broken_files(tmp_path: Path) -> None:
    path = tmp_path / "m.json"
    assert accepted(microgpt.read, path, BROKEN.items()) == []
    good = FORMS["flat"]
    cuts = [(n, good[:n]) for n in range(0, len(good), 997)] + [(n, good[:n]) for n in range(len(good) - 20, len(good))]
    assert accepted(microgpt.read, path, cuts) == []
    assert accepted(microgpt.read, path, [("x", good + b"x")]) == []


def test_a_cut_file_says_where(tmp_path: Path) -> None:
    error = error_of(microgpt.read, tmp_path / "m.json", FORMS["flat"][:1000])
    assert isinstance(error, FormatError)
    assert error.offset is not None
    assert 900 < error.offset <= 1000
