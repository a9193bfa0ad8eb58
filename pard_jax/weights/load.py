"""Parameters from disk to devices, each array built shard by shard where it will live.

JAX asks for one shard at a time; the shard is filled from the files, layer by layer, in a buffer that the CPU backend
takes over as it is (so it is aligned for that) and that other backends copy to the device. No tensor is ever held a
second time on the host. What is to be int8 is quantized on the way, a few rows at a time.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import unflatten_dict
from jax.sharding import Mesh, Sharding
from jax.typing import DTypeLike
from tqdm.auto import tqdm

from pard_jax.config import ModelConfig
from pard_jax.int8 import Int8Matrix, quantize
from pard_jax.models import abstract_params
from pard_jax.weights import names, orbax
from pard_jax.weights.checkpoint import DTYPES, StoredTensor, read_headers, read_into
from pard_jax.weights.errors import CheckpointError

# Fills a buffer of the shard's shape and dtype with the array's part at these slices.
Reader = Callable[[np.ndarray, tuple[slice, ...]], None]
_ALIGNMENT = 64  # bytes; XLA's CPU backend adopts a NumPy buffer that is aligned so, and copies any other
_READ_WEIGHTS = 1 << 21  # read at once to be quantized
_QUANTIZED_WEIGHTS = 1 << 16  # quantized at once: what a processor's cache holds
_THREADS = min(8, os.cpu_count() or 1)  # that read and quantize


def load_params(
    directory: str | Path,
    config: ModelConfig,
    *,
    dtype: DTypeLike | None,
    mesh: Mesh | None = None,
    progress: bool = True,
    quantization: str | None = None,
) -> dict[str, Any]:
    """Read a checkpoint into the parameter tree of :func:`pard_jax.models.abstract_params`.

    Peak host memory is the parameters' size plus a few MiB, where the devices' memory is the host's; otherwise one
    array's size. With a mesh, every device is sent its own shard and nothing else.

    Args:
        directory: Hugging Face layout (one or many safetensors in bfloat16, float16 or float32) or an Orbax directory
            made by ``python -m convert hf-to-orbax``.
        config: of the same checkpoint.
        dtype: of all parameters, whatever is stored; None keeps what is stored, array by array.
        mesh: where the parameters will lie; None is JAX's default device.
        progress: show a progress bar on a terminal.
        quantization: "int8": the matrices as :class:`pard_jax.int8.Int8Matrix`, of what is stored, whatever ``dtype``.
            The host then also holds one array of integers as a whole, since rows are quantized whole, however they are
            split over devices; and some MiB for each of up to 8 threads.

    Returns:
        Nested dict of ``jax.Array`` and ``Int8Matrix``.

    Raises:
        CheckpointNotFoundError: no weights there, or a shard is absent.
        CheckpointMismatchError: the tensors are not the config's; every one that differs is listed.
        CheckpointError: a file is truncated or corrupt; it is named. Or a weight that is to be quantized is not finite.
    """
    directory = Path(directory)
    abstract = names.flatten(
        abstract_params(config, np.float32 if dtype is None else dtype, mesh, quantization=quantization)
    )
    if orbax.is_orbax(directory):
        readers, stored = orbax.readers(directory, abstract)
    else:
        readers, stored = _hf_readers(directory, config, abstract)
    params = {}
    size = {path: math.prod(leaf.shape) for path, leaf in abstract.items()}
    with tqdm(
        total=sum(size.values()),
        desc="Loading weights",
        unit=" params",
        unit_scale=True,
        disable=None if progress else True,
    ) as bar:
        for path, leaf in abstract.items():
            if isinstance(leaf, Int8Matrix):
                params[path] = _quantized(path, leaf, readers[path])
            else:
                target = leaf.dtype if dtype is not None else _one_dtype(path, stored[path])
                params[path] = make_array(leaf.shape, target, leaf.sharding or _default_sharding(), readers[path])
            bar.update(size[path])
    return unflatten_dict(params)


def make_array(shape: tuple[int, ...], dtype: np.dtype, sharding: Sharding, read: Reader) -> jax.Array:
    """An array whose every shard is filled by ``read`` on the host and put where it belongs."""

    def shard(index: tuple[slice, ...] | None) -> np.ndarray:
        bounds = tuple(slice(*s.indices(n)[:2]) for s, n in zip(index or (), shape, strict=True))
        buffer = _aligned(tuple(s.stop - s.start for s in bounds), dtype)
        read(buffer, bounds)
        return buffer

    return jax.make_array_from_callback(shape, sharding, shard)


def _quantized(path: names.Path, like: Int8Matrix, read: Reader) -> Int8Matrix:
    """Quantize whole rows on the host, as they are read; then put each part where it belongs."""
    whole = jax.tree.map(lambda leaf: _aligned(leaf.shape, leaf.dtype), like)
    *stack, height, width = like.shape
    step, at_once = max(1, _READ_WEIGHTS // width), max(1, _QUANTIZED_WEIGHTS // width)

    def block_at(at: tuple[int, ...]) -> None:
        *layer, first = at
        rows = slice(first, min(first + step, height))
        block = np.empty((*[1] * len(layer), rows.stop - first, width), np.float32)
        read(block, (*(slice(i, i + 1) for i in layer), rows, slice(0, width)))
        block = block.reshape(-1, width)
        out = whole[(*layer, rows)]
        for i in range(0, len(block), at_once):
            with np.errstate(invalid="ignore"):  # what is not finite is refused below
                part = quantize(block[i : i + at_once])
            out.values[i : i + at_once], out.scale[i : i + at_once] = part.values, part.scale

    with ThreadPoolExecutor(_THREADS) as pool:
        for _ in pool.map(block_at, itertools.product(*map(range, stack), range(0, height, step))):
            pass  # an error is raised here
    if not np.isfinite(whole.scale).all():
        raise CheckpointError(f"{'.'.join(path)} holds infinities or NaN, which cannot be quantized to int8")

    def place(leaf: jax.ShapeDtypeStruct, host: np.ndarray) -> jax.Array:
        return jax.make_array_from_callback(leaf.shape, leaf.sharding or _default_sharding(), host.__getitem__)

    return jax.tree.map(place, like, whole)


def _aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    size = math.prod(shape) * dtype.itemsize
    memory = np.empty(size + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : start + size].view(dtype).reshape(shape)


def _one_dtype(path: names.Path, stored: set[np.dtype]) -> np.dtype:
    if len(stored) > 1:
        kinds = ", ".join(sorted(dtype.name for dtype in stored))
        raise CheckpointError(
            f"{'.'.join(path)} is stored as {kinds} in different layers; pass one dtype to load it as"
        )
    return next(iter(stored))


def _default_sharding() -> Sharding:
    return jnp.zeros(()).sharding  # wherever JAX would put an array now


def _hf_readers(
    directory: Path, config: ModelConfig, abstract: Mapping[names.Path, jax.ShapeDtypeStruct]
) -> tuple[dict[names.Path, Reader], dict[names.Path, set[np.dtype]]]:
    """How to read every array of an HF directory, and the dtypes it is stored in; checks everything beforehand."""
    headers = read_headers(directory)
    found = {name: t for name, t in headers.items() if not names.is_ignored(name, tied=config.tie_word_embeddings)}
    expected = names.stored_tensors(unflatten_dict(abstract))
    names.check_tensors(
        str(directory),
        {name: tensor.shape for name, tensor in expected.items()},
        {name: tensor.shape for name, tensor in found.items()},
        [(name, found[name].dtype) for name in expected if name in found and found[name].dtype not in DTYPES],
    )
    parts: dict[names.Path, list[StoredTensor]] = {}
    for name, tensor in expected.items():  # in layer order
        parts.setdefault(tensor.path, []).append(found[name])
    readers = {path: _hf_reader(path[0] == "layers", stored) for path, stored in parts.items()}
    return readers, {path: {DTYPES[tensor.dtype] for tensor in stored} for path, stored in parts.items()}


def _hf_reader(stacked: bool, stored: list[StoredTensor]) -> Reader:
    def read(out: np.ndarray, index: tuple[slice, ...]) -> None:
        if not stacked:
            read_into(out, stored[0], index)
            return
        for at, layer in enumerate(range(index[0].start, index[0].stop)):
            read_into(out[at], stored[layer], index[1:])

    return read
