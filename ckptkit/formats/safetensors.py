"""Models in safetensors: Hugging Face directories, single files, and .npz with the same names as one of those.

What the names mean is told by config.json (a directory's, or one beside a single file), by a config in a single file's
metadata, or by the names themselves:

| naming   | arch               | names                      | sizes                                                  |
|----------|--------------------|----------------------------|--------------------------------------------------------|
| hf       | llama, qwen2, gpt2 | transformers'              | config.json, or the metadata key ckptkit.config        |
| microgpt | microgpt           | of its state_dict          | shapes; heads and characters in the metadata, as texts |
| nx       | qwen2              | E, Wlm, final_gamma, L0.Wq | shapes; heads, base, epsilon and context by option     |

A directory holds model.safetensors, or shards model-00001-of-00002.safetensors and model.safetensors.index.json, which
says where each tensor is; the container is described in safetensors_io.py. A file whose names mean nothing to us can be
listed, not converted.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..arch import majority_type
from ..checkpoint import Checkpoint, Config, Source
from ..errors import FormatError, UnsupportedError, brief, printable
from ..files import File, is_file
from ..layout import Layout, in_order, indices, read_named, stored_shape
from ..layout import at as named
from ..quant.types import PLAIN, QType
from ..tensor import Tensor
from . import hf_config, microgpt_model, npz, safetensors_io
from .hf_names import BUFFERS, HF, NX, is_nx, prefix_of
from .options import ReadOptions, Target, WriteOptions, chosen, origin, refuse_version
from .safetensors_write import (
    CONFIG,
    INDEX,
    KEPT,
    MODEL_CONFIG,
    SINGLE,
    TOKENIZER,
    TOKENIZER_CONFIG,
    TOKENIZER_FILES,
    notes,
    write,
)

__all__ = ["LAYOUTS", "MIXTURES", "NAME", "detect", "notes", "plan", "read", "targets", "write"]

NAME = "safetensors"
MIXTURES = ("f32", "f16", "bf16", "f64")
OPTIONS = ("split_max_size",)
LAYOUTS: dict[str, Layout] = {arch: next(iter(by_prefix.values())) for arch, by_prefix in HF.items()}
LAYOUTS["microgpt"] = microgpt_model.LAYOUT
SHARD = re.compile(r".*-\d{5}-of-\d{5}\.safetensors")
NX_THETA, NX_EPS, NX_CONTEXT = 1e6, 1e-6, 2048  # the trainer's base and epsilon; rotary positions have no end


def detect(path: Path, head: bytes, size: int) -> bool:
    """A directory with a config or safetensors in it; a file by its header, by its suffix where that is broken."""
    if not head and not size and path.is_dir():
        return (path / CONFIG).is_file() or any(path.glob("*.safetensors"))
    return safetensors_io.detect(head, size) or npz.detect(head) or path.suffix == ".safetensors"


@dataclass
class _Files:
    """The open files of a model and what they hold together."""

    main: Path
    open: list[File] = field(default_factory=list)
    metadata: dict[str, str] = field(default_factory=dict)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def add(self, path: Path) -> None:
        """Open one more file."""
        file = File(path)
        self.open.append(file)
        if npz.detect(file.read(0, min(file.size, 300)).tobytes()):
            metadata, tensors = dict[str, str](), npz.read(file)
        else:
            metadata, tensors = safetensors_io.read_header(file)
        twice = next((name for name in tensors if name in self.tensors), None)
        if twice is not None:
            raise FormatError(
                f"tensor {printable(twice)} is in two shards", path=path, offset=0, expected="each tensor once",
                got=f"{self.tensors[twice].origin.get('file')} has it too",
            )  # fmt: skip
        self.metadata |= metadata
        self.tensors |= tensors


def read(path: Path, options: ReadOptions) -> Checkpoint:
    """Open a directory, a single file or an .npz; FormatError where config and tensors do not fit each other."""
    files = _Files(path)
    try:
        _gather(path, files)
        return _read(path, files, options)
    except BaseException:
        for file in files.open:
            file.close()
        raise


def _gather(path: Path, files: _Files) -> None:
    """Open the file or files that hold the tensors."""
    directory = path if path.is_dir() else path.parent
    index = directory / INDEX
    if SHARD.fullmatch(path.name) and index.is_file():
        files.notes.append(f"{path.name} is one shard; opened all that {INDEX} lists")
    elif not path.is_dir():
        return files.add(path)
    found = sorted(p for p in directory.glob("*.safetensors") if not p.name.endswith(".mtp.safetensors"))
    if path.is_dir() and (directory / SINGLE).is_file():
        if index.is_file():
            files.notes.append(f"both {SINGLE} and {INDEX} are here; took {SINGLE}")
        files.main = directory / SINGLE
        return files.add(files.main)
    if index.is_file():
        files.main = index
        return _gather_shards(index, files)
    if len(found) != 1:
        raise FormatError(
            "no weights that can be read" if not found else "several files, and nothing says which",
            path=path, expected=f"{SINGLE} or {INDEX}", got=", ".join(p.name for p in found[:6]) or "neither",
            hint="save the model with safe_serialization=True; other files are pickles, which can run code"
            if not found else "give one file",
        )  # fmt: skip
    files.main = found[0]
    return files.add(found[0])


def _gather_shards(index: Path, files: _Files) -> None:
    where = hf_config.load(index).get("weight_map")
    if not isinstance(where, dict) or not where or not all(isinstance(v, str) for v in where.values()):
        raise FormatError(
            "the index has no weight_map", path=index, offset=0, expected="{tensor: file}", got=brief(where)
        )
    for name in sorted(set(where.values())):
        if Path(name).name != name or "\\" in name or not name.endswith(".safetensors"):
            raise FormatError(
                "the index names a file outside its directory", path=index, offset=0, at="weight_map",
                got=brief(name), expected="names of .safetensors files, without directories",
            )  # fmt: skip
        if not is_file(index.parent / name):
            raise FormatError(
                "a shard is missing", path=index, expected=name, got="no such file", hint="copy all shards"
            )
        files.add(index.parent / name)
    for name, shard in where.items():
        t = files.tensors.get(name)
        if t is None or t.origin.get("file") != shard:
            raise FormatError(
                f"tensor {printable(name)[:80]} is not where the index says", path=index, offset=0, at="weight_map",
                expected=shard, got="no such tensor" if t is None else t.origin.get("file"),
            )  # fmt: skip
    extra = len(files.tensors) - len(where)
    if extra:
        files.notes.append(f"{extra} tensors in the shards are not in the index")


def _read(path: Path, files: _Files, options: ReadOptions) -> Checkpoint:
    if microgpt_model.is_model(files.tensors):
        return _read_microgpt(path, files, options)
    if is_nx(files.tensors):
        return _read_nx(files, options)
    beside = files.main.parent / CONFIG
    if MODEL_CONFIG in files.metadata:
        raw, config_path = hf_config.parse(path, files.metadata[MODEL_CONFIG].encode()), None
    elif beside.is_file():
        raw, config_path = hf_config.load(beside), beside
    else:
        note = f"no {CONFIG} beside it and names that say nothing: the tensors can be listed, no more"
        return _foreign(files, "", [note])
    arch = raw.get("model_type")
    if not isinstance(arch, str) or arch not in hf_config.KEYS:
        note = f"model_type {brief(arch)} is not known: the tensors can be listed, no more"
        return _foreign(files, arch if isinstance(arch, str) else "", [note])
    odd = sorted({str(t.origin.get("type")) for t in files.tensors.values() if t.type not in PLAIN and not _buffer(t)})
    if odd:
        return _foreign(
            files, f"{arch} in {', '.join(odd)}", ["such numbers cannot be read: they can be listed, no more"]
        )
    notes = files.notes
    config = hf_config.read_config(config_path or path, raw, options, notes)
    _check_layers(config_path or path, config, files.tensors)
    prefix = prefix_of(config.arch, files.tensors)
    layout = HF[config.arch][prefix]
    present = {n: t for n, t in files.tensors.items() if not BUFFERS.fullmatch(n)}
    if len(present) < len(files.tensors):
        notes.append(f"left out {len(files.tensors) - len(present)} constant buffers")
    if config.tied_output and "lm_head.weight" in present:
        del present["lm_head.weight"]
        notes.append("left out lm_head.weight: the config says that the embedding is used, as transformers does")
    elif present and not config.tied_output and "lm_head.weight" not in present:
        raise FormatError(
            "lm_head.weight is missing, and the config says that it is not the embedding", path=files.main, offset=0,
            expected="lm_head.weight, or tie_word_embeddings true", got="neither",
        )  # fmt: skip
    tensors = _arranged(files.main, layout, config, present) if present else {}  # none: a vocabulary alone
    paths = [files.main, *(f.path for f in files.open if f.path != files.main), *([config_path] if config_path else [])]
    given = (TOKENIZER, TOKENIZER_CONFIG) if options.tokenizer else ()  # another takes the place of the file's own
    stated = {k: v for k, v in files.metadata.items() if k not in given}
    metadata: dict[str, Any] = {"naming": "hf", "config.json": raw, "prefix": prefix, "metadata": stated}
    if config.sliding_window:
        metadata["sliding_window"] = config.sliding_window
    tokenizer = None
    if config_path:
        folder = config_path.parent
        paths += [folder / name for name in KEPT if (folder / name).is_file()]
        if not options.tokenizer:
            from . import hf_tokenizer  # on use: start-up is short

            tokenizer = hf_tokenizer.read(folder)
            paths += [folder / name for name in TOKENIZER_FILES if tokenizer and (folder / name).is_file()]
    elif TOKENIZER in files.metadata and not options.tokenizer:
        settings = files.metadata.get(TOKENIZER_CONFIG, "{}")
        from . import hf_tokenizer

        tokenizer = hf_tokenizer.from_texts(path, files.metadata[TOKENIZER], settings)
    source = Source(tuple(paths), NAME, "hf", metadata, tuple(notes))
    return Checkpoint(config, tensors, tokenizer, source, tuple(files.open))


def _buffer(t: Tensor) -> bool:
    return t.origin.get("type") in ("BOOL", "U8")  # causal masks


def _foreign(files: _Files, arch: str, notes: list[str]) -> Checkpoint:
    """A file whose tensors can be listed and nothing else."""
    source = Source(tuple(f.path for f in files.open), NAME, "", {"metadata": files.metadata}, (*files.notes, *notes))
    return Checkpoint(Config(arch), dict(files.tensors), None, source, tuple(files.open))


def _check_layers(path: Path, config: Config, tensors: Mapping[str, Tensor]) -> None:
    if config.n_layer > len(tensors) > 0:
        raise FormatError(
            "more layers than tensors", path=path, offset=0, at="config", expected=f"at most {len(tensors)}",
            got=f"{config.n_layer:,}",
        )  # fmt: skip


def _arranged(path: Path, layout: Layout, config: Config, found: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Canonical tensors, each checked against the shape that the config gives; unknown ones keep their names."""
    used = set()
    for row in layout.rows:
        expected = stored_shape(row, config)
        for index in indices(row, config):
            name = named(row.theirs, index)
            used.add(name)
            t = found.get(name)
            if t is not None and t.shape != expected:
                raise FormatError(
                    f"tensor {name} has another shape", path=path, offset=t.origin.get("offset"), at=f"tensor {name}",
                    expected=f"{expected} by the config", got=t.shape,
                )  # fmt: skip
            if t is not None and t.type not in PLAIN:
                raise UnsupportedError(
                    f"tensor {name} has a dtype that holds no weights", path=path, offset=t.origin.get("offset"),
                    expected=", ".join(q.name for q in PLAIN), got=t.origin.get("type"),
                )  # fmt: skip
    extra = {n: t for n, t in found.items() if n not in used}
    templates = [re.escape(row.theirs).replace(r"\{i\}", r"\d+") for row in layout.rows if "{i}" in row.theirs]
    beyond = next((n for n in extra if re.fullmatch("|".join(templates), n)), None)
    if beyond is not None:
        raise FormatError(
            f"tensor {beyond} is of a layer that the config does not have", path=path, at=f"tensor {beyond}",
            offset=extra[beyond].origin.get("offset"), expected=f"{config.n_layer} layers", got="more",
        )  # fmt: skip
    return in_order(read_named(layout, config, found.get) | extra, config)


def _read_microgpt(path: Path, files: _Files, options: ReadOptions) -> Checkpoint:
    shapes = {name: t.shape for name, t in files.tensors.items()}
    config = microgpt_model.config_from(path, shapes, files.metadata, options, files.notes)
    tokenizer = None
    if not options.tokenizer:
        tokenizer = microgpt_model.tokenizer_from(path, files.metadata, config, files.notes)
    tensors = _arranged(path, microgpt_model.LAYOUT, config, files.tensors)
    source = Source((path,), NAME, "microgpt", {"naming": "microgpt", "metadata": files.metadata}, tuple(files.notes))
    return Checkpoint(config, tensors, tokenizer, source, tuple(files.open))


def _read_nx(files: _Files, options: ReadOptions) -> Checkpoint:
    """The Qwen2 trainer's own weights: sizes by shapes, the rest by option, metadata or the trainer's constants."""
    path, shapes, notes = files.main, {n: t.shape for n, t in files.tensors.items()}, files.notes
    stated = {k: _stated(path, k, files.metadata) for k in ("n_head", "context_length", "norm_eps", "rope_theta")}
    matrices = {name: shapes.get(name, ()) for name in ("E", "L0.Wq", "L0.Wk", "L0.Wg")}
    for name, shape in matrices.items():
        if len(shape) != 2 or not all(shape):
            raise FormatError(f"no matrix {name}", path=path, offset=0, expected="(in, out)", got=shape or "none")
    n_head = int(chosen(options.n_head, int(stated["n_head"]), 1, "n_head", notes))
    head_dim, rest = divmod(matrices["L0.Wq"][1], max(n_head, 1))
    config = Config(
        "qwen2",
        context_length=int(
            chosen(options.context_length, int(stated["context_length"]), NX_CONTEXT, "context_length", notes)
        ),
        vocab_size=matrices["E"][0],
        n_layer=sum(1 for name in shapes if re.fullmatch(r"L\d+\.Wq", name)),
        n_head=n_head,
        n_kv_head=matrices["L0.Wk"][1] // max(head_dim, 1),
        n_embd=matrices["E"][1],
        n_ff=matrices["L0.Wg"][1],
        head_dim=head_dim,
        norm_eps=chosen(options.norm_eps, stated["norm_eps"], NX_EPS, "norm_eps", notes),
        rope_theta=chosen(options.rope_theta, stated["rope_theta"], NX_THETA, "rope_theta", notes),
        rope_pairing="half",
    )
    config.check(path)
    if rest:
        raise FormatError(
            "channels do not divide into heads", path=path, offset=0, at="L0.Wq", got=f"{n_head} heads",
            expected=f"a divisor of {matrices['L0.Wq'][1]}", hint="give the number of heads with --heads",
        )  # fmt: skip
    tensors = _arranged(path, NX, config, files.tensors)
    source = Source((path,), NAME, "nx", {"naming": "nx", "metadata": files.metadata}, tuple(notes))
    return Checkpoint(config, tensors, None, source, tuple(files.open))


def _stated(path: Path, key: str, metadata: Mapping[str, str]) -> float:
    """A number from the metadata, 0 where it is not there."""
    try:
        return float(metadata.get(key, "0"))
    except ValueError:
        raise FormatError(
            f"{key} in the metadata is no number", path=path, offset=8, expected="a number", got=metadata[key][:60]
        ) from None


def targets(ck: Checkpoint, options: WriteOptions) -> list[Target]:
    """The arch's usual naming, or nx on request. Mixed types become one where that loses nothing."""
    arch, naming = ck.config.arch, "microgpt" if ck.config.arch == "microgpt" else "hf"
    known = {naming: LAYOUTS.get(arch) or Layout(())}
    if arch == "qwen2":
        known["nx"] = NX
    if options.version and options.version not in known:
        raise refuse_version(ck.source.paths[0], options.version, tuple(known))
    if options.mixture and options.mixture not in MIXTURES:
        return []
    version = options.version or naming
    layout = known[version]
    if version == "hf" and ck.source.format == NAME and arch in HF:
        layout = HF[arch].get(str(origin(ck.source, "prefix")), layout)
    types = {t.type for t in ck.tensors.values()}
    kinds = [options.mixture]
    if not options.mixture and len(types) > 1 and types <= set(PLAIN):
        kinds = [majority_type(ck.tensors).name.lower(), ""]
    return [Target(version, layout, kind) for kind in kinds]


def plan(_config: Config, stored: Mapping[str, Tensor], mixture: str, _pure: bool = False) -> dict[str, QType]:
    """One type for all; without one, each tensor's own, and float32 for those in blocks."""
    if mixture:
        return dict.fromkeys(stored, QType[mixture.upper()])
    return {name: t.type if t.type in PLAIN else QType.F32 for name, t in stored.items()}
