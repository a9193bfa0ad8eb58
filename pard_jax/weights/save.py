"""Parameters from a tree back to a Hugging Face directory, one tensor at a time, and never half a directory."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from tqdm.auto import tqdm

from pard_jax.weights import names
from pard_jax.weights.checkpoint import DTYPES, INDEX, SINGLE

MAX_SHARD_BYTES = 4 << 30


@contextlib.contextmanager
def new_directory(target: str | Path, *, overwrite: bool = False) -> Iterator[Path]:
    """A directory to fill that becomes ``target`` when the block ends, or else is removed.

    It lies beside ``target`` (``.NAME.partial-PID``), so that the last step is a rename: whenever a run is stopped,
    ``target`` is what it was, or absent, or complete. Write ``config.json`` last, and what a killed run leaves behind
    does not load either.

    Raises:
        FileExistsError: ``target`` is a file, or a directory that is not empty and ``overwrite`` is not set.
        OSError: ``target`` cannot be written to.
    """
    target = Path(target).expanduser().absolute()
    if target.exists() and not target.is_dir():
        raise FileExistsError(f"{target} is a file; expected a directory to write to")
    if not overwrite and target.is_dir() and any(target.iterdir()):
        raise FileExistsError(
            f"{target} exists and is not empty; choose another directory, or set overwrite (--overwrite)"
        )
    partial = target.parent / f".{target.name}.partial-{os.getpid()}"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(partial, ignore_errors=True)  # of a killed run that had the same process id
        partial.mkdir()
    except OSError as e:
        raise type(e)(f"cannot write to {target}: {e.strerror}") from e
    try:
        yield partial
        if target.exists():
            old = target.parent / f".{target.name}.old-{os.getpid()}"
            target.rename(old)
            partial.rename(target)
            shutil.rmtree(old)
        else:
            partial.rename(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write JSON as Hugging Face's libraries do."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def save_hf(
    params: Mapping[str, Any],
    config_json: Mapping[str, Any],
    directory: str | Path,
    *,
    overwrite: bool = False,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    progress: bool = True,
) -> None:
    """Write a parameter tree as a Hugging Face directory: ``config.json`` and safetensors of the same dtypes.

    Args:
        params: the tree of :func:`pard_jax.models.abstract_params`, as arrays in bfloat16, float16 or float32.
        config_json: the contents of ``config.json``, as they shall be written.
        directory: where; it appears complete or not at all.
        overwrite: replace a directory that is not empty.
        max_shard_bytes: size from which the weights are split into several files with an index.

    Raises:
        FileExistsError: see :func:`new_directory`.
    """
    with new_directory(directory, overwrite=overwrite) as partial:
        write_params(params, partial, max_shard_bytes=max_shard_bytes, progress=progress)
        write_json(partial / "config.json", config_json)


def write_params(
    params: Mapping[str, Any], directory: Path, *, max_shard_bytes: int = MAX_SHARD_BYTES, progress: bool = True
) -> None:
    """Write only the safetensors of :func:`save_hf` into a directory that exists."""
    leaves = names.flatten(params)

    @functools.cache  # one copy from the device an array, not one a layer
    def on_host(path: names.Path) -> np.ndarray:
        return np.asarray(jax.device_get(leaves[path]))

    def read(tensor: names.Tensor) -> np.ndarray:
        array = on_host(tensor.path)
        return array if tensor.layer is None else array[tensor.layer]

    tensors = {
        name: (np.dtype(leaves[tensor.path].dtype), tensor.shape, functools.partial(read, tensor))
        for name, tensor in names.stored_tensors(params).items()
    }
    write_tensors(tensors, directory, max_shard_bytes=max_shard_bytes, progress=progress)


# dtype, shape, and how to make the array when its turn comes
LazyTensor = tuple[np.dtype, tuple[int, ...], Callable[[], np.ndarray]]


def write_tensors(
    tensors: Mapping[str, LazyTensor],
    directory: Path,
    *,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    progress: bool = True,
    desc: str = "Writing weights",
) -> None:
    """Write ``model.safetensors``, or numbered shards and their index, holding one tensor in memory at a time."""
    shards: list[list[str]] = [[]]
    sizes = {name: math.prod(shape) * dtype.itemsize for name, (dtype, shape, _) in tensors.items()}
    room = max_shard_bytes
    for name, size in sizes.items():
        if size > room and shards[-1]:
            shards.append([])
            room = max_shard_bytes
        shards[-1].append(name)
        room -= size
    files = (
        [SINGLE]
        if len(shards) == 1
        else [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    )
    total = sum(sizes.values())
    with tqdm(total=total, desc=desc, unit="B", unit_scale=True, disable=None if progress else True) as bar:
        for file, shard in zip(files, shards, strict=True):
            _write_shard({name: tensors[name] for name in shard}, directory / file, bar.update)
    if len(files) > 1:
        weight_map = {name: file for file, shard in zip(files, shards, strict=True) for name in shard}
        write_json(directory / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})


def _write_shard(tensors: Mapping[str, LazyTensor], file: Path, wrote: Callable[[int], Any]) -> None:
    """One file: the header's length in 8 bytes, the header in JSON, the data in the header's order."""
    kinds = {dtype: kind for kind, dtype in DTYPES.items()}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # transformers refuses files without a format
    offset = 0
    for name, (dtype, shape, _) in tensors.items():
        size = math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": kinds[dtype], "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)  # the data start aligned
    with file.open("wb") as f:
        f.write(len(encoded).to_bytes(8, "little") + encoded)
        for _, _, make in tensors.values():
            data = np.ascontiguousarray(make()).view(np.uint8)
            f.write(data.data)
            wrote(data.nbytes)
