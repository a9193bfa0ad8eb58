"""Attention against a loop over rows, queries and heads in NumPy."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from pard_jax.models.attention import attend


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
