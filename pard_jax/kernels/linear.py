"""Matrix products of a few rows, at the speed of reading the weights (Pallas, its Triton backend).

A decoding pass multiplies 1 to some dozens of rows with every matrix of the model. Its time is that of reading the
weights and, for small models, that of starting kernels. So the stacked matrices ``[L, O, D]`` are read where they lie
(XLA copies a layer's slice before it multiplies), and what surrounds a product is done on the way: a bias, the gate of
an MLP, the residual sum, the norm. Matrices of int8 become bfloat16 in registers, and their scales, one a column of the
product, are applied to the sums.

An RMS norm goes half with the product before it and half with the one behind. The first has its columns in hand: it
applies the norm's weights to them and sums their squares (:class:`Normed`). The second multiplies its sums by the row's
scale, with which a product commutes.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int

from pard_jax.int8 import Int8Matrix
from pard_jax.kernels.overlap import can_start_early, let_next_start
from pard_jax.kernels.tuning import LinearBlocks, linear_blocks, power_of_two

MAX_ROWS = 128  # more are bound by arithmetic, which is the libraries' strength


def fits_linear(rows: int, depth: int, width: int) -> bool:
    """Whether :func:`linear` takes ``rows`` rows and matrices ``width x depth``, and is worth it."""
    return rows <= MAX_ROWS and depth % 64 == 0 and width % 16 == 0


class Normed(NamedTuple):
    """Rows on their way through an RMS norm: all but their scale."""

    rows: Float[Array, "P D"]  # times the norm's weights
    squares: Float[Array, "P _"]  # sums of the rows' squares before that, of some columns each; float32


def normed(x: Float[Array, "P D"], norm: Float[Array, "D"]) -> Normed:
    """Of rows that no kernel made."""
    x32 = x.astype(jnp.float32)
    rows = x32 * norm.astype(jnp.float32)[None, :]
    return Normed(rows.astype(x.dtype), jnp.sum(x32 * x32, axis=1, keepdims=True))


# Under a jit of its own each kernel is traced and lowered once, not once a layer.
@functools.partial(jax.jit, static_argnames=("eps", "gated", "out_dtype", "interpret"))
def linear(
    x: Float[Array, "P D"] | Normed,
    weights: Sequence[Float[Array, "L _ D"] | Int8Matrix],
    layer: Int[Array, ""] | np.int32,
    *,
    eps: float = 0.0,
    biases: Sequence[Float[Array, "L _"]] | None = None,
    residual: Float[Array, "P _"] | None = None,
    gated: bool = False,
    next_norm: tuple[Float[Array, "_ _"], Int[Array, ""] | np.int32] | None = None,
    out_dtype: Any = None,
    interpret: bool = False,
) -> tuple[Any, ...]:
    """``x @ weight[layer].T`` for each of ``weights``, in one kernel.

    Sums are float32 and rounded once, after everything that is asked for here.

    Args:
        x: P rows, bfloat16; of a norm, with ``eps``, where they are :class:`Normed`. (float16 would overflow where the
            norm's weights are applied before its scale.)
        weights: stacked matrices as HF orients them; every O a multiple of 16, D one of 64.
        layer: which of them.
        biases: one for each matrix.
        residual: added to the product (of a single matrix).
        gated: ``weights`` are an MLP's gate and up: gives one array, ``silu(gate) * up``.
        next_norm: stacked weights of a norm of the product (of a single matrix), and which of them.
        out_dtype: that of ``x`` by default.
        interpret: run it by Pallas' interpreter, on any platform.

    Returns:
        One array a matrix; with ``next_norm``, the product and the product :class:`Normed`.

    Raises:
        ValueError: ``x`` is not bfloat16.
    """
    x, squares = x if isinstance(x, Normed) else (x, None)
    rows, depth = x.shape
    if x.dtype != jnp.bfloat16:
        raise ValueError(f"the rows are {x.dtype}; expected bfloat16")
    out_dtype = x.dtype if out_dtype is None else out_dtype
    widths = [w.shape[1] for w in weights]
    blocks = linear_blocks(rows, depth, widths, gated=gated, itemsize=_itemsize(weights[0]))
    outputs = widths[:1] if gated else widths
    # A grid of column blocks: those of the first matrix, then those of the second, ...
    counts = [pl.cdiv(width, blocks.columns) for width in outputs]
    # Each index by itself: putting two constants together is a kernel of its own.
    layer = jnp.reshape(layer, 1)
    norm = None if next_norm is None else (next_norm[0], jnp.reshape(next_norm[1], 1))
    operands, structure = jax.tree.flatten((layer, x, weights, biases, norm, squares, residual))
    specs = [_whole(layer), _tall(blocks, depth), *map(_whole, jax.tree.leaves((weights, biases, norm)))]
    specs += [_tall(blocks, a.shape[1]) for a in (squares, residual) if a is not None]
    kernel = functools.partial(
        _kernel,
        structure=structure,
        num_squares=0 if squares is None else squares.shape[1],
        gated=gated,
        eps=eps,
        counts=counts,
        blocks=blocks,
        num_rows=rows,
        # Products with int8 gain nothing from it.
        overlap=not interpret and can_start_early() and not isinstance(weights[0], Int8Matrix),
    )
    out_shapes = [jax.ShapeDtypeStruct((rows, width), out_dtype) for width in outputs]
    if norm is not None:
        out_shapes += [out_shapes[0], jax.ShapeDtypeStruct((rows, counts[0]), jnp.float32)]
    out = _call("linear", kernel, blocks, sum(counts), operands, specs, out_shapes, interpret)
    return tuple(out) if norm is None else (out[0], Normed(*out[1:]))


def linear_argmax(
    x: Float[Array, "P D"], weight: Float[Array, "V D"] | Int8Matrix, *, limit: int, interpret: bool = False
) -> Int[Array, "P"]:
    """The index, below ``limit``, of the largest of ``x @ weight.T`` in each row: the first among equals.

    The products are compared as float32 where they arise, and never written.
    """
    rows, depth = x.shape
    blocks = linear_blocks(rows, depth, [weight.shape[0]], gated=False, itemsize=_itemsize(weight))
    count = pl.cdiv(weight.shape[0], blocks.columns)
    operands, structure = jax.tree.flatten((x, weight))
    kernel = functools.partial(_argmax_kernel, structure=structure, blocks=blocks, num_rows=rows, limit=limit)
    out_shapes = [jax.ShapeDtypeStruct((rows, count), dtype) for dtype in (jnp.float32, jnp.int32)]
    specs = [_tall(blocks, depth), *map(_whole, operands[1:])]
    largest, ids = _call("linear_argmax", kernel, blocks, count, operands, specs, out_shapes, interpret)
    hits = largest == largest.max(axis=1, keepdims=True)
    return jnp.minimum(jnp.where(hits, ids, limit).min(axis=1), limit - 1)


def _call(
    name: str, kernel: Any, blocks: LinearBlocks, num_columns: int, operands: list[Any], specs: list[Any],
    out_shapes: list[jax.ShapeDtypeStruct], interpret: bool,
) -> Any:  # fmt: skip
    """A program for each of ``num_columns`` blocks of columns and each block of rows."""
    return pl.pallas_call(
        kernel,
        grid=(num_columns, pl.cdiv(out_shapes[0].shape[0], blocks.rows)),
        in_specs=specs,
        out_specs=[_tall(blocks, shape.shape[1]) for shape in out_shapes],
        out_shape=out_shapes,
        compiler_params=plgpu.CompilerParams(num_warps=blocks.warps, num_stages=blocks.stages),
        interpret=interpret,
        name=name,
    )(*operands)


def _itemsize(weight: Array | Int8Matrix) -> int:
    return jax.tree.leaves(weight)[0].dtype.itemsize


def _tall(blocks: LinearBlocks, width: int) -> pl.BlockSpec:
    """All columns of a block of rows; more than there are, so that they may be loaded at once by a mask."""
    return pl.BlockSpec((blocks.rows, power_of_two(width)), lambda i, j: (j, 0))


def _whole(array: Array) -> pl.BlockSpec:
    return pl.BlockSpec(array.shape, lambda i, j: (0,) * array.ndim)


def _argmax_kernel(*refs, structure: Any, blocks: LinearBlocks, num_rows: int, limit: int):
    x_ref, matrix = structure.unflatten(refs[:-2])
    first = pl.program_id(0) * blocks.columns
    real = _real_rows(blocks, num_rows)
    (scores,) = _products(x_ref, [matrix], (), first, real, blocks)
    ids = first + jnp.arange(blocks.columns, dtype=jnp.int32)[None, :]
    scores = jnp.where(ids < limit, scores, -jnp.inf)
    largest = jnp.max(scores, axis=1)
    hits = scores == largest[:, None]
    ids = jnp.min(jnp.where(hits, ids, limit), axis=1)
    for ref, value in zip(refs[-2:], (largest, ids), strict=True):
        _store_column(ref, value, real)


def _kernel(
    *refs, structure: Any, num_squares: int, gated: bool, eps: float, counts: list[int], blocks: LinearBlocks,
    num_rows: int, overlap: bool,
):  # fmt: skip
    inputs, outputs = refs[: structure.num_leaves], refs[structure.num_leaves :]
    layer_ref, x_ref, weights, biases, norm, squares, residual = structure.unflatten(inputs)
    biases = [None] * len(weights) if biases is None else biases
    layer = layer_ref[0]
    columns = blocks.columns
    real = _real_rows(blocks, num_rows)
    block = pl.program_id(0)

    def at(first: Array):
        return pl.ds(pl.multiple_of(first, columns), columns)

    # The compiler moves no load over the loop. What the sums meet behind it is asked for in front of it, where it is
    # little: its latency then hides behind the weights'.
    ask_early = blocks.rows == 16

    def products(matrices: list[Any], biases: list[Any], first: Array) -> tuple[list[Array], Array | None]:
        """The products' columns from ``first`` on, float32, and the next norm's weights."""

        def load() -> tuple[Any, ...]:
            parts = None
            if squares is not None:
                of_part = jnp.arange(power_of_two(num_squares), dtype=jnp.int32) < num_squares
                parts = plgpu.load(squares.at[:, :], mask=real[:, None] & of_part[None, :], other=0.0)
            shifts = [None if bias is None else bias[layer, at(first)] for bias in biases]
            added = None if residual is None else _load_rows(residual, at(first), real)
            return parts, shifts, added, None if norm is None else norm[0][norm[1][0], at(first)]

        loaded = load() if ask_early else None
        sums = _products(x_ref, matrices, (layer,), first, real, blocks)
        if overlap:
            sums = [let_next_start(s) for s in sums]
        parts, shifts, added, norm_weights = loaded or load()
        if parts is not None:
            scale = jax.lax.rsqrt(jnp.sum(parts, axis=1) / matrices[0].shape[-1] + eps)
            sums = [s * scale[:, None] for s in sums]
        sums = [s if b is None else s + b.astype(jnp.float32)[None, :] for s, b in zip(sums, shifts, strict=True)]
        return [s if added is None else s + added for s in sums], norm_weights

    if gated:
        first = block * columns
        (gate, up), _ = products(weights, biases, first)
        _store(outputs[0], at(first), gate * jax.nn.sigmoid(gate) * up, real)
        return
    before = 0
    for weight, bias, output, count in zip(weights, biases, outputs, counts, strict=False):

        def one(weight=weight, bias=bias, output=output, before=before):
            first = (block - before) * columns
            (value,), norm_weights = products([weight], [bias], first)
            value = value.astype(output.dtype)
            _store(output, at(first), value, real)
            if norm_weights is not None:
                value = value.astype(jnp.float32)
                scaled = value * norm_weights.astype(jnp.float32)[None, :]
                _store(outputs[1], at(first), scaled, real)
                _store_column(outputs[2], jnp.sum(value * value, axis=1), real)

        if len(weights) == 1:
            one()
        else:
            pl.when((block >= before) & (block < before + count))(one)
        before += count


def _products(
    x_ref, matrices: list[Any], layer: tuple[Any, ...], first: Array, real: Array, blocks: LinearBlocks
) -> list[Array]:
    """Columns ``first..first+columns`` of the products with each of ``matrices``, float32.

    ``layer`` leads the matrices' indices, where they are stacked.
    """
    tables: list[Any] = [m.values if isinstance(m, Int8Matrix) else m for m in matrices]
    depth = tables[0].shape[-1]
    columns, step = blocks.columns, blocks.step
    at = pl.ds(pl.multiple_of(first, columns), columns)
    scales = [m.scale[*layer, at] if isinstance(m, Int8Matrix) else None for m in matrices]

    def body(i, sums):
        part = pl.ds(pl.multiple_of(i * step, step), step)
        # All loads first: they are under way together.
        ws = [plgpu.load(w.at[*layer, at, part], eviction_policy="evict_first") for w in tables]
        x = _load_rows(x_ref, part, real)
        return [s + plgpu.dot(x, w.astype(x.dtype).T) for s, w in zip(sums, ws, strict=True)]

    start = [jnp.zeros((blocks.rows, columns), jnp.float32) for _ in matrices]
    sums = jax.lax.fori_loop(0, depth // step, body, start)
    return [s if scale is None else s * scale[None, :] for s, scale in zip(sums, scales, strict=True)]


def _real_rows(blocks: LinearBlocks, num_rows: int) -> Array:
    """Which rows of this program's block exist. Pallas masks nothing here: what overhangs must not be touched."""
    return pl.program_id(1) * blocks.rows + jnp.arange(blocks.rows, dtype=jnp.int32) < num_rows


def _load_rows(ref, part, real: Array) -> Array:
    mask = jnp.broadcast_to(real[:, None], (real.shape[0], part.size))
    return plgpu.load(ref.at[:, part], mask=mask, other=0.0, eviction_policy="evict_last")


def _store(output, part, value: Array, real: Array) -> None:
    mask = jnp.broadcast_to(real[:, None], value.shape)
    plgpu.store(output.at[:, part], value.astype(output.dtype), mask=mask)


def _store_column(output, value: Array, real: Array) -> None:
    """One value a row, into the column of this program's block."""
    plgpu.store(output.at[:, pl.ds(pl.program_id(0), 1)], value[:, None], mask=real[:, None])
