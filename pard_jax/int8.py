"""Matrices of 8-bit integers with a scale for each output channel: half of bfloat16's bytes, to within 1/254 of a row.

Weights alone are quantized, symmetrically; activations stay as they are, and whatever multiplies such a matrix converts
integers as it reads them and applies the scale to the sums. The scale is float32, as the sums are: it is 1/width of the
weights, and a bfloat16 would add half as much error again.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float32, Int8

from pard_jax.pytree import pytree

_LARGEST = 127  # -128 is left out: what is negated stays representable
_SMALLEST_SCALE = float(np.finfo(np.float32).tiny)  # of rows of zeros, which nothing may be divided by


@pytree
class Int8Matrix:
    """``values * scale[..., None]``, as HF orients matrices: output channels, then inputs; stacked or not."""

    values: Int8[Array, "*L O I"]
    scale: Float32[Array, "*L O"]

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the matrix."""
        return self.values.shape

    def __getitem__(self, index: Any) -> Int8Matrix:
        """Of the leading axes: a layer, rows of a table."""
        return Int8Matrix(self.values[index], self.scale[index])

    def dequantize(self, dtype: Any) -> Array:
        """The matrix it stands for, rounded to ``dtype`` once."""
        return (self.values.astype(jnp.float32) * self.scale[..., None]).astype(dtype)


def quantize(weight: Any) -> Int8Matrix:
    """The nearest integers to ``weight [..., O, I]``, a JAX or a NumPy array, at scales that the largest just fit.

    No weight is off by more than half of its row's scale, which is the row's largest magnitude / 127.
    """
    xp = weight.__array_namespace__()
    wide = weight.astype(np.float32)
    scale = xp.maximum(xp.abs(wide).max(axis=-1) / _LARGEST, np.float32(_SMALLEST_SCALE))
    return Int8Matrix(xp.round(wide / scale[..., None]).astype(np.int8), scale)


def quantized_like(weight: jax.ShapeDtypeStruct) -> Int8Matrix:
    """Shapes, dtypes and shardings of :func:`quantize`'s result: a scale lies where its output channel does."""
    sharding = weight.sharding
    of_scale = sharding
    if isinstance(sharding, NamedSharding):
        of_scale = NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[: len(weight.shape) - 1]))
    values: Any = jax.ShapeDtypeStruct(weight.shape, jnp.int8, sharding=sharding)
    scale: Any = jax.ShapeDtypeStruct(weight.shape[:-1], jnp.float32, sharding=of_scale)
    return Int8Matrix(values, scale)
