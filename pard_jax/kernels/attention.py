"""Attention of a decoding pass over the cache: rotary embedding, cache write and softmax in one kernel.

Each program takes one key/value head of one row, and all the query heads and new tokens that it serves. It reads the
row's live slots alone, whatever the cache could hold (flash attention, Dao et al. 2022). Where a batch is small,
several programs share the slots, another takes the new tokens, and a second kernel puts their parts together (flash
decoding).
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int

from pard_jax.kernels.tuning import SLOTS, attention_blocks, power_of_two

_MASKED = -1e30  # of a score; finite, so that differences are never NaN


@functools.partial(jax.jit, static_argnames=("window", "eps", "interpret"))
def decode_attention(
    q: Float[Array, "R T N H"],
    k: Float[Array, "R T M H"],
    v: Float[Array, "R T M H"],
    rotations: Float[Array, "R T H"],
    k_cache: Float[Array, "L B M S H"],
    v_cache: Float[Array, "L B M S H"],
    layer: Int[Array, ""] | np.int32,
    starts: Int[Array, "R"],
    *,
    window: int,
    qk_norm: tuple[Float[Array, "L H"], Float[Array, "L H"]] | None = None,
    eps: float = 0.0,
    interpret: bool = False,
) -> tuple[Float[Array, "R T N H"], Float[Array, "L B M S H"], Float[Array, "L B M S H"]]:
    """Attend from T new tokens of the cache's first R rows to what lies before them and to one another.

    Args:
        q, k, v: projections, before any norm or rotation.
        rotations: cosines of the new tokens' angles, then their sines; float32.
        k_cache, v_cache: hold each row's keys and values before ``starts``; the new ones are written behind, in place.
        layer: of the cache, and of ``qk_norm``.
        window: no row's new tokens end beyond it (static); it sets how the work is split, not what is read.
        qk_norm: weights of the RMS norms of each query and key head, with ``eps``; None: there are none.
        interpret: run it by Pallas' interpreter, on any platform.

    Raises:
        ValueError: the cache's slots are no multiple of 64: a block would reach beyond it.
    """
    r, t, n, h = q.shape
    m = k.shape[2]
    if k_cache.shape[3] % SLOTS:
        raise ValueError(f"a cache of {k_cache.shape[3]} slots a row; expected a multiple of {SLOTS}")
    blocks = attention_blocks(r, t, n // m, m, window)
    splits = blocks.splits + (blocks.splits > 1)  # the last takes the new tokens
    operands = [jnp.reshape(layer, 1), starts, q, k, v, rotations, *(qk_norm or ()), k_cache, v_cache]
    cache_at = len(operands) - 2
    kernel = functools.partial(_kernel, blocks=blocks, has_norm=qk_norm is not None, eps=eps)
    caches = [jax.ShapeDtypeStruct(c.shape, c.dtype) for c in (k_cache, v_cache)]
    if splits == 1:
        outputs = [jax.ShapeDtypeStruct(q.shape, q.dtype)]
    else:
        outputs = [jax.ShapeDtypeStruct((splits, r, m, blocks.queries, width), jnp.float32) for width in (h, 1, 1)]
    *parts, new_k, new_v = pl.pallas_call(
        kernel,
        grid=(r, m, splits),
        out_shape=[*outputs, *caches],
        input_output_aliases={cache_at: len(outputs), cache_at + 1: len(outputs) + 1},
        compiler_params=plgpu.CompilerParams(num_warps=blocks.warps, num_stages=blocks.stages),
        interpret=interpret,
        name="decode_attention",
    )(*operands)
    if splits == 1:
        return parts[0], new_k, new_v
    out = pl.pallas_call(
        functools.partial(_combine, group=n // m),
        grid=(r, t, n),
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        compiler_params=plgpu.CompilerParams(num_warps=1, num_stages=1),
        interpret=interpret,
        name="combine_attention",
    )(*parts)
    return out, new_k, new_v


def _combine(sums_ref, largest_ref, totals_ref, out_ref, *, group: int):
    """One query's parts of all splits into one."""
    row, token, n = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    splits = sums_ref.shape[0]
    index = jnp.arange(power_of_two(splits), dtype=jnp.int32)
    at = (jnp.minimum(index, splits - 1), row, n // group, token * group + n % group)
    largest = largest_ref[*at, 0]
    weights = jnp.where(index < splits, jnp.exp(largest - jnp.max(largest)), 0.0)
    out = jnp.sum(sums_ref[*at, :] * weights[:, None], axis=0) / jnp.sum(totals_ref[*at, 0] * weights)
    out_ref[row, token, n, :] = out.astype(out_ref.dtype)


def _kernel(layer_ref, starts_ref, q_ref, k_ref, v_ref, rotations_ref, *refs, blocks, has_norm: bool, eps: float):
    refs = list(refs)
    q_norm, k_norm = (refs.pop(0), refs.pop(0)) if has_norm else (None, None)
    k_cache, v_cache, *outputs, k_out, v_out = refs
    _, t, n, h = q_ref.shape
    m = k_ref.shape[2]
    group, half = n // m, h // 2
    row, head, split = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    layer, start = layer_ref[0], starts_ref[row]
    low, high = pl.ds(0, half), pl.ds(half, half)

    def load(ref, token: Array, heads: Array, norm) -> tuple[Array, ...]:
        """What :func:`rotated` needs. All of it is asked for first, as the compiler moves no load over a sum."""
        halves = [ref[row, token, heads, half] for half in (low, high)]
        turns = [rotations_ref[row, token, half] for half in (low, high)]
        return (*halves, *turns, *(() if norm is None else (norm[layer, low], norm[layer, high])))

    def rotated(first: Array, second: Array, cos: Array, sin: Array, *norm: Array) -> tuple[Array, Array]:
        """Both halves of the heads, [.., H/2] each, normed and rotated; float32."""
        first, second = first.astype(jnp.float32), second.astype(jnp.float32)
        if norm:
            squares = jnp.sum(first * first, axis=1) + jnp.sum(second * second, axis=1)
            scale = lax.rsqrt(squares / h + eps)[:, None]
            first, second = (
                x * scale * w.astype(jnp.float32)[None, :] for x, w in zip((first, second), norm, strict=True)
            )
        return first * cos - second * sin, second * cos + first * sin

    index = jnp.arange(blocks.queries, dtype=jnp.int32)
    # Rows beyond what there is repeat the last token's, and write the same values to the same place.
    token = jnp.minimum(index // group, t - 1)
    queries = load(q_ref, token, head * group + index % group, q_norm)
    new = jnp.arange(blocks.new, dtype=jnp.int32)
    new_token = jnp.minimum(new, t - 1)

    def load_new():
        return load(k_ref, new_token, head, k_norm), v_ref[row, new_token, head, :]

    loaded = load_new() if blocks.splits > 1 else None
    q1, q2 = (x.astype(k_cache.dtype) for x in rotated(*queries))

    def attend(carry, k1, k2, values, visible):
        sums, largest, total = carry
        scores = (plgpu.dot(q1, k1.T) + plgpu.dot(q2, k2.T)) * h**-0.5
        scores = jnp.where(visible, scores, _MASKED)
        new_largest = jnp.maximum(largest, jnp.max(scores, axis=1))
        weights = jnp.exp(scores - new_largest[:, None])
        shrink = jnp.exp(largest - new_largest)
        sums = sums * shrink[:, None] + plgpu.dot(weights.astype(values.dtype), values)
        return sums, new_largest, total * shrink + jnp.sum(weights, axis=1)

    def cached(i, carry):
        at = pl.ds(pl.multiple_of(i * blocks.slots, blocks.slots), blocks.slots)
        k1, k2 = k_cache[layer, row, head, at, low], k_cache[layer, row, head, at, high]
        slot = i * blocks.slots + jnp.arange(blocks.slots, dtype=jnp.int32)
        return attend(carry, k1, k2, v_cache[layer, row, head, at, :], (slot < start)[None, :])

    carry = (
        jnp.zeros((blocks.queries, h), jnp.float32),
        jnp.full((blocks.queries,), _MASKED, jnp.float32),
        jnp.zeros((blocks.queries,), jnp.float32),
    )
    # Every block of a split holds a visible slot: a row of nothing but masked scores would count each of them.
    num_blocks = pl.cdiv(start, blocks.slots)
    share = pl.cdiv(num_blocks, blocks.splits)
    carry = lax.fori_loop(
        jnp.minimum(split * share, num_blocks), jnp.minimum((split + 1) * share, num_blocks), cached, carry
    )

    def with_new(carry):
        """Take in the new tokens, and write them to the cache."""
        keys, values = loaded or load_new()
        k1, k2, values = (x.astype(k_out.dtype) for x in (*rotated(*keys), values))
        for ref, part, value in ((k_out, low, k1), (k_out, high, k2), (v_out, pl.ds(0, h), values)):
            ref[layer, row, head, start + new_token, part] = value
        visible = (new[None, :] <= token[:, None]) & (new < t)[None, :]
        return attend(carry, k1, k2, values, visible)

    if blocks.splits == 1:
        carry = with_new(carry)
    else:
        carry = lax.cond(split == blocks.splits, with_new, lambda carry: carry, carry)
    sums, largest, total = carry
    if blocks.splits == 1:
        outputs[0][row, token, head * group + index % group, :] = (sums / total[:, None]).astype(outputs[0].dtype)
    else:
        for ref, value in zip(outputs, (sums, largest[:, None], total[:, None]), strict=True):
            ref[split, row, head] = value
