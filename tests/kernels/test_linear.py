"""Matrix products of a few rows against NumPy, by the interpreter or a GPU.

Inputs are bfloat16 (unit roundoff u = 2^-8), the oracle is float64, and every tolerance is a bound, not a guess: one
rounding of the result, one of ``x * norm`` where there is a norm, and the order of float32 sums.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from pard_jax.int8 import Int8Matrix
from pard_jax.kernels.linear import MAX_ROWS, Normed, fits_linear, linear, linear_argmax, normed
from tests.kernels.where import INTERPRET

U = {jnp.bfloat16: 2.0**-8, jnp.float32: 2.0**-24, jnp.float16: 2.0**-11}
LAYERS = 3
EPS = 0.5  # of the order of the mean square, so that it counts


def normal(rng: np.random.Generator, *shape: int, dtype: Any = jnp.bfloat16) -> jnp.ndarray:
    return jnp.asarray(rng.standard_normal(shape), dtype)


def int8(rng: np.random.Generator, *shape: int) -> Int8Matrix:
    """Every integer there is, and scales of very different sizes."""
    values, scale = rng.integers(-127, 128, shape), np.exp(rng.uniform(-8, -2, shape[:-1]))
    return Int8Matrix(jnp.asarray(values, jnp.int8), jnp.asarray(scale, jnp.float32))


def wide(a: Any) -> np.ndarray:
    if isinstance(a, Int8Matrix):
        return wide(a.values) * wide(a.scale)[..., None]
    return np.asarray(a).astype(np.float64)


def product(x: Any, weight: Any, norm: Any = None, bias: Any = None) -> tuple[np.ndarray, np.ndarray]:
    """The exact product and a bound of what rounding does to it before the result is rounded."""
    x, weight = wide(x), wide(weight)
    rounded = 0.0
    if norm is not None:
        x = x / np.sqrt((x * x).mean(axis=1, keepdims=True) + EPS) * wide(norm)[None, :]
        rounded = U[jnp.bfloat16]
    magnitude = np.abs(x) @ np.abs(weight).T
    value = x @ weight.T
    if bias is not None:
        value = value + wide(bias)[None, :]
    return value, magnitude * (rounded + x.shape[1] * U[jnp.float32]) + 1e-6


def check(got: Any, value: np.ndarray, bound: np.ndarray, dtype: Any = jnp.bfloat16) -> None:
    assert got.dtype == dtype and got.shape == value.shape
    error = np.abs(wide(got) - value)
    assert (error <= 1.01 * (bound + U[dtype] * (np.abs(value) + bound))).all(), error.max()


@pytest.mark.parametrize(
    ("rows", "matrix"), [*((rows, normal) for rows in (1, 5, 16, 17, 40, 130)), (1, int8), (17, int8)]
)
def test_products_of_several_matrices_of_different_widths(rows: int, matrix: Any):
    """Query, key and value projections: the norm, the biases, and the layer that was asked for."""
    rng = np.random.default_rng(rows)
    x, norm = normal(rng, rows, 192), normal(rng, LAYERS, 192)
    weights = [matrix(rng, LAYERS, width, 192) for width in (96, 32, 48)]
    biases = [normal(rng, LAYERS, w.shape[1]) for w in weights]
    for layer in range(LAYERS):
        outputs = linear(normed(x, norm[layer]), weights, np.int32(layer), eps=EPS, biases=biases, interpret=INTERPRET)
        assert len(outputs) == 3
        for got, weight, bias in zip(outputs, weights, biases, strict=True):
            check(got, *product(x, weight[layer], norm[layer], bias[layer]))


@pytest.mark.parametrize(
    ("rows", "with_bias", "matrix"),
    [(1, True, normal), (5, False, normal), (17, True, normal), (130, False, normal), (5, True, int8)],
)
def test_the_residual_is_added_before_the_one_rounding(rows: int, with_bias: bool, matrix: Any):
    rng = np.random.default_rng(rows)
    x, weight, residual = normal(rng, rows, 128), matrix(rng, LAYERS, 64, 128), normal(rng, rows, 64)
    bias = normal(rng, LAYERS, 64) if with_bias else None
    for layer in range(LAYERS):
        biases = None if bias is None else [bias]
        (got,) = linear(x, [weight], np.int32(layer), residual=residual, biases=biases, interpret=INTERPRET)
        value, bound = product(x, weight[layer], bias=None if bias is None else bias[layer])
        check(got, value + wide(residual), bound)


@pytest.mark.parametrize(("rows", "width"), [(1, 576), (5, 64), (40, 192), (130, 48)])
def test_a_norm_begins_with_the_product_before_it(rows: int, width: int):
    """Its weights and the sums of squares, of the product as it was rounded; the product itself is unchanged."""
    rng = np.random.default_rng(rows)
    x, weight, residual = normal(rng, rows, 128), normal(rng, LAYERS, width, 128), normal(rng, rows, width)
    norm = normal(rng, LAYERS + 1, width)
    for layer in range(LAYERS):
        (alone,) = linear(x, [weight], np.int32(layer), residual=residual, interpret=INTERPRET)
        got, on_its_way = linear(
            x, [weight], np.int32(layer), residual=residual, next_norm=(norm, np.int32(layer + 1)), interpret=INTERPRET
        )
        assert isinstance(on_its_way, Normed)
        np.testing.assert_array_equal(wide(got), wide(alone))
        check(on_its_way.rows, wide(got) * wide(norm[layer + 1])[None, :], np.zeros((rows, width)))
        squares = wide(on_its_way.squares).sum(axis=1)
        np.testing.assert_allclose(squares, (wide(got) ** 2).sum(axis=1), rtol=width * U[jnp.float32])


def test_a_norm_over_two_products():
    rng = np.random.default_rng(7)
    x, first, second = normal(rng, 5, 128), normal(rng, 1, 192, 128), normal(rng, 1, 32, 192)
    norm = normal(rng, 1, 192)
    stream, on_its_way = linear(x, [first], np.int32(0), next_norm=(norm, np.int32(0)), interpret=INTERPRET)
    (got,) = linear(on_its_way, [second], np.int32(0), eps=EPS, interpret=INTERPRET)
    check(got, *product(stream, second[0], norm[0]))


@pytest.mark.parametrize(
    ("rows", "with_bias", "matrix"),
    [(1, True, normal), (5, False, normal), (17, True, normal), (130, False, normal), (5, True, int8)],
)
def test_the_gate_of_an_mlp(rows: int, with_bias: bool, matrix: Any):
    rng = np.random.default_rng(rows)
    # Narrow enough for gates on both sides of 0 where the sigmoid is neither 0 nor 1.
    x, norm = normal(rng, rows, 64), normal(rng, LAYERS, 64) / 8
    weights = [matrix(rng, LAYERS, 80, 64) for _ in range(2)]
    biases = [normal(rng, LAYERS, 80) for _ in range(2)] if with_bias else None
    for layer in range(LAYERS):
        rows_in = normed(x, norm[layer])
        outputs = linear(rows_in, weights, np.int32(layer), eps=EPS, biases=biases, gated=True, interpret=INTERPRET)
        assert len(outputs) == 1
        (gate, of_gate), (up, of_up) = (
            product(x, w[layer], norm[layer], None if biases is None else biases[i][layer])
            for i, w in enumerate(weights)
        )
        silu = gate / (1 + np.exp(-gate))
        # The slope of silu is at most 1.1.
        bound = 1.1 * of_gate * (np.abs(up) + of_up) + np.abs(silu) * of_up
        check(outputs[0], silu * up, bound)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16])
def test_the_output_may_have_another_dtype(dtype: Any):
    rng = np.random.default_rng(0)
    x, weight = normal(rng, 5, 256), normal(rng, 1, 48, 256)
    (got,) = linear(x, [weight], np.int32(0), out_dtype=dtype, interpret=INTERPRET)
    check(got, *product(x, weight[0]), dtype)


@pytest.mark.parametrize("depth", [64, 128, 192, 256, 640, 768])
def test_depths_of_one_and_of_several_turns(depth: int):
    rng = np.random.default_rng(depth)
    x, norm, weight = normal(rng, 3, depth), normal(rng, 1, depth), normal(rng, 1, 32, depth)
    (got,) = linear(normed(x, norm[0]), [weight], np.int32(0), eps=EPS, interpret=INTERPRET)
    check(got, *product(x, weight[0], norm[0]))


@pytest.mark.parametrize("width", [8448, 8464, 16896])
def test_wide_matrices_of_larger_blocks(width: int):
    """Blocks of 32 and 64 columns, and of 16 where the width is a multiple of no more."""
    rng = np.random.default_rng(width)
    x, weight = normal(rng, 5, 64), normal(rng, 1, width, 64)
    (got,) = linear(x, [weight], np.int32(0), interpret=INTERPRET)
    check(got, *product(x, weight[0]))


def test_float16_is_refused():
    """It ends at 65504: a stream of 4000 times a gain of 20 would overflow before the norm's scale is applied."""
    x, weight = jnp.ones((3, 64), jnp.float16), jnp.ones((1, 16, 64), jnp.float16)
    with pytest.raises(ValueError, match="the rows are float16; expected bfloat16"):
        linear(x, [weight], np.int32(0), interpret=INTERPRET)


def integers(rng: np.random.Generator, *shape: int) -> jnp.ndarray:
    """Numbers whose products and sums are exact in float32, so that equal scores are equal."""
    return jnp.asarray(rng.integers(-2, 3, shape), jnp.bfloat16)


@pytest.mark.parametrize("rows", [1, 5, 16, 17, 40, 130])
def test_argmax_is_the_first_of_the_largest(rows: int):
    rng = np.random.default_rng(rows)
    x, weight = integers(rng, rows, 64), integers(rng, 176, 64)
    scores = wide(x) @ wide(weight).T
    assert (rows < 5) or ((scores == scores.max(axis=1, keepdims=True)).sum(axis=1) > 1).any()  # ties by chance, too
    got = linear_argmax(x, weight, limit=176, interpret=INTERPRET)
    assert got.dtype == jnp.int32
    np.testing.assert_array_equal(got, scores.argmax(axis=1))


@pytest.mark.parametrize("at", [(3, 4), (0, 15), (15, 16), (17, 100), (5, 21, 37), (127, 143)])
def test_argmax_of_equals_within_a_block_and_across(at: tuple[int, ...]):
    """The best row of the matrix stands at several places: blocks are 16 wide here."""
    rng = np.random.default_rng(0)
    x, weight = integers(rng, 4, 64), np.array(integers(rng, 144, 64))
    x = jnp.broadcast_to(x[:1], x.shape)
    weight[list(at)] = 3 * np.sign(wide(x[0]))
    got = linear_argmax(x, jnp.asarray(weight), limit=144, interpret=INTERPRET)
    np.testing.assert_array_equal(got, at[0])


@pytest.mark.parametrize(("limit", "matrix"), [*((n, normal) for n in (1, 7, 17, 48, 144)), (17, int8), (144, int8)])
def test_argmax_below_a_limit(limit: int, matrix: Any):
    rng = np.random.default_rng(limit)
    x, weight = normal(rng, 21, 64), matrix(rng, 144, 64)
    scores = wide(x) @ wide(weight).T
    got = linear_argmax(x, weight, limit=limit, interpret=INTERPRET)
    np.testing.assert_array_equal(got, scores[:, :limit].argmax(axis=1))
    if limit < 144:
        assert (scores.argmax(axis=1) >= limit).any()  # the limit hides something


def test_argmax_of_scores_that_are_all_below_zero():
    """Rows and columns that do not exist have scores of 0; they may not win."""
    rng = np.random.default_rng(0)
    x, weight = -abs(normal(rng, 5, 64)), abs(normal(rng, 144, 64))
    scores = wide(x) @ wide(weight).T
    assert scores.max() < 0
    got = linear_argmax(x, weight, limit=100, interpret=INTERPRET)
    np.testing.assert_array_equal(got, scores[:, :100].argmax(axis=1))


def test_argmax_of_larger_blocks():
    rng = np.random.default_rng(0)
    x, weight = integers(rng, 6, 64), integers(rng, 16896, 64)
    scores = wide(x) @ wide(weight).T
    for limit in (16896, 9000):
        got = linear_argmax(x, weight, limit=limit, interpret=INTERPRET)
        np.testing.assert_array_equal(got, scores[:, :limit].argmax(axis=1))


@pytest.mark.parametrize(
    ("sizes", "fits"),
    [
        ((1, 64, 16), True),
        ((MAX_ROWS, 576, 49152), True),
        ((MAX_ROWS + 1, 576, 49152), False),
        ((1, 96, 16), False),
        ((1, 32, 16), False),
        ((1, 64, 24), False),
        ((1, 4096, 151936), True),
        ((1, 4096, 49153), False),
    ],
)
def test_what_fits(sizes: tuple[int, int, int], fits: bool):
    assert fits_linear(*sizes) is fits
