"""The cache: every write lands where it should and nowhere else, in place."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pard_jax.models import KVCache
from pard_jax.models.cache import _slice_rows, _write_slots

L, B, M, S, H = 3, 5, 2, 24, 4


def random_cache(seed: int, dtype=jnp.float32) -> KVCache:
    rng = np.random.default_rng(seed)
    k, v = (jnp.asarray(rng.standard_normal((L, B, M, S, H)), dtype) for _ in range(2))
    return KVCache(k, v)


@pytest.mark.parametrize("layer", [0, 2])
@pytest.mark.parametrize(
    ("first_row", "starts", "width"),
    [
        (0, [0], 1),
        (4, [S - 6], 6),  # one row, up to the very last slot
        (2, [7], 5),
        (0, [0, 3, S - 4, 11, 9], 4),  # all rows, one up to the last slot
        (1, [5, 5, S - 1], 1),
        (3, [0, S - 8], 8),
    ],
)
def test_write_equals_a_loop(layer, first_row, starts, width):
    cache = random_cache(0)
    rng = np.random.default_rng(1)
    new = rng.standard_normal((2, len(starts), M, width, H)).astype(np.float32)
    expected = [np.array(cache.k), np.array(cache.v)]
    for which in range(2):
        for r, start in enumerate(starts):
            for m in range(M):
                for t in range(width):
                    expected[which][layer, first_row + r, m, start + t] = new[which, r, m, t]
    written = jax.jit(KVCache.write)(
        cache, jnp.int32(layer), jnp.int32(first_row), jnp.asarray(starts, jnp.int32), *map(jnp.asarray, new)
    )
    np.testing.assert_array_equal(written.k, expected[0])
    np.testing.assert_array_equal(written.v, expected[1])


@pytest.mark.parametrize(("first_row", "starts"), [(0, [0]), (4, [S - 1]), (0, [0, 3, S - 1, 11, 9]), (2, [5, 5])])
def test_single_slots_as_tpus_write_them(first_row, starts):
    cache, new = random_cache(0).k, random_cache(1).k[0, : len(starts), :, :1]
    arguments = (cache, jnp.int32(2), jnp.int32(first_row), jnp.asarray(starts, jnp.int32), new)
    expected = np.array(cache)
    for r, start in enumerate(starts):
        expected[2, first_row + r, :, start] = new[r, :, 0]
    np.testing.assert_array_equal(jax.jit(_write_slots)(*arguments), expected)


@pytest.mark.parametrize(
    ("rows", "starts", "width"),
    [([3, 0, 4], [0, S - 4, 7], 4), ([2], [5], 3), ([4, B, 1, B + 1], [2, 0, S - 1, 3], 1), ([B], [0], 2)],
)
def test_rows_by_their_ids(rows, starts, width):
    """Written and read in the order of the ids; an id that is no row's writes nothing."""
    cache = random_cache(0)
    new = np.random.default_rng(1).standard_normal((2, len(rows), M, width, H)).astype(np.float32)
    expected = [np.array(cache.k), np.array(cache.v)]
    for which in range(2):
        for r, (row, start) in enumerate(zip(rows, starts, strict=True)):
            if row < B:
                expected[which][1, row, :, start : start + width] = new[which, r]
    ids = jnp.asarray(rows, jnp.int32)
    written = jax.jit(KVCache.write)(cache, jnp.int32(1), ids, jnp.asarray(starts, jnp.int32), *map(jnp.asarray, new))
    np.testing.assert_array_equal(written.k, expected[0])
    np.testing.assert_array_equal(written.v, expected[1])
    k, v = written.window(jnp.int32(1), ids, len(rows), 9)
    real = [r for r, row in enumerate(rows) if row < B]
    later, _ = written.window(jnp.int32(1), ids, len(rows), 5, jnp.int32(4))
    np.testing.assert_array_equal(later, k[:, :, 4:])
    by_row = jax.jit(functools.partial(_slice_rows, window=5))(written.k, jnp.int32(1), ids, jnp.int32(4))
    np.testing.assert_array_equal(by_row, later)  # as TPUs read them
    np.testing.assert_array_equal(k[np.asarray(real, int)], expected[0][1, [rows[r] for r in real], :, :9])
    np.testing.assert_array_equal(v[np.asarray(real, int)], expected[1][1, [rows[r] for r in real], :, :9])


def test_write_takes_the_cache_dtype():
    cache = random_cache(2, jnp.bfloat16)
    new = jnp.full((1, M, 1, H), 1 + 2**-12, jnp.float32)
    written = cache.write(jnp.int32(1), jnp.int32(2), jnp.asarray([3], jnp.int32), new, -new)
    assert written.k.dtype == written.v.dtype == jnp.bfloat16
    np.testing.assert_array_equal(written.k[1, 2, :, 3].astype(jnp.float32), 1.0)
    np.testing.assert_array_equal(written.v[1, 2, :, 3].astype(jnp.float32), -1.0)


@pytest.mark.parametrize(
    ("first_row", "rows", "window", "start"), [(0, B, S, 0), (1, 3, 8, 0), (4, 1, 1, S - 1), (2, 2, 7, 5)]
)
def test_window_reads_slots_of_rows(first_row, rows, window, start):
    cache = random_cache(3)
    k, v = cache.window(jnp.int32(1), jnp.int32(first_row), rows, window, start)
    np.testing.assert_array_equal(k, cache.k[1, first_row : first_row + rows, :, start : start + window])
    np.testing.assert_array_equal(v, cache.v[1, first_row : first_row + rows, :, start : start + window])


def test_zeros_are_two_buffers():
    cache = KVCache.zeros((L, B, M, S, H), jnp.bfloat16)
    assert cache.num_slots == S
    assert cache.k.shape == cache.v.shape == (L, B, M, S, H)
    assert cache.k.dtype == cache.v.dtype == jnp.bfloat16
    assert cache.k.unsafe_buffer_pointer() != cache.v.unsafe_buffer_pointer()
    assert not np.asarray(cache.k, np.float32).any() and not np.asarray(cache.v, np.float32).any()
