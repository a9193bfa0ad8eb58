"""Drafts without an embedding of their own: stripped to what was trained, and made whole again with the target's.

The embedding, most of a small draft, may be frozen to the target's, but for a few rows such as the mask token's. Then a
stripped directory holds

    config.json          the draft's, with "pard_embedding": "target"
    model.safetensors    layers and final norm as they are stored; embed_rows.weight [R, D], the rows that are the
                         draft's own, and embed_rows.ids [R], where they belong

and the draft's tokenizer only where it is not the target's. Putting it together gives the full directory bit for bit.
"""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save

from pard_jax.config import ModelConfig
from pard_jax.models import abstract_params
from pard_jax.weights import names, orbax
from pard_jax.weights.cache import cached_directory, stamp
from pard_jax.weights.checkpoint import DTYPES, INDEX, SINGLE, StoredTensor, read_headers, read_into
from pard_jax.weights.errors import CheckpointError, CheckpointNotFoundError
from pard_jax.weights.save import LazyTensor, new_directory, write_json, write_tensors

KEY = "pard_embedding"
EMBEDDING = names.NAMES[("embed",)]
ROWS, IDS = "embed_rows.weight", "embed_rows.ids"
# Of a checkpoint: what its tokenizer consists of, and what goes along with any draft.
_TOKENIZER = ("tokenizer*", "vocab.*", "merges.txt", "special_tokens_map.json", "added_tokens.json", "chat_template*",
              "*.tiktoken")  # fmt: skip
_COMPANIONS = ("generation_config.json", "*.md", "LICENSE*")


def is_stripped(directory: Path) -> bool:
    """Whether a checkpoint directory lacks an embedding that is to come from its target."""
    try:
        config = json.loads((directory / "config.json").read_bytes())
    except (OSError, ValueError):
        return False  # what is wrong with it is said by whoever loads it
    return isinstance(config, dict) and config.get(KEY) is not None


def strip_embedding(
    draft: str | Path,
    target: str | Path,
    out: str | Path,
    *,
    rows: Iterable[int] | None = None,
    overwrite: bool = False,
) -> None:
    """Write a draft without its embedding, but for some rows.

    Args:
        draft: Hugging Face directory of a draft with a tied head.
        target: directory (Hugging Face or Orbax) of the model that the embedding is frozen to.
        out: directory to write; it appears complete or not at all.
        rows: the ids whose embedding is the draft's own; None for its mask token's. Ids that the target lacks are
            always kept.
        overwrite: replace a directory that is not empty.

    Raises:
        CheckpointError: a directory holds another model than its config says, or a draft that is stripped already; the
            target's embedding has another width; or other rows than these differ from the target's, in the dtype that
            the draft is stored in: the message says how many.
        ValueError: a head that is not tied, no row named, or one outside of the vocabulary.
        FileNotFoundError, FileExistsError: see :func:`pard_jax.weights.load_params` and :func:`new_directory`.
    """
    draft, target = Path(draft), Path(target)
    config = ModelConfig.from_pretrained(draft)
    if not config.tie_word_embeddings:
        raise ValueError(f"{draft} has a head of its own; only a draft whose head is its embedding can be stripped")
    if rows is None:
        if config.mask_token_id is None:
            raise ValueError(
                f"{draft}/config.json names no mask token; name the rows that are the draft's own (--rows)"
            )
        rows = [config.mask_token_id]
    kept = set(rows)
    if outside := [i for i in kept if not 0 <= i < config.vocab_size]:
        raise ValueError(f"row {outside[0]} is not in the draft's vocabulary of {config.vocab_size} ids")

    stored = {name: t for name, t in _draft_headers(draft).items() if not names.is_ignored(name, tied=True)}
    if ROWS in stored and EMBEDDING not in stored:
        raise CheckpointError(
            f"{draft} is stripped already: it holds {ROWS} and no {EMBEDDING}; give the whole draft, which "
            "python -m convert assemble-draft makes of it"
        )
    expected = names.stored_tensors(abstract_params(config, np.float32))
    names.check_tensors(
        str(draft),
        {name: tensor.shape for name, tensor in expected.items()},
        {name: tensor.shape for name, tensor in stored.items()},
        [(name, tensor.dtype) for name, tensor in stored.items() if tensor.dtype not in DTYPES],
    )
    embedding = _read(stored.pop(EMBEDDING))
    theirs = _target_rows(target, draft, embedding.shape, embedding.dtype)
    kept |= {*range(len(theirs), len(embedding))}
    ids = np.array(sorted(kept), np.int64)
    differs = (_bits(embedding[: len(theirs)]) != _bits(theirs)).any(axis=1)
    differs[ids[ids < len(theirs)]] = False
    if count := int(differs.sum()):
        first = ", ".join(map(str, np.flatnonzero(differs)[:5]))
        raise CheckpointError(
            f"{count} of {len(differs)} rows of {draft}'s embedding differ from {target}'s in {embedding.dtype.name} "
            f"(ids {first}{', ...' if count > 5 else ''}), beside the {len(ids)} that are the draft's own; only an "
            "embedding that was frozen to this target's can be taken from it"
        )
    with new_directory(out, overwrite=overwrite) as partial:
        tensors = {name: _read(tensor) for name, tensor in stored.items()}
        # Not save_file, whose files nobody else may read.
        (partial / SINGLE).write_bytes(save(tensors | {ROWS: embedding[ids], IDS: ids}, {"format": "pt"}))
        _copy(draft, partial, _COMPANIONS)
        if not same_tokenizer(draft, target):
            _copy(draft, partial, _TOKENIZER)
        write_json(partial / "config.json", _config_json(draft) | {KEY: "target"})


def assemble(stripped: str | Path, target: str | Path, out: str | Path, *, overwrite: bool = False) -> None:
    """Write the full Hugging Face directory of a stripped draft, as transformers and vLLM load it.

    Args:
        stripped: directory that :func:`strip_embedding` wrote.
        target: directory (Hugging Face or Orbax) of the model that lends its embedding, cast to the draft's dtype.
        out: directory to write; it appears complete or not at all.
        overwrite: replace a directory that is not empty.

    Raises:
        CheckpointError: ``stripped`` is not such a directory; or the target's embedding has another width, or lacks
            rows that the draft needs.
        FileNotFoundError, FileExistsError: see :func:`pard_jax.weights.load_params` and :func:`new_directory`.
    """
    stripped, target = Path(stripped), Path(target)
    config = ModelConfig.from_pretrained(stripped)
    stored = _draft_headers(stripped)
    if ROWS not in stored and EMBEDDING in stored:
        raise CheckpointError(
            f"{stripped} holds a whole draft, with its {EMBEDDING}, to which nothing is to be added; expected a "
            "directory that python -m convert strip-draft wrote"
        )
    if lacking := [name for name in (ROWS, IDS) if name not in stored]:
        raise CheckpointError(
            f"{stripped} lacks {' and '.join(lacking)}, which a draft without an embedding needs; strip the whole "
            "draft again (python -m convert strip-draft)"
        )
    config_json = _config_json(stripped)
    says = f'says "{KEY}": {json.dumps(config_json[KEY])}' if KEY in config_json else f'has no "{KEY}"'
    if config_json.pop(KEY, None) != "target":
        raise CheckpointError(
            f'{stripped}/config.json {says}; expected "target", as python -m convert strip-draft writes it: strip the '
            "whole draft again, or write it there"
        )
    rows, ids = _read(stored.pop(ROWS)), _read_ids(stored.pop(IDS))
    size = config.vocab_size
    if rows.shape != (len(ids), config.hidden_size) or not ((ids >= 0) & (ids < size)).all():
        raise CheckpointError(
            f"{stripped}: {ROWS} is {list(rows.shape)} for {len(ids)} ids; expected [{len(ids)}, "
            f"{config.hidden_size}], and ids from 0 to {size - 1}"
        )

    def embedding() -> np.ndarray:
        full = np.zeros((size, config.hidden_size), rows.dtype)
        theirs = _target_rows(target, stripped, full.shape, rows.dtype)
        if lost := {*range(len(theirs), size)} - {*ids.tolist()}:
            raise CheckpointError(
                f"{target} has {len(theirs)} rows of embedding, but {stripped} needs {size} and brings {len(ids)}; "
                f"row {min(lost)} is in neither"
            )
        full[: len(theirs)] = theirs
        full[ids] = rows
        return full

    tensors: dict[str, LazyTensor] = {EMBEDDING: (rows.dtype, (size, config.hidden_size), embedding)}
    for name, tensor in stored.items():
        tensors[name] = (_dtype(name, tensor), tensor.shape, functools.partial(_read, tensor))
    with new_directory(out, overwrite=overwrite) as partial:
        write_tensors(tensors, partial, progress=False)
        _copy(stripped, partial, _COMPANIONS)
        has_tokenizer = any(next(stripped.glob(pattern), None) for pattern in _TOKENIZER)
        _copy(stripped if has_tokenizer else target, partial, _TOKENIZER)
        write_json(partial / "config.json", config_json)


def assembled(stripped: Path, target: Path) -> Path:
    """What :func:`assemble` makes of the two, from the cache (:mod:`pard_jax.weights.cache`) once it is made.

    Raises:
        CheckpointError, OSError: see :func:`assemble` and :func:`pard_jax.weights.cache.cached_directory`.
    """
    sources = [file for directory in (stripped, target) for file in directory.iterdir() if file.is_file()]
    if orbax.is_orbax(target):
        sources += [file for file in (target / orbax.SUBDIRECTORY).rglob("*") if file.is_file()]
    name = f"draft-{stripped.resolve().name}-for-{target.resolve().name}-{stamp(sources)}"
    return cached_directory(name, functools.partial(assemble, stripped, target))


def _draft_headers(directory: Path) -> dict[str, StoredTensor]:
    """The tensors of a draft, which must be a Hugging Face directory."""
    if orbax.is_orbax(directory):
        raise CheckpointError(
            f"{directory} is an Orbax directory; expected a draft's Hugging Face directory, which "
            "python -m convert orbax-to-hf makes of it"
        )
    if not (directory / INDEX).is_file() and not any(directory.glob("*.safetensors")):
        raise CheckpointNotFoundError(
            f"{directory} holds a config.json, but no *.safetensors; expected a draft's Hugging Face directory, "
            "weights included"
        )
    return read_headers(directory)


def _target_rows(target: Path, draft: Path, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """The first rows of the target's embedding, as many as there are but at most ``shape[0]``, in ``dtype``."""
    read: Callable[[np.ndarray, tuple[slice, ...]], Any]
    if orbax.is_orbax(target):
        arrays = orbax.stored_arrays(target)
        lent = arrays[("embed",)].shape
        read = orbax.readers(target, arrays)[0][("embed",)]
    else:
        headers = read_headers(target)
        if EMBEDDING not in headers:
            raise CheckpointError(f"{target} holds no {EMBEDDING} to take")
        tensor = headers[EMBEDDING]
        _dtype(EMBEDDING, tensor)
        lent = tensor.shape
        read = lambda out, index: read_into(out, tensor, index)  # noqa: E731
    if lent[1:] != shape[1:]:
        raise CheckpointError(
            f"{target} has an embedding of {list(lent)}, and that of {draft} is {shape[1]} wide; a draft takes its "
            "embedding from the target that it was trained for: name that one"
        )
    rows = np.empty((min(lent[0], shape[0]), shape[1]), dtype)
    read(rows, (slice(0, len(rows)), slice(0, shape[1])))
    return rows


def _read(tensor: StoredTensor) -> np.ndarray:
    out = np.empty(tensor.shape, DTYPES[tensor.dtype])
    read_into(out, tensor, tuple(slice(0, n) for n in tensor.shape))
    return out


def _read_ids(tensor: StoredTensor) -> np.ndarray:
    if tensor.dtype != "I64" or len(tensor.shape) != 1:
        raise CheckpointError(f"{tensor.file}: {IDS} is {tensor.dtype} {list(tensor.shape)}; expected I64 [R]")
    return np.fromfile(tensor.file, "<i8", tensor.shape[0], offset=tensor.offset)


def _dtype(name: str, tensor: StoredTensor) -> np.dtype:
    if tensor.dtype not in DTYPES:
        raise CheckpointError(f"{tensor.file}: {name} is {tensor.dtype}; expected one of {', '.join(DTYPES)}")
    return DTYPES[tensor.dtype]


def _bits(array: np.ndarray) -> np.ndarray:
    return array.view(f"u{array.dtype.itemsize}")


def _config_json(directory: Path) -> dict[str, Any]:
    return json.loads((directory / "config.json").read_text(encoding="utf-8"))


def _files(directory: Path, patterns: Iterable[str]) -> dict[str, Path]:
    return {file.name: file for pattern in patterns for file in directory.glob(pattern)}


def same_tokenizer(a: Path, b: Path) -> bool:
    """Whether two directories hold the same tokenizer, byte for byte."""
    return _same_files(a, b, _TOKENIZER)


def _same_files(a: Path, b: Path, patterns: Iterable[str]) -> bool:
    ours, theirs = _files(a, patterns), _files(b, patterns)
    return {n: f.read_bytes() for n, f in ours.items()} == {n: f.read_bytes() for n, f in theirs.items()}


def _copy(source: Path, target: Path, patterns: Iterable[str]) -> None:
    for name, file in _files(source, patterns).items():
        shutil.copy(file, target / name)
