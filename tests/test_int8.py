"""Quantization against its definition, in NumPy: the nearest of 255 integers, a scale a row."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from pard_jax.int8 import quantize, quantized_like
from pard_jax.models import make_mesh
from pard_jax.models.sharding import param_sharding


def rows(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    """Rows of very different sizes."""
    rng = np.random.default_rng(sum(shape))
    sizes = np.exp(rng.uniform(-8, 8, (*shape[:-1], 1)))
    return (rng.standard_normal(shape) * sizes).astype(dtype)


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.float16])
@pytest.mark.parametrize("xp", [np, jnp])
@pytest.mark.parametrize("shape", [(5, 64), (3, 7, 33), (4, 1)])
def test_no_weight_is_off_by_more_than_half_a_scale(shape: tuple[int, ...], xp: Any, dtype: Any):
    weight = rows(*shape, dtype=dtype)
    matrix = quantize(xp.asarray(weight))
    assert matrix.values.dtype == np.int8 and matrix.scale.dtype == np.float32
    assert matrix.shape == shape and matrix.scale.shape == shape[:-1]
    values, scale = np.asarray(matrix.values, np.float64), np.asarray(matrix.scale, np.float64)
    exact = weight.astype(np.float64)
    # The largest weight of a row is the largest integer.
    np.testing.assert_allclose(scale, np.abs(exact).max(axis=-1) / 127, rtol=1e-6)
    assert (np.abs(values).max(axis=-1) == 127).all()
    error = np.abs(exact - values * scale[..., None])
    assert (error <= scale[..., None] * (0.5 + 127 * 2.0**-23)).all()


def test_it_is_the_same_by_numpy_and_by_jax():
    """But for the scale's last bit: compiled, a division by 127 may be a product."""
    weight = rows(40, 300)
    ours, theirs = quantize(weight), jax.jit(quantize)(jnp.asarray(weight))
    np.testing.assert_allclose(ours.scale, theirs.scale, rtol=2.0**-23)
    different = ours.values != np.asarray(theirs.values)
    assert different.mean() < 1e-3
    np.testing.assert_allclose(ours.values, np.asarray(theirs.values), atol=1)


@pytest.mark.parametrize("xp", [np, jnp])
def test_rows_of_zeros_and_of_next_to_nothing(xp: Any):
    weight = np.zeros((3, 8), np.float32)
    weight[1, 2] = 1e-42  # a subnormal number, of which 1/127 is 0
    weight[2] = -3
    matrix = quantize(xp.asarray(weight))
    assert (np.asarray(matrix.scale) > 0).all()
    np.testing.assert_array_equal(np.asarray(matrix.values)[[0, 2]], [[0] * 8, [-127] * 8])
    back = np.asarray(jax.tree.map(jnp.asarray, matrix).dequantize(jnp.float32))
    np.testing.assert_allclose(back, weight, atol=1e-37, rtol=1e-6)


def test_rounding_is_to_even_and_dequantizing_rounds_once():
    weight = jnp.asarray([[127.0, 0.5, 1.5, -2.5, -0.25]])
    matrix = quantize(weight)
    np.testing.assert_array_equal(matrix.values, [[127, 0, 2, -2, 0]])
    scaled = quantize(weight * 0.3)
    exact = np.asarray(scaled.values, np.float32) * np.asarray(scaled.scale)[:, None]
    np.testing.assert_array_equal(scaled.dequantize(jnp.bfloat16), exact.astype(ml_dtypes.bfloat16))


def test_leading_axes_are_indexed_together():
    matrix = quantize(rows(3, 8, 16))
    assert matrix[1].shape == (8, 16) and matrix[1].scale.shape == (8,)
    np.testing.assert_array_equal(matrix[1:, [2, 5]].scale, matrix.scale[1:, [2, 5]])


@pytest.mark.parametrize(
    ("name", "values", "scale"),
    [
        ("q_proj", P(None, "tensor", None), P(None, "tensor")),
        ("down_proj", P(None, None, "tensor"), P(None, None)),  # a row is split, its scale everywhere
    ],
)
def test_a_scale_lies_where_its_row_does(name: str, values: P, scale: P):
    sharding = param_sharding(make_mesh(4), name)
    like = quantized_like(jax.ShapeDtypeStruct((2, 8, 12), jnp.float32, sharding=sharding))
    structs: Any = like
    assert (structs.values.sharding.spec, structs.scale.sharding.spec) == (values, scale)
    assert (structs.values.dtype, structs.values.shape) == (np.int8, (2, 8, 12))
    assert (structs.scale.dtype, structs.scale.shape) == (np.float32, (2, 8))
