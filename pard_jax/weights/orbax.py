"""The Orbax directory: an HF checkpoint directory whose weights are an Orbax checkpoint, in the layout of the tree.

    DST/config.json, generation_config.json, tokenizer files    as in the HF directory
    DST/params/                                                 the parameter tree

Orbax writes it and describes it. The arrays are read with TensorStore, which Orbax itself stores them with, because
it reads a slice into a buffer of ours: Orbax's own restore holds an array twice more on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from pard_jax.weights import names
from pard_jax.weights.errors import CheckpointError

SUBDIRECTORY = "params"
# Chunks are read as a whole, then copied to where they belong. Of this size and not compressed (weights hardly shrink),
# each is mapped and unmapped by malloc; smaller ones stay in its arenas and count against the memory of the process.
_CHUNK_BYTES = 32 << 20


def is_orbax(directory: Path) -> bool:
    """Whether the weights of a checkpoint directory are an Orbax checkpoint."""
    return (directory / SUBDIRECTORY).is_dir()


def save(params: Mapping[str, Any], directory: Path) -> None:
    """Write a parameter tree to ``directory/params``, which must not exist; dtypes are kept."""
    import orbax.checkpoint as ocp  # takes a quarter of a second, and few need it

    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_zarr3=False, use_compression=False)
    save_args = jax.tree.map(lambda _: ocp.SaveArgs(chunk_byte_size=_CHUNK_BYTES), params)
    with ocp.Checkpointer(handler) as checkpointer:
        checkpointer.save(
            (directory / SUBDIRECTORY).absolute(), args=ocp.args.PyTreeSave(dict(params), save_args=save_args)
        )


def stored_arrays(directory: Path) -> dict[names.Path, jax.ShapeDtypeStruct]:
    """Shape and dtype of every stored array by its path, from Orbax's metadata.

    Raises:
        CheckpointError: ``directory/params`` is no Orbax checkpoint, or is damaged.
    """
    import orbax.checkpoint as ocp

    root = (directory / SUBDIRECTORY).absolute()
    try:
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
            tree = checkpointer.metadata(root).item_metadata.tree
        return {
            path: jax.ShapeDtypeStruct(tuple(leaf.shape), leaf.dtype)
            for path, leaf in names.flatten(dict(tree)).items()
        }
    except Exception as e:  # Orbax raises what its storage raises, of many kinds
        raise CheckpointError(f"{root} is not an Orbax checkpoint, or is damaged: {type(e).__name__}: {e}") from e


def readers(
    directory: Path, abstract: Mapping[names.Path, jax.ShapeDtypeStruct]
) -> tuple[dict[names.Path, Callable[[np.ndarray, tuple[slice, ...]], None]], dict[names.Path, set[np.dtype]]]:
    """How to read every array, and the dtype it is stored in; the shapes are checked beforehand.

    Raises:
        CheckpointMismatchError: the arrays are not those of ``abstract``; every one that differs is listed.
        CheckpointError: see :func:`stored_arrays`.
    """
    stored = stored_arrays(directory)
    names.check_tensors(
        str(directory),
        {".".join(path): leaf.shape for path, leaf in abstract.items()},
        {".".join(path): leaf.shape for path, leaf in stored.items()},
    )
    return {path: _reader(directory, path) for path in stored}, {path: {leaf.dtype} for path, leaf in stored.items()}


def _reader(directory: Path, path: names.Path) -> Callable[[np.ndarray, tuple[slice, ...]], None]:
    root, name = (directory / SUBDIRECTORY).absolute(), ".".join(path)

    def read(out: np.ndarray, index: tuple[slice, ...]) -> None:
        import tensorstore as ts

        spec = {
            "driver": "zarr",
            "kvstore": {"driver": "ocdbt", "base": f"file://{root}/", "path": f"{name}/"},
            # Two chunks at a time (32 by default), kept no longer than it takes to copy them.
            "context": {
                "cache_pool": {"total_bytes_limit": 0},
                "data_copy_concurrency": {"limit": 2},
                "file_io_concurrency": {"limit": 2},
            },
        }
        try:
            source = ts.open(spec, read=True, open=True).result()[index]
            ts.array(out).write(ts.cast(source, out.dtype)).result()
        except ValueError as e:
            raise CheckpointError(f"{root} is damaged: {name} cannot be read: {e}") from e

    return read
