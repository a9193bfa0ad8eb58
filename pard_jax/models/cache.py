"""The key/value cache: two arrays ``[L, B, M, S, H]``, written in place and never copied.

Key/value heads come before the slots because the attention products contract that way: with slots first, XLA copies
the whole cache into this order in every step (0.4 to 5.8 GiB of temporaries for Qwen3-1.7B on a v5e, by the compiler).
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array, Float, Int

from pard_jax.models.sharding import cache_sharding
from pard_jax.pytree import pytree


def zeros(shape: tuple[int, ...], dtype, sharding: NamedSharding | None = None) -> Array:
    """Zeros in the memory of a mesh's devices, or of the default one.

    On CPUs without a program: its compilation would be the only one of many starts, and loads 0.15 s of Python modules.
    """
    if sharding is None or next(iter(sharding.device_set)).platform != "cpu":
        return jnp.zeros(shape, dtype, device=sharding)
    return jax.make_array_from_callback(shape, sharding, lambda index: np.zeros(sharding.shard_shape(shape), dtype))


@pytree
class KVCache:
    """Keys and values of every layer, row and slot. What lies at or beyond a row's length is garbage, and masked."""

    k: Float[Array, "L B M S H"]
    v: Float[Array, "L B M S H"]

    @classmethod
    def zeros(cls, shape: tuple[int, int, int, int, int], dtype, mesh: Mesh | None = None) -> KVCache:
        """An empty cache of ``shape`` ``(L, B, M, S, H)``, on ``mesh`` where one is given."""
        # Two buffers, not one array twice: a donated buffer may appear only once among the arguments.
        device = None if mesh is None else cache_sharding(mesh)
        return cls(k=zeros(shape, dtype, device), v=zeros(shape, dtype, device))

    @property
    def num_slots(self) -> int:
        """S, the slots of one row."""
        return self.k.shape[3]

    def write(
        self,
        layer: Int[Array, ""],
        first_row: Int[Array, ""] | Int[Array, "R"],
        starts: Int[Array, "R"],
        k: Float[Array, "R M T H"],
        v: Float[Array, "R M T H"],
    ) -> KVCache:
        """Put ``T`` new slots of rows ``first_row..first_row+R`` at ``starts`` (one a row) of one layer.

        ``first_row`` may also be R distinct row ids; one at or beyond B names no row, and nothing is written for it.
        The caller guarantees ``starts + T <= S``: nothing is clamped in a way that could reach other slots' keys
        unnoticed, because rows are allocated with spare slots behind the longest sequence.
        """
        return KVCache(
            k=_write(self.k, layer, first_row, starts, k),
            v=_write(self.v, layer, first_row, starts, v),
        )

    def window(
        self,
        layer: Int[Array, ""],
        first_row: Int[Array, ""] | Int[Array, "R"],
        rows: int,
        window: int,
        start: Int[Array, ""] | int = 0,
    ) -> tuple[Float[Array, "R M W H"], Float[Array, "R M W H"]]:
        """``window`` slots of ``rows`` rows of one layer from slot ``start`` on: what a pass reads. A row id that names
        no row reads another's."""
        _, _, m, _, h = self.k.shape
        if first_row.ndim == 1:
            read = functools.partial(_read_rows, layer=layer, row_ids=first_row, start=jnp.int32(start), window=window)
            return read(self.k), read(self.v)
        at = (layer, first_row, 0, start, 0)
        size = (1, rows, m, window, h)
        return lax.dynamic_slice(self.k, at, size)[0], lax.dynamic_slice(self.v, at, size)[0]


def _write(cache: Array, layer: Array, first_row: Array, starts: Array, new: Array) -> Array:
    arguments = (cache, layer, first_row, starts, new.astype(cache.dtype))
    if new.shape[2] == 1 and first_row.ndim == 0:
        return lax.platform_dependent(*arguments, tpu=_write_slots, default=_write_windows)
    return _write_windows(*arguments)


def _write_slots(cache: Array, layer: Array, first_row: Array, starts: Array, new: Array) -> Array:
    """One slot of consecutive rows, row by row.

    A TPU's compiler would put the slots of a cache that single ones are written to before the heads, and copy all of it
    there and back (3.5 GiB of temporaries for Qwen3-1.7B with 8 rows of 4k).
    """

    def put(i: Array, cache: Array) -> Array:
        slot = lax.dynamic_slice_in_dim(new, i, 1)
        cache = lax.dynamic_update_slice(cache, slot[None], (layer, first_row + i, 0, starts[i], 0))
        return with_layout_constraint(cache, Layout(major_to_minor=(0, 1, 2, 3, 4)))

    return lax.fori_loop(0, new.shape[0], put, cache)


def _write_windows(cache: Array, layer: Array, first_row: Array, starts: Array, new: Array) -> Array:
    rows = new.shape[0]
    if rows == 1 and first_row.ndim == 0:
        return lax.dynamic_update_slice(cache, new[None], (layer, first_row, 0, starts[0], 0))
    # One window [M, T, H] a row, each at its own slot.
    consecutive = first_row.ndim == 0
    row_ids = first_row + jnp.arange(rows, dtype=jnp.int32) if consecutive else first_row
    indices = jnp.stack([jnp.broadcast_to(layer, (rows,)), row_ids, starts], axis=1)
    return lax.scatter(
        cache,
        indices,
        new,
        lax.ScatterDimensionNumbers(
            update_window_dims=(1, 2, 3), inserted_window_dims=(0, 1), scatter_dims_to_operand_dims=(0, 1, 3)
        ),
        indices_are_sorted=consecutive,
        unique_indices=True,
        mode=lax.GatherScatterMode.PROMISE_IN_BOUNDS if consecutive else lax.GatherScatterMode.FILL_OR_DROP,
    )


def _read_rows(cache: Array, layer: Array, row_ids: Array, start: Array, *, window: int) -> Array:
    return lax.platform_dependent(
        cache,
        layer,
        row_ids,
        start,
        tpu=functools.partial(_slice_rows, window=window),
        default=functools.partial(_gather_rows, window=window),
    )


def _slice_rows(cache: Array, layer: Array, row_ids: Array, start: Array, *, window: int) -> Array:
    """Row by row: for a gather, a TPU's compiler copies the whole cache into another order, in every layer."""
    _, _, m, _, h = cache.shape
    return lax.map(lambda row: lax.dynamic_slice(cache, (layer, row, 0, start, 0), (1, 1, m, window, h))[0, 0], row_ids)


def _gather_rows(cache: Array, layer: Array, row_ids: Array, start: Array, *, window: int) -> Array:
    _, _, m, _, h = cache.shape
    return lax.gather(
        cache,
        jnp.stack([jnp.broadcast_to(i, row_ids.shape) for i in (layer, row_ids, start)], axis=1),
        lax.GatherDimensionNumbers(offset_dims=(1, 2, 3), collapsed_slice_dims=(0, 1), start_index_map=(0, 1, 3)),
        slice_sizes=(1, 1, m, window, h),
        mode=lax.GatherScatterMode.CLIP,
    )
