"""Attention against a loop over rows, queries and heads in NumPy."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pard_jax.models.attention import attend, attend_in_blocks, block_slots


@pytest.mark.parametrize(("n", "m"), [(4, 2), (3, 1), (2, 2), (6, 3)])
def test_attend_equals_a_loop(n, m):
    r, t, w, h = 2, 3, 7, 6
    rng = np.random.default_rng(0)
    q = rng.standard_normal((r, t, n, h)).astype(np.float32)
    k, v = (rng.standard_normal((r, m, w, h)).astype(np.float32) for _ in range(2))
    mask = rng.random((r, t, w)) < 0.5
    mask[:, :, 0] = True
    expected = np.zeros((r, t, n, h))
    for row in range(r):
        for query in range(t):
            for head in range(n):
                seen = np.flatnonzero(mask[row, query])
                kv = head * m // n  # consecutive query heads share a key/value head
                scores = k[row, kv, seen].astype(np.float64) @ q[row, query, head] / np.sqrt(h)
                weights = np.exp(scores - scores.max())
                expected[row, query, head] = weights @ v[row, kv, seen] / weights.sum()
    out = attend(*map(jnp.asarray, (q, k, v, mask)))
    np.testing.assert_allclose(out, expected.reshape(r, t, n * h), atol=1e-5)


def test_masked_slots_weigh_nothing_however_large():
    rng = np.random.default_rng(1)
    q = jnp.asarray(rng.standard_normal((1, 1, 2, 4)), jnp.float32)
    k, v = (rng.standard_normal((1, 1, 3, 4)).astype(np.float32) for _ in range(2))
    mask = jnp.asarray([[[True, True, False]]])
    clean = attend(q, jnp.asarray(k), jnp.asarray(v), mask)
    k[:, :, 2], v[:, :, 2] = 1e30, -1e30
    np.testing.assert_array_equal(attend(q, jnp.asarray(k), jnp.asarray(v), mask), clean)


def test_softmax_is_float32_for_bfloat16_inputs():
    """Many equal scores: bfloat16 sums of weights would stall at 256 terms."""
    w = 2048
    q, k = jnp.zeros((1, 1, 1, 4), jnp.bfloat16), jnp.zeros((1, 1, w, 4), jnp.bfloat16)
    v = jnp.ones((1, 1, w, 4), jnp.bfloat16)
    out = attend(q, k, v, jnp.ones((1, 1, w), bool))
    assert out.dtype == jnp.bfloat16
    np.testing.assert_allclose(out.astype(jnp.float32), 1.0, atol=0.01)


@pytest.mark.parametrize("starts", [(0, 0), (1, 37), (60, 3)])
@pytest.mark.parametrize(("window", "block"), [(64, 8), (67, 8), (67, 67), (70, 64), (64, 1)])
def test_in_blocks_is_the_same_as_at_once(window, block, starts):
    """Rows of any length, windows that are no multiple of the block; what lies behind the last position is not read."""
    r, t, n, m, h = 2, 4, 6, 3, 8
    rng = np.random.default_rng(window)
    q = jnp.asarray(rng.standard_normal((r, t, n, h)), jnp.float32)
    k, v = (rng.standard_normal((r, m, window, h)).astype(np.float32) * 3 for _ in range(2))
    positions = jnp.asarray(starts, jnp.int32)[:, None] + jnp.arange(t, dtype=jnp.int32)[None, :]
    mask = jnp.arange(window)[None, None, :] <= positions[:, :, None]
    expected = attend(q, jnp.asarray(k), jnp.asarray(v), mask)
    behind = -(-(max(starts) + t) // block) * block
    k[:, :, behind:], v[:, :, behind:] = np.nan, np.nan

    def read(start):
        return tuple(jax.lax.dynamic_slice_in_dim(jnp.asarray(a), start, block, axis=2) for a in (k, v))

    got = jax.jit(lambda q, p: attend_in_blocks(q, read, p, window=window, block=block))(q, positions)
    np.testing.assert_allclose(got, expected, atol=1e-5)


def test_in_blocks_accumulates_in_float32():
    """A thousand blocks of one slot: a bfloat16 sum would stall at 256."""
    w = 1000
    q = jnp.zeros((1, 1, 1, 4), jnp.bfloat16)
    ones = jnp.ones((1, 1, 1, 4), jnp.bfloat16)
    out = attend_in_blocks(q, lambda start: (ones, ones), jnp.full((1, 1), w - 1), window=w, block=1)
    assert out.dtype == jnp.bfloat16
    np.testing.assert_allclose(out.astype(jnp.float32), 1.0, atol=0.01)


def test_only_prefill_takes_blocks():
    assert [block_slots(t, 8192) for t in (1, 13, 24, 64, 256)] == [8192, 8192, 8192, 512, 512]
    assert block_slots(256, 300) == 300
