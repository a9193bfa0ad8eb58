"""Safetensors files as they lie on disk: which tensors there are, and reading part of one.

Headers are checked by the `safetensors` library. The data are read here, a few rows at a time: the library maps a file
as a whole, and every page that was once touched then counts against the memory of this process.
"""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open

from pard_jax.weights.errors import CheckpointError, CheckpointNotFoundError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
DTYPES = {"BF16": np.dtype(jnp.bfloat16), "F16": np.dtype(np.float16), "F32": np.dtype(np.float32)}
_BLOCK_BYTES = 1 << 20  # of a file mapped at a time


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """A tensor in a safetensors file."""

    file: Path
    offset: int  # of its first byte in the file
    dtype: str  # as safetensors calls it: "BF16", "F16", "F32", or another that is not supported
    shape: tuple[int, ...]


def read_headers(directory: Path) -> dict[str, StoredTensor]:
    """Every tensor of an HF checkpoint directory, from the headers alone.

    The files are those of ``model.safetensors.index.json``, or ``model.safetensors``, or all ``*.safetensors``.

    Raises:
        CheckpointNotFoundError: no safetensors there, or a shard of the index is absent.
        CheckpointError: a file is truncated or corrupt, or two files hold the same tensor.
    """
    tensors: dict[str, StoredTensor] = {}
    index = _read_index(directory)
    for file in _shards(directory, index):
        for name, tensor in _read_header(file).items():
            if name in tensors:
                raise CheckpointError(f"{name} is stored twice: in {tensors[name].file} and in {file}")
            tensors[name] = tensor
    astray = [
        f"{name} (named in {shard})"
        for name, shard in (index or {}).items()
        if name not in tensors or tensors[name].file != directory / shard
    ]
    if astray:
        raise CheckpointError(f"{directory / INDEX} names tensors that its shards do not hold: {', '.join(astray)}")
    return tensors


def _read_index(directory: Path) -> dict[str, str] | None:
    path = directory / INDEX
    if not path.is_file():
        return None
    try:
        return {str(name): str(shard) for name, shard in json.loads(path.read_text())["weight_map"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        raise CheckpointError(f"{path} is not an index of safetensors shards: {type(e).__name__}: {e}") from None


def _shards(directory: Path, index: dict[str, str] | None) -> list[Path]:
    if index is not None:
        files = [directory / shard for shard in sorted(set(index.values()))]
        if absent := [str(file) for file in files if not file.is_file()]:
            raise CheckpointNotFoundError(
                f"{directory / INDEX} names {', '.join(absent)}, which does not exist; the download may be incomplete"
            )
        return files
    if (directory / SINGLE).is_file():
        return [directory / SINGLE]
    if files := sorted(directory.glob("*.safetensors")):
        return files
    others = sorted(f.name for pattern in ("*.bin", "*.pth", "*.gguf") for f in directory.glob(pattern))
    hint = f" (found {', '.join(others)}; only safetensors are read)" if others else ""
    raise CheckpointNotFoundError(f"{directory} holds no *.safetensors and no params/ of an Orbax directory{hint}")


def _read_header(file: Path) -> dict[str, StoredTensor]:
    try:
        with safe_open(file, framework="numpy"):
            pass  # the library has now checked the header, and the file's length against it
        with file.open("rb") as f:
            length = int.from_bytes(f.read(8), "little")
            header = json.loads(f.read(length))
    except (SafetensorError, ValueError) as e:
        raise CheckpointError(f"{file} is truncated or corrupt ({file.stat().st_size} bytes): {e}") from None
    header.pop("__metadata__", None)
    return {
        name: StoredTensor(file, 8 + length + entry["data_offsets"][0], entry["dtype"], tuple(entry["shape"]))
        for name, entry in header.items()
    }


def read_into(out: np.ndarray, tensor: StoredTensor, index: tuple[slice, ...]) -> None:
    """Fill ``out`` with ``tensor[index]``, cast to ``out``'s dtype.

    Only the pages of that slice are read, a block of rows at a time, so no copy of the tensor is ever held.

    Args:
        out: array of the slice's shape.
        index: one slice with step 1 an axis.

    Raises:
        CheckpointError: the file has become shorter since its header was read.
    """
    dtype = DTYPES[tensor.dtype]
    if out.dtype == dtype:
        # NumPy copies its own integers faster than ml_dtypes' bfloat16.
        dtype = np.dtype(f"u{dtype.itemsize}")
        out = out.view(dtype)
    start, stop, _ = index[0].indices(tensor.shape[0])
    width = tensor.shape[1:]
    row_bytes = math.prod(width) * dtype.itemsize
    step = max(1, _BLOCK_BYTES // row_bytes)
    with tensor.file.open("rb") as f:
        for first in range(start, stop, step):
            rows = min(step, stop - first)
            try:
                block = np.memmap(f, dtype, "r", offset=tensor.offset + first * row_bytes, shape=(rows, *width))
            except ValueError as e:
                raise CheckpointError(f"{tensor.file} was truncated while it was read: {e}") from None
            at = first - start
            np.copyto(out[at : at + rows], block[(slice(None), *index[1:])], casting="unsafe")
