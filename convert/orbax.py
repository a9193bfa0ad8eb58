"""Hugging Face directory <-> Orbax directory. Every parameter comes back bit for bit, in the dtype it was stored in.

What is no parameter does not: rotary buffers, and an ``lm_head.weight`` that is stored although the head is tied to
the embedding (it is never read; see :func:`pard_jax.weights.names.is_ignored`).
"""

from __future__ import annotations

import shutil
from pathlib import Path

from convert.sources import check_apart
from pard_jax.config import ModelConfig
from pard_jax.weights import load_params, orbax
from pard_jax.weights.errors import CheckpointError, CheckpointNotFoundError
from pard_jax.weights.save import new_directory, write_params

# The small files of a checkpoint: configs, tokenizer, chat template, licence; no weights.
COMPANIONS = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", "*.md", "LICENSE*")


def hf_to_orbax(source: str | Path, target: str | Path, *, overwrite: bool = False, progress: bool = True) -> None:
    """Convert a Hugging Face directory to an Orbax directory, tokenizer and configs along.

    Raises:
        CheckpointNotFoundError, CheckpointError: see :func:`pard_jax.weights.load_params`.
        FileExistsError: ``target`` is not empty and ``overwrite`` is not set.
        ValueError: ``target`` holds ``source``.
    """
    source = Path(source)
    if orbax.is_orbax(source):
        raise CheckpointError(f"{source} is an Orbax directory already; expected a Hugging Face directory")
    check_apart(source, target)
    with new_directory(target, overwrite=overwrite) as partial:
        params = load_params(source, ModelConfig.from_pretrained(source), dtype=None, progress=progress)
        orbax.save(params, partial)
        _copy_companions(source, partial)


def orbax_to_hf(source: str | Path, target: str | Path, *, overwrite: bool = False, progress: bool = True) -> None:
    """Convert an Orbax directory made by :func:`hf_to_orbax` back to a Hugging Face directory.

    Raises:
        CheckpointNotFoundError, CheckpointError: see :func:`pard_jax.weights.load_params`.
        FileExistsError: ``target`` is not empty and ``overwrite`` is not set.
        ValueError: ``target`` holds ``source``.
    """
    source = Path(source)
    if not orbax.is_orbax(source):
        raise CheckpointNotFoundError(f"{source} has no {orbax.SUBDIRECTORY}/; expected an Orbax directory")
    check_apart(source, target)
    with new_directory(target, overwrite=overwrite) as partial:
        params = load_params(source, ModelConfig.from_pretrained(source), dtype=None, progress=progress)
        write_params(params, partial, progress=progress)
        _copy_companions(source, partial)


def _copy_companions(source: Path, target: Path) -> None:
    files = {
        f for pattern in COMPANIONS for f in source.glob(pattern) if not f.name.endswith(".safetensors.index.json")
    }
    # config.json makes a directory loadable, so it comes last.
    for file in sorted(files, key=lambda f: (f.name == "config.json", f.name)):
        shutil.copy(file, target / file.name)
