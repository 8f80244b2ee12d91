"""Writing safetensors: a directory that transformers and vLLM load, or a single file that carries its config."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..arch import arch_of
from ..checkpoint import Checkpoint
from ..errors import CkptError, OutputError, UnsupportedError
from ..files import File, replacing
from ..quant.types import QType
from ..tensor import CHUNK, Tensor
from . import hf_config, microgpt_model
from .options import ReadOptions, WriteOptions
from .safetensors_io import write_file

CONFIG, SINGLE, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
SHARD_NAME = "model-{:05d}-of-{:05d}.safetensors"
STALE = ("model-*-of-*.safetensors", SINGLE, INDEX)  # weights that an older model may have left in a directory
FORMAT = {"format": "pt"}  # which transformers demands
MODEL_CONFIG, TOKENIZER, TOKENIZER_CONFIG = (
    "ckptkit.config",
    "ckptkit.tokenizer",
    "ckptkit.tokenizer_config",
)  # metadata
KEPT = ("generation_config.json",)
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "merges.txt", "tokenizer.model", "chat_template.jinja",
)  # fmt: skip


def write(ck: Checkpoint, stored: Mapping[str, Tensor], path: Path, options: WriteOptions) -> tuple[Path, ...]:
    """Write a single file if `path` ends in .safetensors, else a directory; a new one appears whole or not at all."""
    naming = options.version or ("microgpt" if ck.config.arch == "microgpt" else "hf")
    if path.suffix == ".safetensors":
        if options.split_max_size:
            raise UnsupportedError(
                "shards of safetensors lie in a directory", path=path, at="--split-max-size",
                expected="an output name without .safetensors", got=path.name,
            )  # fmt: skip
        write_file(path, stored, _metadata(ck, stored, naming, path, options))
        return (path,)
    if path.suffix == ".npz":
        raise UnsupportedError(".npz files are read, not written", path=path, hint="write .safetensors")
    if naming != "hf":
        raise UnsupportedError(
            f"a model named as {naming} does is one file", path=path, expected="a name that ends in .safetensors",
            got=path.name,
        )  # fmt: skip
    if path.exists():
        _check_directory(ck, path)
        names = _fill(ck, stored, path, options)
        for stale in {p.name for pattern in STALE for p in path.glob(pattern)} - set(names):
            (path / stale).unlink()
        return tuple(path / name for name in names)
    try:
        temporary = Path(tempfile.mkdtemp(prefix=f".{path.name[:40]}.", suffix=".part", dir=path.parent))
    except OSError as e:
        raise OutputError(f"cannot be written: {e.strerror}", path=path, hint="nothing was left at that name") from e
    try:
        names = _fill(ck, stored, temporary, options)
        temporary.chmod(0o755)
        temporary.replace(path)
    except CkptError as e:
        if e.path is not None and Path(e.path).parent == temporary:
            e.path = path / Path(e.path).name
        raise
    except OSError as e:
        raise OutputError(f"cannot be written: {e.strerror}", path=path, hint="nothing was left at that name") from e
    finally:
        if temporary.exists():
            shutil.rmtree(temporary)
    return tuple(path / name for name in names)


def _check_directory(ck: Checkpoint, path: Path) -> None:
    if not path.is_dir():
        raise OutputError("exists and is no directory", path=path, hint="choose another name, or one in .safetensors")
    if any(p.exists() and p.parent.samefile(path) for p in ck.source.paths):
        raise OutputError(
            "output and input are the same directory", path=path, got=f"input {ck.source.paths[0]}",
            hint="choose another output name",
        )  # fmt: skip


def _fill(ck: Checkpoint, stored: Mapping[str, Tensor], directory: Path, options: WriteOptions) -> list[str]:
    """Write weights, config and tokenizer into a directory; names of the files."""
    config = _config_json(ck, stored, options)
    shards = _shards(stored, options.split_max_size)
    names = [SHARD_NAME.format(k + 1, len(shards)) for k in range(len(shards))] if len(shards) > 1 else [SINGLE]
    for name, shard in zip(names, shards, strict=True):
        write_file(directory / name, shard, FORMAT)
    if len(shards) > 1:
        where = {tensor: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
        index = {"metadata": {"total_size": sum(t.nbytes for t in stored.values())}, "weight_map": where}
        names.append(INDEX)
        _put(directory / INDEX, hf_config.dump(index))
    _put(directory / CONFIG, config)
    kept = _kept(ck, KEPT) + _kept(ck, TOKENIZER_FILES)
    for path in kept:
        _copy(path, directory / path.name)
    names += [CONFIG, *(p.name for p in kept)]
    if ck.tokenizer is not None and not _kept(ck, TOKENIZER_FILES):
        from . import hf_tokenizer_write

        names += [p.name for p in hf_tokenizer_write.write(ck.tokenizer, directory)]
    return names


def _kept(ck: Checkpoint, names: Sequence[str]) -> list[Path]:
    """What came from a directory and goes into one as it is."""
    return [p for p in ck.source.paths if ck.source.format == "safetensors" and p.name in names]


def notes(ck: Checkpoint) -> list[str]:
    """What transformers will make of a tokenizer written from `ck`."""
    if ck.tokenizer is None or ck.config.arch not in hf_config.KEYS or _kept(ck, TOKENIZER_FILES):
        return []
    from . import hf_tokenizer_write

    return list(hf_tokenizer_write.differs(ck.tokenizer, ck.config.arch))


def _copy(source: Path, target: Path) -> None:
    file = File(source)
    try:
        with replacing(target) as out:
            for at in range(0, file.size, CHUNK):
                out.write(file.read(at, min(CHUNK, file.size - at)).data)
    finally:
        file.close()


def _put(path: Path, data: bytes) -> None:
    with replacing(path) as out:
        out.write(data)


def _shards(stored: Mapping[str, Tensor], limit: int) -> list[dict[str, Tensor]]:
    """Tensors in name order, dealt into files of at most `limit` bytes of data, at least one tensor each."""
    shards: list[dict[str, Tensor]] = [{}]
    room = 0
    for name in sorted(stored):
        t = stored[name]
        if limit and shards[-1] and room + t.nbytes > limit:
            shards.append({})
            room = 0
        shards[-1][name] = t
        room += t.nbytes
    return shards


def _dtype(stored: Mapping[str, Tensor]) -> str:
    """The dtype to load the model in: the narrowest that holds every tensor."""
    types = {t.type for t in stored.values()}
    one = types.pop() if len(types) == 1 else QType.F64 if QType.F64 in types else QType.F32
    return hf_config.DTYPES[one]


def _config_json(ck: Checkpoint, stored: Mapping[str, Tensor], options: WriteOptions) -> bytes:
    """config.json: the one that was read where it still says the same, with its other keys where it does not."""
    dtype = _dtype(stored)
    ids = ck.tokenizer.ids if ck.tokenizer else {}
    found = ck.source.metadata.get("config.json")
    if not isinstance(found, dict) or found.get("model_type") != ck.config.arch:
        arch_of(ck, "writing config.json")
        return hf_config.dump({**hf_config.model_config(ck.config, dtype, ids)})
    kept = dict(found)
    if options.mixture:
        kept = {k: v for k, v in kept.items() if k != "dtype"} | {"torch_dtype": dtype}
    if hf_config.read_config(ck.source.paths[0], found, ReadOptions(), []) != ck.config:
        kept.pop("rope_parameters", None)
        made = hf_config.model_config(ck.config, dtype, ids)
        kept |= {k: v for k, v in made.items() if k not in ("torch_dtype", "bos_token_id", "eos_token_id")}
    return hf_config.dump(kept, sort=False)


def _metadata(
    ck: Checkpoint, stored: Mapping[str, Tensor], naming: str, path: Path, options: WriteOptions
) -> dict[str, str]:
    """The metadata of a single file: what was found if the naming is the same, with what says what the model is."""
    same = ck.source.format == "safetensors" and ck.source.metadata.get("naming") == naming
    found = ck.source.metadata.get("metadata") if same else None
    kept: dict[str, str] = dict(found) if isinstance(found, dict) else {}
    if naming == "microgpt":
        made = microgpt_model.stated_by(ck, path)
        text: dict[str, str] = {k: v if isinstance(v, str) else json.dumps(v) for k, v in made.items()}
        return kept | {k: v for k, v in text.items() if not kept or k in kept}
    if naming == "nx":
        c = ck.config
        if c.rope_scaling or c.sliding_window:
            raise UnsupportedError("the trainer knows no rope scaling and no window", path=path)
        facts: dict[str, Any] = {"n_head": c.n_head, "context_length": c.context_length}
        facts |= {"norm_eps": hf_config.short(c.norm_eps), "rope_theta": hf_config.short(c.rope_theta)}
        return kept if same else {k: str(v) for k, v in facts.items()}
    config = json.loads(_config_json(ck, stored, options))
    out = {**FORMAT, **kept, MODEL_CONFIG: json.dumps(config, separators=(",", ":"))}
    if ck.tokenizer is not None and TOKENIZER not in kept:
        from . import hf_tokenizer_write

        out[TOKENIZER] = hf_tokenizer_write.tokenizer_json(ck.tokenizer)
        out[TOKENIZER_CONFIG] = hf_tokenizer_write.tokenizer_config(ck.tokenizer)
    return out
