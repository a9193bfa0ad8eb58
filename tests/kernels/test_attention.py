"""Attention over the cache against NumPy, by the interpreter or a GPU: its result, and what it leaves of the cache.

The oracle rounds keys and queries to bfloat16 where the kernel does (the cache's dtype), and nothing else: what is left
are the rounding of the softmax's weights and of the result, 2^-8 each of what it scales.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pard_jax.kernels.attention import decode_attention
from pard_jax.kernels.tuning import attention_blocks
from tests.kernels.where import INTERPRET

LAYERS, EPS = 3, 0.5
GARBAGE = 3e38  # close to the largest bfloat16; any weight on it, however small, shows


class Case(NamedTuple):
    """Shapes of one call."""

    t: int
    n: int
    m: int
    h: int
    slots: int
    window: int
    qk_norm: bool = False
    rows: int = 3  # of the cache; all but the last are attended from


CASES = {
    "plain": Case(t=1, n=4, m=4, h=64, slots=128, window=64),
    "speculative": Case(t=5, n=9, m=3, h=64, slots=128, window=128),
    "wide-heads-norm": Case(t=3, n=8, m=2, h=128, slots=128, window=128, qk_norm=True),
    "narrow-heads-norm": Case(t=8, n=6, m=2, h=32, slots=192, window=192, qk_norm=True, rows=4),
    "many-tokens": Case(t=24, n=4, m=2, h=32, slots=128, window=128, qk_norm=True, rows=2),
    "full-queries": Case(t=16, n=4, m=2, h=32, slots=128, window=64),
    "four-splits": Case(t=5, n=3, m=1, h=32, slots=256, window=256),
    "eight-splits-norm": Case(t=2, n=8, m=2, h=64, slots=512, window=512, qk_norm=True),
    "sixteen-splits": Case(t=1, n=2, m=2, h=32, slots=1024, window=1024, rows=2),
    "short-window-long-cache": Case(t=5, n=4, m=1, h=32, slots=1024, window=512, rows=3),
}


class Inputs(NamedTuple):
    q: jax.Array
    k: jax.Array
    v: jax.Array
    angles: np.ndarray  # [R, T, H / 2]
    k_cache: np.ndarray
    v_cache: np.ndarray
    qk_norm: tuple[jax.Array, jax.Array] | None


def bf16(a: Any) -> np.ndarray:
    return np.asarray(a, np.float32).astype(ml_dtypes.bfloat16)


def inputs_of(case: Case, starts: list[int], seed: int) -> Inputs:
    rng = np.random.default_rng(seed)
    r = case.rows - 1

    def normal(*shape: int) -> np.ndarray:
        return bf16(rng.standard_normal(shape))

    q, k, v = (jnp.asarray(normal(r, case.t, heads, case.h)) for heads in (case.n, case.m, case.m))
    positions = np.asarray(starts)[:, None] + np.arange(case.t)[None, :]
    inverse = 100.0 ** -np.linspace(0, 1, case.h // 2)
    shape = (LAYERS, case.rows, case.m, case.slots, case.h)
    k_cache, v_cache = normal(*shape), normal(*shape)
    for row, start in enumerate(starts):  # what lies behind a row's length
        k_cache[:, row, :, start:], v_cache[:, row, :, start:] = -GARBAGE, GARBAGE
    norms = (jnp.asarray(1 + normal(LAYERS, case.h) / 3), jnp.asarray(1 + normal(LAYERS, case.h) / 3))
    angles = positions[:, :, None] * inverse[None, None, :]
    return Inputs(q, k, v, angles, k_cache, v_cache, norms if case.qk_norm else None)


def run(case: Case, inputs: Inputs, layer: int, starts: list[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rotations = np.concatenate([np.cos(inputs.angles), np.sin(inputs.angles)], axis=-1)
    outputs = decode_attention(
        inputs.q, inputs.k, inputs.v, jnp.asarray(rotations, jnp.float32), jnp.asarray(inputs.k_cache),
        jnp.asarray(inputs.v_cache), np.int32(layer), jnp.asarray(starts, jnp.int32), window=case.window,
        qk_norm=inputs.qk_norm, eps=EPS, interpret=INTERPRET,
    )  # fmt: skip
    out, k_cache, v_cache = map(np.asarray, outputs)
    return out, k_cache, v_cache


def rotated(x: Any, angles: np.ndarray, norm: Any) -> np.ndarray:
    """HF's rotary embedding of ``[T, H]``, the norm before it: rotate_half, written out."""
    x = np.asarray(x).astype(np.float64)
    if norm is not None:
        x = x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + EPS) * np.asarray(norm).astype(np.float64)[None, :]
    half = x.shape[-1] // 2
    cos, sin = np.cos(np.tile(angles, (1, 2))), np.sin(np.tile(angles, (1, 2)))
    turned = np.concatenate([-x[:, half:], x[:, :half]], axis=-1)
    return x * cos + turned * sin


def check(case: Case, starts: list[int], layer: int, seed: int) -> None:
    inputs = inputs_of(case, starts, seed)
    out, k_cache, v_cache = run(case, inputs, layer, starts)
    q_norm, k_norm = (None, None) if inputs.qk_norm is None else (norm[layer] for norm in inputs.qk_norm)
    want_k, want_v = inputs.k_cache.copy(), inputs.v_cache.copy()
    for row, start in enumerate(starts):
        angles, end = inputs.angles[row], start + case.t
        for head in range(case.m):
            want_k[layer, row, head, start:end] = bf16(rotated(inputs.k[row, :, head], angles, k_norm))
            want_v[layer, row, head, start:end] = inputs.v[row, :, head]
        for head in range(case.n):
            kv = head // (case.n // case.m)
            query = bf16(rotated(inputs.q[row, :, head], angles, q_norm)).astype(np.float64)
            keys, values = (c[layer, row, kv, :end].astype(np.float64) for c in (want_k, want_v))
            scores = query @ keys.T / np.sqrt(case.h)
            scores[np.arange(end)[None, :] > start + np.arange(case.t)[:, None]] = -np.inf
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            weights /= weights.sum(axis=1, keepdims=True)
            want, magnitude = weights @ values, weights @ np.abs(values)
            error = np.abs(out[row, :, head].astype(np.float64) - want)
            # Two roundings, and a half for queries and keys that float32 rounds to a neighbour.
            assert (error <= 2.5 * 2.0**-8 * magnitude + 1e-6).all(), (row, head, error.max())
    np.testing.assert_array_equal(v_cache.view(np.uint16), want_v.view(np.uint16))
    new = np.zeros(k_cache.shape, bool)
    for row, start in enumerate(starts):
        new[layer, row, :, start : start + case.t] = True
    # Rotated in float32 and rounded: at most the neighbour of what float64 gives.
    np.testing.assert_allclose(k_cache[new].astype(np.float32), want_k[new].astype(np.float32), rtol=2.0**-7, atol=1e-5)
    np.testing.assert_array_equal(k_cache[~new].view(np.uint16), want_k[~new].view(np.uint16))


@pytest.mark.parametrize("name", CASES)
def test_attention_and_the_cache_behind_it(name: str):
    """From an empty row, inside a block of 64 slots, on its edges, and up to the last slot of the cache."""
    case = CASES[name]
    last = min(case.slots, case.window) - case.t
    places = [0, 1, 37, 63, 64, 65, last // 2, last - 1, last]
    for i, first in enumerate(places):
        starts = [first, *(places[(i + 4 * row) % len(places)] for row in range(1, case.rows - 1))]
        if max(starts) <= last:
            check(case, starts, layer=i % LAYERS, seed=i)


def test_the_cases_split_as_they_say():
    splits = {
        name: attention_blocks(c.rows - 1, c.t, c.n // c.m, c.m, c.window).splits for name, c in CASES.items()
    }  # fmt: skip
    assert [splits[name] for name in ("plain", "four-splits", "eight-splits-norm", "sixteen-splits")] == [1, 4, 8, 16]


@pytest.mark.parametrize("slots", [100, 150])
def test_slots_that_fill_no_block_are_refused(slots: int):
    """The last block of 64 slots would overhang the cache."""
    case = Case(t=2, n=2, m=2, h=32, slots=slots, window=slots)
    with pytest.raises(ValueError, match=f"a cache of {slots} slots a row; expected a multiple of 64"):
        run(case, inputs_of(case, [3, 70], 0), 0, [3, 70])


def test_one_length_after_the_other_is_one_program():
    case = CASES["plain"]
    jitted: Any = decode_attention
    sizes = []
    for start in (0, 5, 100):
        inputs = inputs_of(case, [start, start], 0)
        for layer in range(LAYERS):
            run(case, inputs, layer, [start, start])
        sizes.append(jitted._cache_size())
    assert len(set(sizes)) == 1


def test_a_cache_of_another_dtype_takes_what_it_can_hold():
    """bfloat16 activations over a float32 cache: keys and values are kept as they are computed."""
    case = Case(t=2, n=4, m=2, h=32, slots=64, window=64)
    inputs = inputs_of(case, [9, 30], 0)
    wide = inputs._replace(k_cache=inputs.k_cache.astype(np.float32), v_cache=inputs.v_cache.astype(np.float32))
    out, k_cache, v_cache = run(case, wide, 1, [9, 30])
    assert k_cache.dtype == v_cache.dtype == np.float32 and out.dtype == ml_dtypes.bfloat16
    for head in range(case.m):
        want = rotated(inputs.k[0, :, head], inputs.angles[0], None)
        np.testing.assert_allclose(k_cache[1, 0, head, 9:11], want, rtol=1e-5, atol=1e-5)
        np.testing.assert_array_equal(v_cache[1, 0, head, 9:11], np.asarray(inputs.v[0, :, head], np.float32))
